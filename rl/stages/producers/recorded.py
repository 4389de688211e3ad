"""The producer of `stages.N.rollouts`: the samples of an earlier run, in the place of new ones.

F reward functions, N samples of a step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from rewards import RewardFault, Runner, RunnerOptions, Scores
from rewards.workers.scores import statistics, weighted_sums
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.data.tokenizer import read_tokenizer
from rl.errors import DataError, Fault
from rl.records.json_lines import parse
from rl.records.run_files import sample_files
from rl.records.samples import STOP, read_tokens
from rl.records.schema import SampleRecord
from rl.stages.producers.interface import Producer
from rollout.collect import ReadyScores, Rollouts
from rollout.text.spelling import decode_after
from rollout.types import Group, Segment, Trajectory, Turn, from_versions

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


@dataclass(frozen=True)
class RecordedSample:
    """A line of samples.jsonl with TOKEN[n_prompt + n] (rl/records/samples.py). place: file:line,
    for messages."""

    record: SampleRecord
    tokens: np.ndarray
    place: str

    @property
    def has_one_turn(self) -> bool:
        """Whether the policy wrote it in one turn, so that the text is that of its tokens."""
        policy = ~np.isnan(self.tokens["logp"])
        return "segments" not in self.record and len(np.unique(self.tokens["turn"][policy])) < 2

    def trajectory(self) -> Trajectory:
        """Returns the trajectory, without values, experts and what filters left, which are not
        recorded. Its turns have texts if it has one."""
        policy = ~np.isnan(self.tokens["logp"])
        versions = from_versions(policy, self.record.get("version", 0))
        lengths = self.record.get("segments") or [len(self.tokens)]
        ends = np.cumsum(lengths)
        segments = [
            _segment(self.tokens[start:end], policy[start:end], versions[start:end])
            for start, end in zip(ends - lengths, ends, strict=True)
        ]
        made = Trajectory(tuple(segments), self.record["finish"])
        if len(made.turns) != 1:
            return made
        (segment,) = segments
        (turn,) = segment.turns
        raw = self.record.get("raw")
        turn = replace(turn, text=self.record["completion"], raw=raw, finish=made.finish)
        return replace(made, segments=(replace(segment, turns=(turn,)),))


@dataclass(frozen=True)
class _Place:
    """Where a sample is: a file, the number of its line and the first byte of it, and the prompt
    id, which its group has in common."""

    path: Path
    line: int
    start: int
    prompt_id: int


def _number(value: float | None) -> float:
    """Returns a score; NaN for null."""
    return math.nan if value is None else value


def _segment(tokens: np.ndarray, policy: np.ndarray, versions: np.ndarray) -> Segment:
    """Returns a segment of TOKEN[T]."""
    turns = []
    for number in np.unique(tokens["turn"][policy]):
        places = np.flatnonzero(policy & (tokens["turn"] == number))
        stopped = tokens["flags"][places[-1]] & STOP
        finish = "stop" if stopped else "length"
        turns.append(Turn(int(places[0]), int(places[-1]) + 1, finish))
    logprobs = np.where(policy, tokens["logp"], np.float32(0))
    return Segment(tokens["id"].astype(np.int32), policy, logprobs, versions, tuple(turns))


class Recorded(Producer):
    """Takes in step n the samples of step n of the stage with this name in an earlier run, in the
    order in which they were recorded.

    Tokens, log-probabilities, versions and scores are as they stand there, and sums of scores have
    the weights of this stage. Versions count the updates of that run: the weights that drew a token
    are never taken for those of this run. The state in a checkpoint is the number of steps taken.
    """

    calls_generator = False
    on_policy = False
    versions_of_this_run = False

    def __init__(self, stage: StageKind, folder: str):
        super().__init__(stage)
        self._folder = Path(folder)
        self._steps_taken = 0

    def faults(self) -> Iterator[Fault]:
        stage = self._stage
        key = (*stage.path, "rollouts")
        if stage.options.curriculum is not None:
            yield Fault("the samples say which rows a step takes; leave out curriculum", key=key)
        if stage.options.steps is None:
            yield Fault("samples are recorded by step: set `steps`, not `epochs`", key=key)
        if stage.max_kept:
            yield Fault(
                "samples do not say which ids filters left, and the loss would be over these ids; "
                "set sampling.filters=ignore",
                key=key,
            )
        if stage.samples_for_inputs:
            yield Fault(
                f"{stage.options.algorithm.name} samples greedy completions of the prompts as "
                "well, and samples lack the long columns that their rewards may need; leave out "
                "rollouts, or use another algorithm",
                key=key,
            )
        if stage.options.router_replay:
            yield Fault(
                "samples do not say which experts computed them; leave out router_replay", key=key
            )

    def remarks(self) -> Iterator[str]:
        place = f"stages.{self._stage.index}"
        if self._stage.algorithm.dynamic_batches:
            yield (
                f"{place}.algorithm.dynamic_batches: no effect with rollouts: the groups are those "
                "that the earlier run trained on"
            )
        if self._stage.options.max_logp_diff is not None:
            yield (
                f"{place}.max_logp_diff: no effect with rollouts: other weights than the current "
                "ones may have drawn the tokens"
            )

    def check_files(self) -> None:
        """Raises DataError unless the folder has the groups of every step, and unless the samples
        of the first step have no pictures, the rewards of this stage and the tokens of its
        tokenizer.
        """
        if not self._folder.is_dir():
            self._refuse("no such folder")
        for step in range(1, self._stage.options.total_steps + 1):
            self._check_shape(step)
        tokenizer, _ = read_tokenizer(self._stage.config)
        for sample in self._samples(1) if self._stage.options.total_steps else ():
            self._check_sample(sample)
            ids = sample.record["tokens"]
            text = decode_after(tokenizer, ids, skip_special_tokens=True)
            recorded = sample.record["completion"]
            if sample.has_one_turn and text != recorded:
                self._refuse(
                    f"{sample.place}: its tokens are those of another tokenizer: they read "
                    f"{text[:40]!r} with that of this run, where {recorded[:40]!r} is recorded"
                )

    def take(self, count: int) -> Rollouts:
        """Returns the groups of the next step. Raises DataError for another number of groups than a
        step of the stage has, as a filter over this producer may ask for."""
        began = time.perf_counter()
        size = self._stage.options.prompts_per_step
        if count != size:
            self._refuse(f"recorded samples are taken {size} groups a step, not {count}")
        self._steps_taken += 1
        self._check_shape(self._steps_taken)
        samples = self._samples(self._steps_taken)
        for sample in samples:
            self._check_sample(sample)
        groups = [
            _group(list(own)) for _, own in groupby(samples, lambda each: each.record["prompt_id"])
        ]
        progress = self._stage.context.progress
        last = max(group.prompt_id for group in groups)
        progress.next_prompt_id = max(progress.next_prompt_id, last + 1)
        scores = self._scores([each.record for each in samples])
        return Rollouts(groups, ReadyScores(scores), None, time.perf_counter() - began)

    def state(self) -> dict[str, Any]:
        return {"steps_taken": self._steps_taken}

    def restore(self, state: dict[str, Any]) -> None:
        self._steps_taken = state.get("steps_taken", 0)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Returns the names of the reward functions of the stage."""
        if self._stage.rewards is None:
            return ()
        functions = self._stage.rewards.functions
        called = tuple((each.name, each.weight, each.options) for each in functions)
        return Runner(RunnerOptions(called)).names

    @cached_property
    def _places(self) -> dict[int, list[_Place]]:
        """Returns where the samples of each step are."""
        result: dict[int, list[_Place]] = defaultdict(list)
        for path in sample_files(self._folder):
            start = 0
            name = path.relative_to(self._folder)
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    record = self._parsed(line, f"{name}:{number}")
                    own = record.get("stage") == self._stage.name and not record.get("eval")
                    if own:
                        place = _Place(path, number, start, record["prompt_id"])
                        result[record["step"]].append(place)
                    start += len(line)
        return result

    def _samples(self, step: int) -> list[RecordedSample]:
        """Returns the samples of a step."""
        result = []
        for place in self._places[step]:
            shown = f"{place.path.relative_to(self._folder)}:{place.line}"
            with place.path.open("rb") as file:
                file.seek(place.start)
                record = self._parsed(file.readline(), shown)
            result.append(RecordedSample(record, read_tokens(place.path, record), shown))
        return result

    def _check_shape(self, step: int) -> None:
        """Raises DataError unless a step has as many groups as the stage takes, of as many samples,
        one group after the other."""
        options = self._stage.options
        places = self._places.get(step, ())
        count = len(places)
        expected = options.prompts_per_step * options.samples_per_prompt
        if count != expected:
            self._refuse(
                f"step {step} of {self._stage.name} has {count} samples there, and the stage takes "
                f"{options.prompts_per_step} x {options.samples_per_prompt} (prompts_per_step, "
                "samples_per_prompt); a run records all of them under run.samples: {every: 1}"
            )
        ids = [place.prompt_id for place in places]
        lengths = [len(list(own)) for _, own in groupby(ids)]
        if len(set(ids)) != len(lengths):
            self._refuse(
                f"step {step} of {self._stage.name}: samples of another prompt stand between those "
                "of one; the lines are not in the order in which a run writes them"
            )
        if lengths != [options.samples_per_prompt] * options.prompts_per_step:
            sizes = " or ".join(map(str, sorted(set(lengths))))
            self._refuse(
                f"step {step} of {self._stage.name} has {len(lengths)} prompts with {sizes} "
                f"samples there, and the stage takes {options.prompts_per_step} x "
                f"{options.samples_per_prompt} (prompts_per_step, samples_per_prompt); set them as "
                "in the earlier run"
            )

    def _check_sample(self, sample: RecordedSample) -> None:
        """Raises DataError for a sample that the stage cannot train on."""
        record = sample.record
        if record.get("media"):
            self._refuse(f"{sample.place} has pictures or sounds, whose contents are not recorded")
        if not len(sample.tokens) or len(sample.tokens) != record["n_prompt"] + record["n"]:
            self._refuse(f"{sample.place}: its tokens are not recorded")
        if len(sample.tokens) > self._stage.config.max_length:
            self._refuse(
                f"{sample.place} has {len(sample.tokens)} tokens, more than max_length "
                f"({self._stage.config.max_length})"
            )
        rewarded = self._stage.rewards is not None
        if rewarded and record["rewards"].keys() != set(self._names):
            self._refuse(
                f"{sample.place} has scores of {', '.join(sorted(record['rewards']))}, and the "
                f"rewards of the stage are {', '.join(sorted(self._names))}"
            )

    def _scores(self, records: Sequence[Mapping[str, Any]]) -> Scores:
        """Returns the recorded scores of the samples of a step, and their sums with the weights of
        this stage. A score of null is NaN. A sample whose recorded sum is null has the sum NaN. A
        stage without rewards takes no scores."""
        if self._stage.rewards is None:
            return Scores.of_nothing(len(records))
        faults = [
            RewardFault(function, sample, kind, "", record["prompt"], record["completion"])
            for sample, record in enumerate(records)
            for function, kind in record.get("faults", {}).items()
        ]
        logs = {
            sample: record["reward_log"]
            for sample, record in enumerate(records)
            if "reward_log" in record
        }
        names = self._names
        rewards_NF = np.array(
            [[_number(each["rewards"][name]) for name in names] for each in records], np.float64
        )
        weights = [each.weight for each in self._stage.rewards.functions]
        unscored = [n for n, each in enumerate(records) if math.isnan(_number(each["reward"]))]
        size = self._stage.options.samples_per_prompt
        groups = np.arange(len(records)).reshape(-1, size).tolist()
        total_N = weighted_sums(rewards_NF, weights, unscored, groups)
        return Scores(rewards_NF, total_N, names, faults, statistics(rewards_NF, names), logs)

    def _parsed(self, line: bytes, place: str) -> SampleRecord:
        try:
            return cast(SampleRecord, parse(line, place))
        except ValueError as error:
            self._refuse(str(error))

    def _refuse(self, text: str) -> NoReturn:
        raise DataError(f"stages.{self._stage.index}.rollouts: {self._folder}: {text}")


def _group(samples: Sequence[RecordedSample]) -> Group:
    """Returns the group of these samples of a prompt."""
    first = samples[0]
    record = first.record
    problem = Problem(
        Example(
            record["prompt"],
            columns=record.get("columns", {}),
            where=first.place,
            source=record.get("source"),
        ),
        first.tokens["id"][: record["n_prompt"]].tolist(),
    )
    return Group(problem, record["prompt_id"], [each.trajectory() for each in samples])
