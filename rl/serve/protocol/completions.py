"""`/v1/completions`: OpenAI's API of completions, whose prompts are texts or token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import read_json
from rl.serve.errors import invalid
from rl.serve.protocol.chat import IGNORED, NEUTRAL, StreamOptions
from rl.serve.protocol.sse import openai_events, while_connected
from rl.serve.sampling import SamplingFields, draw_number
from rl.serve.service import Generation, Service, TextUpdate, usage
from rollout.generator import EncodedPrompt
from rollout.text.chat import render_prompt
from rollout.text.interface import Tokenizer

Ids = Annotated[list[int], Field(min_length=1)]


class CompletionBody(SamplingFields):
    """The body of a request."""

    ignored = IGNORED
    neutral = NEUTRAL | {
        "suffix": ("",),
        "add_special_tokens": (True,),
        "response_format": ({"type": "text"},),
        "echo": (False,),
        "logprobs": (),
    }
    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, one or several."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


async def completions(request: Request) -> Response:
    """Completes prompts."""
    service: Service = request.app.state.service
    body = CompletionBody.read(await read_json(request, service.limits.body))
    service.check_model(body.model)
    if not body.prompts:
        raise invalid("prompt", "the list has no prompts")
    prompts = await service.with_tokenizer(
        lambda tokenizer: [_encoded(tokenizer, prompt) for prompt in body.prompts]
    )
    most = service.max_tokens(prompts, body.max_tokens, "prompt")
    params = body.params(service.bounds, most)
    generation = service.generation(prompts, params, draw_number(body.seed))
    answer = _CompletionAnswer(service, body, generation)
    if body.stream:
        return openai_events(answer.events())
    return JSONResponse(await while_connected(request, answer.body()))


def _encoded(tokenizer: Tokenizer, prompt: str | list[int]) -> EncodedPrompt:
    ids = render_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    return EncodedPrompt(tuple(ids))


class _CompletionAnswer:
    """The answer to a request, at once or in events."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation):
        self._body = body
        self._generation = generation
        self._common = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    async def body(self) -> dict[str, Any]:
        """Returns the answer, once all completions have ended."""
        texts = await self._generation.completions()
        tokens = sum(len(each.tokens) for each in texts)
        counts = usage(self._generation.prompt_tokens, tokens)
        choices = [self._choice(each, first=True) for each in texts]
        return {**self._common, "choices": choices, "usage": counts}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer in pieces."""
        tokens = 0
        started: set[int] = set()
        async for update in self._generation.updates():
            tokens += len(update.tokens)
            if update.text or update.finish or self._body.return_token_ids:
                yield self._chunk([self._choice(update, first=update.index not in started)])
                started.add(update.index)
        if self._body.stream_options.include_usage:
            counts = usage(self._generation.prompt_tokens, tokens)
            yield self._chunk([]) | {"usage": counts}

    def _choice(self, update: TextUpdate, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": update.index,
            "text": update.text,
            "logprobs": None,
            "finish_reason": update.finish,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(update.tokens)
            if first:
                choice["prompt_token_ids"] = self._generation.prompt_ids(update.index)
        return choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "choices": choices}
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk
