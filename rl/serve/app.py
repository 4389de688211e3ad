"""The routes of the server, and who may use them."""

from __future__ import annotations

import hmac

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.listener import names_server, origin_names_server
from rl.serve.errors import ApiError
from rl.serve.protocol.chat import chat_completions
from rl.serve.protocol.completions import completions
from rl.serve.protocol.messages import count_tokens, messages
from rl.serve.protocol.models import model, models
from rl.serve.protocol.responses import responses
from rl.serve.protocol.sse import ClientGone
from rl.serve.protocol.tokens import detokenize, tokenize, tokenizer_info
from rl.serve.service import Service

_OPEN = frozenset({"/health"})
"""Paths that need no token."""
_STATUS_CLIENT_GONE = 499
_CLOSE = {"connection": "close"}
_RETRY = {"retry-after": "1"}
_ERROR_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: _CLOSE,  # the rest of the body is not read
    413: _CLOSE,
    429: _RETRY,
    503: _RETRY,
}


def application(service: Service, host: str, token: str | None) -> ASGIApp:
    """Returns the server as an ASGI application. host: the address that it listens on. token: what
    requests must have as their key; None: nobody else reaches the server."""

    async def health(request: Request) -> Response:
        ends = service.draining or service.engine.ended
        return Response(status_code=503 if ends else 200)

    async def metrics(request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), headers={"content-type": kind})

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientGone: _client_gone,
        ClientDisconnect: _client_gone,
        RecursionError: _nested_too_deep,
        Exception: _internal_error,
    }
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.state.service = service
    paths = {route.path for route in routes}
    return _Guard(inner, service, host, token, paths)


class _Guard:
    """Refuses requests of others and those that come while the server ends, and counts answers."""

    def __init__(
        self, inner: ASGIApp, service: Service, host: str, token: str | None, paths: set[str]
    ):
        self._inner = inner
        self._service = service
        self._host = host
        self._token = None if token is None else token.encode()
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        refusal = self._refusal(scope["method"], path, dict(scope["headers"]))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = path if path in self._paths else "other"
                self._service.metrics.answered(name, message["status"])
                if self._service.draining:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        answer = self._inner if refusal is None else error_response(path, refusal)
        self._service.active += 1
        try:
            await answer(scope, receive, counted)
        finally:
            self._service.active -= 1

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if path in _OPEN:
            return None
        if self._token is None:
            if (refusal := _of_another_site(method, headers, self._host)) is not None:
                return refusal
        elif not hmac.compare_digest(_key(headers), self._token):
            message = "wrong or missing key; send `Authorization: Bearer KEY`"
            return ApiError(401, message, None, "invalid_api_key")
        if self._service.draining:
            return ApiError(503, "the server ends; try another one", None, "draining")
        return None


def _of_another_site(method: str, headers: dict[bytes, bytes], host: str) -> ApiError | None:
    """Returns the refusal of a request that a page of another site may have sent from a browser of
    this machine, to a server without a key."""
    # Such a page could name this address as its own (DNS rebinding).
    if not names_server(headers.get(b"host", b"").decode("latin-1"), host):
        return ApiError(403, "the Host header does not name this server", None, "wrong_host")
    origin = headers.get(b"origin")
    if origin is not None and not origin_names_server(origin.decode("latin-1"), host):
        return ApiError(403, "the Origin header names another site", None, "wrong_origin")
    # Browsers send other types to any server, and ask before they send JSON to another one.
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
    if method == "POST" and kind.strip().lower() != "application/json":
        message = "without a key a request needs the header `content-type: application/json`"
        return ApiError(415, message, None, "wrong_content_type")
    return None


def _key(headers: dict[bytes, bytes]) -> bytes:
    """Returns the key of a request, as clients of OpenAI or of Anthropic send it."""
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def error_response(path: str, error: ApiError) -> Response:
    """Returns an error in the form that clients of this path read."""
    body = error.anthropic if path.startswith("/v1/messages") else error.openai
    return JSONResponse(body, error.status, _ERROR_HEADERS.get(error.status))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.url.path, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers for a path or a method that the server does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{request.method} {path}: {error.detail}"
    code = "unknown_url" if error.status_code == 404 else None
    response = error_response(path, ApiError(error.status_code, text, None, code))
    response.headers.update(error.headers or {})
    return response


async def _nested_too_deep(request: Request, error: Exception) -> Response:
    """Answers for a body that could be read, but whose fields cannot be followed to their ends."""
    problem = ApiError(400, "the body is nested too deep", None, "invalid_json")
    return error_response(request.url.path, problem)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_STATUS_CLIENT_GONE)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, ApiError(500, "the server failed", None, "bug"))
