"""Checks what the schema of a configuration cannot: names, paths, and values that depend on each
other.

The checks are fast and import no jax. They run before anything is built, and for `rl-train
--check`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import rl.stages
from policy import compatibility, remat
from policy.config import DecoderConfig, LatentAttention
from policy.huggingface import sources
from rewards import plugins
from rewards.suggest import nearest, nearest_path
from rl.config import changes, mesh
from rl.config.data import (
    DataOptions,
    EvaluationOptions,
    NamedDataOptions,
    RewardSettings,
    datasets_of,
)
from rl.config.model import ModelOptions
from rl.config.run import RunConfig
from rl.config.stage import RouterOptions
from rl.data import models
from rl.data import teacher as teachers
from rl.data.hub import hub_name
from rl.errors import DuetError, Fault, Key
from rl.remote.urls import is_remote, problem_of, scheme_of
from rl.stages import metric_names
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from rl.stages.stage import StageKind

_BUILT_IN_TOKENIZERS = ("bytes", "characters")
_NO_LOCAL_PATH = (
    "{} is no local path, and a run directory is one; use a local folder, and `run.remote` for a "
    "copy of the run elsewhere: {}"
)


def faults(config: RunConfig) -> list[Fault]:
    """Returns the faults of a configuration that its schema accepts, each with its key."""
    return list(_faults(config))


def _faults(config: RunConfig) -> Iterator[Fault]:
    directory = config.run.dir
    if directory is not None and scheme_of(directory) is not None:
        advice = f"run.dir=runs/NAME run.remote={directory}"
        if not is_remote(directory):
            advice = "run.dir=runs/NAME run.remote=gs://BUCKET/NAME"
        yield Fault(_NO_LOCAL_PATH.format(directory, advice), key=("run", "dir"))
    elif directory is not None and Path(directory).exists() and not Path(directory).is_dir():
        yield Fault(f"{directory} exists and is not a directory", key=("run", "dir"))
    yield from _trackers(config)
    if config.run.remote is not None and (problem := problem_of(config.run.remote)) is not None:
        yield Fault(problem, key=("run", "remote"))
    yield from _model(config)
    yield from _features(config)
    yield from _quantization(config)
    yield from _pages(config)
    yield from _tokenizer(config)
    yield from mesh.faults(config.mesh)
    yield from mesh.rule_faults(config.generator.rules or {}, ("generator", "rules"))
    yield from _datasets(("data",), config.data)
    if config.rewards:
        yield from _rewards(("rewards",), config.rewards)
    if config.evaluation:
        yield from _evaluation(config, config.evaluation)
    yield from changes.faults(config)
    stages = rl.stages.create(config)
    yield from _base_weights(config, stages)
    yield from _biases(stages)
    trained = [stage.name for stage in stages if not stage.trains_policy]
    for stage in stages:
        yield from _datasets((*stage.path, "data"), stage.options.data)
        if stage.options.held_out:
            yield from _datasets((*stage.path, "held_out", "data"), stage.options.held_out.data)
        if stage.options.rewards:
            yield from _rewards((*stage.path, "rewards"), stage.options.rewards)
        yield from stage.check()
        yield from _metrics(stage)
        yield from _reward_models(config, stage, trained)
        yield from _teacher(config, stage)
    if config.teacher and not any(stage.teacher for stage in stages):
        yield Fault(
            "no stage learns from a teacher; leave it out, or add a stage of distill, gkd or opd",
            key=("teacher",),
        )


def _trackers(config: RunConfig) -> Iterator[Fault]:
    """Checks that the packages of the trackers are installed."""
    for name in ("mlflow", "trackio"):
        if getattr(config.run, name) is not None and importlib.util.find_spec(name) is None:
            yield Fault(
                f"the package {name} is not installed",
                f"pip install 'duet-rl[{name}]'",
                key=("run", name),
            )


def decoder_of(model: ModelOptions) -> DecoderConfig | None:
    """Returns the decoder of a model, or None if it cannot be read; `_model` reports that."""
    try:
        if (directory := models.directory(model.source)) is not None:
            return sources.read_config(directory, model.sections)
        return sources.preset(model.source, model.changes)
    except (ValueError, DuetError):
        return None


def _features(config: RunConfig) -> Iterator[Fault]:
    """Checks that model, stages and generator fit each other."""
    if (decoder := decoder_of(config.model)) is None:
        return
    calls = {
        "explicit": config.mesh.shard_mode == "explicit",
        "media": config.model.media_rows is not None,
    }
    reported = set(compatibility.conflicts(decoder, config.model.runtime, **calls))
    yield from (Fault(text, key=("model",)) for text in sorted(reported))
    if config.generator.speculative and decoder.multi_token_prediction is None:
        yield Fault(_NO_MODULES, key=("generator", "speculative"))
    if config.generator.sliding_window_cache and not any(
        getattr(mixer, key, None)
        for spec in decoder.layers
        for mixer in spec.mixers
        for key in ("window", "chunk")
    ):
        yield Fault(
            "no layer of this model looks back a window only; leave it out",
            key=("generator", "sliding_window_cache"),
        )
    indexers = [
        spec.mixer.indexer for spec in decoder.layers if isinstance(spec.mixer, LatentAttention)
    ]
    indexers = [indexer for indexer in indexers if indexer is not None]
    biased = config.evaluation.logit_bias if config.evaluation else None
    if outside := [token for token in biased or () if not 0 <= token < decoder.vocab_size]:
        yield Fault(
            f"{outside[0]} is no token: the vocabulary of the model has the ids 0 to "
            f"{decoder.vocab_size - 1}",
            key=("evaluation", "logit_bias"),
        )
    for number, stage in enumerate(config.stages):
        path = ("stages", number)
        training = stage.indexer.training
        for text in compatibility.conflicts(
            decoder, replace(config.model.runtime, **stage.runtime), **calls
        ):
            if text not in reported:
                yield Fault(text, key=path)
        outside = [
            each for each in stage.sampling.stop_token_ids if not 0 <= each < decoder.vocab_size
        ]
        if outside:
            yield Fault(
                f"{outside[0]} is no token: the vocabulary of the model has the ids 0 to "
                f"{decoder.vocab_size - 1}",
                key=(*path, "sampling", "stop_token_ids"),
            )
        if stage.mtp and decoder.multi_token_prediction is None:
            yield Fault(_NO_MODULES, key=(*path, "mtp"))
        if stage.router_replay and not any(spec.moe for spec in decoder.layers):
            yield Fault(
                "this model has no experts, so there are no routes to replay; leave it out",
                key=(*path, "router_replay"),
            )
        if training != "off" and not indexers:
            yield Fault(
                f"{training}, but this model has no indexer that can be trained (DeepSeek-V3.2 "
                "has); leave it off",
                key=(*path, "indexer", "training"),
            )
        elif (
            training == "sparse"
            and (topk := min(each.topk for each in indexers)) >= config.max_length
        ):
            yield Fault(
                f"sparse, but with max_length {config.max_length} every query sees all keys: "
                f"the indexers select {topk}; raise max_length, lower model.overrides.index_topk, "
                "or use dense_warmup",
                key=(*path, "indexer", "training"),
            )


_NO_MODULES = (
    "the model has no modules that predict further tokens; add `multi_token_prediction: "
    "{depth: 1}` under `model`"
)


def _model(config: RunConfig) -> Iterator[Fault]:
    from rl.config.packaged import model_presets

    yield from _memory(config.model, config.platform)
    path = ("model", "source")
    source = config.model.source
    directory = Path(source)
    on_hub = hub_name(source) is not None or is_remote(source)
    if source in model_presets():
        return
    if not directory.exists() and not on_hub:
        hint = nearest_path(source) or nearest(source, list(model_presets()))
        yield Fault(
            f"no directory {source}, and no model of that name in configs/models/{hint}", key=path
        )
    elif not on_hub and not sources.is_model(directory):
        yield Fault(
            f"{source} holds no config.json, so it is no Hugging Face model directory", key=path
        )
    elif config.model.overrides and (
        on_hub or directory.is_file() or any(directory.glob("*.safetensors"))
    ):
        yield Fault(
            f"{source} holds weights; overrides change the shape of a model that starts from "
            "random weights only",
            key=("model", "overrides"),
        )
    else:
        for name in set(config.model.sections) - {
            "multi_token_prediction"
        }:  # its weights may lie there unread
            yield Fault(
                f"{source} is a model directory, whose config.json says what parts it has; leave "
                "this out",
                key=("model", name),
            )


def _memory(model: ModelOptions, platform: str) -> Iterator[Fault]:
    if model.host_parameters and model.remat == "none":
        yield Fault(
            "none keeps every layer's weights on the device until the backward pass, so "
            "host_parameters saves nothing; set full, or another policy",
            key=("model", "remat"),
        )
    if model.host_parameters and not model.scan and platform == "tpu":
        yield Fault(
            "TPUs cannot add up gradients of unrolled layers in host memory; host_parameters "
            "needs scan: true",
            key=("model", "scan"),
        )
    if model.remat == "custom":
        for name in model.remat_tensors:
            if name not in remat.TENSORS:
                yield Fault(
                    f"no tensor {name}{nearest(name, list(remat.TENSORS))}",
                    key=("model", "remat_tensors", name),
                )
    elif model.remat_tensors:
        yield Fault(
            f"{model.remat} says itself what is kept; set `remat: custom`, or leave this out",
            key=("model", "remat_tensors"),
        )


def _quantization(config: RunConfig) -> Iterator[Fault]:
    """Checks quantised rollouts: with a training rule the generator must store the types that the
    rule multiplies, and exact completions need the trained weights."""
    rule = config.model.quantization
    weights = config.generator.weights
    if config.generator.exact:
        for name in ("weights", "kv_cache"):
            if kind := getattr(config.generator, name):
                yield Fault(
                    f"{kind}, but exact: true gives the tokens of the trained weights; leave one "
                    "of them out",
                    key=("generator", name),
                )
    if rule and weights and not rule.startswith(weights):
        yield Fault(
            f"{weights} weights cannot be multiplied by the {rule} activations of "
            "model.quantization; leave it out, or use the same numbers",
            key=("generator", "weights"),
        )


def _base_weights(config: RunConfig, stages: Sequence[StageKind]) -> Iterator[Fault]:
    """Checks that no stage trains weights that are stored quantised, and that rollouts read
    them."""
    kind = config.model.base_weights
    if kind is None:
        return
    for stage in stages:
        if trains := _trained_weights(config, stage):
            yield Fault(
                f"{stage.name} trains {trains}, and weights stored in {kind} are not trained",
                key=("model", "base_weights"),
            )
    if weights := config.generator.weights:
        yield Fault(
            f"{weights}, but rollouts read the {kind} weights of model.base_weights; leave it out",
            key=("generator", "weights"),
        )


def _biases(stages: Sequence[StageKind]) -> Iterator[Fault]:
    """Checks that no stage of an adapter is to move the selection biases of routers."""
    default = RouterOptions().bias_rate
    for stage in stages:
        if stage.trains_adapter and stage.options.router.bias_rate not in (0.0, default):
            yield Fault(
                "a stage that trains the adapter leaves the selection biases of routers as they "
                "are; leave it out, set it to 0, or write `trains: weights`",
                key=(*stage.path, "router", "bias_rate"),
            )


def _trained_weights(config: RunConfig, stage: StageKind) -> str | None:
    """Returns which weights of products a stage trains, and how it would not; None: it trains
    none."""
    whose = "policy" if stage.trains_policy else "reward model"
    if config.model.adapter is None:
        return f"the weights of the {whose}: set model.adapter"
    if not stage.trains_adapter:
        return f"the weights of the {whose} (trains: weights): leave `trains` out"
    return None


def _pages(config: RunConfig) -> Iterator[Fault]:
    options = config.generator
    if options.cache == "contiguous":
        for key in ("page_size", "pages"):
            if getattr(options, key) != type(options).model_fields[key].default:
                yield Fault(
                    "a contiguous cache has no pages; add `cache: paged`, or leave this out",
                    key=("generator", key),
                )
        return
    least = 1 + -(-(config.max_length + options.speculative) // options.page_size)
    if options.pages is not None and options.pages < least:
        yield Fault(
            f"{options.pages} pages of {options.page_size} tokens hold no completion of max_length "
            f"{config.max_length}; at least {least} are needed, one of which stays empty",
            key=("generator", "pages"),
        )


def _tokenizer(config: RunConfig) -> Iterator[Fault]:
    if config.tokenizer is None or config.tokenizer.source is None:
        try:
            directory = models.directory(config.model.source) or Path(config.model.source)
        except DuetError:
            return  # `load` raises it
        if not any((directory / name).is_file() for name in models.TOKENIZER_FILES):
            yield Fault(
                f"{directory} holds no tokenizer; name a directory that does, or `bytes`",
                key=("tokenizer",),
            )
    if config.tokenizer is None:
        return
    template = config.tokenizer.chat_template and config.tokenizer.chat_template.file
    if template is not None and not Path(template).is_file():
        yield Fault(
            f"no such file: {template}{nearest_path(template)}",
            key=("tokenizer", "chat_template", "file"),
        )
    source = config.tokenizer.source
    alphabet = config.tokenizer.alphabet
    if source is None:
        if alphabet is not None:
            yield Fault(
                "only `characters` takes an alphabet; set tokenizer.source=characters",
                key=("tokenizer", "alphabet"),
            )
        return
    if source == "characters" and not alphabet:
        yield Fault(
            "`characters` needs an alphabet: the characters that exist, as one text",
            key=("tokenizer", "alphabet"),
        )
    if source != "characters" and alphabet is not None:
        yield Fault(
            f"only `characters` takes an alphabet, the tokenizer is {source}",
            key=("tokenizer", "alphabet"),
        )
    if alphabet is not None and len(set(alphabet)) < len(alphabet):
        yield Fault("a character occurs twice", key=("tokenizer", "alphabet"))
    if source not in _BUILT_IN_TOKENIZERS:
        try:
            directory = models.directory(source, part="tokenizer")
        except DuetError:
            return  # `load` raises it
        if directory is None:
            yield Fault(
                "no directory "
                f"{source}{nearest_path(source) or nearest(source, _BUILT_IN_TOKENIZERS)}",
                key=("tokenizer", "source"),
            )
        elif not any((directory / name).is_file() for name in models.TOKENIZER_FILES):
            yield Fault(
                f"{source} holds none of {', '.join(models.TOKENIZER_FILES)}",
                key=("tokenizer", "source"),
            )


def _datasets(path: Key, data: DataOptions | Sequence[NamedDataOptions] | None) -> Iterator[Fault]:
    """Checks one dataset, or each of a list."""
    for number, each in enumerate(datasets_of(data)):
        yield from _data(path if each is data else (*path, number), each)


def _data(path: Key, data: DataOptions) -> Iterator[Fault]:
    if data.task is not None:
        import rl.tasks

        try:
            rl.tasks.check(data.task, data.options)
        except ValueError as error:
            options = [key for key in data.options if f"`{key}`" in str(error)]
            yield Fault(
                str(error), key=(*path, *(("options", *options[:1]) if options else ("task",)))
            )
        for key in ("subset", "prompt_template"):
            if getattr(data, key) is not None:
                yield Fault(
                    f"a task takes no {key}; its own options stand under `options`",
                    key=(*path, key),
                )
    else:
        from rl.config.packaged import packaged

        assert data.path is not None  # DataOptions has a task or a path
        if data.options:
            yield Fault("only a task takes options", key=(*path, "options"))
        for key in ("split", "subset"):
            if getattr(data, key) is not None and Path(data.path).is_file():
                yield Fault(
                    f"the file {data.path} is read as it is and has no {key}s; write {key}: null",
                    key=(*path, key),
                )
        if is_remote(data.path):
            if (problem := problem_of(data.path)) is not None:
                yield Fault(problem, key=(*path, "path"))
        elif (
            not Path(data.path).exists()
            and not packaged(data.path)
            and hub_name(data.path, alone=True) is None
        ):
            yield Fault(
                f"no such file or directory: {data.path} (from "
                f"{Path.cwd()}){nearest_path(data.path)}{_address(data.path)}",
                key=(*path, "path"),
            )


def _address(path: str) -> str:
    """Returns what to do about an address in the place of a path, or nothing."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return ". Variables of a shell are not replaced here" if path.startswith("$") else ""
    name = rest.removeprefix("datasets/")
    if scheme == "hf" and hub_name(name) is not None:
        return f"; write {name}, which is looked for on the Hugging Face hub"
    return "; write hf://org/name"


