"""Turns rollouts into rows for the device, lines of samples.jsonl, and metrics.

P prompts, G trajectories of each; N rows, one for each segment of a trajectory (P G of them where
each has one); T tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rewards import Scores
from rewards.workers.rounding import all_equal, without_rounding
from rl.accounting.flops import Operations
from rl.config.stage import SamplingOptions
from rl.records.messages import entries, is_data_uri, without_contents
from rl.records.samples import LAST_TURN, STOP, TOKEN, TRAINED
from rl.records.schema import SampleRecord
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.records.events import Events
    from rl.training.batch import Batch
    from rollout import SamplingParams
    from rollout.media.expand import Expanded
    from rollout.media.reference import Reference
    from rollout.types import Segment, Trajectory

LONGEST_COLUMN = 1024  # bytes of a text of the data that is kept with each sample


def operations(rollouts: Rollouts, of: Operations) -> float:
    """Returns the FLOPs of the generator for these trajectories; 0 where none was called.

    Groups that dynamic sampling dropped are counted by their tokens only; their attention FLOPs are
    left out.
    """
    counts = rollouts.counts
    if counts is None:
        return 0.0
    lengths = [len(row.segment.tokens) for row in rollouts.rows]
    return of.forward(lengths, weighed=counts["prefill"] + counts["useful"])


def to_batch(
    rollouts: Rollouts, limit: int, *, replay: bool = False, values: bool = False
) -> Batch:
    """Returns one row for each segment (`Rollouts.rows`). The mask covers the tokens that the
    policy wrote.

    limit: length of the longest row allowed. replay: adds the experts that the generator sent each
    token to. values: adds the values of a critic, if the generator computed them.
    """
    from rl.training.batch import padded_batch

    rows = rollouts.rows
    segments = [row.segment for row in rows]
    batch = padded_batch([(segment.tokens, segment.policy) for segment in segments], limit)
    shape = batch.tokens.shape

    def padded(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        result = np.zeros(shape, dtype)
        for row, array in enumerate(arrays):
            result[row, : len(array)] = array
        return result

    recorded = [segment.values for segment in segments if segment.values is not None]
    has_values = values and len(recorded) == len(segments)
    return batch.replace(
        prompt=np.asarray([row.group for row in rows], np.int32),
        sampler_logp=padded((segment.logprobs for segment in segments), np.float32),
        version=padded((segment.versions for segment in segments), np.int32),
        old_values=padded(recorded, np.float32) if has_values else None,
        routes=routes_of(segments, shape[1]) if replay else None,
    )


def expanded_at(rollouts: Rollouts) -> list[tuple[int, int, Expanded | None]]:
    """Returns (row, first column, pictures and sounds of the prompt) of each row of `to_batch`."""
    shown = [group.problem.expanded for group in rollouts.groups]
    if any(shown):
        for trajectory in rollouts.trajectories:
            trajectory.only_segment("a batch with pictures or sounds")
    return [(number, 0, shown[row.group]) for number, row in enumerate(rollouts.rows)]


def by_row(rollouts: Rollouts, values_N: Any) -> np.ndarray:
    """Returns for each row of `to_batch` the value of its trajectory. values_N: array[N, ...], of
    each trajectory."""
    return np.asarray(values_N)[[row.trajectory for row in rollouts.rows]]


def one_row_each(rollouts: Rollouts, reader: str) -> None:
    """Raises ValueError, which names the reader, unless each trajectory is one row."""
    for trajectory in rollouts.trajectories:
        trajectory.only_segment(reader)


def routes_of(segments: Sequence[Segment], length: int) -> dict[str, np.ndarray]:
    """Returns Batch.routes of these segments, in rows of `length` tokens."""
    from policy.cache.step import UNKNOWN

    first = segments[0].routes or {}
    result = {
        path: np.full((len(segments), length, *a.shape[1:]), UNKNOWN, a.dtype)
        for path, a in first.items()
    }
    for row, segment in enumerate(segments):
        assert segment.routes is not None, "the generator records routes if a stage replays them"
        for path, experts in segment.routes.items():
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
) -> list[SampleRecord]:
    """Returns a line of samples.jsonl for each trajectory; rl/records/samples.py adds `at`.

    In a line, `prompt` is the text or the messages of the prompt, `raw` the completion with its
    special tokens, if it has any, `prompt_id` the running number of the prompt in the run, and
    `sample` the number of the trajectory in its group. `version` is a number, or [first token,
    version] pairs where weights changed before its end. `tokens` are all ids after the prompt, and
    `segments` their lengths where there are several. `media` describes the pictures and sounds of
    the prompt; their contents are in no line.

    advantages: float[P * G], the advantage of each trajectory or the mean over its tokens; None:
    the trajectories of an evaluation.
    """
    faults: dict[int, dict[str, str]] = defaultdict(dict)
    for fault in scores.faults:
        faults[fault.sample][fault.function] = fault.kind
    lines = []
    for group in rollouts.groups:
        problem = group.problem
        for sample, trajectory in enumerate(group.trajectories):
            i = len(lines)
            tokens = trajectory.new_tokens
            line = {
                "stage": stage,
                "step": step,
                "prompt_id": group.prompt_id,
                "sample": sample,
                "version": trajectory.versions,
                "prompt": without_contents(problem.example.prompt),
                "completion": trajectory.text,
                # Up to `tokens` a search looks for words of the completion
                # (rl/views/viewer/index.py).
                **({"raw": raw} if (raw := trajectory.raw) not in (None, trajectory.text) else {}),
                "tokens": tokens,
                "finish": trajectory.finish,
                "rewards": dict(zip(scores.names, scores.rewards[i].tolist(), strict=True)),
                "reward": float(scores.total[i]),
                "advantage": None if advantages is None else float(advantages[i]),
                "columns": {
                    name: value
                    for name, value in problem.example.columns.items()
                    if _is_short(value)
                },
                # Between `columns` and `n_prompt` a search looks for words
                # (rl/views/viewer/index.py).
                **({"reward_log": log} if (log := scores.logs.get(i)) else {}),
                "n_prompt": trajectory.prompt_length,
                "n": len(tokens),
            }
            optional = {
                "faults": faults.get(i),
                "eval": advantages is None,
                "media": entries(problem.expanded),
                "segments": _lengths(trajectory),
                "source": problem.example.source,
            }
            line |= {name: value for name, value in optional.items() if value}
            lines.append(cast(SampleRecord, line))
    return lines


def _lengths(trajectory: Trajectory) -> list[int]:
    """Returns the lengths of several segments, the prompt included; [] for a single one."""
    lengths = [len(segment.tokens) for segment in trajectory.segments]
    return lengths if len(lengths) > 1 else []


def record_evaluation(
    events: Events, stage: str, step: int, rollouts: Rollouts, scores: Scores
) -> None:
    """Writes the completions of an evaluation."""
    events.samples(
        records(rollouts, scores, stage, step), token_records(rollouts), references(rollouts)
    )


def references(rollouts: Rollouts) -> list[Reference]:
    """Returns the pictures and sounds of all prompts, with repeats."""
    shown = [each for group in rollouts.groups if (each := group.problem.expanded) is not None]
    return [reference for each in shown for reference in each.references]


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
    """Returns TOKEN[n_prompt + n] (rl/records/samples.py) of each trajectory: those of its
    segments, one after the other.

    batch: the rows of the step. outputs: arrays [N,T] of `TokenOutputs`, and `gap`; None or empty:
    no update of the policy saw the batch.
    """
    parts: list[list[np.ndarray]] = [[] for _ in rollouts.trajectories]
    turns: Counter[int] = Counter()
    for number, row in enumerate(rollouts.rows):
        tokens = _token_record(row.segment, turns[row.trajectory])
        if batch is not None:
            _add_outputs(tokens, row.segment.policy, batch, outputs, number)
        turns[row.trajectory] += len(row.segment.turns)
        parts[row.trajectory].append(tokens)
    return [np.concatenate(own) for own in parts]


def _token_record(segment: Segment, turns_before: int) -> np.ndarray:
    """Returns TOKEN[T] of a segment as the generator left it. turns_before: turns of the segments
    before it in its trajectory."""
    tokens = np.zeros(len(segment.tokens), TOKEN)
    tokens["id"] = segment.tokens
    for name in ("gap", "entropy", "advantage"):
        tokens[name] = np.nan
    tokens["logp"] = np.where(segment.policy, segment.logprobs, np.float32(np.nan))
    for number, turn in enumerate(segment.turns, turns_before + 1):
        tokens["turn"][turn.start :] = min(number, LAST_TURN)
        if turn.finish == "stop" and turn.end > turn.start:
            tokens["flags"][turn.end - 1] |= STOP
    return tokens


def _add_outputs(
    tokens: np.ndarray,
    policy: np.ndarray,
    batch: Batch,
    outputs: Mapping[str, np.ndarray] | None,
    row: int,
) -> None:
    """Adds what the step computed about the tokens that the policy wrote in a row of the batch."""
    assert batch.advantages is not None
    new = np.flatnonzero(policy)
    tokens["flags"][new] |= np.where(batch.mask[row, new] != 0, TRAINED, 0).astype(np.uint8)
    tokens["advantage"][new] = (
        batch.advantages[row] if batch.advantages.ndim == 1 else batch.advantages[row, new]
    )
    if outputs and batch.segments[row].any():
        tokens["gap"][new] = outputs["gap"][row, new]
        tokens["entropy"][new] = outputs["entropy"][row, new]
        tokens["flags"][new] |= outputs["flags"][row, new] if "flags" in outputs else 0


def metrics(rollouts: Rollouts, scores: Scores, *, drafted: bool) -> dict[str, float]:
    """Returns rewards and lengths of a step, by the names of docs/metrics.md. If nothing was
    scored, `reward/mean` is NaN, and the other statistics of rewards are absent.

    drafted: adds the tokens that drafts gained.
    """
    G = len(rollouts.groups[0].trajectories)
    trajectories = rollouts.trajectories
    totals = without_rounding(scores.total.reshape(-1, G))
    scored = totals[np.isfinite(totals)]
    lengths = np.asarray([trajectory.length for trajectory in trajectories])
    ended = np.asarray([not trajectory.truncated for trajectory in trajectories])
    result = {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/unscored": float(np.sum(~np.isfinite(totals))),
        "completion/mean_length": float(lengths.mean()),
        "completion/min_length": float(lengths.min()),
        "completion/max_length": float(lengths.max()),
        "completion/truncated_ratio": float(1 - ended.mean()),
        "time/sample": rollouts.seconds,
    }
    counts = rollouts.counts
    if counts is not None:
        result["generator/useful_rows"] = counts["useful"] / max(1, counts["rows"])
        result["generator/prompt_tokens_read"] = float(counts["prefill"])
        result["generator/preempted"] = float(counts["preempted"])
        if "checked" in counts:
            result["generator/replaced_share"] = counts["replaced"] / max(1, counts["checked"])
    if scored.size:
        with_a_score = totals[np.isfinite(totals).any(axis=1)]
        result["reward/std"] = 0.0 if all_equal(scored) else float(scored.std(ddof=1))
        result["reward/frac_zero_std"] = float(
            np.mean([all_equal(group) for group in with_a_score])
        )
    if rollouts.scoring:
        result["time/reward_models"] = rollouts.scoring
    if drafted and counts is not None:
        steps = sum(trajectory.steps for trajectory in trajectories)
        result["speculative/accepted_per_step"] = float(lengths.sum() / steps - 1)
    if ended.any():
        result |= {
            f"completion/{name}_terminated_length": float(getattr(lengths[ended], name)())
            for name in ("mean", "min", "max")
        }
    return result | scores.metrics
