"""Models that read pictures or sounds, around their weights: presets, built-in tokenizers,
processors, saved files."""

import json

import jax
import numpy as np
import pytest

import policy
from policy.cache.media import Media
from policy.config import Runtime
from policy.huggingface import model_directory, sources
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.config.model import ModelOptions, TokenizerOptions
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.data.tokenizer import read_tokenizer
from rollout.media.expand import expand
from rollout.media.processor import MediaError
from rollout.media.reference import refer
from rollout.text.chat import ChatError, render_prompt
from rollout.text.tokenizer import SPECIALS, load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz ?#CDEFGAB"
PRESETS = [name for name in sources.presets() if sources.preset_processor(name)]
# Parameters with towers, as the classes of transformers count them: pinned, so that a changed
# number of a preset is seen.
PUBLISHED = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "gemma3-4b": 4_300_079_472,
    "gemma3-27b": 27_432_406_640,
    "llama4-scout": 108_641_793_536,
    "llama4-maverick": 401_583_781_376,
}
PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
SOUND = {
    "array": np.random.default_rng(0).normal(0, 0.1, 5120).astype(np.float32),
    "sampling_rate": 8000,
}
CHAT = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a"}]


def tokenizer_of(source, alphabet=ALPHABET):
    return load_tokenizer(
        "characters", alphabet, media=towers.media_tokens(ModelOptions(source=source))
    )


def prompt_of(*kinds, text="what?"):
    return [
        {
            "role": "user",
            "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}],
        }
    ]


def references(tmp_path, *kinds):
    return [refer(kind, PICTURE if kind == "image" else SOUND, tmp_path) for kind in kinds]


# Presets.


def stored_names(graph):
    """Returns the names of all tensors in a saved directory."""
    names = []
    for place in model_directory.places(graph):
        experts = range(
            graph.shapes[place.path].shape[place.layers is not None] if place.stored.numbered else 1
        )
        for layer in [None] if place.layers is None else place.layers:
            names += [(place.name(place.stored, layer, expert), np.zeros(0)) for expert in experts]
    return {
        name
        for name, _ in model_directory._wrapped(graph.config, json.loads(graph.config.hf), names)
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_towers_has_the_tensors_of_the_class_of_transformers(name):
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    graph = Graph(
        sources.preset(name, media=True), Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1])
    )
    hf = json.loads(graph.config.hf)
    assert graph.config.image is not None and (graph.config.audio is not None) == bool(
        hf.get("audio_config")
    )
    oracle = getattr(transformers, hf["architectures"][0])
    with torch.device("meta"):
        model = oracle(
            oracle.config_class(
                **{key: value for key, value in hf.items() if key != "architectures"}
            )
        )
    state, parameters = model.state_dict(), sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() for key, b in model.named_buffers() if key in state)
    assert graph.parameters == parameters + buffers
    assert parameters == PUBLISHED.get(name, parameters)
    # Saved by transformers, experts of Qwen3.5 are apart; released files hold them in the form of
    # the class.
    forms = [set(state), set(revert_weight_conversion(model, state))]
    if graph.config.tied_head:
        forms = [{key for key in form if not key.endswith("lm_head.weight")} for form in forms]
    assert stored_names(graph) in forms


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_describes_the_processor_of_its_towers(name, tmp_path):
    """Rows that the processor announces are those that the towers make."""
    config, processors = (
        sources.preset(name, media=True),
        towers.read_processors(ModelOptions(source=name), tokenizer_of(name)),
    )
    for kind in ("image", "audio"):
        tower, processor = getattr(config, kind), getattr(processors, kind)
        assert (tower is None) == (processor is None)
        if tower is None:
            continue
        size = (321, 654) if kind == "image" else (5 * 16000, 16000)
        for item in processor.items("", size):
            assert tower.rows_of(item.shape) == item.rows > 0
        assert kind == "audio" or processor.looks_ahead == any(
            getattr(layer.mixer, "looks_ahead", False) for layer in config.layers
        )


