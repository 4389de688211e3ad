"""How many pages a paged cache has: as many as full slots need, or as the memory that is left has room for."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from policy.cache import cache as caches
from policy.cache.pages import Pages
from policy.mesh import processes
from policy.mesh.sharding import Layout

# Of the memory that is left once weights and optimizer are in place; the other half is for what an update makes on its way.
SHARE = 0.5


@dataclass(frozen=True)
class PoolSize:
    """`pages`, those of all parts together; `wanted`: how many full slots need; `bytes` on each device."""

    pages: Pages
    wanted: int
    bytes: int

    def __str__(self) -> str:
        share = self.pages.number / self.wanted
        room = (
            "all that full slots need"
            if share >= 1
            else f"{share:.0%} of what full slots need, so requests may have to pause"
        )
        return f"{self.pages.number:,} pages of {self.pages.size} tokens, {self.bytes / 2**20:,.1f} MiB on each device: {room}"


def choose_pool(
    empty: Callable[[Pages], tuple],
    layout: Layout,
    shape: tuple[int, int, int],
    pages: tuple,
    left: float | None = None,
    beside: int = 0,
) -> PoolSize:
    """The pool of the cache that `empty` makes. `shape`: (slots, pages of the longest row, parts into which slots and pages are
    cut, of which each has one page that is nobody's). `pages`: (how many are wished for, tokens of each); None: as many as full
    slots need, or as SHARE of the memory that is left has room for: `left` bytes, or what the devices say without `beside`.

    Raises ValueError for fewer pages than one row of each part needs.
    """
    wish, size = pages
    slots, columns, parts = shape
    least, wanted = parts * (1 + columns), parts + slots * columns
    each = _bytes_on_a_device(jax.eval_shape(lambda: empty(Pages(parts, size))), layout)
    number = wish or wanted
    if wish is None and left is None:
        known = processes.all_gather_object(memory_left(layout.mesh.local_devices[0]))
        left = min((each - beside for each in known if each is not None), default=None)  # one number for all processes
    if wish is None and left is not None:
        number = max(least, min(wanted, parts * int(SHARE * left / max(1, each))))
    number -= number % parts
    if number < least:
        raise ValueError(
            f"generator.pages: {number} pages of {size} tokens are less than the {least} of a row of max_length"
        )
    return PoolSize(Pages(number, size), wanted, number // parts * each)


def _bytes_on_a_device(cache, layout: Layout) -> int:
    """Bytes of the pools of an abstract cache."""
    found = []

    def count(axes, array):
        if axes == caches.pages.AXES:
            found.append(math.prod(layout.sharding(axes, array.shape).shard_shape(array.shape)) * array.dtype.itemsize)

    caches.by_axes(count, cache)
    return sum(found)


def memory_left(device) -> int | None:
    """Bytes of memory that a device has left; None where it does not say."""
    found = device.memory_stats()
    if found and "bytes_limit" in found:
        return found["bytes_limit"] - found["bytes_in_use"]
    if device.platform == "cpu":
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    return None
