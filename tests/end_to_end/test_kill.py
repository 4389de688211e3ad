"""Runs that are killed, and checkpoints that are damaged, end with the bits of a run that nothing
disturbed."""

import random
import shutil

import launch
import pytest

from rl.records import events


def killed(directory, moment, delay: float = 0.0) -> bool:
    """Kills the small run when `moment()` holds."""
    return launch.killed(launch.arguments(directory), moment, delay)


def reached(directory, stage: str, step: int):
    def moment():
        file = directory / "events.jsonl"
        return file.exists() and f'{{"stage":"{stage}","step":{step},' in file.read_text()

    return moment


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    assert killed(
        directory, (directory / "checkpoints" / "0000000006").exists
    )  # after two steps of grpo
    assert not (directory / "export").exists()
    assert launch.train(directory) == 0
    launch.assert_same_run(directory, uninterrupted)
    assert events.read(directory / "events.jsonl")[-1]["metrics"]["perf/shared_prefix"] > 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(uninterrupted, tmp_path, caplog):
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory)
    shutil.rmtree(directory / "export")
    newest = directory / "checkpoints" / "0000000009"
    file = max(
        (path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert launch.train(directory) == 0
    assert "checkpoint 9 is damaged" in caplog.text and str(file.relative_to(newest)) in caplog.text
    launch.assert_same_run(directory, uninterrupted)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(uninterrupted, tmp_path):
    directory, draw = tmp_path / "run", random.Random(5)
    checkpoints = directory / "checkpoints"
    moments = [
        lambda: (directory / "config.yml").exists(),  # while the model is made
        lambda: (directory / "events.jsonl").exists(),  # in the first evaluation
        reached(directory, "sft", 1),
        lambda: any(checkpoints.glob("*.tmp-*")),  # while a checkpoint is written
        reached(directory, "grpo", 0),
        reached(directory, "grpo", 2),
        reached(directory, "grpo-2", 0),
        lambda: (directory / "export.tmp").exists() or (directory / "export").exists(),
    ]
    kills = [killed(directory, moment, delay=draw.choice([0, 0, 0.02, 0.3])) for moment in moments]
    assert sum(kills) >= 6, kills
    assert launch.train(directory) == 0
    launch.assert_same_run(directory, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_at_a_random_moment_ends_with_the_same_bits(uninterrupted, tmp_path, seed):
    directory, draw = tmp_path / "run", random.Random(seed)
    events_before = draw.randint(1, len(events.read(uninterrupted / "events.jsonl")) - 1)
    killed(directory, lambda: launch.lines(directory) >= events_before, delay=draw.random() * 0.2)
    assert launch.train(directory) == 0
    launch.assert_same_run(directory, uninterrupted)
