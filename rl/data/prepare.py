"""Reads and checks the tokenizer, data and rewards of a run, before a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl.algorithms
from policy.huggingface import sources
from policy.mesh import processes, serialization
from rewards import RewardError, Runner, RunnerOptions, Share, registry
from rewards.workers.threads import Call, Failure
from rl.cluster.launch import raise_on_all
from rl.config.run import DataOptions, EvaluationOptions, RewardSettings, RunConfig, StageOptions
from rl.data import datasets
from rl.data.shard import Shard
from rl.errors import ConfigError, DataError
from rl.stages.rollouts import Problem
from rollout.text import chat
from rollout.text.tokenizer import load_tokenizer, stop_ids

Row = tuple[list[int], list[int]]  # ids of a demonstration, and 1 where a token is trained on


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt as token ids, each with the prompt.

    Like a sampled completion, an answer ends with the last token that the assistant writes.
    """

    chosen: Row
    rejected: Row
    margin: float


# Types that the processes of a run exchange: rows of data, calls of rewards, and scores that failed.
serialization.carried(datasets.Example, Problem, Pair, Call, Failure)


@dataclass(frozen=True)
class Stage:
    """One stage, ready to run. `problems` (of Problem) for rollouts, `demonstrations` (of Row) or `pairs` (of Pair) for training on
    data alone; the others are None."""

    index: int
    name: str
    options: StageOptions
    algorithm: object
    problems: Shard | None
    demonstrations: Shard | None
    pairs: Shard | None
    runner: Runner | None


@dataclass(frozen=True)
class Prepared:
    tokenizer: object
    stop_ids: tuple[int, ...]
    stages: list[Stage]
    evaluation: EvaluationOptions | None
    held_out: Sequence[Problem]

    def close(self) -> None:
        for runner in {id(s.runner): s.runner for s in self.stages if s.runner}.values():
            runner.close()


def prepare(config: RunConfig) -> Prepared:
    """Reads tokenizer and data and checks every length.

    Each process reads its own rows; an error on one process is raised on all. Raises ConfigError for a tokenizer or
    reward that cannot be used, DataError for data that is malformed, empty or too long.
    """
    return raise_on_all(lambda: _prepared(config))


def _prepared(config: RunConfig) -> Prepared:
    tokenizer, stops = read_tokenizer(config)
    encoder = _Encoder(config, tokenizer)
    names = config.stage_names
    algorithms = [
        rl.algorithms.get(options.algorithm.name, **options.algorithm.model_extra) for options in config.stages
    ]
    evaluated = [options for options, each in zip(config.stages, algorithms, strict=True) if not each.needs_scores]
    held_out = encoder.held_out(config.evaluation, evaluated) if config.evaluation and evaluated else []
    runners: dict[str, Runner] = {}
    stages = []
    for index, (options, algorithm) in enumerate(zip(config.stages, algorithms, strict=True)):
        source, rewards = options.data or config.data, options.rewards or config.rewards
        problems = encoder.problems(source, options) if algorithm.needs_rollouts else None
        runner = None
        if rewards and (problems or held_out) and not algorithm.needs_scores:
            for scored in (problems.own if problems else (), held_out):
                _check_columns(rewards, scored)
            key = rewards.model_dump_json()
            runner = runners[key] = runners.get(key) or _runner(rewards)
            _check_reward_models([source for source in runner.sources if source not in names], tokenizer)
        _check_dynamic(algorithm, runner, names[index])
        demonstrations = None
        if not (algorithm.needs_rollouts or algorithm.needs_pairs):
            demonstrations = encoder.demonstrations(source, algorithm.train_on)
        stages.append(
            Stage(
                index=index,
                name=names[index],
                options=options,
                algorithm=algorithm,
                problems=problems,
                demonstrations=demonstrations,
                pairs=encoder.pairs(source) if algorithm.needs_pairs else None,
                runner=runner,
            )
        )
    return Prepared(tokenizer, stops, stages, config.evaluation, held_out)


def read_tokenizer(config: RunConfig):
    """Returns (tokenizer, ids of the tokens that end a completion). Raises ConfigError."""
    directory = config.model.source if Path(config.model.source).is_dir() else None
    try:
        if config.tokenizer is None:
            tokenizer = load_tokenizer(directory)
        else:
            tokenizer = load_tokenizer(
                config.tokenizer.source, config.tokenizer.alphabet, config.tokenizer.chat_template
            )
        return tokenizer, stop_ids(tokenizer, directory)
    except (ValueError, OSError) as error:
        raise ConfigError(f"tokenizer: {error}") from None


def _runner(settings: RewardSettings) -> Runner:
    functions = tuple((f.name, f.weight, f.options) for f in settings.functions)
    try:
        options = RunnerOptions(functions, settings.workers, settings.timeout_s, settings.on_error)
        return Runner(options, Share(processes.index(), processes.count(), processes.all_gather_object))
    except RewardError as error:
        raise ConfigError(f"rewards: {error}") from None


