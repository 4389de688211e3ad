"""Parts of the shell scripts that `rl launch` writes."""

from __future__ import annotations

from rl.launch.job import FAILING_CODES, KILLED_CODES, RESTARTING_CODES

AGAIN = "|".join(map(str, (*RESTARTING_CODES, *KILLED_CODES)))
"""Pattern of `case`: codes after which the run is started again."""
FAILED = f"[{FAILING_CODES[0]}-{FAILING_CODES[-1]}]"
"""Pattern of `case`: codes after which it is not."""


def required(name: str, value: str | None, example: str) -> str:
    """Returns a word of a command: a value, or a variable without which the script ends."""
    if value is not None:
        return quoted(value)
    return f'"${{{name}:?set {name}, for example {name}={example}}}"'


def quoted(text: str) -> str:
    """Returns a text as a word of a command, in double quotes if it needs any."""
    if text and all(each.isalnum() or each in "-_./:=@,+%" for each in text):
        return text
    for special in ("\\", '"', "$", "`"):
        text = text.replace(special, f"\\{special}")
    return f'"{text}"'


def lines(words: list[str], indent: str = "    ") -> str:
    """Joins words to a command, an option a line."""
    return f" \\\n{indent}".join(words)
