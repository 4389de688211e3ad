"""How a decoder is computed, apart from what it computes. Frozen, hashable and free of jax at
import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from policy.adapter_spec import AdapterSpec
from policy.options import option

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout

# Training rules: types of weights, activations and gradients. fp8: e4m3 for all; fp8_full: e5m2 for
# gradients.
Quantization = Literal["int8", "fp8", "fp8_full"]
# Types of stored weights and cache entries; fp8 is e4m3.
StoredType = Literal["int8", "int4", "fp8"]
# Types of weights that no stage trains; nf4 is NormalFloat-4 (arXiv 2305.14314).
WeightType = Literal["int8", "int4", "fp8", "nf4"]
# Outputs of a layer that a call can report besides its result.
Recorded = Literal["hidden", "mixed", "activations", "selection", "routes"]


@dataclass(frozen=True)
class Runtime:
    """The options of a decoder's computation, by topic.

    Types. `dtype` is the type of activations, `param_dtype` the type of trained weights.
    `base_weights` is the type in which the weights of products are stored that nothing trains, with
    a scale for each block of `base_block` numbers (policy/programs/quantized_weights.py); None:
    `param_dtype`.
    `quantization` is the rule by which products with weights are computed in few bits
    (policy/ops/quantization.py).

    Memory. `remat` is "none" or a policy of policy/remat.py; "custom" keeps `remat_tensors`, pairs
    (name, memory). `scan` runs the repeats of a stack in a loop. More than `attention_chunk`
    queries are taken in chunks. `skip_blocks`: attention of packed rows may skip blocks of tokens
    that do not see each other (policy/attention/block_attention.py), which changes last bits. It is
    for training: the generator and the scorer of policy/programs/scoring.py never do.
    `host_parameters`: trained weights live in host memory (policy/ops/host_memory.py).
    `table_memory`: n-gram tables and the table of the embeddings for each layer live in the memory
    of the device or of its host; with "host" only the rows that are looked up reach the device.
    `train_layer_embeddings`: that table is trained. `num_vocab_tiling`: number of parts whose
    logits are computed one after the other (policy/heads/head.py: tiles of the vocabulary for
    log-probabilities, else chunks of tokens); None: chosen by size. `kept_logits_mib`: logits of a
    call that take at most so many MiB of a device are kept for its backward pass; None: a sixteenth
    of the full GiB of a device, or 0 if `num_vocab_tiling` is set. A run sets it when it first
    starts.

    Positions. `max_length` is the number of tokens of the longest sequence, by which LongRoPE
    chooses its factors. Runs and generators set it, so that trainer and generator compute the same;
    None: the longest sequence of each call.

    Outputs. `record` names what each layer adds to the Aux. `indexer`: what an indexer of keys is
    trained on when there is no cache (policy/attention/sparse_attention.py); attention is dense
    during its warm-up. `mtp`: the decoder also returns the log-probabilities of its prediction
    modules, whose gradient reaches all weights (joint) or the modules' own weights only (detached).
    `tentative`: part of a call over a cache may be taken back (policy/cache/cache.py).

    Adapter. Where the weights of a call have those of an adapter, `adapter` says how they count;
    the policy of a run with an adapter trains these alone (policy/adapters/learning.py).

    Mesh. `layout` is set by the Graph. `expert_parallel` is the scheme of
    policy/experts/expert_parallel.py (auto: gather). An expert takes at most `capacity_factor`
    times its even share of a row, and a device of the scheme all_to_all takes at most
    `ragged_buffer_factor` times its even share of all choices; choices beyond are dropped. With
    None nothing is dropped. Both are for training, where the generator need not compute the same
    numbers. `expert_gradients`: the type in which the schemes gather and hidden send the gradients
    of expert outputs; None: the type of the activations. `batch_split` turns on the schedule of
    policy/layers/batch_split.py. `context_parallel` and `context_load_balance` say how attention
    works where sequences are cut over the mesh axis `context`
    (policy/attention/context_parallel.py, policy/attention/sequence_shards.py).
    """

    dtype: Literal["float32", "bfloat16"] = option(
        "float32", description="dtype of the matrix products"
    )
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32", description="dtype in which weights are stored"
    )
    remat: str = option(
        "full",
        description="which activations are recomputed: full keeps only the input of each layer, "
        "none the results of all products; docs/memory.md describes the others",
    )
    remat_tensors: tuple[tuple[str, str], ...] = option(
        (),
        description="with remat: custom, where each tensor of docs/memory.md is saved (offload: "
        "host memory), or remat",
    )
    scan: bool = option(True, description="scan over stacked layers in training (false: unrolled)")
    attention_chunk: int = 512
    skip_blocks: bool = False
    max_length: int | None = None
    record: tuple[Recorded, ...] = ()
    indexer: Literal["off", "dense_warmup", "sparse"] = "off"
    mtp: Literal["joint", "detached"] | None = None
    tentative: bool = False
    table_memory: Literal["device", "host"] = option(
        "device",
        description="where n-gram tables and the table of Gemma 4's embeddings for each layer "
        "live; host: only the rows that are looked up are copied to the device",
    )
    train_layer_embeddings: bool = option(
        False,
        description="whether the table of Gemma 4's embeddings for each layer is trained; it is "
        "most of the weights of a small Gemma 4",
    )
    host_parameters: bool = option(
        False, description="weights live in host memory; one layer at a time is on the device"
    )
    num_vocab_tiling: int | None = option(
        None,
        ge=1,
        description="parts in which logits are computed one by one; null: chosen by size, "
        "docs/memory.md",
    )
    kept_logits_mib: int | None = option(
        None,
        ge=0,
        description="MiB per device up to which the logits of a micro-batch are kept for the "
        "backward pass, which else computes them again; null: the run sets a sixteenth of the "
        "full GiB of a device when it first starts, or 0 if num_vocab_tiling is set",
    )
    expert_parallel: Literal["auto", "gather", "all_to_all", "hidden"] = option(
        "auto",
        description="how tokens reach experts along the mesh axis `expert`, see docs/experts.md; "
        "auto: gather",
    )
    capacity_factor: float | None = None
    ragged_buffer_factor: float | None = None
    context_parallel: Literal["all_gather", "ring", "ulysses"] = option(
        "all_gather",
        description="how attention works along the mesh axis `context`, see docs/meshes.md",
    )
    context_load_balance: bool = option(
        False,
        description="each device of the axis `context` takes an early and a late part of a "
        "sequence; for all_gather and ring",
    )
    batch_split: bool = option(
        False,
        description="an update splits the rows of each device in two halves, so that in layers "
        "with experts the collectives of one run during the products of the other; the rows of a "
        "micro-batch become even on each device",
    )
    expert_gradients: Literal["float8_e5m2"] | None = option(
        None,
        description="type in which gradients are sent back to the devices of the experts (gather "
        "and hidden); null: `dtype`. It halves the bytes of bfloat16 gradients and rounds each "
        "number by up to an eighth",
    )
    base_weights: WeightType | None = option(
        None,
        description="type in which the weights of products are stored where stages train adapters "
        "alone, see quantization.md; embedding, head, routers and norms keep param_dtype; null: "
        "param_dtype",
    )
    base_block: int | None = option(
        64,
        ge=1,
        description="with base_weights: numbers along the inputs of a product that share a scale; "
        "null: all inputs of an output",
    )
    quantization: Quantization | None = option(
        None,
        description="type in which layers multiply; fp8: e4m3, fp8_full: gradients in e5m2; "
        "weights keep param_dtype",
    )
    adapter: AdapterSpec | None = None
    layout: Layout | None = None

    @property
    def drops(self) -> bool:
        """Whether a mixture of experts may drop choices."""
        return self.capacity_factor is not None or self.ragged_buffer_factor is not None
