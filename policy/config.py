"""What a decoder is, as data. Frozen, hashable and free of jax, so that it can be checked before anything slow starts.

A decoder is an embedding, a tuple of stacks, a final norm and a head. A stack repeats a pattern of layers; the weights of its
repeats are stacked along axis 0 and scanned. An absent part is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. `scale` says how the weight w acts on r = x * rsqrt(mean(x^2) + eps), computed in float32.

    after_cast: r.astype(dtype) * w. zero_centred: (r * (1 + w)).astype(dtype). before_cast: (r * w).astype(dtype).
    """

    eps: float = 1e-6
    scale: Literal["after_cast", "zero_centred", "before_cast"] = "after_cast"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over `dim` dimensions: base frequencies theta^(-2i/dim), rescaled by `scaling`.

    `interleaved` rotates the pairs (2i, 2i+1), otherwise (i, i + dim/2). `attention_factor` multiplies cos and sin.
    """

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
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
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: query head h reads key-value head h // (heads / kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    bias: bool = False
    out_bias: bool = False
    window: int | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are read from one small latent per token."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    norm: Norm = Norm(eps=1e-6)


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
            raise ValueError(f"GatedDeltaNet: {self.value_heads} value heads cannot be shared by {self.key_heads} key heads")


@dataclass(frozen=True)
class Mlp:
    """Feed-forward of width `width`; gated: down(act(gate(x)) * up(x)), plain: down(act(up(x)))."""

    width: int
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights. Scores are float32.

    score: softmax over all experts, or a sigmoid of each. `correction_bias` is added for the choice only. With groups, the
    experts of the `topk_groups` best groups are eligible; a group's score is its largest (`max`) or the sum of its two largest
    (`top2`). `renormalize` divides the chosen weights by their sum (+ 1e-20 for sigmoid scores); `scale` multiplies them.
    """

    experts: int
    experts_per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Moe:
    """Mixture of gated experts of width `width`, plus shared experts (one gated feed-forward that every token passes)."""

    router: Router
    width: int
    shared: Mlp | None = None
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"


@dataclass(frozen=True)
class LayerSpec:
    """One pre-norm residual layer: x += mixer(norm(x)); x += feed_forward(norm(x))."""

    mixer: Attention | LatentAttention | GatedDeltaNet | None
    feed_forward: Mlp | Moe | None


@dataclass(frozen=True)
class Stack:
    pattern: tuple[LayerSpec, ...]
    repeats: int


@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder. `family` names the file in policy/families/ and `hf` holds the Hugging Face configuration as JSON."""

    vocab_size: int
    hidden_size: int
    stacks: tuple[Stack, ...]
    norm: Norm
    family: str
    hf: str
    tied_head: bool = False
    embedding_scale: float = 1.0
    initializer_range: float = 0.02

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers one by one, from the embedding to the final norm."""
        return tuple(spec for stack in self.stacks for _ in range(stack.repeats) for spec in stack.pattern)


@dataclass(frozen=True)
class Runtime:
    """How a decoder is computed, apart from what it computes. `remat` is a key of REMAT_SAVES in policy/decoder.py,
    or none; more than `attention_chunk` queries are taken in chunks."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: str = "full"
    scan: bool = True
    attention_chunk: int = 512
