"""The parts of a layer, as data: norms, rotary embeddings, mixers, feed-forwards, n-gram tables. An
absent part is None."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. `scale` says how the weight w acts on r = x * rsqrt(mean(x^2) + eps),
    computed in float32.

    after_cast: r.astype(dtype) * w. zero_centred: (r * (1 + w)).astype(dtype). before_cast: (r *
    w).astype(dtype). none: r.astype(dtype), no weight.
    """

    eps: float = 1e-6
    scale: Literal["after_cast", "zero_centred", "before_cast", "none"] = "after_cast"


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) * rsqrt(variance + eps) * weight + bias, with mean and variance in float32 or in
    the activation dtype; without `bias` nothing is added."""

    eps: float = 1e-5
    reductions: Literal["float32", "activation"] = "float32"
    bias: bool = True


@dataclass(frozen=True)
class LogitScaling:
    """What becomes of the product z of a state and the head: scale z, bounded by c tanh(scale z /
    c) with a soft cap c. Temperatures come after it."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `dim` dimensions: base frequencies theta^(-2i/dim),
    rescaled by `scaling`. `interleaved` rotates the pairs (2i, 2i+1), otherwise (i, i + dim/2).

    With `sections` (s0, s1, s2), tokens of pictures turn by three positions: frequency i by the
    height if i % 3 = 1 and i < 3 s1, by the width if i % 3 = 2 and i < 3 s2, otherwise by the time.
    With `blocks`, the first s0 frequencies turn by the time, the next s1 by the height and the last
    s2 by the width. Text has three equal positions.
    """

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | LongRope | None = (
        None
    )
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None
    blocks: bool = False


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): all frequencies are divided by `factor`, as by
    `rope_type: linear` of transformers."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts (arXiv 2309.00071). `attention_factor` multiplies cos and sin."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `fraction` of the frequencies rotate; the other pairs stay as they are. All
    are divided by `factor`."""

    fraction: float
    factor: float = 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): frequency i is divided by short[i] where sequences have at most
    `original_max_position` tokens, else by long[i]. `attention_factor` multiplies cos and sin.
    Runtime.max_length says how long sequences are."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float = 1.0


@dataclass(frozen=True)
class QueryTemperature:
    """A factor on queries that grows with their position: 1 + scale * log(1 + floor((position +
    offset) / floor))."""

    scale: float
    floor: float
    offset: int = 1


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: query head h reads key-value head h // (heads / kv_heads).

    A query sees at most `window` tokens back (itself counted), or only its own `chunk` of so many
    positions. `qk_norm` acts on each head before rotation, on all heads of a token together, or on
    each head after rotation. `softcap` c bounds scores by c tanh(s / c). `sinks`: one learned score
    for each head that takes part in the softmax and stands for no token. `gate`: the output is
    multiplied by a sigmoid of a second query projection. `values_are_keys`: there is no value
    projection; values are the projected keys before their norm and rotation. `looks_ahead`: the
    tokens of one picture see each other, within the window. `indexer`: a query sees only the blocks
    of keys that it chooses.

    `keeps` names the keys and values of the layer for later layers. A layer that `shares` a name
    has no keys and values of its own: it attends to those that an earlier layer keeps under the
    name, after their norms and rotation, and it stores nothing in a cache.
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
    keeps: str | None = None
    shares: str | None = None
    looks_ahead: bool = False
    indexer: BlockIndexer | None = None

    @property
    def lookback(self) -> int | None:
        """Returns how many tokens a query looks back at most, itself included; None: all of
        them."""
        return min((tokens for tokens in (self.window, self.chunk) if tokens), default=None)


@dataclass(frozen=True)
class BlockIndexer:
    """Chooses the blocks of keys that a query of grouped-query attention may see (the token indexer
    of Qwen4-Exp, Qwen4ExpTextQSAIndexer of transformers).

    A block is `block_size` tokens, counted from the start of the document. Its key is the mean of
    one key of `head_dim` for each token, normed, and rotated at the position of the block's first
    token. A query sees the `blocks` complete blocks with the largest sum over `heads` of relu(q_h .
    k) / sqrt(head_dim), with q projected from the token, normed and rotated, and the tokens of its
    own block while that is not complete.
    """

    heads: int
    head_dim: int
    blocks: int
    block_size: int
    rope: Rope
    norm: Norm


