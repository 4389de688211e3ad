"""What the endpoints of a server share: the model by its names, its limits, its engine, and the
requests that run."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rl.serve.engine_thread import EngineThread, Job, NewTokens
from rl.serve.errors import ApiError, invalid
from rl.serve.limits import ServerLimits
from rl.serve.logprobs import TokenSpelling
from rl.serve.metrics import RequestTimes, ServerMetrics
from rl.serve.pictures import Pictures
from rl.serve.sampling import Bounds
from rl.serve.texts import TextStream
from rollout import Generator
from rollout.generator import EncodedPrompt
from rollout.media.expand import Expanded
from rollout.media.processors import Processors
from rollout.text.interface import Tokenizer
from rollout.types import SamplingParams, TokenScores

T = TypeVar("T")
# Calls that may wait for the thread that encodes, however few completions may wait.
_LEAST_ENCODINGS = 16


@dataclass(frozen=True)
class TextUpdate:
    """What is new of one completion of a request.

    text: may be empty while tokens are held back. new: the tokens, with their scores.
    """

    text: str
    new: NewTokens

    @property
    def index(self) -> int:
        """Returns the number of the completion."""
        return self.new.index

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the new tokens."""
        return self.new.tokens

    @property
    def finish(self) -> str | None:
        """Returns "stop" or "length"; None: the completion goes on."""
        return self.new.finish


