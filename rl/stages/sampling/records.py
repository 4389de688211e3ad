"""Lines of samples.jsonl and tokens of tokens.bin from the groups of a step.

P prompts, G trajectories of each; N rows of a batch, one for each segment; T tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rewards import Scores
from rl.records.messages import entries, is_data_uri, without_contents
from rl.records.samples import LAST_TURN, LOGP_DIFF, STOP, TOKEN, TRAINED
from rl.records.schema import SampleRecord
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.records.events import Events
    from rl.training.batch import Batch
    from rollout.media.reference import Reference
    from rollout.types import Segment, Trajectory

LONGEST_COLUMN = 1024  # bytes of a text of the data that a sample has


def sample_lines(
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


def write_samples(
    events: Events,
    stage: str,
    step: int,
    rollouts: Rollouts,
    scores: Scores,
    advantages: np.ndarray | None = None,
    batch: Batch | None = None,
    outputs: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes the trajectories of a step or of an evaluation. advantages: as for `sample_lines`.
    batch, outputs: as for `token_records`."""
    lines = sample_lines(rollouts, scores, stage, step, advantages)
    tokens = token_records(rollouts, batch, outputs)
    events.samples(lines, tokens, references(rollouts))


def references(rollouts: Rollouts) -> list[Reference]:
    """Returns the pictures and sounds of all prompts, with repeats."""
    shown = [each for group in rollouts.groups if (each := group.problem.expanded) is not None]
    return [reference for each in shown for reference in each.references]


def _is_short(value: Any) -> bool:
    """Whether a value of a column stands in a sample: a number, or text of at most a kilobyte.

    A data URI does not.
    """
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) <= LONGEST_COLUMN and not is_data_uri(value)
    return value is None or isinstance(value, (bool, int, float, np.number, np.bool_))


def token_records(
    rollouts: Rollouts, batch: Batch | None = None, outputs: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Returns TOKEN[n_prompt + n] (rl/records/samples.py) of each trajectory: those of its
    segments, one after the other.

    batch: the rows of the step. outputs: arrays [N,T] of `TokenOutputs`, and `logp_diff`; None or
    empty: no update of the policy saw the batch.
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
    for name in (LOGP_DIFF, "entropy", "advantage"):
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
    # A row without a score has no segment: the updates computed nothing of it.
    if outputs and batch.segments[row].any():
        tokens[LOGP_DIFF][new] = outputs["logp_diff"][row, new]
        tokens["entropy"][new] = outputs["entropy"][row, new]
        tokens["flags"][new] |= outputs["flags"][row, new] if "flags" in outputs else 0
