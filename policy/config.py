"""What a decoder is, as data. Frozen, hashable and free of jax, so that it can be checked before anything slow starts.

A decoder is an embedding, a tuple of stacks, a final norm and a head. A stack repeats a pattern of layers; the weights of its
repeats are stacked along axis 0 and scanned. An absent part is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout

MOST_PERMUTED = 5  # streams of HyperConnections.variant "lite"


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. `scale` says how the weight w acts on r = x * rsqrt(mean(x^2) + eps), computed in float32.

    after_cast: r.astype(dtype) * w. zero_centred: (r * (1 + w)).astype(dtype). before_cast: (r * w).astype(dtype).
    none: r.astype(dtype), no weight.
    """

    eps: float = 1e-6
    scale: Literal["after_cast", "zero_centred", "before_cast", "none"] = "after_cast"


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) * rsqrt(variance + eps) * weight + bias; mean and variance in float32, or in the activation dtype."""

    eps: float = 1e-5
    reductions: Literal["float32", "activation"] = "float32"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `dim` dimensions: base frequencies theta^(-2i/dim), rescaled by `scaling`.

    `interleaved` rotates the pairs (2i, 2i+1), otherwise (i, i + dim/2).
    """

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """`attention_factor` multiplies cos and sin."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `fraction` of the frequencies turn; the other pairs stay as they are. All are divided by `factor`."""

    fraction: float
    factor: float = 1.0


@dataclass(frozen=True)
class QueryTemperature:
    """Queries grow with their position: times 1 + scale * log(1 + floor((position + 1) / floor))."""

    scale: float
    floor: float


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: query head h reads key-value head h // (heads / kv_heads).

    A query sees at most `window` tokens back (itself counted), or only its own `chunk` of so many positions. `qk_norm` acts on
    each head before rotation, on all heads of a token together, or on each head after rotation. `softcap` c bounds scores by
    c tanh(s / c). `sinks`: one learned score for each head that takes part in the softmax and stands for no token. `gate`: the
    output is multiplied by a sigmoid of a second query projection. `values_are_keys`: no value projection; values are the
    projected keys before their norm and rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "all_heads", "rotated_head"] = "head"
    v_norm: Norm | None = None
    values_are_keys: bool = False
    bias: bool = False
    out_bias: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    temperature: QueryTemperature | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are read from one small latent per token."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    norm: Norm = Norm(eps=1e-6)
    bias: bool = False
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Indexer:
    """Chooses the `topk` keys that a query of latent attention may see (arXiv 2512.02556): the largest sum over `heads` of
    w_h relu(q_h . k / sqrt(head_dim)), with q from the query latent, one key of `head_dim` a token, and w from the token."""

    heads: int
    head_dim: int
    topk: int
    rope: Rope
    norm: LayerNorm = LayerNorm(eps=1e-6)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net (arXiv 2412.06464, equation 10): linear attention with a state S [key_dim, value_dim] for each value head.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.  g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), and
    q, k of unit length, q times key_dim^-1/2. q, k and v pass a causal depthwise convolution over `conv_width` tokens and a
    silu first; o is normed over value_dim and multiplied by silu(z). Value head h reads key head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"GatedDeltaNet: {self.value_heads} value heads cannot be shared by {self.key_heads} key heads"
            )


Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "linear"]


@dataclass(frozen=True)
class Mlp:
    """Feed-forward of width `width`; gated: down(act(gate(x)) * up(x)), plain: down(act(up(x)))."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Matrix:
    """Feed-forward of one square matrix: x W."""


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights. Scores are float32.

    score: softmax over all experts, or a sigmoid of each. `bias` is part of the scores, `correction_bias` is added for the choice
    only. With groups, the experts of the `topk_groups` best groups are eligible; a group's score is its largest (`max`) or the
    sum of its two largest (`top2`). `renormalize` divides the chosen weights by their sum (+ 1e-20 for sigmoid scores); `scale`
    multiplies them, and `expert_scale` a learned number for each expert. `input_norm` is a norm of the router's own; its result
    is divided by sqrt(hidden size).
    """

    experts: int
    experts_per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    correction_bias: bool = False
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalize: bool = True
    scale: float = 1.0
    input_norm: Norm | None = None
    expert_scale: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between -limit and limit."""

    limit: float
    alpha: float = 1.702


@dataclass(frozen=True)
class Moe:
    """Mixture of gated experts of width `width`, plus shared experts (one gated feed-forward that every token passes).

    `shared_gate` multiplies the shared experts by a sigmoid of one projection. `weigh` says what a router's weight multiplies:
    the expert's output or its input. With `clamp` the experts compute ClampedSwiglu instead of act(gate) * up.
    """

    router: Router
    width: int
    shared: Mlp | None = None
    activation: Activation = "silu"
    bias: bool = False
    shared_gate: bool = False
    weigh: Literal["output", "input"] = "output"
    clamp: ClampedSwiglu | None = None


@dataclass(frozen=True)
class DenseAndExperts:
    """A dense feed-forward beside a mixture of experts, each between two norms of its own, added up. The router sees the input
    without a norm."""

    dense: Mlp
    experts: Moe
    norm: Norm


NormName = Literal[
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
]
PRE_NORM: tuple[NormName, ...] = ("input_layernorm", "pre_feedforward_layernorm")
POST_NORM: tuple[NormName, ...] = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORM = PRE_NORM + POST_NORM


@dataclass(frozen=True)
class Engram:
    """Hashed n-gram memory (arXiv 2601.07372): vectors that are looked up by the last tokens, gated by the stream and added to it.

    The n-gram of n = 2..N tokens ending at a token is hashed to XOR_j multipliers[j] id_j, j tokens back, and modulo each of
    `primes[n - 2]` it is a row of one table of rows of `head_dim` numbers: N = len(multipliers). `ids` counts the classes of
    tokens that the memory tells apart, and `pad_id` is the class that stands for what lies before a document. `integers` are
    those of the product. The values pass a causal depthwise convolution over `kernel_size` tokens that are N apart. `norm` is of
    keys and streams, `conv_norm` before the convolution, `outer_norm` (None: none) before everything.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    head_dim: int
    kernel_size: int
    ids: int
    pad_id: int
    integers: Literal["int32", "int64"]
    norm: Norm
    conv_norm: Norm
    outer_norm: Norm | None

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the table that each head has, in order."""
        return tuple(prime for order in self.primes for prime in order)

    @property
    def history(self) -> int:
        """Tokens before the current one that the convolution reaches."""
        return (self.kernel_size - 1) * len(self.multipliers)


@dataclass(frozen=True)
class LayerSpec:
    """x += post(mixer(pre(x))); x += post(feed_forward(pre(x))), with the norms that `norms` names; an absent part adds nothing.

    input_layernorm stands before the mixer and post_attention_layernorm on its output; pre_ and post_feedforward_layernorm do
    the same for the feed-forward. `parallel`: both parts read the same normed input, x += mixer(h) + feed_forward(h). Without
    `residual` a part's output replaces x. `scalar`: the result is multiplied by one stored number, which is not trained. What
    `engram` looks up is added to x before all that.
    """

    mixer: Attention | LatentAttention | GatedDeltaNet | None
    feed_forward: Mlp | Matrix | Moe | DenseAndExperts | None
    norms: tuple[NormName, ...] = PRE_NORM
    parallel: bool = False
    residual: bool = True
    scalar: bool = False
    engram: Engram | None = None

    @property
    def moe(self) -> Moe | None:
        """The mixture of experts of the feed-forward, if it has one."""
        part = self.feed_forward.experts if isinstance(self.feed_forward, DenseAndExperts) else self.feed_forward
        return part if isinstance(part, Moe) else None


@dataclass(frozen=True)
class Stack:
    pattern: tuple[LayerSpec, ...]
    repeats: int


@dataclass(frozen=True)
class HyperConnections:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): the stream of a token is `streams` vectors, read as a weighted
    sum, written with weights, and mixed by a doubly stochastic matrix, all of them found from the streams themselves.

    `variant` says where the matrix comes from: `sinkhorn`, `sinkhorn_iterations` rounds of normalised columns and rows, with
    `eps` added to each sum; `lite`, an exact mixture of all permutations. `reduce`: the final norm reads the sum of the streams,
    or weights them by a head of its own. The mappings read the streams through a norm, with a weight of its own or without.
    """

    streams: int = 4
    variant: Literal["sinkhorn", "lite"] = "sinkhorn"
    sinkhorn_iterations: int = 20
    eps: float = 1e-6
    reduce: Literal["sum", "head"] = "sum"
    norm_weight: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self):
        if self.streams < 1 or self.sinkhorn_iterations < 1:
            raise ValueError("streams and sinkhorn_iterations must be at least 1")
        if self.variant == "lite" and self.streams > MOST_PERMUTED:
            raise ValueError(
                f"variant lite mixes all permutations of the streams, so at most {MOST_PERMUTED} (120 permutations)"
            )


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Modules that predict the tokens after the next one (arXiv 2412.19437, section 2.2): module d = 1..`depth` joins the state
    of a position with the embedding of the token d places on, passes one `layer`, and predicts the token d + 1 places on.

    `input` says which states the first module reads: those after the decoder's final norm, as released files want it, or those
    before. `final_norm`: each module has a norm of its own before the shared head; without, it is the decoder's.
    """

    depth: int
    layer: LayerSpec
    input: Literal["post_norm", "pre_norm"] = "post_norm"
    final_norm: bool = True

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(f"multi_token_prediction: depth must be at least 1, got {self.depth}")


@dataclass(frozen=True)
class LearnedPositions:
    """A trained vector for each of `length` positions, added to the embedding."""

    length: int


@dataclass(frozen=True)
class SinusoidPositions:
    """[sin | cos] of wavelengths from 2 pi to 1e4 * 2 pi, added to the embedding (arXiv 1706.03762, section 3.5)."""


@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder. `family` names the file in policy/families/ and `hf` holds the Hugging Face configuration as JSON.

    `logit_softcap` c bounds logits by c tanh(z / c), before any temperature.
    """

    vocab_size: int
    hidden_size: int
    stacks: tuple[Stack, ...]
    norm: Norm | LayerNorm
    family: str
    hf: str
    tied_head: bool = False
    embedding_scale: float = 1.0
    positions: tuple[LearnedPositions | SinusoidPositions, ...] = ()
    logit_softcap: float | None = None
    initializer_range: float = 0.02
    hyper_connections: HyperConnections | None = None
    multi_token_prediction: MultiTokenPrediction | None = None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers one by one, from the embedding to the final norm."""
        return tuple(spec for stack in self.stacks for _ in range(stack.repeats) for spec in stack.pattern)

    def numbers(self, path: str) -> list[int]:
        """The layers, counted from 0, whose weights are stacked at `path`, "stacks.S.layers.I"."""
        _, s, _, i = path.split(".")
        before, stack = self.stacks[: int(s)], self.stacks[int(s)]
        first = sum(len(each.pattern) * each.repeats for each in before) + int(i)
        return [first + r * len(stack.pattern) for r in range(stack.repeats)]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Every rotary embedding that some layer uses, once."""
        specs = (*self.layers, *([self.multi_token_prediction.layer] if self.multi_token_prediction else []))
        parts = (part for spec in specs for part in (spec.mixer, getattr(spec.mixer, "indexer", None)))
        return tuple(dict.fromkeys(part.rope for part in parts if getattr(part, "rope", None) is not None))

    @property
    def max_positions(self) -> int | None:
        """Positions that the decoder has a trained vector for; None: no limit of that kind."""
        return next((table.length for table in self.positions if isinstance(table, LearnedPositions)), None)


# Training rules: types of weights, activations and gradients. fp8: e4m3 for all; fp8_full: e5m2 for gradients.
Quantization = Literal["int8", "fp8", "fp8_full"]
# Types of stored weights and cache entries; fp8 is e4m3.
StoredType = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Runtime:
    """How a decoder is computed, apart from what it computes.

    `remat` is a policy of policy/remat.py, or none, and `remat_tensors` are what "custom" keeps, as (name, memory). More than
    `attention_chunk` queries are taken in chunks. `record` names what each layer adds to the Aux. `indexer`: what an indexer of
    keys learns from when there is no cache, if anything (policy/attention/sparse_attention.py); attention is dense during its
    warm-up. `mtp`: log-probabilities come with those of the prediction modules, whose gradient reaches everything (joint) or
    their own weights only (detached). `tentative`: a call over a cache may be taken back in part (policy/cache/cache.py).
    `host_parameters`: trained weights live in host memory (policy/mesh/host_memory.py); `table_memory`: where the tables of n-gram memories
    live: in that of the device, or of its host, from which only the rows that are looked up are brought. `vocab_tiles`: chunks of
    tokens whose logits are computed at a time (policy/heads/head.py); None: by size. `layout` is filled in by the Graph.
    `quantization` is the rule by which products with weights are computed in few bits (policy/ops/quantization.py).

    `expert_parallel` is the scheme of policy/experts/expert_parallel.py (auto: gather). An expert takes `capacity_factor` times its
    even share of a row at most, and a device of the scheme all_to_all `ragged_buffer_factor` times its even share of all choices;
    what is beyond is dropped. None: nothing is. They are for training, where the generator does not need the same numbers.
    `context_parallel` and `context_load_balance` say how attention works where sequences are cut over the mesh axis `context`
    (policy/attention/context_parallel.py, policy/attention/sequence_shards.py).
    `batch_split` is the schedule of policy/execution/batch_split.py. `expert_gradients`: the type in which the schemes gather and hidden send
    the gradients of what experts made; None: that of the activations.
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
        """Whether a mixture of experts may leave choices out."""
        return self.capacity_factor is not None or self.ragged_buffer_factor is not None
