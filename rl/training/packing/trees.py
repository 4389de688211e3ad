"""Packs sequences with equal beginnings so that each beginning is computed once.

The sequences of a group, the completions of a prompt or the answers of a pair, make trees
(policy/cache/paths.py). A node ends where its sequences differ in tokens, pictures or known routes,
where a second of them begins to be trained on, and before the last token of any of them. So each
place has at most one term of the loss, and each sequence has a node of its own. Two things end a
node earlier: prediction modules (`Sharing.ahead`), and a picture whose tokens see each other, which
no node cuts. For recurrent layers (`Sharing.one_level`) sequences are alone after the first node.

N rows of a batch, S sequences of a group, T tokens, R packed rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from policy.cache.media import Media
from policy.cache.paths import Tree
from policy.cache.step import UNKNOWN
from policy.config import DecoderConfig
from rl.training.batch import Batch
from rl.training.packing.packing import Packing
from rl.training.packing.row_shapes import (
    RowBounds,
    RowHistory,
    RowShape,
    Sizes,
    choose_shape,
)

LEAST_SAVED = 0.05
"""Groups whose trees save a smaller share of their tokens are packed as sequences alone."""


@dataclass(frozen=True)
class Sharing:
    """How the sequences of a stage share beginnings.

    length_factor: tokens of the largest tree over those of a row of the batch, at least 1. longest:
    most tokens of a packed row, unless a tree has more; None: any number. ahead:
    shared nodes end this many tokens early, the depth of prediction modules, since module d also
    reads the token d places on. one_level: trees have no nodes between root and leaves, as
    recurrent layers need it. together: the sequences of a group stay in one packed row, in their
    order.
    """

    length_factor: Fraction | int = 1
    longest: int | None = None
    ahead: int = 0
    one_level: bool = False
    together: bool = False

    def packed_length(self, T: int) -> int:
        """Returns the tokens of the largest tree, for a batch in rows of T tokens."""
        return math.ceil(T * self.length_factor)

    def most_rows(self, N: int) -> int:
        """Returns the most packed rows that N rows of a batch fill."""
        return -(-N // math.floor(self.length_factor))

    def of_scores(self, config: DecoderConfig) -> Sharing:
        """Returns how the completions of a prompt share beginnings in a model that scores them."""
        return replace(self, ahead=0, one_level=has_state(config), together=False)


def has_state(config: DecoderConfig) -> bool:
    """Returns whether layers of a decoder carry a state from token to token."""
    return any(spec.is_recurrent for spec in config.layers)


@dataclass
class Node:
    """A run of tokens, from `start` up to `end` along its sequences. sequences: their numbers in
    the group."""

    start: int
    end: int
    sequences: list[int]
    children: list[Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Returns the tokens of the node and of all that continue it."""
        return self.end - self.start + sum(child.size for child in self.children)

    def restricted_to(self, kept: set[int]) -> Node:
        """Returns the tree of some of the sequences."""
        children = [
            child.restricted_to(kept)
            for child in self.children
            if kept.intersection(child.sequences)
        ]
        return Node(self.start, self.end, [s for s in self.sequences if s in kept], children)


