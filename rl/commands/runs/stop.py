"""`rl stop`: ends a run after its step. The run saves, exports its weights and ends with exit code
0."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl.records.run_files import Attempt

SUMMARY = "end a run after its step, with its weights exported"
DESCRIPTION = """\
Asks a run to stop. It finishes its step, saves a checkpoint, writes its weights to export/ and ends
with exit code 0. `rl-train RUN` continues it (docs/stopping.md)."""
HELP = """exit codes: 0 stopped, or ended before; 2 no run there, samples of `rl rollout`, a run that
is not running and was not finished, or one that goes on since the request was withdrawn; 5 the
folder cannot be written; 76 the run was killed meanwhile; any other: that of the run, which ended
with an error"""

_PAUSE_S = 0.2
_GONE_S = 5.0
_TAIL = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "run_directory", type=os.path.expanduser, metavar="RUN", help="folder of a run"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="ask, and do not wait until the run has ended"
    )


def run(arguments: argparse.Namespace) -> int:
    """Asks the run to stop, waits for its end and returns the exit code."""
    from rewards.text import quoted
    from rl.errors import ConfigError, ProcessLost, ResourceError
    from rl.records.run_files import ROLLOUTS, check_run
    from rl.run.unfinished import stop

    path = Path(arguments.run_directory)
    check_run(path)
    if (path / ROLLOUTS).exists():
        raise ConfigError(
            f"{path} holds samples of `rl rollout`, and `rl stop` ends training; end the command "
            "with Ctrl-C or SIGTERM after its step: `rl rollout "
            f"{quoted(path)}` goes on from there"
        )
    running = stop.in_use(path)
    elsewhere = _elsewhere(path)
    if not running and elsewhere is None:
        return _not_running(path)
    try:
        stop.ask(path)
    except OSError as error:
        raise ResourceError(f"{path / stop.REQUEST} cannot be written: {error.strerror}") from None
    print(
        f"{path} is asked to stop after its step{_last_step(path)}; it then saves and exports its "
        "weights",
        flush=True,
    )
    if arguments.no_wait:
        return 0
    if not running:
        print(
            f"it was started on {elsewhere}; if it was killed there, end this command with Ctrl-C",
            flush=True,
        )
    if not _wait(path, running):
        raise ConfigError(
            f"{path / stop.REQUEST} is gone, and the run goes on: the request was withdrawn, or "
            f"the run was started again; `rl stop {quoted(path)}` asks again"
        )
    if (path / "export").is_dir():
        return _ended(path)
    last = _last_attempt(path)
    if last is None or last.code is None:
        raise ProcessLost(
            f"{path} was killed before it stopped; `rl-train {quoted(path)}` continues it"
        )
    if last.code:
        print(
            f"{path} did not stop as asked: it ended with exit code {last.code}; its output says "
            "why"
        )
        return last.code
    return _ended(path)


def _wait(path: Path, running: bool) -> bool:
    """Waits for the end of the run. Returns False if the run goes on although its request has been
    gone for _GONE_S."""
    from rl.run.unfinished import stop

    asked = time.monotonic()
    while stop.in_use(path) or (not running and _elsewhere(path) is not None):
        if stop.is_asked(path):
            asked = time.monotonic()
        elif (
            time.monotonic() - asked > _GONE_S
        ):  # a run that ends removes it shortly before its lock
            return False
        time.sleep(_PAUSE_S)
    return True


def _ended(path: Path) -> int:
    """Says where the weights of a run are that has ended. Returns 0."""
    from rewards.text import quoted
    from rl.run.unfinished import stop

    place = stop.stopped(path)
    word = quoted(path)
    if place is None:
        print(f"{path} is finished: its final weights are in {path}/export")
    else:
        print(
            f"{path} is stopped after step {place.step} of {place.stage}: its weights are in "
            f"{path}/export; `rl-train {word}` continues it"
        )
    return 0


def _not_running(path: Path) -> int:
    """Says what became of a run that is not running. Raises ConfigError if it has not ended."""
    from rewards.text import quoted
    from rl.errors import ConfigError

    if (path / "export").is_dir():
        return _ended(path)
    last = _last_attempt(path)
    word = quoted(path)
    how = "was killed" if last is None or last.code is None else f"ended with exit code {last.code}"
    raise ConfigError(
        f"{path} is not running: it {how}. `rl-train {word}` continues it; `rl chat {word}` and "
        f"`rl generate {word}` read its newest checkpoint"
    )


def _last_attempt(path: Path) -> Attempt | None:
    from rl.records.run_files import attempts

    return next(iter(attempts(path, [])[-1:]), None)


def _elsewhere(path: Path) -> str | None:
    """Returns the machine on which the run was started and, as far as its files say, is running, if
    it is another one: not every shared file system shows locks of other machines."""
    last = _last_attempt(path)
    host = None if last is None or last.end is not None else last.facts.get("host")
    return host if isinstance(host, str) and host != socket.gethostname() else None


def _last_step(path: Path) -> str:
    """Returns the last step that the run has finished, for a message."""
    from rl.records.run_files import EVENTS

    try:
        with (path / EVENTS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            row = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])
        return f" (the last one was step {row['step']} of {row['stage']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
