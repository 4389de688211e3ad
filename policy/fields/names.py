"""Name tables: how our weights are stored in Hugging Face files. A family's table maps the end of
our path to a `Stored`.

Our shapes are [inputs..., outputs...], without the axis of the stacked layers; a torch Linear
stores [outputs, inputs] with the heads flattened. A table is a dict, so tables are joined by `|`.
The key "mixer.q_proj" is for every mixer; "GatedDeltaNet.q_proj" (a class of policy/specs.py, of
feed-forwards too) takes precedence in layers of that kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Table = dict[str, "Stored"]


@dataclass(frozen=True)
class Stored:
    """A tensor `name` of a file and the `layout` that maps it to our weight, "stored axes -> our
    axes": letters are axes, "(h d)" is one stored axis of h times d, and "1" is an axis of size 1.
    Without an arrow the order stays, without a layout the shape.

    Several weights in one tensor: `parts` are the last words of their paths, in order, and one
    stored axis is marked. "+" concatenates the parts along the axis or group before it, in sizes of
    their own: "e (h d)+ -> e h d" is [q heads | k heads | v heads], "(h d+) e -> e h d" is
    [q | k | v] for each h. "*" interleaves them: in "x e f* -> x e f" element 2i of f belongs to
    part 0 and 2i+1 to part 1.

    "{e}" in `name` counts tensors that are stacked along our axis 0; the layout then describes one
    of them. "{s}" counts shards, tensors without a layout that follow each other along our axis 0,
    of any number of rows each. `also` are other spellings that are read if `name` is absent; only
    `name` is written. Raises ValueError for an invalid layout.
    """

    name: str
    layout: str = ""
    parts: tuple[str, ...] = ()
    also: tuple[Stored, ...] = ()

    def __post_init__(self):
        marks = [mark for axis in self._axes for mark in axis.marks] if self.layout else []
        if len(marks) != (len(self.parts) > 1):
            raise ValueError(
                f"{self.name}: layout {self.layout!r} must mark one axis by + or *, as "
                f"{self.parts} share the tensor"
            )

    @property
    def numbered(self) -> bool:
        """Whether one tensor holds one entry of our axis 0."""
        return "{e}" in self.name

    @property
    def sharded(self) -> bool:
        """Whether several tensors hold rows of our weight."""
        return "{s}" in self.name

    @property
    def _axes(self) -> tuple[_Axis, ...]:
        return _parse(self.layout)[0]

    @property
    def _order(self) -> tuple[int, ...]:
        """Returns the permutation from the stored order of letters to ours."""
        _, ours = _parse(self.layout)
        letters = [letter for axis in self._axes for letter in axis.letters]
        return tuple(letters.index(letter) for letter in ours)

    @property
    def same_rows(self) -> bool:
        """Whether our axis 0 is the stored axis 0, so that a piece of our weight is a piece of the
        file."""
        return not self.layout or (
            self._axes[0].letters == _parse(self.layout)[1][:1] and not self._axes[0].marks
        )

    def block(self, shapes: Sequence[Shape], part: int, index: tuple[slice, ...]) -> TensorSlice:
        """Returns the block that holds `index` (slices without a step) of part number `part`.
        `shapes` are our shapes of all parts in order."""
        if not self.layout:
            return TensorSlice(shapes[0], index, None, (), ())
        sizes = [self._sizes(shape) for shape in shapes]
        ours = dict(
            zip(
                _parse(self.layout)[1],
                (s.indices(n)[:2] for s, n in zip(index, shapes[part], strict=True)),
                strict=True,
            )
        )
        spans = [axis.span(sizes, part, ours) for axis in self._axes]
        return TensorSlice(
            tuple(span.size for span in spans),
            tuple(span.index for span in spans),
            tuple(n for span in spans for n in span.split),
            tuple(pick for span in spans for pick in span.picks),
            self._order,
        )

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Builds the stored tensor from all its parts in order."""
        if not self.layout:
            return np.ascontiguousarray(arrays[0]).reshape(
                arrays[0].shape
            )  # which numpy gives an axis if it has none
        shapes = [array.shape for array in arrays]
        blocks = [
            self.block(shapes, part, (slice(None),) * array.ndim)
            for part, array in enumerate(arrays)
        ]
        stored = np.empty(blocks[0].shape, arrays[0].dtype)
        for block, array in zip(blocks, arrays, strict=True):
            block.finish(stored[block.index])[...] = array
        return stored

    def _sizes(self, shape: Shape) -> dict[str, int]:
        letters = _parse(self.layout)[1]
        if len(letters) != len(shape):
            raise ValueError(
                f"{self.name}: layout {self.layout!r} does not fit our shape {list(shape)}"
            )
        return dict(zip(letters, shape, strict=True))


