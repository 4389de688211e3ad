"""Groups of completions from prompts: calls the generator and starts to compute the rewards of what
it returns.

Stages get completions only through `collect`. They also set the generator's value head and read the
size of its weights. Scores are numbers for completions, from reward functions and reward models. P
prompts, G completions of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rewards import Runner, Scores
from rewards.text import in_form_of

if TYPE_CHECKING:
    from rollout.generator import Generator
    from rollout.media.expand import Expanded
    from rollout.types import Completion, SamplingParams


class Example(Protocol):
    """A row of data: its prompt, as text or as messages, and its other columns, which rewards may
    take."""

    @property
    def prompt(self) -> Any:
        """Text, or messages of a chat."""
        ...

    @property
    def columns(self) -> Mapping[str, Any]:
        """The other columns by name."""
        ...


class Problem(Protocol):
    """A prompt to complete, with its row of data. (A task of rl/tasks makes problems; here a
    problem can be any row.)"""

    @property
    def example(self) -> Example:
        """The row of data."""
        ...

    @property
    def ids(self) -> list[int]:
        """The prompt as token ids."""
        ...

    @property
    def media(self) -> Expanded | None:
        """Its pictures and sounds; None: it has none."""
        ...


@dataclass(frozen=True)
class Source:
    """Where completions and their scores come from.

    runner: calls the reward functions. scorers: reward models by name, each a function from
    sequences of token ids (prompt and completion) to scores, which the reward functions get.
    on_calls: called with the finished reward calls, for the timeline.
    """

    generator: Generator
    runner: Runner
    scorers: Mapping[str, Callable[[list[list[int]]], list[float]]] = field(default_factory=dict)
    on_calls: Callable[[Sequence[Any]], None] | None = None


class PendingScores(Protocol):
    """Scores that may still be computed."""

    def result(self) -> Scores:
        """Waits for the scores and returns them."""
        ...


@dataclass(frozen=True)
class Rollouts:
    """The completions of one step, with their pending scores.

    problems: the prompts with their rows of data. prompt_ids: the running number of each prompt in
    the run, for the random draws. completions: [P][G]. versions: policy version (number of updates)
    that sampled each group. counts: what the generator counted (Generator.counts) in the calls that
    sampled the groups, and the `tokens` of its completions; the greedy completions of
    `greedy_reward` are not counted. With dynamic sampling (rl/stages/sampling/dynamic.py) they
    include the groups that it dropped. seconds: time of sampling. scoring: time of the reward
    models after it.
    """

    problems: Sequence[Problem]
    prompt_ids: Sequence[int]
    completions: list[list[Completion]]
    scores: PendingScores
    counts: Mapping[str, int]
    seconds: float
    versions: Sequence[int]
    scoring: float = 0.0

    @property
    def flat(self) -> list[tuple[int, Completion]]:
        """Returns (index of the prompt, completion) of each sample, group by group."""
        return [(p, completion) for p, group in enumerate(self.completions) for completion in group]


def collect(
    source: Source,
    problems: Sequence[Problem],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    version: int = 0,
    prompts: Sequence[Any] | None = None,
) -> Rollouts:
    """Completes the prompts with weights of this `version`, and starts to compute the rewards.
    prompts: the problems as the generator takes them; None: their ids.

    The reward functions get a group as soon as it is complete, in their own processes, while other
    groups are decoded. Reward models need the devices too, so with them all rewards start after the
    last completion.
    """
    began = time.perf_counter()
    G = params.n
    generator = source.generator
    examples = [problem.example for problem in problems for _ in range(G)]
    names = sorted({name for example in examples for name in example.columns})
    columns: dict[str, Any] = {
        name: [example.columns.get(name) for example in examples] for name in names
    }
    # Names of rewards.registry.GIVEN. The check of the data refuses columns of these names that a
    # reward would get.
    columns |= {"completion_lengths": [0] * len(examples), "truncated": [False] * len(examples)}
    columns |= {"raw": [""] * len(examples), "reward_model_scores": [{}] * len(examples)}
    columns["max_new_tokens"] = (
        params.max_new_tokens
    )  # one number for all; the other columns have a value per completion
    groups = [p for p in range(len(problems)) for _ in range(G)]
    handle = source.runner.open(
        [example.prompt for example in examples], columns, groups, on_calls=source.on_calls
    )
    generator.reset_prefix_cache()
    before = generator.counts
    completions: list[list[Any]] = [[None] * G for _ in problems]

    def reward(p: int, sample: int, **more: Any) -> None:
        completion = completions[p][sample]
        text = in_form_of(problems[p].example.prompt, completion.text)
        known = {
            "completion_lengths": len(completion.tokens),
            "truncated": completion.finish == "length",
        }
        known["raw"] = completion.text if completion.raw is None else completion.raw
        handle.add(p * G + sample, text, **known, **more)

    prompts = [problem.ids for problem in problems] if prompts is None else prompts
    for p, sample, completion in generator.stream(prompts, params, ids=prompt_ids):
        completions[p][sample] = completion
        if not source.scorers:
            reward(p, sample)
    counts = {name: count - before[name] for name, count in generator.counts.items()}
    counts["tokens"] = sum(len(completion.tokens) for group in completions for completion in group)
    seconds = time.perf_counter() - began
    scoring = 0.0
    if source.scorers:
        sequences = [
            problems[p].ids + completion.tokens
            for p, group in enumerate(completions)
            for completion in group
        ]
        scores = {name: scorer(sequences) for name, scorer in source.scorers.items()}
        scoring = time.perf_counter() - began - seconds
        for i in range(len(sequences)):
            reward(
                *divmod(i, G), reward_model_scores={name: each[i] for name, each in scores.items()}
            )
    return Rollouts(
        problems,
        prompt_ids,
        completions,
        handle,
        counts,
        seconds,
        [version] * len(problems),
        scoring,
    )
