"""A cache of compiled programs, with the memory that each program takes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from policy.programs import freed_memory

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Memory of a program, in bytes per device.

    aliased: the arguments that it writes in place. outputs: the results that are not aliased. peak:
    the most at one time.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, platform: str) -> Memory | None:
        """Reads the compiler's memory analysis; None if there is none."""
        analysis = compiled.memory_analysis()
        if analysis is None:
            return None
        arguments = analysis.argument_size_in_bytes
        temporaries = analysis.temp_size_in_bytes
        aliased = analysis.alias_size_in_bytes
        outputs = analysis.output_size_in_bytes - aliased
        # The CPU compiler's peak leaves temporaries out.
        reported_peak = 0 if platform == "cpu" else getattr(analysis, "peak_memory_in_bytes", 0)
        # Other compilers' peaks include arrays in host memory.
        total = arguments + temporaries + outputs
        return cls(arguments, temporaries, outputs, aliased, min(reported_peak or total, total))


_LOG = logging.getLogger("duet.programs")
# One background thread traces at a time: tracing is Python, and the caller's thread traces too.
_TRACING = threading.Lock()


class CompiledCache:
    """The compiled programs of one jitted function, and the memory that they take. With jit alone,
    the memory analysis would compile each program a second time.

    A call compiles when jit would: once for each kind of arguments (shapes, dtypes and shardings of
    all arrays). `run` takes the shape of the program from the caller and looks at no argument.

    A program may be compiled in the background. A call that needs it waits, or compiles it if no
    thread has begun.

    memory: the memory of the last program that was compiled for each shape. For calls, the shape of
    a program is the result of `shape_of`; by default the shape of the first array of the second
    argument (the first is the weights).
    """

    def __init__(self, jitted, platform: str, *, shape_of: Callable[..., Shape] | None = None):
        """jitted: the result of `jax.jit`, whatever its signature."""
        self.jitted = jitted
        self._platform = platform
        self._shape_of = shape_of or _shape_of_second
        self._compiled: dict[tuple, Callable] = {}
        self._in_background: dict[Shape, Future] = {}
        self._lock = threading.Lock()
        self.memory: dict[Shape, Memory | None] = {}

    @property
    def number(self) -> int:
        """The number of programs that this object has compiled so far."""
        return len(self._compiled)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Returns the shapes of the programs that are compiled or will be, in the background."""
        return tuple(dict.fromkeys((*self.memory, *self._in_background)))

    @property
    def left(self) -> int:
        """How many programs are still to be compiled in the background."""
        return sum(not each.done() for each in list(self._in_background.values()))

    def lower(self, *arguments: Any, **static: Any) -> jax.stages.Lowered:
        """Traces a program for these arguments, which may be abstract."""
        return self.jitted.lower(*arguments, **static)

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        """Computes the function. `static`: arguments of jit's `static_argnames`, by name."""
        key = _key(arguments, static)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key, self._shape_of(*arguments), arguments, static)
        return compiled(*arguments)

    def compile(self, *arguments: Any, **static: Any) -> None:
        """Compiles the program that a call with these arguments runs."""
        self._compile(_key(arguments, static), self._shape_of(*arguments), arguments, static)

    def run(self, shape: Shape, *arguments: Any) -> Any:
        """Computes the function with the program of this shape. The first call with a shape
        compiles the program for its arguments."""
        compiled = self._compiled.get(shape)
        if (
            compiled is None
            and (future := self._in_background.pop(shape, None))
            and not future.cancel()
        ):
            compiled = future.result()
        if compiled is None:
            compiled = self._compile(shape, shape, arguments, {})
        return compiled(*arguments)

    def compile_in_background(
        self, pool: Executor, shape: Shape, arguments: tuple, *, trace_here: bool
    ) -> None:
        """Starts to compile the program of this shape for abstract arguments, unless that has
        begun.

        trace_here: traces the program in this thread, which may have settings of jax of its own.
        """
        if shape in self.shapes:
            return
        lowered = self.lower(*arguments) if trace_here else None
        self._in_background[shape] = pool.submit(self._compile_behind, shape, arguments, lowered)

    def _compile_behind(
        self, shape: Shape, arguments: tuple, lowered: jax.stages.Lowered | None
    ) -> Callable:
        try:
            if lowered is None:
                with _TRACING:
                    lowered = self.lower(*arguments)
            return self._compile(shape, shape, arguments, {}, lowered)
        except Exception as error:
            _LOG.warning(
                "a program for %s cannot be compiled; the call that needs it fails: %s",
                shape,
                error,
            )
            raise

    def cancel(self) -> None:
        """Gives up the programs that no thread has begun to compile."""
        for shape, future in list(self._in_background.items()):
            if future.cancel():
                del self._in_background[shape]

    def forget(self) -> None:
        """Gives up all programs, also those that are being compiled: for arguments of another
        structure."""
        self.cancel()
        for future in self._in_background.values():
            future.exception()  # waits: it may have begun
        with self._lock:
            self._in_background.clear()
            self._compiled.clear()
            self.memory.clear()

    def compile_shape(self, shape: Shape, arguments: tuple, lowered: jax.stages.Lowered) -> None:
        """Compiles the program of this shape for abstract arguments. Threads may do so at the same
        time."""
        self._compile(shape, shape, arguments, {}, lowered)

    def _compile(
        self, key: tuple, shape: Shape, arguments: tuple, static: dict, lowered=None
    ) -> Callable:
        compiled = (lowered or self.lower(*arguments, **static)).compile()
        freed_memory.give_back()
        function = callable_form(compiled, partial(self.jitted, **static), arguments)
        with self._lock:
            self.memory[shape] = Memory.of(compiled, self._platform)
            return self._compiled.setdefault(key, function)


def callable_form(compiled: jax.stages.Compiled, jitted: Callable, arguments: tuple) -> Callable:
    """Returns the function to call on `arguments` (arrays or shapes): `compiled`, or `jitted` if an
    argument has numbers of fewer than 8 bits.

    A compiled program of jax 0.10 refuses a committed array of such numbers: the array's layout
    does not state the bits of a number, and the program's layout does. jit does not compare the
    two.
    """
    return jitted if any(map(_below_a_byte, jax.tree.leaves(arguments))) else compiled


def _below_a_byte(leaf) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return (
        dtype is not None
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
        and jax.dtypes.itemsize_bits(dtype) < 8
    )


def _shape_of_second(*arguments: Any) -> Shape:
    return jax.tree.leaves(arguments[1])[0].shape


def _key(arguments: tuple, static: dict[str, object]) -> tuple:
    leaves, structure = jax.tree.flatten(arguments)
    return (structure, *static.items(), *map(_signature, leaves))


def _signature(leaf) -> tuple:
    """Returns the properties of an argument that a program depends on.

    It runs for every leaf at every call: reading attributes takes half the time of `isinstance` and
    `jnp.shape`.
    """
    sharding = leaf.sharding if getattr(leaf, "committed", False) else None
    return (
        getattr(leaf, "shape", ()),
        getattr(leaf, "dtype", type(leaf)),
        getattr(leaf, "weak_type", False),
        sharding,
    )