@dataclass(frozen=True)
class TensorSlice:
    """A piece of a stored tensor of `shape`: `index` (a slice of each axis) reads it, `finish`
    turns it into our layout.

    On an array in memory or a mapped file both are views, so writing to the result writes to the
    stored tensor.
    """

    shape: Shape
    index: tuple[slice, ...]
    split: Shape | None
    picks: tuple[slice | int, ...]
    order: tuple[int, ...]

    def finish(self, array: np.ndarray) -> np.ndarray:
        """Splits, selects and transposes what `index` read."""
        return (
            array
            if self.split is None
            else array.reshape(self.split)[(*self.picks, ...)].transpose(self.order)
        )


@dataclass(frozen=True)
class _Span:
    """A slice `index` of a stored axis of `size`, split into axes of sizes `split` from which
    `picks` are taken."""

    size: int
    index: slice
    split: Shape
    picks: tuple[slice | int, ...]


@dataclass(frozen=True)
class _Axis:
    """A stored axis: its letters (none for "1"), the mark of each, and the mark of the group."""

    letters: tuple[str, ...]
    letter_marks: tuple[str, ...]
    group_mark: str

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.letter_marks, self.group_mark)))

    def span(
        self, sizes: list[dict[str, int]], part: int, ours: dict[str, tuple[int, int]]
    ) -> _Span:
        """Returns the span for one part. `sizes` are the sizes of the letters for every part,
        `ours` the requested range of each letter."""
        split = []
        requested = []
        for letter, mark in zip(self.letters, self.letter_marks, strict=True):
            low, high = ours[letter]
            before = sum(each[letter] for each in sizes[:part]) if mark == "+" else 0
            split.append(
                sum(each[letter] for each in sizes)
                if mark == "+"
                else self._common_size(sizes, letter, part)
            )
            requested.append((low + before, high + before))
            if mark == "*":
                split.append(len(sizes))
                requested.append(part)
        if self.group_mark == "*":
            split.append(len(sizes))
            requested.append(part)
        start = 0
        size = math.prod(split)
        if self.group_mark == "+":
            widths = [math.prod(each[letter] for letter in self.letters) for each in sizes]
            start = sum(widths[:part])
            size = sum(widths)
        return _contiguous(size, start, split, requested)

    def _common_size(self, sizes: list[dict[str, int]], letter: str, part: int) -> int:
        if self.group_mark != "+" and len({each[letter] for each in sizes}) > 1:
            raise ValueError(
                f"parts of one tensor differ along {letter}: {[each[letter] for each in sizes]}"
            )
        return sizes[part][letter]


def _contiguous(size: int, start: int, split: list[int], requested: list) -> _Span:
    """Returns the smallest contiguous run of an axis that holds `requested` (a range, or a number,
    of each axis `split`)."""
    if not split:
        return _Span(1, slice(0, 1), (1,), (0,))
    ranges = [(w, w + 1) if isinstance(w, int) else w for w in requested]
    first = next((i for i, (low, high) in enumerate(ranges) if high - low != 1), len(ranges) - 1)
    for i in range(first):
        start += ranges[i][0] * math.prod(split[i + 1 :])
    low, high = ranges[first]
    rest = math.prod(split[first + 1 :])
    index = slice(start + low * rest, start + high * rest)
    kept = (*(1,) * first, high - low, *split[first + 1 :])
    picks = (*((0, 1),) * first, (0, high - low), *ranges[first + 1 :])
    return _Span(
        size,
        index,
        kept,
        tuple(
            p[0] if isinstance(w, int) else slice(*p) for p, w in zip(picks, requested, strict=True)
        ),
    )


_AXIS = re.compile(
    r"\((?P<group>[a-z][+*]?(?: [a-z][+*]?)*)\)(?P<mark>[+*]?)|(?P<one>1)|(?P<letter>[a-z][+*]?)"
)


