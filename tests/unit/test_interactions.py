"""Features that do not go together are refused, by a run's file and by the model, with both names
and the reason."""

import json
from dataclasses import replace

import jax
import numpy as np
import oracles
import pytest

import policy
from policy import compatibility, families
from policy.adapter_spec import AdapterSpec
from policy.cache.media import Media
from policy.config import Runtime
from policy.fields import extensions
from policy.fields.config_fields import stacks
from policy.huggingface import sources
from policy.mesh.sharding import layout
from rl.config.run import RunConfig
from rl.run import checks

ENGRAM = {"layers": [1], "vocab_bases": [11, 13], "heads": 1, "head_dim": 8}
# For each feature: keys under `model`, keys of a stage, and the same as fields of Runtime.
ON = {
    compatibility.SPLIT: ({"batch_split": True}, {}, {"batch_split": True}),
    compatibility.EXCHANGE: (
        {"expert_parallel": "all_to_all"},
        {},
        {"expert_parallel": "all_to_all"},
    ),
    compatibility.GRADIENTS: (
        {"expert_gradients": "float8_e5m2"},
        {},
        {"expert_gradients": "float8_e5m2"},
    ),
    compatibility.HYPER: ({"hyper_connections": {}}, {}, {}),
    compatibility.ENGRAM: ({"engram": ENGRAM}, {}, {}),
    compatibility.INDEXER: ({"source": "tiny-deepseek-v32"}, {}, {}),
    compatibility.EMBEDDINGS: ({"source": "gemma4-e2b"}, {}, {}),
    compatibility.TABLES_AWAY: (
        {"source": "gemma4-e2b", "table_memory": "host"},
        {},
        {"table_memory": "host"},
    ),
    compatibility.RING: ({"context_parallel": "ring"}, {}, {"context_parallel": "ring"}),
    compatibility.ULYSSES: ({"context_parallel": "ulysses"}, {}, {"context_parallel": "ulysses"}),
    compatibility.BALANCE: ({"context_load_balance": True}, {}, {"context_load_balance": True}),
    compatibility.COMPRESSED: ({"source": "deepseek-v4-flash"}, {}, {}),
    compatibility.RECURRENT: ({"source": "qwen3-next-80b"}, {}, {}),
    compatibility.CAPACITY: ({}, {"router": {"capacity_factor": 1.25}}, {"capacity_factor": 1.25}),
    compatibility.WARMUP: (
        {"source": "tiny-deepseek-v32"},
        {"indexer": {"training": "dense_warmup"}},
        {"indexer": "dense_warmup"},
    ),
    compatibility.MODULES: ({"multi_token_prediction": {}}, {"mtp": {}}, {"mtp": "joint"}),
    compatibility.EXPLICIT: (
        {},
        {},
        {"layout": replace(layout({"fsdp": 1}, devices=jax.devices()[:1]), explicit=True)},
    ),
    compatibility.FEW_BITS: ({"quantization": "int8"}, {}, {"quantization": "int8"}),
    compatibility.WEIGHTS_AWAY: ({"host_parameters": True}, {}, {"host_parameters": True}),
    compatibility.ADAPTER: ({"adapter": {}}, {}, {"adapter": AdapterSpec()}),
    compatibility.KEPT_AWAY: ({"remat": "qkv_proj_offloaded"}, {}, {"remat": "qkv_proj_offloaded"}),
}


def run(*features: str) -> RunConfig:
    model, stage = (
        {"source": "tiny-deepseek"},
        {"algorithm": "sft", "steps": 1, "sampling": {"max_new_tokens": 2}},
    )
    for feature in features:
        model |= ON[feature][0]
        stage |= ON[feature][1]
    tokenizer = {"source": "characters", "alphabet": "0123456789+="}
    mesh = {"shard_mode": "explicit"} if compatibility.EXPLICIT in features else {}
    keys = {
        "model": model,
        "data": {"task": "arithmetic"},
        "stages": [stage],
        "tokenizer": tokenizer,
        "max_length": 16,
    }
    return RunConfig.model_validate(
        keys | {"mesh": mesh, "rewards": {"functions": ["exact_answer"]}}
    )


def runtime(*features: str) -> Runtime:
    changes = {}
    for feature in features:
        changes |= ON[feature][2]
    return replace(Runtime(), **changes)


# Features of calls that have pictures or sounds, by the decoder that has them; no key of a run's
# file switches them on.
VISION = {"vision_config": {"deepstack_visual_indexes": [0]}}
OF_CALLS = {
    compatibility.MEDIA: lambda: decoder_of("Qwen3"),
    compatibility.LOOKS_AHEAD: lambda: decoder_of("Gemma3"),
    compatibility.DEEPSTACK: lambda: families.read(
        VISION | {"model_type": "qwen3_vl", "text_config": oracles.short("Qwen3VL")}
    ),
}
WITH_CALLS = [pair for pair in compatibility.INCOMPATIBLE if set(pair) & set(OF_CALLS)]
# No architecture in configs/models/ has it: decoders with and without.
WITHOUT_PRESETS = {
    compatibility.LATENT: lambda on: families.read(
        oracles.configuration("NemotronH", moe_latent_size=16 if on else None)
    ),
    compatibility.GATED: lambda on: families.read(
        oracles.configuration(
            "Qwen4Exp" if on else "Qwen3Next", layer_types=["linear_attention"] * 4
        )
    ),
}
OF_DIRECTORIES = [pair for pair in compatibility.INCOMPATIBLE if set(pair) & set(WITHOUT_PRESETS)]
OF_LAYERS = [(compatibility.BLOCKS, compatibility.BOUNDED)]
OF_RUNS = [
    pair
    for pair in compatibility.INCOMPATIBLE
    if pair not in WITH_CALLS + OF_DIRECTORIES + OF_LAYERS
]


def decoder_of(kind: str):
    return families.read(oracles.short(kind))


def test_every_feature_of_the_table_can_be_switched_on_alone():
    assert {name for pair in OF_RUNS for name in pair} == set(ON)
    for feature in ON:
        config = run(feature)
        decoder = sources.preset(config.model.source, config.model.changes)
        assert feature in compatibility.features(decoder, runtime(feature))
        assert checks.faults(config) == []


@pytest.mark.parametrize("pair", OF_RUNS, ids=" + ".join)
def test_a_pair_is_refused_with_both_names_and_the_reason(pair):
    config = run(*pair)
    said = [each.text for each in checks.faults(config)]
    assert said == [f"{pair[0]} does not go with {pair[1]}: {compatibility.INCOMPATIBLE[pair]}"]
    decoder = sources.preset(config.model.source, config.model.changes)
    with pytest.raises(compatibility.Conflict, match=pair[0]):
        policy.create(decoder, runtime=runtime(*pair), mesh=runtime(*pair).layout)


@pytest.mark.parametrize("pair", OF_DIRECTORIES, ids=" + ".join)
def test_a_pair_of_a_decoder_without_a_preset_is_refused(pair):
    [of_decoder], [other] = set(pair) & set(WITHOUT_PRESETS), set(pair) - set(WITHOUT_PRESETS)
    decoder, plain = (WITHOUT_PRESETS[of_decoder](on) for on in (True, False))
    text = f"{pair[0]} does not go with {pair[1]}: {compatibility.INCOMPATIBLE[pair]}"
    assert list(compatibility.conflicts(decoder, runtime(other))) == [text]
    assert list(compatibility.conflicts(decoder, runtime())) == []
    assert list(compatibility.conflicts(plain, runtime(other))) == []


@pytest.mark.parametrize(
    "bounds",
    [{"window": 4}, {"chunk": 4}, {"softcap": 2.0}, {"sinks": True}, {"looks_ahead": True}],
)
def test_an_indexer_of_blocks_refuses_bounds_of_its_own_layer(bounds):
    decoder = decoder_of("Qwen4Exp")
    assert list(compatibility.conflicts(decoder, Runtime())) == []
    layers = list(decoder.layers)
    number = next(n for n, spec in enumerate(layers) if spec.attention is not None)
    other = replace(layers[number], mixer=replace(layers[number].mixer, indexer=None, **bounds))
    in_another_layer = replace(decoder, stacks=stacks([*layers, other]))
    assert list(compatibility.conflicts(in_another_layer, Runtime())) == []
    layers[number] = replace(layers[number], mixer=replace(layers[number].mixer, **bounds))
    bounded = replace(decoder, stacks=stacks(layers))
    [(one, two)] = OF_LAYERS
    assert list(compatibility.conflicts(bounded, Runtime())) == [
        f"{one} does not go with {two}: {compatibility.INCOMPATIBLE[one, two]}"
    ]
    with pytest.raises(compatibility.Conflict, match="sinks or a soft cap"):
        policy.create(bounded)


def test_a_family_with_streams_of_its_own_is_not_refused_by_a_key_that_nobody_typed():
    said = list(compatibility.conflicts(decoder_of("DeepseekV4"), runtime(compatibility.SPLIT)))
    assert said and not any("model.hyper_connections" in text for text in said)


def with_feature(decoder, feature):
    """(decoder, runtime) with one more feature."""
    sections = {
        compatibility.HYPER: ("hyper_connections", {}),
        compatibility.ENGRAM: ("engram", ENGRAM),
        compatibility.MODULES: ("multi_token_prediction", {"depth": 1}),
    }
    if feature == compatibility.INDEXER:
        return sources.preset("tiny-deepseek-v32"), Runtime()
    if feature in sections:
        name, section = sections[feature]
        decoder = families.read(json.loads(decoder.hf) | {extensions.KEY: {name: section}})
    return decoder, runtime(feature)


@pytest.mark.parametrize("pair", WITH_CALLS, ids=" + ".join)
def test_calls_with_pictures_refuse_a_pair_and_calls_of_text_do_not(pair):
    of_calls, other = pair
    decoder, how = with_feature(OF_CALLS[of_calls](), other)
    text = f"{pair[0]} does not go with {pair[1]}: {compatibility.INCOMPATIBLE[pair]}"
    assert text in list(compatibility.conflicts(decoder, how, media=True))
    assert not {of_calls} & compatibility.features(
        decoder, how
    ) and text not in compatibility.conflicts(decoder, how)
    if other == compatibility.SPLIT:  # needs experts
        return
    tokens = np.zeros((1, 4), np.int32)
    index, table = np.full((1, 4), -1, np.int32), np.zeros((1, decoder.hidden_size), np.float32)
    model = oracles.random_model(decoder, runtime=how, mesh=how.layout)
    with pytest.raises(compatibility.Conflict, match=other):
        model.logits(tokens, media=Media(index, table))


def test_a_configuration_that_plans_pictures_is_refused_before_its_data_is_read():
    config = run(compatibility.EXPLICIT)
    pictures = config.model_copy(
        update={"model": config.model.model_copy(update={"media_rows": 8})}
    )
    pair = (compatibility.MEDIA, compatibility.EXPLICIT)
    text = f"{pair[0]} does not go with {pair[1]}: {compatibility.INCOMPATIBLE[pair]}"
    assert text in [each.text for each in checks.faults(pictures)] and checks.faults(config) == []
