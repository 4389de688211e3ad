"""Compares the tensors of the model directories of a run with their configurations: headers of files, no weights.

The shapes of a model come from jax. A process that has not imported jax asks a child, so that it needs no device.
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
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from rewards.registry import REWARD_MODEL
from rl.config.run import RunConfig
from rl.data import models
from rl.data import teacher as teachers
from rl.errors import ModelError


@dataclass(frozen=True)
class Expected:
    """What a run reads of a directory.

    part: for messages. sections, missing, media: as for policy.load. scores: it is a reward model.
    """

    part: str
    directory: str
    sections: dict | None = None
    missing: Literal["refuse", "fresh"] = "refuse"
    media: bool = False
    scores: bool = False


def check_policy(config: RunConfig, media: bool) -> None:
    """Checks the directory of the model of a run. `media`: with its towers. Raises ModelError."""
    _check(list(_policy(config, media)))


def check_others(config: RunConfig) -> None:
    """Checks the directories of teachers and reward models of a run. Raises ModelError."""
    _check(list(_others(config)))


def check_all(config: RunConfig, media: bool) -> None:
    """Checks all directories of a run. Raises ModelError."""
    _check([*_policy(config, media), *_others(config)])


def _policy(config: RunConfig, media: bool) -> Iterator[Expected]:
    options = config.model
    if directory := _with_weights(options.source):
        modules = options.multi_token_prediction
        missing = modules.missing if modules else "refuse"
        yield Expected(f"model {options.source}", directory, options.sections, missing, media)


def _others(config: RunConfig) -> Iterator[Expected]:
    for stage in config.stages:
        algorithm = rl.algorithms.get(stage.algorithm.name, **(stage.algorithm.model_extra or {}))
        teacher = (stage.teacher or config.teacher) if "teacher" in algorithm.inputs else None
        if teacher is not None and teacher.source is not None and Path(teacher.source).is_dir():
            yield Expected(f"teacher {teacher.source}", str(teachers.directory_of(teacher)))
        rewards = stage.rewards or config.rewards
        for reward in rewards.functions if rewards else ():
            source = str(reward.options.get("source"))
            is_model = reward.name == REWARD_MODEL and source not in config.stage_names
            if is_model and (directory := _with_weights(source, "reward model")):
                yield Expected(f"reward model {source}", directory, scores=True)


def _with_weights(source: str, part: models.Part = "model") -> str | None:
    """Returns the directory of a model; None for a name without files, and for a model of the hub whose weights are not
    all here yet."""
    if Path(source).is_dir():
        return source
    if (directory := models.directory(source, part=part)) is None:
        return None
    try:
        TensorFiles(directory)
    except ModelFileError:
        return None
    return str(directory)


def _check(directories: list[Expected]) -> None:
    """Checks directories here if jax is imported, otherwise in one child."""
    directories = [each for n, each in enumerate(directories) if each not in directories[:n]]
    if not directories:
        return
    if "jax" in sys.modules:
        for each in directories:
            if text := problem(each):
                raise ModelError(text)
        return
    command = [sys.executable, "-c", "from rl.data.inspect import weights; weights.main()"]
    done = subprocess.run(
        command,
        input=json.dumps([asdict(each) for each in directories]),
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        said = done.stderr.strip()
        raise ModelError(f"{directories[0].part}: its shapes cannot be computed: {said.rpartition(chr(10))[2]}\n{said}")
    if text := json.loads(done.stdout.splitlines()[-1]):
        raise ModelError(text)


def problem(each: Expected) -> str | None:
    """Returns what a run would not read, or None."""
    from policy.huggingface import classification, model_directory

    try:
        if each.scores:
            classification.check(each.directory)
        else:
            model_directory.check(each.directory, each.sections, each.missing, each.media)
    except ValueError as error:
        return f"{each.part}: {error}"
    return None


def main() -> None:
    """Reads a list of directories as JSON from standard input, and prints the first problem or null."""
    directories = [Expected(**each) for each in json.load(sys.stdin)]
    print(json.dumps(next(filter(None, map(problem, directories)), None)))
