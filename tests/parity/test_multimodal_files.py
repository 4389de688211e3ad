"""Directories of multimodal models: text and towers are read, compute what transformers computes
from pictures, and are written so that transformers reads them again."""

import copy
import functools
import json
import re

import media_oracles
import numpy as np
import pytest
import towers
from safetensors.numpy import load_file, save_file

import policy
from policy import families

pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

KINDS = [
    pytest.param(
        kind, marks=() if kind in ("Qwen3VL", "Qwen2_5_VL", "Gemma3") else pytest.mark.every_family
    )
    for kind in media_oracles.MODELS
]


def pictures(kind, inputs):
    """(values [R, N, K], shapes [R, 2]) of what the oracle was given."""
    pixels = inputs["pixel_values"].numpy()
    if kind == "Gemma4":
        at = inputs["image_position_ids"].numpy()
        return pixels, at[:, -1, ::-1] + 1
    if kind in ("Gemma3", "Llama4"):
        R = len(pixels)
        grid = pixels.reshape(R, 3, 6, 4, 6, 4).transpose(0, 2, 4, 1, 3, 5)
        return grid.reshape(R, 36, 48), np.full((R, 2), 6)
    shapes = inputs["image_grid_thw"].numpy()[:, 1:]
    sizes = shapes.prod(-1)
    values = np.zeros((len(shapes), max(sizes), pixels.shape[1]), np.float32)
    for row, item in zip(values, np.split(pixels, np.cumsum(sizes)[:-1]), strict=True):
        row[: len(item)] = item
    return values, shapes


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(kind, the model of transformers, ours, read from its directory)."""
    kind, directory = request.param, tmp_path_factory.mktemp("multimodal")
    theirs = media_oracles.build(kind)
    theirs.save_pretrained(directory)
    return kind, theirs, policy.load(directory, media=True)


def test_logits_of_a_document_with_pictures_and_sounds(model):
    kind, theirs, ours = model
    document = media_oracles.document(kind, theirs)
    values, shapes = pictures(kind, document.inputs)
    rows, deep = ours.encode("image", values, shapes)
    own = [slice(ours.config.image.rows_of(tuple(shape))) for shape in shapes]
    table = np.concatenate([np.asarray(rows[r, part]) for r, part in enumerate(own)])
    if deep is not None:
        deep = np.concatenate([np.asarray(deep[:, r, part]) for r, part in enumerate(own)], axis=1)
    if "input_features" in document.inputs:
        frames = document.inputs["input_features"].numpy().transpose(0, 2, 1)
        sounds, features = ours.encode("audio", frames, [[len(frames[0]), 1]])
        assert features is None
        table, deep = (
            np.concatenate([table, sounds[0]]),
            np.pad(deep, ((0, 0), (0, len(sounds[0])), (0, 0))),
        )
    np.testing.assert_allclose(table, document.media.table, atol=2e-5, rtol=0)
    if deep is not None:
        np.testing.assert_allclose(deep, document.media.deep, atol=2e-5, rtol=0)
    tokens, segments, keywords = media_oracles.batch([[document]], len(document))
    keywords["media"] = type(keywords["media"])(keywords["media"].index, table, deep)
    logits = ours.logits(tokens, segments=segments, **keywords)[0]
    np.testing.assert_allclose(logits, document.logits, atol=1e-4, rtol=0)


def test_written_directory(model, tmp_path):
    """transformers reads it with every tensor, to the last bit, and no other; we do, too."""
    kind, theirs, ours = model
    policy.save(ours, tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True, dtype="auto")
    assert {key: list(value) for key, value in info.items() if value} == {}
    expected, result = theirs.state_dict(), again.state_dict()
    assert expected.keys() == result.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(result[name].numpy(), tensor.numpy(), err_msg=name)
    assert "vision_config" in json.loads((tmp_path / "config.json").read_text())
    params = policy.load(tmp_path, media=True).params
    assert params.keys() == ours.params.keys()


def test_a_text_model_is_written_with_the_other_parts_of_its_source(model, tmp_path):
    """What the files hold of towers stays as it is, also where they are replaced; trained weights
    are the new ones."""
    kind, theirs, _ = model
    source = tmp_path / "model"
    theirs.save_pretrained(source)
    before, config = (
        load_file(source / "model.safetensors"),
        json.loads((source / "config.json").read_text()),
    )
    text = policy.load(source)
    text.params["norm.weight"] += 1
    policy.save(text, tmp_path / "out", source=source)
    again, info = type(theirs).from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    policy.save(text, source, source=source)
    for directory in (tmp_path / "out", source):
        after = load_file(directory / "model.safetensors")
        assert after.keys() == before.keys()
        changed = [name for name, array in before.items() if not np.array_equal(array, after[name])]
        assert len(changed) == 1 and re.fullmatch(r".*model\.norm\.weight", changed[0])


def test_text_alone_is_read_without_towers(model, tmp_path):
    kind, theirs, ours = model
    policy.save(ours, tmp_path)
    text = policy.load(tmp_path)
    assert text.config.image is None and text.config.audio is None
    assert set(text.params) == {
        path for path in ours.params if not path.startswith(("image.", "audio."))
    }
    with pytest.raises(ValueError, match="media=True"):
        text.encode("image", np.zeros((1, 1, 1)), np.zeros((1, 2)))


# Kind -> spellings of its names: pairs of a pattern of the names that transformers 5 writes, and
# its replacement.
SPELLINGS = {
    "Qwen3VL": {
        "without the wrapper": [
            (r"^model\.visual\.", "visual."),
            (r"^model\.language_model\.", "model."),
        ],
        "text model inside": [
            (r"^model\.visual\.", "visual."),
            (r"^model\.language_model\.", "language_model.model."),
        ],
        "base class": [(r"^model\.", "")],
    },
    "Gemma3": {
        "released": [(r"^vision_tower\.", "vision_tower.vision_model.")],
        "in memory": [
            (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
            (r"^language_model\.model\.", "model.language_model."),
        ],
        "in memory of transformers 4": [
            (r"^vision_tower\.", "model.vision_tower.vision_model."),
            (r"^multi_modal_projector\.", "model.multi_modal_projector."),
            (r"^language_model\.model\.", "model.language_model."),
        ],
        "base class": [(r"^language_model\.model\.", "language_model.")],
    },
    "Gemma4": {"base class": [(r"^model\.", "")]},
    "Llama4": {"text model outside": [(r"^language_model\.", "")]},
    "Qwen3OmniMoeThinker": {"released": [(r"^", "thinker.")]},
    "Qwen2_5_VL": {
        "in memory": [(r"^visual\.", "model.visual."), (r"^model\.", "model.language_model.")],
        "base class": [(r"^model\.", "language_model.")],
    },
    "Qwen3_5": {"base class": [(r"^model\.", "")]},
}


@pytest.mark.parametrize(
    ("kind", "spelling"),
    [
        pytest.param(
            kind, spelling, marks=() if kind in ("Qwen3VL", "Gemma3") else pytest.mark.every_family
        )
        for kind, spellings in SPELLINGS.items()
        for spelling in spellings
    ],
)
def test_other_spellings_of_names(kind, spelling, spelled):
    path, tensors, expected = spelled(kind)
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in SPELLINGS[kind][spelling]:
            if (changed := re.sub(pattern, replacement, name)) != name:
                break
        renamed[changed] = tensor
    assert renamed.keys() != tensors.keys() and len(renamed) == len(tensors)
    save_file(renamed, path, metadata={"format": "pt"})
    params = policy.load(path.parent, media=True).params
    assert params.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(params[name], array, err_msg=name)
    text = policy.load(path.parent).params
    assert set(text) == {name for name in expected if not name.startswith(("image.", "audio."))}
    lost = next(name for name in renamed if "layers.1." in name or "blocks.1." in name)
    save_file(
        {name: tensor for name, tensor in renamed.items() if name != lost},
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match="missing tensor"):
        policy.load(path.parent, media=True)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """kind -> (file of its weights, its tensors, the weights as they are read), made once."""

    @functools.cache
    def directory(kind):
        folder = tmp_path_factory.mktemp("spelled")
        media_oracles.build(kind).save_pretrained(folder)
        path = folder / "model.safetensors"
        return path, load_file(path), policy.load(folder, media=True).params

    return directory


def test_a_flat_configuration_is_read_and_written_as_it_is(tmp_path):
    """That of Qwen2.5-VL as it is released: the keys of the text model next to those of the
    tower."""
    theirs = media_oracles.build("Qwen2_5_VL")
    theirs.save_pretrained(tmp_path / "nested")
    nested = json.loads((tmp_path / "nested/config.json").read_text())
    text, tower = nested.pop("text_config"), nested.pop("vision_config")
    rotary = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"], tower["rope_parameters"]
    old = {
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]},
    }
    tower |= {"model_type": "qwen2_5_vl", "in_chans": 3, "spatial_patch_size": 4}
    flat = text | nested | old | {"vision_config": tower}
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/config.json").write_text(json.dumps(flat))
    (tmp_path / "nested/model.safetensors").rename(tmp_path / "flat/model.safetensors")
    ours, alone = (policy.load(tmp_path / "flat", media=media) for media in (True, False))
    assert ours.config.stacks == alone.config.stacks and ours.config.image.window == 2
    policy.save(ours, tmp_path / "ours")
    written = json.loads((tmp_path / "ours/config.json").read_text())
    assert written == flat | {"dtype": "float32"}
    again, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(
            again.state_dict()[name].numpy(), tensor.numpy(), err_msg=name
        )
    again.set_attn_implementation("eager")
    before, after = (
        media_oracles.document("Qwen2_5_VL", each).logits for each in (theirs, again.eval())
    )
    np.testing.assert_allclose(after, before, atol=1e-5, rtol=0)


def omni(thinker):
    """The complete model of transformers around this thinker, with a talker and a vocoder."""
    import transformers

    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    small |= {"num_key_value_heads": 1, "vocab_size": 32}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    text = (
        small
        | experts
        | {
            "shared_expert_intermediate_size": 8,
            "rope_parameters": media_oracles.SECTIONS | {"mrope_section": [2, 1, 1]},
        }
    )
    talker = {
        "text_config": text,
        "code_predictor_config": small | {"num_code_groups": 2},
        "num_code_groups": 2,
    }
    talker |= {"thinker_hidden_size": 32, "accept_hidden_layer": 1, "spatial_merge_size": 2}
    vocoder = {
        "codebook_size": 8,
        "num_quantizers": 2,
        "decoder_dim": 8,
        "upsample_rates": [2],
        "upsampling_ratios": [2],
    }
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker.config.to_dict(),
        talker_config=talker,
        code2wav_config=small | vocoder,
    )
    model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    model.thinker.load_state_dict(thinker.state_dict())
    return model


def test_released_files_of_omni(tmp_path):
    """They hold the thinker under a prefix and in a part of the configuration, next to two models
    that are not read. What we write is the thinker, or with a source all of it."""
    thinker = media_oracles.build("Qwen3OmniMoeThinker")
    omni(thinker).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    released = load_file(path)
    assert {name.partition(".")[0] for name in released} == {"thinker", "talker", "code2wav"}
    ours, text = (policy.load(tmp_path, media=media) for media in (True, False))
    assert set(text.params) == {
        name for name in ours.params if not name.startswith(("image.", "audio."))
    }
    complete = json.loads((tmp_path / "config.json").read_text())
    extended = complete | {"duet": {"multi_token_prediction": {"depth": 1}}}
    assert families.read(complete).multi_token_prediction is None
    assert families.read(extended).multi_token_prediction is not None
    for each in (ours, text):  # with a source, all three models
        policy.save(each, tmp_path / "complete", source=tmp_path)
        assert json.loads((tmp_path / "complete" / "config.json").read_text()) == complete
        copied = load_file(tmp_path / "complete" / "model.safetensors")
        assert copied.keys() == released.keys()
        assert all(
            copied[name].tobytes() == array.tobytes() for name, array in released.items()
        )  # also NaN
    policy.save(ours, tmp_path / "ours")
    again, info = type(thinker).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    for name, tensor in thinker.state_dict().items():
        np.testing.assert_array_equal(
            again.state_dict()[name].numpy(), tensor.numpy(), err_msg=name
        )
    before, after = (
        media_oracles.document("Qwen3OmniMoeThinker", each).logits
        for each in (thinker, again.eval())
    )
    np.testing.assert_allclose(after, before, atol=1e-5, rtol=0)
    save_file(
        released | {"thinker.other.weight": np.ones(4, np.float32)}, path, metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"unexpected tensors thinker\.other\.weight"):
        policy.load(tmp_path, media=True)


@pytest.mark.every_family
def test_sounds_and_clip_bounds_of_gemma4(tmp_path, monkeypatch):
    import torch

    text, vision, keys = copy.deepcopy(media_oracles.MODELS["Gemma4"])
    vision |= {"use_clipped_linears": True, "standardize": False}
    keys["audio_config"] = dict(towers.CONFORMER)
    monkeypatch.setitem(media_oracles.MODELS, "Gemma4", (text, vision, keys))
    theirs = media_oracles.build("Gemma4")
    towers.perturb(theirs.model.audio_tower)
    theirs.save_pretrained(tmp_path / "theirs")
    theirs = type(theirs).from_pretrained(
        tmp_path / "theirs", dtype="auto"
    )  # wavelengths, not stored, as they are
    ours = policy.load(tmp_path / "theirs", media=True)
    frames = np.random.default_rng(0).normal(size=(1, 37, 16)).astype(np.float32)
    with torch.no_grad():
        full = torch.ones((1, 37), dtype=torch.bool)
        expected = theirs.model.get_audio_features(torch.tensor(frames), full).pooler_output.numpy()
    rows, _ = ours.encode("audio", frames, [[37, 1]])
    np.testing.assert_allclose(rows, expected, atol=2e-5, rtol=0)
    policy.save(ours, tmp_path / "ours")
    again, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(
            again.state_dict()[name].numpy(), tensor.numpy(), err_msg=name
        )
