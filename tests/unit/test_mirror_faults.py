"""A run in a remote folder under faults and kills at random: what a machine fetches in the end is one
checkpoint with all lines before it."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal

import faulty_files
import pytest
import remote_runs

from rl.remote.faults import RemoteError, Retries
from rl.remote.lock import LeaseTimes
from rl.run.manifest import complete, examine
from rl.run.mirror.mirror import RunMirror

QUICK = Retries(tries=3, sleep=lambda seconds: None)
SHORT = LeaseTimes(lease_s=0.1, renew_s=0.02, look_s=0.01, settle_s=0.0)
ERRORS = (
    OSError(errno.EIO, "the service is busy"),
    PermissionError(errno.EACCES, "Forbidden"),
    RuntimeError("of a client"),
    TimeoutError(),
)
WRONG_LINES = 3


def chaos(draw):
    """A few faults of one kind at one place, and in most sessions the end of the process."""
    first = draw.randint(1, 120)
    faults = range(first, first + draw.choice([1, 1, 2, 6]))
    error = draw.choice([*ERRORS, None])
    end = draw.randint(1, 150) if draw.random() < 0.6 else 0
    within = draw.random() < 0.5

    def act(call):
        moves_bytes = call.name in ("put_file", "pipe_file", "get_file")
        if call.number == end and within and moves_bytes:
            call.cut = -2
        elif call.number == end:
            os.kill(os.getpid(), signal.SIGKILL)
        elif call.number in faults and error is not None:
            raise error
        elif call.number in faults and moves_bytes:
            call.cut = 2

    return act


def mirror(run, url, keep):
    run.mkdir(parents=True, exist_ok=True)
    return RunMirror(url, run, keep, remote_runs.needed, QUICK, SHORT)


def lines(run, number):
    """The lines up to a checkpoint, as a run that goes on keeps them."""
    file = run / "events.jsonl"
    text = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in text if line.endswith("\n") and json.loads(line)["step"] <= number]


def has_all_lines(run, number):
    return [json.loads(line)["step"] for line in lines(run, number)] == [*range(1, number + 1)]


def session(run, url, keep, seed):
    """A process that goes on with the run for some steps."""
    draw = random.Random(seed)
    faulty_files.use(chaos(draw), names=faulty_files.WRITES + faulty_files.READS)
    with mirror(run, url, keep) as open_mirror:
        if not (run / "run.json").exists():
            remote_runs.start(run)
        for unfinished in (run / "checkpoints").glob("*.tmp*"):
            shutil.rmtree(unfinished)
        checkpoints = complete(run / "checkpoints")
        done = checkpoints[0][0] if checkpoints else 0
        if not has_all_lines(run, done) or (done and examine(checkpoints[0][1])[1]):
            os._exit(WRONG_LINES)
        (run / ".events").write_text("".join(lines(run, done)))
        (run / ".events").replace(run / "events.jsonl")
        for number in range(done + 1, done + 1 + draw.randint(0, 3)):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number, keep=keep)
            open_mirror.checkpoint_written()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_faults_and_kills_at_random_lose_no_line_of_a_checkpoint(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    draw = random.Random(seed)
    url = f"faulty-disk://{tmp_path}/remote"
    keep = draw.choice([1, 2])

    def child(run, number):
        try:
            session(run, url, keep, 100 * seed + number)
        except RemoteError:
            os._exit(RemoteError.exit_code)

    for number in range(6):
        run = tmp_path / ("run" if draw.random() < 0.4 else f"run-{number}")
        process = multiprocessing.get_context("fork").Process(target=child, args=(run, number))
        process.start()
        process.join(60)
        assert process.exitcode in (0, 5, -signal.SIGKILL)
    faulty_files.use()
    with mirror(tmp_path / "last", url, keep):
        for done, path in complete(tmp_path / "last" / "checkpoints"):
            assert has_all_lines(tmp_path / "last", done) and not examine(path)[1]
