"""`/v1/chat/completions`: OpenAI's chat API."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Fields, read_json
from rl.serve.errors import invalid
from rl.serve.protocol.conversations import Message, check_messages, encode_messages
from rl.serve.protocol.sse import openai_events, while_connected
from rl.serve.sampling import SamplingFields, draw_number
from rl.serve.service import Generation, Service, TextUpdate, usage

IGNORED = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
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
    """Options of a stream. include_usage: a last event has the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class ChatBody(SamplingFields):
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
        "functions": ([],),
        "function_call": ("none",),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "response_format": ({"type": "text"},),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    body = ChatBody.read(await read_json(request, service.limits.body))
    service.check_model(body.model)
    check_messages(body.messages)
    _check_variables(body.chat_template_kwargs)
    prompt = await service.with_tokenizer(
        lambda tokenizer: encode_messages(tokenizer, body.messages, body.chat_template_kwargs)
    )
    requested = body.max_completion_tokens or body.max_tokens
    most = service.max_tokens([prompt], requested, "messages")
    params = body.params(service.bounds, most)
    generation = service.generation([prompt], params, draw_number(body.seed))
    answer = _ChatAnswer(service, body, generation)
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

    def __init__(self, service: Service, body: ChatBody, generation: Generation):
        self._body = body
        self._generation = generation
        self._common = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.name,
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
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish,
        }
        return choice | self._token_ids(completion)

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
            delta = {"content": update.text} if update.text else {}
            if delta or update.finish or self._body.return_token_ids:
                event = self._event(update.index, delta, update.finish)
                event["choices"][0] |= self._token_ids(update)
                yield event
        if self._body.stream_options.include_usage:
            counts = usage(self._generation.prompt_tokens, tokens)
            yield self._chunk([]) | {"usage": counts}

    def _event(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": choices}
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk
