"""Curricula by the names in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewards import plugins
from rewards.suggest import nearest
from rl.config.stage import CurriculumOptions
from rl.errors import ConfigError, DataError
from rl.stages.curriculum import pass_rate
from rl.stages.curriculum.interface import Candidates, Curriculum

_SHIPPED: dict[str, tuple[Callable[..., Curriculum], Callable[..., Any]]] = {
    "pass_rate": (pass_rate.PassRate, pass_rate.PassRateOptions)
}
"""Name -> (function that makes the curriculum, class of its options with `check_files`)."""


def check(options: CurriculumOptions, *, with_files: bool = True) -> None:
    """Raises ValueError for an unknown name, and for an option (in backticks) that it does not
    take. with_files: also for files that options name and that do not exist."""
    name = options.name
    if plugins.is_plugin(name):
        plugins.check_options(plugins.load(name, "curriculum"), name, options.options)
        return
    if name not in _SHIPPED:
        raise ValueError(
            f"no curriculum {name!r}{nearest(name, list(_SHIPPED))}; or name a function: "
            "file.py:function or package.module:function"
        )
    function = _SHIPPED[name][1]
    plugins.check_options(function, name, options.options)
    made = function(**options.options)
    if with_files:
        made.check_files()


def create(options: CurriculumOptions, candidates: Candidates) -> Curriculum:
    """Returns the curriculum of a stage. Raises ConfigError as `check` does, and what the function
    raises."""
    try:
        check(options, with_files=False)
        if not plugins.is_plugin(options.name):
            return _SHIPPED[options.name][0](candidates, **options.options)
        curriculum = plugins.load(options.name, "curriculum")(candidates, **options.options)
    except ValueError as error:
        raise ConfigError(f"curriculum {options.name}: {error}") from None
    missing = [name for name in _MEMBERS if not hasattr(curriculum, name)]
    if missing:
        raise ConfigError(
            f"curriculum {options.name}: returned {type(curriculum).__name__}, which has no "
            f"`{missing[0]}`; return an object of a subclass of {Curriculum.__module__}.Curriculum"
        )
    return curriculum


_MEMBERS = ("next", "observe", "state", "restore", "histogram", "rows", "note")


def chosen(curriculum: Curriculum, name: str, count: int, total: int) -> list[int]:
    """Asks for the next rows. Raises DataError if these are not `count` rows of `total`."""
    rows: Sequence[Any] = curriculum.next(count)
    numbers = [int(row) for row in rows]
    wrong = [row for row in numbers if not 0 <= row < total]
    if len(numbers) != count or wrong:
        what = f"row {wrong[0]} of {total} rows" if wrong else f"{len(numbers)} rows"
        raise DataError(f"curriculum {name}: asked for {count} rows, it chose {what}")
    return numbers
