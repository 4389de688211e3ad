"""What a stage makes of rollouts: rows for the device, lines of samples.jsonl, metrics.

P prompts, G completions of each, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards import Scores
from rl.config.stage import SamplingOptions
from rl.training.flops import Operations
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.training.batch import Batch
    from rollout import Completion, SamplingParams


def operations(samples: Rollouts, of: Operations) -> float:
    """Returns the FLOPs of these prompts and completions.

    Groups that dynamic sampling dropped count without attention.
    """
    lengths = [len(samples.problems[p].ids) + len(completion.tokens) for p, completion in samples.flat]
    return of.forward(lengths, weighed=samples.counts["prefill"] + samples.counts["useful"])


def to_batch(samples: Rollouts, limit: int, *, replay: bool = False, values: bool = False) -> Batch:
    """Returns one row for each prompt with its completion. The mask covers the completion, its stop token included.

    limit: length of the longest row allowed. replay: adds the experts that the generator sent each token to. values:
    adds the values of a critic, if the generator computed them.
    """
    from rl.training.batch import padded_batch, scatter_to_mask

    rows = [
        (samples.problems[p].ids + c.tokens, [0] * len(samples.problems[p].ids) + [1] * len(c.tokens))
        for p, c in samples.flat
    ]
    batch, recorded = padded_batch(rows, limit), [c.values for _, c in samples.flat if c.values is not None]
    return batch.replace(
        prompt=np.asarray([p for p, _ in samples.flat], np.int32),
        sampler_logp=scatter_to_mask([c.logprobs for _, c in samples.flat], batch.mask),
        version=np.asarray([samples.versions[p] for p, _ in samples.flat], np.int32)[:, None] * (batch.mask != 0),
        old_values=scatter_to_mask(recorded, batch.mask) if values and len(recorded) == len(rows) else None,
        routes=routes_of([c for _, c in samples.flat], batch.tokens.shape[1]) if replay else None,
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


def records(samples: Rollouts, scores: Scores, advantages: np.ndarray, stage: str, step: int) -> list[dict]:
    """Returns a line of samples.jsonl for each completion.

    advantages: float[P * G], the advantage of each completion or the mean over its tokens.
    """
    lines = []
    sample_of = {}
    for i, (p, completion) in enumerate(samples.flat):
        sample_of[p] = sample_of.get(p, -1) + 1
        lines.append(
            {
                "stage": stage,
                "step": step,
                "prompt_id": int(samples.prompt_ids[p]),
                "sample": sample_of[p],
                "prompt": samples.problems[p].example.prompt,
                "completion": completion.text,
                "tokens": completion.tokens,
                "finish": completion.finish,
                "rewards": dict(zip(scores.names, scores.rewards[i].tolist(), strict=True)),
                "reward": float(scores.total[i]),
                "advantage": float(advantages[i]),
            }
        )
    return lines


def metrics(samples: Rollouts, scores: Scores, *, drafted: bool) -> dict[str, float]:
    """Returns rewards and lengths of a step, by the names of docs/metrics.md. NaN if nothing was scored.

    drafted: adds the tokens that drafts gained.
    """
    G = len(samples.completions[0])
    totals = scores.total.reshape(-1, G)
    scored = totals[np.isfinite(totals)]
    lengths = np.asarray([len(c.tokens) for _, c in samples.flat])
    ended = np.asarray([c.finish == "stop" for _, c in samples.flat])
    flat_groups = [np.ptp(group[np.isfinite(group)]) == 0 if np.isfinite(group).any() else True for group in totals]
    result = {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/std": float(scored.std(ddof=1)) if scored.size > 1 else 0.0,
        "reward/frac_zero_std": float(np.mean(flat_groups)),
        "completion/mean_length": float(lengths.mean()),
        "completion/min_length": float(lengths.min()),
        "completion/max_length": float(lengths.max()),
        "completion/truncated_ratio": float(1 - ended.mean()),
        "time/sample": samples.seconds,
        "generator/useful_rows": samples.counts["useful"] / max(1, samples.counts["rows"]),
        "generator/prompt_tokens_read": float(samples.counts["prefill"]),
        "generator/preempted": float(samples.counts["preempted"]),
    }
    if "checked" in samples.counts:
        result["generator/replaced_share"] = samples.counts["replaced"] / max(1, samples.counts["checked"])
    if samples.scoring:
        result["time/reward_models"] = samples.scoring
    if drafted:
        steps = sum(c.steps for _, c in samples.flat)
        result["speculative/accepted_per_step"] = float(lengths.sum() / steps - 1)
    if ended.any():
        result |= {
            f"completion/{name}_terminated_length": float(getattr(lengths[ended], name)())
            for name in ("mean", "min", "max")
        }
    return result | scores.metrics
