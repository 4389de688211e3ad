"""Server-sent events, and answers that end when their client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from policy.json_types import JsonObject
from rl.serve.errors import ApiError

T = TypeVar("T")


class ClientGone(Exception):
    """The client of a request has closed its connection."""


def openai_events(events: AsyncIterator[JsonObject]) -> StreamingResponse:
    """Returns events as OpenAI streams them: `data` alone, and `[DONE]` at the end."""

    async def lines() -> AsyncIterator[str]:
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    yield f"data: {_text(event)}\n\n"
        except ApiError as error:
            yield f"data: {_text(error.openai)}\n\n"
        yield "data: [DONE]\n\n"

    return _streaming(lines())


def named_events(events: AsyncIterator[JsonObject]) -> StreamingResponse:
    """Returns events with the field `type` as their names, as Anthropic and the Responses API
    stream them. An error has the form of Anthropic; Responses have events of their own for it."""

    async def lines() -> AsyncIterator[str]:
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    yield f"event: {event['type']}\ndata: {_text(event)}\n\n"
        except ApiError as error:
            yield f"event: error\ndata: {_text(error.anthropic)}\n\n"

    return _streaming(lines())


def _streaming(lines: AsyncIterator[str]) -> StreamingResponse:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(lines, media_type="text/event-stream", headers=headers)


def _text(event: JsonObject) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientGone if the client goes away
    before; the body of the request must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
