"""The frozen models of a stage: the reward models that its rewards ask, and its teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from policy.config import Runtime
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from rewards.registry import REWARD_MODEL
from rl.config.data import RewardSettings
from rl.config.model import TeacherOptions
from rl.config.run import RunConfig
from rl.data import models
from rl.data import teacher as teachers
from rl.errors import ConfigError, ModelError, ResourceError

MOST_OUTSIDE = 1e-3
"""Largest probability that the policy may give to ids that a teacher's smaller vocabulary does not
have."""

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout
    from policy.model import Graph
    from rl.algorithms._protocols import TeacherLoss
    from rl.records.timeline import Timeline
    from rl.training.batch import Batch
    from rl.training.media.tables import StepTable
    from rl.training.packing.trees import Sharing
    from rl.training.reward_model import RewardModelScorer
    from rl.training.teachers.frozen import FrozenModel
    from rl.training.teachers.scorer import TeacherScorer
    from rl.training.teachers.teacher import Teacher
    from rollout.media.expand import Expanded


def reward_model_of(config: RunConfig, stage: str) -> Path:
    """Returns the directory of the reward model that the stage of this name trains."""
    return config.directory / "reward_models" / stage


def program_name(source: str) -> str:
    """Returns what a plan calls the program of a reward model."""
    return f"scores of {source}"


def teacher_program_name(source: str) -> str:
    """Returns what a plan calls the program of a teacher that scores completions."""
    return f"log-probabilities of {source}"


def load_scorers(
    config: RunConfig, names: Iterable[str], mesh: Layout, sharing: Sharing | None = None
) -> dict[str, RewardModelScorer]:
    """Loads reward models: stages of the run, directories, or names on the hub, for sequences that
    share beginnings.

    Raises ModelError where one cannot be read.
    """
    from rl.training.reward_model import RewardModelScorer

    scorers = {}
    for source in names:
        trained = source in config.stage_names
        directory = reward_model_of(config, source) if trained else _directory(source, weights=True)
        try:
            scorers[source] = RewardModelScorer.read(
                directory, _runtime(config), mesh, config.max_length, sharing
            )
        except (ModelFileError, UnsupportedModel) as error:
            raise ModelError(f"reward model {source}: {error}") from None
    return scorers


def scoring_functions(
    scorers: Mapping[str, RewardModelScorer],
    timeline: Timeline,
    prompts: Sequence[Expanded | None],
    table: StepTable | None = None,
) -> dict[str, Callable[[list], list[float]]]:
    """Returns each reward model as a function of lists of token ids; the timeline shows each call.

    The sequences of a prompt stand next to each other, equally many for each of the `prompts`.
    table: the pictures and sounds of the prompts.
    """

    def rewards_of(
        source: str, scorer: RewardModelScorer, sequences: list[list[int]]
    ) -> list[float]:
        with timeline.span("reward model", source=source, completions=len(sequences)):
            samples = len(sequences) // len(prompts)
            if table is None:
                return scorer(sequences, samples=samples)
            shown = [(row, 0, prompts[row // samples]) for row in range(len(sequences))]
            return scorer(sequences, partial(table.add, shown=shown), table.table, samples)

    return {source: partial(rewards_of, source, scorer) for source, scorer in scorers.items()}


def abstract_scorers(
    config: RunConfig, rewards: RewardSettings | None, graph: Graph, sharing: Sharing | None = None
) -> dict[str, RewardModelScorer]:
    """Returns the reward models without weights, for a plan.

    A stage that has not run yet trains its reward model on a copy of the policy, whose graph is
    `graph`.
    """
    from policy.model import Graph
    from rl.training.reward_model import RewardModelScorer

    names = (
        {each.options["source"] for each in rewards.functions if each.name == REWARD_MODEL}
        if rewards
        else set()
    )
    scorers = {}
    for source in sorted(names):
        try:
            trained = source in config.stage_names
            decoder = (
                sources.trunk(graph.config) if trained else sources.classifier(_directory(source))
            )
        except (ModelFileError, UnsupportedModel) as error:
            raise ModelError(f"reward model {source}: {error}") from None
        trunk = Graph(decoder, _runtime(config), graph.layout)
        scorers[source] = RewardModelScorer(trunk, None, config.max_length, sharing)
    return scorers


def abstract_teacher(
    config: RunConfig, options: TeacherOptions | None, algorithm: TeacherLoss, mesh: Layout
) -> Teacher | None:
    """Returns the teacher that an update compares the policy with, on the mesh of the run, without
    weights; None: without options.

    Raises ConfigError or ModelError.
    """
    from rl.training.teachers.teacher import ModelTeacher, StoredTeacher

    if options is None:
        return None
    if options.files is not None:
        return StoredTeacher(algorithm)
    return ModelTeacher(frozen_teacher(config, options, mesh), algorithm)


def frozen_teacher(config: RunConfig, options: TeacherOptions, mesh: Layout) -> FrozenModel:
    """Returns a teacher as a model on the mesh of the run, without weights.

    Raises ConfigError or ModelError.
    """
    from policy.model import Graph
    from policy.ops.host_memory import NoHostMemory
    from rl.training.teachers.frozen import FrozenModel

    runtime = config.runtime
    dtype = options.dtype or runtime.dtype
    runtime = replace(
        runtime, dtype=dtype, param_dtype=dtype, remat="full", remat_tensors=(), quantization=None
    )
    runtime = replace(
        runtime,
        base_weights=options.weights,
        base_block=64 if options.weights == "nf4" else None,
        host_parameters=options.host_memory,
        table_memory="device",
        batch_split=False,
        skip_blocks=True,
    )
    decoder = teachers.decoder_of(options)
    directory = teachers.directory_of(options)
    try:
        graph = Graph(decoder, runtime, mesh)
    except NoHostMemory:
        raise ResourceError(
            "teacher.host_memory: these devices have no host memory that programs can read; set "
            "it to false"
        ) from None
    except ValueError as error:
        raise ConfigError(f"teacher {options.source}: {error}") from None
    return FrozenModel(graph, directory, config.seed)


def load_teachers(
    options: TeacherOptions | None,
    loaded: Iterable[Teacher | TeacherScorer],
    span: Callable[[str], AbstractContextManager],
) -> None:
    """Reads the weights of the teachers of a stage, in a span of the timeline; without options it
    does nothing.

    Raises ModelError.
    """
    if options is None or options.is_own:
        return
    for each in options.models:
        teachers.directory_of(each, weights=True)  # downloads those of the hub
    with span("loading the teacher"):
        for each in loaded:
            each.read()


def check_outside(
    options: TeacherOptions,
    compared: Iterable[Teacher | TeacherScorer],
    graph: Graph,
    params: dict,
    batch: Batch,
) -> None:
    """Raises ModelError if the policy uses ids that are padding in the vocabulary of a teacher.

    compared: the teachers. graph, params: of the policy. batch: sequences of the data.
    """
    from rl.training.teachers.vocabulary import probability_outside

    own = graph.config.vocab_size
    vocabulary = min((each.vocabulary(graph) for each in compared), default=own)
    if own <= vocabulary:
        return
    outside = probability_outside(graph, params, batch, vocabulary)
    if outside > MOST_OUTSIDE:
        raise ModelError(
            f"teacher {options.label} has {vocabulary} ids, the policy {own}, and gives "
            f"those beyond a probability of {outside:.2g} (most: {MOST_OUTSIDE:g}); the "
            "divergence does not see them. Train the policy on texts first (sft), or use models "
            "of the same width"
        )


def teacher_scorers(
    config: RunConfig, options: TeacherOptions, temperature: float, policy: Graph
) -> list[TeacherScorer]:
    """Returns the teachers that score completions, without weights.

    temperature: of the log-probabilities. Raises ConfigError or ModelError.
    """
    from rl.training.teachers.scorer import TeacherScorer

    return [
        TeacherScorer(
            str(each.source),
            frozen_teacher(config, each, policy.layout),
            temperature,
            policy.config.vocab_size,
        )
        for each in options.models
    ]


def _directory(source: str, weights: bool = False) -> Path:
    """Returns the directory of a reward model that no stage of the run trains. Raises as
    `models.directory`."""
    return models.directory(source, weights=weights, part="reward model") or Path(source)


def _runtime(config: RunConfig) -> Runtime:
    dtypes = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
    return Runtime(**dtypes, max_length=config.max_length)
