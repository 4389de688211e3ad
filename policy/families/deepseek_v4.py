"""DeepSeek-V4 Flash and Pro (DeepseekV4ForCausalLM, arXiv 2606.19348): hyper-connections, attention
to a window of tokens and to compressed blocks of tokens, and experts in every layer, in the first
ones chosen by the id of the token."""

from __future__ import annotations

from typing import Literal

from policy.config import (
    ClampedSwiglu,
    CompressedAttention,
    Compression,
    DecoderConfig,
    EntryIndexer,
    HyperConnections,
    LayerSpec,
    Mlp,
    Moe,
    Norm,
    Rope,
    Router,
)
from policy.fields.config_fields import (
    UnsupportedModel,
    decoder,
    first,
    layer_types,
    rope_from_settings,
    rope_parameters,
)
from policy.fields.names import Stored

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
MODEL_TYPES = ("deepseek_v4",)
# The names of the released files. transformers writes the same below "model." and renames what is
# outside the layers.
LAYER_PREFIX = "layers.{n}."
PREFIXES = (
    ("model.layers.", "layers."),
    *((f"{base}embed_tokens.", "embed.") for base in ("model.", "")),
    *((f"{base}hc_head.hc_", "hc_head_") for base in ("model.", "")),
    ("model.norm.", "norm."),
    ("lm_head.", "head."),
)


def _mapping(module: str, stored: str) -> dict[str, Stored]:
    """Returns the names of a mapping of hyper-connections."""
    return {
        f"{module}.weight": Stored(f"{stored}_fn", "k (g e) -> g e k"),
        f"{module}.bias": Stored(f"{stored}_base"),
        f"{module}.scale": Stored(f"{stored}_scale"),
    }


def _compressor(module: str, stored: str) -> dict[str, Stored]:
    """Returns the names of the weights that compress blocks of tokens."""
    return {
        f"{module}.kv_proj": Stored(f"{stored}.wkv.weight", "w e -> e w"),
        f"{module}.gate_proj": Stored(f"{stored}.wgate.weight", "w e -> e w"),
        f"{module}.position_bias": Stored(f"{stored}.ape"),
        f"{module}.kv_norm.weight": Stored(f"{stored}.norm.weight"),
    }


def _feed_forward(module: str, stored: str) -> dict[str, Stored]:
    """Returns the names of a feed-forward."""
    return {
        f"{module}gate_proj": Stored(f"{stored}.w1.weight", "f e -> e f"),
        f"{module}down_proj": Stored(f"{stored}.w2.weight", "e f -> f e"),
        f"{module}up_proj": Stored(f"{stored}.w3.weight", "f e -> e f"),
    }


