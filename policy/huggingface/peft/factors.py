"""How PEFT stores the factors of an adapter, by the layout of the weight that they adapt.

For a Linear with weight [out, in] PEFT stores A [r, in] and B [out, r]. Of experts in one tensor it
stores A [X r, in], the expert slowest, and B [out, r X], the expert fastest; peft 0.17 and 0.18
took a tensor [X, out, in] for [X, in, out], so that their A is our B. The axes of a layout
(policy/fields/names.py) say which stored axis has the inputs: "(h d) e -> e h d" gives A
"r e -> e r" and B "(h d) r -> r h d".

Our factors are a [layers?, counts?, in..., r] and b [layers?, counts?, r, out...], DoRA's
magnitude [layers?, counts?, out...]; the axes that are neither in nor out count matrices, such as
experts.
L layers, X experts, V vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from policy import families
from policy.fields import names
from policy.huggingface.model_directory import StoredWeight
from policy.huggingface.peft.targets import EMBEDDING, HEAD
from policy.model import Graph


class FactorShapes(NamedTuple):
    """The shapes of the arrays of an adapted weight in our layout."""

    a: names.Shape
    b: names.Shape
    magnitude: names.Shape


class StoredShapes(NamedTuple):
    """The shapes of the tensors A and B of a file."""

    a: names.Shape
    b: names.Shape


def factor_shapes(graph: Graph, path: str, rank: int) -> FactorShapes:
    """Returns the shapes of a, b and of DoRA's magnitude of a weight, with factors for each
    expert."""
    shape = graph.shapes[path].shape
    rows, columns = graph.product_dims(path)
    lead = tuple(size for dim, size in enumerate(shape) if dim not in rows + columns)
    inputs = tuple(shape[dim] for dim in rows)
    outputs = tuple(shape[dim] for dim in columns)
    return FactorShapes((*lead, *inputs, rank), (*lead, rank, *outputs), (*lead, *outputs))


class FactorPair(NamedTuple):
    """The factors A and B of one weight and DoRA's magnitude, in our layout or as they are
    stored."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None


