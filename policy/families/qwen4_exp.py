"""Qwen4-Exp (Qwen4ExpForCausalLM), and the text model of the multimodal one: gated residual
streams, three gated delta nets to one gated attention over blocks of keys that an indexer chooses,
mixtures of experts with a gated shared one, and tables of n-grams in some layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policy.config import (
    Attention,
    BlockIndexer,
    DecoderConfig,
    GatedDeltaNet,
    GatedResidual,
    LayerSpec,
    Mlp,
    Moe,
    Norm,
    Router,
)
from policy.families import qwen3_5
from policy.fields import names, ngrams
from policy.fields.config_fields import UnsupportedModel, decoder, hybrid_mixers
from policy.fields.names import Stored

ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
MODEL_TYPES = ("qwen4_exp_text", "qwen4_exp")


def _reader(ours: str, stored: str) -> names.Table:
    """Returns the names of what reads the residual streams."""
    return {
        f"{ours}reader.norm": Stored(f"{stored}hc_norm.weight", "(g e) -> g e"),
        f"{ours}reader.down": Stored(f"{stored}input_mix_weight_down.weight", "r (g e) -> g e r"),
        f"{ours}reader.up": Stored(f"{stored}input_mix_weight_up.weight", "(g e) r -> r g e"),
    }


def _connection(ours: str, stored: str) -> names.Table:
    """Returns the names of the connection of a part of a layer to the residual streams."""
    return _reader(ours, stored) | {
        f"{ours}inject": Stored(f"{stored}block_inject_weight.weight", "h (g e) -> g e h")
    }


NAMES = (
    qwen3_5.NAMES
    | names.MOE
    | names.PER_LAYER_EMBEDDING
    | _connection("mixer_residual.", "attn_hyper_connection.")
    | _connection("feed_forward_residual.", "mlp_hyper_connection.")
    | names.joined(
        "mixer.indexer.",
        ("q_proj", "k_proj"),
        "self_attn.indexer.index_qk_proj.weight",
        "(h d)+ e -> e h d",
    )
    | {
        f"mixer.indexer.{part}_norm.weight": Stored(f"self_attn.indexer.{part}_layernorm.weight")
        for part in "qk"
    }
)
TOP = {name: place for name, place in names.TOP.items() if name != "norm.weight"} | _reader(
    "streams.", "model.hyper_connection_mixer."
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "output_gate_type": None,
    "hc_count": 4,
    "hc_lowrank": 320,
    **ngrams.PER_LAYER_DEFAULTS,
}
# Keys of the indexer, which have no defaults.
INDEXER = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
# Released files call the layers with an indexer by the first name, transformers by the second.
RELEASED = "full_attention"
RENAMED = "indexed_attention"


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf["hidden_act"] != "silu":
        raise UnsupportedModel(
            f"hidden_act {hf['hidden_act']!r} is not supported by this family, only 'silu'"
        )
    if hf["hc_count"] < 2:
        raise UnsupportedModel(
            f"hc_count: {hf['hc_count']}, and this family has at least 2 residual streams"
        )
    if kinds := hf.get("layer_types"):
        hf["layer_types"] = [RELEASED if kind == RENAMED else kind for kind in kinds]
    experts = _experts(hf)
    tables = ngrams.per_layer_embeddings(hf)
    mixers = hybrid_mixers(hf, qwen3_5.SECTIONS)
    layers = [
        LayerSpec(_mixer(mixer, hf), experts, norms=(), engram=tables.get(number))
        for number, mixer in enumerate(mixers)
    ]
    norm = Norm(hf["rms_norm_eps"], "zero_centred")
    streams = GatedResidual(hf["hc_count"], hf["hc_lowrank"], hf["rms_norm_eps"])
    return decoder("qwen4_exp", stored, hf, layers, norm=norm, hyper_connections=streams)


def _mixer(mixer: Attention | GatedDeltaNet, hf: dict) -> Attention | GatedDeltaNet:
    """Returns a mixer of Qwen3.5 with what this family has besides."""
    if isinstance(mixer, Attention):
        return replace(mixer, indexer=_indexer(mixer, hf))
    gate = hf["output_gate_type"] or hf["hidden_act"]
    if gate not in ("silu", "sigmoid"):
        raise UnsupportedModel(f"output_gate_type {gate!r} is not supported; known: silu, sigmoid")
    return replace(mixer, gate=gate)


def _indexer(attention: Attention, hf: dict) -> BlockIndexer:
    if missing := [key for key in INDEXER if hf.get(key) is None]:
        raise UnsupportedModel(
            f"{', '.join(missing)}: absent, and every layer with attention has an indexer"
        )
    heads, kv_heads, dim, budget, size = (hf[key] for key in INDEXER)
    if wrong := next((key for key in INDEXER if hf[key] < 1), None):
        raise UnsupportedModel(f"{wrong}: {hf[wrong]} must be at least 1")
    if kv_heads != 1:
        raise UnsupportedModel(
            f"indexer_kv_heads: {kv_heads}, and the indexer has one key for each token"
        )
    if budget % size:
        raise UnsupportedModel(
            f"indexer_budget: {budget} tokens are not a number of blocks of "
            f"indexer_compress_ratio, {size} tokens"
        )
    assert attention.rope is not None
    if attention.rope.dim > dim:
        raise UnsupportedModel(
            f"indexer_head_dim: {dim} numbers, of which the {attention.rope.dim} that rotate in "
            "attention rotate"
        )
    norm = Norm(hf["rms_norm_eps"], "zero_centred")
    return BlockIndexer(heads, dim, budget // size, size, attention.rope, norm)


def _experts(hf: dict) -> Moe:
    router = Router(
        hf["num_experts"], hf["num_experts_per_tok"], renormalize=bool(hf["norm_topk_prob"])
    )
    shared = Mlp(hf["shared_expert_intermediate_size"])
    return Moe(router, hf["moe_intermediate_size"], shared=shared, shared_gate=True)


def derived_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the constants of the hashes of per-layer embeddings."""
    return ngrams.hash_tensors(config)


def table_shards(hf: dict) -> int:
    """Returns into how many tensors the table of a per-layer embedding is cut."""
    return (DEFAULTS | hf)["split_ngram_parts"]