TOP = {
    "embed_tokens": Stored("embed.weight"),
    "norm.weight": Stored("norm.weight"),
    "lm_head": Stored("head.weight"),
    **_mapping("streams.head", "hc_head"),
}
NAMES = {
    "input_layernorm.weight": Stored("attn_norm.weight"),
    "pre_feedforward_layernorm.weight": Stored("ffn_norm.weight"),
    **_mapping("mixer_residual.mapping", "hc_attn"),
    **_mapping("feed_forward_residual.mapping", "hc_ffn"),
    "mixer.q_a_proj": Stored("attn.wq_a.weight", "r e -> e r"),
    "mixer.q_a_norm.weight": Stored("attn.q_norm.weight"),
    "mixer.q_b_proj": Stored("attn.wq_b.weight", "(h d) r -> r h d"),
    "mixer.kv_proj": Stored("attn.wkv.weight", "d e -> e d"),
    # transformers 5.24 writes the norm of the keys under the name of a compressor's norm.
    "mixer.kv_norm.weight": Stored("attn.kv_norm.weight", also=(Stored("attn.norm.weight"),)),
    "mixer.sinks": Stored("attn.attn_sink"),
    "mixer.o_a_proj": Stored("attn.wo_a.weight", "(g l) j -> g j l"),
    "mixer.o_b_proj": Stored("attn.wo_b.weight", "e (g l) -> g l e"),
    **_compressor("mixer.compressor", "attn.compressor"),
    **_compressor("mixer.indexer.compressor", "attn.indexer.compressor"),
    "mixer.indexer.q_b_proj": Stored("attn.indexer.wq_b.weight", "(h d) r -> r h d"),
    "mixer.indexer.weights_proj": Stored("attn.indexer.weights_proj.weight", "h e -> e h"),
    "feed_forward.router.weight": Stored("ffn.gate.weight", "x e -> e x"),
    "feed_forward.router.correction_bias": Stored("ffn.gate.bias"),
    "feed_forward.router.token_experts": Stored("ffn.gate.tid2eid"),
    **_feed_forward("feed_forward.expert_", "ffn.experts.{e}"),
    **_feed_forward("feed_forward.shared.", "ffn.shared_experts"),
}

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "layer_types": None,
    "compress_rates": None,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "mlp_layer_types": None,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "partial_rotary_factor": None,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1048576,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
}
# Keys whose only supported value is the one given here.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
}
SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
# Default rates, by the keys of released files that replace them.
_RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
# The kinds of layers by the numbers of `compress_ratios` in released files.
_KIND_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
HASH = "hash_moe"
CHOSEN = "moe"
_HASH_LAYERS = 3
_ROTATED = 64 / 512
_SCORES: dict[str, Literal["softmax", "sigmoid", "sqrt_softplus"]] = {
    "sqrtsoftplus": "sqrt_softplus",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    for key, value in _FIXED.items():
        if stored.get(key, value) != value:
            raise UnsupportedModel(
                f"{key} {stored[key]!r} is not supported by this family, only {value!r}"
            )
    hf = DEFAULTS | stored
    mixers = {kind: _mixer(hf, kind) for kind in (SLIDING, SPARSE, HEAVY)}
    experts = {kind: _experts(hf, by_token=kind == HASH) for kind in (HASH, CHOSEN)}
    kinds = zip(_layer_types(hf), _mlp_layer_types(hf), strict=True)
    layers = [LayerSpec(mixers[mixer], experts[feed_forward]) for mixer, feed_forward in kinds]
    streams = HyperConnections(
        streams=hf["hc_mult"],
        sinkhorn_iterations=hf["hc_sinkhorn_iters"],
        eps=hf["hc_eps"],
        reduce="head",
        norm_eps=hf["rms_norm_eps"],
    )
    return decoder("deepseek_v4", stored, hf, layers, norm=_norm(hf), hyper_connections=streams)


def _norm(hf: dict) -> Norm:
    return Norm(hf["rms_norm_eps"], "before_cast")


def _layer_types(hf: dict) -> list[str]:
    """Returns the kind of attention of each layer: `layer_types`, else by `compress_ratios` of
    released files, else two heavily compressed layers and then heavily compressed and sparse ones
    in turn. Entries past the last layer are those of layers that predict further tokens."""
    count = hf["num_hidden_layers"]
    listed = hf["layer_types"]
    if listed is None and hf.get("compress_ratios") is not None:
        ratios = hf["compress_ratios"]
        if unknown := set(ratios) - set(_KIND_OF_RATIO):
            known = ", ".join(map(str, _KIND_OF_RATIO))
            raise UnsupportedModel(
                f"compress_ratios: {', '.join(map(str, sorted(unknown)))}; known: {known}"
            )
        listed = [_KIND_OF_RATIO[ratio] for ratio in ratios]
    if listed is None:
        listed = [SPARSE if i > 1 and i % 2 else HEAVY for i in range(count)]
    return layer_types(hf | {"layer_types": listed[:count]}, (SLIDING, SPARSE, HEAVY), [])


def _mlp_layer_types(hf: dict) -> list[str]:
    """Returns whether the table or the scores choose the experts of each layer: `mlp_layer_types`,
    else the table in the first `num_hash_layers`."""
    count = hf["num_hidden_layers"]
    listed = hf["mlp_layer_types"]
    if listed is None:
        hashed = first(hf, "num_hash_layers", default=_HASH_LAYERS)
        listed = [HASH if i < hashed else CHOSEN for i in range(count)]
    listed = listed[:count]
    if len(listed) != count or (unknown := set(listed) - {HASH, CHOSEN}):
        wrong = f"{len(listed)} entries" if len(listed) != count else ", ".join(map(str, unknown))
        raise UnsupportedModel(
            f"mlp_layer_types: {wrong}; expected {HASH} or {CHOSEN} for each of the {count} layers"
        )
    return listed


def _mixer(hf: dict, kind: str) -> CompressedAttention:
    width = hf["num_attention_heads"] * hf["head_dim"]
    groups = hf["o_groups"]
    if width % groups:
        raise UnsupportedModel(
            f"o_groups: {groups} does not divide num_attention_heads times head_dim, {width}"
        )
    return CompressedAttention(
        heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        q_lora_rank=hf["q_lora_rank"],
        o_groups=groups,
        o_lora_rank=hf["o_lora_rank"],
        window=hf["sliding_window"],
        rope=_rope(hf, "main" if kind == SLIDING else "compress"),
        norm=_norm(hf),
        compression=None if kind == SLIDING else _compression(hf, kind),
    )


def _compression(hf: dict, kind: str) -> Compression:
    key, default = _RATES[kind]
    rate = first(hf, key, default=(hf["compress_rates"] or {}).get(kind, default))
    if kind == HEAVY:
        return Compression(rate)
    return Compression(rate, overlap=True, indexer=_indexer(hf))


def _indexer(hf: dict) -> EntryIndexer:
    return EntryIndexer(hf["index_n_heads"], hf["index_head_dim"], hf["index_topk"])


def _rope(hf: dict, kind: str) -> Rope:
    """Creates the rotary embedding of sliding layers ("main") or of the others ("compress").
    `rope_parameters` has settings of both, or only those by which the latter are rescaled; they
    then have the base `compress_rope_theta`, and yarn has no factor on cos and sin."""
    settings = first(hf, "rope_scaling", "rope_parameters", default={})
    if not all(isinstance(settings.get(each), dict) for each in ("main", "compress")):
        partial = hf["partial_rotary_factor"]
        if partial is None:
            rotated = hf.get("qk_rope_head_dim")
            partial = _ROTATED if rotated is None else rotated / hf["head_dim"]
        common = {"partial_rotary_factor": partial}
        compress = (
            {"attention_factor": 1.0}
            | settings
            | {"rope_theta": hf["compress_rope_theta"]}
            | common
        )
        settings = {"main": {"rope_theta": hf["rope_theta"]} | common, "compress": compress}
    nested = {"rope_parameters": settings, "max_position_embeddings": hf["max_position_embeddings"]}
    return rope_from_settings(rope_parameters(nested, kind), hf["head_dim"], interleaved=True)


def _experts(hf: dict, *, by_token: bool) -> Moe:
    """Creates the experts of a layer, chosen by the id of the token or by scores."""
    if hf["scoring_func"] not in _SCORES:
        raise UnsupportedModel(
            f"scoring_func {hf['scoring_func']!r} is not supported; known: {', '.join(_SCORES)}"
        )
    if not hf["swiglu_limit"] > 0:
        raise UnsupportedModel(f"swiglu_limit {hf['swiglu_limit']!r}: expected a positive number")
    router = Router(
        experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        score=_SCORES[hf["scoring_func"]],
        correction_bias=not by_token,
        by_token=by_token,
        scale=float(hf["routed_scaling_factor"]),
    )
    clamp = ClampedSwiglu(float(hf["swiglu_limit"]), alpha=1.0, up_offset=0.0)
    width = hf["moe_intermediate_size"]
    return Moe(router, width, shared=Mlp(width, clamp=clamp), clamp=clamp)
