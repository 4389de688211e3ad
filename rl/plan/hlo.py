"""What a compiled program does on one device, by the text of its HLO: bytes read from and written to memory, floating-point
operations of its products, and what its collectives exchange. An instruction of a loop's body counts as often as the loop runs. Of
a choice between branches all count, or the last one only where its name says that this is the usual one.

Bytes: an instruction moves its operands and its result, as they lie in memory: the last dimensions filled up to whole tiles. Arrays
in other memories, S(1) and so on, count nothing. Where a fusion only slices or gathers from an operand, what it takes counts; where
it updates an operand in place, the update counts, twice.

Operations: 2 for each multiplication of a product (dot, convolution, ragged dot), as XLA counts them; all else, elementwise, counts
nothing. Kernels count what they say of themselves (`cost_estimate` of a Pallas call). Of the rows of ragged dots, which go by the
sizes of groups, the share counts that belongs to a group in the mean; the caller gives it.

Exchanged: the larger of what a collective is given and what it returns, on one device. Of a ragged exchange the smaller: one of
both has room for the worst case, and the other is what devices send, or get back, in the mean. What goes to other slices of TPUs
is a pair of transfers, `send` and `recv`, by the hosts; it counts as a collective of its own, whose kind ends in BETWEEN.
"""

from __future__ import annotations

import math
import re
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
# They move nothing, or what the instructions inside them or their other half moves.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
    "iota",
}
ENDS = {
    "copy-done",
    "async-done",
    "async-update",
    "slice-done",
    "all-gather-done",
    "collective-permute-done",
    "partition-id",
}
ENDS |= {"send-done", "recv-done"}
SLICES, UPDATES = {"dynamic-slice", "slice", "gather"}, {"dynamic-update-slice", "scatter"}
PASSING = {"bitcast", "reshape"}
HANDS_ON = {"parameter", "tuple", "custom-call"}  # of a fusion that goes on with a collective
BETWEEN = " between slices"
# How the names of kernels begin that skip rows of no group: XLA's, and those of policy/experts/grouped_kernel.py.
GROUPED = ("ragged-dot", "gmm", "tgmm")
COLLECTIVES = {
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}


@dataclass
class Instruction:
    name: str
    result: str
    kind: str
    operands: list[str]
    rest: str
    root: bool

    def all_called(self) -> list[str]:
        """Computations that run inside this one, but for those of loops and those applied to single numbers."""
        found = re.findall(
            r"\b(?:calls|to_apply)=%([\w.-]+)" if self.kind == "call" else r"\bcalls=%([\w.-]+)", self.rest
        )
        if self.kind == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
            named = [self.called("false_computation"), self.called("true_computation")]
            found = re.findall(r"%([\w.-]+)", listed[1]) if listed else named
            return found[-1:] if EXPECTED_LAST in self.rest else found
        return found

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


@dataclass(frozen=True)
class Exchange:
    """What a collective sends around, each of the `times` that it runs. `group`: devices that take part; None: all."""

    kind: str
    bytes: int
    times: int
    group: int | None