@dataclass
class GroupSequences:
    """The sequences of a group, as arrays padded to the longest.

    columns: of each sequence, its places in the flat batch. equal: arrays [S, T, ...] that have to
    agree where sequences share tokens. routes: int[S, T, ...], where known ones have to agree too.
    trained: bool[S, T]. until: int[S, T], the end of each token's block of a picture, or None.
    """

    columns: list[np.ndarray]
    equal: list[np.ndarray]
    routes: list[np.ndarray]
    trained: np.ndarray
    until: np.ndarray | None

    @classmethod
    def of(cls, batch: Batch, columns: list[np.ndarray]) -> GroupSequences:
        """Reads the sequences at these places of the batch."""
        T = max(map(len, columns))
        index = np.stack([np.pad(each, (0, T - len(each)), mode="edge") for each in columns])

        def read(array: Any) -> np.ndarray:
            return np.asarray(array).reshape(-1, *np.shape(array)[2:])[index]

        media = batch.media or Media()
        same = (batch.tokens, media.index, media.turns, media.until)
        equal = [read(a) for a in same if a is not None]
        routes = [read(a) for a in (batch.routes or {}).values()]
        until = None if media.until is None else read(media.until)
        return cls(columns, equal, routes, read(batch.mask) > 0, until)

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        """Returns the lengths of these sequences."""
        return [len(self.columns[s]) for s in sequences]

    def trees(self, sharing: Sharing) -> list[Node]:
        """Returns the trees of the group; sequences alone if trees save less than LEAST_SAVED of
        the tokens."""
        every = list(range(len(self.columns)))
        total = sum(self.lengths(every))
        trees = list(self._trees_from(every, 0, sharing, 0))
        if sum(tree.size for tree in trees) > (1 - LEAST_SAVED) * total:
            return [self._alone(s, 0) for s in every]
        return trees

    def _alone(self, s: int, start: int) -> Node:
        return Node(start, len(self.columns[s]), [s])

    def _trees_from(
        self, sequences: list[int], start: int, sharing: Sharing, level: int
    ) -> Iterator[Node]:
        """Yields the trees, from `start` on, of sequences that are equal up to `start`."""
        if len(sequences) == 1 or (level and sharing.one_level):
            yield from (self._alone(s, start) for s in sequences)
            return
        differ = start + self._common(sequences, start)
        end = self._outside_blocks(sequences[0], start, differ - sharing.ahead)
        parts = self._parts(sequences, differ)
        node = Node(start, end, sequences) if end > start else None
        if len(parts) == 1:  # equal here, but a second begins to be trained on
            parts = [[s] for s in sequences]
        below = [
            tree
            for part in parts
            for tree in self._trees_from(part, max(start, end), sharing, level + (node is not None))
        ]
        if node is None:
            yield from below
        else:
            node.children = below
            yield node

    def _common(self, sequences: list[int], start: int) -> int:
        """Returns how many tokens from `start` on these sequences can share."""
        columns = slice(start, min(self.lengths(sequences)) - 1)
        trained = np.maximum.accumulate(self.trained[sequences, columns], axis=1)
        same = np.count_nonzero(trained, axis=0) <= 1
        for array in self.equal:
            own = array[sequences, columns]
            same &= _flat(own == own[:1])
        for array in self.routes:
            own = array[sequences, columns]
            known = own != UNKNOWN
            most = own.max(axis=0)
            least = np.where(known, own, np.iinfo(own.dtype).max).min(axis=0)
            same &= _flat(((most == least) | ~known.any(axis=0))[None])
        return len(same) if same.all() else int(np.argmin(same))

    def _outside_blocks(self, s: int, start: int, end: int) -> int:
        """Returns the last place up to `end` that is not inside a block of a picture whose tokens
        look ahead."""
        while self.until is not None and end > start and self.until[s, end - 1] > end - 1:
            end -= 1
        return end

    def _parts(self, sequences: list[int], at: int) -> list[list[int]]:
        """Parts sequences by their tokens at a place: equal ones stay together, one of them trained
        at most."""
        parts: list[list[int]] = []
        for s in sequences:
            alone = at >= len(self.columns[s]) - 1
            part = next((part for part in parts if not alone and self._fits(part, s, at)), None)
            if part is None:
                parts.append([s])
            else:
                part.append(s)
        return parts

    def _fits(self, part: list[int], s: int, at: int) -> bool:
        if at >= len(self.columns[part[0]]) - 1 or (
            self.trained[s, at] and self.trained[part, at].any()
        ):
            return False
        if any((array[s, at] != array[part[0], at]).any() for array in self.equal):
            return False
        return all(
            (
                (array[part, at] == array[s, at])
                | (array[part, at] == UNKNOWN)
                | (array[s, at] == UNKNOWN)
            ).all()
            for array in self.routes
        )


def _flat(same_STx: np.ndarray) -> np.ndarray:
    """Returns bool[T]: where all sequences and numbers of a token are true."""
    return np.asarray(same_STx.all(axis=(0, *range(2, same_STx.ndim))))


