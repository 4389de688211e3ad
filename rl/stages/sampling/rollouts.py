"""Turns rollouts into rows for the device, lines of samples.jsonl, and metrics.

P prompts, G completions of each, N = P G rows, T tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards import Scores
from rewards.workers.rounding import all_equal, without_rounding
from rl.accounting.flops import Operations
from rl.config.stage import SamplingOptions
from rl.records.messages import entries, is_data_uri, without_contents
from rl.records.samples import STOP, TOKEN, TRAINED
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.records.events import Events
    from rl.training.batch import Batch
    from rollout import Completion, SamplingParams
    from rollout.media.expand import Expanded
    from rollout.media.reference import Reference

LONGEST_COLUMN = 1024  # bytes of a text of the data that is kept with each sample


def operations(rollouts: Rollouts, of: Operations) -> float:
    """Returns the FLOPs of these prompts and completions.

    Groups that dynamic sampling dropped are counted by their tokens only; their attention FLOPs are
    left out.
    """
    lengths = [
        len(rollouts.problems[p].ids) + len(completion.tokens) for p, completion in rollouts.flat
    ]
    return of.forward(lengths, weighed=rollouts.counts["prefill"] + rollouts.counts["useful"])


def to_batch(
    rollouts: Rollouts, limit: int, *, replay: bool = False, values: bool = False
) -> Batch:
    """Returns one row (prompt and completion) per completion. The mask covers the completion, its
    stop token included.

    limit: length of the longest row allowed. replay: adds the experts that the generator sent each
    token to. values: adds the values of a critic, if the generator computed them.
    """
    from rl.training.batch import padded_batch, scatter_to_mask

    rows = [
        (
            rollouts.problems[p].ids + c.tokens,
            [0] * len(rollouts.problems[p].ids) + [1] * len(c.tokens),
        )
        for p, c in rollouts.flat
    ]
    batch = padded_batch(rows, limit)
    recorded = [c.values for _, c in rollouts.flat if c.values is not None]
    return batch.replace(
        prompt=np.asarray([p for p, _ in rollouts.flat], np.int32),
        sampler_logp=scatter_to_mask([c.logprobs for _, c in rollouts.flat], batch.mask),
        version=np.asarray([rollouts.versions[p] for p, _ in rollouts.flat], np.int32)[:, None]
        * (batch.mask != 0),
        old_values=scatter_to_mask(recorded, batch.mask)
        if values and len(recorded) == len(rows)
        else None,
        routes=routes_of([c for _, c in rollouts.flat], batch.tokens.shape[1]) if replay else None,
    )


def documents(rollouts: Rollouts) -> list[tuple[int, int, Expanded | None]]:
    """Returns (row, first column, pictures and sounds of the prompt) of each row of `to_batch`."""
    return [(row, 0, rollouts.problems[p].media) for row, (p, _) in enumerate(rollouts.flat)]


def routes_of(completions: Sequence[Completion], length: int) -> dict[str, np.ndarray]:
    """Returns Batch.routes of these completions after their prompts, in rows of `length` tokens."""
    from policy.cache.step import UNKNOWN

    first = completions[0].routes or {}
    result = {
        path: np.full((len(completions), length, *a.shape[1:]), UNKNOWN, a.dtype)
        for path, a in first.items()
    }
    for row, completion in enumerate(completions):
        assert completion.routes is not None, "the generator records routes if a stage replays them"
        for path, experts in completion.routes.items():
            result[path][row, : len(experts)] = experts
    return result


def sampling_params(
    options: SamplingOptions, stop_ids: Sequence[int], **changes: Any
) -> SamplingParams:
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
        "min_tokens": options.min_tokens,
        "bad_words": tuple(options.bad_words),
    }
    return SamplingParams(**(settings | changes))


def greedy_params(options: SamplingOptions, stop_ids: Sequence[int]) -> SamplingParams:
    """Returns the parameters of greedy completions that are compared with samples: one of each
    prompt, without filters and forbidden tokens."""
    unfiltered = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "bad_words": ()}
    return sampling_params(options, stop_ids, n=1, temperature=0.0, **unfiltered)


def records(
    rollouts: Rollouts, scores: Scores, stage: str, step: int, advantages: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Returns a line of samples.jsonl for each completion; rl/records/samples.py adds `at`.

    In a line, `prompt` is the text or the messages of the prompt, `raw` the completion with its
    special tokens, if it has any, `prompt_id` the running number of the prompt in the run, and
    `sample` the number of the completion in its group. `media` describes the pictures and sounds of
    the prompt; their contents are in no line.

    advantages: float[P * G], the advantage of each completion or the mean over its tokens; None:
    the completions of an evaluation.
    """
    faults: dict[int, dict[str, str]] = defaultdict(dict)
    for fault in scores.faults:
        faults[fault.sample][fault.function] = fault.kind
    media = [entries(problem.media) for problem in rollouts.problems]
    lines = []
    sample_of = Counter()
    for i, (p, completion) in enumerate(rollouts.flat):
        problem = rollouts.problems[p]
        line = {
            "stage": stage,
            "step": step,
            "prompt_id": int(rollouts.prompt_ids[p]),
            "sample": sample_of[p],
            "version": rollouts.versions[p],
            "prompt": without_contents(problem.example.prompt),
            "completion": completion.text,
            # Up to `tokens` a search looks for words of the completion (rl/views/viewer/index.py).
            **({"raw": raw} if (raw := completion.raw) not in (None, completion.text) else {}),
            "tokens": completion.tokens,
            "finish": completion.finish,
            "rewards": dict(zip(scores.names, scores.rewards[i].tolist(), strict=True)),
            "reward": float(scores.total[i]),
            "advantage": None if advantages is None else float(advantages[i]),
            "columns": {
                name: value for name, value in problem.example.columns.items() if _is_short(value)
            },
            # Between `columns` and `n_prompt` a search looks for words (rl/views/viewer/index.py).
            **({"reward_log": log} if (log := scores.logs.get(i)) else {}),
            "n_prompt": len(problem.ids),
            "n": len(completion.tokens),
        }
        optional = {"faults": faults.get(i), "eval": advantages is None, "media": media[p]}
        lines.append(line | {name: value for name, value in optional.items() if value})
        sample_of[p] += 1
    return lines


