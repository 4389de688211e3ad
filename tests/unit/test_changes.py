"""Settings that a run changes while it goes on: what may change, what is listed, and what held at a
step."""

import json
import re

import pytest

from rl.commands import cli
from rl.config import changes
from rl.config.files import resolved_yaml
from rl.config.run import RunConfig
from rl.errors import ConfigError, ModelError
from rl.records.run_files import EVENTS
from rl.run.folder import RunFolder
from rl.run.load import load
from rl.run.manifest import seal
from rl.run.resume.continued import PlaceOfRun, continued
from rl.training.learning_rate import drawn, stage_rates

STAGES = [
    {"algorithm": "sft", "steps": 4},
    {"algorithm": "grpo", "steps": 10, "optimizer": {"learning_rate": 1e-4}},
    {"algorithm": "grpo", "steps": 3},
]
TREE = {
    "model": "tiny-deepseek",
    "tokenizer": "bytes",
    "data": {"task": "arithmetic"},
    "rewards": {"functions": ["exact_answer"]},
    "stages": STAGES,
}
RATE, STEPS, SCHEDULE = (
    f"stages.1.{key}" for key in ("optimizer.learning_rate", "steps", "optimizer.schedule")
)


class Folder:
    """The folder of a run with checkpoints that have no arrays."""

    def __init__(self, path, **tree):
        self.path = path
        (path / EVENTS).write_text("{}\n")
        self.write(RunConfig.model_validate(TREE | {"run": {"dir": str(path)}} | tree))

    def write(self, config: RunConfig) -> None:
        (self.path / "config.yml").write_text(resolved_yaml(config))

    def checkpoint(self, stage: int, step: int, ended: bool = False, **host) -> None:
        steps = [each.steps for each in load([self.path]).stages]
        path = self.path / "checkpoints" / f"{sum(n + 1 for n in steps[:stage]) + step:010d}"
        path.mkdir(parents=True, exist_ok=True)
        host = {"stage": stage, "step": step, "steps": steps[stage], "ended": ended} | host
        (path / "host.json").write_text(json.dumps(host))
        seal(path, {"arrays": {}})

    def ask(self, *overrides: str) -> RunConfig:
        """The configuration of the run with these overrides, without writing it."""
        return continued(load([self.path], overrides))

    def go_on(self, *overrides: str) -> list[dict]:
        """Continues the run, and returns the changes that it lists."""
        config = self.ask(*overrides)
        self.write(config)
        assert load([self.path]) == config
        return [change.model_dump() for change in config.changes]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def change(step: int, stage: int = 1, **was) -> dict:
    names = {"rate": RATE, "steps": STEPS, "schedule": SCHEDULE}
    return {
        "stage": stage,
        "step": step,
        "was": {names.get(key, key): value for key, value in was.items()},
    }


def test_a_change_is_listed_once_with_its_step_and_what_was_before(folder):
    folder.checkpoint(1, 4)
    assert folder.go_on() == []
    listed = [change(4, rate=1e-4, steps=10)]
    assert folder.go_on(f"{RATE}=1e-5", f"{STEPS}=20") == listed
    assert folder.go_on() == listed and folder.go_on(f"{RATE}=1e-5") == listed
    folder.checkpoint(1, 6)
    listed += [change(6, steps=20, schedule="constant")]
    assert folder.go_on(f"{STEPS}=15", f"{SCHEDULE}=cosine") == listed
    config = load([folder.path])
    held = [changes.in_force(config, 1, step).stages[1] for step in (1, 4, 5, 6, 7, 15)]
    assert [stage.steps for stage in held] == [10, 10, 20, 20, 15, 15]
    assert [stage.optimizer.learning_rate for stage in held] == [1e-4, 1e-4, 1e-5, 1e-5, 1e-5, 1e-5]
    assert held[-1].optimizer.schedule == "cosine" and held[-2].optimizer.schedule == "cosine"
    assert (
        changes.in_force(config, 0, 2).stages[1].steps == 10
        and changes.in_force(config, 2, 1) == config
    )
    assert changes.notes(config, 1, 4) == [
        f"from step 5 of grpo on: {STEPS}: 10 -> 20",
        f"from step 5 of grpo on: {RATE}: 0.0001 -> 1e-05",
    ]


