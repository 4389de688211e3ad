"""`/v1/completions`: OpenAI's API of completions, whose prompts are texts or token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Items, read_json
from rl.serve.errors import invalid
from rl.serve.logprobs import LegacyLogprobs
from rl.serve.protocol.chat import IGNORED, NEUTRAL, StreamedFields
from rl.serve.protocol.sse import openai_events, while_connected
from rl.serve.sampling import check_tokens, draw_numbers
from rl.serve.service import Generation, Service, TextUpdate, usage
from rollout.generator import EncodedPrompt
from rollout.text.chat import render_prompt
from rollout.text.interface import Tokenizer
from rollout.types import MOST_TOP_LOGPROBS

Ids = Annotated[Items[int], Field(min_length=1)]


class CompletionBody(StreamedFields):
    """The body of a request."""

    ignored = IGNORED
    neutral = NEUTRAL | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }
    prompt: str | Ids | Items[str] | Items[Ids]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

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
    body = CompletionBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    body.check_stream()
    generation = await while_connected(request, _generation(service, body))
    answer = _CompletionAnswer(service, body, generation)
    if body.stream:
        return openai_events(answer.events())
    return JSONResponse(await while_connected(request, answer.body()))


async def _generation(service: Service, body: CompletionBody) -> Generation:
    """Returns the completions of a request, before they start. Raises ApiError for one that the
    model or the server cannot answer."""
    if not body.prompts:
        raise invalid("prompt", "the list has no prompts")
    service.check_room(len(body.prompts) * min(body.n, service.limits.samples), "prompt")
    if lengths := [len(each) for each in body.prompts if not isinstance(each, str)]:
        service.check_length(max(lengths), max(1, body.max_tokens), "prompt")
    prompts = await service.with_tokenizer(
        lambda tokenizer: [_encoded(tokenizer, prompt) for prompt in body.prompts],
        "prompt",
    )
    for number, prompt in enumerate(prompts):
        check_tokens(f"prompt[{number}]", prompt.tokens, service.bounds.vocab_size)
    if not body.max_tokens and not body.echo:
        raise invalid("max_tokens", "must be at least 1 without `echo`")
    most = service.max_tokens(prompts, max(1, body.max_tokens), "prompt")
    params = body.params(service.bounds, most)
    scored = body.logprobs if body.echo else None
    params = replace(params, top_logprobs=body.logprobs, prompt_logprobs=scored)
    await service.check_params(params, body.constraint_field)
    draws = draw_numbers(body.seed, len(prompts))
    return service.generation(prompts, params, draws, model=body.model)


def _encoded(tokenizer: Tokenizer, prompt: str | list[int]) -> EncodedPrompt:
    ids = render_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    return EncodedPrompt(tuple(ids))


class _CompletionAnswer:
    """The answer to a request, at once or in events."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation):
        self._service = service
        self._body = body
        self._generation = generation
        self._common = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.name,
        }
        count = len(generation.job.requests)
        self._logprobs = [LegacyLogprobs(service.spelling) for _ in range(count)]
        self._started: set[int] = set()
        self._tokens = 0

    async def body(self) -> dict[str, Any]:
        """Returns the answer, once all completions have ended."""
        choices = [self._choice(each) for each in await self._generation.completions()]
        counts = usage(self._generation.prompt_tokens, self._tokens)
        return {**self._common, "choices": choices, "usage": counts}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer in pieces."""
        shows_tokens = self._body.return_token_ids or self._body.logprobs is not None
        async for update in self._generation.updates():
            starts = update.index not in self._started and self._body.echo
            if update.text or update.finish or shows_tokens or starts:
                yield self._chunk([self._choice(update)])
            else:
                self._tokens += len(update.tokens)
        if self._body.stream_options.include_usage:
            counts = usage(self._generation.prompt_tokens, self._tokens)
            yield self._chunk([]) | {"usage": counts}

    def _choice(self, update: TextUpdate) -> dict[str, Any]:
        """Returns what is new of a completion, with the prompt in front of its beginning if it is
        echoed. Without `max_tokens` the prompt is all."""
        text, tokens = update.text, update.tokens
        logprobs = self._logprobs[update.index]
        first = update.index not in self._started
        self._started.add(update.index)
        prompt = self._generation.prompt_ids(update.index)
        if not self._body.max_tokens:
            text, tokens = "", ()
        if first and self._body.echo:
            text = self._echoed(update.index, prompt) + text
            if update.new.prompt_scores is not None:
                logprobs.add(prompt, update.new.prompt_scores)
        if tokens and update.new.scores is not None:
            logprobs.add(tokens, update.new.scores)
        self._tokens += len(tokens)
        choice: dict[str, Any] = {
            "index": update.index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else logprobs.take(),
            "finish_reason": "length" if not self._body.max_tokens else update.finish,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(tokens)
            if first:
                choice["prompt_token_ids"] = prompt
        return choice

    def _echoed(self, index: int, prompt: list[int]) -> str:
        """Returns the text of a prompt: as the client wrote it, or that of its tokens."""
        written = self._body.prompts[index // self._body.n]
        return written if isinstance(written, str) else self._service.tokenizer.decode(prompt)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "choices": choices}
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk
