"""`/v1/messages`: Anthropic's API, without state."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Body, Fields, Items, read_json
from rl.serve.protocol.conversations import (
    Conversation,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Message,
    TextPart,
    ToolCall,
    check_messages,
    encode_messages,
)
from rl.serve.protocol.questions import (
    Block,
    BlockAnswer,
    BlockEvent,
    Question,
    answering,
)
from rl.serve.protocol.sse import named_events, while_connected
from rl.serve.protocol.tools import Choice, Function, ToolDefinition, choice_of
from rl.serve.sampling import SamplingFields, StopString
from rl.serve.service import Service

_ROLES = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user", "image": "user"}
"""Whose messages have blocks of a type."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class _Cached(Fields):
    """A block that a client may want to be cached. Prefixes always are."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Cached):
    """A text. citations: must be empty."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] = []


class ImageSource(Fields):
    """The bytes of a picture."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Cached):
    """A picture."""

    type: Literal["image"]
    source: ImageSource

    @property
    def part(self) -> ImagePart:
        """Returns the picture as the chat API has it."""
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return ImagePart(type="image_url", image_url=ImageUrl(url=url))


class ToolUseBlock(_Cached):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Cached):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] = ""
    is_error: bool = False


class ThinkingBlock(Fields):
    """The reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


ContentBlock = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Fields):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> AnthropicMessage:
        for block in () if isinstance(self.content, str) else self.content:
            role = _ROLES.get(block.type)
            if role is not None and role != self.role:
                raise ValueError(f"a block {block.type} belongs to a message of {role}")
        return self


class AnthropicTool(_Cached):
    """A tool that the model may call. strict: as in `Function`."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoice(Fields):
    """Whether tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Literal[False] = False

    @model_validator(mode="after")
    def _name_of_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("`name` goes with the type `tool`, and with no other")
        return self


class OutputFormat(Fields):
    """What the text of an answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Options of an answer."""

    format: OutputFormat | None = None


class PromptBody(Body):
    """The fields that say what the prompt is."""

    ignored = frozenset({"metadata", "cache_control", "user_profile_id", "workspace_id"})
    neutral = {
        "thinking": ({"type": "disabled"},),
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "mcp_servers": ([],),
        "context_management": (),
        "inference_geo": (),
        "diagnostics": (),
        "speed": ("standard",),
    }
    model: str | None = None
    messages: Items[AnthropicMessage] = Field(min_length=1)
    system: str | Items[TextBlock] = ""
    tools: Items[AnthropicTool] = Field([], max_length=128)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None

    @property
    def conversation(self) -> Conversation:
        """Returns the messages as OpenAI has them."""
        system = _text(self.system)
        messages = [Message(role="system", content=system)] if system else []
        places = ["system"] * len(messages)
        for number, message in enumerate(self.messages):
            converted = _converted(message)
            messages += converted
            places += [f"messages[{number}]"] * len(converted)
        return Conversation(messages, places)

    @property
    def choice(self) -> Choice:
        """Returns the tools that the model may call."""
        choice = self.tool_choice
        kind = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
        return choice_of([_shown(tool) for tool in self.tools], kind, choice.name)