def test_the_file_of_the_start_goes_on_with_the_changes_of_the_folder(folder, tmp_path):
    first = tmp_path / "first.yml"
    first.write_text((tmp_path / "config.yml").read_text())
    folder.checkpoint(1, 4)
    folder.go_on(f"{RATE}=1e-5")
    folder.checkpoint(1, 6)
    assert continued(load([first], [f"{RATE}=1e-5"])).changes == load([folder.path]).changes
    back = continued(load([first])).changes  # it says 1e-4 again
    assert [each.model_dump() for each in back] == [change(4, rate=1e-4), change(6, rate=1e-5)]
    first.write_text((tmp_path / "config.yml").read_text())  # with its change
    folder.go_on(f"{RATE}=1e-6")
    assert continued(load([first], [f"{RATE}=1e-6"])).changes == load([folder.path]).changes
    with pytest.raises(
        ConfigError, match="changes: after step 4 of stage 1.* there, after step 3 of stage 1 here"
    ):
        folder.ask(f"changes=[{{stage: 1, step: 3, was: {{{RATE}: 1e-4}}}}]")


def test_a_change_in_the_same_place_replaces_the_one_before_and_one_that_goes_back_is_none(folder):
    folder.checkpoint(1, 4)
    folder.go_on(f"{RATE}=1e-5")
    assert folder.go_on(f"{RATE}=1e-6", f"{STEPS}=12") == [change(4, rate=1e-4, steps=10)]
    assert folder.go_on(f"{RATE}=1e-4", f"{STEPS}=10") == []


def test_after_a_lost_checkpoint_a_change_holds_from_its_step_and_a_new_one_from_where_the_run_is(
    folder,
):
    folder.checkpoint(1, 4)
    folder.go_on(f"{STEPS}=12")
    folder.checkpoint(1, 8)
    listed = folder.go_on(f"{RATE}=1e-5")
    newest = max((folder.path / "checkpoints").iterdir())
    (newest / "host.json").write_text("{}")  # its hash is another one
    assert folder.go_on() == listed == [change(4, steps=10), change(8, rate=1e-4)]
    assert folder.go_on(f"{RATE}=1e-6") == [change(4, rate=1e-4, steps=10)]
    for path in (folder.path / "checkpoints").iterdir():
        (path / "host.json").write_text("{}")
    with pytest.raises(ModelError, match="all checkpoints are damaged"):
        folder.ask(f"{RATE}=1e-7")


def test_before_a_step_of_a_stage_its_values_are_replaced(folder):
    assert folder.go_on("stages.0.steps=2", f"{RATE}=1e-5", "run.log_every=3") == []
    folder.checkpoint(0, 2, ended=True)
    assert folder.go_on(f"{RATE}=1e-6", "run.log_every=4") == [
        change(2, stage=0, **{"run.log_every": 3})
    ]
    assert load([folder.path]).stages[1].optimizer.learning_rate == 1e-6


