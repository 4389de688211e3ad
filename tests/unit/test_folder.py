"""The directory of a run, and signals that ask it to stop."""

import os
import signal
from pathlib import Path

import pytest

from rl.commands.cli import train_main
from rl.config import files
from rl.config.run import Change, RunConfig
from rl.errors import ConfigError, ResourceError
from rl.records.run_files import EVENTS
from rl.run.folder import RunFolder, wait_for_file
from rl.run.load import load
from rl.run.resume.continued import folder_state
from rl.run.signals import StopSignal
from rl.run.unfinished import stop

FILTERS = [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)]


def config(directory, **keys) -> RunConfig:
    stages = [{"algorithm": "sft", "steps": 2}, {"algorithm": "grpo", "steps": 3}]
    tree = {
        "run": {"dir": str(directory)},
        "model": "tiny-deepseek",
        "tokenizer": "bytes",
        "data": {"task": "arithmetic"},
        "rewards": {"functions": ["exact_answer"]},
        "stages": stages,
    }
    return RunConfig.model_validate(tree | keys)


def begun(directory, **keys) -> RunConfig:
    """The configuration of a run that has written its first event."""
    made = config(directory, **keys)
    with RunFolder(made):
        (directory / EVENTS).write_text("{}\n")
    return made


def test_the_configuration_is_written_and_reads_back_as_the_same(tmp_path):
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        assert load([folder.path]) == made
    with RunFolder(load([tmp_path / "run"])):
        pass


def test_a_run_is_not_continued_with_other_numbers(tmp_path):
    begun(tmp_path)
    before = (tmp_path / "config.yml").read_bytes()
    with (
        pytest.raises(ConfigError, match=r"seed: 0 there, 7 here") as error,
        RunFolder(config(tmp_path, seed=7)),
    ):
        pass
    assert (
        f"rl-train {tmp_path}" in str(error.value)
        and (tmp_path / "config.yml").read_bytes() == before
    )
    other = [{"algorithm": "sft", "steps": 2}, {"algorithm": "grpo", "steps": 3}]
    with (
        pytest.raises(ConfigError, match=r"stages\.1\.algorithm"),
        RunFolder(config(tmp_path, stages=other[:1])),
    ):
        pass


def test_a_run_may_be_continued_with_another_way_of_keeping_it(tmp_path):
    begun(tmp_path)
    with RunFolder(
        config(tmp_path, run={"dir": str(tmp_path), "checkpoint_every": 7, "tensorboard": True})
    ) as folder:
        folder.begin()
    assert load([tmp_path]).run.checkpoint_every == 7


def test_a_run_that_another_process_has_continued_in_the_meantime_is_left_alone(tmp_path):
    made = begun(tmp_path)
    before = folder_state(tmp_path)
    with RunFolder(made, before):
        (tmp_path / "checkpoints" / "0000000002").mkdir(parents=True)
    with RunFolder(made, before) as folder:  # the other one has saved, and nothing is changed
        folder.begin()
    changed = Change(stage=0, step=1, was={"run.log_every": 3})
    with RunFolder(made.model_copy(update={"changes": [changed]})) as folder:
        folder.begin()
    with (
        pytest.raises(ResourceError, match="another process has started or continued"),
        RunFolder(made, before),
    ):
        pass
    with RunFolder(made, folder_state(tmp_path)):
        pass


def test_a_start_that_is_refused_leaves_the_run_as_it_was(tmp_path):
    begun(tmp_path)
    (tmp_path / "export").mkdir()
    longer = config(
        tmp_path, stages=[{"algorithm": "sft", "steps": 2}, {"algorithm": "grpo", "steps": 5}]
    )
    for stopped in (False, True):
        if stopped:
            stop.write_stopped(tmp_path, stop.StoppedAt("grpo", 1))
        before = (tmp_path / "config.yml").read_bytes()
        with RunFolder(longer) as folder:  # and no step begins
            assert not folder.finished
        assert (tmp_path / "config.yml").read_bytes() == before and (tmp_path / "export").is_dir()
        assert (tmp_path / stop.STOPPED).exists() == stopped
    with RunFolder(longer) as folder:
        folder.begin(steps_follow=False)
        assert [path.name for path in tmp_path.glob("export*")] == ["export-grpo-1"]
        assert (tmp_path / "config.yml").read_bytes() == before and stop.stopped(tmp_path) is None
        folder.export(Path.mkdir)
        folder.begin()  # before the next stage
        assert folder.finished
    with RunFolder(longer) as folder:
        folder.begin()
    assert load([tmp_path]) == longer


def test_a_run_that_never_began_gives_way_to_another_configuration(tmp_path):
    for seed in (1, 2):
        with RunFolder(config(tmp_path, seed=seed)):
            (tmp_path / EVENTS).touch()
    assert load([tmp_path]).seed == 2


def test_a_directory_is_used_by_one_process_at_a_time(tmp_path):
    made = config(tmp_path)
    with (
        RunFolder(made),
        pytest.raises(ResourceError, match="in use by another process"),
        RunFolder(made),
    ):
        pass
    with RunFolder(made):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ResourceError, match="cannot write to .*file/run: Not a directory"),
        RunFolder(config(tmp_path / "file/run")),
    ):
        pass


def test_a_run_is_finished_when_its_weights_are_written_completely(tmp_path):
    def half(directory: Path):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(ResourceError, match="No space left.*rl-train"):
            folder.export(half)
        assert not folder.finished and not list(tmp_path.glob("export*"))
        (tmp_path / "export.tmp").mkdir()  # of a process that was killed
        (tmp_path / "export.tmp" / "old").write_text("")
        assert (
            folder.export(lambda directory: (directory.mkdir(), (directory / "new").write_text("")))
            == tmp_path / "export"
        )
        assert folder.finished and os.listdir(tmp_path / "export") == ["new"]


def test_the_first_signal_is_a_wish_and_the_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert stop.received is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == "SIGINT"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_full_disk_at_the_start_of_a_run_is_an_error_of_resources(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    made = config(tmp_path)
    for place in ("write_text", "replace"):
        with (
            monkeypatch.context() as patched,
            pytest.raises(ResourceError, match="config.yml cannot be written: No space left"),
        ):
            patched.setattr(Path, place, full)
            RunFolder(made).__enter__()
        assert not list(tmp_path.glob("config.yml*"))
    with RunFolder(made):
        pass


def test_a_writer_of_the_final_weights_that_quotes_the_system_finds_no_room(tmp_path):
    """Tokenizers raise a plain Exception."""

    def writer(text):
        def write(directory):
            directory.mkdir()
            raise Exception(text)

        return write

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(ResourceError, match="the final weights cannot be written"):
            folder.export(writer("No space left on device (os error 28)"))
        with pytest.raises(
            ResourceError,
            match=r"has [\d.,]+ GiB free of [\d.,]+ GiB that are needed: [\d.,]+ GiB are missing",
        ):
            folder.export(writer("No space left on device (os error 28)"), size=2**50)
        with pytest.raises(Exception, match="a bug"):
            folder.export(writer("a bug"))
    assert not list(tmp_path.glob("export*"))


def test_a_run_of_a_version_without_filters_in_the_loss_keeps_its_loss(tmp_path, capsys):
    sampled = [
        {"algorithm": "grpo", "steps": 3, "sampling": {key: value}} for key, value in FILTERS
    ]
    made = begun(tmp_path, stages=[*sampled, {"algorithm": "grpo", "steps": 3}])
    assert {stage.sampling.filters for stage in load([tmp_path]).stages} == {"renormalise"}
    file = tmp_path / "config.yml"
    older = [
        line for line in file.read_text().splitlines() if line.split(":")[0].strip() != "filters"
    ]
    file.write_text("\n".join(older))
    for given in ([tmp_path], [file]):
        kept = load(given)
        assert [stage.sampling.filters for stage in kept.stages] == [
            "ignore",
            "ignore",
            "ignore",
            "renormalise",
        ]
    assert train_main([str(tmp_path), "--check"]) == 0
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "as before 0.2.0: the run goes on" in line
    ]
    assert [line.split()[1] for line in said] == [f"stages.{index}.sampling" for index in range(3)]
    with (
        pytest.raises(ConfigError, match="filters: ignore there, renormalise here"),
        RunFolder(made),
    ):
        pass
    with RunFolder(kept) as folder:
        folder.begin()
    assert files.older_filters(tmp_path) == [] and load([tmp_path]) == kept
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yml").write_text("\n".join(older))  # no run has begun there
    assert load([own / "config.yml"]).stages[0].sampling.filters == "renormalise"


def test_a_directory_that_a_process_does_not_see_is_named(tmp_path):
    """Each process of a run waits for a file of the first one."""
    (tmp_path / "seen").touch()
    wait_for_file(tmp_path / "seen")
    with pytest.raises(ConfigError, match=f"process 0 on .* does not see the {tmp_path} of the"):
        wait_for_file(tmp_path / "absent", seconds=0.0)
