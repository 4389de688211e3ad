"""Tokens of prompts with pictures and sounds against the processors of transformers, on tokenizers
made here."""

import functools
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_tokenizers import TOKENS, tokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor
from transformers.processing_utils import ProcessorMixin

from policy.cache.media import Media
from rollout.media import processors
from rollout.media.expand import expand, expand_text
from rollout.media.processor import MediaError
from rollout.media.reference import refer

GRID = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}


class Tiles:
    """Stands for the processor of Llama 4, which needs torchvision: it says 2x3 tiles for each
    picture."""

    model_input_names = ("pixel_values",)

    def __call__(self, images, **_):
        shapes = {
            "pixel_values": [np.zeros((3, 24, 24))] * len(images),
            "aspect_ratios": [(2, 3)] * len(images),
        }
        return BatchFeature(shapes)

    def fetch_images(self, images):
        return images


def stored(processor):
    return json.loads(processor.to_json_string())


def oracle(family, tokens):
    """Builds the processor of transformers, and the configurations of its directory."""
    video = SimpleNamespace(model_input_names=[])
    grid, mel = Qwen2VLImageProcessorPil(**GRID), WhisperFeatureExtractor(feature_size=16)
    if family == "qwen3_vl":
        return Qwen3VLProcessor(grid, tokens, video), {"preprocessor_config": stored(grid)}
    if family == "qwen2_5_vl":  # with the keys of the released files
        grid = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096)
        released = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
        released |= {"min_pixels": 64, "max_pixels": 4096, "processor_class": "Qwen2_5_VLProcessor"}
        return Qwen2_5_VLProcessor(grid, tokens, video), {"preprocessor_config": released}
    if family == "omni":
        nested = {"image_processor": stored(grid), "feature_extractor": stored(mel)}
        return Qwen3OmniMoeProcessor(grid, video, mel, tokens), {"processor_config": nested}
    if family == "gemma3":
        square = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        files = {"preprocessor_config": stored(square), "processor_config": {"image_seq_length": 4}}
        return Gemma3Processor(square, tokens, image_seq_length=4), files
    if family == "gemma4":
        area, mel = (
            Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70),
            Gemma4AudioFeatureExtractor(feature_size=16),
        )
        nested = {"image_processor": stored(area), "feature_extractor": stored(mel)}
        files = {
            "processor_config": nested,
            "config": {"text_config": {"use_bidirectional_attention": "vision"}},
        }
        return Gemma4Processor(mel, area, tokens, video), files
    tiles = {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 24, "width": 24},
        "max_patches": 6,
    }
    return Llama4Processor(Tiles(), tokens, patch_size=4), {
        "preprocessor_config": tiles,
        "processor_config": {"patch_size": 4},
    }


@pytest.fixture
def family(request, tmp_path, monkeypatch):
    """Returns (name, tokenizer, our processors, the processor of transformers)."""
    # The classes ask for a processor of video, which needs torchvision.
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    tokens = tokenizer(request.param)
    theirs, files = oracle(request.param, tokens)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return request.param, tokens, processors.read(tmp_path, tokens), theirs


def all_families(function):
    return pytest.mark.parametrize("family", list(TOKENS), indirect=True)(function)


PICTURES = [np.full((50, 75, 3), 200, np.uint8), np.full((52, 70, 3), 90, np.uint8)]
SOUND = {"array": np.sin(np.arange(20_000) / 9).astype(np.float32), "sampling_rate": 16_000}
IMAGE, AUDIO = {"type": "image"}, {"type": "audio"}


def text(content):
    return {"type": "text", "text": content}