def _rewards(path: Key, settings: RewardSettings) -> Iterator[Fault]:
    from rewards.registry import REWARD_MODEL, RewardError, check

    for number, reward in enumerate(settings.functions):
        try:
            check(reward.name, reward.options)
        except RewardError as error:
            text = str(error)
            option = [("options", key) for key in reward.options if f"option {key!r}" in text]
            yield Fault(
                text, key=(*path, "functions", number, *(option[0] if option else ("name",)))
            )
    if not any(reward.weight for reward in settings.functions):
        yield Fault(
            "every reward has weight 0, so no completion is better than another",
            key=(*path, "functions"),
        )
    names = [
        (reward.name, reward.options.get("source") if reward.name == REWARD_MODEL else None)
        for reward in settings.functions
    ]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield Fault(f"{name[0]} is listed twice", key=(*path, "functions", number, "name"))


def _metrics(stage: StageKind) -> Iterator[Fault]:
    """Checks names of metrics and of the reward function of dynamic sampling."""
    until = stage.options.until
    rewards = metric_names.reward_names(stage)
    if until and (text := metric_names.problem(stage, until.metric)):
        yield Fault(text, key=(*stage.path, "until", "metric"))
    best = stage.options.best
    if best and not best.metric.startswith(("eval/", "held_out/")):
        text = (
            f"{best.metric!r} is no metric of an evaluation (eval/...) or of held-out rows "
            "(held_out/...)"
        )
        yield Fault(text, key=(*stage.path, "best", "metric"))
    elif best and (text := metric_names.problem(stage, best.metric)):
        yield Fault(text, key=(*stage.path, "best", "metric"))
    dynamic = getattr(stage.algorithm, "dynamic_reward", None)
    if dynamic is not None and stage.rewards and dynamic not in rewards:
        path = (*stage.path, "algorithm", "dynamic_reward")
        yield Fault(f"no reward function {dynamic!r}{nearest(dynamic, rewards)}", key=path)


