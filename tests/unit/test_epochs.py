"""`stages.N.epochs`: the steps follow from the rows that a stage takes, before a model is built."""

import json

import pytest

import rl.stages
from rl.commands.cli import main
from rl.config import files
from rl.data.drawing.order import shuffled
from rl.errors import ConfigError
from rl.plan.command import _learning_rates
from rl.run.health import outline
from rl.run.load import load
from rl.run.prepare import prepare, with_steps

MODEL = {"source": "tiny-deepseek", "overrides": {"vocab_size": 320}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stage(**keys):
    return {
        "algorithm": "sft",
        "epochs": 2,
        "prompts_per_step": 4,
        "sampling": {"max_new_tokens": 4},
    } | keys


def config(tmp_path, data, *stages, **sections):
    text = {
        "run": {"dir": str(tmp_path / "run")},
        "platform": "cpu",
        "model": MODEL,
        "tokenizer": {"source": "bytes"},
    }
    text |= {"max_length": 16, "data": data, "stages": list(stages)} | sections
    file = tmp_path / "run.yml"
    file.write_text(json.dumps(text))
    return file


@pytest.fixture
def demonstrations(tmp_path):
    """Ten rows, of which one is too long."""
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)]
    return write(tmp_path / "rows.jsonl", [*rows, {"prompt": "a", "completion": "long " * 9}])


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, 3), (2, 5), (0.1, 1), (4 / 9, 1), (4.5, 11), (1e-9, 1), (12, 27)]
)
def test_the_steps_take_every_row_that_the_stage_keeps(epochs, steps, demonstrations, tmp_path):
    data = {"path": str(demonstrations), "too_long": "drop"}
    prepared = prepare(load([config(tmp_path, data, stage(epochs=epochs))]))
    assert prepared.config.stages[0].steps == steps and prepared.config.stages[0].epochs is None
    assert [each.options.steps for each in prepared.stages] == [steps]
    assert prepared.stages[0].config is prepared.config
    units = "step" if steps == 1 else "steps", "epoch" if epochs == 1 else "epochs"
    assert prepared.notes == [f"sft: {steps} {units[0]} of 4, for {epochs:g} {units[1]} of 9 rows"]


def test_a_decimal_number_of_epochs_is_exact(tmp_path):
    """In floating point 1.1 * 100 is more than 110, which would be a 111th step."""
    rows = write(
        tmp_path / "rows.jsonl", [{"prompt": f"{n}=", "completion": "1"} for n in range(100)]
    )
    file = config(tmp_path, str(rows), stage(epochs=1.1, prompts_per_step=1))
    assert 1.1 * 100 > 110 and with_steps(load([file]))[0].stages[0].steps == 110


def test_rows_of_kto_are_single_answers(tmp_path):
    pairs = write(
        tmp_path / "p.jsonl", [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(5)]
    )
    labels = [{"prompt": f"{n}", "completion": "a", "label": n > 2} for n in range(5)]
    single = write(tmp_path / "l.jsonl", labels)
    stages = [stage(algorithm=name, prompts_per_step=2) for name in ("dpo", "kto", "reward_model")]
    file = config(
        tmp_path, str(pairs), *stages, stage(algorithm="kto", data=str(single), prompts_per_step=2)
    )
    assert [each.steps for each in prepare(load([file])).config.stages] == [5, 10, 5, 5]


def test_problems_of_a_task_are_counted_and_stages_with_steps_are_left_alone(tmp_path):
    task = {"task": "arithmetic", "options": {"max_operand": 9, "problems": 60}}
    grpo = stage(algorithm="grpo", prompts_per_step=8)
    file = config(
        tmp_path, task, stage(epochs=None, steps=7), grpo, rewards={"functions": ["exact_answer"]}
    )
    prepared = prepare(load([file]))
    rows = prepared.stages[1].rows.total
    prepared.close()
    assert 40 < rows < 60 and [each.steps for each in prepared.config.stages] == [
        7,
        -(-2 * rows // 8),
    ]


def test_a_step_goes_on_into_the_next_epoch():
    """Eleven rows in steps of 4: the third step has the first row of the second pass."""
    drawn = [shuffled(0, 11, number) for number in range(24)]
    assert sorted(drawn[:11]) == sorted(drawn[11:22]) == list(range(11))


def test_exactly_one_of_steps_and_epochs(demonstrations, tmp_path, capsys):
    both = config(tmp_path, str(demonstrations), stage(steps=3))
    assert main(["train", "--check", str(both)]) == 2
    assert "stages.0: give exactly one of `steps` and `epochs`" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give exactly one of `steps` and `epochs`"):
        load([config(tmp_path, str(demonstrations), {"algorithm": "sft"})])
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match=r"stages.0.epochs: must be greater than 0"):
            load([config(tmp_path, str(demonstrations), stage(epochs=wrong))])
    file = config(tmp_path, str(demonstrations), stage())
    for changes in (
        ["stages.0.steps=3"],
        ["every_stage.steps=3"],
    ):  # what comes later replaces the other
        assert load([file], changes).stages[0].steps == 3
    assert load(
        [config(tmp_path, str(demonstrations), {"algorithm": "sft", "steps": 3})],
        ["stages.0.epochs=2"],
    )


def test_check_and_inspect_say_the_steps_and_the_saved_file_has_them(
    demonstrations, tmp_path, capsys
):
    file = config(tmp_path, {"path": str(demonstrations), "too_long": "drop"}, stage())
    said = "sft: 5 steps of 4, for 2 epochs of 9 rows"
    for verb in (["train", "--check"], ["inspect"]):
        assert main([*verb, str(file)]) == 0
        assert said in capsys.readouterr().out
    assert main(["inspect", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [said]
    saved = tmp_path / "saved.yml"
    saved.write_text(files.resolved_yaml(prepare(load([file])).config))
    assert load([saved]).stages[0].steps == 5


def test_the_settings_that_follow_from_the_steps_are_checked(demonstrations, tmp_path, capsys):
    file = config(
        tmp_path,
        {"path": str(demonstrations), "too_long": "drop"},
        stage(optimizer={"warmup_steps": 9}),
    )
    assert main(["train", "--check", str(file)]) == 0
    assert "warmup_steps: 9 updates, and the stage makes 5" in capsys.readouterr().out


def test_what_reads_no_rows_says_so(demonstrations, tmp_path):
    loaded = load([config(tmp_path, str(demonstrations), stage())])
    assert "sft: 2 epochs of rows that a plan does not read" in _learning_rates(loaded)
    assert "  in all   2 epochs of the rows (`rl-train --check` says the steps)" in list(
        outline.lines(loaded)
    )
    assert [remark for each in rl.stages.create(loaded) for remark in each.remarks()] == []
