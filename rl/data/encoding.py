"""Encodes examples as token ids: texts, and conversations with pictures and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.data.encoded import Example, Messages, Row
from rollout.media import expand
from rollout.media.expand import Expanded
from rollout.media.processor import MediaError
from rollout.media.processors import Processors
from rollout.text import chat


@dataclass(frozen=True)
class ExampleEncoder:
    """Encodes examples of one run. Methods raise ValueError (ChatError, MediaError) without the
    place of the row.

    processors: those of the run's model; None: it reads texts only.
    media_rows: most embeddings that the pictures and sounds of an example may fill; None: any
    number.
    history: what becomes of turns that the chat template rewrites, as in
    `chat.encode_conversation`.
    """

    tokenizer: Any
    processors: Processors | None = None
    media_rows: int | None = None
    history: str = "template"

    def prompt(self, example: Example) -> tuple[list[int], Expanded | None]:
        """Returns (token ids of the prompt, its pictures and sounds)."""
        processors = self._processors(example, [example.prompt])
        if processors is None:
            return chat.render_prompt(self._tokenizer(example), example.prompt), None
        assert not isinstance(example.prompt, str)  # references stand in messages
        expanded = expand.expand_prompt(
            self._tokenizer(example), example.prompt, example.references, processors
        )
        return self._checked(expanded).tokens.tolist(), expanded

    def demonstration(self, example: Example, train_on: str) -> list[Row]:
        """Returns the rows of a demonstration: several for a conversation whose earlier turns the
        chat template rewrites (`chat.render_turns`). train_on: as in rl/algorithms/sft.py."""
        messages = example.messages
        tokenizer = self._tokenizer(example)
        if messages is None and example.completion is None:
            raise ValueError("a demonstration needs a completion or messages")
        written = [example.prompt, example.completion] if messages is None else [messages]
        processors = self._processors(example, written)
        if messages is None and processors is None:
            return [
                Row(
                    *chat.encode_completion(
                        tokenizer, example.prompt, example.completion or "", train_on
                    )
                )
            ]
        if messages is None:
            messages = _answered(example, example.completion or "")
            train_on = "all" if train_on == "all" else "last_turn"
        options = {"train_on": train_on, "history": self.history, "first": example.first}
        if processors is None:
            return [Row(*row) for row in chat.encode_conversation(tokenizer, messages, **options)]
        rows = expand.expand_conversation(
            tokenizer, messages, example.references, processors, **options
        )
        return [self._row(*row) for row in rows]

    def answer(self, example: Example, answer: str | Messages) -> Row:
        """Returns the prompt of an example with this answer to it, up to the last token that the
        assistant writes; the answer is trained on. Raises ValueError for an answer without a token.
        """
        tokenizer = self._tokenizer(example)
        processors = self._processors(example, [example.prompt, answer])
        if processors is None:
            row = Row(*chat.encode_answer(tokenizer, example.prompt, answer))
        else:
            messages = _answered(example, answer)
            first = len(example.prompt)
            row = self._row(
                *expand.expand_answer(tokenizer, messages, example.references, processors, first)
            )
        if not any(row.mask):
            raise ValueError("an answer has no token of its own")
        end = len(row.mask) - row.mask[::-1].index(1)
        return Row(row.ids[:end], row.mask[:end], row.expanded and row.expanded.first(end))

    def _tokenizer(self, example: Example) -> Any:
        return (
            self.tokenizer
            if example.tools is None
            else chat.with_variables(self.tokenizer, tools=example.tools)
        )

    def _processors(
        self, example: Example, texts: Sequence[str | Messages | None]
    ) -> Processors | None:
        """Returns the processors for an example with pictures or sounds, None for one of text.
        Raises MediaError for a text with a token that stands for a picture."""
        if self.processors is None or example.references:
            return self.processors
        for each in texts:
            messages = [{"content": each}] if isinstance(each, str) else each
            expand.refuse_reserved(messages or [], self.processors)
        return None

    def _row(self, expanded: Expanded, mask: list[int]) -> Row:
        return Row(self._checked(expanded).tokens.tolist(), mask, expanded)

    def _checked(self, expanded: Expanded) -> Expanded:
        if self.media_rows is not None and expanded.rows > self.media_rows:
            raise MediaError(
                f"its pictures and sounds fill {expanded.rows} embeddings, more than "
                f"model.media_rows ({self.media_rows}); leave the row out, scale its pictures "
                "down, or raise model.media_rows"
            )
        return expanded


def _answered(example: Example, answer: str | Messages) -> Messages:
    answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return [*example.prompt, *answers]  # pyright: ignore[reportReturnType]