def _reward_models(config: RunConfig, stage: StageKind, trained: list[str]) -> Iterator[Fault]:
    """Checks the sources of the reward models that a stage's rewards use.

    trained: names of the stages that train a reward model. Any other source is a directory.
    """
    from rewards.registry import REWARD_MODEL

    names = config.stage_names
    settings = stage.rewards
    path = (*stage.path, "rewards") if stage.options.rewards else ("rewards",)
    for place, reward in enumerate(settings.functions if settings else ()):
        source = reward.options.get("source")
        # The options of the reward refuse a source of another type.
        if reward.name != REWARD_MODEL or not isinstance(source, str | None):
            continue
        here = (*path, "functions", place, "options", "source")
        if source is None:
            yield Fault(
                "reward_model needs `source`: a stage of the run that trains one, a directory, or "
                "org/name",
                key=here[:-1],
            )
        elif source in trained:
            if names.index(source) >= stage.index:
                text = (
                    f"{stage.name} comes before stage {source}; name it under `rewards` of the "
                    "stages that follow it"
                )
                yield Fault(text, key=here)
        else:
            yield from (
                Fault(text, key=here) for text in _reward_model_directory(config, source, trained)
            )


def _teacher(config: RunConfig, stage: StageKind) -> Iterator[Fault]:
    """Checks the teacher of a stage, if it has one, against the policy."""
    if stage.teacher is None:
        if stage.has_teacher:
            text = "needs a teacher: set `teacher: {source: DIRECTORY}`, here or for all stages"
            yield Fault(f"{stage.algorithm.name} {text}", key=(*stage.path, "teacher"))
        return
    path = (*stage.path, "teacher") if stage.options.teacher else ("teacher",)
    if stage.teacher.weights and config.mesh.shard_mode == "explicit":
        text = (
            "explicit sharding takes no weights of few bits, and these are "
            f"{stage.teacher.weights}; leave one out"
        )
        yield Fault(text, key=(*path, "weights"))
    if stage.teacher.files and stage.trains_on_rollouts:
        yield Fault(
            f"files hold numbers for rows of data, and {stage.name} samples its tokens; give "
            "`source`",
            key=(*path, "files"),
        )
        return
    student = decoder_of(config.model)
    yield from teachers.faults(path, stage.teacher, stage.algorithm, student, config.max_length)


