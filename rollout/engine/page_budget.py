"""The number of pages of a paged cache: as many as full slots need, or as fit into the memory that is left."""

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

# The share of the memory that is left after weights and optimizer; an update needs the rest for its temporaries.
SHARE = 0.5


@dataclass(frozen=True)
class PageBudget:
    """The pages of a cache.

    pages: the pages of all parts together. full: the number of pages that full slots need. bytes: per device.
    """

    pages: Pages
    full: int
    bytes: int

    def __str__(self) -> str:
        share = self.pages.number / self.full
        room = (
            "all that full slots need"
            if share >= 1
            else f"{share:.0%} of what full slots need, so requests may be preempted"
        )
        size = f"{self.bytes / 2**20:,.1f} MiB on each device"
        return f"{self.pages.number:,} pages of {self.pages.size} tokens, {size}: {room}"


def choose_page_budget(
    empty: Callable[[Pages], Any],
    layout: Layout,
    shape: tuple[int, int, int],
    pages: tuple[int | None, int],
    memory_left: float | None = None,
    reserved_bytes: int = 0,
) -> PageBudget:
    """Chooses the number of pages of the cache that `empty` makes.

    shape: (slots, pages of the longest row, parts into which slots and pages are split; each part has one page that
    no row uses).
    pages: (requested number, tokens of each). Without a number: as many as full slots need, or as SHARE of the memory
    that is left has room for.
    memory_left: bytes per device; None: what the devices report, less `reserved_bytes`.

    Raises ValueError for fewer pages than one row of each part needs.
    """
    requested, size = pages
    slots, columns, parts = shape
    least, full = parts * (1 + columns), parts + slots * columns
    page_bytes = _bytes_on_a_device(jax.eval_shape(lambda: empty(Pages(parts, size))), layout)
    number = requested or full
    if requested is None and memory_left is None:
        reports = processes.all_gather_object(device_memory_left(layout.mesh.local_devices[0]))
        # The least of all processes, so that they choose the same number.
        memory_left = min((each - reserved_bytes for each in reports if each is not None), default=None)
    if requested is None and memory_left is not None:
        number = max(least, min(full, parts * int(SHARE * memory_left / max(1, page_bytes))))
    number -= number % parts
    if number < least:
        raise ValueError(
            f"generator.pages: {number} pages of {size} tokens are less than the {least} of a row of max_length"
        )
    return PageBudget(Pages(number, size), full, number // parts * page_bytes)


def _bytes_on_a_device(cache: Any, layout: Layout) -> int:
    """Bytes per device of the pools of an abstract cache."""
    sizes = []

    def count(axes, array):
        if axes == caches.pages.AXES:
            sizes.append(math.prod(layout.sharding(axes, array.shape).shard_shape(array.shape)) * array.dtype.itemsize)

    caches.by_axes(count, cache)
    return sum(sizes)


def device_memory_left(device: Any) -> int | None:
    """Bytes of memory that a device has left; None if it does not report it."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform == "cpu":
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    return None
