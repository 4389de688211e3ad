"""Groups of trajectories from prompts: calls the generator and starts to compute the rewards of
what it returns.

Every new trajectory comes from `collect`; those of earlier runs and of checkpoints are read
(rl/stages/producers). Stages also set the generator's value head and read the size of its weights.
Scores are numbers for completions, from reward functions and reward models. P prompts, G
completions of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from rewards import Runner, Scores
from rewards.text import in_form_of
from rollout.types import Group, ProblemLike, Segment, Trajectory

if TYPE_CHECKING:
    from rollout.generator import Generator
    from rollout.request import MediaPrompt
    from rollout.types import SamplingParams


@dataclass(frozen=True)
class Source:
    """Where completions and their scores come from.

    runner: calls the reward functions; None: nothing is scored. scorers: reward models by name,
    each a function from sequences of token ids (prompt and completion) to scores, which the reward
    functions get. on_calls: called with the finished reward calls, for the timeline.
    """

    generator: Generator
    runner: Runner | None
    scorers: Mapping[str, Callable[[list[list[int]]], list[float]]] = field(default_factory=dict)
    on_calls: Callable[[Sequence[Any]], None] | None = None


class PendingScores(Protocol):
    """Scores that may still be computed."""

    def result(self) -> Scores:
        """Waits for the scores and returns them."""
        ...


@dataclass(frozen=True)
class ReadyScores:
    """Scores that are computed already, as `PendingScores`."""

    scores: Scores

    def result(self) -> Scores:
        """Returns the scores at once."""
        return self.scores


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch: a segment of a trajectory.

    group and trajectory: numbers among the groups and among all trajectories of the step.
    """

    group: int
    trajectory: int
    segment: Segment


@dataclass(frozen=True)
class Rollouts:
    """The groups of one step, with their pending scores.

    groups: equally many trajectories of each prompt
    scores: one for each trajectory, group by group
    counts: what the generator counted (Generator.counts) in the calls that sampled the groups, and
        the `tokens` that the policy wrote; the greedy completions of `greedy_reward` are not
        counted. With dynamic sampling (rl/stages/producers/dynamic.py) they include the groups that
        it left out. None: no generator was called.
    seconds: time of sampling
    scoring: time of the reward models after it
    waiting: time for which the choice of the groups waited for scores
    metrics: of how the groups were chosen, by the names of docs/metrics.md
    """

    groups: Sequence[Group]
    scores: PendingScores
    counts: Mapping[str, int] | None
    seconds: float
    scoring: float = 0.0
    waiting: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Returns all trajectories, group by group."""
        return [each for group in self.groups for each in group.trajectories]

    @property
    def problems(self) -> list[ProblemLike]:
        """Returns the prompt of each group."""
        return [group.problem for group in self.groups]

    @property
    def rows(self) -> list[BatchRow]:
        """Returns the rows of a batch: the segments of each trajectory, group by group."""
        owners = [p for p, group in enumerate(self.groups) for _ in group.trajectories]
        return [
            BatchRow(owners[number], number, segment)
            for number, trajectory in enumerate(self.trajectories)
            for segment in trajectory.segments
        ]


def collect(
    source: Source,
    problems: Sequence[ProblemLike],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    version: int = 0,
    prompts: Sequence[str | Sequence[int] | MediaPrompt] | None = None,
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
    calls = [p for p in range(len(problems)) for _ in range(G)]
    handle = None
    if source.runner is not None:
        handle = source.runner.open(
            [example.prompt for example in examples], columns, calls, on_calls=source.on_calls
        )
    generator.reset_prefix_cache()
    before = generator.counts
    made: dict[tuple[int, int], Trajectory] = {}

    def reward(p: int, sample: int, **more: Any) -> None:
        if handle is None:
            return
        trajectory = made[p, sample]
        text = in_form_of(problems[p].example.prompt, cast(str, trajectory.text))
        known = {
            "completion_lengths": trajectory.length,
            "truncated": trajectory.truncated,
        }
        known["raw"] = trajectory.text if trajectory.raw is None else trajectory.raw
        handle.add(p * G + sample, text, **known, **more)

    prompts = [problem.ids for problem in problems] if prompts is None else prompts
    for p, sample, completion in generator.stream(prompts, params, ids=prompt_ids):
        made[p, sample] = Trajectory.of_completion(problems[p].ids, completion, version)
        if not source.scorers:
            reward(p, sample)
    counts = {name: count - before[name] for name, count in generator.counts.items()}
    counts["tokens"] = sum(trajectory.length for trajectory in made.values())
    groups = [
        Group(problem, int(prompt_id), [made[p, sample] for sample in range(G)])
        for p, (problem, prompt_id) in enumerate(zip(problems, prompt_ids, strict=True))
    ]
    seconds = time.perf_counter() - began
    scoring = 0.0
    if source.scorers:
        sequences = [
            trajectory.only_segment("a reward model").tokens.tolist()
            for group in groups
            for trajectory in group.trajectories
        ]
        scores = {name: scorer(sequences) for name, scorer in source.scorers.items()}
        scoring = time.perf_counter() - began - seconds
        for i in range(len(sequences)):
            reward(
                *divmod(i, G), reward_model_scores={name: each[i] for name, each in scores.items()}
            )
    pending = ReadyScores(Scores.of_nothing(len(examples))) if handle is None else handle
    return Rollouts(groups, pending, counts, seconds, scoring)
