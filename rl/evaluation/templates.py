"""Templates of tasks: Jinja in a sandbox, which reads the columns of a row and changes nothing."""

from __future__ import annotations

import functools

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from policy.json_types import JsonObject


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)


def check(text: str) -> None:
    """Raises ValueError for a text that is no template."""
    try:
        _compiled(text)
    except TemplateError as error:
        raise ValueError(f"no Jinja template: {error}") from None


def fill(text: str, values: JsonObject) -> str:
    """Returns a template with the values of a row. Raises ValueError for a value that it asks for
    and the row lacks, and for what the sandbox refuses."""
    try:
        return _compiled(text).render(values)
    except TemplateError as error:
        columns = ", ".join(map(str, values)) or "none"
        raise ValueError(f"template: {error} (columns: {columns})") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"template: {type(error).__name__}: {error}") from None