def record_evaluation(
    events: Events, stage: str, step: int, rollouts: Rollouts, scores: Scores
) -> None:
    """Writes the completions of an evaluation."""
    events.samples(
        records(rollouts, scores, stage, step), token_records(rollouts), references(rollouts)
    )


def references(rollouts: Rollouts) -> list[Reference]:
    """Returns the pictures and sounds of all prompts, with repeats."""
    shown = [problem.media for problem in rollouts.problems if problem.media is not None]
    return [reference for media in shown for reference in media.references]


def _is_short(value: Any) -> bool:
    """Whether a value of a column is kept with a sample: a number, or text of at most a kilobyte.

    A data URI is not kept.
    """
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) <= LONGEST_COLUMN and not is_data_uri(value)
    return value is None or isinstance(value, (bool, int, float, np.number, np.bool_))


def token_records(
    rollouts: Rollouts, batch: Batch | None = None, outputs: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Returns TOKEN[n_prompt + n] (rl/records/samples.py) of each completion.

    batch: the rows of the step, one for each completion. outputs: arrays [N,T] of `TokenOutputs`,
    and `gap`; None or empty: no update of the policy saw the batch.
    """
    result = []
    for i, (p, completion) in enumerate(rollouts.flat):
        ids = [*rollouts.problems[p].ids, *completion.tokens]
        new = slice(len(rollouts.problems[p].ids), len(ids))
        tokens = np.zeros(len(ids), TOKEN)
        tokens["id"] = ids
        tokens["turn"][new] = 1
        for name in ("logp", "gap", "entropy", "advantage"):
            tokens[name] = np.nan
        tokens["logp"][new] = completion.logprobs
        if completion.finish == "stop" and completion.tokens:
            tokens["flags"][-1] |= STOP
        if batch is not None:
            assert batch.advantages is not None
            tokens["flags"][new] |= np.where(batch.mask[i, new] != 0, TRAINED, 0).astype(np.uint8)
            tokens["advantage"][new] = (
                batch.advantages[i] if batch.advantages.ndim == 1 else batch.advantages[i, new]
            )
            if outputs and batch.segments[i].any():
                tokens["gap"][new] = outputs["gap"][i, new]
                tokens["entropy"][new] = outputs["entropy"][i, new]
                tokens["flags"][new] |= outputs["flags"][i, new] if "flags" in outputs else 0
        result.append(tokens)
    return result


def metrics(rollouts: Rollouts, scores: Scores, *, drafted: bool) -> dict[str, float]:
    """Returns rewards and lengths of a step, by the names of docs/metrics.md. If nothing was
    scored, `reward/mean` is NaN, and the other statistics of rewards are absent.

    drafted: adds the tokens that drafts gained.
    """
    G = len(rollouts.completions[0])
    totals = without_rounding(scores.total.reshape(-1, G))
    scored = totals[np.isfinite(totals)]
    lengths = np.asarray([len(c.tokens) for _, c in rollouts.flat])
    ended = np.asarray([c.finish == "stop" for _, c in rollouts.flat])
    result = {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/unscored": float(np.sum(~np.isfinite(totals))),
        "completion/mean_length": float(lengths.mean()),
        "completion/min_length": float(lengths.min()),
        "completion/max_length": float(lengths.max()),
        "completion/truncated_ratio": float(1 - ended.mean()),
        "time/sample": rollouts.seconds,
        "generator/useful_rows": rollouts.counts["useful"] / max(1, rollouts.counts["rows"]),
        "generator/prompt_tokens_read": float(rollouts.counts["prefill"]),
        "generator/preempted": float(rollouts.counts["preempted"]),
    }
    if scored.size:
        with_a_score = totals[np.isfinite(totals).any(axis=1)]
        result["reward/std"] = 0.0 if all_equal(scored) else float(scored.std(ddof=1))
        result["reward/frac_zero_std"] = float(
            np.mean([all_equal(group) for group in with_a_score])
        )
    if "checked" in rollouts.counts:
        result["generator/replaced_share"] = rollouts.counts["replaced"] / max(
            1, rollouts.counts["checked"]
        )
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