class MessagesBody(PromptBody):
    """The body of a request."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[StopString] = Field([], max_length=16)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)

    @property
    def constraint_field(self) -> str | None:
        """Returns the field that has the schema of the answer; None: there is none."""
        if self.output_config.format is not None:
            return "output_config.format"
        return None if self.output_format is None else "output_format"

    @property
    def sampling(self) -> SamplingFields:
        """Returns how tokens are drawn."""
        fields = self.model_dump(include={"model", "temperature", "top_p", "top_k"})
        form = self.output_config.format or self.output_format
        if form is not None:
            schema = {"schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return SamplingFields.model_validate(fields | {"stop": self.stop_sequences})


def _text(content: str | Sequence[Any]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _shown(tool: AnthropicTool) -> dict[str, Any]:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return ToolDefinition(type="function", function=function).shown


def _converted(message: AnthropicMessage) -> list[Message]:
    """Returns a message as OpenAI has it: each result of a tool is a message of its own, in front
    of what the user says."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results, parts, calls, thoughts = [], [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                parts.append(TextPart(type="text", text=block.text))
            case ImageBlock():
                parts.append(block.part)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = FunctionCall(name=block.name, arguments=json.dumps(block.input))
                calls.append(ToolCall(id=block.id, function=function))
            case ToolResultBlock():
                content = _text(block.content)
                text = f"Error: {content}" if block.is_error else content
                results.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
    if not (parts or calls or thoughts):
        return results
    said = Message(
        role=message.role,
        content=parts,
        tool_calls=calls,
        reasoning_content="".join(thoughts) or None,
    )
    return [*results, said]


async def messages(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    body = MessagesBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    conversation = body.conversation
    choice = body.choice
    question = Question(
        conversation,
        body.sampling,
        max_tokens=body.max_tokens,
        tools=choice.tools,
        must_call=choice.must_call,
        continued=conversation.is_continued,
        constraint_field=body.constraint_field,
    )
    begun = await while_connected(request, answering(service, question))
    answer = _MessagesAnswer(body.model or service.name, BlockAnswer(begun))
    if body.stream:
        return named_events(answer.events())
    return JSONResponse(await while_connected(request, answer.body()))


async def count_tokens(request: Request) -> Response:
    """Returns the tokens of a prompt."""
    service: Service = request.app.state.service
    body = PromptBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    conversation = body.conversation
    check_messages(conversation)
    tools = list(body.choice.tools)
    variables = {"tools": tools} if tools else {}
    rendered = await service.with_tokenizer(
        lambda tokenizer: encode_messages(
            tokenizer,
            conversation,
            variables,
            continued=conversation.is_continued,
            pictures=service.pictures,
        ),
        "messages",
    )
    return JSONResponse({"input_tokens": len(rendered.prompt.tokens)})


class _MessagesAnswer:
    """The answer to a request, at once or in events."""

    def __init__(self, name: str, answer: BlockAnswer):
        self._answer = answer
        self._name = name
        self._id = f"msg_{secrets.token_hex(12)}"

    async def body(self) -> dict[str, Any]:
        """Returns the answer, once it is complete."""
        await self._answer.run()
        return self._message([_block(block) for block in self._answer.blocks]) | self._end

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer in pieces."""
        yield {"type": "message_start", "message": self._message([])}
        async for event in self._answer.events():
            yield _event(event)
        counts = {"output_tokens": self._answer.tokens}
        yield {"type": "message_delta", "delta": self._end, "usage": counts}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._answer.prompt_tokens,
                "output_tokens": self._answer.tokens,
            },
        }

    @property
    def _end(self) -> dict[str, Any]:
        finish = self._answer.finish or ""
        stop = self._answer.stopped_by
        reason = _STOP_REASONS.get(finish, "end_turn" if stop is None else "stop_sequence")
        return {"stop_reason": reason, "stop_sequence": stop}


def _event(event: BlockEvent) -> dict[str, Any]:
    block = event.block
    match event.kind, block.kind:
        case "start", _:
            empty = Block(block.number, block.kind, call=block.call)
            start = {"type": "content_block_start", "content_block": _block(empty)}
            return {**start, "index": block.number}
        case "stop", _:
            return {"type": "content_block_stop", "index": block.number}
        case _, "call":
            delta = {"type": "input_json_delta", "partial_json": event.delta}
        case _, "reasoning":
            delta = {"type": "thinking_delta", "thinking": event.delta}
        case _:
            delta = {"type": "text_delta", "text": event.delta}
    return {"type": "content_block_delta", "index": block.number, "delta": delta}


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    name = block.call["function"]["name"]
    arguments = json.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.call["id"], "name": name, "input": arguments}