def test_overrides_of_a_preset_with_towers_reach_the_text_model_or_a_section():
    changes = {
        "num_hidden_layers": 2,
        "vision_config": {"depth": 1},
        "tie_word_embeddings": True,
        "duet": {},
    }
    config = sources.preset("tiny-vl", changes, media=True)
    stored = json.loads(config.hf)
    assert len(config.layers) == 2 and config.tied_head
    assert (stored["text_config"]["num_hidden_layers"], "num_hidden_layers" in stored) == (2, False)
    assert (config.image.encoder.depth, config.image.encoder.width) == (1, 64)
    plain = sources.preset("tiny-deepseek", {"vocab_size": 320})
    assert plain.vocab_size == 320 and "text_config" not in json.loads(plain.hf)


# Built-in tokenizers.


@pytest.mark.parametrize(
    "source", ["tiny-vl", "tiny-omni", "gemma3-4b", "gemma4-e2b", "llama4-scout"]
)
@pytest.mark.parametrize("built_in", ["characters", "bytes"])
def test_a_built_in_tokenizer_keeps_the_ids_of_texts_and_appends_those_of_markers(
    source, built_in, tmp_path
):
    from transformers import AutoTokenizer

    alphabet = ALPHABET if built_in == "characters" else None
    tokens = towers.media_tokens(ModelOptions(source=source))
    plain, made = (
        load_tokenizer(built_in, alphabet),
        load_tokenizer(built_in, alphabet, media=tokens),
    )
    text = "a b? <|user|>c<pad>"
    assert made.encode(text) == plain.encode(text) and render_prompt(made, CHAT) == render_prompt(
        plain, CHAT
    )
    assert made.convert_ids_to_tokens(list(range(8))) == list(SPECIALS)
    appended = list(dict.fromkeys(tokens.names.values()))
    assert made.convert_tokens_to_ids(appended) == list(range(len(plain), len(made)))
    assert len(made) == len(plain) + len(appended)
    made.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        marked = text + "".join(appended)
        assert again.encode(marked) == made.encode(marked) and len(again) == len(made)
        assert {name: getattr(again, name) for name in tokens.names} == dict(tokens.names)
        assert render_prompt(again, CHAT) == render_prompt(plain, CHAT)
        assert again.decode(again.encode(marked), skip_special_tokens=True) == "a b? c"


@pytest.mark.parametrize("source", ["tiny-vl", "gemma3-4b", "gemma4-e2b", "llama4-scout"])
def test_the_template_writes_the_marker_of_a_part(source, tmp_path):
    tokenizer = tokenizer_of(source)
    processors = towers.read_processors(ModelOptions(source=source), tokenizer)
    expanded = expand(
        tokenizer, prompt_of("image", "image"), references(tmp_path, "image", "image"), processors
    )
    (row,) = set(expanded.tokens[expanded.index >= 0].tolist())
    assert tokenizer.convert_ids_to_tokens(row) == processors.image.row_token
    assert expanded.index.max() + 1 == sum(item.rows for item in expanded.items)
    with pytest.raises(ChatError, match="does not read parts of type video"):
        render_prompt(tokenizer, prompt_of("video"))
    with pytest.raises(MediaError, match="message 0 contains"):
        expand(tokenizer, prompt_of(text=f"a {processors.image.marker}"), [], processors)


def test_pictures_and_notes_share_a_prompt_of_tiny_omni(tmp_path):
    tokenizer = tokenizer_of("tiny-omni")
    processors = towers.read_processors(ModelOptions(source="tiny-omni"), tokenizer)
    expanded = expand(
        tokenizer, prompt_of("audio", "image"), references(tmp_path, "audio", "image"), processors
    )
    assert [(item.kind, item.shape, item.rows) for item in expanded.items] == [
        ("audio", (64, 1), 8),
        ("image", (8, 8), 16),
    ]
    names = tokenizer.convert_ids_to_tokens(expanded.tokens.tolist())
    assert (
        names[:3] == ["<|user|>", "<|audio_start|>", "<|audio_pad|>"]
        and names.count("<|image_pad|>") == 16
    )


def run_config(model, tokenizer):
    stage = {
        "algorithm": {"name": "sft"},
        "steps": 1,
        "prompts_per_step": 1,
        "sampling": {"max_new_tokens": 1},
    }
    return RunConfig(
        model=ModelOptions(**model),
        tokenizer=TokenizerOptions(**tokenizer),
        max_length=8,
        data={"task": "pictures"},
        stages=[stage],
    )


