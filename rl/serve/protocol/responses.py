"""`/v1/responses`: OpenAI's Responses API, without state: each request has its full
conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Fields, Items, read_json
from rl.serve.errors import ApiError, invalid
from rl.serve.protocol.chat import IGNORED
from rl.serve.protocol.conversations import (
    Conversation,
    FunctionCall,
    InputImage,
    Message,
    TextPart,
    ToolCall,
)
from rl.serve.protocol.questions import Block, BlockAnswer, BlockEvent, Question, answering
from rl.serve.protocol.sse import named_events, while_connected
from rl.serve.protocol.tools import Choice, Function, ToolDefinition, choice_of
from rl.serve.sampling import JsonSchema, ResponseFormat, SamplingFields
from rl.serve.service import Service


class _Item(Fields):
    """An item of the input. Items of earlier answers have an id and a status."""

    id: str | None = None
    status: str | None = None


class OutputText(Fields):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = []
    logprobs: Items[Any] = []


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart | OutputText | InputImage]
    phase: str | None = None


class CallItem(_Item):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class ResultItem(_Item):
    """What a tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[TextPart]


class ReasoningText(Fields):
    """A text of a reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = []
    content: Items[ReasoningText] = []


class ResponseTool(Fields):
    """A tool that the model may call. strict: as in `Function`."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool = False

    @property
    def shown(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters
        )
        return ToolDefinition(type="function", function=function).shown


class NamedResponseTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Fields):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = True


class TextOptions(Fields):
    """Options of the text of an answer."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ResponsesBody(SamplingFields):
    """The body of a request."""

    ignored = IGNORED
    neutral = {
        "n": (1,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "store": (False,),
        "background": (False,),
        "include": ([],),
        "reasoning": ({},),
        "truncation": ("disabled",),
        "parallel_tool_calls": (True,),
        "service_tier": ("auto", "default"),
        "stream_options": (),
        "top_logprobs": (0,),
        "max_tool_calls": (),
    }
    input: str | Items[MessageItem | CallItem | ResultItem | ReasoningItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    tools: Items[ResponseTool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool = "auto"
    text: TextOptions = TextOptions()

    @property
    def choice(self) -> Choice:
        """Returns the tools that the model may call."""
        tools = [tool.shown for tool in self.tools]
        if isinstance(self.tool_choice, NamedResponseTool):
            return choice_of(tools, "required", self.tool_choice.name)
        return choice_of(tools, self.tool_choice)

    @property
    def constrained(self) -> SamplingFields:
        """Returns how tokens are drawn, with the format of the text."""
        form = self.text.format
        if form.type == "text":
            return self
        if self.constraint is not None:
            raise invalid("text.format", "the answer has another constraint already")
        schema = JsonSchema(schema=form.schema_ or {}) if form.type == "json_schema" else None
        return self.model_copy(
            update={"response_format": ResponseFormat(type=form.type, json_schema=schema)}
        )

    @property
    def conversation(self) -> Conversation:
        """Returns the conversation as the chat API has it."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        places = ["instructions"] * len(first)
        if isinstance(self.input, str):
            user = Message(role="user", content=self.input)
            return Conversation([*first, user], [*places, "input"], "input")
        rest = _conversation(self.input)
        return Conversation([*first, *rest.messages], [*places, *rest.places], "input")


def _conversation(items: Sequence[Any]) -> Conversation:
    """Returns items as messages: reasoning, text and calls of one turn are one message, whose place
    is that of its last item."""
    messages: list[Message] = []
    places: list[str] = []
    turn: dict[str, Any] = {}

    def add(message: Message, number: int) -> None:
        messages.append(message)
        places.append(f"input[{number}]")

    def end_turn(number: int) -> None:
        if turn:
            add(Message(role="assistant", **{"content": "", **turn}), number - 1)
            turn.clear()

    for number, item in enumerate(items):
        match item:
            case ReasoningItem():
                if "content" in turn or "tool_calls" in turn:
                    end_turn(number)
                turn["reasoning_content"] = _joined(item.content or item.summary)
            case CallItem():
                function = FunctionCall(name=item.name, arguments=item.arguments)
                calls = turn.setdefault("tool_calls", [])
                calls.append(ToolCall(id=item.call_id, function=function))
            case MessageItem(role="assistant"):
                turn["content"] = turn.get("content", "") + _joined(item.content)
            case ResultItem():
                end_turn(number)
                text = _joined(item.output)
                add(Message(role="tool", content=text, tool_call_id=item.call_id), number)
            case _:
                end_turn(number)
                add(Message(role=item.role, content=_content(item.content)), number)
    end_turn(len(items))
    return Conversation(messages, places)


