"""Serves the page of `rl view` and what it reads: /api/run, samples, sample, groups, events as
JSON, and the files of /api/media by digest.

Every answer of /api needs the token as a header, so that no other page and no other user reads the
samples. A Host header that does not name this server is refused (DNS rebinding), no other origin is
allowed, and the policy of the page lets it load its own script and style only.
"""

from __future__ import annotations

import hmac
import json
import os
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.errors import ConfigError
from rl.listener import names_server
from rl.records import thumbnails
from rl.records.run_files import EVENTS
from rl.views.viewer import records, search
from rl.views.viewer.index import Index
from rl.views.viewer.tokens import TokenTexts

PAGE = 50
TOKEN_HEADER = "x-duet-token"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: "
    "blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {"viewer.js": "text/javascript", "viewer.css": "text/css"}
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
_EVENTS = 1 << 20  # bytes of events.jsonl in one answer
_SLICE = 0.2  # seconds of indexing before a request may pass
_PAUSE = 1.0  # seconds between looks at a complete index


class Viewer:
    """The samples of a run, indexed by a thread of its own while requests are answered."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.index = Index(directory)
        self.texts = TokenTexts(directory)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._result: tuple[tuple[str, str | None, int], np.ndarray] | None = None

    def __enter__(self) -> Viewer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def about(self) -> dict[str, object]:
        """Returns the name of the run, what its filters may name, and how much is indexed."""
        with self._lock:
            index = self.index
            return {
                "name": self.directory.resolve().name,
                "total": index.total,
                "pending": index.pending,
                "damaged": index.damaged,
                "generation": index.generation,
                "functions": index.functions,
                **{kind: index.names[kind] for kind in ("stage", "finish", "fault")},
            }

    def samples(self, text: str, after: str | None, sort: str | None) -> dict[str, object]:
        """Returns a page of the samples that meet a filter: those behind the sample `after`.

        Raises FilterError, and LookupError if `after` is no longer among them.
        """
        with self._lock:
            rows = self._matching(text, sort)
            start = 0
            if after:
                last = search.place(self.index, after)
                numbers = [] if last is None else np.flatnonzero(rows == last.numbers.id)
                if not len(numbers):
                    raise LookupError(after)
                start = int(numbers[0]) + 1
            items = []
            for place in search.places(self.index, rows[start : start + PAGE]):
                try:
                    items.append(records.listed(self.index, place))
                except (
                    OSError,
                    ValueError,
                ):  # the run truncates its file; the next refresh sees it
                    continue
            more = start + PAGE < len(rows) and bool(items)
            return {
                "matches": len(rows),
                "total": self.index.total,
                "pending": self.index.pending,
                "generation": self.index.generation,
                "items": items,
                "next": items[-1]["id"] if more else None,
            }

    def sample(self, name: str) -> records.FullSample:
        """Returns everything about a sample. Raises LookupError if there is none of this id."""
        with self._lock:
            place = search.place(self.index, name)
            if place is None:
                raise LookupError(name)
            try:
                sample = records.full(self.index, place)
            except (OSError, ValueError):
                raise LookupError(name) from None
        return records.with_texts(sample, self.texts)

    def group(self, prompt: int, stage: str | None, step: int | None) -> dict[str, object]:
        """Returns the completions of a prompt."""
        text = (
            f"prompt:{prompt}"
            + (f" step:{step}" if step is not None else "")
            + (f" stage:{stage}" if stage else "")
        )
        with self._lock:
            rows = self._matching(text, None)[::-1]
            return {
                "items": [
                    records.short(self.index, each)
                    for each in search.places(self.index, rows[:500])
                ]
            }

    def events(self, after: int) -> dict[str, object]:
        """Returns the lines of events.jsonl from a byte on, and the byte from which to ask next.

        Begins anew behind the end of the file: a run that continues truncates it.
        """
        try:
            with (self.directory / EVENTS).open("rb") as file:
                after = after if after <= os.fstat(file.fileno()).st_size else 0
                file.seek(after)
                data = file.read(_EVENTS)
                if len(data) == _EVENTS and b"\n" not in data:
                    data += file.readline()
        except OSError:
            data = b""
        data = data[: data.rfind(b"\n") + 1]
        lines = []
        for line in data.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return {"events": lines, "next": after + len(data)}

    def _matching(self, text: str, sort: str | None) -> np.ndarray:
        key = (text, sort, self.index.generation)
        if self._result is None or self._result[0] != key:
            self._result = key, search.search(self.index, text, sort)
        return self._result[1]

    def _follow(self) -> None:
        saved = -1
        while not self._ended.is_set():
            with self._lock:
                complete = self.index.refresh(_SLICE)
                total = self.index.total
                # A long run writes its index less often, as it is written anew each time.
                due = complete and (saved < 0 or abs(total - saved) > max(1000, total // 100))
                image = self.index.image() if due else None
            if image is not None:
                self.index.write(image)
                saved = total
            self._ended.wait(_PAUSE if complete else 0.001)


def application(viewer: Viewer, token: str, host: str) -> ASGIApp:
    """Returns the server as an ASGI application. host: the address that it listens on."""

    def run(request: Request) -> Response:
        return JSONResponse(viewer.about())

    def samples(request: Request) -> Response:
        asked = request.query_params
        sort = asked.get("sort") or None
        if sort is not None and sort not in search.SORTS:
            return _error(400, f"sort={sort}: write one of {', '.join(search.SORTS)}")
        try:
            return JSONResponse(viewer.samples(asked.get("q", ""), asked.get("after"), sort))
        except ConfigError as error:
            return _error(400, str(error))
        except LookupError:
            return _error(
                404,
                f"after={asked.get('after')}: no longer among the samples; start at the first page",
            )

    def sample(request: Request) -> Response:
        try:
            return JSONResponse(viewer.sample(request.path_params["id"]))
        except LookupError:
            return _error(
                404,
                f"no sample {request.path_params['id']}; the run may have removed it when it "
                "continued",
            )

    def groups(request: Request) -> Response:
        asked = request.query_params
        step = asked.get("step")
        if step is not None and not step.isdecimal():
            return _error(400, f"step={step}: not a number")
        try:
            return JSONResponse(
                viewer.group(
                    request.path_params["prompt"], asked.get("stage"), int(step) if step else None
                )
            )
        except ConfigError as error:
            return _error(400, str(error))

    def events(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        return JSONResponse(viewer.events(int(after) if after.isdecimal() else 0))

    def media(request: Request) -> Response:
        digest = request.path_params["digest"]
        thumbnail = thumbnails.read(viewer.directory, digest)
        if thumbnail is None:
            return _error(404, f"no thumbnail of the picture {digest[:64]}")
        return Response(thumbnail.content, media_type=thumbnail.kind)

    routes = [
        *(Route(f"/{name}", _file(name, kind)) for name, kind in FILES.items()),
        Route("/", _file("viewer.html", "text/html")),
        Route("/api/run", run),
        Route("/api/samples", samples),
        Route("/api/sample/{id}", sample),
        Route("/api/groups/{prompt:int}", groups),
        Route("/api/events", events),
        Route("/api/media/{digest}", media),
    ]
    return _Guard(Starlette(routes=routes), token, host)


def page_file(name: str) -> bytes:
    """Reads a file of the page."""
    return resources.files("rl.views.viewer").joinpath(name).read_bytes()


class _Guard:
    """Refuses requests of others, and adds the headers of every answer."""

    def __init__(self, inner: ASGIApp, token: str, host: str):
        self._inner = inner
        self._token = token.encode()
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (name.encode(), value.encode()) for name, value in _HEADERS.items()
                ]
            await send(message)

        answer: ASGIApp = self._inner
        if not names_server(headers.get(b"host", b"").decode("latin-1"), self._host):
            answer = _error(
                421, f"the Host header does not name this server; open http://{self._host}:PORT/"
            )
        elif scope["path"].startswith("/api/") and not hmac.compare_digest(
            headers.get(TOKEN_HEADER.encode(), b""), self._token
        ):
            answer = _error(
                401,
                f"the header {TOKEN_HEADER} lacks the token; open the address that `rl view` "
                "printed",
            )
        await answer(scope, receive, guarded)


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return Response(page_file(name), media_type=kind)

    return answer


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
