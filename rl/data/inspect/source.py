"""Reads tokenizer and rows of a configuration and applies the checks. It reads no weights, and
imports jax in a child process only (weights.py)."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import rl.algorithms
from policy.huggingface import generation_config, sources
from rewards.suggest import nearest_path
from rl.config.data import DataOptions, RewardSettings, datasets_of
from rl.config.run import RunConfig
from rl.data import datasets, models, towers
from rl.data import teacher as teachers
from rl.data.encoded import Example, Row
from rl.data.encoding import ExampleEncoder
from rl.data.hub import hub_name
from rl.data.inspect import weights
from rl.data.inspect.checks import check_stages, in_order
from rl.data.inspect.reward_check import demonstrations_score
from rl.data.inspect.stage_rows import Encoded, StageRows
from rl.data.limits import Limit, cut_row, fit, never_cut, too_long_key
from rl.data.media import conflicts, decode_first, kinds_of, read_processors, with_lists
from rl.data.rows.forms import read_labelled
from rl.data.rows.sources import is_downloaded
from rl.data.tokenizer import history_of, read_tokenizer
from rl.errors import ConfigError, DataError, Fault
from rl.remote.urls import is_remote
from rollout.media.processors import Processors
from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import CHAT_TEMPLATE

AnyData = TypeVar("AnyData", bound=DataOptions)
ENCODED = 5000
"""Rows that are encoded for the checks: all of a smaller dataset, otherwise a seeded sample."""


@dataclass(frozen=True)
class Inspection:
    """The rows of each stage, and what the checks say."""

    stages: list[StageRows]
    faults: list[Fault]
    held_out: list[Example] = field(default_factory=list)

    @property
    def has_media(self) -> bool:
        """Whether rows have pictures or sounds."""
        trained = [row.example for stage in self.stages for row in stage.rows]
        return any(example.references for example in (*trained, *self.held_out))

    @property
    def refused(self) -> bool:
        """Whether a run would not start."""
        return any(each.level == "refuse" for each in self.faults)

    @property
    def warned(self) -> bool:
        """Whether a check warns. `rl inspect --strict` then exits with code 3."""
        return any(each.level == "warn" for each in self.faults)


def inspect(config: RunConfig, only: str | None = None, rewards: bool = True) -> Inspection:
    """Reads tokenizer and rows and applies all checks.

    only: name of the one stage to look at. rewards: score demonstrations with the reward functions
    (check 13).

    Raises ConfigError for a tokenizer, file or task that cannot be used, ModelError for a directory
    of a model, teacher or reward model that a run cannot read. Malformed rows are faults.
    """
    inspection = _inspection(config, config.stage_names if only is None else (only,), rewards)
    weights.check(config, inspection.has_media)
    return inspection


def _inspection(config: RunConfig, names: Collection[str], rewards: bool) -> Inspection:
    """Applies the checks to the stages of these names."""
    models.check_files(config.model.source, config.model.sections)
    tokenizer, stops = read_tokenizer(config)
    encoder = ExampleEncoder(
        tokenizer, read_processors(config, tokenizer), config.model.media_rows, history_of(config)
    )
    malformed: list[Fault] = []
    held_out = _held_out(config, malformed, encoder.processors)
    stages = []
    for index, name in enumerate(config.stage_names):
        if name in names:
            try:
                stages.append(_stage(config, index, encoder, stops, held_out))
            except DataError as error:
                malformed.append(Fault(_first_of(str(error).splitlines()), check=14, stage=name))
    results = malformed + check_stages(stages, random_weights(config)) + length_faults(config)
    for stage in stages:
        if (settings := config.rewards_of(config.stages[stage.index])) is None:
            continue
        refused = _column_faults(stage, settings)
        results += refused
        if rewards and not refused:
            results += demonstrations_score(stage, settings)
    return Inspection(stages, in_order(results), held_out)


def _column_faults(stage: StageRows, settings: RewardSettings) -> list[Fault]:
    """Check 14: columns that the rewards of a stage cannot take, in its prompts and in those of the
    evaluation."""
    held_out = (
        () if stage.kind == "reward_model" else stage.held_out
    )  # it trains no policy to evaluate
    scored = [*(stage.examples if stage.samples else ()), *held_out]
    problems = list(datasets.column_problems(settings, scored))
    return [Fault(_first_of(problems), check=14, stage=stage.name)] if problems else []


def _first_of(problems: Sequence[str]) -> str:
    """Returns the first problem, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def length_faults(config: RunConfig) -> list[Fault]:
    """Check 16: a max_length beyond the positions of the model: a warning for rotary positions,
    which go on, a refusal for learned ones."""
    made_for = models.positions(config.model)
    if made_for is None or (text := made_for.exceeded_by(config.max_length)) is None:
        return []
    level = "refuse" if made_for.learned else "warn"
    return [
        Fault(
            f"max_length: {text}",
            f"Set max_length={made_for.number} or less",
            level=level,
            check=16,
        )
    ]


