"""Counts the work of a compiled program on one device from its HLO text: HBM traffic, operations
and communication.

An instruction in the body of a loop counts once per iteration. All branches of a conditional count,
or only the last one if its name marks it as the usual one.

HBM traffic: an instruction moves its operands and its result, padded to tiles as they are stored.
Arrays in other memories, S(1) and so on, do not count. If a fusion only slices or gathers from an
operand, the part that it takes counts. If it updates an operand in place, the update counts twice.
A ragged exchange reads and writes the smaller of its input and output, which is the mean.

Operations: 2 for each multiplication of a product (dot, convolution, ragged dot), as XLA counts
them. Elementwise operations do not count. A kernel counts its own `cost_estimate` (of a Pallas
call). A ragged dot computes the rows of groups only; the caller gives the expected share of rows
that belong to a group.

Communication: the larger of input and output of a collective, on one device. For a ragged exchange,
the smaller: the other side has room for the worst case, and the smaller is the expected size. Data
for other TPU slices go through the hosts as a pair of transfers, `send` and `recv`. The pair counts
as one collective whose kind ends in BETWEEN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rl.plan import hlo_text
from rl.plan.hlo_products import PRODUCTS
from rl.plan.hlo_text import (
    RESHAPES,
    Computation,
    Instruction,
    bytes_anywhere,
    bytes_in_hbm,
    size_anywhere,
    size_in_hbm,
)

# They move nothing, or the instructions inside them, or their other half, count.
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
    "send-done",
    "recv-done",
}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice", "scatter"}
# Instructions that pass an array on inside a fusion that continues a collective.
PASSES_ON = {"parameter", "tuple", "custom-call"}
BETWEEN = " between slices"
# Prefix of the kernels that read one layer of stacked weights (policy/ops/stacked_kernel.py).
STACKED = "gmm_stacked"
# Prefixes of kernels that skip rows without a group: XLA's, and those of
# policy/ops/grouped_kernel.py.
GROUPED = ("ragged-dot", "gmm", "tgmm")
COLLECTIVES = {
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}


@dataclass(frozen=True)
class Moved:
    """HBM traffic of one instruction. arrays: (text of the type, bytes) of each array that one run
    reads or writes."""

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    times: int

    @property
    def bytes(self) -> int:
        """Returns the bytes of all runs."""
        return self.times * sum(size for _, size in self.arrays)


@dataclass(frozen=True)
class Exchange:
    """Communication of one collective that runs `times` times. group: devices that take part; None:
    all."""

    kind: str
    bytes: int
    times: int
    group: int | None


class HloProgram:
    """A compiled program.

    kernels: bytes of one call of a kernel, by the prefix of the names of its custom calls, where
    the caller knows them better than the operands say. trip_count: iterations of a loop whose end
    depends on computed values; such a loop inside another one counts once. occupancy: share of the
    rows of ragged dots that belong to a group.
    """

    def __init__(
        self,
        text: str,
        kernels: Mapping[str, int] | None = None,
        trip_count: int = 1,
        occupancy: float = 1.0,
    ):
        self.kernels = kernels or {}
        self.trip_count = trip_count
        self.occupancy = occupancy
        self.computations, self.entry = hlo_text.parse(text)

    def moved(self) -> list[Moved]:
        """Lists the HBM traffic of every instruction."""
        started: set[tuple[int, str]] = set()
        return [
            Moved(
                each.name,
                each.kind,
                tuple(self._moved(inside, each, self._continues(inside, each, started))),
                times,
            )
            for inside, each, times in self._run(self.entry, 1)
            if each.kind not in FREE | ENDS
        ]

    def operations(self) -> float:
        """Returns the floating-point operations of all products."""
        return sum(
            times * self._products(inside, each) for inside, each, times in self._run(self.entry, 1)
        )

    def exchanged(self) -> list[Exchange]:
        """Lists every collective in the order of the program; transfers between slices come
        last."""
        exchanges: list[Exchange] = []
        transfers: dict[str, tuple[str, int, int]] = {}
        started: set[tuple[int, str]] = set()
        for inside, each, times in self._run(self.entry, 1):
            if transfer := re.search(r'_xla_megascale_transfer_type="(\w+)"', each.rest):
                kind = transfer[1].lower().replace("_", "-")
                rendezvous = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', each.rest)
                name = rendezvous[1] if rendezvous else each.name
                size = size_anywhere(hlo_text.arrays(each.result)[0])
                transfers[name] = kind, max(size, transfers.get(name, (kind, 0, 0))[1]), times
            if not self._continues(inside, each, started):
                exchanges += [_exchange(*pair, times) for pair in self._collectives(inside, each)]
        return exchanges + [
            Exchange(kind + BETWEEN, size, times, None) for kind, size, times in transfers.values()
        ]

    def kernel_calls(self) -> dict[str, int]:
        """Returns how often each kernel runs, by its name without the number that the compiler
        appends."""
        calls: dict[str, int] = {}
        for _, each, times in self._run(self.entry, 1):
            if each.kind == "custom-call" and "tpu_custom_call" in each.rest:
                name = re.sub(r"\.\d+$", "", each.name)
                calls[name] = calls.get(name, 0) + times
        return calls

    def _run(
        self, computation: str, times: int, trip_count: int | None = None
    ) -> Iterator[tuple[Computation, Instruction, int]]:
        """Yields (computation, instruction, number of runs) of all instructions outside fusions.

        trip_count: iterations of loops in this computation whose end depends on computed values.
        """
        inside = self.computations[computation]
        trip_count = self.trip_count if trip_count is None else trip_count
        for each in inside.instructions.values():
            if each.kind == "while":
                known = self._trips(each)
                trips, inner = (trip_count, 1) if known is None else (known, trip_count)
                yield from self._run(each.called("body"), times * trips, inner)
            elif each.kind in ("call", "conditional"):
                for called in each.all_called():
                    yield from self._run(called, times, trip_count)
            else:
                yield inside, each, times

    def _trips(self, loop: Instruction) -> int | None:
        """Returns the iterations of a loop; None if its end depends on computed values.

        The compiler may write the number down. Otherwise a loop counts from 0 to the constant of
        its condition.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        constants = (
            each
            for each in condition.instructions.values()
            if each.kind == "constant" and each.result[0] in "su"
        )
        # A 0 among the constants is the start of a sum in the condition.
        limits = [
            number for number in (int(each.rest.split(")")[0]) for each in constants) if number
        ]
        return -(-limits[0] // self._step(loop, condition)) if len(limits) == 1 else None

    def _step(self, loop: Instruction, condition: Computation) -> int:
        """Returns the number that the body of a loop adds to its counter.

        A TPU splits some products into pieces that arrive from other chips; these loops advance by
        two pieces.
        """
        body = self.computations[loop.called("body")]
        for counter in (condition.instructions[name] for name in condition.root.operands):
            index = (
                re.search(r"\bindex=(\d+)", counter.rest)
                if counter.kind == "get-tuple-element"
                else None
            )
            if index is None:
                continue
            following = body.instructions[body.root.operands[int(index[1])]]
            inputs = [body.instructions[name] for name in following.operands]
            if following.kind == "fusion":
                inputs += self._called(following).instructions.values()
            added = [int(each.rest.split(")")[0]) for each in inputs if each.kind == "constant"]
            return added[0] if len(added) == 1 else 1
        return 1

    def _products(self, inside: Computation, each: Instruction) -> float:
        share = self.occupancy if each.name.startswith(GROUPED) else 1.0
        if each.kind in PRODUCTS:
            return share * PRODUCTS[each.kind](
                each, [inside.instructions[name].result for name in each.operands]
            )
        if each.kind == "custom-call":
            estimate = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', each.rest)
            return share * float(estimate[1]) if estimate else 0.0
        return sum(
            self._products(self.computations[called], other)
            for called in (each.all_called() if each.kind in ("fusion", "async-start") else ())
            for other in self.computations[called].instructions.values()
        )

    def _collectives(
        self, inside: Computation, each: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        if each.kind.removesuffix("-start") in COLLECTIVES:
            yield inside, each
        elif each.kind in ("fusion", "async-start"):
            for called in each.all_called():
                for other in self.computations[called].instructions.values():
                    yield from self._collectives(self.computations[called], other)

    def _continues(
        self, inside: Computation, each: Instruction, started: set[tuple[int, str]]
    ) -> bool:
        """Returns whether a fusion continues a collective that an earlier one started. Adds its own
        to `started`.

        A TPU fuses a collective with the products that run during it. Each fusion holds the
        collective and passes its arrays on.
        """
        channels = {
            re.search(r"\bchannel_id=\d+", other.rest)
            for where, other in self._collectives(inside, each)
            if where is not inside
        }
        named = {(id(inside), channel[0]) for channel in channels if channel}
        continues = bool(named) and named <= started
        started |= named
        return continues

    def _moved(
        self, inside: Computation, each: Instruction, continues: bool
    ) -> Iterator[tuple[str, int]]:
        """Yields (text of the type, bytes) of every array that one run of an instruction reads or
        writes."""
        for prefix, size in self.kernels.items():
            if each.kind == "custom-call" and each.name.startswith(prefix):
                yield prefix, size
                return
        operands = [inside.instructions[name].result for name in each.operands]
        if each.kind == "custom-call" and each.name.startswith(STACKED):
            for text in (*operands, each.result):
                shape = hlo_text.dims(text)  # the kernel reads one layer of the stack [R, G, E, F]
                yield text, bytes_in_hbm(text) // (shape[0] if len(shape) == 4 else 1)
        elif each.kind == "custom-call" and '"AllocateBuffer"' in each.rest:
            return
        elif each.kind == "async-start" and self._called(each).root.kind == "ragged-all-to-all":
            yield from self._moved(self._called(each), self._called(each).root, continues)
        elif each.kind == "ragged-all-to-all":  # the second operand is the array to write into
            rows = min(bytes_anywhere(operands[0]), bytes_anywhere(each.result))
            yield from (
                (text, min(rows, bytes_in_hbm(text))) for text in (operands[0], each.result)
            )
        elif each.kind in ("send", "recv"):
            yield from (
                (array[0], size_in_hbm(array)) for array in hlo_text.arrays(each.result)[:1]
            )
        elif each.kind == "copy-start":
            yield from (
                (array[0], size_in_hbm(array)) for array in hlo_text.arrays(each.result)[:2]
            )
        elif each.kind == "fusion":
            called = self._called(each)
            for number, operand in enumerate(operands):
                name = called.parameter(number).name
                if continues and all(
                    user.kind in COLLECTIVES | PASSES_ON for user, _ in called.users(name)
                ):
                    continue
                taken = self._read(called, name)
                yield (
                    operand,
                    bytes_in_hbm(operand) if taken is None else min(taken, bytes_in_hbm(operand)),
                )
            if bytes_in_hbm(each.result):
                yield from self._written(called, called.root, continues)
        elif each.kind in SLICES:
            yield from (
                (operands[0], bytes_anywhere(each.result)),
                (each.result, bytes_in_hbm(each.result)),
            )
        elif each.kind in UPDATES:
            update = operands[-1 if each.kind == "scatter" else 1]
            yield from ((update, bytes_anywhere(update)), (each.result, bytes_anywhere(update)))
        else:
            yield from ((text, bytes_in_hbm(text)) for text in (*operands, each.result))

    def _called(self, each: Instruction) -> Computation:
        """Returns the computation of a fusion, or of what an asynchronous instruction starts."""
        return self.computations[each.called("calls")]

    def _read(self, inside: Computation, name: str) -> int | None:
        """Returns the bytes that a fusion reads of one operand; None: all of it."""
        total = 0
        for user, operand in inside.users(name):
            first = user.operands.index(operand) == 0
            if user.kind in SLICES and first:
                total += bytes_anywhere(user.result)
            elif user.kind in UPDATES and first:
                total += bytes_anywhere(_update(inside, user))
            elif user.kind == "fusion":
                called = self._called(user)
                part = self._read(called, called.parameter(user.operands.index(operand)).name)
                if part is None:
                    return None
                total += part
            else:
                return None
        return total

    def _written(
        self, inside: Computation, root: Instruction, continues: bool = False
    ) -> Iterator[tuple[str, int]]:
        """Yields (text of the type, bytes) of every array that a fusion with this root writes."""
        if continues and root.kind in COLLECTIVES | PASSES_ON - {"tuple"}:
            return
        if root.kind == "tuple":
            for name in root.operands:
                yield from self._written(inside, inside.instructions[name], continues)
        elif root.kind in RESHAPES and root.operands:
            yield from self._written(inside, inside.instructions[root.operands[0]])
        elif root.kind in UPDATES:
            yield root.result, bytes_anywhere(_update(inside, root))
        elif root.kind == "fusion":
            called = self._called(root)
            yield from self._written(called, called.root)
        else:
            yield root.result, bytes_in_hbm(root.result)


def _update(inside: Computation, each: Instruction) -> str:
    """Returns the type of the array that an instruction writes into its first operand."""
    return inside.instructions[each.operands[2 if each.kind == "scatter" else 1]].result


def _exchange(inside: Computation, collective: Instruction, times: int) -> Exchange:
    inputs = [inside.instructions[name].result for name in collective.operands]
    results = hlo_text.arrays(collective.result)
    if collective.kind.endswith("-start") and len(results) > len(inputs):
        results = results[
            len(inputs) : 2 * len(inputs)
        ]  # the operands come first, and flags may follow
    kind = collective.kind.removesuffix("-start")
    if (
        kind == "ragged-all-to-all"
    ):  # the further operands are the array to write into, offsets and row counts
        inputs = inputs[:1]
        results = results[:1]
    both = sum(map(bytes_anywhere, inputs)), sum(map(size_anywhere, results))
    size = min(both) if kind == "ragged-all-to-all" else max(both)
    return Exchange(kind, size, times, hlo_text.group_size(collective.rest))
