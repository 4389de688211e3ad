"""Tools of a chat: their definitions, and the calls in a reply."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from rl.serve.bodies import Fields
from rl.serve.errors import invalid
from rollout.calls.formats import ResponseTemplate, response_template, without_calls
from rollout.calls.replies import Call, ReplyReader, ReplyText
from rollout.text.interface import Tokenizer


class Function(Fields):
    """What a tool does, and the JSON schema of its arguments. strict: changes nothing, since only a
    call that is required follows its schema."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool = False


class ToolDefinition(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"})}


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that must be called, as the chat API names it."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True)
class Choice:
    """The tools that may be called, and whether one must be."""

    tools: Sequence[dict[str, Any]]
    must_call: bool = False


def choice_of(tools: Sequence[dict[str, Any]], choice: str, name: str | None = None) -> Choice:
    """Returns what may be called under `tool_choice`: none, auto, required, or a function of this
    name, which is required. Raises ApiError for a name that no tool has, and for a requirement
    without tools."""
    if name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise invalid("tool_choice", f"no tool has the name {name!r}")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "there are no tools to call")
    return Choice([] if choice == "none" else tools, choice == "required")


def reply_format(tokenizer: Tokenizer, *, calls: bool) -> ResponseTemplate | None:
    """Returns how the model writes replies; None: the text is the content. Raises ApiError if it
    may call tools in a format that is unknown."""
    template = response_template(tokenizer)
    if not calls:
        return None if template is None else without_calls(template)
    if template is None:
        message = "the chat template of this model has no calls of tools in a format that is known"
        raise invalid("tools", message, "unsupported_parameter")
    return template


@dataclass(frozen=True)
class Said:
    """A part of an answer: content, reasoning, or a call as OpenAI has it. Two are None."""

    content: str | None = None
    reasoning: str | None = None
    call: Mapping[str, Any] | None = None


@dataclass
class Reply:
    """Turns the text of one completion into the parts of an answer.

    reader: None where nothing can be called, and the text is the content. calls: how many there
    are by now.
    """

    reader: ReplyReader | None = None
    calls: int = 0
    parts: list[Said] = field(default_factory=list)

    def add(self, text: str, finish: str | None) -> list[Said]:
        """Returns the parts that a piece of text completes. finish: how the completion ended; None:
        it goes on."""
        if self.reader is None:
            new = [Said(content=text)] if text else []
        else:
            new = list(map(self._said, self.reader.feed(text)))
            if finish is not None:
                new += map(self._said, self.reader.finish(stopped=finish == "stop"))
        self.parts += new
        return new

    def _said(self, part: ReplyText | Call) -> Said:
        """Returns a piece of a reply as a part of the answer. A call of an unknown tool or with
        wrong arguments is a call, which the client refuses. What cannot be read, or names no tool,
        is content."""
        if isinstance(part, ReplyText):
            return Said(reasoning=part.text) if part.reasoning else Said(content=part.text)
        if part.status in ("not_json", "unclosed", "no_name") or part.name is None:
            return Said(content=part.text)  # the client sees what the model tried
        self.calls += 1
        arguments = json.dumps(part.arguments, ensure_ascii=False)
        function = {"name": part.name, "arguments": arguments}
        identity = f"call_{secrets.token_hex(12)}"
        return Said(call={"id": identity, "type": "function", "function": function})

    def finish_reason(self, finish: str | None) -> str | None:
        """Returns how the completion ended, in the words of OpenAI."""
        return "tool_calls" if finish == "stop" and self.calls else finish

    @property
    def content(self) -> str | None:
        """Returns the content; None where there are only calls."""
        text = _joined(part.content for part in self.parts)
        return None if not text and self.calls else text

    @property
    def reasoning(self) -> str:
        """Returns the reasoning."""
        return _joined(part.reasoning for part in self.parts)

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """Returns the calls."""
        return [part.call for part in self.parts if part.call is not None]


def _joined(texts: Iterable[str | None]) -> str:
    return "".join(text for text in texts if text is not None)


@dataclass(frozen=True)
class CallReading:
    """How the replies to a request are read. prefix: what the prompt has already written of the
    reply."""

    template: ResponseTemplate
    prefix: str
    tools: Sequence[Mapping[str, Any]]

    def reply(self) -> Reply:
        """Returns the reader of a completion."""
        return Reply(ReplyReader(self.template, self.prefix, self.tools))