@dataclass(frozen=True)
class Unrotated:
    """No rotation of the first `dim` dimensions, in the place of a Rope."""

    dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are projected from one small
    latent per token. `rope` turns the part of the keys that all heads share; Unrotated leaves it as
    it is."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    rope: Rope | Unrotated
    norm: Norm = Norm(eps=1e-6)
    bias: bool = False
    temperature: QueryTemperature | None = None
    indexer: Indexer | SharedIndexer | None = None


@dataclass(frozen=True)
class Indexer:
    """Chooses the `topk` keys that a query of latent attention may see (arXiv 2512.02556): the
    largest sum over `heads` of w_h relu(q_h . k / sqrt(head_dim)), with q from the query latent,
    one key of `head_dim` per token, and w from the token. `keeps`: later layers with a
    SharedIndexer see these keys, too."""

    heads: int
    head_dim: int
    topk: int
    rope: Rope
    norm: LayerNorm = LayerNorm(eps=1e-6)
    keeps: bool = False


@dataclass(frozen=True)
class SharedIndexer:
    """A query of latent attention sees the `topk` keys that the indexer of an earlier layer chose
    for it: that of the nearest one with `Indexer.keeps`. The layer has no weights and no cache
    entry for it."""

    topk: int


@dataclass(frozen=True)
class EntryIndexer:
    """Chooses the `topk` compressed entries that a query of CompressedAttention may see: the
    largest sum over `heads` of w_h relu(q_h . k / sqrt(head_dim)), with q from the query latent,
    one key of `head_dim` for each entry, compressed from the tokens as the entry is, and w from the
    token."""

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class Compression:
    """One entry for each block of `rate` tokens of a document: norm(sum_t softmax_t(g_t + bias_t)
    c_t) over the tokens t of the block, channel by channel, with c and g two projections of a token
    and a bias for each place in a block. With `overlap` the sum is over the tokens of the block
    before as well, which have projections and biases of their own for it. A query sees the entries
    of the blocks that are complete at its token: all, or those that `indexer` chooses."""

    rate: int
    overlap: bool = False
    indexer: EntryIndexer | None = None


@dataclass(frozen=True)
class CompressedAttention:
    """The attention of DeepSeek V4 (transformers' DeepseekV4Attention): all heads share one vector
    of `head_dim` for each token, which is key and value. A query sees the last `window` tokens,
    itself included, and the entries of `compression`: none in sliding layers, all in HCA (heavily
    compressed attention), a choice in CSA (compressed sparse attention).

    Scores are divided by sqrt(head_dim), and one learned score for each head takes part in the
    softmax and stands for no token. Queries come from a latent of `q_lora_rank`, normed, and are
    normed per head without a weight. `rope` turns the last `rope.dim` numbers of a vector, by the
    first position of the block in entries; outputs are turned back. The heads lie in `o_groups`
    groups, each projected to `o_lora_rank` numbers before the projection of all.
    """

    heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    rope: Rope
    norm: Norm = Norm(eps=1e-6, scale="before_cast")
    compression: Compression | None = None


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net (arXiv 2412.06464, equation 10): linear attention with a state S [key_dim,
    value_dim] for each value head.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.  g = -exp(A_log) softplus(a +
    dt_bias), beta = beta_scale sigmoid(b), and q, k of unit length, q times key_dim^-1/2. q, k and
    v pass a causal depthwise convolution over `conv_width` tokens and a silu first; o is normed
    over value_dim and multiplied by silu(z), or by sigmoid(z) with `gate` sigmoid. Value head h
    reads key head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm
    beta_scale: float = 1.0
    gate: Literal["silu", "sigmoid"] = "silu"

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"GatedDeltaNet: {self.value_heads} value heads cannot be shared by "
                f"{self.key_heads} key heads"
            )


