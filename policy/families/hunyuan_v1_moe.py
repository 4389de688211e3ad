"""Hunyuan-A13B (HunYuanMoEV1ForCausalLM): Hunyuan's attention with experts in every layer, next to
one feed-forward that every token passes."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Router
from policy.families import hunyuan_v1_dense
from policy.fields import names
from policy.fields.config_fields import UnsupportedModel, activation, decoder
from policy.fields.names import Stored

ARCHITECTURES = ("HunYuanMoEV1ForCausalLM",)
MODEL_TYPES = ("hunyuan_v1_moe",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = (
    hunyuan_v1_dense.ATTENTION
    | names.MOE
    | names.moved(names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_mlp."))
    | {"feed_forward.router.weight": Stored("mlp.gate.wg.weight", "x e -> e x")}
)

# The values of absent keys, by the class of transformers.
DEFAULTS = hunyuan_v1_dense.DEFAULTS | {"num_experts": 1, "moe_topk": 1}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mixer = hunyuan_v1_dense.mixer(hf)
    width = hf["intermediate_size"]
    act = activation(hf)
    numbers = zip(_by_layer(hf, "num_experts"), _by_layer(hf, "moe_topk"), strict=True)
    layers = [
        LayerSpec(
            mixer, Moe(Router(experts, chosen), width, shared=Mlp(width, act), activation=act)
        )
        for experts, chosen in numbers
    ]
    return decoder("hunyuan_v1_moe", stored, hf, layers)


def _by_layer(hf: dict, key: str) -> list[int]:
    """Returns a number for each layer, from one number for all or a list."""
    layers = hf["num_hidden_layers"]
    value = hf[key]
    values = list(value) if isinstance(value, list) else [value] * layers
    if len(values) < layers:
        raise UnsupportedModel(f"{key}: {len(values)} entries for {layers} layers")
    if key == "num_experts" and len(set(values[:layers])) > 1:
        raise UnsupportedModel(
            "num_experts: other numbers in other layers are not supported by this family"
        )
    return values[:layers]
