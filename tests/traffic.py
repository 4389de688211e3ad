"""What a compiled program for a TPU reads from and writes to the memory of a chip, by the text of its HLO.

An instruction moves its operands and its result, as they lie in memory: the last dimensions filled up to whole tiles. Arrays in
other memories, S(1) and so on, count nothing. Where a fusion only slices or gathers from an operand, what it takes counts; where
it updates an operand in place, the update counts, twice. An instruction of a loop's body counts as often as the loop runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

BITS = {"pred": 8, "s4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64}
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
INSTRUCTION = re.compile(r"\s*(ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)")
# They move nothing, or what the instructions inside them or their other half moves.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all", "iota"}
ENDS = {"copy-done", "async-done", "async-update", "slice-done", "all-gather-done", "collective-permute-done", "partition-id"}
SLICES, UPDATES = {"dynamic-slice", "slice", "gather"}, {"dynamic-update-slice", "scatter"}
PASSING = {"bitcast", "reshape"}


@dataclass
class Instruction:
    name: str
    result: str
    kind: str
    operands: list[str]
    rest: str
    root: bool

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%([\w.-]+)", self.rest)
        return found and found[1]


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)

    def parameter(self, number: int) -> Instruction:
        return next(i for i in self.instructions.values() if i.kind == "parameter" and i.rest.startswith(f"{number})"))

    def users(self, name: str):
        """Instructions that use a result, seen through those that only give it another shape."""
        for each in self.instructions.values():
            if name in each.operands:
                yield from self.users(each.name) if each.kind in PASSING and not each.root else ((each, name),)


@dataclass(frozen=True)
class Moved:
    """What one instruction moves each of the times that it runs: (text of its type, bytes) of every array read or written."""

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    times: int

    @property
    def bytes(self) -> int:
        return self.times * sum(size for _, size in self.arrays)


class Program:
    """`kernels`: bytes of one call of a kernel, by the start of the names of its custom calls."""

    def __init__(self, text: str, kernels: dict[str, int]):
        self.kernels, self.computations, self.entry = kernels, {}, None
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
                current = self.computations[head[2]] = Computation()
                self.entry = head[2] if head[1] else self.entry
            elif found := INSTRUCTION.match(line):
                root, name, result, kind, rest = found.groups()
                operands = re.findall(r"%([\w.-]+)", _arguments(rest))
                current.instructions[name] = Instruction(name, result, kind, operands, rest, bool(root))

    def moved(self) -> list[Moved]:
        return list(self._of(self.entry, 1))

    def _of(self, computation: str, times: int):
        inside = self.computations[computation]
        for each in inside.instructions.values():
            if each.kind == "while":
                yield from self._of(each.called("body"), times * self._trips(each))
            elif each.kind in ("call", "conditional"):
                for called in re.findall(r"(?:to_apply|computation|calls)=%([\w.-]+)", each.rest):
                    yield from self._of(called, times)
            elif each.kind not in FREE | ENDS:
                yield Moved(each.name, each.kind, tuple(self._moved(inside, each)), times)

    def _trips(self, loop: Instruction) -> int:
        """Of a loop that counts from 0: the number that its condition compares with."""
        condition = self.computations[loop.called("condition")]
        limits = [int(each.rest.split(")")[0]) for each in condition.instructions.values() if each.kind == "constant"]
        assert len(limits) == 1, f"{loop.name}: its condition has the constants {limits}"
        return limits[0]

    def _moved(self, inside: Computation, each: Instruction):
        for start, size in self.kernels.items():
            if each.kind == "custom-call" and each.name.startswith(start):
                yield start, size
                return
        operands = [inside.instructions[name].result for name in each.operands]
        if each.kind == "copy-start":
            yield from ((array[0], _size(array)) for array in _arrays(each.result)[:2])
        elif each.kind == "fusion":
            called = self.computations[each.called("calls")]
            for number, operand in enumerate(operands):
                taken = self._read(called, called.parameter(number).name)
                yield operand, _bytes(operand) if taken is None else min(taken, _bytes(operand))
            if _bytes(each.result):
                yield from self._written(called, called.root)
        elif each.kind in SLICES:
            yield from ((operands[0], _bytes(each.result, anywhere=True)), (each.result, _bytes(each.result)))
        elif each.kind in UPDATES:
            update = operands[-1 if each.kind == "scatter" else 1]
            yield from ((update, _bytes(update, anywhere=True)), (each.result, _bytes(update, anywhere=True)))
        else:
            yield from ((text, _bytes(text)) for text in (*operands, each.result))

    def _read(self, inside: Computation, name: str) -> int | None:
        """What a fusion takes of one operand, where it is less than all."""
        total = 0
        for user, operand in inside.users(name):
            first = user.operands.index(operand) == 0
            if user.kind in SLICES and first:
                total += _bytes(user.result, anywhere=True)
            elif user.kind in UPDATES and first:
                total += _bytes(inside.instructions[user.operands[2 if user.kind == "scatter" else 1]].result, anywhere=True)
            elif user.kind == "fusion":
                called = self.computations[user.called("calls")]
                part = self._read(called, called.parameter(user.operands.index(operand)).name)
                if part is None:
                    return None
                total += part
            else:
                return None
        return total

    def _written(self, inside: Computation, root: Instruction):
        if root.kind == "tuple":
            for name in root.operands:
                yield from self._written(inside, inside.instructions[name])
        elif root.kind in PASSING and root.operands:
            yield from self._written(inside, inside.instructions[root.operands[0]])
        elif root.kind in UPDATES:
            update = inside.instructions[root.operands[2 if root.kind == "scatter" else 1]].result
            yield root.result, _bytes(update, anywhere=True)
        elif root.kind == "fusion":
            called = self.computations[root.called("calls")]
            yield from self._written(called, called.root)
        else:
            yield root.result, _bytes(root.result)


def dims(text: str) -> tuple[int, ...]:
    """Of the array that the text of a type describes."""
    found = ARRAY.search(text)
    return tuple(int(d) for d in found[2].split(",") if d) if found else ()


def _arguments(rest: str) -> str:
    depth = 1
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:i]
    return rest


def _arrays(text: str) -> list[tuple]:
    return [found for found in ARRAY.findall(text) if found[0] in BITS or found[0].startswith("f8")]


def _bytes(text: str, anywhere: bool = False) -> int:
    return sum(_size(array, anywhere) for array in _arrays(text))


def _size(array: tuple, anywhere: bool = False) -> int:
    """Bytes in the memory of the chip; 0 of what is elsewhere, unless that counts too."""
    dtype, sizes, layout = array
    if re.search(r"S\([1-9]\)", layout) and not anywhere:
        return 0
    sizes = [int(d) for d in sizes.split(",") if d]
    order, tiles = [int(d) for d in re.match(r"[\d,]*", layout)[0].split(",") if d], re.search(r"T\(([\d,]+)\)", layout)
    if tiles and len(order) == len(sizes):
        for place, tile in enumerate(reversed([int(t) for t in tiles[1].split(",")])):
            if place < len(order):
                sizes[order[place]] = -(-sizes[order[place]] // tile) * tile
    return math.prod(sizes) * BITS.get(dtype, 8) // 8
