"""The fields of a request that say how tokens are drawn and where completions end."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl.serve.bodies import Body, Fields, Items
from rl.serve.errors import invalid
from rollout.constraints import with_few_spaces
from rollout.types import Constraint, SamplingParams

PROMPT_IDS = 2**31
"""Prompt ids of the generator: 0 to PROMPT_IDS - 1."""
MOST_STOPS = 16
"""Most stop strings of a request, and most stop tokens besides those of the model."""
MOST_BIASES = 1024
"""Most tokens of `logit_bias`."""
MOST_STOP_CHARACTERS = 256
"""Most characters of a stop string and of a word that is forbidden."""
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


@dataclass(frozen=True)
class Bounds:
    """What a request may ask of the model.

    stop_token_ids: the tokens that end every completion. max_n: most samples of a prompt.
    """

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    max_n: int


class JsonSchema(Fields):
    """A named JSON schema. strict: constrained answers always are."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = True


class ResponseFormat(Fields):
    """What the text of an answer must be, in the form of OpenAI."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` belongs to the type json_schema, which needs it")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Returns the constraint; None: any text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Constraint("json_schema", json.dumps(with_few_spaces(schema)))


class StructuredOutputs(Fields):
    """What the text of an answer must be, in the form of vLLM: one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1, max_length=256)
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        return self

    @property
    def constraint(self) -> Constraint:
        """Returns the constraint."""
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("lark", self.grammar)
        schema: Any = self.json_ if self.json_ is not None else {"type": "object"}
        if self.choice is not None:
            return Constraint("regex", "|".join(map(_literal, self.choice)))
        text = schema if isinstance(schema, str) else json.dumps(with_few_spaces(schema))
        return Constraint("json_schema", text)


def _literal(text: str) -> str:
    """Returns a regular expression of Rust's crate `regex` that matches this text alone."""
    return "".join(
        char if char.isalnum() or char == "_" else f"\\x{{{ord(char):x}}}" for char in text
    )


class SamplingFields(Body):
    """The fields that chat, completions and others share. Defaults are OpenAI's, and vLLM's where
    OpenAI has no such field."""

    model: str | None = None
    n: int = Field(1, ge=1)
    seed: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MOST_STOPS)] = []
    stop_token_ids: Items[int] = Field([], max_length=MOST_STOPS)
    min_tokens: int = Field(0, ge=0)
    bad_words: Items[StopString] = Field([], max_length=64)
    logit_bias: dict[str, float] = {}
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs | None = None

    @field_validator("bad_words")
    @classmethod
    def _have_letters(cls, words: list[str]) -> list[str]:
        if not all(map(str.strip, words)):
            raise ValueError("a word has more than blanks")
        return words

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, biases: Any) -> Any:
        if isinstance(biases, dict) and len(biases) > MOST_BIASES:
            raise ValueError(f"{len(biases)} tokens; at most {MOST_BIASES}")
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, biases: dict[str, float]) -> dict[str, float]:
        for token, bias in biases.items():
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"{token!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} must lie in [-100, 100]")
        return biases

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        if self.structured_outputs is not None and self.response_format.type != "text":
            raise ValueError("give `response_format` or `structured_outputs`, not both")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Returns what the text must be; None: anything."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint
        return self.response_format.constraint

    @property
    def constraint_field(self) -> str | None:
        """Returns the field that has the constraint; None: there is none."""
        if self.constraint is None:
            return None
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def params(self, bounds: Bounds, max_tokens: int) -> SamplingParams:
        """Returns the parameters of the generator. Raises ApiError for values that the model or
        the server does not allow."""
        if self.n > bounds.max_n:
            raise invalid(
                "n", f"{self.n} samples; the server makes at most {bounds.max_n} (--max-n)"
            )
        if self.min_tokens > max_tokens:
            raise invalid("min_tokens", f"{self.min_tokens} is more than {max_tokens} tokens")
        stop_ids = tuple(dict.fromkeys((*bounds.stop_token_ids, *self.stop_token_ids)))
        check_tokens("stop_token_ids", self.stop_token_ids, bounds.vocab_size)
        biases = self._biases(bounds.vocab_size)
        try:
            return SamplingParams(
                n=self.n,
                max_new_tokens=max_tokens,
                temperature=self.temperature,
                top_k=min(max(0, self.top_k), bounds.vocab_size),
                top_p=self.top_p,
                min_p=self.min_p,
                stop_token_ids=stop_ids,
                stop=self.stops,
                min_tokens=self.min_tokens,
                bad_words=tuple(self.bad_words),
                logit_bias=biases,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                constraint=self.constraint,
            )
        except ValueError as error:
            raise invalid(None, str(error)) from None

    def _biases(self, vocab_size: int) -> Mapping[int, float]:
        biases = {int(token): bias for token, bias in self.logit_bias.items()}
        check_tokens("logit_bias", biases, vocab_size)
        return biases


def check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises ApiError for ids that the vocabulary does not have."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise invalid(name, f"token {token} is outside 0..{vocab_size - 1}")


def draw_number(seed: int | None) -> int:
    """Returns the prompt id that seeds the draws of a request: the seed itself if it is a prompt
    id, a hash of any other number, and a random prompt id without a seed."""
    if seed is None:
        return secrets.randbelow(PROMPT_IDS)
    if 0 <= seed < PROMPT_IDS:
        return seed
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % PROMPT_IDS


def draw_numbers(seed: int | None, count: int) -> list[int]:
    """Returns the prompt ids of the prompts of a request: the one of the seed for all of them, one
    for each without a seed."""
    if seed is not None:
        return [draw_number(seed)] * count
    return [draw_number(None) for _ in range(count)]