def _reward_model_directory(config: RunConfig, source: str, trained: list[str]) -> Iterator[str]:
    stages = (
        f", and no stage of that name trains a reward model ({', '.join(trained) or 'none does'})"
    )
    try:
        directory = models.directory(source, part="reward model")
    except DuetError:
        return  # `load` raises it
    if directory is None or not sources.is_model(directory):
        yield f"no directory {source} with a config.json{nearest_path(source)}{stages}"
        return
    try:
        decoder = sources.classifier(directory)
    except ValueError as error:
        yield str(error)
        return
    if decoder.max_positions is not None and config.max_length > decoder.max_positions:
        yield (
            f"max_length {config.max_length} is more than the {decoder.max_positions} positions "
            "of this reward model"
        )


def _evaluation(config: RunConfig, evaluation: EvaluationOptions) -> Iterator[Fault]:
    yield from _datasets(("evaluation", "data"), evaluation.data)
    for number, each in enumerate(datasets_of(evaluation.data)):
        place = () if each is evaluation.data else (number,)
        yield from _held_out_share(config, each, ("evaluation", "data", *place))
    if config.rewards is None and not all(stage.rewards for stage in config.stages):
        yield Fault("needs rewards to tell correct completions; add `rewards`", key=("evaluation",))
    if evaluation.samples == 0 and "k" in evaluation.model_fields_set and evaluation.k != [1]:
        yield Fault(
            "pass@k needs sampled completions, at least as many as the largest k",
            key=("evaluation", "samples"),
        )
    yield from _majority(config, evaluation)
    for number, name in enumerate(evaluation.metrics):
        try:
            if not plugins.is_plugin(name):
                raise ValueError(f"{name!r} is no file.py:function and no package.module:function")
            plugins.load(name, "evaluation metric")
        except ValueError as error:
            yield Fault(str(error), key=("evaluation", "metrics", number))
    for k in evaluation.k:
        if k < 1 or (evaluation.samples and k > evaluation.samples):
            yield Fault(
                f"each k lies between 1 and samples ({evaluation.samples}), got {k}",
                key=("evaluation", "k"),
            )
    shortest = min((stage.sampling.max_new_tokens for stage in config.stages), default=1)
    try:
        SamplingParams(max_new_tokens=shortest, **evaluation.processors)
    except ValueError as error:
        text = str(error).removeprefix("SamplingParams: ")
        yield Fault(
            f"{text}, {shortest}" if text.endswith("max_new_tokens") else text,
            key=("evaluation", text.split()[0]),
        )