@dataclass(frozen=True)
class KimiDeltaAttention:
    """Kimi Delta Attention (arXiv 2510.26692): a gated delta net whose state [head_dim, head_dim]
    decays by a number for each key channel.

    S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.  g = -exp(A_log) softplus(F x
    + dt_bias) with F of rank head_dim, and beta, q, k and v as in GatedDeltaNet; o is normed over a
    head and multiplied by sigmoid(G x) with G of rank head_dim.
    """

    heads: int
    head_dim: int
    conv_width: int
    norm: Norm

    @property
    def key_heads(self) -> int:
        """Returns the number of heads; a key head has one value head."""
        return self.heads

    @property
    def value_heads(self) -> int:
        """The number of heads, each with a value vector of its own."""
        return self.heads

    @property
    def key_dim(self) -> int:
        """Returns the dimensions of a key."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Returns the dimensions of a value."""
        return self.head_dim


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2, arXiv 2511.23404): O (c * conv(b * x)), with b, c and x
    three projections of the input and conv a causal depthwise convolution over `conv_width` tokens
    without an activation. `bias`: every projection and the convolution have one."""

    conv_width: int
    bias: bool = False


@dataclass(frozen=True)
class Mamba2Scales:
    """Factors of what Mamba-2 projects its input to, biases included: the gate z, x, B, C and
    dt."""

    z: float = 1.0
    x: float = 1.0
    B: float = 1.0
    C: float = 1.0
    dt: float = 1.0


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060): a state S [state, head_dim] for each head that decays by a number
    of the token.

    S <- exp(dt A) S + B (dt x)^T;  o = S^T C + D x.  A = -exp(A_log), dt = softplus(. + dt_bias)
    within `dt_limit`. x, B and C pass a causal depthwise convolution over `conv_width` tokens and a
    silu first. o is multiplied by silu(z), then normed over the heads of a group as `norm` says
    (scale after_cast or before_cast; None: not normed), or after the norm with `gate` after_norm.
    Heads h of group h // (heads / groups) share B and C. `conv_bias`, `bias` and `out_bias` say
    whether the convolution, the projections of the input and that of the output have biases.
    `scales` multiplies the projections.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    norm: Norm | None
    gate: Literal["before_norm", "after_norm"] = "before_norm"
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    scales: Mamba2Scales | None = None

    def __post_init__(self):
        if self.heads % self.groups:
            raise ValueError(f"Mamba2: {self.heads} heads cannot be shared by {self.groups} groups")

    @property
    def key_heads(self) -> int:
        """Returns the number of groups: the heads of B and C."""
        return self.groups

    @property
    def value_heads(self) -> int:
        """The number of heads, each with a value vector of its own."""
        return self.heads

    @property
    def key_dim(self) -> int:
        """Returns the dimensions of B and C."""
        return self.state

    @property
    def value_dim(self) -> int:
        """Returns the dimensions of a head."""
        return self.head_dim


# Mixers whose state passes through the tokens in order.
Recurrent = GatedDeltaNet | KimiDeltaAttention | Mamba2 | ShortConv


@dataclass(frozen=True)
class Scales:
    """Factors of the input and of the output of a part."""

    input: float = 1.0
    output: float = 1.0


@dataclass(frozen=True)
class AttentionAndMamba2:
    """The sum of attention and of Mamba-2, which read the same input, each between two factors of
    its own."""

    attention: Attention
    mamba: Mamba2
    attention_scales: Scales = Scales()
    mamba_scales: Scales = Scales()


Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "linear"]


@dataclass(frozen=True)
class Mlp:
    """Feed-forward of width `width`; gated: down(act(gate(x)) * up(x)), plain: down(act(up(x))).
    `gate_scale` multiplies the result of gate, `out_scale` the result of down. With `clamp` it is
    down of ClampedSwiglu."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    clamp: ClampedSwiglu | None = None


