"""From problems to scored completions: calls the generator, then the rewards.

P prompts, G completions of each, F reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rewards import Runner, Scores
from rl.config.stage import SamplingOptions
from rl.data.encoded import Problem
from rl.training.flops import Operations

if TYPE_CHECKING:
    from rl.training.batch import Batch
    from rollout import Completion, Generator, SamplingParams


@dataclass(frozen=True)
class Source:
    """Where completions and their scores come from.

    scorers: reward models by name, each a function from sequences of token ids to scores. on_calls: gets the calls that
    computed some scores, once the scores are there.
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

    completions: [P][G]. versions: policy version (number of updates) that sampled each group. counts: counts of the
    generator over all sampling for this step, and the `tokens` of its completions. seconds: time of decoding. scoring:
    time of the reward models after decoding.
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
        """Returns (number of the prompt, completion) of each sample, group by group."""
        return [(p, completion) for p, group in enumerate(self.completions) for completion in group]

    def operations(self, of: Operations) -> float:
        """Returns the FLOPs of these prompts and completions.

        Groups that dynamic sampling dropped count without attention.
        """
        lengths = [len(self.problems[p].ids) + len(completion.tokens) for p, completion in self.flat]
        return of.forward(lengths, weighed=self.counts["prefill"] + self.counts["useful"])

    def batch(self, limit: int, *, replay: bool = False, values: bool = False) -> Batch:
        """Returns one row for each prompt with its completion. The mask covers the completion, its stop token included.

        replay: adds the experts that the generator sent each token to. values: adds the values of a critic, if the
        generator computed them.
        """
        from rl.training.batch import padded_batch, scatter_to_mask

        rows = [
            (self.problems[p].ids + c.tokens, [0] * len(self.problems[p].ids) + [1] * len(c.tokens))
            for p, c in self.flat
        ]
        batch, recorded = padded_batch(rows, limit), [c.values for _, c in self.flat if c.values is not None]
        return batch.replace(
            prompt=np.asarray([p for p, _ in self.flat], np.int32),
            sampler_logp=scatter_to_mask([c.logprobs for _, c in self.flat], batch.mask),
            version=np.asarray([self.versions[p] for p, _ in self.flat], np.int32)[:, None] * (batch.mask != 0),
            old_values=scatter_to_mask(recorded, batch.mask) if values and len(recorded) == len(rows) else None,
            routes=routes_of([c for _, c in self.flat], batch.tokens.shape[1]) if replay else None,
        )


def routes_of(completions: Sequence[Completion], length: int) -> dict[str, np.ndarray]:
    """Returns Batch.routes of these completions after their prompts, in rows of `length` tokens."""
    from policy.cache.step import UNKNOWN

    first = completions[0].routes or {}
    result = {path: np.full((len(completions), length, *a.shape[1:]), UNKNOWN, a.dtype) for path, a in first.items()}
    for row, completion in enumerate(completions):
        assert completion.routes is not None, "the generator records routes if a stage replays them"
        for path, experts in completion.routes.items():
            result[path][row, : len(experts)] = experts
    return result


def sampling_params(options: SamplingOptions, stop_ids: Sequence[int], **changes: Any) -> SamplingParams:
    """Returns the parameters of the configuration, with the tokenizer's stop tokens added."""
    from rollout import SamplingParams

    settings = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "stop": tuple(options.stop),
        "stop_token_ids": tuple(sorted({*options.stop_token_ids, *stop_ids})),
    }
    return SamplingParams(**(settings | changes))


