"""`rl generate` with prompts that have pictures, and text prompts between them."""

import copy
import json
from pathlib import Path

import media_oracles
import media_tokenizers
import numpy as np
import pytest
from media_rows import model_directory, png
from PIL import Image

import policy
from policy.huggingface import sources
from rl.commands import cli
from rl.data import prompts
from rl.data.encoding import ExampleEncoder
from rl.data.media import processors_of
from rl.records import samples
from rl.training.media.tables import MediaTables
from rollout import Generator, SamplingParams
from rollout.text.tokenizer import load_tokenizer

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny Qwen3-VL with random weights, its tokenizer and its processor."""
    folder = Path(model_directory(tmp_path_factory.mktemp("models") / "tiny"))
    policy.save(policy.create(sources.read_config(folder, media=True), seed=1), folder)
    return folder


def rows() -> list[dict]:
    """Five prompts, more than a block holds: two pictures, text, the same pictures in the other
    order, a tag, and the first one again."""
    user = {"role": "user", "content": [IMAGE, {"type": "text", "text": "and"}, IMAGE]}
    two = {"prompt": [user], "images": ["one.png", "two.png"]}
    text = {"prompt": [{"role": "user", "content": "no picture"}]}
    return [
        two,
        text,
        two | {"images": ["two.png", "one.png"]},
        {"prompt": "<image>what", "image": "one.png"},
        two,
    ]


@pytest.mark.slow
def test_pictures_are_shown_to_the_model_and_text_is_completed_between_them(
    directory, tmp_path, capsys
):
    (tmp_path / "one.png").write_bytes(png(10))
    (tmp_path / "two.png").write_bytes(png(200))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given = ("--samples", 2, "--max-new-tokens", 4, "--seed", 3, "--slots", 1, "--platform", "cpu")
    assert cli.main(["generate", str(directory), "--prompts", str(file), *map(str, given)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    tokenizer = load_tokenizer(directory)
    processors = processors_of(directory, tokenizer)
    problems = prompts.problems(
        prompts.read_prompts(str(file)), ExampleEncoder(tokenizer, processors), tmp_path
    )
    model = policy.load(directory, media=True)
    tables = MediaTables.of_blocks(model.graph, processors, [problems])
    with tables.loader:
        table = tables.of(model.params, [problem.expanded for problem in problems])
    shown = [table.prompt(problem.ids, problem.expanded) for problem in problems]
    params = SamplingParams(n=2, max_new_tokens=4, stop_token_ids=(tokenizer.eos_token_id,))
    generator = Generator(model, max_length=128, slots=2, seed=3, tokenizer=tokenizer)
    completions = [each for group in generator.generate(shown, params) for each in group]

    assert [(line["sample"], line["tokens"]) for line in lines] == [
        (number % 2, each.tokens) for number, each in enumerate(completions)
    ]
    for line, completion in zip(lines, completions, strict=True):
        assert line["logprobs"] == pytest.approx(completion.logprobs, abs=1e-4)
    texts = [
        [part.get("text") for part in line["prompt"][0]["content"]] for line in (lines[0], lines[4])
    ]
    assert texts == [[None, "and", None]] * 2 and lines[2]["prompt"] == rows()[1]["prompt"]
    first = [line["logprobs"][0] for line in lines if line["tokens"]]
    assert len(set(first)) > 2


@pytest.mark.slow
def test_an_evaluation_shows_the_pictures_that_rl_generate_shows(directory, tmp_path, capsys):
    for name, shade in (("one.png", 10), ("two.png", 200)):
        (tmp_path / name).write_bytes(png(shade))
    (tmp_path / "sees.py").write_text(
        "def sees(prompts, completions, images):\n"
        "    return [float(len(each)) / 2 for each in images]\n"
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given = ("--samples", "2", "--max-new-tokens", "4", "--seed", "3", "--slots", "1")
    given = (*given, "--temperature", "1", "--platform", "cpu")
    assert cli.main(["generate", str(directory), "--prompts", str(file), *given]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    reward = f"{tmp_path / 'sees.py'}:sees"
    verb = ["eval", str(directory), "--data", str(file), "--reward", reward]
    assert cli.main([*verb, "-o", str(tmp_path / "out"), *given]) == 0
    records = list(samples.read(tmp_path / "out"))
    tokens = {(each["prompt_id"], each["sample"]): each["tokens"] for each in records}
    assert tokens == {
        (number // 2, line["sample"]): line["tokens"] for number, line in enumerate(lines)
    }
    pictures = [each["reward"] for each in sorted(records, key=lambda one: one["prompt_id"])]
    assert pictures[::2] == [1.0, 0.0, 1.0, 0.5, 1.0]
    assert len(list((tmp_path / "out" / "media").iterdir())) == 2  # thumbnails
    keys = [json.loads(line)["key"] for line in (tmp_path / "out" / "problems.jsonl").open()]
    assert len(set(keys)) == 4 and keys[0] == keys[4]  # other pictures are another question


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "<image>what", "image": "no.png"}, "prompts.jsonl:2: "),
        ({"prompt": "<image><image>", "images": ["one.png"]}, "prompts.jsonl:2: "),
    ],
    ids=["a file that is not there", "more tags than pictures"],
)
def test_a_picture_that_cannot_be_read_is_named(directory, tmp_path, capsys, row, said):
    (tmp_path / "one.png").write_bytes(png(10))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in ({"prompt": "a"}, row)))
    assert cli.main(["generate", str(directory), "--prompts", str(file), "--platform", "cpu"]) == 3
    assert said in capsys.readouterr().err


def directory_of_merges(kind: str, folder: Path, merge: int = 3):
    """Writes a tiny model of transformers whose rows are squares of `merge` patches, with tokenizer
    and processor. Returns (the model, its processor of pictures)."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text, vision, keys = copy.deepcopy(media_oracles.MODELS[kind])
    tokens = media_tokenizers.tokenizer("qwen2_5_vl")
    ids = dict(zip(tokens.all_special_tokens, tokens.all_special_ids, strict=True))
    names = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    keys |= {f"{key}_token_id": ids[f"<|{name}|>"] for key, name in names.items()}
    stops = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | stops | {"vocab_size": 300},
        vision_config=vision | {"spatial_merge_size": merge},
        **keys,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=merge, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    processor.save_pretrained(folder)
    return model, processor


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", pytest.param("Qwen3VL", marks=pytest.mark.slow)])
def test_rows_of_nine_patches_are_those_of_transformers(kind, tmp_path, capsys):
    """From the file of a picture to values, grid, logits and greedy tokens."""
    import torch

    theirs, processor = directory_of_merges(kind, tmp_path / "model")
    noise = np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    row = {
        "prompt": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what"}]}],
        "images": ["noise.png"],
    }
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n")

    tokenizer = load_tokenizer(tmp_path / "model")
    processors = processors_of(tmp_path / "model", tokenizer)
    (problem,) = prompts.problems(
        prompts.read_prompts(str(file)), ExampleEncoder(tokenizer, processors), tmp_path
    )
    expected = processor([noise], return_tensors="pt", input_data_format="channels_last")
    [(item, values)] = problem.expanded.references[0].inputs(processors.image).items()
    np.testing.assert_array_equal(values, expected["pixel_values"])
    assert item.shape == tuple(expected["image_grid_thw"][0][1:].tolist())
    assert (
        item.rows
        == problem.ids.count(theirs.config.image_token_id)
        == item.shape[0] * item.shape[1] // 9
        > 4
    )

    def shown(ids):
        return expected | {
            "input_ids": ids,
            "mm_token_type_ids": (ids == theirs.config.image_token_id).int(),
        }

    ids = torch.tensor([problem.ids])
    with torch.no_grad():
        full = theirs.generate(**shown(ids), max_new_tokens=8, do_sample=False)
        theirs.model.rope_deltas = None  # it stays from call to call
        logp = torch.log_softmax(theirs(**shown(full)).logits, -1)
    tokens = full[0, ids.shape[1] :].tolist()
    drawn = [logp[0, ids.shape[1] - 1 + n, token].item() for n, token in enumerate(tokens)]
    given = ("--max-new-tokens", 8, "--temperature", 0, "--platform", "cpu")
    assert (
        cli.main(["generate", str(tmp_path / "model"), "--prompts", str(file), *map(str, given)])
        == 0
    )
    line = json.loads(capsys.readouterr().out)
    assert line["tokens"] == tokens and len(set(tokens)) > 1
    np.testing.assert_allclose(line["logprobs"], drawn, atol=1e-4, rtol=0)

    # A processor that makes other rows is named before a weight is read.
    stored = tmp_path / "model" / "preprocessor_config.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"merge_size": 2}))
    assert (
        cli.main(["generate", str(tmp_path / "model"), "--prompts", str(file), *map(str, given)])
        == 3
    )
    said = capsys.readouterr().err
    assert (
        "prompts.jsonl:1: " in said
        and "vision_config has spatial_merge_size 3, the processor merge_size 2" in said
    )
