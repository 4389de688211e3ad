"""Writes the model card of an export, README.md, as the hub shows it, and the licence of the
base."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.config import files, yaml_tree
from rl.config.run import RunConfig
from rl.records import run_files
from rl.statistics import wilson

if TYPE_CHECKING:
    from rl.config.stage import StageOptions

README = "README.md"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
"""Patterns of the names of files that are copied from the base."""
_SHARES = re.compile(r"eval/(greedy_accuracy|accuracy|pass@\d+)")
# What a text may hold that is a secret: user and password of a URL, tokens of the hub.
_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), "***"),
    (re.compile(r"hf_[A-Za-z0-9]{8,}"), "***"),
)
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass(frozen=True)
class StageStep:
    """A step of a stage of a run."""

    stage: str
    step: int


@dataclass(frozen=True)
class Origin:
    """Where exported weights come from.

    title: of the model card. base: hub name of the model that they started from; None: it is not of
    the hub. source: directory of that model; None: it is gone, or the weights were random. run: the
    folder of the run that trained them, with its configuration; None: no run is known. place: after
    which step; None: the last.
    """

    title: str
    base: str | None
    source: Path | None
    run: Path | None = None
    config: RunConfig | None = None
    place: StageStep | None = None


@dataclass(frozen=True)
class Listing:
    """How the hub lists a model. library: what reads the directory, `transformers`, `peft` or
    `gguf`. task: what the model does."""

    library: str
    task: str = "text-generation"


def write(directory: Path, origin: Origin, sentence: str, listing: Listing) -> None:
    """Writes the card and copies the licence. sentence: says what the directory holds."""
    parts = [_front_matter(origin, listing), f"# {origin.title}", sentence]
    if origin.config is not None:
        if origin.place is not None:
            parts.append(f"After step {origin.place.step} of the stage {origin.place.stage}.")
        parts += [_stages(origin.config), *_evaluations(origin)]
    parts.append(f"Exported by duet-rl {_version()}.")
    if origin.config is not None:
        text = _without_secrets(files.changed_yaml(origin.config).strip())
        parts.append(f"## Configuration\n\n```yaml\n{text}\n```")
    (directory / README).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if origin.source is not None:
        for pattern in LICENCES:
            for file in origin.source.glob(pattern):
                if file.is_file() and not (directory / file.name).exists():
                    shutil.copyfile(file, directory / file.name)


def _front_matter(origin: Origin, listing: Listing) -> str:
    """Returns the keys by which the hub lists a model."""
    keys: dict[str, Any] = {"library_name": listing.library, "pipeline_tag": listing.task}
    if origin.base is not None:
        keys["base_model"] = origin.base
    keys |= _licence(origin.source)
    algorithms = (
        [] if origin.config is None else [each.algorithm.name for each in origin.config.stages]
    )
    keys["tags"] = ["duet-rl", *dict.fromkeys(algorithms)]
    return f"---\n{yaml_tree.dump(keys).strip()}\n---"


def _licence(source: Path | None) -> dict[str, str]:
    """Returns the keys of the licence in the card of the base."""
    file = None if source is None else source / README
    if file is None or not file.is_file():
        return {}
    match = _FRONT.match(file.read_text(encoding="utf-8", errors="replace"))
    if match is None:
        return {}
    lines = (
        re.fullmatch(r"(license(?:_name|_link)?):\s*(\S+)", line) for line in match[1].split("\n")
    )
    return {line[1]: line[2].strip("'\"") for line in lines if line is not None}


def _stages(config: RunConfig) -> str:
    rows = ["## Training", "", "| stage | algorithm | steps | data |", "| --- | --- | --- | --- |"]
    for name, stage in zip(config.stage_names, config.stages, strict=True):
        rows.append(
            f"| {name} | {stage.algorithm.name} | {stage.total_steps} | {_data(config, stage)} |"
        )
    return _without_secrets("\n".join(rows))


def _data(config: RunConfig, stage: StageOptions) -> str:
    """Returns what the rows of a stage are: tasks and names of files."""
    options = getattr(stage, "data", None) or config.data
    values = options if isinstance(options, list) else [options]
    names = [value for each in values for value in _names(each)]
    return ", ".join(dict.fromkeys(names)) or "-"


def _names(options: Any) -> Iterator[str]:
    for key in ("task", "path"):
        value = getattr(options, key, None)
        if isinstance(value, str):
            yield value if key == "task" or not Path(value).is_absolute() else Path(value).name
    for each in getattr(options, "mixture", None) or ():
        yield from _names(each)


def _evaluations(origin: Origin) -> list[str]:
    """Returns a section with the last evaluation of each stage, with 95% intervals for the problems
    that have a score; none without an evaluation."""
    rows = list(_evaluated(origin))
    if not rows:
        return []
    head = [
        "## Evaluation",
        "",
        "| stage | step | metric | value | 95% interval (Wilson) | scored |",
    ]
    return ["\n".join([*head, "| --- | --- | --- | --- | --- | --- |", *rows])]


def _evaluated(origin: Origin) -> Iterator[str]:
    last: dict[str, tuple[int, dict[str, Any]]] = {}
    recorded = {} if origin.run is None else run_files.steps(origin.run, [])
    for (stage, step), values in recorded.items():
        is_share = any(_SHARES.fullmatch(name) for name in values.metrics)
        if is_share and not _is_later(origin, stage, step):
            last[stage] = step, dict(values.metrics)
    for stage, (step, metrics) in last.items():
        scored = _scored(metrics)
        for name, value in metrics.items():
            share = run_files.as_number(value)
            if _SHARES.fullmatch(name) is None or share is None or not np.isfinite(share):
                continue
            label = name.removeprefix("eval/")
            yield f"| {stage} | {step} | {label} | {share:.3f} | {_bounds(share, scored)} |"


def _is_later(origin: Origin, stage: str, step: int) -> bool:
    """Whether a step comes after the place of the exported weights."""
    place = origin.place
    if place is None or origin.config is None:
        return False
    names = list(origin.config.stage_names)
    if stage not in names:
        return True
    return (names.index(stage), step) > (names.index(place.stage), place.step)


def _scored(metrics: dict[str, Any]) -> float | None:
    """Returns the problems of an evaluation whose greedy completion has a score."""
    problems = run_files.as_number(metrics.get("eval/problems"))
    unscored = run_files.as_number(metrics.get("eval/unscored"))
    return None if problems is None else problems - (unscored or 0.0)


def _bounds(share: float, scored: float | None) -> str:
    if scored is None:
        return "- | -"
    low, high = wilson(np.asarray([share]), scored)
    return f"{low[0]:.3f} to {high[0]:.3f} | {scored:.0f}"


def _without_secrets(text: str) -> str:
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _version() -> str:
    try:
        return version("duet-rl")
    except PackageNotFoundError:
        return "(not installed)"