@dataclass(frozen=True)
class Matrix:
    """Feed-forward of one square matrix: x W."""


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token and their weights. Scores are float32.

    score: softmax over all experts, or a sigmoid of each, or sqrt(softplus(.)) of each. `bias` is
    part of the scores, `correction_bias` is added for the choice only. `by_token`: the experts come
    from a stored table by the id of the token, and scores only weigh them. With groups, the experts
    of the `topk_groups` best groups are eligible; a group's score is its largest (`max`) or the sum
    of its two largest (`top2`). `renormalize` divides the chosen weights by their sum (+ 1e-20 for
    scores other than softmax); `scale` multiplies them, and `expert_scale` multiplies them by a
    learned number for each expert. `input_norm` is a norm of the router's own; its result is
    divided by sqrt(hidden size).
    """

    experts: int
    experts_per_token: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    bias: bool = False
    correction_bias: bool = False
    by_token: bool = False
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalize: bool = True
    scale: float = 1.0
    input_norm: Norm | None = None
    expert_scale: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + up_offset) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between
    -limit and limit."""

    limit: float
    alpha: float = 1.702
    up_offset: float = 1.0


@dataclass(frozen=True)
class Moe:
    """Mixture of gated experts of width `width`, plus shared experts (one gated feed-forward that
    every token passes).

    `shared_gate` multiplies the shared experts by a sigmoid of one projection. `weigh` says what a
    router's weight multiplies: the expert's output or its input. With `clamp` the experts compute
    ClampedSwiglu instead of act(gate) * up. Without `gated` they compute act(up). With `latent` the
    routed experts read and write so many numbers, projected from x and back; the router and the
    shared experts read x.
    """

    router: Router
    width: int
    shared: Mlp | None = None
    activation: Activation = "silu"
    bias: bool = False
    shared_gate: bool = False
    weigh: Literal["output", "input"] = "output"
    clamp: ClampedSwiglu | None = None
    gated: bool = True
    latent: int | None = None


@dataclass(frozen=True)
class DenseAndExperts:
    """The sum of a dense feed-forward and a mixture of experts, each between two norms of its own.
    The router reads the input without a norm."""

    dense: Mlp
    experts: Moe
    norm: Norm


@dataclass(frozen=True)
class LayerEmbedding:
    """Embeddings for each layer (Gemma 4): `dim` = n numbers e_l that layer l reads besides its
    residual stream.

    With x the embedding of a token: e_l = (sqrt(n) table_l[token] + norm(P_l x / sqrt(hidden
    size))) / sqrt(2). After its feed-forward, layer l adds norm(W (activation(G x) * e_l)) to its
    x. The table has `vocab_size` rows of n numbers for each layer. The norms are the decoder's.
    """

    dim: int
    vocab_size: int
    activation: Activation


@dataclass(frozen=True)
class Engram:
    """Hashed n-gram tables: vectors that the last tokens look up, gated by the residual stream and
    added to it. Engram (arXiv 2601.07372) has them, and the per-layer embedding (PLE) of Qwen4Exp.

    The n-gram of n = 2..N tokens ending at a token is hashed to XOR_j multipliers[j] id_j, with
    id_j the class of the token j places back, and N = len(multipliers). That hash modulo each of
    `primes[n - 2]` is a row of one table of rows of `head_dim` numbers; the table has further rows,
    which nothing reads, up to a multiple of `row_multiple`. `ids` is the number of token classes
    (None: a token is its own class), and `pad_id` is the class that stands for what precedes a
    document. With `resets` it also ends a text inside of a document: to the n-grams after it, what
    precedes it is `pad_id` too. `integers` is the type in which the products are computed. The
    values pass a causal depthwise convolution over `kernel_size` tokens with a stride of N. `norm`
    is applied to keys and streams, `conv_norm` before the convolution, `outer_norm` (None: none)
    before everything. `bias`: keys and values have biases.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    head_dim: int
    kernel_size: int
    ids: int | None
    pad_id: int
    integers: Literal["int32", "int64"]
    norm: Norm
    conv_norm: Norm
    outer_norm: Norm | None
    bias: bool = True
    resets: bool = False
    row_multiple: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the number of table rows of each head, in order."""
        return tuple(prime for order in self.primes for prime in order)

    @property
    def table_rows(self) -> int:
        """Returns the number of rows of the table."""
        return -(-sum(self.rows) // self.row_multiple) * self.row_multiple

    @property
    def history(self) -> int:
        """How many tokens before the current one the convolution reaches."""
        return (self.kernel_size - 1) * len(self.multipliers)
