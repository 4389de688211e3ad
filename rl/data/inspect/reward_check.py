"""Check 13: the reward of the demonstrations themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rewards import RewardError, Runner, RunnerOptions
from rewards.registry import REWARD_MODEL
from rewards.text import in_form_of, quoted
from rl.config.data import RewardSettings
from rl.data.datasets import Example
from rl.data.inspect.stage_rows import StageRows
from rl.errors import Fault

SCORED = 64
GOOD = 0.5


def demonstrations_score(stage: StageRows, settings: RewardSettings) -> Iterator[Fault]:
    """13: scores at most SCORED demonstrations with the reward functions; a right answer should get
    a good score.

    Reward models are left out, because they need a device.
    """
    functions = tuple(
        (each.name, each.weight, each.options)
        for each in settings.functions
        if each.name != REWARD_MODEL
    )
    rows = [each for each in stage.examples if _answer(each)][:SCORED]
    if not rows or not functions:
        return
    answers = [_answer(each) for each in rows]
    encoded = [len(stage.tokenizer.encode(answer, add_special_tokens=False)) for answer in answers]
    names = set.intersection(*(set(each.columns) for each in rows))
    values = {name: [each.columns[name] for each in rows] for name in names}
    values |= {
        "completion_lengths": encoded,
        "truncated": [False] * len(rows),
        "raw": answers,
        "max_new_tokens": stage.limit.new_tokens or stage.limit.max_length,
    }
    try:
        runner = Runner(RunnerOptions(functions, settings.workers, settings.timeout_s))
    except RewardError as error:
        yield Fault(f"rewards: {error}", check=13, stage=stage.name)
        return
    try:
        written = [
            in_form_of(each.prompt, answer) for each, answer in zip(rows, answers, strict=True)
        ]
        scores = runner.score([each.prompt for each in rows], written, values)
    except RewardError as error:
        if stage.samples:
            yield Fault(f"rewards: {error}", check=13, stage=stage.name)
        else:  # the stage calls no reward
            yield Fault(
                f"the demonstrations are not scored: {error}",
                level="note",
                check=13,
                stage=stage.name,
            )
        return
    finally:
        runner.close()
    scored = scores.total[np.isfinite(scores.total)]
    if scores.faults:
        fault = scores.faults[0]
        yield Fault(
            f"{fault.function} fails ({fault.kind}) on {len(scores.faults)} of {len(rows)} "
            f"demonstrations, first {rows[fault.sample].where}: "
            f"{fault.traceback.strip().splitlines()[-1] if fault.traceback.strip() else ''}",
            f"rl reward test {quoted(fault.function)}",
            level="warn",
            check=13,
            stage=stage.name,
        )
    if scored.size:
        level = "warn" if float(scored.mean()) < GOOD else "note"
        yield Fault(
            f"{len(scored)} demonstrations get a mean reward of {float(scored.mean()):.3g} "
            f"({float(scored.min()):.3g} to {float(scored.max()):.3g})",
            "The reward or the column that it reads is wrong, or the answers are"
            if level == "warn"
            else "",
            level=level,
            check=13,
            stage=stage.name,
        )


def _answer(example: Example) -> str:
    """Returns the answer of a demonstration; empty without one."""
    return example.completion or (example.messages[-1]["content"] if example.messages else "")