@dataclass(frozen=True)
class FactorForm:
    """The stored forms of the factors of one stored tensor: `a`, `b` and `magnitude` are the
    layouts of the tensors that hold ours. `swapped`: PEFT's A holds our b.

    `shapes` are the shapes of our weights, one for each part of the tensor, with `letters` for
    their dimensions; `rank_letter` stands for the rank. `experts`: how many matrices the tensor has
    along an axis of its own, 1 without such an axis.
    """

    a: names.Stored
    b: names.Stored
    magnitude: names.Stored
    letters: str
    rank_letter: str
    shapes: tuple[names.Shape, ...]
    experts: int
    swapped: bool = False
    _blocks: dict[tuple[str, int], list[names.TensorSlice]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def parts(self) -> int:
        """The number of our weights in the stored tensor."""
        return len(self.shapes)

    def rank(self, stored: FactorPair) -> int:
        """Returns the rank of stored factors."""
        return stored.a.shape[0] // self.experts

    def fits(self, stored: FactorPair) -> bool:
        """Returns whether tensors have the shapes of these factors."""
        if stored.a.ndim != 2 or stored.b.ndim != 2 or stored.a.shape[0] % self.experts:
            return False
        return (stored.a.shape, stored.b.shape) == self.stored_shapes(self.rank(stored))

    def stored_shapes(self, rank: int) -> StoredShapes:
        """Returns the shapes of the tensors A and B of an adapter of `rank`."""
        a = self._stored_shape(self.a, rank)
        b = self._stored_shape(self.b, rank)
        return StoredShapes(b, a) if self.swapped else StoredShapes(a, b)

    def split(self, stored: FactorPair) -> list[FactorPair]:
        """Returns the factors of each part in our layout, without layers and numbered experts."""
        rank = self.rank(stored)
        a, b = (stored.b, stored.a) if self.swapped else (stored.a, stored.b)
        magnitudes: list[np.ndarray] | list[None] = [None] * self.parts
        if stored.magnitude is not None:
            magnitudes = self._split(self.magnitude, stored.magnitude.reshape(-1), 0)
        parts = zip(
            self._split(self.a, a, rank), self._split(self.b, b, rank), magnitudes, strict=True
        )
        return [FactorPair(*part) for part in parts]

    def join(self, pairs: Sequence[FactorPair]) -> FactorPair:
        """Returns the stored tensors of the factors of all parts, which have one rank and, if they
        read the same inputs, one A."""
        rank = pairs[0].a.shape[-1]
        a = self._join(self.a, [pair.a for pair in pairs], rank)
        b = self._join(self.b, [pair.b for pair in pairs], rank)
        magnitudes = [pair.magnitude for pair in pairs if pair.magnitude is not None]
        magnitude = self._join(self.magnitude, magnitudes, 0) if magnitudes else None
        return FactorPair(b, a, magnitude) if self.swapped else FactorPair(a, b, magnitude)

    def our_shapes(self, stored: names.Stored, rank: int) -> list[names.Shape]:
        """Returns the shapes of our arrays that a stored tensor holds, one for each part."""
        order = names.layout_axes(stored.layout).ours
        shapes = []
        for shape in self.shapes[: max(1, len(stored.parts))]:
            sizes = dict(zip(self.letters, shape, strict=True)) | {self.rank_letter: rank}
            shapes.append(tuple(sizes[letter] for letter in order))
        return shapes

    def _stored_shape(self, stored: names.Stored, rank: int) -> names.Shape:
        return self._slices(stored, rank)[0].shape

    def _slices(self, stored: names.Stored, rank: int) -> list[names.TensorSlice]:
        """Returns the piece of a tensor that each part has; a file of many experts asks often."""
        key = (stored.name, rank)
        if key not in self._blocks:
            shapes = self.our_shapes(stored, rank)
            self._blocks[key] = [
                stored.block(shapes, part, (slice(None),) * len(shape))
                for part, shape in enumerate(shapes)
            ]
        return self._blocks[key]

    def _split(self, stored: names.Stored, tensor: np.ndarray, rank: int) -> list[np.ndarray]:
        blocks = self._slices(stored, rank)
        arrays = [block.finish(tensor[block.index]) for block in blocks]
        return arrays if len(arrays) == self.parts else arrays * self.parts

    def _join(self, stored: names.Stored, arrays: Sequence[np.ndarray], rank: int) -> np.ndarray:
        blocks = self._slices(stored, rank)
        tensor = np.empty(blocks[0].shape, np.float32)
        for block, array in zip(blocks, arrays, strict=len(blocks) > 1):
            block.finish(tensor[block.index])[...] = array
        return tensor


def is_swapped(place: StoredWeight, stored: names.Stored, is_old: bool) -> bool:
    """Returns whether PEFT takes the inputs of experts in one parameter for outputs: before 0.19
    (`is_old`) those of [X, out, in]."""
    form = factor_form(place, stored)
    if form is None or form.experts == 1:
        return False
    outputs = form.magnitude.layout.split(" -> ")[0]
    if stored.layout and names.layout_axes(stored.layout).stored[1].text == outputs:
        return is_old
    family = families.get(place.graph.config.family)
    return not is_old and getattr(family, "PEFT_SWAPS_EXPERTS", False)


def factor_form(
    place: StoredWeight, stored: names.Stored, swapped: bool = False
) -> FactorForm | None:
    """Returns the stored forms of an adapter of the tensor `stored` of a weight, or None if such a
    tensor has none: norms, biases, convolutions and parameters of two axes that are no module's
    weight. `swapped`: as peft 0.17 and 0.18 stored those of a tensor [X, out, in]; None for a
    tensor without an axis of experts."""
    graph = place.graph
    paths = place.parts(stored)
    if any(path not in graph.matrices and path not in (EMBEDDING, HEAD) for path in paths):
        return None
    skipped = (place.layers is not None) + stored.numbered
    shapes = tuple(graph.shapes[path].shape[skipped:] for path in paths)
    axes, ours = names.layout_axes(stored.layout or " ".join(ascii_lowercase[: len(shapes[0])]))
    dims = graph.product_dims(place.path)
    rows = {ours[dim - skipped] for dim in dims.rows}
    columns = {ours[dim - skipped] for dim in dims.columns}
    first = axes[0].letters
    fused = len(axes) == 3 and len(first) == 1 and first not in rows | columns
    if len(axes) - fused != 2 or not (fused or stored.name.endswith(".weight")):
        return None
    reads = [axis for axis in axes[fused:] if rows & set(axis.letters)]
    writes = [axis for axis in axes[fused:] if columns & set(axis.letters)]
    if len(reads) != 1 or len(writes) != 1 or reads == writes or (swapped and not fused):
        return None
    return _form_of_sides(
        _Sides(reads[0], writes[0], first if fused else "", stored.parts),
        ours,
        columns,
        shapes,
        swapped,
    )


class _Sides(NamedTuple):
    """The stored axes of inputs and of outputs, the letter of the axis of experts ("" without
    one), and the parts of the tensor."""

    reads: names.StoredAxis
    writes: names.StoredAxis
    expert: str
    parts: tuple[str, ...]

    def form(self, name: str, text: str, order: str) -> names.Stored:
        """Returns the layout of a tensor that has an axis of inputs or outputs."""
        marked = "+" in text or "*" in text
        return names.Stored(name, f"{text} -> {' '.join(order)}", self.parts if marked else ())


def _form_of_sides(
    sides: _Sides, ours: str, columns: set[str], shapes: tuple[names.Shape, ...], swapped: bool
) -> FactorForm:
    rank = next(letter for letter in ascii_lowercase if letter not in ours)
    expert = sides.expert
    reads, inputs = sides.reads
    writes, outputs = sides.writes
    slow = f"({expert} {rank})" if expert else rank  # the axis of A's rows
    fast = f"({rank} {expert})" if expert else rank  # the axis of B's columns
    groups = "".join(letter for letter in ours if letter in outputs and letter not in columns)
    a_order = expert + "".join(letter for letter in ours if letter in inputs) + rank
    results = "".join(letter for letter in ours if letter in outputs and letter in columns)
    b_order = expert + groups + rank + results
    return FactorForm(
        a=sides.form("a", f"{reads} {fast}" if swapped else f"{slow} {reads}", a_order),
        b=sides.form("b", f"{slow} {writes}" if swapped else f"{writes} {fast}", b_order),
        magnitude=sides.form("magnitude", writes, groups + results),
        letters=ours,
        rank_letter=rank,
        shapes=shapes,
        experts=shapes[0][ours.index(expert)] if expert else 1,
        swapped=swapped,
    )
