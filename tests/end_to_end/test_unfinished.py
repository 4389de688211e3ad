"""Uses of a run that has not ended: `rl generate` and `rl chat` at a checkpoint, and `rl stop`."""

import io
import json
import re
import shutil
import signal
from types import SimpleNamespace

import launch
import numpy as np
import pytest

import policy
from rl.errors import ConfigError, ModelError
from rl.run import arrays
from rl.run.arrays import ArrayStore
from rl.run.folder import RunFolder
from rl.run.load import load
from rl.run.unfinished import checkpoints, stop
from rl.run.unfinished.weights import CheckpointWeights
from rl.views.report import summary
from rl.views.report.read import read_run
from rollout.text.tokenizer import load_tokenizer, stop_ids


@pytest.fixture
def unfinished(uninterrupted, tmp_path):
    """The small run, killed before it wrote its export."""
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory)
    shutil.rmtree(directory / "export")
    return directory


def rl(*arguments) -> int:
    return launch.cli.main([*map(str, arguments), "--platform", "cpu"])


def damage(checkpoint) -> None:
    """Changes a bit of the largest file."""
    file = max(
        (path for path in checkpoint.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_newest_checkpoint_is_the_model_that_the_export_would_be(
    unfinished, uninterrupted, monkeypatch, capsys
):
    asked = []
    read = ArrayStore.read
    monkeypatch.setattr(
        ArrayStore, "read", lambda *given, **how: asked.extend(given[2]) or read(*given, **how)
    )
    weights, exported = CheckpointWeights(unfinished), policy.load(uninterrupted / "export")
    model = weights.load("float32")
    assert model.graph.shapes == exported.graph.shapes
    for path, array in model.params.items():
        np.testing.assert_array_equal(array, exported.params[path])
        assert array.sharding.is_equivalent_to(exported.params[path].sharding, array.ndim)
    assert all(
        name.startswith("policy/params/") for name in asked
    )  # neither moments nor the reference
    tokenizer = load_tokenizer(uninterrupted / "export")
    assert weights.stop_ids == stop_ids(tokenizer, uninterrupted / "export")
    assert weights.tokenizer.encode("1+2=") == tokenizer.encode("1+2=")
    assert (
        f"{unfinished}: the weights after step 1 of 1 of grpo-2. The run is not finished"
        in capsys.readouterr().err
    )
    with RunFolder(load([unfinished])):  # as while it runs
        halves = weights.load("bfloat16")
    for path, array in policy.load(uninterrupted / "export", dtype="bfloat16").params.items():
        assert array.dtype == halves.params[path].dtype
        np.testing.assert_array_equal(array, halves.params[path])
    assert "The run goes on" in capsys.readouterr().err


@pytest.mark.slow
def test_completions_are_those_of_the_export_of_that_step(
    unfinished, uninterrupted, tmp_path, capsys
):
    (tmp_path / "prompts.txt").write_text("1+2=\n")
    sampling = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 4, "--temperature", 0)

    def logprobs(*arguments):
        assert rl("generate", *arguments, *sampling) == 0
        return json.loads(capsys.readouterr().out)["logprobs"]

    last = logprobs(uninterrupted)
    assert logprobs(unfinished) == last and logprobs(uninterrupted, "--step", "grpo-2:1") == last
    assert logprobs(unfinished, "--step", "grpo:3") == logprobs(unfinished, "--step", 3) != last


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("7", "There are grpo:3, grpo-2:1 (nearest: grpo:3); run.keep_checkpoints"),
        ("grpo:1", "(nearest: grpo:3)"),
        ("grpo:2", "export-grpo-2 holds these weights: name that folder"),
        ("gpro:3", "the run has no stage gpro (nearest: grpo"),
        ("last", "write a number of steps, N, or STAGE:N such as grpo-2:10"),
    ],
)
def test_a_step_without_a_checkpoint_is_refused_with_the_nearest(
    unfinished, tmp_path, capsys, step, said
):
    (unfinished / "export-grpo-2").mkdir()
    (tmp_path / "prompts.txt").write_text("1+2=\n")
    assert rl("generate", unfinished, "--prompts", tmp_path / "prompts.txt", "--step", step) == 2
    assert said in capsys.readouterr().err


def test_a_step_of_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("1+2=\n")
    assert rl("generate", tmp_path, "--prompts", tmp_path / "prompts.txt", "--step", 3) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_damaged_checkpoints_are_named_and_left_out(unfinished, caplog):
    newest, before = sorted((unfinished / "checkpoints").iterdir(), reverse=True)
    damage(newest)
    CheckpointWeights(unfinished).load("float32")
    assert re.search(
        r"checkpoint 9 is damaged: .*its bytes changed.*An earlier checkpoint is looked for",
        caplog.text,
    )
    for step in ("grpo-2:1", None):
        with pytest.raises(
            ModelError, match="no undamaged checkpoint is left:\n.*checkpoint 9 is damaged"
        ):
            CheckpointWeights(unfinished, step).load("float32")
        damage(before)
    (newest / "host.json").unlink()
    shutil.rmtree(before)
    with pytest.raises(ModelError, match=r"host\.json: missing"):
        CheckpointWeights(unfinished).load("float32")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        CheckpointWeights(unfinished, "3")
    shutil.rmtree(newest)
    with pytest.raises(ModelError, match="no export and no checkpoint yet"):
        CheckpointWeights(unfinished)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_no_error(unfinished, monkeypatch, moment):
    """The run has written a newer one by then."""
    folder, read = unfinished / "checkpoints", ArrayStore.read
    newest, hidden = folder / "0000000009", unfinished / "later"
    newest.rename(hidden)
    (folder / "0000000010.tmp-1" / "arrays").mkdir(parents=True)  # being written
    times = []

    def rotated(*given, **how):
        times.append(given[1])
        if len(times) == 1:
            hidden.rename(newest)
            if moment == "before":
                shutil.rmtree(folder / "0000000007")
            else:
                shutil.rmtree(folder / "0000000007" / "arrays")
                (folder / "0000000007").rename(folder / "0000000007.tmp-removed")
        return read(*given, **how)

    monkeypatch.setattr(ArrayStore, "read", rotated)
    model = CheckpointWeights(unfinished).load("float32")
    assert [path.parent.name for path in times] == ["0000000007", "0000000009"] and model.params
    assert (folder / "0000000010.tmp-1").is_dir()


