"""The directory of a run: one process at a time, one configuration for ever; and the wish to stop."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

from rl import configfile
from rl.config import RunConfig
from rl.errors import ConfigError, ResourceError

# Keys that may differ when a run is continued: they change what is shown and kept, not what is computed.
_FREE = ("run",)


class RunFolder:
    """Holds the lock of a run's directory while it is entered, and writes config.yml, or checks that it is the same run."""

    def __init__(self, config: RunConfig):
        self.path = Path(config.run.dir)
        self._config = config

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ResourceError(f"run.dir: cannot write to {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ResourceError(f"{self.path} is in use by another process; choose another run.dir") from None
        try:
            self._claim()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        os.close(self._lock)

    def _claim(self) -> None:
        file = self.path / "config.yml"
        if file.exists():
            theirs, ours = (_numbers(c) for c in (configfile.load([file]), self._config))
            if different := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
                shown = "; ".join(f"{key}: {theirs.get(key)} there, {ours.get(key)} here" for key in different[:5])
                raise ConfigError(
                    f"{self.path} holds a run with another configuration ({shown}). Continue that one with "
                    f"`rl-train {self.path}`, or choose another run.dir"
                )
        temporary = file.with_suffix(".yml.tmp")
        temporary.write_text(configfile.resolved_yaml(self._config))
        temporary.replace(file)


def _numbers(config: RunConfig) -> dict[str, object]:
    """Every value that makes the run what it is, by dotted key."""
    flat: dict[str, object] = {}

    def walk(value, path):
        if isinstance(value, dict) and value:
            for key, child in value.items():
                walk(child, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
            for number, child in enumerate(value):
                walk(child, f"{path}.{number}")
        else:
            flat[path] = value

    walk(config.model_dump(mode="json", exclude=set(_FREE)), "")
    return flat


class StopWish:
    """While entered, SIGTERM and the first Ctrl-C only set `wanted`, for the loop to stop after its step; the second Ctrl-C
    stops at once."""

    def __init__(self):
        self.wanted: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number, _frame) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = signal.Signals(number).name
