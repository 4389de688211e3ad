"""Runs whose settings change when they are continued: their `config.yml`, run afresh, gives the
same bits."""

import shutil

import launch
import pytest

from rl.config.files import RESOLVED
from rl.run.load import load
from rl.run.state import Run

SFT = (
    "{algorithm: sft, steps: 2, prompts_per_step: 8, optimizer: {learning_rate: 2e-3}, "
    "sampling: {max_new_tokens: 6}}"
)
RATE, STEPS = "stages.0.optimizer.learning_rate", "stages.0.steps"


def stopped_after(monkeypatch, stage: str, step: int, train) -> None:
    """Calls `train()`, which gets SIGTERM in this step."""
    save = Run.save

    def with_signal(self, kind, state, n, ended, metrics, **how):
        if (kind.name, n) == (stage, step):
            self.stop.received = "SIGTERM"
        return save(self, kind, state, n, ended, metrics, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "save", with_signal)
        assert train() == 75


def again(directory, other):
    """Runs the configuration of a run afresh, and compares every number, sample and weight, and the
    configuration."""
    assert launch.cli.train_main([str(directory / RESOLVED), f"run.dir={other}"]) == 0
    launch.assert_same_run(directory, other)
    same = load([directory]).model_dump(), load([other]).model_dump()
    for each in same:
        each["run"].pop("dir")
    assert same[0] == same[1]


def rates(directory) -> list[float]:
    return [metrics["optim/lr"] for _, step, metrics in launch.numbers(directory) if step]


def test_a_longer_run_with_another_learning_rate_gives_the_bits_of_its_configuration(
    tmp_path, capsys
):
    run = tmp_path / "run"
    assert launch.train(run, f"stages=[{SFT}]", *launch.LIGHT) == 0
    unchanged, written = launch.numbers(run), (run / RESOLVED).read_bytes()
    assert (
        launch.cli.train_main([str(run), "run.log_every=7"]) == 0
        and (run / RESOLVED).read_bytes() == written
    )
    (run / "export").rename(run / "kept")  # as after a kill before the export
    assert (
        launch.cli.train_main([str(run), "run.log_every=7"]) == 0
        and (run / RESOLVED).read_bytes() == written
    )
    assert "from step 3 of sft on" not in capsys.readouterr().out
    assert launch.cli.train_main([str(run), f"{STEPS}=1"]) == 2 and (run / "export").is_dir()
    assert "stages.0.steps: 1, but 2 steps of sft are done" in capsys.readouterr().err
    assert (
        launch.cli.train_main(
            [str(run), f"{STEPS}=4", f"{RATE}=1e-3", "stages.0.optimizer.schedule=linear"]
        )
        == 0
    )
    assert f"from step 3 of sft on: {RATE}: 0.002 -> 0.001" in capsys.readouterr().out
    assert launch.numbers(run)[:2] == unchanged
    assert rates(run) == pytest.approx([2e-3, 2e-3, 1e-3 / 3, 0], abs=1e-9)
    was = {STEPS: 2, RATE: 2e-3, "stages.0.optimizer.schedule": "constant"}
    assert load([run]).model_dump()["changes"] == [{"stage": 0, "step": 2, "was": was}]
    again(run, tmp_path / "again")