CONVERSATION = [
    {"role": "system", "content": "Be\n\nbrief."},
    {"role": "user", "content": [text("One\n"), IMAGE, text("\n and two:"), IMAGE, text("?")]},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
SPOKEN = [{"role": "user", "content": [text("Listen "), AUDIO, text(" and see"), IMAGE, IMAGE]}]


def references(tmp_path, sounds=0):
    pictures = [refer("image", pixels, tmp_path) for pixels in PICTURES]
    return [refer("audio", SOUND, tmp_path)] * sounds + pictures


@all_families
def test_tokens_are_those_of_transformers(family, tmp_path):
    _, tokens, ours, theirs = family
    expanded = expand(tokens, CONVERSATION, references(tmp_path), ours)
    rendered = tokens.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    expected = theirs(
        text=[rendered],
        images=[torch.tensor(p).permute(2, 0, 1) for p in PICTURES],
        add_special_tokens=False,
    )
    assert expanded.tokens.tolist() == expected["input_ids"][0]
    assert expanded.index[expanded.index >= 0].tolist() == list(
        range(sum(item.rows for item in expanded.items))
    )
    row = tokens.convert_tokens_to_ids(ours.image.row_token)
    np.testing.assert_array_equal(expanded.index >= 0, expanded.tokens == row)


@pytest.mark.parametrize("family", ["omni", "gemma4"], indirect=True)
def test_sounds_are_expanded_as_transformers_does(family, tmp_path):
    _, tokens, ours, theirs = family
    expanded = expand(tokens, SPOKEN, references(tmp_path, sounds=1), ours)
    rendered = tokens.apply_chat_template(SPOKEN, tokenize=False, add_generation_prompt=True)
    images = [torch.tensor(p).permute(2, 0, 1) for p in PICTURES]
    expected = theirs(
        text=[rendered], images=images, audio=[SOUND["array"]], add_special_tokens=False
    )
    assert expanded.tokens.tolist() == list(expected["input_ids"][0])
    assert [item.kind for item in expanded.items] == ["audio", "image", "image"]
    assert expanded.index.max() + 1 == sum(item.rows for item in expanded.items)


@pytest.mark.parametrize(
    ("family", "theirs"),
    [("qwen3_vl", Qwen3VLModel), ("qwen2_5_vl", Qwen2_5_VLModel)],
    indirect=["family"],
)
def test_positions_are_those_of_transformers(family, theirs, tmp_path):
    _, tokens, ours, _ = family
    expanded = expand(tokens, CONVERSATION, references(tmp_path), ours)
    grids = torch.tensor([[1, *item.shape] for item in expanded.items])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = functools.partial(theirs.get_vision_position_ids, model)
    kinds = torch.tensor(expanded.index >= 0).int()[None]
    turns, delta = theirs.get_rope_index(model, torch.tensor(expanded.tokens)[None], kinds, grids)
    np.testing.assert_array_equal(expanded.turns, turns[:, 0].T)
    assert Media(turns=expanded.turns).delta == int(delta) < 0 and expanded.until is None


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_pictures_that_touch_have_positions_of_their_own(family, tmp_path):
    """Without text between them, where transformers takes two pictures for one."""
    _, tokens, ours, _ = family
    pad = ours.image.marker
    expanded = expand_text(tokens, f"abc{pad}{pad}d", references(tmp_path), ours)
    (high, wide), (other_high, other_wide) = [
        (i.shape[0] // 2, i.shape[1] // 2) for i in expanded.items
    ]
    first = [(3, 3 + y, 3 + x) for y, x in itertools.product(range(high), range(wide))]
    start = 3 + max(high, wide)
    second = [
        (start, start + y, start + x)
        for y, x in itertools.product(range(other_high), range(other_wide))
    ]
    after = start + max(other_high, other_wide)
    assert list(map(tuple, expanded.turns.tolist())) == [
        (i,) * 3 for i in range(3)
    ] + first + second + [(after,) * 3]


@pytest.mark.parametrize("family", ["gemma3", "gemma4"], indirect=True)
def test_tokens_of_a_picture_look_ahead_to_its_end(family, tmp_path):
    _, tokens, ours, theirs = family
    expanded = expand(tokens, CONVERSATION, references(tmp_path), ours)
    rendered = tokens.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    images = [torch.tensor(p).permute(2, 0, 1) for p in PICTURES]
    encoded = theirs(text=[rendered], images=images, add_special_tokens=False)
    kinds = np.asarray(encoded.get("token_type_ids", encoded.get("mm_token_type_ids")))[0]
    expected = np.arange(len(kinds))
    for place in reversed(range(len(kinds) - 1)):
        if kinds[place] and kinds[place + 1]:
            expected[place] = expected[place + 1]
    np.testing.assert_array_equal(expanded.until, expected)
    assert expanded.turns is None


@all_families
def test_tokens_know_their_character_of_the_rendered_text(family, tmp_path):
    """So that a mask of the assistant's turns, made on the rendered text, finds its tokens."""
    _, tokens, ours, _ = family
    expanded = expand(tokens, CONVERSATION, references(tmp_path), ours, add_generation_prompt=False)
    rendered = tokens.apply_chat_template(CONVERSATION, tokenize=False)
    start = rendered.index("Yes.")
    answer = (expanded.starts >= start) & (expanded.starts < start + 4)
    assert tokens.decode(expanded.tokens[answer]) == "Yes."
    markers = [i for i in range(len(rendered)) if rendered.startswith(ours.image.marker, i)]
    assert sorted(set(expanded.starts[expanded.index >= 0])) == markers


@all_families
def test_no_end_lies_between_the_tiles_of_a_picture(family, tmp_path):
    _, tokens, ours, _ = family
    expanded = expand(tokens, CONVERSATION, references(tmp_path), ours)
    owners = np.repeat(expanded.owners, [item.rows for item in expanded.items])
    for end in range(len(expanded.tokens) + 1):
        cut = expanded.end_before(end)
        before, after = (set(owners[rows[rows >= 0]]) for rows in np.split(expanded.index, [cut]))
        assert cut <= end and not before & after
        if cut < end:  # nothing but tokens of one picture
            assert len(set(expanded.starts[cut:end].tolist())) == 1


@all_families
def test_a_prompt_without_pictures_is_text(family):
    _, tokens, ours, _ = family
    messages = [{"role": "user", "content": "hi"}]
    expanded = expand(tokens, messages, [], ours)
    assert tokens.decode(expanded.tokens) == "[user]\nhi\n[assistant]"
    assert (expanded.index == -1).all() and expanded.items == ()
    assert expanded.turns is None and expanded.until is None
    assert expanded.starts.tolist() == list(range(len(expanded.tokens)))


@all_families
def test_a_reserved_token_in_a_text_is_refused(family, tmp_path):
    _, tokens, ours, _ = family
    for token in ours.image.reserved:
        for content in (f"a {token}", [IMAGE, text(f"a {token}"), IMAGE]):
            messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": content}]
            with pytest.raises(
                MediaError, match="message 1 contains .*, which stands for a picture; remove it"
            ):
                expand(tokens, messages, references(tmp_path), ours)


@all_families
def test_markers_and_pictures_must_agree(family, tmp_path):
    _, tokens, ours, _ = family
    for count in (0, 1, 3):
        with pytest.raises(
            MediaError, match=f"{count} pictures, but the chat template wrote 2 times"
        ):
            expand(tokens, CONVERSATION, references(tmp_path)[:1] * count, ours)
    # A marker in two parts of a text, which the template joins.
    marker = ours.image.marker
    split = [{"role": "user", "content": [text(marker[:4]), text(marker[4:])]}]
    with pytest.raises(MediaError, match="0 pictures, but the chat template wrote 1 times"):
        expand(tokens, split, [], ours)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_other_refusals(family, tmp_path):
    _, tokens, ours, _ = family
    with pytest.raises(
        MediaError, match="the row has a sound, but the model has no processor of sounds"
    ):
        expand(tokens, CONVERSATION, references(tmp_path, sounds=1), ours)
    strip = refer("image", np.zeros((1, 999, 3), np.uint8), tmp_path, "rows.jsonl:7: picture 1")
    with pytest.raises(
        MediaError, match="rows.jsonl:7: picture 1: a picture of 1x999 pixels is too long"
    ):
        expand(tokens, CONVERSATION, [strip, strip], ours)
    plain = tokenizer("llama4")
    plain.chat_template = tokens.chat_template
    with pytest.raises(MediaError, match="the tokenizer must know each as one token"):
        expand(plain, CONVERSATION, references(tmp_path), ours)
