"""Compares the tensors of the model directories of a run with their configurations. It reads
headers of files.

The shapes of a model come from jax. A process that has not imported jax asks a child, so that it
needs no device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import rl.algorithms
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from rewards.registry import REWARD_MODEL
from rl.config.run import RunConfig
from rl.data import models
from rl.data import teacher as teachers
from rl.errors import ModelError


@dataclass(frozen=True)
class DirectoryCheck:
    """A directory to check, and how a run reads it.

    part: for messages. sections, missing, media: as for policy.load. scores: it is a reward model.
    """

    part: str
    directory: str
    sections: dict | None = None
    missing: Literal["refuse", "fresh"] = "refuse"
    media: bool = False
    scores: bool = False


def check(config: RunConfig, media: bool, *, policy: bool = True) -> None:
    """Checks the directories of the model, teachers and reward models of a run. `media`: the model
    has its towers. policy: False leaves the model out. Raises ModelError."""
    _check([*(_policy(config, media) if policy else ()), *_others(config)])


def _policy(config: RunConfig, media: bool) -> Iterator[DirectoryCheck]:
    options = config.model
    if directory := _with_weights(options.source):
        modules = options.multi_token_prediction
        missing = modules.missing if modules else "refuse"
        yield DirectoryCheck(f"model {options.source}", directory, options.sections, missing, media)


def _others(config: RunConfig) -> Iterator[DirectoryCheck]:
    for stage in config.stages:
        algorithm = rl.algorithms.get(stage.algorithm.name, **(stage.algorithm.model_extra or {}))
        teacher = (stage.teacher or config.teacher) if "teacher" in algorithm.inputs else None
        if teacher is not None and teacher.source is not None and Path(teacher.source).is_dir():
            yield DirectoryCheck(f"teacher {teacher.source}", str(teachers.directory_of(teacher)))
        rewards = config.rewards_of(stage)
        for reward in rewards.functions if rewards else ():
            source = str(reward.options.get("source"))
            is_model = reward.name == REWARD_MODEL and source not in config.stage_names
            if is_model and (directory := _with_weights(source, "reward model")):
                yield DirectoryCheck(f"reward model {source}", directory, scores=True)


def _with_weights(source: str, part: models.Part = "model") -> str | None:
    """Returns the directory of a model; None for a name without files, and for a model of the hub
    whose weights are not all here yet."""
    if Path(source).is_dir():
        return source
    if (directory := models.directory(source, part=part)) is None:
        return None
    try:
        TensorFiles(sources.base_of(directory))
    except ModelFileError:
        return None
    return str(directory)


def _check(directories: list[DirectoryCheck]) -> None:
    """Checks directories here if jax is imported, otherwise in one child."""
    directories = [each for n, each in enumerate(directories) if each not in directories[:n]]
    if not directories:
        return
    if "jax" in sys.modules:
        if text := _first_problem(directories):
            raise ModelError(text)
        return
    command = [sys.executable, "-c", "from rl.data.inspect import weights; weights.main()"]
    process = subprocess.run(
        command,
        input=json.dumps([asdict(each) for each in directories]),
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if process.returncode:
        parts = ", ".join(each.part for each in directories)
        raise ModelError(
            f"{parts}: the files could not be checked; the child process "
            f"says\n{process.stderr.strip()}"
        )
    if text := json.loads(process.stdout.splitlines()[-1]):
        raise ModelError(text)


def problem(each: DirectoryCheck) -> str | None:
    """Returns why a run cannot read the directory, or None."""
    from policy.huggingface import classification, model_directory

    try:
        if each.scores:
            classification.check(each.directory)
        else:
            model_directory.check(each.directory, each.sections, each.missing, each.media)
    except ValueError as error:
        return f"{each.part}: {error}"
    return None


def _first_problem(directories: list[DirectoryCheck]) -> str | None:
    return next(filter(None, map(problem, directories)), None)


def main() -> None:
    """Reads a list of directories as JSON from standard input, and prints the first problem or
    null."""
    print(json.dumps(_first_problem([DirectoryCheck(**each) for each in json.load(sys.stdin)])))