def test_a_run_has_the_tokens_of_its_model():
    of_characters = {"source": "characters", "alphabet": ALPHABET}
    tokenizer, stops = read_tokenizer(run_config({"source": "tiny-vl"}, of_characters))
    assert tokenizer.image_token == "<|image_pad|>" and stops == (2,)
    assert not hasattr(
        read_tokenizer(run_config({"source": "tiny-deepseek"}, of_characters))[0], "image_token"
    )
    bytes_, _ = read_tokenizer(
        run_config({"source": "tiny-vl", "overrides": {"vocab_size": 320}}, {"source": "bytes"})
    )
    changes = towers.preset_changes(
        ModelOptions(source="tiny-vl", overrides={"vocab_size": 320}), bytes_
    )
    assert changes == {
        "vocab_size": 320,
        "image_token_id": bytes_.image_token_id,
        "video_token_id": bytes_.video_token_id,
        "vision_start_token_id": bytes_.vision_start_token_id,
        "vision_end_token_id": bytes_.vision_end_token_id,
    }
    assert (
        json.loads(sources.preset("tiny-vl", changes, media=True).hf)["image_token_id"]
        == bytes_.image_token_id
    )
    assert towers.preset_changes(ModelOptions(source="tiny-deepseek"), bytes_) == {}


# Saved files.


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory of tiny-vl as a run exports it."""
    folder, options = tmp_path_factory.mktemp("exported"), ModelOptions(source="tiny-vl")
    tokenizer = tokenizer_of("tiny-vl")
    model = policy.create(sources.preset("tiny-vl", media=True))
    save(model, options, tokenizer, folder)
    return folder, tokenizer, model


def save(model, options, tokenizer, folder):
    policy.save(model, folder)
    tokenizer.save_pretrained(folder)
    towers.write_files(options, tokenizer, folder)


def test_an_exported_preset_is_read_as_a_directory(exported, tmp_path):
    folder, tokenizer, _ = exported
    options = ModelOptions(source=str(folder))
    stored = json.loads((folder / "config.json").read_text())
    assert (
        stored["image_token_id"]
        == tokenizer.image_token_id
        == load_tokenizer(folder).image_token_id
        != 60
    )
    both = [
        expand(
            each,
            prompt_of("image"),
            references(tmp_path, "image"),
            towers.read_processors(one, each),
        )
        for one, each in (
            (options, load_tokenizer(folder)),
            (ModelOptions(source="tiny-vl"), tokenizer),
        )
    ]
    assert np.array_equal(both[0].tokens, both[1].tokens) and both[0].items == both[1].items
    assert towers.media_tokens(options) == towers.media_tokens(ModelOptions(source="tiny-vl"))


def test_transformers_reads_an_exported_preset(exported, tmp_path):
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    folder, tokenizer, model = exported
    oracle, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (reference,) = references(tmp_path, "image")
    processors = towers.read_processors(ModelOptions(source=str(folder)), tokenizer)
    expanded = expand(tokenizer, prompt_of("image"), [reference], processors)
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(
        [PICTURE], return_tensors="np"
    )
    [(item, values)] = reference.inputs(processors.image).items()
    np.testing.assert_array_equal(pixels["pixel_values"], values)
    rows, deep = model.encode("image", values[None], [item.shape])
    media = Media(expanded.index[None], rows[0], deep[:, 0])
    ours = model.logits(expanded.tokens[None], media=media, turns=expanded.turns[None])[0]
    with torch.no_grad():
        expected = (
            oracle.float()
            .eval()(
                input_ids=torch.tensor(expanded.tokens.astype(np.int64))[None],
                mm_token_type_ids=torch.tensor((expanded.index >= 0).astype(np.int64))[None],
                **{key: torch.tensor(pixels[key]) for key in ("pixel_values", "image_grid_thw")},
            )
            .logits[0]
        )
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert np.abs(ours - model.logits(expanded.tokens[None])[0]).max() > 1e-2  # the picture matters


def test_a_template_that_only_processors_read_is_the_tokenizers_too(tmp_path):
    tokenizer = tokenizer_of("tiny-vl")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}!"})
    )
    assert tokenizer.decode(render_prompt(load_tokenizer(tmp_path), CHAT)) == "what?<unk>"


def test_files_of_processors_are_downloaded():
    assert set(models.PROCESSOR_FILES) < set(models.CONFIGURATION)