@dataclass
class _Rows:
    """Packed rows while trees are put in, and the arrays of a Packing.

    length: tokens of a row. arrays: of each packed token its row, place and segment, and the fields
    of a Tree; of each token of a sequence `source`, `target` and `writes`; of each node `start` and
    `end`. used, nodes, sequences: how many of each row are taken, in tokens, nodes and sequences.
    """

    length: int
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)

    def add(self, group: GroupSequences, trees: Sequence[Node], r: int) -> None:
        """Places trees in packed row r."""
        if r == len(self.used):
            for each in (self.used, self.nodes, self.sequences):
                each.append(0)
        numbers = sorted(s for tree in trees for s in tree.sequences)
        number = {s: self.sequences[r] + i for i, s in enumerate(numbers, start=1)}
        self.sequences[r] += len(numbers)
        for tree in trees:
            self._place(group, tree, r, -1, number)

    def _place(
        self, group: GroupSequences, node: Node, r: int, before: int, number: dict[int, int]
    ) -> None:
        size = node.end - node.start
        place = self.used[r]
        self.used[r] += size
        self.nodes[r] += 1
        own = self.nodes[r]
        steps = np.arange(size)
        places = place + steps
        trained = group.trained[node.sequences, node.start : node.end]
        writer = np.argmax(trained, axis=0)  # the first, if none is trained on
        owned = trained.any(axis=0) | (len(node.sequences) == 1)
        arrays = {
            "row": np.full(size, r),
            "place": places,
            "node": np.full(size, own),
            "position": node.start + steps,
            "before": np.where(steps > 0, places - 1, before),
            "count": np.full(size, len(node.sequences)),
            "segment": np.where(owned, np.array([number[s] for s in node.sequences])[writer], 0),
        }
        for i, s in enumerate(node.sequences):
            self._append(source=group.columns[s][node.start : node.end], writes=writer == i)
            self._append(target=r * self.length + places)
        for child in node.children:
            self._place(group, child, r, int(places[-1]), number)
        self._append(
            **arrays,
            last=np.full(size, self.nodes[r]),
            end=np.array([node.end]),
            start=np.array([node.start]),
        )

    def _append(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.arrays.setdefault(name, []).append(array)

    def joined(self) -> dict[str, np.ndarray]:
        """Returns each array with its parts of all rows joined along the first axis."""
        return {name: np.concatenate(parts) for name, parts in self.arrays.items()}


def groups_of(batch: Batch) -> list[GroupSequences]:
    """Returns the groups of a batch on the host, in the order of their prompts."""
    rows: dict[int, list[np.ndarray]] = {}
    segments = np.asarray(batch.segments)
    T = batch.segments.shape[1]
    for row in np.argsort(batch.prompt, kind="stable").tolist():
        for number in range(1, int(segments[row].max(initial=0)) + 1):
            if len(columns := np.flatnonzero(segments[row] == number)):
                rows.setdefault(int(batch.prompt[row]), []).append(row * T + columns)
    return [GroupSequences.of(batch, columns) for columns in rows.values()]


class Piece(NamedTuple):
    """Trees of a group that stay in one packed row, the tokens of all of them, and the tokens of
    their shortest sequence."""

    group: GroupSequences
    trees: list[Node]
    size: int
    shortest: int

    @classmethod
    def of(cls, group: GroupSequences, trees: list[Node]) -> Piece:
        shortest = min(min(group.lengths(tree.sequences)) for tree in trees)
        return cls(group, trees, sum(tree.size for tree in trees), shortest)


class Assigned(NamedTuple):
    """Trees, and the packed row that holds them."""

    piece: Piece
    row: int


def pieces_of(batch: Batch, sharing: Sharing, limit: int) -> list[Piece]:
    """Returns the trees of a batch, the largest first. None has more than `limit` tokens: a larger
    tree is cut, and its parts repeat the tokens that they share."""
    pieces = []
    for group in groups_of(batch):
        trees = group.trees(sharing)
        if sharing.together:
            pieces.append(Piece.of(group, trees))
            continue
        for tree in trees:
            rest = Piece.of(group, [tree])
            while rest.size > limit:
                fitting = _fitting(rest.trees[0], limit)
                pieces.append(Piece.of(group, [rest.trees[0].restricted_to(fitting)]))
                left = set(rest.trees[0].sequences) - fitting
                rest = Piece.of(group, [rest.trees[0].restricted_to(left)])
            pieces.append(rest)
    return sorted(pieces, key=lambda piece: -piece.size)


def place_trees(pieces: Sequence[Piece], sharing: Sharing, length: int) -> list[Assigned]:
    """Places trees, the largest first, each into the packed row with the least room that is enough.

    Where no row has room for a tree, the emptiest takes as many of its sequences as fit, with the
    tokens that they share; if none fits, a new row does. The others wait as another tree.
    """
    waiting = deque(pieces)
    room: list[int] = []
    assigned = []

    def put(piece: Piece, row: int) -> None:
        if row == len(room):
            room.append(length)
        room[row] -= piece.size
        assigned.append(Assigned(piece, row))

    while waiting:
        piece = waiting.popleft()
        if enough := [(free, row) for row, free in enumerate(room) if free >= piece.size]:
            put(piece, min(enough)[1])
            continue
        emptiest = max(range(len(room)), key=room.__getitem__, default=0)
        fitting: set[int] = set()
        if room and not sharing.together and room[emptiest] >= piece.shortest:
            fitting = _fitting(piece.trees[0], room[emptiest])
        if not fitting:
            assert piece.size <= length, "a packed row has room for a tree"
            put(piece, len(room))
            continue
        tree = piece.trees[0]
        put(Piece.of(piece.group, [tree.restricted_to(fitting)]), emptiest)
        rest = Piece.of(piece.group, [tree.restricted_to(set(tree.sequences) - fitting)])
        smaller = (i for i, each in enumerate(waiting) if each.size < rest.size)
        waiting.insert(next(smaller, len(waiting)), rest)
    return assigned


def plan_trees(
    batch: Batch, rows: int, sharing: Sharing, length: int | None = None, multiple: int = 1
) -> Packing:
    """Packs the sequences of a batch as trees into `rows` packed rows, of which the last may stay
    empty.

    length: tokens of a packed row that trees fill, by default `Sharing.packed_length`. Packed rows
    end in padding up to a multiple of `multiple` tokens.
    """
    length = length or sharing.packed_length(batch.segments.shape[1])
    assigned = place_trees(pieces_of(batch, sharing, length), sharing, length)
    return _packing(batch, assigned, (rows, -(-length // multiple) * multiple))


def plan_tree_rows(
    batch: Batch, bounds: RowBounds, sharing: Sharing, history: RowHistory | None = None
) -> tuple[Packing, RowShape] | None:
    """Returns (the packing of the trees of a batch in the shape that fits them, that shape); None
    if no tree has a shared token. history: as in choose_shape."""
    pieces = pieces_of(batch, sharing, bounds.limit)
    tokens = sum(piece.size for piece in pieces)
    if tokens >= batch.filled_tokens:
        return None

    @cache
    def assignment(length: int) -> list[Assigned]:
        return place_trees(pieces, sharing, length)

    sizes = Sizes(len(pieces), tokens, pieces[0].size)
    shape = choose_shape(bounds, sizes, lambda length: _filled_rows(assignment(length)), history)
    assigned = assignment(shape.length)
    rows = bounds.program_rows(shape, _filled_rows(assigned))
    return _packing(batch, assigned, (rows, shape.length)), shape


def _filled_rows(assigned: Sequence[Assigned]) -> int:
    return 1 + max(each.row for each in assigned)


def _fitting(tree: Node, room: int) -> set[int]:
    """Returns the sequences of a tree that fit into `room`, those with the longest ends of their
    own first."""
    own = {}
    for node in _nodes(tree):
        for s in node.sequences:
            own[s] = node.end - node.start
    chosen: set[int] = set()
    for s in sorted(own, key=lambda s: (-own[s], s)):
        if tree.restricted_to(chosen | {s}).size <= room:
            chosen.add(s)
    return chosen


def _nodes(tree: Node) -> Iterator[Node]:
    yield tree
    for child in tree.children:
        yield from _nodes(child)


def _packing(batch: Batch, assigned: Sequence[Assigned], shape: tuple[int, int]) -> Packing:
    """Returns the Packing of assigned trees in packed rows of `shape`."""
    rows = _Rows(shape[1])
    for piece, row in assigned:
        rows.add(piece.group, piece.trees, row)
    filled = len(rows.used)
    assert filled <= shape[0], "the packed rows have room for every batch"
    arrays = rows.joined() if rows.arrays else {}
    nothing = np.zeros(0, np.int64)
    at = arrays.get("row", nothing) * rows.length + arrays.get("place", nothing)

    def in_rows(name: str, fill: int = 0) -> np.ndarray:
        out = np.full(shape, fill, np.int32)
        out.reshape(-1)[at] = arrays.get(name, nothing)
        return out

    tree = Tree(**{name: in_rows(name, fill) for name, fill in Tree.FILLS.items()})
    return Packing(
        batch.segments.shape,
        shape,
        arrays.get("source", nothing),
        arrays.get("target", nothing),
        in_rows("segment"),
        filled,
        (arrays.get("end", nothing), arrays.get("start", nothing)),
        tree,
        arrays.get("writes", np.zeros(0, bool)),
    )