def random_weights(config: RunConfig) -> bool:
    """Tells whether a run starts from random weights: its model is the name of an architecture."""
    source = config.model.source
    return hub_name(source) is None and not is_remote(source) and not Path(source).is_dir()


def declared_stops(config: RunConfig) -> dict[str, list[int]]:
    """Returns the ends of sequence in config.json and generation_config.json of the model's
    directory."""
    directory = models.directory(config.model.source)
    if directory is None:
        return {}
    return {name: list(ids) for name, ids in generation_config.declared_stops(directory).items()}


def stage_rows(
    config: RunConfig, index: int, tokenizer: Tokenizer, stops: tuple[int, ...]
) -> StageRows:
    """Returns the description of a stage, without rows."""
    options = config.stages[index]
    algorithm = rl.algorithms.get(options.algorithm.name, **(options.algorithm.model_extra or {}))
    samples = algorithm.stage == "online"
    data = datasets_of(options.data or config.data)
    end = tokenizer.eos_token_id
    assert end is not None  # `load_tokenizer` refuses tokenizers without one
    stops = tuple(sorted({*stops, *options.sampling.stop_token_ids}))
    return StageRows(
        name=config.stage_names[index],
        index=index,
        kind=algorithm.stage,
        tokenizer=tokenizer,
        built_in=tokenizer.chat_template == CHAT_TEMPLATE,
        stops=stops,
        rows=[],
        limit=_limit(config, data, options.sampling.max_new_tokens if samples else 0),
        train_on=getattr(algorithm, "train_on", "assistant"),
        vocab_size=models.vocabulary_size(config.model),
        declared_stops={"tokenizer": [end], **declared_stops(config)},
        task=bool(data) and all(each.task is not None for each in data),
        prompts_per_step=options.prompts_per_step,
    )


def _held_out(
    config: RunConfig, malformed: list[Fault], processors: Processors | None
) -> list[Example]:
    if config.evaluation is None:
        return []
    try:
        most = config.evaluation.problems
        return [
            example
            for each in datasets_of(config.evaluation.data)
            for example in _loaded(each, processors, held_out=True).examples[:most]
        ]
    except DataError as error:
        malformed.append(Fault(f"evaluation: {str(error).splitlines()[0]}", check=14))
        return []


def _stage(
    config: RunConfig,
    index: int,
    encoder: ExampleEncoder,
    stops: tuple[int, ...],
    held_out: list[Example],
) -> StageRows:
    stage = stage_rows(config, index, encoder.tokenizer, stops)
    sources = datasets_of(config.stages[index].data or config.data)
    if not sources:
        raise DataError("the stage has no data")
    pairs = stage.kind in ("preference", "reward_model")
    form: dict[str, Any] = {"demonstrations": stage.kind == "supervised", "pairs": pairs}
    if stage.kind == "unpaired":
        form = {"read": read_labelled}
    read = [_read(config, stage, each, encoder, form) for each in sources]
    return replace(
        stage,
        rows=[row for each in read for row in each.rows],
        problems=[problem for each in read for problem in each.problems],
        total=sum(each.total for each in read),
        held_out=held_out,
        effect="; ".join(each.effect for each in read if each.effect is not None) or None,
    )


def _read(
    config: RunConfig,
    stage: StageRows,
    options: DataOptions,
    encoder: ExampleEncoder,
    form: Mapping[str, Any],
) -> StageRows:
    """Returns the rows of one dataset of a stage. form: as `datasets.load` takes it."""
    limit = _limit(config, [options], stage.limit.new_tokens)
    dataset = _loaded(options, encoder.processors, **form)
    examples = dataset.examples
    if encoder.processors is not None:
        decode_first(examples, encoder.processors)
    if len(examples) > ENCODED:
        examples = [
            examples[n]
            for n in sorted(random.Random(config.seed).sample(range(len(examples)), ENCODED))
        ]
    encoded: list[list[Encoded]] = []
    problems: list[tuple[Example, str]] = []
    for example in examples:
        try:
            encoded += _encoded(stage, example, encoder)
        except ValueError as error:
            problems.append((example, str(error)))
    effect = None
    if limit.too_long != "refuse":
        fitting = fit(encoded, limit, _longest, never_cut if stage.samples else _cut)
        effect = limit.effect(len(encoded) - len(fitting.rows), fitting.cut, len(encoded))
        read_all = options.limit is None or dataset.total < options.limit
        if encoded and not fitting.rows and read_all:
            raise DataError(limit.nothing_left(effect))
        encoded = fitting.rows
    rows = [row for each in encoded for row in each]
    return replace(stage, rows=rows, problems=problems, total=dataset.total, effect=effect)


def _limit(config: RunConfig, data: Sequence[DataOptions], new_tokens: int) -> Limit:
    """Returns how long rows may be: the limit of the first dataset that refuses longer ones, since
    the rows of the others have been made to fit."""
    if not data:
        return Limit(config.max_length, new_tokens)
    first = next((each for each in data if each.too_long == "refuse"), data[0])
    return Limit(config.max_length, new_tokens, first.too_long, too_long_key(config, first))


