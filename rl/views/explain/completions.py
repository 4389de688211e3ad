"""Rules about completions: length, truncation, and turns that do not end."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from policy.json_types import JsonObject
from rewards.text import quoted
from rl.errors import Fault
from rl.views.explain.learning import MIN_STEPS
from rl.views.explain.record import StageRecord
from rl.views.explain.rules import stage_rule
from rl.views.explain.series import correlation

TRUNCATED_SHARE = 0.25
LENGTH_GROWTH = 2.0
LENGTH_PAID = 0.5
NEVER_ENDS = 0.98
MARKER_SHARE = 0.2
MARKERS = re.compile(
    r"<\|(?:user|assistant|system|end|im_start|im_end|start_header_id|eot_id|endoftext)\|>"
    r"|\[/?INST\]|<(?:start|end)_of_turn>"
    r"|\n(?:User|Human|Assistant|Question|Q):|### (?:Instruction|Response)"
)
"""Marks of a turn in chat templates, and in plain prompts that imitate one."""


@stage_rule
def length(stage: StageRecord) -> Iterator[Fault]:
    """Names a length that runs away, or shrinks to nothing."""
    lengths = stage.series("completion/mean_length")
    cut = stage.series("completion/truncated_ratio")
    if len(lengths) < MIN_STEPS:
        return
    start = min(lengths.values[: lengths.window])
    limit = stage.option("sampling.max_new_tokens", 256)
    paid = length_paid(stage)
    if lengths.last >= LENGTH_GROWTH * start and lengths.since(
        lambda value: value >= LENGTH_GROWTH * start
    ):
        useless = (
            (cut and cut.last >= TRUNCATED_SHARE)
            or paid >= LENGTH_PAID
            or not (stage.improved or stage.reward_rose)
        )
        if useless:
            yield Fault(
                f"completion/mean_length grew from {start:.3g} to {lengths.last:.3g} of {limit} "
                "tokens",
                cause="The reward pays for length"
                if paid >= LENGTH_PAID
                else "Longer completions do not score better, or are cut",
                change="Add the reward `soft_overlong` or `length`, and check what the reward "
                "counts",
                name="length runaway",
                stage=stage.name,
                step=lengths.since(lambda value: value >= LENGTH_GROWTH * start),
                severity=0.78,
                level="warn",
            )
    elif (
        lengths.last * 3 <= lengths.values[0]
        and lengths.last < 4
        and lengths.falls()
        and not stage.improved
    ):
        yield Fault(
            f"completion/mean_length fell from {lengths.values[0]:.3g} to {lengths.last:.3g} "
            "tokens",
            cause="The policy ends at once",
            change="Check that the reward does not pay for silence, and lower the learning rate",
            name="length collapse",
            stage=stage.name,
            step=lengths.since(lambda value: value * 3 <= lengths.values[0]),
            severity=0.6,
            level="warn",
        )


def length_paid(stage: StageRecord) -> float:
    """Returns the mean correlation of reward and length within the newest groups; 0 without groups
    that differ."""
    groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for sample in stage.samples:
        reward = sample.get("reward")
        if isinstance(reward, (int, float)):
            groups[sample.get("step"), sample.get("prompt_id")].append(
                (_length(sample), float(reward))
            )
    measured = [
        correlation([length for length, _ in group], [reward for _, reward in group])
        for group in groups.values()
        if len({length for length, _ in group}) > 1 and len({reward for _, reward in group}) > 1
    ]
    return sum(measured) / len(measured) if len(measured) >= 4 else 0.0


@stage_rule
def truncated(stage: StageRecord) -> Iterator[Fault]:
    """Names completions that are cut off, and turns that never end."""
    cut = stage.series("completion/truncated_ratio")
    ended = stage.series("completion/mean_terminated_length")
    if len(cut) < MIN_STEPS or cut.last < TRUNCATED_SHARE:
        return
    limit = stage.option("sampling.max_new_tokens", 256)
    never = cut.share(lambda value: value >= NEVER_ENDS) >= 0.9
    marked = marker_share(stage)
    first = stage.series("completion/mean_length")
    grew = bool(first) and first.last >= LENGTH_GROWTH * min(first.values[: first.window])
    if never or marked >= MARKER_SHARE:
        yield Fault(
            f"{cut.last:.0%} of the completions run into max_new_tokens ({limit})"
            + (
                f", and {marked:.0%} go on with a marker of another turn"
                if marked >= MARKER_SHARE
                else ""
            ),
            cause="The policy's end of turn is no stop, the prompt is not rendered by the template "
            "it was trained with, or it never learned to end",
            change=f"Run `rl inspect {quoted(stage.run.path)}`; set "
            f"{stage.key('sampling.stop_token_ids')}, tokenizer.chat_template or data.chat",
            name="wrong template or stop token",
            stage=stage.name,
            step=cut.steps[0],
            severity=0.88,
            level="warn",
        )
    elif not grew:
        usual = f"; those that end have {ended.last:.0f} tokens" if ended else ""
        yield Fault(
            f"{cut.last:.0%} of the completions are cut at {limit} tokens "
            f"(completion/truncated_ratio){usual}",
            cause="They get no score for what they would have said, and the policy never sees "
            "their end",
            change=f"Raise {stage.named('sampling.max_new_tokens')} and max_length, or set "
            "algorithm.mask_truncated: true",
            name="clipped completions",
            stage=stage.name,
            step=cut.since(lambda value: value >= TRUNCATED_SHARE),
            severity=0.7,
            level="warn",
        )


def marker_share(stage: StageRecord) -> float:
    """Returns the share of the newest completions that contain a marker of another turn."""
    texts = [str(sample.get("completion") or "") for sample in stage.samples]
    return (
        sum(bool(MARKERS.search(text)) for text in texts) / len(texts) if len(texts) >= 8 else 0.0
    )


def _length(sample: JsonObject) -> float:
    """Returns the tokens of a completion; its characters where none are recorded."""
    count = sample.get("n")
    tokens = sample.get("tokens")
    if isinstance(count, int) and count:
        return float(count)
    if isinstance(tokens, list) and tokens:
        return float(len(tokens))
    return float(len(str(sample.get("completion") or "")))