def _check_reward_models(directories: Sequence[str], tokenizer) -> None:
    """Raises ConfigError for a reward model with another tokenizer: it scores the token ids of the policy."""
    for directory in directories:
        where = f"rewards: reward_model: {directory}"
        if len(tokenizer) > (size := sources.classifier(directory).vocab_size):
            raise ConfigError(
                f"{where} has a vocabulary of {size}, the tokenizer has {len(tokenizer)} tokens; they must be the same"
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


def _check_dynamic(algorithm, runner: Runner | None, stage: str) -> None:
    reward = getattr(algorithm, "dynamic_reward", None)
    if reward is not None and reward not in runner.names:
        raise ConfigError(f"{stage}: dynamic_reward: no reward function {reward!r}; they are {', '.join(runner.names)}")


def _check_columns(settings: RewardSettings, problems: Sequence[Problem]) -> None:
    """Raises DataError if a row lacks a column that a reward needs. Its value may be null if a reward does not apply."""
    first: dict[frozenset, datasets.Example] = {}
    for problem in problems:
        first.setdefault(frozenset(problem.example.columns), problem.example)
    for columns, example in first.items():
        for function in settings.functions:
            try:
                registry.check(function.name, function.options, columns)
            except RewardError as error:
                raise DataError(f"{example.where}: {error}") from None


class _Encoder:
    """Encodes datasets as token ids and checks their lengths. Reads a dataset once, also for several stages."""

    def __init__(self, config: RunConfig, tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._read: dict[tuple, Any] = {}

    def problems(self, source: DataOptions, stage: StageOptions, *, held_out: bool = False) -> Shard:
        dataset = self._load(source, held_out=held_out)
        encoded = self._once(
            ("problems", source.model_dump_json(), held_out), lambda: [self._problem(e) for e in dataset]
        )
        lengths = {id(p.example): len(p.ids) for p in encoded}
        longest = self._config.max_length - stage.sampling.max_new_tokens
        most = stage.sampling.max_new_tokens
        advice = f"raise max_length ({self._config.max_length}) or lower sampling.max_new_tokens ({most})"
        datasets.check_lengths(dataset, lambda example: lengths[id(example)], longest, advice)
        return Shard(encoded, dataset.total)

    def demonstrations(self, source: DataOptions, train_on: str) -> Shard:
        dataset = self._load(source, demonstrations=True)
        rows = self._once(
            ("rows", source.model_dump_json(), train_on), lambda: [self._row(example, train_on) for example in dataset]
        )
        self._check_lengths(dataset, [len(ids) for ids, _ in rows])
        return Shard(rows, dataset.total)

    def pairs(self, source: DataOptions) -> Shard:
        dataset = self._load(source, pairs=True)
        pairs = self._once(("pairs", source.model_dump_json()), lambda: [self._pair(example) for example in dataset])
        self._check_lengths(dataset, [max(len(pair.chosen[0]), len(pair.rejected[0])) for pair in pairs])
        return Shard(pairs, dataset.total)

    def _check_lengths(self, dataset: datasets.Dataset, lengths: Sequence[int]) -> None:
        length_of = {id(example): length for example, length in zip(dataset, lengths, strict=True)}
        advice = f"raise max_length ({self._config.max_length}) or leave these rows out"
        datasets.check_lengths(dataset, lambda example: length_of[id(example)], self._config.max_length, advice)

    def held_out(self, options: EvaluationOptions, stages: Sequence[StageOptions]) -> list[Problem]:
        longest = max(stages, key=lambda stage: stage.sampling.max_new_tokens)
        return list(self.problems(options.data, longest, held_out=True).own[: options.problems])

    def _load(self, source: DataOptions, **kind: bool) -> datasets.Dataset:
        """Loads a dataset. Every process reads all held-out rows, because it samples completions for all of them."""
        part = (0, 1) if kind.get("held_out") else (processes.index(), processes.count())
        return self._once(
            ("data", source.model_dump_json(), *kind.items()), lambda: datasets.load(source, part=part, **kind)
        )

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._read:
            self._read[key] = make()
        return self._read[key]

    def _problem(self, example: datasets.Example) -> Problem:
        ids = self._guarded(example, lambda: chat.render_prompt(self._tokenizer, example.prompt))
        if not ids:
            raise DataError(f"{example.where}: the prompt is empty: there is no token to go on from")
        return Problem(example, ids)

    def _row(self, example: datasets.Example, train_on: str) -> Row:
        texts = example.prompt, example.completion, example.messages
        return self._guarded(example, lambda: chat.encode_example(self._tokenizer, *texts, train_on))

    def _pair(self, example: datasets.Example) -> Pair:
        assert example.pair is not None  # datasets.load(pairs=True)
        rows: list[Row] = []
        for answer in example.pair:
            ids, mask = self._guarded(
                example, lambda answer=answer: chat.encode_answer(self._tokenizer, example.prompt, answer)
            )
            if not any(mask):
                raise DataError(f"{example.where}: an answer has no token of its own")
            end = len(mask) - mask[::-1].index(1)
            rows.append((ids[:end], mask[:end]))
        if rows[0] == rows[1]:
            raise DataError(
                f"{example.where}: both answers are the same tokens: there is nothing to learn from this pair"
            )
        if not rows[0][1][0] == rows[1][1][0] == 0:
            raise DataError(f"{example.where}: the prompt is empty: there is no token to go on from")
        return Pair(rows[0], rows[1], example.margin)

    @staticmethod
    def _guarded(example: datasets.Example, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except ValueError as error:
            raise DataError(f"{example.where}: {error}") from None
