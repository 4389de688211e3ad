"""The active batch: which slots decode together, and the cache that they decode on.

The batch stays as it is from one decode to the next as long as it has the right slots, so that its
DecodeState (rollout/engine/programs.py) never leaves the device. This module handles caches and
DecodeStates as opaque values; it needs no device itself.

A slot is a place in the cache that a request runs in. A row is a row of the arrays of one call.

S slots, s rows of a batch, M pages of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.execution.decoding import Params
from rollout.engine.cache_manager import CacheManager
from rollout.request import Request

if TYPE_CHECKING:
    from rollout.engine.runner import ModelRunner

# While requests wait for a slot, a decode of s rows ends once 1 + s // EARLY_EXIT_DIVISOR of its
# requests have ended.
EARLY_EXIT_DIVISOR = 16


class ActiveBatch:
    """Owns the cache of all slots. If fewer slots decode on a contiguous cache, it also owns a
    cache of these rows.

    slots: the slot of each row of the batch; None: padding.
    requests: the request of each row.
    """

    def __init__(self, runner: ModelRunner, cache_manager: CacheManager, seed: int):
        """seed: the seed of the random draws."""
        self._runner = runner
        self._geometry = runner.geometry
        self._cache_manager = cache_manager
        self._seed = seed
        self.slots: tuple[int | None, ...] = ()
        self.requests: tuple[Request | None, ...] = ()
        self._cache: Any = None
        self._batch_cache: Any = None  # None: the batch decodes on the cache of all slots
        self._state: Any = None  # None: it must be built again

    # The cache of all slots.

    def full_cache(self) -> Any:
        """Returns the cache of all slots.

        The cache of the batch is scattered back first; the next decode gathers it again.
        """
        if self._cache is None:
            self._cache = self._runner.empty()
        if self._batch_cache is not None:
            self._cache = self._runner.scatter(
                self._cache, self._batch_cache, self.row_numbers(self.slots)
            )
            self.slots = ()
            self._batch_cache = None
            self._state = None
        return self._cache

    def replace_cache(self, cache: tuple) -> None:
        """Stores the cache that a program returned for `full_cache()`, which was donated to the
        program."""
        self._cache = cache

    def routes(self, slot: int) -> dict[str, Any]:
        """Returns the experts that computed each token of a slot, read from the batch's cache if
        that has the slot."""
        cache = self._cache
        rows = self._geometry.slots
        row = slot
        if self._batch_cache is not None and slot in self.slots:
            cache = self._batch_cache
            rows = len(self.slots)
            row = self.slots.index(slot)
        tables = self.page_tables([slot])
        return self._runner.routes(cache, rows, row, None if tables is None else tables[0])

    # The rows of the batch.

    def size_for(self, slots: Sequence[int]) -> int:
        """Returns the number of rows of a batch of these slots. Each shard of the cache has equally
        many."""
        rows = self._cache_manager.num_shards * max(
            Counter(map(self._cache_manager.shard_of, slots)).values()
        )
        return next(size for size in self._geometry.batch_sizes if size >= rows)

    def expect(self, running: Mapping[int, Request], params: Params) -> None:
        """Starts to compile the decode of the slots that run, which follows their prefill. Prompts
        with pictures may need another program, by the positions of their tokens."""
        if any(request.media is not None for request in running.values()):
            return
        self._runner.expect_decode(params, self.size_for(list(running)), running.values())

    def prepare(
        self, running: Mapping[int, Request], decoding: Sequence[int], *, changed: bool
    ) -> bool:
        """Makes a batch of the slots `decoding`, some of the slots that run.

        Returns False if the batch can go on from the last decode: it has the right number of rows,
        and there is no change (`changed`) that the device does not know of.
        """
        if self._state is not None and not changed and self.size_for(decoding) == len(self.slots):
            return False
        self._gather(decoding)
        chosen = set(decoding)
        self.requests = tuple(
            None if slot is None or slot not in chosen else running[slot] for slot in self.slots
        )
        self._state = self._runner.decode_state(self.requests, len(self.requests), seed=self._seed)
        return True

    def _gather(self, decoding: Sequence[int]) -> None:
        """Makes a batch of these slots. A batch that has all of them and the right number of rows
        stays as it is."""
        size = self.size_for(decoding)
        if len(self.slots) == size and set(decoding) <= set(self.slots):
            return
        cache = self.full_cache()
        if size == self._geometry.slots:
            self.slots = tuple(range(size))
            return
        rows: list[int | None] = []
        for shard in range(self._cache_manager.num_shards):
            rows += [slot for slot in decoding if self._cache_manager.shard_of(slot) == shard]
            rows += [None] * ((shard + 1) * size // self._cache_manager.num_shards - len(rows))
        self.slots = tuple(rows)
        if self._geometry.copies_batch:
            self._batch_cache = self._runner.gather(cache, self.row_numbers(rows))

    def early_exit_threshold(self, decoding: int, *, waiting: bool) -> int:
        """Returns the number of active rows at which a decode of so many slots ends early.

        If requests wait for a slot, it ends as soon as some rows are free for them; else as soon as
        a smaller batch is enough.
        """
        size = len(self.slots)
        if waiting:
            return max(0, decoding - 1 - size // EARLY_EXIT_DIVISOR)
        smaller = max((s for s in self._geometry.batch_sizes if s < size), default=0)
        if smaller < decoding:
            return smaller
        return smaller // self._cache_manager.num_shards  # the active rows may all be in one shard

    def decode(self, params: Params, limits: tuple[int, int]) -> Any:
        """Starts a decode and returns its DecodeOutput, whose arrays are on the device. limits: as
        in ModelRunner.decode."""
        tables = self.page_tables(self.slots)
        if tables is not None:
            self._state = self._runner.with_pages(self._state, self.row_numbers(self.slots), tables)
        if any(request is not None and request.matcher is not None for request in self.requests):
            self._state = self._runner.with_masks(self._state, self.requests)
        cache = self._cache if self._batch_cache is None else self._batch_cache
        cache, self._state, output = self._runner.decode(params, cache, self._state, limits)
        if self._batch_cache is None:
            self._cache = cache
        else:
            self._batch_cache = cache
        return output

    def row_numbers(self, slots: Sequence[int | None]) -> np.ndarray:
        """Returns int32[s]: the slots of these rows. Padding has numbers past the end, each its
        own."""
        total = self._geometry.slots
        return np.asarray(
            [total + n if slot is None else slot for n, slot in enumerate(slots)], np.int32
        )

    def page_tables(self, slots: Sequence[int | None]) -> np.ndarray | None:
        """Returns int32[s, M]: the pages of these rows; None over a contiguous cache."""
        width = self._geometry.table_width
        if width is None:
            return None
        tables = np.zeros((len(slots), width), np.int32)
        for row, slot in enumerate(slots):
            pages = [] if slot is None else self._cache_manager.pages(slot)
            tables[row, : len(pages)] = pages
        return tables
