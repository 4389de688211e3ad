"""Everything that a run holds, built from its configuration: the model on its mesh, the generator,
the tables of pictures, checkpoints and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import rl.stages
from policy.attention import context_parallel
from policy.config import DecoderConfig, Runtime
from policy.execution.encoding import MediaEncoder
from policy.experts import expert_parallel
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from policy.huggingface.weights import read_weights
from policy.layers import batch_split
from policy.layers.engram import set_classes
from policy.media import Kind
from policy.mesh import processes
from policy.mesh.sharding import Layout, layout
from policy.model import Graph, Model
from policy.ops.host_memory import NoHostMemory, in_host_memory
from rl.accounting.program_memory import ProgramMemoryLog
from rl.cluster.launch import on_first
from rl.config.data import datasets_of
from rl.config.model import ModelOptions
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.data.encoded import expanded_of
from rl.data.media import conflicts
from rl.data.reader import read_tokenizer
from rl.errors import ConfigError, ModelError, ResourceError
from rl.records.events import Events
from rl.records.timeline import CHECKPOINTS, Timeline
from rl.run.checkpoint import Checkpoints
from rl.run.folder import RunFolder
from rl.run.health import changed_rows
from rl.run.manifest import CHECKPOINT_FOLDER
from rl.run.prepare import Prepared
from rl.run.resume import adapters, base, best
from rl.run.signals import StopSignal
from rl.run.state import Run, stage_ended
from rl.stages.context import Progress
from rl.stages.sharing import sharing_of
from rl.training.media.tables import (
    MediaTables,
    evaluated_at_once,
    planned_rows,
    table_rows,
    trains_towers,
)
from rl.training.trainable import check_freeze
from rollout import Generator, GeneratorOptions
from rollout.engine import speculative
from rollout.text.classes import token_classes

if TYPE_CHECKING:
    from rollout.text.interface import Tokenizer


@contextmanager
def run(
    prepared: Prepared,
    folder: RunFolder,
    stop: StopSignal,
    timeline: Timeline,
    checkpoint_written: Callable[[], None] = lambda: None,
) -> Iterator[Run]:
    """Builds the objects that the stages share, or reads them from the newest checkpoint.

    checkpoint_written: called in the background after each checkpoint. Closes checkpoints and
    events at the end.
    """
    config = prepared.config
    writing = partial(timeline.span, "writing a checkpoint", CHECKPOINTS)
    parts = folder.parts
    checkpoints = Checkpoints(
        (folder.path if parts is None else parts.folder) / CHECKPOINT_FOLDER,
        config.run.keep_checkpoints,
        writing,
        best.named_by,
        checkpoint_written,
        parts,
    )
    with timeline.span("looking for a checkpoint"):
        saved = checkpoints.host()
    changed = None
    if saved is not None:
        stage = saved[1]["stage"]
        ended = stage_ended(saved[1], prepared.stages[stage])
        compare = partial(
            changed_rows.check, config, prepared.fingerprints, folder.path, stage, ended
        )
        changed = on_first(compare)
        if not ended:
            state = (saved[1].get("progress") or {}).get("producer") or {}
            prepared.stages[stage].restore_curriculum(state)
    progress = Progress.from_json(saved[1].get("progress")) if saved else Progress()
    has_media = prepared.data.has_media
    with timeline.span("loading the model"):
        decoder = first_model(config, prepared, None if saved is None else saved[1])
    sampler = generator(config, decoder, prepared.tokenizer, generator_options(config))
    events = Events(config, folder.path)
    if changed:
        events.note(changed)
    try:
        yield Run(
            config=config,
            tokenizer=prepared.tokenizer,
            stop_ids=prepared.stop_ids,
            model=decoder,
            generator=sampler,
            events=events,
            progress=progress,
            timeline=timeline,
            stages=prepared.stages,
            evaluation_problems=prepared.evaluation_problems,
            folder=folder,
            checkpoints=checkpoints,
            stop=stop,
            programs=ProgramMemoryLog(folder.path),
            saved=saved,
            common_folder=parts is None,
            tables=media_tables(config, prepared, decoder.graph) if has_media else None,
        )
    finally:
        sampler.engine.runner.stop_compiling()
        checkpoints.close()
        events.close()


def first_model(config: RunConfig, prepared: Prepared, host: dict | None = None) -> Model:
    """Returns the model of the first stage that runs, with the weights that no checkpoint brings.

    host: the host.json of the checkpoint that the run goes on from; None: it starts. Raises
    ModelError if the base of an adapter is another one than it was.
    """
    graph = prepared_graph(config, prepared, media=prepared.data.has_media)
    first = 0 if host is None else host["stage"]
    if adapters.trains_adapter(config, first):
        if host is not None:
            base.check(config, graph, host)
        decoder = read_model(config, graph, prepared.tokenizer, base.directory_of(config))
        adapters.begin(decoder, config)
        return decoder
    if host is not None:
        return Model(graph, {})
    directory = models.directory(config.model.source, weights=True)
    return read_model(config, graph, prepared.tokenizer, directory)


def media_tables(config: RunConfig, prepared: Prepared, graph: Graph) -> MediaTables:
    """Returns what makes the tables of pictures and sounds, with rows for those of any step and any
    evaluation."""
    shown = [
        ([expanded_of(row) for row in stage.rows.own], stage.options.prompts_per_step)
        for stage in prepared.stages
    ]
    for stage in prepared.stages:
        if (held_out := stage.held_out_rows) is not None:
            shown.append(([expanded_of(row) for row in held_out.own], stage.rows_per_update))
    block = evaluated_at_once(config)
    shown.append(([expanded_of(problem) for problem in prepared.evaluation_problems], block))
    # 1: rows with pictures may be read and never used, such as held-out ones beyond
    # `evaluation.problems`.
    M = max(1, *(table_rows(rows, count) for rows, count in shown))
    own = {
        (item.kind, *item.shape)
        for rows, _ in shown
        for row in rows
        for each in row
        for item in each.items
    }
    sizes: set[tuple[Kind, tuple[int, int]]] = {
        (kind, (height, width))
        for part in processes.all_gather_object(sorted(own))
        for kind, height, width in part
    }
    loader = prepared.data.loader
    assert loader is not None  # rows with pictures or sounds come with processors
    return MediaTables(MediaEncoder(graph), loader, M, sizes=frozenset(sizes), block=block)


def prepared_graph(config: RunConfig, prepared: Prepared, *, media: bool = False) -> Graph:
    """Returns the graph of the run's policy on its mesh, after every check that needs no weights.
    media: with its towers.

    Raises ResourceError for missing devices or memory, ConfigError for options that do not fit the
    model, ModelError for a model that cannot be read.
    """
    options = config.model
    mesh = on_mesh(config)
    with _as_model_errors(options.source):
        decoder = decoder_of(options, prepared.tokenizer, media)[0]
        _check(config, decoder, prepared.tokenizer)
        _check_runtime(options, decoder, mesh)
        graph = check_cut(policy_graph(config, decoder, mesh), config.mesh.sharding_tolerance)
        check_freeze(graph, config.stages)
        for stage in prepared.stages:
            sharing_of(stage, graph)
        if media:
            _check_media(config, graph, prepared)
    return graph


def read_model(
    config: RunConfig, graph: Graph, tokenizer: Tokenizer, directory: Path | None
) -> Model:
    """Returns the model of `graph` with the weights in `directory`; None: with random ones.

    Raises ResourceError for missing memory, ModelError for weights that cannot be read.
    """
    options = config.model
    with _as_model_errors(str(directory or options.source)):
        if directory is not None:
            part = options.multi_token_prediction
            missing = part.missing if part else "refuse"
            weights = read_weights(directory, graph, missing=missing, seed=config.seed)
            source = str(sources.base_of(directory))
            return Model(graph, weights.params, weights.newly_initialized, source)
        params = graph.init(config.seed)
        classes = None if options.engram is None else decoder_of(options, tokenizer)[1]
    return Model(graph, params if classes is None else set_classes(params, classes))


@contextmanager
def _as_model_errors(source: str) -> Iterator[None]:
    """Raises the errors of reading the model `source` as those of a run."""
    try:
        yield
    except NoHostMemory as error:
        raise ResourceError(str(error)) from None
    except (ModelFileError, UnsupportedModel) as error:
        raise ModelError(f"model {source}: {error}") from None


def on_mesh(config: RunConfig, devices: Sequence[object] | None = None) -> Layout:
    """Returns the mesh of the configuration over `devices`, by default the devices of all
    processes.

    Raises ResourceError if the mesh cannot be built.
    """
    try:
        options = config.mesh
        across = options.dcn.model_dump() if options.dcn else None
        how = {
            "moments_over_data": options.shard_optimizer_over_data,
            "explicit": options.shard_mode == "explicit",
        }
        mesh = layout(options.degrees, options.rules, devices, dcn=across, **how)
        if any(
            each.host_memory for stage in config.stages for each in (stage.optimizer, stage.critic)
        ):
            in_host_memory(mesh.replicated)
        return mesh
    except ValueError as error:
        raise ResourceError(f"{error} (platform: {config.platform})") from None


def graph(config: RunConfig, mesh: Layout) -> Graph:
    """Returns the graph of the configuration's model, without weights.

    Reads the tokenizer only if the model or the pictures that a plan has may depend on it.

    Raises ConfigError or ModelError as `prepared_graph` does.
    """
    options = config.model
    models.check_files(options.source, options.sections)
    with _as_model_errors(options.source):
        media = planned_rows(config) > 0
        tokenizer = read_tokenizer(config)[0] if options.engram is not None or media else None
        decoder = decoder_of(options, tokenizer, media)[0]
    _check_runtime(options, decoder, mesh)
    return check_freeze(
        check_cut(policy_graph(config, decoder, mesh), config.mesh.sharding_tolerance),
        config.stages,
    )


def policy_graph(config: RunConfig, decoder: DecoderConfig, mesh: Layout) -> Graph:
    """Returns the graph of the policy, as `adapters.with_adapter` does. Raises ConfigError or
    ModelError."""
    return adapters.with_adapter(Graph(decoder, config.runtime, mesh), config.model)


def check_frozen(config: RunConfig) -> None:
    """Raises ConfigError as `prepared_graph` does for names in `freeze`, on one device and without
    weights."""
    options = config.model
    models.check_files(options.source, options.sections)
    tokenizer = read_tokenizer(config)[0] if options.engram is not None else None
    with _as_model_errors(options.source):
        decoder = decoder_of(options, tokenizer)[0]
    check_freeze(Graph(decoder, Runtime(), layout({"fsdp": -1})), config.stages)


def generator(
    config: RunConfig, model: Model, tokenizer: Tokenizer, options: GeneratorOptions
) -> Generator:
    """Returns the generator of a run."""
    return Generator(
        model,
        max_length=config.max_length,
        slots=slots(config, model.graph.layout),
        seed=config.seed,
        tokenizer=tokenizer,
        options=options,
    )


def slots(config: RunConfig, layout: Layout) -> int:
    """Returns how many completions the generator decodes at the same time: `generator.slots`, or
    fewer if the run never samples so many. Fewer slots have fewer programs. The number is rounded
    up to a power of two, and to a slot for each device."""
    options = config.generator
    evaluation = config.evaluation
    sampled = [each for each in config.stages if rl.stages.kind_of(each).trains_on_rollouts]
    counts = [each.prompts_per_step * each.samples_per_prompt for each in sampled]
    if evaluation is not None:
        problems = evaluation.problems * len(datasets_of(evaluation.data))
        counts.append(problems * max(1, evaluation.samples))
    most = max(counts, default=1)
    return min(options.slots, max(1 << (most - 1).bit_length(), layout.mesh.size))


def generator_options(config: RunConfig) -> GeneratorOptions:
    """Returns how the generator decodes.

    The generator records the values of a critic that reads the policy's states. It does so only if
    it decodes with the policy's own weights and cache, one token per step.
    """
    options = config.generator.model_dump(exclude={"slots", "strict_shapes"})
    stages = rl.stages.create(config)
    critic = any(stage.sampled_values for stage in stages)
    other = ("exact", "speculative", "weights", "kv_cache")
    return GeneratorOptions(
        **options,
        record_routes=any(stage.router_replay for stage in config.stages),
        record_values=critic and not any(options[name] for name in other),
        record_kept=max(stage.max_kept for stage in stages),
    )


def check_cut(graph: Graph, tolerance: float) -> Graph:
    """Returns the graph. Raises ConfigError if a mesh that shards weights leaves too many of them
    replicated."""
    replicated = graph.replicated
    share = sum(replicated.values()) / graph.parameters
    if share > tolerance:
        largest_first = sorted(replicated.items(), key=lambda each: -each[1])
        listed = ", ".join(f"{path} ({number})" for path, number in largest_first)
        raise ConfigError(
            f"mesh: {share:.1%} of the weights would be replicated on every device, more than "
            f"mesh.sharding_tolerance {tolerance:.0%}: {listed}. Choose degrees that divide their "
            "dimensions, give them a rule in mesh.rules, or raise the tolerance"
        )
    return graph


def decoder_of(
    options: ModelOptions, tokenizer: Tokenizer | None, media: bool = False
) -> tuple[DecoderConfig, np.ndarray | None]:
    """Returns the decoder of a run's model, and the token classes of n-gram tables with random
    weights if it has such tables. tokenizer: of the run, read for a preset with towers or tables;
    media: with its towers."""
    if (directory := models.directory(options.source)) is not None:
        return sources.read_config(directory, options.sections, media=media), None
    if media:
        assert tokenizer is not None  # callers read it for towers
        return sources.preset(
            options.source, towers.preset_changes(options, tokenizer), media=True
        ), None
    decoder = sources.preset(options.source, options.changes)
    if options.engram is None:
        return decoder, None
    assert tokenizer is not None  # callers read it where the model has tables
    classes, count = token_classes(tokenizer, decoder.vocab_size)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    changes = options.changes
    changes["duet"]["engram"] |= {"ids": count, "pad_id": int(classes[pad])}
    return sources.preset(options.source, changes), classes


def _check_runtime(options: ModelOptions, decoder: DecoderConfig, mesh: Layout) -> None:
    try:
        expert_parallel.check(decoder, options.runtime, mesh)
        context_parallel.check(decoder, options.runtime, mesh)
        batch_split.check(decoder, options.runtime)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def _check_media(config: RunConfig, graph: Graph, prepared: Prepared) -> None:
    """Checks that this run can read pictures and sounds. Raises ConfigError."""
    for text in conflicts(config, graph.config):
        raise ConfigError(text)
    changed = -1  # the last stage that trains a tower
    for stage in prepared.stages:
        changed = (
            stage.index if stage.trains_policy and trains_towers(graph, stage.options) else changed
        )
        taught = stage.teacher is not None and any(expanded_of(row) for row in stage.rows.own)
        if any(processes.all_gather_object(taught)):
            raise ConfigError(
                f"{stage.name}: a teacher reads no pictures or sounds; use rows of text, or sft"
            )
        for source in () if stage.runner is None else stage.runner.sources:
            made = config.stage_names.index(source) if source in config.stage_names else -1
            if changed > made:
                raise ConfigError(
                    f"{stage.name}: reward model {source} reads the rows that the towers of the "
                    "policy make, and stage "
                    f"{config.stage_names[changed]} changes them; leave `freeze` out there"
                    + (", or train the reward model after it" if made >= 0 else "")
                )


def _check(config: RunConfig, decoder: DecoderConfig, tokenizer) -> None:
    """Checks the options of the configuration against this decoder. Raises ConfigError."""
    # Rows that use a token without an embedding are refused as they are read.
    end = tokenizer.eos_token_id
    if end is not None and end >= decoder.vocab_size:
        raise ConfigError(
            f"the tokenizer ends texts with token {end}, the model's vocab_size is "
            f"{decoder.vocab_size}; use the "
            "model's own tokenizer, or set model.overrides.vocab_size for random weights"
        )
    if decoder.max_positions is not None and config.max_length > decoder.max_positions:
        raise ConfigError(
            f"max_length: {config.max_length} is more than the {decoder.max_positions} positions "
            "of this model"
        )
    if config.generator.speculative:
        try:
            speculative.check(decoder)
        except ValueError as error:
            raise ConfigError(f"generator.{error}") from None