class Service:
    """A model that is served.

    draining: the server ends, and takes no new requests. active: HTTP requests that are being
    answered.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        name: str,
        stop_token_ids: tuple[int, ...],
        limits: ServerLimits = ServerLimits(),
        processors: Processors | None = None,
    ):
        """processors: what reads pictures for the model; None: it reads texts only."""
        self.name = name
        self.adapters = () if generator.adapters is None else generator.adapters.names
        self.limits = limits
        self.created = int(time.time())
        self.max_length = generator.max_length
        self.draining = False
        self.active = 0
        self.bounds = Bounds(generator.engine.runner.vocab_size, stop_token_ids, limits.samples)
        self.engine = EngineThread(generator)
        self.pictures = None if processors is None else Pictures(generator, processors)
        self.metrics = ServerMetrics()
        # A tokenizer of each thread: one that is used by two at a time may fail.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.spelling = TokenSpelling(self.tokenizer)
        self._encoder = copy.deepcopy(tokenizer)
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._jobs: set[Job] = set()
        self._encodings = 0
        self._generator = generator
        self._slots = generator.slots
        self._exact = generator.options.exact
        gauges = self.metrics.add_gauge
        gauges("requests_running", "Completions that have a slot", lambda: self.running)
        gauges("requests_waiting", "Completions that wait for a slot", lambda: self.waiting)
        self.metrics.add_counts(lambda: generator.counts)

    @property
    def _completions(self) -> int:
        """Returns how many completions have not ended."""
        return sum(job.unfinished for job in self._jobs)

    @property
    def waiting(self) -> int:
        """Returns how many completions wait for a slot."""
        return max(0, self._completions - self._slots)

    @property
    def running(self) -> int:
        """Returns how many completions have a slot."""
        return min(self._completions, self._slots)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the model and of its adapters."""
        return (self.name, *self.adapters)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for the name of another model."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"the model {name!r} does not exist; this server has {known}"
            raise ApiError(404, message, "model", "model_not_found")

    async def with_tokenizer(
        self, function: Callable[[Tokenizer], T], param: str | None = None
    ) -> T:
        """Calls a function with the tokenizer in the thread that encodes. Raises ApiError for a
        text or a conversation that it refuses; param: the field that holds it."""
        return await self._called(self._encoding, partial(function, self._encoder), param)

    async def _called(self, executor: Executor, function: Callable[[], T], param: str | None) -> T:
        """Calls a function in another thread. Raises ApiError if it refuses a value, and if as many
        calls wait already as completions may run and wait."""
        most = max(_LEAST_ENCODINGS, self._slots + self.limits.queue)
        if self._encodings >= most:
            message = f"{self._encodings} requests are read already; try again later"
            raise ApiError(429, message, None, "queue_full")
        self._encodings += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, function)
        except RecursionError:
            raise invalid(param, "nested too deep") from None
        except ValueError as error:
            raise invalid(param, str(error)) from None
        finally:
            self._encodings -= 1

    async def with_pictures(self, expanded: Expanded) -> EncodedPrompt:
        """Returns a prompt with its pictures. Threads of their own decode them; then the towers
        read them between two steps of the engine. Raises ApiError for one that cannot be
        decoded."""
        pictures = self.pictures
        assert pictures is not None  # `expanded` was made by them
        await pictures.decode(expanded)
        return await self.engine.call(lambda generator: pictures.prompt(generator, expanded))

    async def check_params(self, params: SamplingParams, param: str | None) -> None:
        """Raises ApiError for a constraint or a text that cannot be followed; param: the field that
        has it. Grammars are compiled here, in a thread of their own, and then kept: a large one
        takes seconds, in which other requests go on."""
        if param is None and params.bad_words:
            param = "bad_words"
        plain = params.constraint is None and not params.bad_words
        executor = self._encoding if plain else self._grammars
        await self._called(executor, partial(self._generator.engine.check_params, params), param)

    def max_tokens(
        self, prompts: Sequence[EncodedPrompt], requested: int | None, param: str
    ) -> int:
        """Returns the most tokens of each completion: those requested, else as many as the longest
        prompt leaves. Raises ApiError for prompts that are empty or too long; param: the field that
        has them."""
        for number, prompt in enumerate(prompts):
            if not prompt.tokens:
                raise invalid(param, f"prompt {number} has no tokens")
        longest = max(len(prompt.tokens) for prompt in prompts)
        return self.check_length(longest, requested, param)

    def check_length(self, longest: int, requested: int | None, param: str) -> int:
        """Returns the most tokens of each completion as `max_tokens`. longest: tokens of the
        longest prompt. Raises ApiError for too many."""
        left = self.max_length - longest
        if left < max(1, requested or 1):
            asked = "" if requested is None else f" and {requested} of the completion"
            message = (
                f"the maximum length is {self.max_length} tokens; you asked for {longest} of the "
                f"prompt{asked}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        return left if requested is None else requested

    def check_room(self, completions: int, param: str) -> None:
        """Raises ApiError for more completions of a request than the server can ever take, or than
        it can take now. param: the field that asks for them."""
        most = self._slots + self.limits.queue
        if completions > most:
            message = f"{completions} completions; the server takes at most {most} of a request"
            raise invalid(param, message, "too_many_completions")
        if self._completions + completions > most:
            message = f"{self.waiting} completions wait already (--max-queue); try again later"
            raise ApiError(429, message, None, "queue_full")

    def generation(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        draws: Sequence[int],
        *,
        model: str | None = None,
        special: bool = False,
    ) -> Generation:
        """Returns the completions of prompts, `params.n` of each, before they start.

        draws: the prompt id of each prompt; equal prompts with equal ids have equal completions.
        model: the name that the client gives. special: special tokens are a part of the texts.

        Raises ApiError if the queue is full.
        """
        self.check_room(len(prompts) * params.n, "n" if len(prompts) == 1 else "prompt")
        requests = [
            prompt.request(params, draw, sample)
            for prompt, draw in zip(prompts, draws, strict=True)
            for sample in range(params.n)
        ]
        for request in requests:
            request.adapter = model if model in self.adapters else None
        return Generation(self, Job(requests, exact=self._exact), special)

    def close(self) -> None:
        """Ends the threads."""
        self.engine.close()
        self._encoding.shutdown()
        self._grammars.shutdown()
        if self.pictures is not None:
            self.pictures.close()

    @contextlib.contextmanager
    def running_job(self, job: Job):
        """Runs a job while the block lasts; cancels what has not ended then."""
        self._jobs.add(job)
        self.engine.submit(job)
        try:
            yield
        finally:
            self._jobs.remove(job)
            if job.unfinished:
                self.engine.cancel(job)
                if not job.failed:
                    self.metrics.cancelled()


@dataclass
class Generation:
    """The completions of a request: sample s of prompt p has the index p * n + s."""

    service: Service
    job: Job
    special: bool = False
    streams: list[TextStream] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokenizer = self.service.tokenizer
        self.streams = [
            TextStream(tokenizer, request.params, special=self.special)
            for request in self.job.requests
        ]

    @property
    def prompt_tokens(self) -> int:
        """Returns the tokens of all prompts."""
        return sum(len(request.prompt) for request in self.job.requests if request.sample == 0)

    def prompt_ids(self, index: int) -> list[int]:
        """Returns the tokens of the prompt of a completion."""
        return list(self.job.requests[index].prompt)

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """Starts the completions and yields their texts. Raises ApiError if the engine fails. What
        has not ended is cancelled when the iterator is closed."""
        times: RequestTimes = self.service.metrics.start(self.prompt_tokens)
        with self.service.running_job(self.job):
            async for arrivals in self.job.updates():
                for new in arrivals:
                    times.add(len(new.tokens))
                    ended = new.finish is not None
                    text = self.streams[new.index].add(new.tokens, ended=ended)
                    yield TextUpdate(text, new)
        times.end()

    async def completions(self) -> list[TextUpdate]:
        """Runs all completions to their ends; returns each as one update."""
        parts: list[list[TextUpdate]] = [[] for _ in self.job.requests]
        async for update in self.updates():
            parts[update.index].append(update)
        return [_joined(each) for each in parts]


def _joined(updates: Sequence[TextUpdate]) -> TextUpdate:
    """Returns the updates of a completion as one."""
    news = [update.new for update in updates]
    scored = [new.scores for new in news if new.scores is not None]
    scores = None
    if scored:
        scores = TokenScores(
            np.concatenate([each.logprobs for each in scored]),
            np.concatenate([each.top_ids for each in scored]),
            np.concatenate([each.top_logprobs for each in scored]),
        )
    tokens = tuple(token for new in news for token in new.tokens)
    text = "".join(update.text for update in updates)
    prompt_scores = next((new.prompt_scores for new in news if new.prompt_scores), None)
    new = NewTokens(news[0].index, tokens, news[-1].finish, scores, prompt_scores)
    return TextUpdate(text, new)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Returns the counts of tokens in the form of OpenAI."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
