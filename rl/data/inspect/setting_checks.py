"""Checks of rows against settings: 17 (more prompts a step than rows) and 18 (roles of
messages)."""

from __future__ import annotations

from collections.abc import Iterator

from rl.data.encoded import Example
from rl.data.inspect.stage_rows import StageRows
from rl.errors import Fault
from rollout.text.roles import misspelt, unusual_role


def enough_rows(stage: StageRows) -> Iterator[Fault]:
    """17: a step takes no row twice."""
    if 0 < stage.total < stage.prompts_per_step:
        rows = "1 row" if stage.total == 1 else f"{stage.total:,} rows"
        yield Fault(
            f"the data has {rows}, and a step takes {stage.prompts_per_step:,}: every step has "
            "rows several times",
            f"Lower {stage.path}.prompts_per_step, or use more rows",
            level="warn",
            check=17,
            stage=stage.name,
        )


def roles(stage: StageRows) -> Iterator[Fault]:
    """18: the roles of messages are those of chat templates."""
    seen: set[str] = set()
    for example in (*stage.examples, *(example for example, _ in stage.problems), *stage.held_out):
        for role in sorted(_roles(example) - seen):
            seen.add(role)
            if text := unusual_role(role, stage.tokenizer):
                level = "refuse" if misspelt(role) else "warn"
                yield Fault(
                    f"{example.where}: {text}",
                    "Mend the rows",
                    level=level,
                    check=18,
                    stage=stage.name,
                )


def _roles(example: Example) -> set[str]:
    conversations = [example.prompt, example.messages or (), *(example.pair or ())]
    return {
        str(message["role"])
        for each in conversations
        if not isinstance(each, str)
        for message in each
    }


SETTING_CHECKS = (enough_rows, roles)