@pytest.mark.slow
def test_every_kind_of_change_gives_the_bits_of_its_configuration(
    uninterrupted, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    stopped_after(monkeypatch, "grpo", 2, lambda: launch.train(run))
    new = (
        "stages.1.optimizer.learning_rate=5e-4",
        "stages.1.steps=5",
        "evaluation.every=3",
        "run.samples.every=2",
    )
    later = ("stages.2.optimizer.schedule=linear", "stages.2.optimizer.warmup_steps=1")
    stopped_after(
        monkeypatch,
        "grpo",
        3,
        lambda: launch.cli.train_main([str(run), *new, *later, "run.log_every=2"]),
    )
    more = (
        "stages.1.steps=4",
        "stages.1.optimizer.warmup_steps=12",
        "run.checkpoint_every=1",
        "evaluation.every=2",
    )
    assert launch.cli.train_main([str(run), *more]) == 0
    before, after = launch.numbers(uninterrupted), launch.numbers(run)
    same = [(stage, step) for stage, step, _ in before].index(("grpo", 3))
    assert after[:same] == before[:same] and after[same] != before[same]
    assert [(change.stage, change.step) for change in load([run]).changes] == [(1, 2), (1, 3)]
    again(run, tmp_path / "again")


@pytest.mark.slow
def test_a_finished_run_that_is_extended_gives_the_bits_of_its_configuration(
    uninterrupted, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    assert (
        launch.cli.train_main([str(run), "stages.2.steps=3", "stages.2.optimizer.schedule=cosine"])
        == 0
    )
    again(run, tmp_path / "again")


@pytest.mark.slow
def test_a_stage_that_is_shortened_to_the_steps_that_are_done_ends_there(tmp_path, monkeypatch):
    run = tmp_path / "run"
    stopped_after(monkeypatch, "grpo", 1, lambda: launch.train(run))
    assert launch.cli.train_main([str(run), "stages.1.steps=1"]) == 0
    assert [step for stage, step, _ in launch.numbers(run) if stage == "grpo"] == [0, 1]
    again(run, tmp_path / "again")


@pytest.mark.slow
def test_after_a_damaged_checkpoint_a_change_holds_from_its_step(tmp_path, monkeypatch):
    run, one = (
        tmp_path / "run",
        (f"stages=[{SFT.replace('2', '6', 1)}]", *launch.LIGHT, "run.checkpoint_every=1"),
    )
    stopped_after(monkeypatch, "sft", 3, lambda: launch.train(run, *one))
    stopped_after(monkeypatch, "sft", 4, lambda: launch.cli.train_main([str(run), f"{RATE}=1e-4"]))
    for path in sorted((run / "checkpoints").iterdir())[1:]:
        (path / "host.json").write_text("{}")
    stopped_after(monkeypatch, "sft", 5, lambda: launch.cli.train_main([str(run)]))
    assert rates(run) == pytest.approx([2e-3] * 3 + [1e-4] * 2)
    assert launch.cli.train_main([str(run), f"{STEPS}=7"]) == 0
    again(run, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_a_critic_changes_its_learning_rate(tmp_path, monkeypatch, trunk):
    run, stage = (
        tmp_path / "run",
        f"{{algorithm: {{name: ppo, critic_warmup: 1, critic_trunk: {trunk}}}, steps: 4}}",
    )
    keys = (
        "prompts_per_step: 4",
        "samples_per_prompt: 2",
        "updates_per_step: 2",
        "sampling: {max_new_tokens: 6}",
    )
    stage = stage.replace("steps: 4", f"steps: 4, {', '.join(keys)}")
    light = ("model.overrides.num_hidden_layers=1", "evaluation=null")
    stopped_after(monkeypatch, "ppo", 2, lambda: launch.train(run, f"stages=[{stage}]", *light))
    changed = (
        "stages.0.critic.learning_rate=1e-3",
        "stages.0.critic.schedule=linear",
        "stages.0.steps=5",
    )
    assert launch.cli.train_main([str(run), *changed]) == 0
    shown = [metrics["value/optim/lr"] for _, step, metrics in launch.numbers(run) if step]
    assert shown == pytest.approx([1e-5, 1e-5, 5e-4, 2.5e-4, 0], abs=1e-9)
    again(run, tmp_path / "again")


@pytest.mark.slow
def test_a_file_with_epochs_changes_the_steps_of_its_run(tmp_path, capsys):
    run, stage = tmp_path / "run", SFT.replace("steps: 2", "epochs: 1")
    given = (*launch.LIGHT, "data.options.problems=20")
    assert launch.train(run, f"stages=[{stage}]", *given) == 0
    done = load([run]).stages[0].steps
    assert launch.train(run, f"stages=[{stage}]", *given) == 0
    assert "is finished" in capsys.readouterr().out
    longer = stage.replace("epochs: 1", "epochs: 2, held_out: {data: {task: arithmetic}}")
    assert launch.train(run, f"stages=[{longer}]", *given) == 2
    assert launch.train(run, f"stages=[{stage.replace('epochs: 1', 'epochs: 2')}]", *given) == 0
    assert load([run]).stages[0].steps > done == load([run]).changes[0].step
    again(run, tmp_path / "again")
