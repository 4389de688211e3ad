"""Messages of a chat, and their prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Annotated, Any, Literal

from pydantic import Field

from rl.serve.bodies import Fields, Items
from rl.serve.errors import invalid
from rl.serve.pictures import Pictures, picture_of
from rollout.generator import EncodedPrompt
from rollout.media.expand import Expanded, expand
from rollout.media.reference import Reference
from rollout.text.chat import (
    ChatError,
    check_one_beginning,
    render_prompt,
    render_text,
    with_variables,
)
from rollout.text.interface import Tokenizer


class TextPart(Fields):
    """A part of a content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(Fields):
    """Where a picture is: a data URL. detail: the model reads every picture in its own size."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Fields):
    """A picture in a content of the chat API."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def url(self) -> str:
        """Returns the data URL."""
        return self.image_url.url


class InputImage(Fields):
    """A picture in a content of the Responses API."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def url(self) -> str:
        """Returns the data URL."""
        return self.image_url


ContentPart = Annotated[TextPart | ImagePart | InputImage, Field(discriminator="type")]


class FunctionCall(Fields):
    """The function that a call names, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call of a tool in a turn of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a conversation. Fields that clients copy from an answer and that have no text
    (`refusal`, `annotations`) are accepted where they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Literal[""] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []

    @property
    def text(self) -> str | None:
        """Returns the texts of the parts; None without a content."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def urls(self) -> list[str]:
        """Returns the addresses of the pictures."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        return [part.url for part in parts if not isinstance(part, TextPart)]

    @property
    def shown_content(self) -> str | list[dict[str, str]]:
        """Returns the content as chat templates read it: a text, or parts if there are pictures."""
        if self.content is None or isinstance(self.content, str) or not self.urls:
            return self.text or ""
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]


@dataclass(frozen=True)
class Conversation:
    """Messages, and where each of them stands in the body of the request, such as "messages[0]".

    param: the field that has all of them, or most.
    """

    messages: Sequence[Message]
    places: Sequence[str]
    param: str = "messages"

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """Returns the conversation of the field `messages`."""
        return cls(messages, [f"messages[{number}]" for number in range(len(messages))])

    @property
    def is_continued(self) -> bool:
        """Returns whether the last message is the beginning of the answer."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def __iter__(self) -> Iterator[tuple[Message, str]]:
        return zip(self.messages, self.places, strict=True)


def check_messages(conversation: Conversation) -> None:
    """Raises ApiError for a message that lacks what its role needs."""
    for message, place in conversation:
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"{place}.tool_calls", f"a message of {message.role} calls no tools")
        if message.content is None and not message.tool_calls:
            missing = "missing_required_parameter"
            raise invalid(f"{place}.content", "this message needs a content", missing)


def for_template(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a message as chat templates read it: arguments of calls as objects, `developer` as
    `system` where the template does not know it."""
    role = message.role
    if role == "developer" and "developer" not in str(tokenizer.chat_template):
        role = "system"
    shown: dict[str, Any] = {"role": role, "content": message.shown_content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    return shown


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, and what it has already written of the reply (`<think>`, for instance). expanded:
    its pictures; None: it is text."""

    prompt: EncodedPrompt
    prefix: str
    expanded: Expanded | None = None


def encode_messages(
    tokenizer: Tokenizer,
    conversation: Conversation,
    variables: Mapping[str, Any],
    *,
    continued: bool = False,
    pictures: Pictures | None = None,
) -> RenderedPrompt:
    """Returns the prompt that the chat template writes for messages. variables: those of the
    template besides the messages. continued: the model goes on with the last message. pictures:
    what reads them; None: the model reads texts only. Raises ChatError if the template refuses the
    messages, MediaError and ApiError for pictures that the model cannot read."""
    references = _references(conversation, pictures)
    shown = [for_template(message, tokenizer) for message in conversation.messages]
    if continued:
        variables = {**variables, "continue_final_message": True}
    if variables:
        tokenizer = with_variables(tokenizer, **variables)
    rendering = _Rendering(tokenizer, references, pictures, begins=not continued)
    try:
        return rendering.prompt(shown)
    except ChatError:
        texts = _with_arguments_as_texts(shown)
        if texts == shown:
            raise
    return rendering.prompt(texts)


def _references(conversation: Conversation, pictures: Pictures | None) -> list[Reference]:
    """Returns the pictures of a conversation. Raises ApiError for those that the model cannot
    read."""
    urls = [(url, f"{place}.content") for message, place in conversation for url in message.urls]
    if not urls:
        return []
    if pictures is None:
        raise invalid(urls[0][1], "this model reads no pictures")
    references = [picture_of(url, place) for url, place in urls]
    pictures.check(references)
    return references


@dataclass(frozen=True)
class _Rendering:
    """How messages become a prompt. references: the pictures among them. begins: the answer is a
    message of its own; else it goes on with the last one."""

    tokenizer: Tokenizer
    references: Sequence[Reference]
    pictures: Pictures | None
    begins: bool

    def prompt(self, messages: Sequence[dict[str, Any]]) -> RenderedPrompt:
        """Returns the prompt. Raises ChatError and MediaError."""
        prefix = self._prefix(messages) if self.begins else ""
        if self.pictures is None or not self.references:
            ids = render_prompt(self.tokenizer, messages, add_generation_prompt=self.begins)
            return RenderedPrompt(EncodedPrompt(tuple(ids)), prefix)
        processors = self.pictures.processors
        expanded = expand(self.tokenizer, messages, self.references, processors, self.begins)
        ids = expanded.tokens.tolist()
        check_one_beginning(self.tokenizer, ids[:2])
        return RenderedPrompt(EncodedPrompt(tuple(ids)), prefix, expanded)

    def _prefix(self, messages: Sequence[dict[str, Any]]) -> str:
        """Returns what the template writes of the answer."""
        text = render_text(self.tokenizer, messages, True)
        common = commonprefix([text, render_text(self.tokenizer, messages, False)])
        return text[len(common) :]


def _with_arguments_as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with the arguments of calls as JSON, which some templates (DeepSeek) add to
    other texts."""

    def call(each: dict[str, Any]) -> dict[str, Any]:
        arguments = each["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return {**each, "function": {**each["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [call(each) for each in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
