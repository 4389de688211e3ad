"""A decoder as data: frozen, hashable and free of jax, so that it can be checked before anything
slow starts.

A decoder is an embedding, a tuple of stacks, a final norm and a head. A stack repeats a pattern of
layers; the weights of its repeats are stacked along axis 0 and scanned. An absent part is None. The
parts of a layer are in policy/specs.py, the options of the computation in policy/runtime.py; both
are importable from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policy.media import Tower
from policy.options import option
from policy.runtime import Quantization, Runtime, StoredType, WeightType
from policy.specs import (
    Activation,
    Attention,
    AttentionAndMamba2,
    BlockIndexer,
    ClampedSwiglu,
    CompressedAttention,
    Compression,
    DenseAndExperts,
    Engram,
    EntryIndexer,
    GatedDeltaNet,
    Indexer,
    KimiDeltaAttention,
    LatentAttention,
    LayerEmbedding,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LogitScaling,
    LongRope,
    Mamba2,
    Mamba2Scales,
    Matrix,
    Mlp,
    Moe,
    Norm,
    ProportionalScaling,
    QueryTemperature,
    Recurrent,
    Rope,
    Router,
    Scales,
    SharedIndexer,
    ShortConv,
    Unrotated,
    YarnScaling,
)

__all__ = [
    "POST_NORM",
    "PRE_NORM",
    "SANDWICH_NORM",
    "Activation",
    "Attention",
    "AttentionAndMamba2",
    "BlockIndexer",
    "ClampedSwiglu",
    "CompressedAttention",
    "Compression",
    "DecoderConfig",
    "DenseAndExperts",
    "Engram",
    "EntryIndexer",
    "GatedDeltaNet",
    "GatedResidual",
    "HyperConnections",
    "Indexer",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerEmbedding",
    "LayerNorm",
    "LayerSpec",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LogitScaling",
    "LongRope",
    "Mamba2",
    "Mamba2Scales",
    "Matrix",
    "Mlp",
    "Moe",
    "MultiTokenPrediction",
    "Norm",
    "NormName",
    "ProportionalScaling",
    "Quantization",
    "QueryTemperature",
    "Recurrent",
    "Rope",
    "Router",
    "Runtime",
    "Scales",
    "SharedIndexer",
    "ShortConv",
    "SinusoidPositions",
    "Stack",
    "StoredType",
    "Unrotated",
    "WeightType",
    "YarnScaling",
]

MAX_PERMUTED_STREAMS = 5  # HyperConnections.variant "lite" mixes all 5! = 120 permutations

NormName = Literal[
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
]
PRE_NORM: tuple[NormName, ...] = ("input_layernorm", "pre_feedforward_layernorm")
POST_NORM: tuple[NormName, ...] = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORM = PRE_NORM + POST_NORM


@dataclass(frozen=True)
class LayerSpec:
    """x += post(mixer(pre(x))); x += post(feed_forward(pre(x))), with the norms that `norms` names;
    an absent part adds nothing.

    input_layernorm stands before the mixer and post_attention_layernorm on its output; pre_ and
    post_feedforward_layernorm do the same for the feed-forward. `parallel`: both parts read the
    same normed input, x += mixer(h) + feed_forward(h). Without `residual` a part's output replaces
    x. `residual_scale`
    multiplies the output of each part. `scalar`: the result is multiplied by one stored number,
    which is not trained. The output of the n-gram lookup `engram` is added to x first, and what
    `layer_embedding` makes of x after the feed-forward. `deepstack`: at the tokens of pictures, a
    feature of the tower is added to the result; the first layers of a decoder have it.
    """

    mixer: Attention | LatentAttention | CompressedAttention | Recurrent | AttentionAndMamba2 | None
    feed_forward: Mlp | Matrix | Moe | DenseAndExperts | None
    norms: tuple[NormName, ...] = PRE_NORM
    parallel: bool = False
    residual: bool = True
    residual_scale: float = 1.0
    scalar: bool = False
    engram: Engram | None = None
    layer_embedding: LayerEmbedding | None = None
    deepstack: bool = False

    @property
    def mixers(self) -> tuple[Attention | LatentAttention | CompressedAttention | Recurrent, ...]:
        """Returns the mixer, the parts of one that is a sum, or nothing."""
        if isinstance(self.mixer, AttentionAndMamba2):
            return self.mixer.attention, self.mixer.mamba
        return () if self.mixer is None else (self.mixer,)

    @property
    def attention(self) -> Attention | None:
        """Returns the grouped-query attention of the mixer, if it has one."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, Attention)), None)

    @property
    def is_recurrent(self) -> bool:
        """Whether the mixer carries a state from token to token."""
        return any(isinstance(mixer, Recurrent) for mixer in self.mixers)

    @property
    def shares(self) -> str | None:
        """Returns the name of the keys and values of an earlier layer that the mixer attends to, if
        it has none of its own."""
        return None if self.attention is None else self.attention.shares

    @property
    def moe(self) -> Moe | None:
        """Returns the mixture of experts of the feed-forward, if it has one."""
        if isinstance(self.feed_forward, DenseAndExperts):
            return self.feed_forward.experts
        return self.feed_forward if isinstance(self.feed_forward, Moe) else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Returns the rotary embeddings of the mixer and of its indexer."""
        parts = [mixer for mixer in self.mixers if not isinstance(mixer, Recurrent)]
        indexers = [getattr(part, "indexer", None) for part in parts]
        parts += [indexer for indexer in indexers if isinstance(indexer, Indexer | BlockIndexer)]
        return tuple(part.rope for part in parts if isinstance(part.rope, Rope))

    @property
    def chooses_keys(self) -> bool:
        """Whether a query of the mixer sees a choice of the keys of tokens alone. The EntryIndexer
        of CompressedAttention chooses among entries of blocks instead."""
        return any(getattr(mixer, "indexer", None) is not None for mixer in self.mixers)

    @property
    def keeps_index(self) -> bool:
        """Whether later layers see the keys that the indexer of this layer chooses."""
        indexer = self.mixer.indexer if isinstance(self.mixer, LatentAttention) else None
        return isinstance(indexer, Indexer) and indexer.keeps

    @property
    def shares_index(self) -> bool:
        """Whether this layer sees the keys that the indexer of an earlier layer chose."""
        return isinstance(self.mixer, LatentAttention) and isinstance(
            self.mixer.indexer, SharedIndexer
        )


@dataclass(frozen=True)
class Stack:
    """`repeats` copies of a pattern of layers."""

    pattern: tuple[LayerSpec, ...]
    repeats: int


def index_crosses_repeats(pattern: Sequence[LayerSpec]) -> bool:
    """Tells whether a repeated pattern would hand the choice of an indexer on to its next
    repeat."""
    keeps = [i for i, spec in enumerate(pattern) if spec.keeps_index]
    shares = [i for i, spec in enumerate(pattern) if spec.shares_index]
    return bool(keeps and shares) and shares[0] < keeps[0]


@dataclass(frozen=True)
class HyperConnections:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): each token has `streams` residual
    vectors, read as a weighted sum, written with weights, and mixed by a doubly stochastic matrix,
    all computed from the streams themselves.

    `variant` says how the matrix is computed: `sinkhorn`, `sinkhorn_iterations` rounds of
    normalised columns and rows, with `eps` added to each sum; `lite`, an exact mixture of all
    permutations. `reduce`: the final norm reads the sum of the streams, or a sum weighted by a head
    of its own. The mappings read the streams through a norm, with a weight of its own or without.
    """

    streams: int = option(4, ge=1, description="residual vectors of each token")
    variant: Literal["sinkhorn", "lite"] = option(
        "sinkhorn",
        description="how the streams are mixed: by Sinkhorn iterations, or (lite) an exact "
        "mixture of all permutations",
    )
    sinkhorn_iterations: int = option(20, ge=1, description="rounds of normalised columns and rows")
    eps: float = option(
        1e-6,
        gt=0.0,
        description="added to each sum of the Sinkhorn iterations and to the read weights",
    )
    reduce: Literal["sum", "head"] = option(
        "sum",
        description="input of the final norm: the sum of the streams, or a sum weighted by a head",
    )
    norm_weight: bool = option(
        False, description="whether the norm before each mapping has a weight"
    )
    norm_eps: float = option(1e-6, gt=0.0, description="epsilon of the norm before each mapping")

    def __post_init__(self):
        if self.streams < 1 or self.sinkhorn_iterations < 1:
            raise ValueError("streams and sinkhorn_iterations must be at least 1")
        if self.variant == "lite" and self.streams > MAX_PERMUTED_STREAMS:
            raise ValueError(
                "variant lite mixes all permutations of the streams, so at most "
                f"{MAX_PERMUTED_STREAMS} (120 permutations)"
            )


