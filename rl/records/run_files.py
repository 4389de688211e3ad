"""Names the files of a run's folder and reads them: steps, attempts, configuration. Imports neither
numpy nor jax.

Files and keys may be missing: folders of older versions and of runs that go on are read too. What
cannot be read is appended to a list of `Damage`, and reading goes on. A torn last line is no
damage: the run may be writing it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from policy.json_types import JsonObject, JsonValue
from rewards.suggest import nearest, nearest_path
from rewards.text import quoted
from rl.config import yaml_tree
from rl.errors import ConfigError

EVENTS = "events.jsonl"
CONFIG = "config.yml"
ATTEMPTS = "run.json"
SAMPLES = "samples.jsonl"
TOKENS = "tokens.bin"
SEGMENTS = "samples"
MEDIA = "media"
CURRICULUM = "curriculum.json"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
"""A URL, of which a Path keeps one slash."""
ROLLOUTS = "rollouts.json"
"""How far `rl rollout` is. No folder of a training run has it."""


@dataclass(frozen=True)
class Damage:
    """A place of a run folder that could not be read. `line` counts from 1; 0: the file as a
    unit."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.reason}"
            if self.line
            else f"{self.file}: {self.reason}"
        )


class RecordedStep(NamedTuple):
    """The metrics of a step and its Unix seconds; None in runs of older versions."""

    metrics: dict[str, JsonValue]
    time: float | None


@dataclass(frozen=True)
class Attempt:
    """One process of the run. start, end: Unix seconds; code: exit code; None: not recorded. facts:
    the rest of its entry.
    """

    start: float | None = None
    end: float | None = None
    code: int | None = None
    facts: JsonObject = field(default_factory=dict)

    def best(self, stage: str) -> str | None:
        """Returns the step whose weights the run went on with after a stage, with its metric; None:
        the last one."""
        places = self.facts.get("best")
        place = places.get(stage) if isinstance(places, dict) else None
        if not isinstance(place, dict):
            return None
        return f"step {place.get('step')} ({place.get('metric')} {place.get('value'):.4g})"

    @property
    def stopped(self) -> str | None:
        """Returns where the attempt ended by `rl stop`, as "step 12 of grpo"; None for another
        end."""
        place = self.facts.get("stopped")
        if self.code != 0 or not isinstance(place, Mapping):
            return None
        return f"step {place.get('step')} of {place.get('stage')}"


def check_run(path: Path) -> None:
    """Raises ConfigError, which names runs nearby, for a path that is no folder of a run."""
    if (remote := _URL.match(str(path))) is not None and not path.exists():
        url = f"{remote[1]}://{remote[2]}"
        copy = quoted(f"runs/{path.name}")
        raise ConfigError(
            f"{url}: a remote folder. Fetch its records first: `rl fetch {quoted(url)} {copy}`, "
            f"then name {copy}"
        )
    if path.is_file():
        raise ConfigError(f"{path}: a file. Name the folder of the run: {path.parent}")
    if not path.is_dir():
        runs = [str(file.parent) for file in path.parent.glob(f"*/{EVENTS}")]
        hint = nearest(str(path), runs) or nearest_path(path) or ". Name the folder of a run"
        raise ConfigError(f"{path}: no such folder{hint}")
    if not (path / EVENTS).is_file() and not (path / CONFIG).is_file():
        near = sorted(str(file.parent) for file in path.glob(f"*/{EVENTS}"))[:3]
        hint = f". Runs below it: {', '.join(near)}" if near else ""
        raise ConfigError(f"{path}: not a run: it has no {EVENTS}{hint}")


def json_lines(path: Path, damage: list[Damage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of the complete lines of a file. Appends the others to
    `damage`."""
    if not path.is_file():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        damage.append(Damage(path, 0, f"cannot be read: {error.strerror}"))
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # torn: a process is writing it, or was killed while it did
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield number, row
            elif line.strip() or row is not None:
                damage.append(
                    Damage(path, number, "damaged line; delete it, or restore it from a backup")
                )


def steps(directory: Path, damage: list[Damage]) -> dict[tuple[str, int], RecordedStep]:
    """Returns the events of a run: (stage, step) -> Step, in the order of the file. Step 0 is an
    evaluation."""
    result: dict[tuple[str, int], RecordedStep] = {}
    for number, row in json_lines(directory / EVENTS, damage):
        stage = row.get("stage")
        step = row.get("step")
        metrics = row.get("metrics")
        if not (isinstance(stage, str) and isinstance(step, int) and isinstance(metrics, dict)):
            damage.append(Damage(directory / EVENTS, number, "no `stage`, `step` and `metrics`"))
            continue
        before = result.get((stage, step))
        result[stage, step] = RecordedStep(
            before.metrics | metrics if before else metrics, as_number(row.get("time"))
        )
    return result


def read_config(directory: Path, damage: list[Damage]) -> dict[str, Any]:
    """Returns the saved configuration as plain values; {} without a readable one."""
    file = directory / CONFIG
    if not file.is_file():
        return {}
    try:
        tree = yaml_tree.plain(
            yaml_tree.parse(file.read_text(encoding="utf-8"), lambda line: f"{file}:{line}")
        )
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        damage.append(Damage(file, 0, f"cannot be read: {str(error).splitlines()[0]}"))
        return {}
    return tree if isinstance(tree, dict) else {}


def read_json(file: Path, damage: list[Damage]) -> dict[str, Any]:
    """Returns the object of a JSON file; {} without a readable one."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        damage.append(Damage(file, 0, f"cannot be read: {error}"))
        return {}
    return value if isinstance(value, dict) else {}


def attempt_entries(directory: Path, damage: list[Damage]) -> list[dict[str, Any]]:
    """Returns the entries of run.json, the oldest first; none for a run of an older version, or a
    damaged file."""
    entries = read_json(directory / ATTEMPTS, damage).get("attempts")
    return [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []


def attempts(directory: Path, damage: list[Damage]) -> list[Attempt]:
    """Returns the attempts of a run, the oldest first."""
    result = []
    for entry in attempt_entries(directory, damage):
        code = entry.get("exit_code")
        known = isinstance(code, int) and not isinstance(code, bool)
        facts = {
            key: value for key, value in entry.items() if key not in ("start", "end", "exit_code")
        }
        times = as_number(entry.get("start")), as_number(entry.get("end"))
        result.append(Attempt(*times, code if known else None, facts))
    return result


def sample_files(directory: Path) -> list[Path]:
    """Returns the files of samples of a run that exist, the oldest first. Runs of older versions
    have one."""
    segments = sorted((directory / SEGMENTS).glob("*.jsonl"))
    return [*segments, *(path for path in (directory / SAMPLES,) if path.exists())]


def tokens_file(path: Path) -> Path:
    """Returns the file with the tokens of a file of samples. Runs of older versions have none."""
    return path.with_name(TOKENS) if path.name == SAMPLES else path.with_suffix(".bin")


def as_number(value: object) -> float | None:
    """Converts a number of a file; None for anything else. A number beyond the range of floats is
    NaN."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan
