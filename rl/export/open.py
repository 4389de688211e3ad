"""Opens what `rl export` names: a checkpoint or the final weights of a run, or a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import rl.algorithms
from policy.huggingface import sources
from rl.config.files import RESOLVED
from rl.config.run import ExportOptions, RunConfig
from rl.data import models
from rl.errors import ConfigError
from rl.export import of_directory, reward_model
from rl.export.of_directory import BaseFormat, ExportedDirectory
from rl.export.request import Dtype, ExportRequest
from rl.export.reward_model import ExportedRewardModel
from rl.run import load
from rl.stages.export.card import StageStep
from rl.stages.export.exportable import Exportable
from rl.stages.export.of_run import ExportedRun
from rl.stages.scorers import reward_model_of


@dataclass(frozen=True)
class Opened:
    """A model to export. run: the folder of the run that trained it; None: no run is known.
    label: what the marker and a message call the weights."""

    exported: Exportable
    run: Path | None
    label: str


def opened(request: ExportRequest) -> Opened:
    """Reads the weights that a request names.

    Raises ConfigError for a step or a form that there is not, ModelError for files that cannot be
    read.
    """
    name = request.source
    run = Path(name)
    is_run = (run / RESOLVED).is_file()
    if request.step is not None and not is_run:
        raise ConfigError(
            f"--step {request.step}: {name} is no folder of a run, which has a {RESOLVED}"
        )
    final = run / "export"
    if is_run and request.step is None and sources.is_model(final):
        config = load.saved(run)
        base = BaseFormat(config.model.base_weights, config.model.base_block)
        exported = _directory(request, final, base, config)
        exported.run = run
        exported.config = config
        return Opened(exported, run, f"final weights of {name}")
    if is_run and not sources.is_model(run):
        return _checkpoint(request, run)
    directory = models.directory(name, weights=True)
    if directory is None or not sources.is_model(directory):
        raise models.missing(name)
    return Opened(_directory(request, directory, BaseFormat(), None), None, name)


def _directory(
    request: ExportRequest, directory: Path, base: BaseFormat, config: RunConfig | None
) -> ExportedDirectory:
    forms = _forms(request, sources.has_adapter(directory), config)
    dtype = request.dtype or of_directory.stored_dtype(directory)
    if reward_model.is_reward_model(directory):
        return _reward_model(request, directory, dtype)
    model = of_directory.read(directory, dtype, base)
    return ExportedDirectory(directory, model, forms, request.source)


def _reward_model(request: ExportRequest, directory: Path, dtype: Dtype) -> ExportedRewardModel:
    from policy.model import Model

    if request.gguf is not None:
        raise ConfigError(
            f"--gguf: {directory} holds a reward model, and a GGUF file has no place for its score; "
            "leave it out"
        )
    classifier = reward_model.read(directory, dtype)
    trunk = Model(classifier.graph, classifier.params)
    return ExportedRewardModel(
        directory, trunk, ExportOptions(), request.source, classifier=classifier
    )


def _checkpoint(request: ExportRequest, run: Path) -> Opened:
    from rl.run.unfinished.weights import CheckpointWeights

    weights = CheckpointWeights(run, request.step)
    config = weights.config
    _refuse_reward_model_stage(config, weights.place)
    media = weights.has_towers
    model = weights.load(request.dtype or config.model.param_dtype, media=media)
    exported = ExportedRun(config, weights.tokenizer, weights.default_stops, model, _show, media)
    from policy.adapters.learning import has_adapter

    exported.chosen = _forms(request, has_adapter(model.params), config)
    read = weights.checkpoint
    assert read is not None  # the weights were loaded
    exported.place = StageStep(config.stage_names[read.stage], read.step)
    return Opened(exported, run, f"{run} after step {read.step} of {exported.place.stage}")


def _refuse_reward_model_stage(config: RunConfig, place: str) -> None:
    """Raises ConfigError for a checkpoint, STAGE:N, of a stage that leaves the policy as it is."""
    name = place.rpartition(":")[0]
    stage = config.stages[config.stage_names.index(name)]
    options = stage.algorithm.model_extra or {}
    if rl.algorithms.get(stage.algorithm.name, **options).stage == "reward_model":
        raise ConfigError(
            f"checkpoint {place}: the stage {name} trains a reward model, and its checkpoints are not "
            f"exported. At its end the stage writes {reward_model_of(config, name)}; for a policy name "
            "a step of another stage with --step"
        )


def _forms(request: ExportRequest, has_adapter: bool, config: RunConfig | None) -> ExportOptions:
    """Returns which directories are written of an adapter. Raises ConfigError for a form of a model
    without one."""
    if request.form is not None and not has_adapter:
        raise ConfigError(f"--{request.form}: {request.source} has no adapter; leave it out")
    if request.form is None:
        return config.export if config is not None else ExportOptions()
    return ExportOptions(adapter=request.form == "adapter", merged=request.form == "merged")


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
