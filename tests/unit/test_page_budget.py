"""How many pages there are: what is wished for, what full slots need, or what half of the memory
that is left has room for.
"""

import jax.numpy as jnp
import pytest

import rollout.engine.page_budget
from policy.cache import pages
from policy.mesh.sharding import layout
from rollout.engine.page_budget import choose_page_budget, device_available_memory

SHAPE = (4, 3, 1)  # 4 slots of at most 3 pages
BYTES = 2 * 3 * 8 * 5 * 4  # of one page: 2 heads, 3 layers, 8 tokens of 5 float32


def empty(number: pages.Pages):
    return {"k": pages.empty(2, 3, number, 5, "float32"), "state": jnp.zeros((3, 4, 1, 1, 7))}


@pytest.mark.parametrize(
    ("left", "wish", "number"),
    [
        (None, None, 13),
        (10**12, None, 13),
        (2 * 9 * BYTES, None, 9),
        (0, None, 4),
        (0, 6, 6),
        (10**12, 99, 99),
    ],
)
def test_pages_are_as_many_as_wished_for_needed_or_possible(monkeypatch, left, wish, number):
    monkeypatch.setattr(rollout.engine.page_budget, "device_available_memory", lambda device: left)
    result = choose_page_budget(empty, layout({}), SHAPE, (wish, 8))
    assert result.pages == (number, 8) and result.full == 13 and result.bytes == number * BYTES
    assert ("all that full slots need" in str(result)) == (number >= 13)


def test_less_than_one_row_of_each_part_needs_is_refused():
    with pytest.raises(
        ValueError, match=r"generator\.pages: 3 pages of 8 tokens are less than the 4"
    ):
        choose_page_budget(empty, layout({}), SHAPE, (3, 8))
    with pytest.raises(ValueError, match="6 pages of 8 tokens are less than the 8"):
        choose_page_budget(empty, layout({}), (4, 3, 2), (7, 8))


class Device:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_memory_left_is_what_the_device_says():
    assert device_available_memory(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert device_available_memory(Device(None)) is None