def _longest(rows: list[Encoded]) -> int:
    return max(len(row.ids) for row in rows)


def _cut(rows: list[Encoded], end: int) -> list[Encoded] | None:
    """Cuts a row, or both answers of a pair, as the run does (limits.py)."""
    cut = [(row.example, cut_row(Row(row.ids, row.mask, row.expanded), end)) for row in rows]
    kept = [Encoded(example, *row) for example, row in cut if row is not None]
    distinct = len(kept) < 2 or kept[0].ids != kept[1].ids
    return kept if len(kept) == len(rows) and distinct else None


def _loaded(options: DataOptions, processors: Processors | None, **form: Any) -> datasets.Dataset:
    """Loads a dataset in the `form` that `datasets.load` takes, with the columns that rewards
    get."""
    dataset = datasets.load(options, processors=processors, **form)
    return replace(dataset, examples=with_lists(dataset.examples, kinds_of(dataset)))


def _encoded(stage: StageRows, example: Example, encoder: ExampleEncoder) -> list[list[Encoded]]:
    """Encodes an example as its stage does. Returns what the stage takes or leaves as one: each row
    of a demonstration, a prompt, or both answers of a pair. Raises ValueError."""
    if stage.samples:
        ids, expanded = encoder.prompt(example)
        return [[Encoded(example, ids, [0] * len(ids), expanded)]]
    if example.pair is not None:
        return [[Encoded(example, *encoder.answer(example, answer)) for answer in example.pair]]
    return [[Encoded(example, *row)] for row in encoder.demonstration(example, stage.train_on)]


def check_first_rows(config: RunConfig, count: int = 100) -> list[str]:
    """Reads the tokenizer and the first rows of each dataset, as a quick check. Scores nothing.

    Returns notes about what was not read: datasets of the hub, which would be downloaded. Raises
    ConfigError for a tokenizer, file, task or teacher that cannot be used, ModelError for the
    directory of a model, teacher or reward model that a run cannot read, DataError for faults
    that refuse a run.
    """
    _check_teachers(config)
    notes: list[str] = []

    def shortened(options: AnyData) -> AnyData | None:
        if options.path is None or not is_downloaded(options.path):
            return options.model_copy(update={"limit": min(count, options.limit or count)})
        notes.append(
            f"{options.path} is a dataset of the hub{nearest_path(options.path)}: its rows were "
            "not read (rl inspect reads them)"
            if not is_remote(options.path)
            else f"{options.path} is at a URL: its rows were not read (rl inspect reads them)"
        )
        return None

    def first(data: Any) -> Any:
        if not isinstance(data, list):
            return data and shortened(data)
        return list(filter(None, map(shortened, data))) or None

    data = first(config.data)
    stages = [stage.model_copy(update={"data": first(stage.data)}) for stage in config.stages]
    read = [
        data if stage.data is None else short.data
        for stage, short in zip(config.stages, stages, strict=True)
    ]
    names = [
        name for name, options in zip(config.stage_names, read, strict=True) if options is not None
    ]
    evaluation = config.evaluation
    if evaluation is not None:
        held_out = first(evaluation.data)
        evaluation = None if held_out is None else evaluation.model_copy(update={"data": held_out})
    short = config.model_copy(update={"data": data, "stages": stages, "evaluation": evaluation})
    inspection = _inspection(short, names, rewards=False)
    _check_media(config, inspection)
    refused = [each.message() for each in inspection.faults if each.level == "refuse"]
    if refused:
        raise DataError("\n".join(dict.fromkeys(refused)))
    all_read = {stage.name for stage in inspection.stages if stage.total < count}
    notes += [
        each.message()
        for each in inspection.faults
        if each.check == 18 and each.level == "warn" or each.check == 17 and each.stage in all_read
    ]
    weights.check(config, inspection.has_media)
    return list(dict.fromkeys(notes))


def _check_media(config: RunConfig, inspection: Inspection) -> None:
    """Raises ConfigError if rows have pictures or sounds and the options of the run exclude
    them."""
    if not inspection.has_media:
        return
    if (directory := models.directory(config.model.source)) is not None:
        decoder = sources.read_config(directory, config.model.sections, media=True)
    else:
        changes = towers.preset_changes(config.model, read_tokenizer(config)[0])
        decoder = sources.preset(config.model.source, changes, media=True)
    if problems := list(dict.fromkeys(conflicts(config, decoder))):
        raise ConfigError("\n".join(problems))


def _check_teachers(config: RunConfig) -> None:
    """Raises ConfigError or ModelError for a teacher that does not read the ids of the run."""
    for index, options in enumerate(config.stages):
        algorithm = rl.algorithms.get(
            options.algorithm.name, **(options.algorithm.model_extra or {})
        )
        chosen = options.teacher or config.teacher
        if "teacher" in algorithm.inputs and chosen is not None and chosen.source is not None:
            tokenizer, stops = read_tokenizer(config)
            ends = stage_rows(config, index, tokenizer, stops).stops
            teachers.check_teacher(
                chosen, tokenizer, ends, models.ids_in_use(tokenizer, config.model)
            )
