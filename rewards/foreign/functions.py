"""What rewards that call a function of another framework have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rewards import plugins


def check_of(example: str) -> Callable[..., None]:
    """Returns the check of a reward whose option `function` names the function to call.

    example: the option, for the message. The check raises ValueError without the option, and what
    `plugins.load` raises.
    """

    def check(function: str = "", **_: Any) -> None:
        if not function:
            raise ValueError(f"it needs the option `function`: {example}")
        plugins.load(function, "function")

    return check


async def awaited(result: Any) -> Any:
    """Returns what a function has returned, also if that is a coroutine."""
    return await result if inspect.isawaitable(result) else result
