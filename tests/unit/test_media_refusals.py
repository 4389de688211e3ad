"""What does not go with pictures is refused by name: by `rl-train --check`, and before a model is
built."""

import json
from pathlib import Path

import pytest

from rl.commands import cli
from rl.errors import ConfigError
from rl.run import build
from rl.run.load import load
from rl.run.prepare import prepare

FOLDER = Path(__file__).parents[1] / "end_to_end"
CONFIG, ROWS = FOLDER / "mixed.yml", FOLDER / "mixed_rows.py"
MODULES = "model.multi_token_prediction={depth: 1}"
REFUSED = {
    "mesh.shard_mode": (
        ["mesh.shard_mode=explicit"],
        "reads of the table of pictures declare no shardings",
    ),
    "hyper-connections": (
        ["model.hyper_connections={}"],
        "which of the residual streams gets the features",
    ),
    "n-gram tables": (
        ["model.engram={layers: [1], vocab_bases: [11, 13], heads: 1, head_dim: 8}"],
        "n-grams of placeholders say nothing",
    ),
    "model.batch_split": (
        ["model.batch_split=true"],
        "the table of pictures has no rows of the batch",
    ),
    "stages.N.mtp": ([MODULES, "stages.0.mtp={}"], "a prediction module embeds the next token"),
    "generator.speculative": (
        [MODULES, "generator.speculative=1"],
        "may stand for a part of a picture; leave it out",
    ),
}


def options(*more: str) -> list[str]:
    data = [f"{key}.task={ROWS}:prompts" for key in ("data", "evaluation.data")]
    return [*data, f"rewards.functions=[{ROWS}:odd]", *more]


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_rows_tell(name, capsys):
    given, reason = REFUSED[name]
    assert cli.train_main([str(CONFIG), "--check", *options(*given)]) == 2
    said = capsys.readouterr().err
    assert name in said and reason in said


def test_text_alone_goes_with_all_of_them(capsys):
    text = [f"data.task={ROWS}:text", "evaluation=null", *REFUSED["mesh.shard_mode"][0]]
    assert cli.train_main([str(CONFIG), "--check", *options(*text)]) == 0, capsys.readouterr().err


def built(*more: str) -> None:
    config = load([CONFIG], options("evaluation=null", *more))
    prepared = prepare(config)
    try:
        build.prepared_graph(config, prepared, media=prepared.data.has_media)
    finally:
        prepared.close()


def scored(*stages: dict) -> str:
    """Stages of which GRPO is scored by a reward model of the run."""
    common = {"steps": 1, "prompts_per_step": 2, "sampling": {"max_new_tokens": 6}}
    reward = {"functions": [{"name": "reward_model", "options": {"source": "reward_model"}}]}
    kinds = {
        "reward_model": {"data": {"task": f"{ROWS}:pairs"}},
        "grpo": {"samples_per_prompt": 2, "rewards": reward},
    }
    return "stages=" + json.dumps(
        [common | kinds.get(stage["algorithm"], {}) | stage for stage in stages]
    )


REWARD_MODEL, TRAINS, GRPO = (
    {"algorithm": "reward_model"},
    {"algorithm": "sft", "freeze": []},
    {"algorithm": "grpo"},
)


@pytest.mark.parametrize(
    ("stages", "changes"),
    [([REWARD_MODEL, GRPO | {"freeze": []}], "grpo"), ([REWARD_MODEL, TRAINS, GRPO], "sft")],
    ids=["the scored stage", "a stage before it"],
)
def test_a_reward_model_reads_rows_of_the_towers_that_it_was_trained_with(stages, changes):
    with pytest.raises(
        ConfigError,
        match=f"grpo: reward model reward_model reads the rows .* stage {changes} changes",
    ):
        built(scored(*stages))


def test_a_reward_model_may_follow_a_trained_tower():
    built(scored(TRAINS, REWARD_MODEL, GRPO))


def test_a_teacher_reads_no_pictures():
    teacher = {
        "algorithm": "distill",
        "steps": 1,
        "prompts_per_step": 2,
        "sampling": {"max_new_tokens": 6},
    }
    with pytest.raises(
        ConfigError,
        match="distill: a teacher reads no pictures or sounds; use rows of text, or sft",
    ):
        built(f"stages={json.dumps([teacher | {'teacher': {'source': 'tiny-vl'}}])}")


def test_a_misspelt_part_of_a_tower_is_refused():
    with pytest.raises(ConfigError, match=r"begins with 'image.blockz'"):
        built("stages.0.freeze=[image.blockz]")
    built("stages.0.freeze=[image.blocks]")