class Program:
    """`kernels`: bytes of one call of a kernel, by the start of the names of its custom calls, where they are known better than
    from its operands. `turns`: how often a loop runs that ends by what it computes; one inside it counts once. `filled`: share of
    the rows of ragged dots that belong to a group."""

    def __init__(self, text: str, kernels: dict[str, int] | None = None, turns: int = 1, filled: float = 1.0):
        self.kernels, self.turns, self.filled, self.computations, self.entry = kernels or {}, turns, filled, {}, None
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
                current = self.computations[head[2]] = Computation()
                self.entry = head[2] if head[1] else self.entry
            elif found := INSTRUCTION.match(line):
                root, name, result, kind, rest = found.groups()
                operands = re.findall(r"%([\w.-]+)", _arguments(rest))
                current.instructions[name] = Instruction(name, result, kind, operands, rest, bool(root))

    def moved(self) -> list[Moved]:
        going: set = set()
        return [
            Moved(each.name, each.kind, tuple(self._moved(inside, each, self._goes_on(inside, each, going))), times)
            for inside, each, times in self._run(self.entry, 1)
            if each.kind not in FREE | ENDS
        ]

    def operations(self) -> float:
        """Floating-point operations of all products."""
        return sum(times * self._products(inside, each) for inside, each, times in self._run(self.entry, 1))

    def exchanged(self) -> list[Exchange]:
        """Every collective, in the order of the program; those between slices last."""
        found, transfers, going = [], {}, set()
        for inside, each, times in self._run(self.entry, 1):
            if over := re.search(r'_xla_megascale_transfer_type="(\w+)"', each.rest):
                kind, name = (
                    over[1].lower().replace("_", "-"),
                    re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', each.rest)[1],
                )
                size = max(_size(_arrays(each.result)[0], anywhere=True), transfers.get(name, (kind, 0, 0))[1])
                transfers[name] = kind, size, times
            for where, collective in () if self._goes_on(inside, each, going) else self._collectives(inside, each):
                given = [where.instructions[name].result for name in collective.operands]
                results = _arrays(collective.result)
                if collective.kind.endswith("-start") and len(results) > len(given):
                    results = results[len(given) : 2 * len(given)]  # its operands come first, and flags may follow
                kind = collective.kind.removesuffix("-start")
                if kind == "ragged-all-to-all":  # then come the array that is written into, offsets and numbers of rows
                    given, results = given[:1], results[:1]
                both = sum(map(_bytes_anywhere, given)), sum(_size(a, anywhere=True) for a in results)
                size = min(both) if kind == "ragged-all-to-all" else max(both)
                found.append(Exchange(kind, size, times, _group(collective.rest)))
        return found + [Exchange(kind + BETWEEN, size, times, None) for kind, size, times in transfers.values()]

    def kernel_calls(self) -> dict[str, int]:
        """How often each kernel runs, by its name without the number that the compiler puts behind it."""
        found: dict[str, int] = {}
        for _, each, times in self._run(self.entry, 1):
            if each.kind == "custom-call" and "tpu_custom_call" in each.rest:
                name = re.sub(r"\.\d+$", "", each.name)
                found[name] = found.get(name, 0) + times
        return found

    def _run(self, computation: str, times: int, turns: int | None = None):
        """(computation, instruction, how often it runs) of all that is not inside a fusion. `turns`: of loops here that end by what
        they compute."""
        inside, turns = self.computations[computation], self.turns if turns is None else turns
        for each in inside.instructions.values():
            if each.kind == "while":
                known = self._trips(each)
                trips, inner = (turns, 1) if known is None else (known, turns)
                yield from self._run(each.called("body"), times * trips, inner)
            elif each.kind in ("call", "conditional"):
                for called in each.all_called():
                    yield from self._run(called, times, turns)
            else:
                yield inside, each, times

    def _trips(self, loop: Instruction) -> int | None:
        """How often the body of a loop runs: what the compiler knows, or, of a loop that counts from 0, the number that its
        condition compares with over what the body adds each time. None: it ends by what it computes."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        constants = (
            each for each in condition.instructions.values() if each.kind == "constant" and each.result[0] in "su"
        )
        # A condition that adds something up begins at 0.
        limits = [number for number in (int(each.rest.split(")")[0]) for each in constants) if number]
        return -(-limits[0] // self._step(loop, condition)) if len(limits) == 1 else None

    def _step(self, loop: Instruction, condition: Computation) -> int:
        """What the body of a loop adds to its counter. Products that a TPU takes piece by piece while the next pieces come from
        other chips go on by two pieces."""
        body = self.computations[loop.called("body")]
        for counter in (condition.instructions[name] for name in condition.root.operands):
            if counter.kind != "get-tuple-element":
                continue
            following = body.instructions[body.root.operands[int(re.search(r"\bindex=(\d+)", counter.rest)[1])]]
            given = [body.instructions[name] for name in following.operands]
            if following.kind == "fusion":
                given += self.computations[following.called("calls")].instructions.values()
            added = [int(each.rest.split(")")[0]) for each in given if each.kind == "constant"]
            return added[0] if len(added) == 1 else 1
        return 1

    def _products(self, inside: Computation, each: Instruction) -> float:
        share = self.filled if each.name.startswith(GROUPED) else 1.0
        if each.kind in PRODUCTS:
            return share * PRODUCTS[each.kind](each, [inside.instructions[name].result for name in each.operands])
        if each.kind == "custom-call":
            stated = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', each.rest)
            return share * float(stated[1]) if stated else 0.0
        return sum(
            self._products(self.computations[called], other)
            for called in (each.all_called() if each.kind in ("fusion", "async-start") else ())
            for other in self.computations[called].instructions.values()
        )

    def _collectives(self, inside: Computation, each: Instruction):
        if each.kind.removesuffix("-start") in COLLECTIVES:
            yield inside, each
        elif each.kind in ("fusion", "async-start"):
            for called in each.all_called():
                for other in self.computations[called].instructions.values():
                    yield from self._collectives(self.computations[called], other)

    def _goes_on(self, inside: Computation, each: Instruction, going: set) -> bool:
        """Whether a fusion has a collective that an earlier one began. A TPU puts what is computed meanwhile into fusions with it:
        each holds the collective and hands its arrays on. `going`: those that were begun."""
        found = {
            re.search(r"\bchannel_id=\d+", other.rest)
            for where, other in self._collectives(inside, each)
            if where is not inside
        }
        named = {(id(inside), channel[0]) for channel in found if channel}
        begun = bool(named) and named <= going
        going |= named
        return begun

    def _moved(self, inside: Computation, each: Instruction, goes_on: bool):
        for start, size in self.kernels.items():
            if each.kind == "custom-call" and each.name.startswith(start):
                yield start, size
                return
        operands = [inside.instructions[name].result for name in each.operands]
        if each.kind in ("send", "recv"):
            yield from ((array[0], _size(array)) for array in _arrays(each.result)[:1])
        elif each.kind == "copy-start":
            yield from ((array[0], _size(array)) for array in _arrays(each.result)[:2])
        elif each.kind == "fusion":
            called = self.computations[each.called("calls")]
            for number, operand in enumerate(operands):
                name = called.parameter(number).name
                if goes_on and all(user.kind in COLLECTIVES | HANDS_ON for user, _ in called.users(name)):
                    continue
                taken = self._read(called, name)
                yield operand, _bytes(operand) if taken is None else min(taken, _bytes(operand))
            if _bytes(each.result):
                yield from self._written(called, called.root, goes_on)
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
                total += _bytes(
                    inside.instructions[user.operands[2 if user.kind == "scatter" else 1]].result, anywhere=True
                )
            elif user.kind == "fusion":
                called = self.computations[user.called("calls")]
                part = self._read(called, called.parameter(user.operands.index(operand)).name)
                if part is None:
                    return None
                total += part
            else:
                return None
        return total

    def _written(self, inside: Computation, root: Instruction, goes_on: bool = False):
        if goes_on and root.kind in COLLECTIVES | HANDS_ON - {"tuple"}:
            return
        if root.kind == "tuple":
            for name in root.operands:
                yield from self._written(inside, inside.instructions[name], goes_on)
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


def _bytes_anywhere(text: str) -> int:
    return _bytes(text, anywhere=True)


def _group(rest: str) -> int | None:
    """Devices of a group of a collective; axes of a mesh, some of them in part (`'axis':(2)4`), may stand for them."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(counted[1]) if counted else None


