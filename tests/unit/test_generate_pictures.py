"""`rl generate` with prompts that have pictures, and text prompts between them."""

import json
from pathlib import Path

import pytest
from media_rows import model_directory, png

import policy
from policy.huggingface import sources
from rl.commands import cli
from rl.data import prompts
from rl.data.encoding import ExampleEncoder
from rl.data.media import processors_of
from rl.media import MediaTables
from rollout import Generator, SamplingParams
from rollout.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny Qwen3-VL with random weights, its tokenizer and its processor."""
    folder = Path(model_directory(tmp_path_factory.mktemp("models") / "tiny"))
    policy.save(policy.create(sources.read_config(folder, media=True), seed=1), folder)
    return folder


def rows() -> list[dict]:
    """Five prompts, more than a block holds: two pictures, text, the same pictures in the other order, a tag, and the
    first one again."""
    user = {"role": "user", "content": [IMAGE, {"type": "text", "text": "and"}, IMAGE]}
    two = {"prompt": [user], "images": ["one.png", "two.png"]}
    text = {"prompt": [{"role": "user", "content": "no picture"}]}
    return [two, text, two | {"images": ["two.png", "one.png"]}, {"prompt": "<image>what", "image": "one.png"}, two]


@pytest.mark.slow
def test_pictures_are_shown_to_the_model_and_text_is_completed_between_them(directory, tmp_path, capsys):
    (tmp_path / "one.png").write_bytes(png(10))
    (tmp_path / "two.png").write_bytes(png(200))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given = ("--samples", 2, "--max-new-tokens", 4, "--seed", 3, "--slots", 1, "--platform", "cpu")
    assert cli.main(["generate", str(directory), "--prompts", str(file), *map(str, given)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    tokenizer = load_tokenizer(directory)
    processors = processors_of(directory, tokenizer)
    problems = prompts.problems(prompts.read_prompts(str(file)), ExampleEncoder(tokenizer, processors), tmp_path)
    model = policy.load(directory, media=True)
    tables = MediaTables.of_blocks(model.graph, processors, [problems])
    with tables.loader:
        table = tables.of(model.params, [problem.media for problem in problems])
    shown = [table.prompt(problem.ids, problem.media) for problem in problems]
    params = SamplingParams(n=2, max_new_tokens=4, stop_token_ids=(tokenizer.eos_token_id,))
    generator = Generator(model, max_length=128, slots=2, seed=3, tokenizer=tokenizer)
    completions = [each for group in generator.generate(shown, params) for each in group]

    assert [(line["sample"], line["tokens"]) for line in lines] == [
        (number % 2, each.tokens) for number, each in enumerate(completions)
    ]
    for line, completion in zip(lines, completions, strict=True):
        assert line["logprobs"] == pytest.approx(completion.logprobs, abs=1e-4)
    texts = [[part.get("text") for part in line["prompt"][0]["content"]] for line in (lines[0], lines[4])]
    assert texts == [[None, "and", None]] * 2 and lines[2]["prompt"] == rows()[1]["prompt"]
    first = [line["logprobs"][0] for line in lines if line["tokens"]]
    assert len(set(first)) > 2


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
