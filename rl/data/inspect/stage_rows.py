"""The rows of a stage as token ids, in the form that the checks read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.data.encoded import Example
from rl.data.limits import Limit
from rollout.media.expand import Expanded

Kind = Literal["prompt", "trained", "ignored", "stop"]


SOME = 100
"""Rows that checks of the template look at: the others repeat it."""


def texts_in(message: dict[str, Any]) -> list[str]:
    """Returns the texts of a message: its content, or those of its parts."""
    content = message["content"]
    return (
        [content]
        if isinstance(content, str)
        else [part["text"] for part in content if part["type"] == "text"]
    )


@dataclass(frozen=True)
class Encoded:
    """A sequence of tokens.

    mask: 1 on the tokens that are trained on; all 0 for a prompt alone. expanded: its pictures and
    sounds; None: it has none. n_prompt: tokens before the first that is trained on.
    """

    example: Example
    ids: list[int]
    mask: list[int]
    expanded: Expanded | None = None

    @property
    def n_prompt(self) -> int:
        """Number of tokens before the first one that is trained on."""
        return self.mask.index(1) if 1 in self.mask else len(self.ids)

    @property
    def text_ids(self) -> list[int]:
        """Returns the tokens that do not stand for a picture or a sound."""
        if self.expanded is None:
            return self.ids
        index = self.expanded.index.tolist()
        return [
            token for place, token in enumerate(self.ids) if place >= len(index) or index[place] < 0
        ]

    def kinds(self, stops: Sequence[int]) -> list[Kind]:
        """Returns what each token is for the run: part of the prompt, trained on, ignored, or a
        stop that is trained on.
        """
        first = self.n_prompt
        result: list[Kind] = []
        for place, (token, trained) in enumerate(zip(self.ids, self.mask, strict=True)):
            if trained:
                result.append("stop" if token in stops else "trained")
            else:
                result.append("prompt" if place < first else "ignored")
        return result


@dataclass(frozen=True)
class StageRows:
    """The rows of one stage.

    index: its number in `stages`. kind: kind of the stage (supervised, online, preference,
    ...). built_in: whether the chat template is the one of Duet's own tokenizers. stops: tokens
    that end a completion. rows: encoded sequences. limit: how long a row may be. problems:
    (example, text) of rows that cannot be encoded. total: rows of the data, of which `rows` may be
    a sample. held_out: examples of the evaluation. declared_stops: ends of sequence by the file
    that declares them. task: whether the rows are problems made in code. effect: what happened to
    rows that are too long; None: there were none. prompts_per_step: rows that a step takes.
    measured: examples whose loss is measured (`held_out`).
    """

    name: str
    index: int
    kind: str
    tokenizer: Any
    built_in: bool
    stops: tuple[int, ...]
    rows: list[Encoded]
    limit: Limit
    train_on: str = "assistant"
    total: int = 0
    vocab_size: int | None = None
    problems: list[tuple[Example, str]] = field(default_factory=list)
    held_out: Sequence[Example] = ()
    measured: Sequence[Example] = ()
    declared_stops: dict[str, list[int]] = field(default_factory=dict)
    task: bool = False
    prompts_per_step: int = 1
    effect: str | None = None

    @property
    def path(self) -> str:
        """The dotted key of the stage in a configuration, such as stages.0."""
        return f"stages.{self.index}"

    @property
    def samples(self) -> bool:
        """Whether the stage samples completions, so that its rows are prompts without an answer."""
        return self.kind == "online"

    @property
    def examples(self) -> list[Example]:
        """The examples of the rows, each once."""
        seen: dict[int, Example] = {id(row.example): row.example for row in self.rows}
        return list(seen.values())

    def first_rows(self, count: int) -> list[Encoded]:
        """Returns the first rows, so many of each source."""
        seen: Counter[str | None] = Counter()
        result = []
        for row in self.rows:
            if seen[row.example.source] < count:
                seen[row.example.source] += 1
                result.append(row)
        return result

    @property
    def messages(self) -> bool:
        """Whether prompts are rendered by the chat template."""
        return any(not isinstance(each.prompt, str) for each in self.some_examples)

    @property
    def some_examples(self) -> list[Example]:
        """The first examples, those that cannot be encoded among them."""
        return [
            *(example for example, _ in self.problems[:SOME]),
            *(row.example for row in self.rows[:SOME]),
        ]