@cache
def _parse(layout: str) -> tuple[tuple[_Axis, ...], tuple[str, ...]]:
    """Parses a layout into (stored axes, our letters)."""
    stored, arrow, ours = layout.partition(" -> ")
    axes = []
    for match in _AXIS.finditer(stored):
        words = (match["group"] or match["letter"] or "").split()
        axes.append(
            _Axis(tuple(w[0] for w in words), tuple(w[1:] for w in words), match["mark"] or "")
        )
    letters = tuple(letter for axis in axes for letter in axis.letters)
    order = tuple(ours.split()) if arrow else letters
    left = _AXIS.sub("", stored).strip()
    if left or not axes or len(set(letters)) < len(letters) or sorted(order) != sorted(letters):
        raise ValueError(
            f"layout {layout!r}: expected stored axes -> our axes, such as '(h d) e -> e h d'"
        )
    return tuple(axes), order


class StoredAxis(NamedTuple):
    """An axis of a stored tensor as the layout spells it, and its letters: "(h d)" and "hd"."""

    text: str
    letters: str


class LayoutAxes(NamedTuple):
    """The stored axes of a layout, and our letters in order."""

    stored: list[StoredAxis]
    ours: str


def layout_axes(layout: str) -> LayoutAxes:
    """Splits a layout into its axes: "(h d) e -> e h d" is [("(h d)", "hd"), ("e", "e")] and
    "ehd"."""
    axes, ours = _parse(layout)
    texts = [match[0] for match in _AXIS.finditer(layout.partition(" -> ")[0])]
    pairs = zip(texts, axes, strict=True)
    stored = [StoredAxis(text, "".join(axis.letters)) for text, axis in pairs]
    return LayoutAxes(stored, "".join(ours))


def joined(module: str, parts: tuple[str, ...], name: str, layout: str) -> Table:
    """Creates the entries of `parts` ("q_proj", ...) of `module` ("mixer.") that share the stored
    tensor `name`."""
    return {module + part: Stored(name, layout, parts) for part in parts}


def moved(table: Table, ours: tuple[str, str], stored: tuple[str, str] = ("", "")) -> Table:
    """Replaces the prefix of our paths, `ours` (old, new), and the prefix of the stored names in a
    table."""

    def move(text: str, old: str, new: str) -> str:
        return new + text.removeprefix(old) if text.startswith(old) else text

    def rename(place: Stored) -> Stored:
        return replace(
            place, name=move(place.name, *stored), also=tuple(rename(other) for other in place.also)
        )

    return {move(end, *ours): rename(place) for end, place in table.items()}


def fused(table: Table) -> Table:
    """Returns the entries of `table` that have another spelling, with that spelling first: it is
    written, both are read."""
    return {
        end: replace(place.also[0], also=(replace(place, also=()),))
        for end, place in table.items()
        if place.also
    }


# The most common block: the norm before the feed-forward is stored as `post_attention_layernorm`.
ATTENTION: Table = {
    "input_layernorm.weight": Stored("input_layernorm.weight"),
    "pre_feedforward_layernorm.weight": Stored("post_attention_layernorm.weight"),
    "mixer.q_proj": Stored("self_attn.q_proj.weight", "(h d) e -> e h d"),
    "mixer.k_proj": Stored("self_attn.k_proj.weight", "(h d) e -> e h d"),
    "mixer.v_proj": Stored("self_attn.v_proj.weight", "(h d) e -> e h d"),
    "mixer.o_proj": Stored("self_attn.o_proj.weight", "e (h d) -> h d e"),
    "mixer.q_bias": Stored("self_attn.q_proj.bias", "(h d) -> h d"),
    "mixer.k_bias": Stored("self_attn.k_proj.bias", "(h d) -> h d"),
    "mixer.v_bias": Stored("self_attn.v_proj.bias", "(h d) -> h d"),
    "mixer.o_bias": Stored("self_attn.o_proj.bias"),
    "mixer.q_norm.weight": Stored("self_attn.q_norm.weight"),
    "mixer.k_norm.weight": Stored("self_attn.k_norm.weight"),
}

# Joined to ATTENTION by families that store norms under our names.
NORMS_BY_ROLE: Table = {
    f"{role}.weight": Stored(f"{role}.weight")
    for role in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
}

MLP: Table = {
    f"feed_forward.{kind}_proj": Stored(f"mlp.{kind}_proj.weight", "o i -> i o")
    for kind in ("gate", "up", "down")
}
MLP |= {
    f"feed_forward.{kind}_bias": Stored(f"mlp.{kind}_proj.bias") for kind in ("gate", "up", "down")
}

