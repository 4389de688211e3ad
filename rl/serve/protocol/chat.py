"""`/v1/chat/completions`: OpenAI's chat API."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Fields, Items, read_json
from rl.serve.errors import invalid
from rl.serve.logprobs import chat_logprobs
from rl.serve.protocol.conversations import Conversation, Message
from rl.serve.protocol.questions import Answering, Question, answering
from rl.serve.protocol.sse import openai_events, while_connected
from rl.serve.protocol.tools import Choice, NamedTool, Said, ToolDefinition, choice_of
from rl.serve.sampling import SamplingFields
from rl.serve.service import Service, TextUpdate, usage
from rollout.types import MOST_TOP_LOGPROBS

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""Fields of OpenAI that name the user or the request."""
NEUTRAL = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "length_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "priority": (0,),
}
"""Fields of OpenAI and vLLM that Duet has no use for, with the values that ask for nothing."""


class StreamOptions(Fields):
    """Options of a stream. include_usage: a last event has the counts of tokens, the only one that
    has them."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class StreamedFields(SamplingFields):
    """The fields that chat and completions share."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    def check_stream(self) -> None:
        """Raises ApiError for options of a stream where there is none."""
        if not self.stream and "stream_options" in self.model_fields_set:
            raise invalid("stream_options", "needs `stream: true`")


class ChatBody(StreamedFields):
    """The body of a request."""

    ignored = IGNORED
    neutral = NEUTRAL | {
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "functions": ([],),
        "function_call": ("none",),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "echo": (False,),
    }
    messages: Items[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    tools: Items[ToolDefinition] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"

    @property
    def choice(self) -> Choice:
        """Returns the tools that the model may call."""
        tools = [tool.shown for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            return choice_of(tools, "required", self.tool_choice.function.name)
        return choice_of(tools, self.tool_choice)


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    body = ChatBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    body.check_stream()
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs `logprobs: true`")
    _check_variables(body.chat_template_kwargs)
    choice = body.choice
    question = Question(
        Conversation.of(body.messages),
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        tools=choice.tools,
        must_call=choice.must_call,
        variables=body.chat_template_kwargs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
    )
    begun = await while_connected(request, answering(service, question))
    answer = _ChatAnswer(service, body, begun)
    if body.stream:
        return openai_events(answer.events())
    return JSONResponse(await while_connected(request, answer.body()))


def _check_variables(variables: dict[str, Any]) -> None:
    """Raises ApiError for variables of the template that other fields have."""
    reserved = {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"}
    for name in variables:
        if name in reserved or not name.isidentifier():
            raise invalid(f"chat_template_kwargs.{name}", "this name is reserved")


class _ChatAnswer:
    """The answer to a request, at once or in events."""

    def __init__(self, service: Service, body: ChatBody, answering: Answering):
        self._body = body
        self._generation = answering.generation
        self._replies = answering.replies
        self._spelling = service.spelling
        self._common = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or service.name,
        }

    async def body(self) -> dict[str, Any]:
        """Returns the answer, once all completions have ended."""
        completions = await self._generation.completions()
        tokens = sum(len(each.tokens) for each in completions)
        answer: dict[str, Any] = {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(each) for each in completions],
            "usage": usage(self._generation.prompt_tokens, tokens),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._generation.prompt_ids(0)
        return answer

    def _choice(self, completion: TextUpdate) -> dict[str, Any]:
        reply = self._replies[completion.index]
        reply.add(completion.text, completion.finish)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = reply.tool_calls
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": reply.finish_reason(completion.finish),
        }
        return choice | self._token_ids(completion)

    def _logprobs(self, update: TextUpdate) -> dict[str, Any] | None:
        if update.new.scores is None:
            return None
        return chat_logprobs(self._spelling, update.tokens, update.new.scores)

    def _token_ids(self, update: TextUpdate) -> dict[str, Any]:
        return {"token_ids": list(update.tokens)} if self._body.return_token_ids else {}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer in pieces."""
        count = len(self._generation.job.requests)
        for index in range(count):
            event = self._event(index, {"role": "assistant", "content": ""}, None)
            if self._body.return_token_ids:
                event["prompt_token_ids"] = self._generation.prompt_ids(0)
            yield event
        tokens = 0
        async for update in self._generation.updates():
            tokens += len(update.tokens)
            for event in self._events_of(update):
                yield event
        if self._body.stream_options.include_usage:
            counts = usage(self._generation.prompt_tokens, tokens)
            yield self._chunk([]) | {"usage": counts}

    def _events_of(self, update: TextUpdate) -> list[dict[str, Any]]:
        """Returns an event for each new part of a completion, the last one with its tokens and its
        end."""
        reply = self._replies[update.index]
        before = reply.calls
        deltas = []
        for part in reply.add(update.text, update.finish):
            deltas.append(_delta(part, before))
            before += part.call is not None
        shows_tokens = self._body.return_token_ids or self._body.logprobs
        if not deltas and (update.finish or shows_tokens):
            deltas.append({})
        events = [self._event(update.index, delta, None) for delta in deltas]
        if events:
            choice = events[-1]["choices"][0]
            choice["finish_reason"] = reply.finish_reason(update.finish)
            choice["logprobs"] = self._logprobs(update)
            choice |= self._token_ids(update)
        return events

    def _event(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": choices}
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk


def _delta(part: Said, number: int) -> dict[str, Any]:
    """Returns a part of a reply as the `delta` of an event. number: that of the call, if it is
    one."""
    if part.call is not None:
        return {"tool_calls": [{"index": number, **part.call}]}
    if part.reasoning is not None:
        return {"reasoning_content": part.reasoning}
    return {"content": part.content}