def test_a_stage_that_is_over_is_extended_but_not_changed_otherwise(folder):
    folder.checkpoint(2, 3, ended=True)
    key = "stages.2.optimizer.learning_rate"
    assert folder.go_on("stages.2.steps=5", f"{key}=1e-6") == [
        change(3, stage=2, **{"stages.2.steps": 3, key: 1e-5})
    ]
    folder.write(load([folder.path], ["changes=[]", "stages.2.steps=3"]))
    for overrides, text in (
        ([f"{key}=1e-4"], r"grpo-2 is over, after 3 steps.*Raise stages.2.steps as well"),
        (["stages.2.steps=2"], r"stages.2.steps: 2, but 3 steps of grpo-2 are done. Set 3 or more"),
        (
            [f"{RATE}=1e-3"],
            r"learning_rate: 0.0001 there, 0.001 here, but grpo is over.*after step 3 of grpo-2",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            folder.ask(*overrides)
    for host, text in (
        ({"steps": 9}, "since its `until` ended it"),
        ({"until": True}, "since its `until` ended it"),
        ({"steps": None}, "since its `until` or its last step"),
    ):
        folder.checkpoint(2, 3, ended=True, **host)
        with pytest.raises(ConfigError, match=text):
            folder.ask("stages.2.steps=12")


def test_after_the_last_step_of_the_run_nothing_is_listed(folder):
    folder.checkpoint(2, 3, ended=True)
    assert folder.ask("run.log_every=3").changes == []
    folder.checkpoint(2, 3, ended=False)
    assert folder.ask("run.log_every=3").changes != []


@pytest.mark.parametrize("host", [{}, {"steps": 9}, {"until": True}, {"steps": None}])
def test_whether_a_stage_is_over_has_one_rule(host):
    place = PlaceOfRun.of({"stage": 0, "step": 3, "steps": 3, "ended": True} | host)
    assert place.is_over(3) and place.is_over(5) == bool(host)
    assert not PlaceOfRun.of({"stage": 0, "step": 3, "steps": 3, "ended": False} | host).is_over(3)


def test_a_run_in_use_is_not_changed(folder, monkeypatch):
    def examined(_):
        raise AssertionError("no checkpoint is read")

    folder.checkpoint(1, 4)
    monkeypatch.setattr("rl.run.resume.continued.examine", examined)
    with RunFolder(load([folder.path])):
        for check in ([], ["--check"]):
            assert cli.train_main([*check, str(folder.path), f"{STEPS}=20"]) == 5
        assert folder.ask().changes == []


def test_intervals_of_what_is_measured_may_change(tmp_path):
    held_out, task = (
        {"data": {"task": "arithmetic"}, "every": 2},
        {"task": "arithmetic", "split": "eval"},
    )
    stages = [STAGES[0] | {"held_out": held_out}, *STAGES[1:]]
    folder = Folder(tmp_path, stages=stages, evaluation={"data": task, "every": 5, "problems": 4})
    folder.checkpoint(0, 2)
    was = {"evaluation.every": 5, "stages.0.held_out.every": 2}
    assert folder.go_on("stages.0.held_out.every=3", "evaluation.every=1") == [
        change(2, stage=0, **was)
    ]
    assert changes.in_force(load([folder.path]), 0, 2).stages[0].held_out.every == 2


def test_steps_that_are_done_stay_done_and_a_stage_may_end_with_them(folder):
    folder.checkpoint(1, 4)
    with pytest.raises(ConfigError, match=r"stages.1.steps: 3, but 4 steps of grpo are done"):
        folder.ask(f"{STEPS}=3")
    assert folder.go_on(f"{STEPS}=4") == [change(4, steps=10)]


def test_a_reward_model_that_is_written_is_not_extended(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("")
    stages = [{"algorithm": "reward_model", "steps": 2, "data": str(pairs)}, *STAGES[1:]]
    folder = Folder(tmp_path, stages=stages)
    folder.checkpoint(0, 1)
    assert folder.go_on("stages.0.steps=3") == [change(1, stage=0, **{"stages.0.steps": 2})]
    folder.checkpoint(0, 3, ended=True)
    with pytest.raises(ConfigError, match="has trained a reward model cannot be extended"):
        folder.ask("stages.0.steps=4")
    folder.checkpoint(0, 3, ended=False)  # the one of the end is lost
    written = tmp_path / "reward_models" / "reward_model"
    written.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"stages.0.steps: 3 there, 4 here, but {written} has been written"
    ):
        folder.ask("stages.0.steps=4")
    assert folder.go_on(f"{RATE}=1e-6", "run.log_every=7") == [
        change(1, stage=0, **{"stages.0.steps": 2}),
        change(3, stage=0, **{"run.log_every": 1}),
    ]


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "stages.1.optimizer.weight_decay=0.1",
        "stages.1.prompts_per_step=8",
        "stages.1.algorithm.epsilon=0.3",
    ],
)
def test_other_keys_are_refused_by_name(folder, override):
    folder.checkpoint(1, 4)
    key = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"holds a run with another configuration \({key}: .* there, .* here"
    ):
        folder.ask(override)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{stage: 7, step: 1, was: {run.log_every: 1}}", "changes.0.stage: there is no stage 7"),
        (
            "{stage: 1, step: 11, was: {run.log_every: 1}}",
            "changes.0.step: 11, but stages.1.steps is 10",
        ),
        (
            "{stage: 1, step: 5, was: {stages.1.steps: 4}}",
            "changes.0.step: 5, but the stage had 4 steps then",
        ),
        (
            "{stage: 1, step: 5, was: {seed: 4}}",
            "changes.0.was.seed: a run that goes on does not change this key",
        ),
        (
            "{stage: 1, step: 5, was: {stages.2.steps: 4}}",
            "changes.0.was.stages.2.steps: a change in stage 1",
        ),
        (
            "{stage: 1, step: 5, was: {evaluation.every: 4}}",
            "changes.0.was.evaluation.every: a run that goes on",
        ),
        (
            f"{{stage: 1, step: 5, was: {{{RATE}: -1}}}}",
            "changes.0.was: stages.1.optimizer.learning_rate: ",
        ),
        (f"{{stage: 1, step: 5, was: {{{RATE}: .nan}}}}", "changes.0.was: "),
        ("{stage: 1, step: 0, was: {run.log_every: 1}}", "changes.0.step: "),
        ("{stage: 1, step: 2, was: {}}", "changes.0.was: "),
    ],
)
def test_a_list_of_changes_that_cannot_be_is_refused(folder, written, text):
    with pytest.raises(ConfigError, match=f"(?m).*{text}"):
        load([folder.path], [f"changes=[{written}]"])