def _numbers(text: str, key: str) -> list[int]:
    found = re.search(rf"\b{key}=\{{([\d,]*)\}}", text)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _dot(each: Instruction, operands: list[str]) -> float:
    left, result = dims(operands[0]), dims(each.result)
    return 2.0 * math.prod(result) * math.prod(left[i] for i in _numbers(each.rest, "lhs_contracting_dims"))


def _ragged_dot(each: Instruction, operands: list[str]) -> float:
    """Each row meets the weights of its own group only."""
    left, right, result = dims(operands[0]), dims(operands[1]), dims(each.result)
    summed = math.prod(left[i] for i in _numbers(each.rest, "lhs_contracting_dims"))
    if len(result) == len(right) and len(left) == len(right) - 1 and result[-1:] == right[-1:]:
        return 2.0 * math.prod(left) * right[-1]
    return 2.0 * math.prod(result) * summed


def _convolution(each: Instruction, operands: list[str]) -> float:
    """As XLA counts: pairs of an output and a place of the window that lies on a number, not on padding or between dilated ones. A
    TPU computes products of matrices so, batches of them with a window over the batch."""
    left, right, result = (dims(text) for text in (*operands[:2], each.result))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
    inputs, kernel, outputs = labels.groups()
    stated = re.search(r"window=\{([^}]*)\}", each.rest)
    window = dict(re.findall(r"(\w+)=([\w-]+)", stated[1] if stated else ""))
    pairs = 1.0
    for place in (letter for letter in kernel if letter.isdigit()):
        base, size, out = left[inputs.index(place)], right[kernel.index(place)], result[outputs.index(place)]
        pairs *= _valid_pairs(base, size, out, {key: value.split("x")[int(place)] for key, value in window.items()})
    return 2.0 * result[outputs.index("b")] * result[outputs.index("f")] * right[kernel.index("i")] * pairs


def _valid_pairs(base: int, size: int, out: int, window: dict[str, str]) -> int:
    stride, low = int(window.get("stride", 1)), int(window.get("pad", "0_0").split("_")[0])
    dilated, spread = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    length = (base - 1) * dilated + 1
    count = 0
    for w in range(size):
        places = (o * stride - low + w * spread for o in range(out))
        count += sum(1 for at in places if 0 <= at < length and at % dilated == 0)
    return count


PRODUCTS = {"dot": _dot, "ragged-dot": _ragged_dot, "convolution": _convolution}
