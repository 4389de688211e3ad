"""Reads the tokenizer and the data of a run as token ids, and starts its reward workers, before a
model is built."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from policy.huggingface import sources
from policy.media import Item
from policy.mesh import processes, serialization
from rewards import RewardError, Runner, RunnerOptions, Share
from rewards.workers.media import Picture, Sound
from rewards.workers.threads import Call, Failure
from rl.cluster.launch import raise_on_all
from rl.config.data import DataOptions, EvaluationOptions, RewardSettings, datasets_of
from rl.config.model import TeacherOptions
from rl.config.run import RunConfig
from rl.config.stage import StageOptions
from rl.data import datasets, models
from rl.data import teacher as teachers
from rl.data.encoded import Example, Pair, Problem, Row
from rl.data.encoding import ExampleEncoder
from rl.data.limits import (
    Limit,
    cut_pair,
    cut_row,
    fit,
    never_cut,
    outside_vocabulary,
    too_long_key,
)
from rl.data.media import decode_first, kinds_of, read_processors, with_lists
from rl.data.shard import Shard
from rl.data.tokenizer import history_of, read_tokenizer
from rl.errors import ConfigError, DataError
from rollout.media.expand import Expanded
from rollout.media.loader import Loader
from rollout.media.processors import Processors
from rollout.media.reference import Reference
from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import bad_word_tokens, load_tokenizer

T = TypeVar("T")

# Types that the processes of a run send to each other: rows of data with their pictures and sounds,
# calls of rewards, and scores that failed.
serialization.register_type(Example, Problem, Row, Pair, Call, Failure)
serialization.register_type(Reference, Item, Expanded, Picture, Sound)


def _runner(settings: RewardSettings) -> Runner:
    functions = tuple((f.name, f.weight, f.options) for f in settings.functions)
    try:
        options = RunnerOptions(functions, settings.workers, settings.timeout_s, settings.on_error)
        return Runner(
            options, Share(processes.index(), processes.count(), processes.all_gather_object)
        )
    except RewardError as error:
        raise ConfigError(f"rewards: {error}") from None


def _identity(source: DataOptions) -> str:
    """Returns a text that is equal for two datasets with the same rows."""
    return source.model_dump_json(exclude={"weight"})


def _refuse_long(
    limit: Limit, numbers: Sequence[Any], lengths: Sequence[int], places: Sequence[str]
) -> None:
    """Raises DataError, the same on all processes, for rows that are longer than the limit.

    numbers: of each row among the rows of all processes. Every process has all rows of an
    evaluation.
    """
    if not any(processes.all_gather_object(max(lengths, default=0) > limit.tokens)):
        return
    rows = list(zip(numbers, lengths, places, strict=True))
    if limit.key is not None:
        rows = sorted(itertools.chain(*processes.all_gather_object(rows)))
    fault = limit.fault([length for _, length, _ in rows], [place for _, _, place in rows])
    assert fault is not None
    raise DataError(fault.message())


def _check_reward_models(names: Sequence[str], tokenizer: Tokenizer, used: int) -> None:
    """Raises ConfigError for a reward model with another tokenizer: it scores the token ids of the
    policy, of which `used` are in use."""
    for name in names:
        directory = models.directory(name, part="reward model") or name
        where = f"rewards: reward_model: {name}"
        if used > (size := sources.classifier(directory).vocab_size):
            raise ConfigError(
                f"{where} has a vocabulary of {size}, the run uses {used} tokens; they must be "
                "the same"
            )
        try:
            theirs = load_tokenizer(directory).get_vocab()
        except (ValueError, OSError):
            continue  # the directory has no tokenizer
        if different := sorted(theirs.items() ^ tokenizer.get_vocab().items()):
            raise ConfigError(
                f"{where} was trained with another tokenizer "
                f"({len(different)} entries differ, e.g. {different[0][0]!r}); "
                "it reads the tokens of the policy, so both must have the same"
            )


class DataReader:
    """Reads datasets as token ids, checks their lengths, and starts reward workers.

    Datasets and workers that several stages use are read and started once.
    """

    def __init__(self, config: RunConfig):
        """Reads the tokenizer and the processors. Raises ConfigError, ModelError for a name on the
        hub that cannot be read, and what `read_processors` raises.

        processors: None for a model that reads texts only. loader: decodes pictures and sounds;
        None without processors.
        """
        self._config = config
        self.tokenizer, self.stop_ids = read_tokenizer(config)
        self.processors = read_processors(config, self.tokenizer)
        self.loader = None if self.processors is None else Loader(self.processors)
        self._encoder = ExampleEncoder(
            self.tokenizer, self.processors, config.model.media_rows, history_of(config)
        )
        self._used = models.ids_in_use(self.tokenizer, config.model)
        self._has_media = False
        self.evaluation_problems: list[Problem] = []
        self._read: dict[tuple, Any] = {}
        self._runners: dict[str, Runner] = {}

    def close(self) -> None:
        """Ends the reward workers and the threads that decode."""
        for runner in self._runners.values():
            runner.close()
        if self.loader is not None:
            self.loader.close()

    @property
    def has_media(self) -> bool:
        """Whether any row that any process has read so far has pictures or sounds."""
        return self._has_media

    def read_evaluation(self, options: EvaluationOptions, stages: Sequence[StageOptions]) -> None:
        """Reads the problems of the evaluations that `stages` make, into `evaluation_problems`.
        Raises ConfigError for a bad word of theirs that the tokenizer has no tokens for."""
        self.check_words(options.bad_words, "evaluation")
        longest = max(stages, key=lambda stage: stage.sampling.max_new_tokens)
        self.evaluation_problems = [
            problem
            for each in datasets_of(options.data)
            for problem in self.problems(each, longest, evaluated=options.problems).own
        ]

    def check_words(self, words: Iterable[str], section: str) -> None:
        """Raises ConfigError for a bad word of a section that the tokenizer has no tokens for."""
        try:
            bad_word_tokens(self.tokenizer, tuple(words))
        except ValueError as error:
            raise ConfigError(f"{section}.{error}") from None

    def check_teacher(self, options: TeacherOptions | None, stop_token_ids: Iterable[int]) -> None:
        """Raises ConfigError or ModelError for a teacher that reads other ids than the run or ends
        texts elsewhere.

        options: None, files, or the policy itself: nothing is checked. stop_token_ids: further ids
        that end a completion of the stage.
        """
        for each in () if options is None else options.models:
            teachers.check_teacher(
                each, self.tokenizer, tuple({*self.stop_ids, *stop_token_ids}), self._used
            )

    def prompt_ids(self, example: Example) -> list[int]:
        """Returns the token ids of the prompt of an example. Raises DataError for one that cannot
        be encoded."""
        return self._problem(example).ids

    def reward_runner(self, settings: RewardSettings, problems: Sequence[Problem]) -> Runner:
        """Returns the workers that score these problems and those of the evaluation with these
        functions.

        Raises ConfigError for a reward or reward model that cannot be used, DataError for a column
        that is missing or that rewards cannot take.
        """
        for scored in (problems, self.evaluation_problems):
            if text := next(
                datasets.column_problems(settings, [problem.example for problem in scored]), None
            ):
                raise DataError(text)
        key = settings.model_dump_json()
        if key not in self._runners:
            self._runners[key] = _runner(settings)
        runner = self._runners[key]
        trained = self._config.stage_names
        _check_reward_models(
            [source for source in runner.sources if source not in trained],
            self.tokenizer,
            self._used,
        )
        return runner

    def problems(
        self, source: DataOptions, stage: StageOptions, *, evaluated: int | None = None
    ) -> Shard:
        """Reads prompts that leave room for a completion of the stage.

        evaluated: number of problems of an evaluation, the first ones of the source; None: all, for
        training.
        """
        for_evaluation = evaluated is not None
        dataset = self._load(source, everywhere=for_evaluation, held_out=for_evaluation)
        dataset = replace(dataset, examples=dataset.examples[:evaluated])
        key = ("problems", _identity(source), evaluated)
        encoded = raise_on_all(
            partial(self._once, key, lambda: [self._problem(example) for example in dataset])
        )
        limit = self._limit(source, stage.sampling.max_new_tokens, for_evaluation)
        return self._fitting(
            [[problem] for problem in encoded],
            dataset,
            limit,
            lambda each: len(each.ids),
            never_cut,
        )

    def demonstrations(
        self, source: DataOptions, train_on: str, *, held_out: bool = False
    ) -> Shard:
        """Reads the Rows of each demonstration; `train_on`: which tokens are trained on, as in
        rl/algorithms/sft.py. held_out: as for `datasets.load`."""

        def encode(example: Example) -> list[Row]:
            rows = self.guarded(example, lambda: self._encoder.demonstration(example, train_on))
            for row in rows:
                self.check_ids(example, row.ids, row.expanded)
            return rows

        key = ("demonstrations", train_on)
        return self.rows(
            source,
            key,
            encode,
            lambda row: len(row.ids),
            cut_row,
            demonstrations=True,
            held_out=held_out,
        )

    def pairs(self, source: DataOptions, *, held_out: bool = False) -> Shard:
        """Reads a Pair for each preference. held_out: as for `datasets.load`."""

        def length(pair: Pair) -> int:
            return max(len(pair.chosen.ids), len(pair.rejected.ids))

        def encode(example: Example) -> list[Pair]:
            return [self._pair(example)]

        return self.rows(
            source, ("pairs",), encode, length, cut_pair, pairs=True, held_out=held_out
        )

    def rows(
        self,
        source: DataOptions,
        key: tuple,
        encode: Callable[[Example], list[T]],
        length: Callable[[T], int],
        cut: Callable[[T, int], T | None],
        **form: Any,
    ) -> Shard:
        """Reads a dataset in the `form` that `datasets.load` takes, encodes each example and checks
        its length.

        key: identifies the result of `encode`, so that stages with the same source and key share
        it. cut: as for `limits.fit`.
        """
        dataset = self._load(source, **form)
        read = partial(
            self._once,
            (*key, *form.items(), _identity(source)),
            lambda: [encode(example) for example in dataset],
        )
        encoded = raise_on_all(read)
        return self._fitting(encoded, dataset, self._limit(source), length, cut)

    def _limit(
        self, source: DataOptions, new_tokens: int = 0, for_evaluation: bool = False
    ) -> Limit:
        """Returns how long the rows of a source may be."""
        if for_evaluation:
            return Limit(self._config.max_length, new_tokens)
        return Limit(
            self._config.max_length, new_tokens, source.too_long, too_long_key(self._config, source)
        )

    def _fitting(
        self,
        encoded: Sequence[list[T]],
        dataset: datasets.Dataset,
        limit: Limit,
        length: Callable[[T], int],
        cut: Callable[[T, int], T | None],
    ) -> Shard:
        """Returns the rows that fit. encoded: the rows of each example of the dataset.

        Raises DataError if the data refuse longer rows, or if none fits.
        """
        places = [
            (number, part) for number, rows in enumerate(encoded) for part in range(len(rows))
        ]
        rows = [row for each in encoded for row in each]
        examples = [dataset[number] for number, _ in places]
        index = processes.index()
        count = processes.count()
        numbers = [
            (index + number * count, part) for number, part in places
        ]  # (number of the example, part)
        if limit.too_long == "refuse":
            lengths = [length(row) for row in rows]
            _refuse_long(limit, numbers, lengths, [example.where for example in examples])
        is_simple = limit.too_long == "refuse" and len(rows) == len(encoded)
        if all(processes.all_gather_object(is_simple)):
            return Shard(rows, dataset.total, examples)
        fitting = fit(rows, limit, length, cut)
        own = [numbers[i] for i in fitting.numbers]
        parts = processes.all_gather_object((own, len(rows), fitting.cut))
        ranks = {
            place: rank
            for rank, place in enumerate(sorted(each for part in parts for each in part[0]))
        }
        total = sum(part[1] for part in parts)
        effect = limit.effect(total - len(ranks), sum(part[2] for part in parts), total)
        if not ranks:
            raise DataError(limit.nothing_left(effect))
        kept = [examples[i] for i in fitting.numbers]
        return Shard(fitting.rows, len(ranks), kept, [ranks[place] for place in own], effect)

    def _load(
        self, source: DataOptions, *, everywhere: bool = False, **form: Any
    ) -> datasets.Dataset:
        """Loads a dataset. everywhere: every process loads all rows, as of an evaluation, because
        it samples completions for all of them."""
        part = (0, 1) if everywhere else (processes.index(), processes.count())
        key = ("data", everywhere, _identity(source), *form.items())
        return self._once(key, lambda: self._checked(source, part=part, **form))

    def _checked(self, source: DataOptions, **form: Any) -> datasets.Dataset:
        """Loads a dataset and decodes its first pictures and sounds. Raises DataError for those
        that are broken, and for malformed rows."""
        if self.processors is None:
            return datasets.load(source, **form)

        def loaded(processors: Processors) -> datasets.Dataset:
            dataset = datasets.load(source, processors=processors, **form)
            decode_first(dataset, processors)
            return dataset

        dataset = raise_on_all(partial(loaded, self.processors))
        everywhere = {
            each for part in processes.all_gather_object(kinds_of(dataset)) for each in part
        }
        self._has_media |= bool(everywhere)
        return replace(dataset, examples=with_lists(dataset.examples, sorted(everywhere)))

    def _once(self, key: tuple, make: Callable[[], T]) -> T:
        if key not in self._read:
            self._read[key] = make()
        return self._read[key]

    def _problem(self, example: Example) -> Problem:
        ids, expanded = self.guarded(example, lambda: self._encoder.prompt(example))
        if not ids:
            raise DataError(
                f"{example.where}: the prompt is empty: there is no token to go on from"
            )
        self.check_ids(example, ids, expanded)
        return Problem(example, ids, expanded)

    def check_ids(self, example: Example, ids: Sequence[int], expanded: Expanded | None) -> None:
        """Raises DataError for a token for which the model has no embedding. Tokens that stand for
        pictures and sounds need none."""
        if max(ids, default=0) < self._used:
            return
        index = [-1] * len(ids) if expanded is None else expanded.index.tolist()
        for place, token in enumerate(ids):
            is_text = place >= len(index) or index[place] < 0
            if is_text and token >= self._used:
                raise DataError(
                    outside_vocabulary(self.tokenizer, token, example.where, self._used).message()
                )

    def answer(self, example: Example, answer: Any) -> Row:
        """Encodes the prompt of an example and an answer to it, up to the last token that the
        assistant writes.

        Raises DataError for an answer without a token.
        """
        row = self.guarded(example, lambda: self._encoder.answer(example, answer))
        self.check_ids(example, row.ids, row.expanded)
        return row

    def _pair(self, example: Example) -> Pair:
        assert example.pair is not None
        rows = [self.answer(example, answer) for answer in example.pair]
        if rows[0].ids == rows[1].ids and rows[0].mask == rows[1].mask:
            raise DataError(
                f"{example.where}: both answers are the same tokens: there is nothing to learn "
                "from this pair"
            )
        if not rows[0].mask[0] == rows[1].mask[0] == 0:
            raise DataError(
                f"{example.where}: the prompt is empty: there is no token to go on from"
            )
        return Pair(rows[0], rows[1], example.margin)

    @staticmethod
    def guarded(example: Example, encode: Callable[[], T]) -> T:
        """Returns `encode()`. Turns its ValueError into a DataError that names the row."""
        try:
            return encode()
        except ValueError as error:
            raise DataError(f"{example.where}: {error}") from None
