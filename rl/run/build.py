"""The model that a run trains: from what the configuration asks for to weights on their mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import policy
from policy.attention import context_parallel
from policy.config import DecoderConfig, Runtime
from policy.execution import batch_split
from policy.experts import expert_parallel
from policy.huggingface import sources
from policy.huggingface.hf import UnsupportedModel
from policy.huggingface.tensorfiles import ModelFileError
from policy.layers.engram import set_classes
from policy.mesh.host_memory import NoHostMemory, in_host_memory
from policy.mesh.sharding import Layout, layout
from policy.model import Graph, Model
from rewards.registry import REWARD_MODEL
from rl.config.run import ModelOptions, RunConfig, StageOptions
from rl.data.prepare import Prepared, Stage, read_tokenizer
from rl.errors import ConfigError, ModelError, ResourceError
from rl.run.folder import reward_model_of
from rl.training.reward_model import RewardModelScorer
from rollout import GeneratorOptions
from rollout.engine import speculative
from rollout.text.classes import token_classes


def model(config: RunConfig, prepared: Prepared, *, with_weights: bool) -> Model:
    """The model on its mesh; without weights when a checkpoint will bring them.

    Raises ResourceError for devices or memory that are not there, ConfigError for what does not fit the model, ModelError for a
    model that cannot be read.
    """
    options, mesh = config.model, on_mesh(config)
    try:
        decoder, classes = _decoder(options, prepared.tokenizer)
        _check(config, decoder, prepared.tokenizer)
        _check_runtime(options, decoder, mesh)
        graph = check_cut(Graph(decoder, options.runtime, mesh), config.mesh.sharding_tolerance)
        if not with_weights:
            return Model(graph, {})
        how = {"runtime": options.runtime, "mesh": mesh}
        if Path(options.source).is_dir():
            missing = part.missing if (part := options.multi_token_prediction) else "refuse"
            return policy.load(options.source, sections=options.sections, seed=config.seed, missing=missing, **how)
        made = policy.create(decoder, config.seed, **how)
    except NoHostMemory as error:
        raise ResourceError(str(error)) from None
    except (ModelFileError, UnsupportedModel) as error:
        raise ModelError(f"model {options.source}: {error}") from None
    if classes is not None:
        made.params = set_classes(made.params, classes)
    return made


def reward_model_scorers(config: RunConfig, stage: Stage, mesh: Layout) -> dict[str, RewardModelScorer]:
    """The reward models that the rewards of a stage ask, by the name they ask for. Raises ModelError where one cannot be read."""
    found = {}
    for source in stage.runner.sources:
        directory = reward_model_of(config, source) if source in config.stage_names else Path(source)
        try:
            found[source] = RewardModelScorer.read(directory, _judging(config), mesh, config.max_length)
        except (ModelFileError, UnsupportedModel) as error:
            raise ModelError(f"reward model {source}: {error}") from None
    return found


def planned_reward_model_scorers(config: RunConfig, stage: StageOptions, graph: Graph) -> dict[str, RewardModelScorer]:
    """The same without weights, where a stage before may still have to train one on a copy of the policy, whose graph is given."""
    settings, found = stage.rewards or config.rewards, {}
    for source in sorted(
        {each.options["source"] for each in settings.functions if each.name == REWARD_MODEL} if settings else ()
    ):
        try:
            trained = source in config.stage_names
            decoder = sources.trunk(graph.config) if trained else sources.classifier(source)
        except (ModelFileError, UnsupportedModel) as error:
            raise ModelError(f"reward model {source}: {error}") from None
        found[source] = RewardModelScorer(Graph(decoder, _judging(config), graph.layout), None, config.max_length)
    return found


def _judging(config: RunConfig) -> Runtime:
    return Runtime(dtype=config.model.dtype, param_dtype=config.model.param_dtype)


def on_mesh(config: RunConfig, devices=None) -> Layout:
    """The mesh of the configuration over `devices`, by default those of all processes. Raises ResourceError where it cannot be."""
    try:
        options = config.mesh
        across = options.dcn.model_dump() if options.dcn else None
        how = {"moments_over_data": options.shard_optimizer_over_data, "explicit": options.shard_mode == "explicit"}
        mesh = layout(options.degrees, options.rules, devices, dcn=across, **how)
        if any(each.host_memory for stage in config.stages for each in (stage.optimizer, stage.critic)):
            in_host_memory(mesh.replicated)
        return mesh
    except ValueError as error:
        raise ResourceError(f"{error} (platform: {config.platform})") from None
    except RuntimeError as error:
        raise ResourceError(
            f"platform: {config.platform} cannot be used here; set it to auto or cpu. jax says: {error}"
        ) from None


def graph(config: RunConfig, mesh: Layout) -> Graph:
    """The graph of the configuration's model, without weights. Its tokenizer is read only where the model depends on it.

    Raises ConfigError or ModelError as `model` does.
    """
    options = config.model
    try:
        decoder = _decoder(options, read_tokenizer(config)[0] if options.engram is not None else None)[0]
    except (ModelFileError, UnsupportedModel) as error:
        raise ModelError(f"model {options.source}: {error}") from None
    _check_runtime(options, decoder, mesh)
    return check_cut(Graph(decoder, options.runtime, mesh), config.mesh.sharding_tolerance)


def generator_options(config: RunConfig) -> GeneratorOptions:
    """How the generator decodes. A critic on the policy's states gives its values while these are there, where they are those of
    the policy's own weights and cache, and every token is drawn in one."""
    wanted = config.generator.model_dump(exclude={"slots", "strict_shapes"})
    asked = any(stage.algorithm.model_extra.get("critic_trunk") == "policy" for stage in config.stages)
    other = ("exact", "speculative", "weights", "kv_cache")
    return GeneratorOptions(
        **wanted,
        record_routes=any(stage.router_replay for stage in config.stages),
        record_values=asked and not any(wanted[name] for name in other),
    )


def check_cut(graph: Graph, tolerance: float) -> Graph:
    """The graph. Raises ConfigError where a mesh that cuts weights leaves more of them whole than it may."""
    whole = graph.whole
    share = sum(whole.values()) / graph.parameters
    if share > tolerance:
        listed = ", ".join(f"{path} ({number})" for path, number in sorted(whole.items(), key=lambda each: -each[1]))
        raise ConfigError(
            f"mesh: {share:.1%} of the weights would be whole on every device, more than mesh.sharding_tolerance {tolerance:.0%}: "
            f"{listed}. Choose degrees that divide their dimensions, give them a rule in mesh.rules, or raise the tolerance"
        )
    return graph


def _decoder(options: ModelOptions, tokenizer) -> tuple[DecoderConfig, np.ndarray | None]:
    """(the decoder, the classes of tokens that memories of n-grams with random weights tell apart, if it has some)."""
    if Path(options.source).is_dir():
        return sources.read_config(options.source, options.sections), None
    decoder = sources.preset(options.source, options.changes)
    if options.engram is None:
        return decoder, None
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


def _check(config: RunConfig, decoder: DecoderConfig, tokenizer) -> None:
    """What the rest of the configuration asks of this decoder."""
    if len(tokenizer) > decoder.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {decoder.vocab_size}; use the "
            "model's own tokenizer, or set model.overrides.vocab_size for random weights"
        )
    if decoder.max_positions is not None and config.max_length > decoder.max_positions:
        raise ConfigError(
            f"max_length: {config.max_length} is more than the {decoder.max_positions} positions of this model"
        )
    if config.generator.speculative:
        try:
            speculative.check(decoder)
        except ValueError as error:
            raise ConfigError(f"generator.{error}") from None
