"""What `/metrics` shows, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters of a server, each in a registry of its own, so that two servers of a process do not
    share them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "duet_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self._cancelled = Counter(
            "duet_requests_cancelled", "Requests whose client went away", registry=registry
        )
        self._prompt_tokens = Counter("duet_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated_tokens = Counter(
            "duet_generated_tokens", "Tokens of completions", registry=registry
        )
        self._first_token = Histogram(
            "duet_time_to_first_token_seconds",
            "Seconds from a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "duet_request_duration_seconds",
            "Seconds from a request to the end of its completions",
            buckets=_SECONDS,
            registry=registry,
        )

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is read when `/metrics` is asked for."""
        Gauge(f"duet_{name}", text, registry=self._registry).set_function(value)

    def add_counts(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Adds the counters of the engine (rollout/engine/engine.py)."""
        for name in counts():
            self.add_gauge(
                f"engine_{name}", f"Counter {name} of the engine", lambda name=name: counts()[name]
            )

    def answered(self, endpoint: str, status: int) -> None:
        """Counts an answer."""
        self._requests.labels(endpoint, str(status)).inc()

    def cancelled(self) -> None:
        """Counts a client that went away."""
        self._cancelled.inc()

    def start(self, prompt_tokens: int) -> RequestTimes:
        """Counts the prompts of a request; returns the clock of the request."""
        self._prompt_tokens.inc(prompt_tokens)
        return RequestTimes(self._first_token, self._duration, self._generated_tokens)

    def text(self) -> bytes:
        """Returns all metrics."""
        return generate_latest(self._registry)


class RequestTimes:
    """The clock of a request."""

    def __init__(self, first_token: Histogram, duration: Histogram, generated: Counter):
        self._first_token = first_token
        self._duration = duration
        self._generated = generated
        self._start = time.monotonic()
        self._waits = True

    def add(self, tokens: int) -> None:
        """Counts new tokens."""
        self._generated.inc(tokens)
        if tokens and self._waits:
            self._waits = False
            self._first_token.observe(time.monotonic() - self._start)

    def end(self) -> None:
        """Notes that all completions have ended."""
        self._duration.observe(time.monotonic() - self._start)
