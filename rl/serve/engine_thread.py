"""The thread that owns the generator. The event loop of the server sends it jobs, and gets the new
tokens of each after every step of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rl.serve.errors import ApiError
from rollout import Generator
from rollout.request import Request
from rollout.types import TokenScores

_LONGEST_STEP = 10.0  # seconds to wait for a step when the server ends


@dataclass(frozen=True)
class NewTokens:
    """What a step of the engine added to a request.

    index: of the request in its job. tokens: the new ones. finish: "stop" or "length"; None: the
    request goes on. scores: those of the new tokens, if the request asks for them. prompt_scores:
    those of the prompt, with the first tokens.
    """

    index: int
    tokens: tuple[int, ...]
    finish: str | None
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None


class Job:
    """The requests to the engine (completions) of one HTTP request, which start together. `updates`
    yields their tokens.

    The thread calls `collect`; all else belongs to the event loop that made the job.
    """

    def __init__(self, requests: Sequence[Request], *, exact: bool):
        """exact: the generator may replace tokens until it has verified them."""
        self.requests = tuple(requests)
        self._exact = exact
        self.unfinished = len(self.requests)
        self.failed = False
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[list[NewTokens] | ApiError] = asyncio.Queue()
        self._sent = [0] * len(self.requests)
        self._ended = [False] * len(self.requests)

    async def updates(self) -> AsyncIterator[list[NewTokens]]:
        """Yields the new tokens of each step until all requests have ended. Raises ApiError if the
        engine fails."""
        while self.unfinished:
            arrival = await self._arrivals.get()
            if isinstance(arrival, ApiError):
                self.failed = True
                raise arrival
            self.unfinished -= sum(update.finish is not None for update in arrival)
            yield arrival

    def collect(self) -> bool:
        """Sends what is new to the event loop. Returns whether all requests have ended."""
        new = []
        for index, request in enumerate(self.requests):
            if self._ended[index]:
                continue
            update = self._new(index, request)
            if update.tokens or update.finish is not None:
                new.append(update)
        if new:
            self.send(new)
        return all(self._ended)

    def _new(self, index: int, request: Request) -> NewTokens:
        start = self._sent[index]
        ended = request.finish is not None
        end = max(start, len(request.tokens) if ended else self._verified(request))
        self._sent[index] = end
        self._ended[index] = ended
        scores = prompt_scores = None
        if end > start and request.params.top_logprobs is not None:
            scores = _scores_of(request, start, end)
        if end > 0 and start == 0:
            prompt_scores = request.prompt_scores
        tokens = tuple(request.tokens[start:end])
        return NewTokens(index, tokens, request.finish, scores, prompt_scores)

    def _verified(self, request: Request) -> int:
        """Returns how many tokens of a running request stay as they are, with their scores. Under
        `exact` scores are there only at the end, so a request for them shows no token before."""
        if not self._exact:
            return len(request.tokens)
        asks = (request.params.top_logprobs, request.params.prompt_logprobs) != (None, None)
        return 0 if asks else request.verified_tokens

    def send(self, arrival: list[NewTokens] | ApiError) -> None:
        """Hands over updates or an error, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._arrivals.put_nowait, arrival)
        except RuntimeError:  # the event loop has been closed, so nobody waits
            self._ended = [True] * len(self.requests)


def _scores_of(request: Request, start: int, end: int) -> TokenScores:
    """Returns the scores of some tokens of a completion."""
    k = request.params.top_logprobs or 0
    ids = np.asarray(request.top_ids[start:end], np.int32).reshape(end - start, -1)
    logprobs = np.asarray(request.top_logprobs[start:end], np.float32).reshape(end - start, -1)
    chosen = np.asarray(request.raw_logprobs[start:end], np.float32)
    return TokenScores(chosen, ids[:, :k], logprobs[:, :k])


class EngineThread:
    """Runs the jobs of a server. `submit`, `cancel` and `call` may be called from any thread;
    nothing else may touch the generator while the thread runs.

    An error ends the jobs that it concerns, not the thread. ended: the thread has ended all the
    same, or was closed; jobs and calls get an error at once.
    """

    def __init__(self, generator: Generator):
        self.generator = generator
        self._jobs: list[Job] = []
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = False
        self.ended = False
        self._end = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Drops all jobs and ends the thread after its step; a step that takes long is left."""
        self._put(self._close)
        self._thread.join(_LONGEST_STEP)

    def submit(self, job: Job) -> None:
        """Starts the requests of a job as soon as there are slots for them."""
        self._put(partial(self._submit, job))

    def cancel(self, job: Job) -> None:
        """Drops the requests of a job that have not ended."""
        self._put(partial(self._cancel, job))

    async def call(self, function: Callable[[Generator], Any]) -> Any:
        """Calls a function with the generator between two steps; returns its result or raises its
        error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(partial(self._call, function, loop, future))
        return await future

    def _put(self, message: Callable[[], None]) -> None:
        """Leaves a message for the thread; handles it here if the thread has ended."""
        with self._end:
            if not self.ended:
                self._messages.put(message)
                return
        message()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._handle_messages()
                if self._jobs:
                    self._step()
        finally:
            with self._end:
                self.ended = True
            self._fail(_ENDED)
            while not self._messages.empty():
                self._messages.get()()

    def _handle_messages(self) -> None:
        """Handles all messages; waits for one if there is nothing else to do."""
        if not self._jobs:
            self._messages.get()()
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return
            message()

    def _step(self) -> None:
        try:
            self.generator.step()
        except Exception as error:
            self._fail(_failure(error))  # the step has dropped their requests
        self._jobs = [job for job in self._jobs if not self._collected(job)]

    def _collected(self, job: Job) -> bool:
        """Sends what is new of a job. Returns whether it has ended, which an error does too."""
        try:
            return job.collect()
        except Exception as error:
            job.send(_failure(error))
            self._drop(job)
            return True

    def _fail(self, error: ApiError) -> None:
        """Answers all jobs with an error."""
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            job.send(error)

    def _submit(self, job: Job) -> None:
        if self.ended:
            job.send(_ENDED)
            return
        self._jobs.append(job)
        try:
            for request in job.requests:
                self.generator.submit(request)
        except Exception as error:
            wrong = isinstance(error, ValueError)
            answer = ApiError(400, str(error), None, "invalid_value") if wrong else _failure(error)
            self._jobs.remove(job)
            self._drop(job)
            job.send(answer)

    def _cancel(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Takes what has not ended of a job from the generator."""
        for request in job.requests:
            try:
                if request.finish is None:
                    self.generator.cancel(request)
            except Exception:  # the other requests must go on
                traceback.print_exc(file=sys.stderr)

    def _call(
        self,
        function: Callable[[Generator], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        try:
            if self.ended:
                raise _ENDED
            answer = partial(_set_result, future, function(self.generator))
        except Exception as error:
            answer = partial(_set_error, future, error)
        with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody waits
            loop.call_soon_threadsafe(answer)

    def _close(self) -> None:
        for job in list(self._jobs):
            self._cancel(job)
            job.send(ApiError(503, "the server has ended"))
        self._closed = True


_ENDED = ApiError(500, "the engine has ended; start the server again")


def _failure(error: Exception) -> ApiError:
    """Returns the answer to an error of the engine, which is being handled, and logs it."""
    traceback.print_exc(file=sys.stderr)
    return ApiError(500, f"the engine failed: {type(error).__name__}")


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
