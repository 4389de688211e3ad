"""Full runs for tests: in this process, or in one of their own; and what is compared of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rl.commands import cli
from rl.records import events, run_files
from rl.records import samples as records

ROOT = Path(__file__).resolve().parents[1]
# Merged over the small run: one layer without experts, and no generator where nothing is sampled.
LIGHT = ("model.overrides.num_hidden_layers=1", "evaluation=null")
QUICKSTART, SMALL = ROOT / "configs" / "quickstart.yml", ROOT / "tests" / "end_to_end" / "small.yml"


def arguments(directory, *more: str) -> list[str]:
    return [str(SMALL), f"run.dir={directory}", *more]


def train(directory, *more: str) -> int:
    """Exit code of a small run in this process."""
    return cli.train_main(arguments(directory, *more))


def process(*given: str, environment: dict[str, str] | None = None, **how) -> subprocess.Popen:
    """`rl-train` in a process group of its own, with its output in pipes."""
    command = [sys.executable, "-m", "rl.commands.cli", *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        start_new_session=True,
        **(pipes | how),
    )


def finish(running: subprocess.Popen, timeout: float = 300) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); ends the process group if it takes too long."""
    try:
        out, err = running.communicate(timeout=timeout)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    return running.returncode, out, err


def killed(given: list[str], moment, delay: float = 0.0) -> bool:
    """Starts or continues a run and kills it, workers and all, when `moment()` holds. False if it
    was finished before.
    """
    running = process(*given, stdout=None, stderr=None)
    try:
        while not moment() and running.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        alive = running.poll() is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    return alive


def wait_for(condition, running: subprocess.Popen, timeout: float = 300) -> None:
    """Returns when `condition()` holds; fails if the process ends before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.005)


def lines(directory, name: str = run_files.EVENTS) -> int:
    file = Path(directory) / name
    return file.read_bytes().count(b"\n") if file.exists() else 0


def numbers(directory) -> list[tuple]:
    """Stage, step and metrics of every event, without those that measure time."""
    rows = events.read(Path(directory) / run_files.EVENTS)

    def kept(metrics: dict) -> dict:
        return {
            k: v
            for k, v in metrics.items()
            if not k.startswith(("time/", "perf/")) and not k.endswith("_seconds")
        }

    return [(r["stage"], r["step"], kept(r["metrics"])) for r in rows]


def weights(directory) -> bytes:
    return (Path(directory) / "export" / "model.safetensors").read_bytes()


def samples(directory) -> bytes:
    return b"".join(
        (Path(directory) / name).read_bytes() for name in (records.SAMPLES, records.TOKENS)
    )


def trained(directory) -> list[dict]:
    """The completions that a run was trained on, without those of evaluations."""
    return [row for row in records.read(directory) if not row.get("eval")]


def assert_same_run(one, other) -> None:
    """Every number, sample and weight, bit by bit."""
    for ours, theirs in zip(numbers(one), numbers(other), strict=True):
        assert ours == theirs
    assert samples(one) == samples(other)
    assert weights(one) == weights(other)
