"""The prompt that a teacher reads in place of the policy's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rl.data.encoded import Example
from rl.errors import DataError

SUCCESS = "success"
_NAME = re.compile(r"\{(\w+)\}")


class TeacherPrompt(NamedTuple):
    """The prompt that a teacher reads in place of the policy's. template: its text, as
    `teacher.prompt` describes it. encode: returns the token ids of the prompt of an example."""

    template: str
    encode: Callable[[Example], list[int]]

    @property
    def names(self) -> list[str]:
        """Returns what stands in braces in the template."""
        return _NAME.findall(self.template)

    @property
    def reads_success(self) -> bool:
        """Whether it shows another completion of the group, which only rewards tell."""
        return SUCCESS in self.names

    def ids(self, example: Example, success: str | None = None) -> list[int]:
        """Returns the token ids of the prompt. success: the text of another completion.

        Raises DataError for a name that the row does not have.
        """
        if isinstance(example.prompt, str):
            return self.encode(
                replace(example, prompt=self._text(example, example.prompt, success))
            )
        messages = list(example.prompt)
        last = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=None)
        if last is None or not isinstance(messages[last]["content"], str):
            raise DataError(
                f"{example.where}: teacher.prompt replaces the text of the last user message, and "
                "the prompt has none"
            )
        text = self._text(example, messages[last]["content"], success)
        messages[last] = {**messages[last], "content": text}
        return self.encode(replace(example, prompt=messages))

    def _text(self, example: Example, prompt: str, success: str | None) -> str:
        known = {**example.columns, "prompt": prompt}
        known |= {"completion": example.completion} if example.completion is not None else {}
        known |= {SUCCESS: success} if success is not None else {}

        def value(match: re.Match[str]) -> str:
            if (name := match[1]) not in known:
                raise DataError(
                    f"{example.where}: teacher.prompt names {{{name}}}, and the row has no such "
                    f"column (it has: {', '.join(sorted(known))})"
                )
            return str(known[name])

        return _NAME.sub(value, self.template)