# The Hub holds one tensor for each expert; transformers holds fused tensors in memory.
_FUSED = Stored(
    "mlp.experts.gate_up_proj", "x f+ e -> x e f", ("expert_gate_proj", "expert_up_proj")
)
MOE: Table = {
    "feed_forward.router.weight": Stored("mlp.gate.weight", "x e -> e x"),
    "feed_forward.expert_gate_proj": Stored(
        "mlp.experts.{e}.gate_proj.weight", "f e -> e f", also=(_FUSED,)
    ),
    "feed_forward.expert_up_proj": Stored(
        "mlp.experts.{e}.up_proj.weight", "f e -> e f", also=(_FUSED,)
    ),
    "feed_forward.expert_down_proj": Stored(
        "mlp.experts.{e}.down_proj.weight",
        "e f -> f e",
        also=(Stored("mlp.experts.down_proj", "x e f -> x f e"),),
    ),
}

# Gated delta nets; families differ in how they store the input projections.
DELTA_NET: Table = {
    "GatedDeltaNet.A_log": Stored("linear_attn.A_log", "(k g) -> k g"),
    "GatedDeltaNet.dt_bias": Stored("linear_attn.dt_bias", "(k g) -> k g"),
    "GatedDeltaNet.norm.weight": Stored("linear_attn.norm.weight"),
    "GatedDeltaNet.o_proj": Stored("linear_attn.out_proj.weight", "e (k v) -> k v e"),
}
DELTA_NET |= joined(
    "GatedDeltaNet.",
    ("q_conv", "k_conv", "v_conv"),
    "linear_attn.conv1d.weight",
    "(k d)+ 1 w -> k d w",
)


# The per-layer embedding of Qwen4Exp. Its table is stored in shards.
PER_LAYER_EMBEDDING: Table = {
    "lookup.table": Stored(
        "ple.ple_embedding.ngram_embedding.shard_{s}.weight",
        also=(Stored("ple.ple_embedding.ngram_embedding.weight"),),
    ),
    "lookup.key_proj": Stored("ple.key_proj.weight", "(g e) d -> g d e"),
    "lookup.value_proj": Stored("ple.value_proj.weight", "e d -> d e"),
    "lookup.key_norm": Stored("ple.norm_key.weight", "(g e) -> g e"),
    "lookup.query_norm": Stored("ple.norm_query.weight", "(g e) -> g e"),
    "lookup.conv_norm": Stored("ple.norm_conv.weight", "(g e) -> g e"),
    "lookup.conv": Stored("ple.conv1d.weight", "(g e) 1 w -> w g e"),
}


def mamba2(prefix: str) -> Table:
    """Returns the entries of a Mamba-2 mixer whose tensors begin with `prefix`."""
    inputs = ("z_proj", "v_proj", "k_proj", "q_proj", "a_proj")
    in_biases = tuple(part.replace("_proj", "_bias") for part in inputs)
    convolutions = ("v_conv", "k_conv", "q_conv")
    conv_biases = tuple(f"{part}_bias" for part in convolutions)
    return (
        joined("Mamba2.", inputs, f"{prefix}in_proj.weight", "(k d)+ e -> e k d")
        | joined("Mamba2.", in_biases, f"{prefix}in_proj.bias", "(k d)+ -> k d")
        | joined("Mamba2.", convolutions, f"{prefix}conv1d.weight", "(k d)+ 1 w -> k d w")
        | joined("Mamba2.", conv_biases, f"{prefix}conv1d.bias", "(k d)+ -> k d")
        | {
            f"Mamba2.{name}": Stored(f"{prefix}{name}", "(k g) -> k g")
            for name in ("A_log", "D", "dt_bias")
        }
        | {
            "Mamba2.norm": Stored(f"{prefix}norm.weight", "(k d) -> k d"),
            "Mamba2.o_proj": Stored(f"{prefix}out_proj.weight", "e (k d) -> k d e"),
            "Mamba2.o_bias": Stored(f"{prefix}out_proj.bias"),
        }
    )


# Weights outside the layers, and the prefix of the names of layer n; a family may have TOP and
# LAYER_PREFIX of its own.
TOP: Table = {
    "embed_tokens": Stored("model.embed_tokens.weight"),
    "norm.weight": Stored("model.norm.weight"),
    "lm_head": Stored("lm_head.weight"),
}
LAYER_PREFIX = "model.layers.{n}."