@dataclass(frozen=True)
class GatedResidual:
    """Gated residual streams (Qwen4ExpTextGatedResidual of transformers): each token has `streams`
    residual vectors x_g, which begin as copies of its embedding.

    With n_g the zero-centred norm of x_g, a part of a layer reads mean_g(s_g * n_g), s = sigmoid(U
    silu(D n / streams)) with U and D of rank `rank`, and its output o is added as x_g += 2
    sigmoid(W n / streams)_g o. What the head reads is such a mean, too, without a further norm.
    """

    streams: int
    rank: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Modules that predict the tokens after the next one (arXiv 2412.19437, section 2.2): module d
    = 1..`depth` joins the hidden state of a position with the embedding of the token d places on,
    passes one `layer`, and predicts the token d + 1 places on.

    `input` says which hidden states the first module reads: those after the decoder's final norm,
    as released files expect, or before it. `final_norm`: each module has a norm of its own before
    the shared head; without, it uses the decoder's.
    """

    layer: LayerSpec
    depth: int = option(
        ge=1,
        description="number of modules; module d predicts the token d places after the next one",
    )
    input: Literal["post_norm", "pre_norm"] = option(
        "post_norm",
        description="states that the first module reads: after or before the final norm",
    )
    final_norm: bool = option(
        True,
        description="each module has a norm of its own before the head; false: it uses the "
        "decoder's",
    )

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(f"multi_token_prediction: depth must be at least 1, got {self.depth}")


@dataclass(frozen=True)
class LearnedPositions:
    """A trained vector for each of `length` positions, added to the embedding."""

    length: int


@dataclass(frozen=True)
class SinusoidPositions:
    """[sin | cos] of wavelengths from 2 pi to 1e4 * 2 pi, added to the embedding (arXiv 1706.03762,
    section 3.5)."""


@dataclass(frozen=True)
class DecoderConfig:
    """A complete decoder. `family` names the file in policy/families/, and `hf` is the Hugging Face
    configuration as JSON. Logits are multiplied by `logit_scale`;
    `logit_softcap` c then bounds them by c tanh(z / c), before any temperature. `image` and `audio`
    describe the towers whose outputs stand in the place of token embeddings."""

    vocab_size: int
    hidden_size: int
    stacks: tuple[Stack, ...]
    norm: Norm | LayerNorm
    family: str
    hf: str
    tied_head: bool = False
    embedding_scale: float = 1.0
    positions: tuple[LearnedPositions | SinusoidPositions, ...] = ()
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    initializer_range: float = 0.02
    hyper_connections: HyperConnections | GatedResidual | None = None
    multi_token_prediction: MultiTokenPrediction | None = None
    image: Tower | None = None
    audio: Tower | None = None

    def __post_init__(self):
        kept: set[str] = set()
        for number, spec in enumerate(self.layers):
            if spec.shares is not None and spec.shares not in kept:
                raise ValueError(
                    f"layer {number} shares the keys {spec.shares!r}, which no layer before it "
                    "keeps"
                )
            if spec.attention is not None and (name := spec.attention.keeps) is not None:
                if name in kept:
                    raise ValueError(
                        f"layer {number} keeps the keys {name!r}, as a layer before it does"
                    )
                kept.add(name)
        self._check_shared_indexers()

    def _check_shared_indexers(self) -> None:
        """Raises ValueError if a layer shares an index that no layer before it keeps, or that only
        the repeat before its own keeps."""
        kept = False
        for stack in self.stacks:
            for spec in stack.pattern:
                if spec.shares_index and not kept:
                    raise ValueError(
                        "a layer shares the index of an earlier layer, but no layer before it "
                        "keeps one"
                    )
                kept = kept or spec.keeps_index
            if stack.repeats > 1 and index_crosses_repeats(stack.pattern):
                raise ValueError(
                    "a stack repeats a pattern of layers whose first layers share the index of "
                    "its last"
                )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Returns the layers one by one, from the embedding to the final norm."""
        return tuple(
            spec for stack in self.stacks for _ in range(stack.repeats) for spec in stack.pattern
        )

    @property
    def mixer_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers that have a mixer, from 0."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.mixer is not None)

    def layer_numbers(self, path: str) -> list[int]:
        """Returns the numbers (from 0) of the layers whose weights are stacked at `path`,
        "stacks.S.layers.I"."""
        _, s, _, i = path.split(".")
        before = self.stacks[: int(s)]
        stack = self.stacks[int(s)]
        first = sum(len(each.pattern) * each.repeats for each in before) + int(i)
        return [first + r * len(stack.pattern) for r in range(stack.repeats)]

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm stands before the head; gated residual streams are normed as they are
        read."""
        return not isinstance(self.hyper_connections, GatedResidual)

    @property
    def layer_embedding(self) -> LayerEmbedding | None:
        """Returns the embeddings for each layer, which all layers have or none."""
        return self.layers[0].layer_embedding

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Returns every rotary embedding that some layer uses, once."""
        specs = (
            *self.layers,
            *([self.multi_token_prediction.layer] if self.multi_token_prediction else []),
        )
        return tuple(dict.fromkeys(rope for spec in specs for rope in spec.ropes))

    @property
    def logit_scaling(self) -> LogitScaling:
        """Returns what becomes of the products with the head."""
        return LogitScaling(self.logit_scale, self.logit_softcap)

    @property
    def longrope_limit(self) -> int | None:
        """Returns the longest sequence, in tokens, that has the short factors of LongRoPE; None:
        the decoder has no LongRoPE."""
        scalings = (rope.scaling for rope in self.ropes)
        return next(
            (each.original_max_position for each in scalings if isinstance(each, LongRope)), None
        )

    @property
    def has_sections(self) -> bool:
        """Whether tokens of pictures turn by three positions."""
        return any(rope.sections is not None for rope in self.ropes)

    @property
    def looks_ahead(self) -> bool:
        """Whether the tokens of a picture see each other in some layer."""
        return any(
            spec.attention is not None and spec.attention.looks_ahead for spec in self.layers
        )

    @property
    def max_positions(self) -> int | None:
        """Returns the number of positions with a trained vector; None: the decoder has no such
        limit."""
        return next(
            (table.length for table in self.positions if isinstance(table, LearnedPositions)), None
        )