def test_changes_stand_in_order(folder):
    entries = ", ".join(
        f"{{stage: 1, step: {step}, was: {{run.log_every: {step}}}}}" for step in (5, 5)
    )
    with pytest.raises(
        ConfigError, match="changes.1: changes stand in the order of their stages and steps"
    ):
        load([folder.path], [f"changes=[{entries}]"])


def test_a_check_says_what_the_run_says(folder, capsys):
    folder.checkpoint(1, 4)
    assert cli.train_main(["--check", str(folder.path), f"{RATE}=1e-5"]) == 0
    assert f"from step 5 of grpo on: {RATE}: 0.0001 -> 1e-05" in capsys.readouterr().out
    assert cli.train_main(["--check", str(folder.path), f"{STEPS}=2"]) == 2
    assert "2, but 4 steps of grpo are done" in capsys.readouterr().err
    assert cli.train_main(["--check", str(folder.path), "seed=3"]) == 2
    assert load([folder.path]).stages[1].steps == 10  # nothing is written


def test_the_learning_rates_of_a_stage_change_with_its_settings(folder):
    folder.checkpoint(1, 5)
    folder.go_on(f"{SCHEDULE}=linear", f"{RATE}=2e-4")
    rates = stage_rates(load([folder.path]), 1, "optimizer")
    assert rates == pytest.approx([1e-4] * 5 + [2e-4 * (1 - step / 9) for step in range(5, 10)])
    assert drawn(rates) == "█████▇▆▄▃▁  at most 0.0001 (step 1), 0 in the last of 10 steps"
    assert len(stage_rates(load([folder.path]), 1, "optimizer", waits=7)) == 3


def test_the_report_and_the_outline_list_the_changes(folder):
    from rl.run.health import outline
    from rl.views.report import sections
    from rl.views.report.figures import figures
    from rl.views.report.read import read_run
    from rl.views.report.series import axis

    folder.checkpoint(1, 4)
    folder.go_on(f"{RATE}=1e-5")
    folder.checkpoint(1, 6)
    folder.go_on(f"{RATE}=1e-6")
    lines = list(outline.lines(load([folder.path])))
    assert f"from step 7 of grpo on: {RATE}: 1e-05 -> 1e-06" in lines
    rows = [
        {"stage": "grpo", "step": n, "time": n, "metrics": {"loss": n, "optim/lr": 1e-5}}
        for n in range(1, 10)
    ]
    (folder.path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder.path)
    drawn = figures([run], axis([run])).html
    assert (
        drawn.count(f"<title>{RATE}: 0.0001 -&gt; 1e-05</title>")
        == drawn.count('class="restart"') / 2
        > 0
    )
    table = sections.stages([run]).partition("<h3>Changes</h3>")[2]
    texts = re.findall(r">([^<>]+)</(?:span|td)>", table)
    assert texts == ["grpo", "5", RATE, "0.0001", "1e-05", "grpo", "7", RATE, "1e-05", "1e-06"]
