"""GLM-5, 5.1 and 5.2 (GlmMoeDsaForCausalLM): the layers of DeepSeek V3.2 with indexers that rotate
in adjacent pairs."""

from __future__ import annotations

from dataclasses import replace

from policy.config import DecoderConfig, Indexer, LatentAttention, LayerSpec, SharedIndexer
from policy.families import deepseek
from policy.fields.config_fields import UnsupportedModel, decoder, rope

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
MODEL_TYPES = ("glm_moe_dsa",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = deepseek.NAMES
# Layers past num_hidden_layers predict further tokens. transformers ignores them in a file under
# the number that the published models have.
SKIP_EXTRA_LAYERS = True
PASSED_OVER = r"model\.layers\.78\."

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "first_k_dense_replace": 3,
    "mlp_layer_types": None,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_types": None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = _complete(stored)
    layers = deepseek.layers(hf | {"index_topk": None}, v3=True)
    indexers = _indexers(hf)
    layers = [
        _with_indexer(layer, indexer) for layer, indexer in zip(layers, indexers, strict=True)
    ]
    return decoder("glm_moe_dsa", stored, hf, layers)


def _complete(stored: dict) -> dict:
    """Returns the configuration with every key of DeepSeek V3.2. All rotations are of adjacent
    pairs."""
    return DEFAULTS | stored | {"rope_interleave": True}


def _indexer_types(hf: dict) -> list[str]:
    """Returns full (the layer has an indexer) or shared (it uses the keys of the nearest one before
    it) for each layer: `indexer_types`, else the letters F and S of `index_topk_pattern`, else full
    every `index_topk_freq` layers from `index_skip_topk_offset` - 1 on and in all layers before."""
    layers = hf["num_hidden_layers"]
    pattern = hf["index_topk_pattern"]
    if kinds := hf["indexer_types"]:
        key = "indexer_types"
    elif pattern is not None:
        key = "index_topk_pattern"
        letters = {"F": "full", "S": "shared"}
        kinds = [
            str(letters.get(kind, kind)) for kind in pattern
        ]  # a list has the words themselves
    else:
        key = "index_topk_freq"
        period = max(hf["index_topk_freq"], 1)
        offset = hf["index_skip_topk_offset"]
        kinds = [
            "full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(layers)
        ]
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise UnsupportedModel(
            f"{key}: expected full or shared for each of the {layers} layers, the first full"
        )
    return kinds


def _indexers(hf: dict) -> list[Indexer | SharedIndexer]:
    """Returns the indexer of each layer. One keeps its choice if the next layer shares it."""
    own = _indexer(hf)
    kinds = _indexer_types(hf)
    indexers = []
    for kind, following in zip(kinds, [*kinds[1:], "full"], strict=True):
        if kind == "shared":
            indexers.append(SharedIndexer(own.topk))
        else:
            indexers.append(replace(own, keeps=following == "shared"))
    return indexers


def _indexer(hf: dict) -> Indexer:
    if hf["q_lora_rank"] is None:
        raise UnsupportedModel(
            "q_lora_rank: the indexer reads the query latent, so it needs a rank"
        )
    rotary = rope(hf, hf["qk_rope_head_dim"], interleaved=True)
    return Indexer(hf["index_n_heads"], hf["index_head_dim"], hf["index_topk"], rotary)


def _with_indexer(layer: LayerSpec, indexer: Indexer | SharedIndexer) -> LayerSpec:
    assert isinstance(layer.mixer, LatentAttention)
    return replace(layer, mixer=replace(layer.mixer, indexer=indexer))


def empty_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Returns the stored tensors without elements."""
    return deepseek.empty_shared_experts(_complete(hf))
