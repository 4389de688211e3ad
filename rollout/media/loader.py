"""Decodes pictures and sounds in threads and prepares them for the towers, ahead of the step that
needs them.

Axes: N inputs of a tower, K numbers of an input.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from policy.media import Item
from rollout.media.processor import MediaError
from rollout.media.processors import Processors
from rollout.media.reference import Reference

CACHED_BYTES = 1 << 31
"""Bytes of prepared contents that are kept: 80 pictures of 1024 rows of Qwen3-VL, 25 MB each."""
_MOST_THREADS = 8
Inputs = dict[Item, np.ndarray]
"""What the towers read of items, float32[N, K]."""


class Loader:
    """Contents as the inputs of towers. Equal references, from any row, are decoded once.

    The contents used longest ago leave the cache, so that prefetched ones stay until they are used
    as long as a step's contents fit. Use it as a context manager, or call `close`.
    """

    def __init__(
        self, processors: Processors, cached_bytes: int = CACHED_BYTES, threads: int | None = None
    ):
        """Starts no thread before the first content.

        cached_bytes: bound of the cache; the arrays that a call returns are held by its caller.
        threads: threads that decode; None: one per CPU core, at most 8.
        """
        self._processors = processors
        self._bound = cached_bytes
        self._threads = ThreadPoolExecutor(
            threads or min(_MOST_THREADS, os.cpu_count() or 1), "media"
        )
        self._lock = threading.Lock()
        self._cache: OrderedDict[Reference, Inputs] = OrderedDict()
        self._bytes = 0
        self._pending: dict[Reference, Future[Inputs]] = {}
        self.waited = 0.0
        """Seconds that `inputs` has waited in all."""

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def prefetch(self, references: Iterable[Reference]) -> None:
        """Starts to decode contents that are neither in the cache nor being decoded. Returns
        immediately."""
        with self._lock:
            for reference in references:
                if reference in self._cache:
                    self._cache.move_to_end(reference)
                else:
                    self._started(reference)

    def inputs(self, references: Iterable[Reference]) -> Inputs:
        """Returns the inputs of the items of these contents, and waits until they are there.

        Raises MediaError, with file and row, for a content that cannot be decoded.
        """
        needed = list(dict.fromkeys(references))
        began = time.perf_counter()
        with self._lock:
            ready = {
                reference: self._cache[reference]
                for reference in needed
                if reference in self._cache
            }
            for reference in ready:
                self._cache.move_to_end(reference)
            started = {
                reference: self._started(reference)
                for reference in needed
                if reference not in ready
            }
        try:
            for reference, future in started.items():
                try:
                    ready[reference] = future.result()
                except MediaError:  # maybe with the file and row of an equal content
                    ready[reference] = self._prepared(reference)
        finally:
            self.waited += time.perf_counter() - began
        return {item: each for reference in needed for item, each in ready[reference].items()}

    def close(self) -> None:
        """Ends the threads, without the contents that they have not begun, and empties the
        cache."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._cache.clear()
            self._bytes = 0

    def _started(self, reference: Reference) -> Future[Inputs]:
        """Returns the running or queued preparation of a content. The caller holds the lock."""
        if reference not in self._pending:
            self._pending[reference] = self._threads.submit(self._kept, reference)
        return self._pending[reference]

    def _kept(self, reference: Reference) -> Inputs:
        """Prepares a content and puts it into the cache."""
        try:
            inputs = self._prepared(reference)
        except BaseException:
            with self._lock:
                del self._pending[reference]
            raise
        with self._lock:
            del self._pending[reference]
            self._cache[reference] = inputs
            self._bytes += _size(inputs)
            while self._bytes > self._bound and self._cache:
                self._bytes -= _size(self._cache.popitem(last=False)[1])
        return inputs

    def _prepared(self, reference: Reference) -> Inputs:
        return reference.inputs(self._processors.of(reference.kind))


def _size(inputs: Inputs) -> int:
    return sum(each.nbytes for each in inputs.values())