def _content(parts: str | Sequence[Any]) -> str | list[Any]:
    """Returns a content with its pictures as the chat API has it."""
    if isinstance(parts, str):
        return parts
    return [
        part if isinstance(part, InputImage) else TextPart(type="text", text=part.text)
        for part in parts
    ]


def _joined(parts: str | Sequence[Any]) -> str:
    return parts if isinstance(parts, str) else "".join(getattr(part, "text", "") for part in parts)


async def responses(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    body = ResponsesBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    choice = body.choice
    question = Question(
        body.conversation,
        body.constrained,
        max_tokens=body.max_output_tokens,
        tools=choice.tools,
        must_call=choice.must_call,
        constraint_field=None if body.text.format.type == "text" else "text.format",
    )
    begun = await while_connected(request, answering(service, question))
    answer = _ResponsesAnswer(service, body, BlockAnswer(begun))
    if body.stream:
        return named_events(answer.events())
    return JSONResponse(await while_connected(request, answer.body()))


class _ResponsesAnswer:
    """The answer to a request, at once or in events."""

    def __init__(self, service: Service, body: ResponsesBody, answer: BlockAnswer):
        self._answer = answer
        self._body = body
        self._name = body.model or service.name
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = time.time()
        self._items: list[str] = []

    async def body(self) -> dict[str, Any]:
        """Returns the answer, once it is complete."""
        await self._answer.run()
        return self._response()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer in pieces, which are numbered. The last one of an answer that failed is
        its error."""
        number = 0
        try:
            async for event in self._unnumbered():
                yield {**event, "sequence_number": number}
                number += 1
        except ApiError as error:
            fields = {"code": error.code, "message": error.message, "param": error.param}
            yield {"type": "error", **fields, "sequence_number": number}

    async def _unnumbered(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self._response()}
        yield {"type": "response.in_progress", "response": self._response()}
        async for event in self._answer.events():
            for each in self._events_of(event):
                yield each
        response = self._response()
        yield {"type": f"response.{response['status']}", "response": response}

    def _events_of(self, event: BlockEvent) -> list[dict[str, Any]]:
        block = event.block
        place = {"output_index": block.number, "item_id": self._item_id(block)}
        part = place | {"content_index": 0}
        name = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind, "")
        more = {"logprobs": []} if block.kind == "text" else {}
        if event.kind == "start":
            empty = Block(block.number, block.kind, call=block.call)
            item = self._item(empty, "in_progress")
            events = [{**_indexed(place), "type": "response.output_item.added", "item": item}]
            if block.kind == "text":
                added = {"type": "response.content_part.added", "part": _text_part("")}
                events.append({**part, **added})
            return events
        if event.kind == "delta":
            if block.kind == "call":
                kind = "response.function_call_arguments.delta"
                return [{**place, "type": kind, "delta": event.delta}]
            return [{**part, "type": f"response.{name}.delta", "delta": event.delta, **more}]
        item = self._item(block, "completed")
        done = {**_indexed(place), "type": "response.output_item.done", "item": item}
        if block.kind == "call":
            ended = {
                "type": "response.function_call_arguments.done",
                "name": block.call["function"]["name"],
                "arguments": block.text,
            }
            return [{**place, **ended}, done]
        events = [{**part, "type": f"response.{name}.done", "text": block.text, **more}]
        if block.kind == "text":
            ended = {"type": "response.content_part.done", "part": _text_part(block.text)}
            events.append({**part, **ended})
        return [*events, done]

    def _item_id(self, block: Block) -> str:
        while len(self._items) <= block.number:
            self._items.append(secrets.token_hex(12))
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._items[block.number]}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        empty = status == "in_progress"
        if block.kind == "text":
            content = [] if empty else [_text_part(block.text)]
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "reasoning":
            texts = [] if empty else [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": texts}
        return item | {
            "type": "function_call",
            "call_id": block.call["id"],
            "name": block.call["function"]["name"],
            "arguments": block.text,
        }

    def _response(self) -> dict[str, Any]:
        finish = self._answer.finish
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        cut = {"reason": "max_output_tokens"} if finish == "length" else None
        output = [self._item(block, "completed") for block in self._answer.blocks]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "metadata": {},
            "model": self._name,
            "output": output if finish else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self._body.temperature,
            "text": self._body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": self._choice,
            "tools": [tool.model_dump() for tool in self._body.tools],
            "top_p": self._body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finish else None,
        }

    @property
    def _choice(self) -> Any:
        choice = self._body.tool_choice
        return choice if isinstance(choice, str) else choice.model_dump()

    def _usage(self) -> dict[str, Any]:
        prompt, tokens = self._answer.prompt_tokens, self._answer.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }


def _indexed(place: Mapping[str, Any]) -> dict[str, Any]:
    return {"output_index": place["output_index"]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
