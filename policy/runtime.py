"""How a decoder is computed, apart from what it computes. Frozen, hashable and free of jax at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout

# Training rules: types of weights, activations and gradients. fp8: e4m3 for all; fp8_full: e5m2 for gradients.
Quantization = Literal["int8", "fp8", "fp8_full"]
# Types of stored weights and cache entries; fp8 is e4m3.
StoredType = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Runtime:
    """The options of a decoder's computation, by topic.

    Types. `dtype` is the type of activations, `param_dtype` the type of trained weights. `quantization` is the rule by
    which products with weights are computed in few bits (policy/ops/quantization.py).

    Memory. `remat` is "none" or a policy of policy/remat.py; "custom" keeps `remat_tensors`, pairs (name, memory).
    `scan` runs the repeats of a stack in a loop. More than `attention_chunk` queries are taken in chunks.
    `host_parameters`: trained weights live in host memory (policy/mesh/host_memory.py). `table_memory`: n-gram tables
    live in the memory of the device or of its host; with "host" only the rows that are looked up reach the device.
    `vocab_tiles`: number of chunks of tokens whose logits are computed one after the other (policy/heads/head.py);
    None: chosen by size.

    Outputs. `record` names what each layer adds to the Aux. `indexer`: what an indexer of keys is trained on when there
    is no cache (policy/attention/sparse_attention.py); attention is dense during its warm-up. `mtp`: the decoder also
    returns the log-probabilities of its prediction modules, whose gradient reaches all weights (joint) or the modules'
    own weights only (detached). `tentative`: part of a call over a cache may be taken back (policy/cache/cache.py).

    Mesh. `layout` is set by the Graph. `expert_parallel` is the scheme of policy/experts/expert_parallel.py (auto:
    gather). An expert takes at most `capacity_factor` times its even share of a row, and a device of the scheme
    all_to_all takes at most `ragged_buffer_factor` times its even share of all choices; choices beyond are dropped.
    With None nothing is dropped. Both are for training, where the generator need not compute the same numbers.
    `expert_gradients`: the type in which the schemes gather and hidden send the gradients of expert outputs; None: the
    type of the activations. `batch_split` turns on the schedule of policy/execution/batch_split.py. `context_parallel`
    and `context_load_balance` say how attention works where sequences are cut over the mesh axis `context`
    (policy/attention/context_parallel.py, policy/attention/sequence_shards.py).
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: str = "full"
    remat_tensors: tuple[tuple[str, str], ...] = ()
    scan: bool = True
    attention_chunk: int = 512
    record: tuple[Literal["hidden", "activations", "selection", "routes"], ...] = ()
    indexer: Literal["off", "dense_warmup", "sparse"] = "off"
    mtp: Literal["joint", "detached"] | None = None
    tentative: bool = False
    table_memory: Literal["device", "host"] = "device"
    host_parameters: bool = False
    vocab_tiles: int | None = None
    expert_parallel: Literal["auto", "gather", "all_to_all", "hidden"] = "auto"
    capacity_factor: float | None = None
    ragged_buffer_factor: float | None = None
    context_parallel: Literal["all_gather", "ring", "ulysses"] = "all_gather"
    context_load_balance: bool = False
    batch_split: bool = False
    expert_gradients: Literal["float8_e5m2"] | None = None
    quantization: Quantization | None = None
    layout: Layout | None = None

    @property
    def drops(self) -> bool:
        """Whether a mixture of experts may drop choices."""
        return self.capacity_factor is not None or self.ragged_buffer_factor is not None