def collect(
    source: Source,
    problems: Sequence[Problem],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    version: int = 0,
) -> Rollouts:
    """Completes the prompts with weights of this `version`, and starts to score the completions.

    The processes of the rewards score a group as soon as it is complete, while other groups are decoded. Reward models
    need the devices too, so with them all scoring starts after the last completion.
    """
    began, G, generator = time.perf_counter(), params.n, source.generator
    examples = [problem.example for problem in problems for _ in range(G)]
    names = sorted({name for example in examples for name in example.columns})
    columns: dict[str, Any] = {name: [example.columns.get(name) for example in examples] for name in names}
    columns |= {"completion_lengths": [0] * len(examples), "truncated": [False] * len(examples)}
    columns["reward_model_scores"] = [{}] * len(examples)
    columns["max_new_tokens"] = params.max_new_tokens
    groups = [p for p in range(len(problems)) for _ in range(G)]
    handle = source.runner.open([example.prompt for example in examples], columns, groups, on_calls=source.on_calls)
    generator.reset_prefix_cache()
    before = generator.counts
    completions: list[list[Any]] = [[None] * G for _ in problems]

    def score(p: int, sample: int, **more: Any) -> None:
        completion = completions[p][sample]
        text = _as_written(problems[p].example.prompt, completion.text)
        known = {"completion_lengths": len(completion.tokens), "truncated": completion.finish == "length"}
        handle.add(p * G + sample, text, **known, **more)

    for p, sample, completion in generator.stream([problem.ids for problem in problems], params, ids=prompt_ids):
        completions[p][sample] = completion
        if not source.scorers:
            score(p, sample)
    counts = {name: count - before[name] for name, count in generator.counts.items()}
    counts["tokens"] = sum(len(completion.tokens) for group in completions for completion in group)
    seconds = time.perf_counter() - began
    scoring = 0.0
    if source.scorers:
        rows = [problems[p].ids + completion.tokens for p, group in enumerate(completions) for completion in group]
        scores = {name: scorer(rows) for name, scorer in source.scorers.items()}
        scoring = time.perf_counter() - began - seconds
        for i in range(len(rows)):
            score(*divmod(i, G), reward_model_scores={name: each[i] for name, each in scores.items()})
    return Rollouts(problems, prompt_ids, completions, handle, counts, seconds, [version] * len(problems), scoring)


def _as_written(prompt, text: str):
    """Returns a completion in the form of its prompt: text after text, a message of the assistant after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def records(rollouts: Rollouts, scores: Scores, advantages: np.ndarray, stage: str, step: int) -> list[dict]:
    """Returns a line of samples.jsonl for each completion.

    advantages: float[P * G], the advantage of each completion or the mean over its tokens.
    """
    lines = []
    sample_of = {}
    for i, (p, completion) in enumerate(rollouts.flat):
        sample_of[p] = sample_of.get(p, -1) + 1
        lines.append(
            {
                "stage": stage,
                "step": step,
                "prompt_id": int(rollouts.prompt_ids[p]),
                "sample": sample_of[p],
                "prompt": rollouts.problems[p].example.prompt,
                "completion": completion.text,
                "tokens": completion.tokens,
                "finish": completion.finish,
                "rewards": dict(zip(scores.names, scores.rewards[i].tolist(), strict=True)),
                "reward": float(scores.total[i]),
                "advantage": float(advantages[i]),
            }
        )
    return lines


def metrics(rollouts: Rollouts, scores: Scores, *, drafted: bool) -> dict[str, float]:
    """Returns rewards and lengths of a step, by the names of docs/metrics.md. NaN if nothing was scored.

    drafted: adds the tokens that drafts gained.
    """
    G = len(rollouts.completions[0])
    totals = scores.total.reshape(-1, G)
    scored = totals[np.isfinite(totals)]
    lengths = np.asarray([len(c.tokens) for _, c in rollouts.flat])
    ended = np.asarray([c.finish == "stop" for _, c in rollouts.flat])
    flat_groups = [np.ptp(group[np.isfinite(group)]) == 0 if np.isfinite(group).any() else True for group in totals]
    result = {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/std": float(scored.std(ddof=1)) if scored.size > 1 else 0.0,
        "reward/frac_zero_std": float(np.mean(flat_groups)),
        "completion/mean_length": float(lengths.mean()),
        "completion/min_length": float(lengths.min()),
        "completion/max_length": float(lengths.max()),
        "completion/truncated_ratio": float(1 - ended.mean()),
        "time/sample": rollouts.seconds,
        "generator/useful_rows": rollouts.counts["useful"] / max(1, rollouts.counts["rows"]),
        "generator/prompt_tokens_read": float(rollouts.counts["prefill"]),
        "generator/preempted": float(rollouts.counts["preempted"]),
    }
    if "checked" in rollouts.counts:
        result["generator/replaced_share"] = rollouts.counts["replaced"] / max(1, rollouts.counts["checked"])
    if rollouts.scoring:
        result["time/reward_models"] = rollouts.scoring
    if drafted:
        steps = sum(c.steps for _, c in rollouts.flat)
        result["speculative/accepted_per_step"] = float(lengths.sum() / steps - 1)
    if ended.any():
        result |= {
            f"completion/{name}_terminated_length": float(getattr(lengths[ended], name)())
            for name in ("mean", "min", "max")
        }
    return result | scores.metrics