def test_a_folder_listed_while_its_only_checkpoint_is_replaced_is_listed_again(
    unfinished, monkeypatch
):
    listed, complete = [], checkpoints.complete
    monkeypatch.setattr(
        checkpoints,
        "complete",
        lambda folder: listed.append(folder) or complete(folder) * (len(listed) > 1),
    )
    assert [each.number for each in checkpoints.stored(unfinished / "checkpoints")] == [
        9,
        7,
    ] and len(listed) == 2


def test_reads_that_fail_after_the_first_are_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(arrays, "_unraisable", shown.append)

    async def _read_array_index():
        raise OSError

    async def other():
        raise OSError

    for made in (_read_array_index(), other()):
        arrays._without_late_writers(
            SimpleNamespace(object=made, exc_traceback=None, exc_value=OSError())
        )
        made.close()
    assert [event.object.__name__ for event in shown] == ["other"]


@pytest.mark.slow
def test_a_chat_goes_on_with_a_checkpoint_and_the_variables_of_the_run(
    unfinished, capsys, monkeypatch
):
    template = unfinished.parent / "template.jinja"
    template.write_text("{{ start }}{{ messages[-1].content }}=")
    file = unfinished / "config.yml"
    text = file.read_text()
    assert "chat_template: null" in text
    chosen = f"chat_template: {{file: {template}, variables: {{start: '1+'}}}}"
    file.write_text(text.replace("chat_template: null", chosen))
    weights = CheckpointWeights(unfinished)
    assert weights.tokenizer.template_variables == {"start": "1+"}
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n"))
    assert rl("chat", unfinished, "--max-new-tokens", 2, "--temperature", 0) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_run_stops_with_its_weights_exported_and_goes_on_to_the_same_bits(
    uninterrupted, tmp_path, capsys
):
    directory = tmp_path / "run"
    running = launch.process(*launch.arguments(directory))
    launch.wait_for(
        lambda: launch.lines(directory) >= 1, running
    )  # the programs of the first step are compiled now
    assert launch.cli.main(["stop", str(directory)]) == 0
    code, out, err = launch.finish(running)
    assert code == 0 and err == "", err
    place = stop.stopped(directory)
    assert place.stage == "sft" and 0 < place.step < 3
    assert (
        f"stopped after step {place.step} of sft, as `rl stop` asked; weights in {directory}/export"
        in out
    )
    assert (
        f"is stopped after step {place.step} of sft: its weights are in" in capsys.readouterr().out
    )
    assert summary.state(read_run(directory)) == ("open", f"stopped after step {place.step} of sft")
    stopped = policy.load(directory / "export").params
    weights = CheckpointWeights(directory, f"sft:{place.step}").load("float32").params
    for path, array in weights.items():
        np.testing.assert_array_equal(array, stopped[path])

    assert launch.train(directory) == 0
    launch.assert_same_run(directory, uninterrupted)
    assert (directory / f"export-sft-{place.step}").is_dir() and stop.stopped(directory) is None
    assert summary.state(read_run(directory)) == ("good", "finished")


@pytest.mark.slow
def test_a_request_in_the_last_step_is_the_end_of_the_run_and_a_signal_comes_first(
    tmp_path, monkeypatch, capsys
):
    sft = "{algorithm: sft, prompts_per_step: 4, sampling: {max_new_tokens: 6}, steps: 2}"
    light = (*launch.LIGHT, f"stages=[{sft}]")
    monkeypatch.setattr(stop, "is_asked", lambda run: launch.lines(run) == 3)  # after the last step
    assert launch.train(tmp_path / "run", *light) == 0
    assert stop.stopped(tmp_path / "run") is None and "final weights in" in capsys.readouterr().out

    def asked(run):
        signal.raise_signal(signal.SIGTERM)
        return True

    monkeypatch.setattr(stop, "is_asked", asked)
    assert launch.train(tmp_path / "other", *light) == 75
    assert not (tmp_path / "other" / "export").exists()


def test_an_evaluation_of_a_run_that_goes_on_names_its_checkpoint(
    unfinished, tmp_path, monkeypatch
):
    """So the same command refuses to mix the weights of a later checkpoint in; paths are relative,
    as people type them."""
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    monkeypatch.chdir(tmp_path)
    options = ("--data", "test.jsonl", "--reward", "numeric_answer", "--max-new-tokens", 4)
    assert rl("eval", "run", *options, "-o", "out") == 0
    content = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert content["model"]["checkpoint"] == "grpo-2:1"
    newest = max((unfinished / "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert rl("eval", "run", *options, "-o", "out") == 2
    assert rl("eval", "run", *options) == 0
    (folder,) = (tmp_path / "evals").iterdir()
    place = json.loads((folder / "eval.json").read_text())["model"]["checkpoint"]
    assert folder.name == f"run-{place.replace(':', '-')}-test"
