"""An index of token sequences: which slot has the most of the first of these tokens. Pure Python:
no arrays, no device."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

# A slot copies the first entries of another slot if that saves so many tokens of prefill.
MIN_SHARED_TOKENS = 32


def is_worth_sharing(num_shared: int, tokens: tuple[int, ...]) -> bool:
    """Whether to copy the first `num_shared` entries of these tokens instead of computing them."""
    return num_shared >= min(MIN_SHARED_TOKENS, max(1, len(tokens)))


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the number of equal elements at the beginning of both."""
    if not a or not b or a[0] != b[0]:
        return 0
    low = 1
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] are equal, a[:high] are not
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


class MinSet:
    """A set of numbers with fast access to the least one: a heap from which removed numbers are
    deleted when they reach its top."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._heap: list[int] = []

    def add(self, number: int) -> None:
        if number not in self._numbers:
            self._numbers.add(number)
            heapq.heappush(self._heap, number)

    def discard(self, number: int) -> None:
        self._numbers.discard(number)
        if len(self._heap) > 2 * len(self._numbers) + 8:
            self._heap = sorted(self._numbers)

    @property
    def least(self) -> int:
        while self._heap[0] not in self._numbers:
            heapq.heappop(self._heap)
        return self._heap[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __bool__(self) -> bool:
        return bool(self._numbers)


@dataclass
class _Node:
    """A node of the tree. `label`: tokens on the edge from its parent. `slots`: slots whose tokens
    begin with the path to this node. `ends`: slots whose tokens are that path. `children`: nodes by
    the first token of their label."""

    label: tuple[int, ...]
    slots: MinSet = field(default_factory=MinSet)
    ends: MinSet = field(default_factory=MinSet)
    children: dict[int, _Node] = field(default_factory=dict)

    def split(self, length: int) -> _Node:
        """Returns a new parent of this node, which takes over the first `length` tokens of its
        label."""
        parent = _Node(self.label[:length])
        for slot in self.slots:
            parent.slots.add(slot)
        self.label = self.label[length:]
        parent.children[self.label[0]] = self
        return parent


class PrefixIndex:
    """The tokens of slots as a radix tree. A search costs one comparison per branch on its way,
    whatever the number of slots.

    A slot has at most one entry. Ties go to the lowest slot.
    """

    def __init__(self) -> None:
        self._root = _Node(())
        self._tokens: dict[int, tuple[int, ...]] = {}

    def add(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Enters the tokens of a slot instead of its earlier tokens. An empty sequence removes the
        slot."""
        self.remove(slot)
        if not tokens:
            return
        self._tokens[slot] = tokens
        node = self._root
        rest = tokens
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest)
            elif (num_shared := common_length(child.label, rest)) < len(child.label):
                child = node.children[rest[0]] = child.split(num_shared)
            child.slots.add(slot)
            node = child
            rest = rest[len(child.label) :]
        node.ends.add(slot)

    def remove(self, slot: int) -> None:
        """Removes the entry of a slot, if it has one, and the nodes that no other slot needs."""
        tokens = self._tokens.pop(slot, ())
        if not tokens:
            return
        for parent, node in self._path(tokens):
            node.slots.discard(slot)
            node.ends.discard(slot)
            if not node.slots:
                del parent.children[node.label[0]]
                return

    def _path(self, tokens: tuple[int, ...]) -> Iterator[tuple[_Node, _Node]]:
        """Yields (parent, node) of each node on the way of tokens that are in the tree."""
        node = self._root
        rest = tokens
        while rest:
            parent = node
            node = node.children[rest[0]]
            rest = rest[len(node.label) :]
            yield parent, node

    def longest(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (slot, num_shared): the slot with the most of the first of these tokens, and how
        many; (-1, 0) if no slot has the first.
        """
        slots, num_shared = self.longest_all(tokens)
        return (slots.least, num_shared) if num_shared else (-1, 0)

    def longest_all(self, tokens: tuple[int, ...]) -> tuple[MinSet, int]:
        """Returns (slots, num_shared): all slots with the most of the first of these tokens, and
        how many. With 0 shared tokens the slots have no meaning."""
        node = self._root
        num_shared = 0
        while (
            num_shared < len(tokens)
            and (child := node.children.get(tokens[num_shared])) is not None
        ):
            more = common_length(child.label, tokens[num_shared : num_shared + len(child.label)])
            node = child
            num_shared = num_shared + more
            if more < len(child.label):
                break
        return node.slots, num_shared

    def longest_prefixes(self, tokens: tuple[int, ...]) -> tuple[MinSet, int]:
        """Returns (slots, num_shared): the slots whose tokens are all among the first of these,
        with the most tokens, and how many they have. With 0 shared tokens the slots have no
        meaning."""
        node = self._root
        start = 0
        slots = node.ends
        num_shared = 0
        while start < len(tokens) and (child := node.children.get(tokens[start])) is not None:
            end = start + len(child.label)
            if child.label != tokens[start:end]:
                break
            node = child
            start = end
            if node.ends:
                slots = node.ends
                num_shared = end
        return slots, num_shared

    def exact(self, tokens: tuple[int, ...]) -> int:
        """Returns the lowest slot with exactly these tokens; -1 if there is none."""
        node = self._root
        rest = tokens
        while rest:
            child = node.children.get(rest[0])
            if child is None or child.label != rest[: len(child.label)]:
                return -1
            node = child
            rest = rest[len(child.label) :]
        return node.ends.least if tokens and node.ends else -1
