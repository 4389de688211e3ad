"""The number of pages of a paged cache: as many as full slots need, or as fit into the available
memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from policy.cache import cache as caches
from policy.cache.pages import Pages
from policy.mesh import processes
from policy.mesh.sharding import Layout

# The fraction of the memory left after weights and optimizer that pages may take; an update needs
# the rest for its temporaries.
MEMORY_FRACTION = 0.5


@dataclass(frozen=True)
class PageBudget:
    """The pages of a cache.

    pages: the pages of all shards together. full: the number of pages that full slots need. bytes:
    per device.
    """

    pages: Pages
    full: int
    bytes: int

    def __str__(self) -> str:
        share = self.pages.number / self.full
        coverage = (
            "all that full slots need"
            if share >= 1
            else f"{share:.0%} of what full slots need, so requests may be preempted"
        )
        size = f"{self.bytes / 2**20:,.1f} MiB on each device"
        return f"{self.pages.number:,} pages of {self.pages.size} tokens, {size}: {coverage}"


def choose_page_budget(
    empty: Callable[[Pages], object],
    layout: Layout,
    shape: tuple[int, int, int],
    pages: tuple[int | None, int],
    available_memory: float | None = None,
    reserved_bytes: int = 0,
) -> PageBudget:
    """Chooses the number of pages of the cache that `empty` makes.

    shape: (slots, pages of the longest row, shards into which slots and pages are split; each shard
    has one page that no row uses).
    pages: (requested number, tokens of each). Without a number: as many as full slots need, or as
    fit into MEMORY_FRACTION of the available memory.
    available_memory: bytes per device; None: what the devices report, less `reserved_bytes`.

    Raises ValueError for fewer pages than one row of each shard needs.
    """
    requested, size = pages
    slots, columns, num_shards = shape
    minimum = num_shards * (1 + columns)
    full = num_shards + slots * columns
    page_bytes = _bytes_on_a_device(jax.eval_shape(lambda: empty(Pages(num_shards, size))), layout)
    number = requested or full
    if requested is None and available_memory is None:
        reports = processes.all_gather_object(device_available_memory(layout.mesh.local_devices[0]))
        # The minimum over all processes, so that they choose the same number.
        available_memory = min(
            (each - reserved_bytes for each in reports if each is not None), default=None
        )
    if requested is None and available_memory is not None:
        number = max(
            minimum,
            min(full, num_shards * int(MEMORY_FRACTION * available_memory / max(1, page_bytes))),
        )
    number -= number % num_shards
    if number < minimum:
        raise ValueError(
            f"generator.pages: {number} pages of {size} tokens are less than the {minimum} of a "
            "row of max_length"
        )
    return PageBudget(Pages(number, size), full, number // num_shards * page_bytes)


def _bytes_on_a_device(cache: Any, layout: Layout) -> int:
    """Returns the bytes per device of the pools of an abstract cache."""
    sizes = []

    def count(axes, array):
        if axes == caches.pages.AXES:
            sizes.append(
                math.prod(layout.sharding(axes, array.shape).shard_shape(array.shape))
                * array.dtype.itemsize
            )

    caches.by_axes(count, cache)
    return sum(sizes)


def device_available_memory(device: Any) -> int | None:
    """Returns the bytes of memory that a device has left; None if it does not report it."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform == "cpu":
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    return None