def _majority(config: RunConfig, evaluation: EvaluationOptions) -> Iterator[Fault]:
    """Yields what keeps maj@k from being computed."""
    from rewards.registry import RewardError
    from rl.stages.sampling.evaluation import answer_of

    key = ("evaluation", "maj")
    for k in evaluation.maj:
        if not 1 <= k <= evaluation.samples:
            yield Fault(
                f"each k of maj lies between 1 and samples ({evaluation.samples}), got {k}", key=key
            )
    rewards = [config.rewards_of(stage) for stage in config.stages] if evaluation.maj else []
    for settings in rewards:
        if settings is None:
            continue
        try:
            tells = answer_of(settings) is not None
        except RewardError:  # reported where the reward is named
            return
        if not tells:
            names = ", ".join(each.name for each in settings.functions)
            yield Fault(
                f"no reward tells what a completion answers ({names}); use math, numeric_answer, "
                "exact_answer or choice_answer, or register yours with @reward(answer=...)",
                key=key,
            )
            return


def _held_out_share(config: RunConfig, held_out: DataOptions, path: Key) -> Iterator[Fault]:
    """Checks that training and evaluation have the same `eval_share`, which decides the problems
    that are held out."""
    for data in [config.data, *(stage.data for stage in config.stages)]:
        for trained in datasets_of(data):
            if trained.task != held_out.task or held_out.task is None:
                continue
            shares = [one.options.get("eval_share") for one in (trained, held_out)]
            if shares[0] != shares[1]:
                yield Fault(
                    f"{shares[1]} here and {shares[0]} in training (None: the default); they must "
                    "be the same",
                    key=(*path, "options", "eval_share"),
                )
