"""Parses the text of a compiled HLO program: its computations, their instructions, and the sizes of
the arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from policy.experts.expert_parallel import EXPECTED_LAST

BITS = {
    "pred": 8,
    "s4": 4,
    "s8": 8,
    "u8": 8,
    "bf16": 16,
    "f16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
}
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
INSTRUCTION = re.compile(r"\s*(ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)")
# Instructions that only give another shape to their operand.
RESHAPES = {"bitcast", "reshape"}


@dataclass
class Instruction:
    """One line of a computation. result: the text of its type. rest: everything after the opening
    parenthesis."""

    name: str
    result: str
    kind: str
    operands: list[str]
    rest: str
    root: bool

    def all_called(self) -> list[str]:
        """Lists the computations that run inside this instruction, except bodies of loops and
        functions of scalars."""
        pattern = (
            r"\b(?:calls|to_apply)=%([\w.-]+)" if self.kind == "call" else r"\bcalls=%([\w.-]+)"
        )
        names: list[str] = re.findall(pattern, self.rest)
        if self.kind == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
            if branches:
                names = re.findall(r"%([\w.-]+)", branches[1])
            else:
                names = [self.called("false_computation"), self.called("true_computation")]
            return names[-1:] if EXPECTED_LAST in self.rest else names
        return names

    def called(self, key: str) -> str:
        """Returns the name of the computation that stands behind `key=%`. Raises ValueError if
        there is none."""
        match = re.search(rf"\b{key}=%([\w.-]+)", self.rest)
        if match is None:
            raise ValueError(f"{self.kind} {self.name} names no computation {key}")
        return match[1]


@dataclass
class Computation:
    """The instructions of a computation by name, in the order of the text."""

    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """Returns the instruction whose result is the result of the computation."""
        return next(each for each in self.instructions.values() if each.root)

    def parameter(self, number: int) -> Instruction:
        """Returns the instruction of a parameter, counted from 0."""
        return next(
            i
            for i in self.instructions.values()
            if i.kind == "parameter" and i.rest.startswith(f"{number})")
        )

    def users(self, name: str) -> Iterator[tuple[Instruction, str]]:
        """Yields (user, name of its operand) of a result. Looks through instructions that only
        change its shape."""
        for each in self.instructions.values():
            if name in each.operands:
                yield from (
                    self.users(each.name)
                    if each.kind in RESHAPES and not each.root
                    else ((each, name),)
                )


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns (computations by name, name of the entry). Raises ValueError for a text without an
    entry."""
    computations = {}
    entry = None
    current = Computation()
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            current = computations[head[2]] = Computation()
            entry = head[2] if head[1] else entry
        elif match := INSTRUCTION.match(line):
            root, name, result, kind, rest = match.groups()
            operands = re.findall(r"%([\w.-]+)", _arguments(rest))
            current.instructions[name] = Instruction(name, result, kind, operands, rest, bool(root))
    if entry is None:
        raise ValueError("the text holds no ENTRY computation")
    return computations, entry


def dims(text: str) -> tuple[int, ...]:
    """Returns the dimensions of the first array in the text of a type; () if there is none."""
    match = ARRAY.search(text)
    return tuple(int(d) for d in match[2].split(",") if d) if match else ()


def arrays(text: str) -> list[tuple[str, str, str]]:
    """Lists (dtype, dimensions, layout), as text, of every array in the text of a type."""
    return [array for array in ARRAY.findall(text) if array[0] in BITS or array[0].startswith("f8")]


def bytes_in_hbm(text: str) -> int:
    """Returns the bytes in HBM of all arrays in the text of a type."""
    return sum(map(size_in_hbm, arrays(text)))


def bytes_anywhere(text: str) -> int:
    """Returns the bytes of all arrays in the text of a type, in any memory."""
    return sum(map(size_anywhere, arrays(text)))


def size_in_hbm(array: tuple[str, str, str]) -> int:
    """Returns the bytes of an array; 0 if its layout puts it into another memory, S(1) and so
    on."""
    return 0 if re.search(r"S\([1-9]\)", array[2]) else size_anywhere(array)


def size_anywhere(array: tuple[str, str, str]) -> int:
    """Returns the bytes of an array whose last dimensions are padded to the tiles of its layout."""
    dtype, dimensions, layout = array
    sizes = [int(d) for d in dimensions.split(",") if d]
    major = re.match(r"[\d,]*", layout)
    order = [int(d) for d in major[0].split(",") if d] if major else []
    tiles = re.search(r"T\(([\d,]+)\)", layout)
    if tiles and len(order) == len(sizes):
        for position, tile in enumerate(reversed([int(t) for t in tiles[1].split(",")])):
            if position < len(order):
                sizes[order[position]] = -(-sizes[order[position]] // tile) * tile
    return math.prod(sizes) * BITS.get(dtype, 8) // 8


def group_size(rest: str) -> int | None:
    """Returns the number of devices that exchange with each other in a collective; None if the text
    does not say.

    A group is a list of devices, or axes of a mesh, and may take an axis in part: `'axis':(2)4`.
    """
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(
            int(part or sizes[axis])
            for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        )
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(counted[1]) if counted else None


def _arguments(rest: str) -> str:
    """Returns the text up to the parenthesis that closes the operands."""
    depth = 1
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:i]
    return rest
