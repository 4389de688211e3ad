"""Processors of each family against those of transformers.

llama4_tiles.npz holds results of the processor of transformers, which needs torchvision: 24x24
tiles of a formula on four sizes, as grey levels, and canvases of random sizes (transformers 5.23,
torchvision 0.28; `get_best_fit`, and `Llama4ImageProcessor(max_patches=6, do_rescale=False,
do_normalize=False)`). `resized16` and `resized_stretched16` hold the sides of pictures on the
canvas of 336x336 tiles, by its `get_max_res_without_distortion` (5.24).
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths,
)
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from rollout.media import processors
from rollout.media.processor import MediaError
from rollout.media.reference import refer

NAMES = ["image", "boi", "eoi", "audio", "boa", "eoa"]
TOKENIZER = SimpleNamespace(**{f"{name}_token": f"<{name}>" for name in NAMES})
SIZES = [(40, 70), (64, 64), (1, 1), (3, 500), (301, 97), (90, 33)]


def picture(height, width):
    return np.random.default_rng(height * width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def tone(samples):
    rng = np.random.default_rng(samples)
    return (np.sin(np.arange(samples) / 9) * 0.5 + rng.normal(0, 0.05, samples)).astype(np.float32)


def read(folder, oracle=None, **files):
    """Writes a directory of a model and reads its processors. `files`: contents of configurations
    by name."""
    if oracle is not None:
        oracle.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return processors.read(folder, TOKENIZER)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options", [{"patch_size": 16}, {"patch_size": 4, "image_mean": [0.5] * 3, "merge_size": 3}]
)
def test_qwen_equals_its_pillow_form(tmp_path, size, options):
    oracle = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4096, "longest_edge": 40000}, **options
    )
    ours = read(tmp_path, oracle).image
    expected = oracle([picture(*size)], input_data_format="channels_last")
    reference = refer("image", picture(*size), tmp_path)
    [(item, values)] = reference.inputs(ours).items()
    assert item.shape == tuple(expected["image_grid_thw"][0][1:])
    assert item.rows == expected["image_grid_thw"][0].prod() // oracle.merge_size**2
    np.testing.assert_array_equal(values, expected["pixel_values"])
    assert ours.items(reference.digest, reference.size) == (item,)


def test_qwen_orders_patches_by_merged_blocks(tmp_path):
    """Each pixel holds its own (y, x, channel), so that the place of every number is known."""
    stored = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "do_normalize": False,
    }
    stored |= {"do_rescale": False, "min_pixels": 1, "max_pixels": 10**6}
    ours = read(tmp_path, preprocessor_config=stored).image
    y, x = np.mgrid[:16, :24]
    values = ours.values(np.stack([y, x, y + x], axis=-1).astype(np.uint8), 0)[0].reshape(
        24, 3, 2, 4, 4
    )
    blocks = [
        (2 * i + a, 2 * j + b)
        for i in range(2)
        for j in range(3)
        for a in range(2)
        for b in range(2)
    ]
    for number, (row, column) in enumerate(blocks):
        for frame in range(2):
            assert (values[number, 0, frame] == 4 * row + np.arange(4)[:, None]).all()
            assert (values[number, 1, frame] == 4 * column + np.arange(4)).all()
            assert (
                values[number, 2, frame] == values[number, 0, frame] + values[number, 1, frame]
            ).all()


def test_qwen_refuses_a_strip(tmp_path):
    ours = read(tmp_path, Qwen2VLImageProcessorPil()).image
    with pytest.raises(
        MediaError, match="1x201 pixels is too long: at most 200 times its other side"
    ):
        ours.items("", (1, 201))


@pytest.mark.parametrize("size", SIZES)
def test_gemma3_equals_its_pillow_form(tmp_path, size):
    oracle = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    files = {
        "config": {"vision_config": {"patch_size": 4}},
        "processor_config": {"image_seq_length": 9},
    }
    ours = read(tmp_path, oracle, **files).image
    [(item, values)] = refer("image", picture(*size), tmp_path).inputs(ours).items()
    expected = oracle([picture(*size)], input_data_format="channels_last", return_tensors="np")[
        "pixel_values"
    ]
    weight = torch.randn(5, 3, 4, 4, generator=torch.manual_seed(0))
    convolved = torch.nn.functional.conv2d(torch.tensor(expected), weight, stride=4)[0].flatten(1).T
    assert (item.shape, item.rows) == ((6, 6), 9)
    np.testing.assert_array_equal(np.sort(values, axis=None), np.sort(expected, axis=None))
    np.testing.assert_allclose(values @ weight.flatten(1).numpy().T, convolved, atol=1e-5)


@pytest.mark.parametrize("size", [*SIZES, (2000, 10)])
@pytest.mark.parametrize("most", [70, 280])
def test_gemma4_equals_its_pillow_form(tmp_path, size, most):
    oracle = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=most)
    text = {"text_config": {"use_bidirectional_attention": "vision"}}
    ours = read(tmp_path, oracle, config=text).image
    expected = oracle([picture(*size)], input_data_format="channels_last")
    [(item, values)] = refer("image", picture(*size), tmp_path).inputs(ours).items()
    real = (expected["image_position_ids"][0] >= 0).all(axis=-1)
    assert item.rows == expected["num_soft_tokens_per_image"][0] and ours.looks_ahead
    np.testing.assert_array_equal(values, expected["pixel_values"][0][real])
    columns = expected["image_position_ids"][0][real]
    np.testing.assert_array_equal(
        np.stack(np.divmod(np.arange(real.sum()), item.shape[1])[::-1], -1), columns
    )


LLAMA4 = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "size": {"height": 24, "width": 24},
    "max_patches": 6,
}


@pytest.fixture(scope="module")
def stored_tiles():
    with np.load(Path(__file__).parent / "llama4_tiles.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    "name, size", [("wide", (20, 61)), ("small", (9, 13)), ("tall", (70, 30)), ("loose", (20, 30))]
)
def test_llama4_tiles_are_those_of_transformers(tmp_path, stored_tiles, name, size):
    height, width = size
    y, x = np.mgrid[:height, :width]
    content = np.stack([y * 7 + x * 3, x * x + y * 5, y * x * 2], axis=-1).astype(np.uint8)
    files = {"preprocessor_config": LLAMA4 | {"do_rescale": False, "do_normalize": False}}
    ours = read(tmp_path, **files, processor_config={"patch_size": 4}).image
    items = refer("image", content, tmp_path).inputs(ours)
    expected = stored_tiles[name].astype(int)
    assert len({item.digest for item in items}) == len(items) == len(expected)
    assert {(item.shape, item.rows) for item in items} == {((6, 6), 9)}
    for values, tile in zip(items.values(), expected, strict=True):
        pixels = values.reshape(6, 6, 3, 4, 4).transpose(2, 0, 3, 1, 4).reshape(3, 24, 24)
        assert (
            np.abs(pixels - tile).max() <= 2
        )  # grey levels: Pillow rounds another way than torchvision


@pytest.mark.parametrize("most", [16, 4])
def test_llama4_takes_the_canvas_of_transformers(tmp_path, stored_tiles, most):
    stored = {"image_processor_type": "Llama4ImageProcessor", "max_patches": most}
    ours = read(tmp_path, preprocessor_config=stored).image
    stretched = read(tmp_path, preprocessor_config=stored | {"resize_to_max_canvas": True}).image
    for size, canvas, other in zip(
        stored_tiles["sizes"],
        stored_tiles[f"canvas{most}"],
        stored_tiles[f"stretched{most}"],
        strict=True,
    ):
        expected = Llama4Processor._prompt_split_image(None, canvas, 144)
        assert ours.text(tuple(size)) == expected, size
        assert stretched.text(tuple(size)) == Llama4Processor._prompt_split_image(
            None, other, 144
        ), size
        rows = sum(item.rows for item in ours.items("", tuple(size)))
        assert rows == expected.count("<|patch|>")


@pytest.mark.parametrize("name, stretch", [("resized16", False), ("resized_stretched16", True)])
def test_llama4_sizes_are_those_of_transformers(tmp_path, stored_tiles, name, stretch):
    """1572x2096 and 1628x1221 are a pixel smaller where the scale is a float64."""
    stored = {"image_processor_type": "Llama4ImageProcessor", "resize_to_max_canvas": stretch}
    ours = read(tmp_path, preprocessor_config=stored).image
    for size, expected in zip(
        stored_tiles["resized_from"].tolist(), stored_tiles[name].tolist(), strict=True
    ):
        assert ours._resized(*size, *ours._tiles(*size)) == tuple(expected), size


def test_llama4_values_are_rounded_as_torch_rounds(tmp_path):
    ours = read(tmp_path, preprocessor_config=LLAMA4, processor_config={"patch_size": 4}).image
    expected = (torch.arange(256).to(torch.bfloat16) * (1 / 255)).sub(torch.tensor(0.5).bfloat16())
    expected = expected.div(torch.tensor(0.5).bfloat16()).float().numpy()
    np.testing.assert_array_equal(ours.table, np.tile(expected, (3, 1)))


@pytest.mark.parametrize("samples", [161, 320, 1000, 16000, 16064, 4321])
def test_gemma4_audio_equals_its_extractor(tmp_path, samples):
    oracle = Gemma4AudioFeatureExtractor(feature_size=16)
    ours = read(tmp_path, oracle).audio
    reference = refer("audio", {"array": tone(samples), "sampling_rate": 16000}, tmp_path)
    [(item, values)] = reference.inputs(ours).items()
    expected = oracle([tone(samples)])
    mask = expected["input_features_mask"][0]
    np.testing.assert_array_equal(values, expected["input_features"][0][mask])
    names = SimpleNamespace(boa_token="", eoa_token="", audio_token="x")
    assert item.rows == len(Gemma4Processor.replace_audio_token(names, expected, 0))
    assert item.shape == (len(values), 1)


def test_gemma4_audio_refuses_what_it_would_cut(tmp_path):
    ours = read(tmp_path, Gemma4AudioFeatureExtractor()).audio
    assert ours.items("", (480_000, 16_000))[0].rows == 750
    with pytest.raises(MediaError, match="a sound of 30.5 s is too long: at most 30 s"):
        ours.items("", (488_000, 16_000))
    with pytest.raises(MediaError, match="160 samples is too short: at least 161"):
        ours.items("", (160, 16_000))


@pytest.mark.parametrize(
    "samples, rate", [(1600, 16000), (16000, 16000), (16100, 16000), (4000, 8000), (201, 16000)]
)
def test_omni_audio_equals_the_whisper_extractor(tmp_path, monkeypatch, samples, rate):
    oracle = WhisperFeatureExtractor(feature_size=16)
    ours = read(tmp_path, oracle).audio
    reference = refer("audio", {"array": tone(samples), "sampling_rate": rate}, tmp_path)
    [(item, values)] = reference.inputs(ours).items()
    from rollout.media.sound import resample

    monkeypatch.setattr(
        "transformers.models.whisper.feature_extraction_whisper.is_torch_available", lambda: False
    )
    wave = resample(tone(samples), rate, 16000)
    expected = oracle(
        [wave], sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True
    )
    assert len(values) == expected["attention_mask"].sum() == item.shape[0]
    np.testing.assert_allclose(values, expected["input_features"][0].T, atol=1e-6)
    assert item.rows == _get_feat_extract_output_lengths(item.shape[0])


@pytest.mark.parametrize(
    "frames, rows", [(10, 2), (50, 7), (150, 20), (1000, 130), (100, 13), (1, 1)]
)
def test_omni_audio_rows(tmp_path, frames, rows):
    assert read(tmp_path, WhisperFeatureExtractor()).audio.rows((frames, 1)) == rows


def test_configurations_of_both_layouts_are_read(tmp_path):
    """Older directories have one flat file for pictures and sounds, newer ones nest them in
    processor_config.json."""
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "min_pixels": 3136,
        "max_pixels": 12845056,
    }
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "n_fft": 400,
        "hop_length": 160,
    }
    flat = read(tmp_path, preprocessor_config=image | audio)
    (tmp_path / "preprocessor_config.json").unlink()
    assert (
        read(tmp_path, processor_config={"image_processor": image, "feature_extractor": audio})
        == flat
    )
    assert flat.image.patch == 16 and flat.image.least == 3136 and flat.audio.bins == 128


@pytest.mark.parametrize(
    "stored, message",
    [
        ({}, "no preprocessor_config.json or processor_config.json that names a processor"),
        (
            {"image_processor_type": "Qwen2VLImageProcesor"},
            r"unknown image_processor_type .* \(nearest: Qwen2VL",
        ),
        (
            {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True},
            "do_pan_and_scan: true is not",
        ),
        (
            {"image_processor_type": "Qwen2VLImageProcessor", "do_resize": False},
            "do_resize: false is not supported",
        ),
        (
            {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 24, "width": 24}},
            "no multiple of the patches",
        ),
        (
            {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 99},
            "must be one of 70, 140",
        ),
    ],
)
def test_other_configurations_are_refused(tmp_path, stored, message):
    with pytest.raises(MediaError, match=f"{tmp_path}: .*{message}"):
        read(tmp_path, preprocessor_config=stored)


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Gemma3ImageProcessor"}'
    )
    with pytest.raises(MediaError, match="the tokenizer names no `boi_token`"):
        processors.read(tmp_path, SimpleNamespace())


@pytest.mark.slow
def test_values_need_neither_torch_nor_jax(tmp_path):
    """All families compute the same in a process that can import neither."""
    kinds = {
        "qwen": (Qwen2VLImageProcessorPil(patch_size=4), "image"),
        "gemma3": (Gemma3ImageProcessorPil(size={"height": 28, "width": 28}), "image"),
        "gemma4": (Gemma4ImageProcessorPil(patch_size=4), "image"),
        "llama4": (None, "image"),
        "gemma4_audio": (Gemma4AudioFeatureExtractor(), "audio"),
        "omni": (WhisperFeatureExtractor(), "audio"),
    }
    expected = {}
    for name, (oracle, kind) in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        files = (
            {"preprocessor_config": LLAMA4, "processor_config": {"patch_size": 4}}
            if oracle is None
            else {}
        )
        ours = getattr(read(folder, oracle, **files), kind)
        content = picture(30, 50) if kind == "image" else tone(4000)
        expected[name] = [
            float(np.abs(v).sum(dtype=np.float64)) for v in ours.values(content, 16000)
        ]
    np.savez(tmp_path / "contents.npz", image=picture(30, 50), audio=tone(4000))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'jax', 'torchvision')))\n"
        "import json, numpy as np\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from rollout.media import processors\n"
        "folder, tokens, kinds = Path(sys.argv[1]), json.loads(sys.argv[2]), "
        "json.loads(sys.argv[3])\n"
        "contents, sums = np.load(folder / 'contents.npz'), {}\n"
        "for name, kind in kinds.items():\n"
        "    ours = getattr(processors.read(folder / name, SimpleNamespace(**tokens)), kind)\n"
        "    sums[name] = [float(np.abs(v).sum(dtype=np.float64)) for v in "
        "ours.values(contents[kind], 16000)]\n"
        "print(json.dumps(sums))\n"
    )
    arguments = [
        str(tmp_path),
        json.dumps(vars(TOKENIZER)),
        json.dumps({n: k for n, (_, k) in kinds.items()}),
    ]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
