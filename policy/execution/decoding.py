"""Weights in the form that decoding reads fastest: on CPU as matrices (policy/ops/projection.py),
on a GPU in the type of the activations.

They are copies: the policy's own arrays do not change. Only decoders with unrolled layers read this
form; where stacks are scanned (DecoderPrograms.scan), as on TPU and on several GPUs, a product
reads its weight in place. `DecodingWeights` keeps the copies between the calls of a generator on
one device, and `prepare_for_decoding` brings them, or weights that are still stacked, into the form
of the layers, inside a program.

V vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.typing import ArrayLike

from policy.adapter_spec import DORA_SCALE, LORA_A, LORA_B, MAGNITUDE
from policy.adapters.learning import is_adapter
from policy.execution.array_identity import ArrayIdentity
from policy.model import Graph
from policy.ops.adapted import DoraParts, dora_scale
from policy.ops.projection import DecodingMatrices, Projection

# Weights of one module that read the same input. If they are small together, they become one
# matrix.
READ_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj"),
)
# A weight whose parts are read by separate products (policy/attention/mla.py).
NOT_PRODUCTS = ("kv_b_proj",)


class Repeats:
    """A stacked weight as one array per repeat; `a[r]` is repeat r, as for the stacked array.

    XLA slices a stacked array in every step of a loop, which copies all weights at each step.
    """

    def __init__(self, each: Iterable):
        self._each = tuple(each)

    def __getitem__(self, r: int):
        return self._each[r]


Params: TypeAlias = dict[str, Any]
"""Weights by path, as decode programs take them: arrays, which may be abstract or quantised, and
tuples with a copy for each repeat of a stack."""


class DecodingWeights:
    """The copies that the decode programs of a generator read. They are kept until `prepare` gets
    other arrays, or until `release`.

    One small program for each stack copies the weights of a repeat. Decode programs get the copies
    as arguments. Programs that made the copies themselves would take twice as long to compile, and
    would copy at every call.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._copy = jax.jit(partial(_copy_repeat, graph))
        self.release()

    def prepare(self, params: Params) -> Params:
        """Returns the weights; a weight of a stack becomes a tuple with one copy for each repeat. A
        copy is an array, or DecodingMatrices under the first of their paths. `prepare_for_decoding`
        reads the result."""
        stacks, others = _stacks(params, leave=self._not_copied(params))
        arrays = jax.tree.leaves(stacks)
        if self._identity.update(arrays):
            self.release()  # the old copies go before the new ones come
            for stack in stacks:
                repeats = [self._copy(stack, np.int32(r)) for r in range(_repeats(stack))]
                self._copies |= {path: tuple(each[path] for each in repeats) for path in repeats[0]}
            self._identity.update(arrays)  # not before all are copied
        return others | self._copies

    def _not_copied(self, params: Params) -> frozenset[str]:
        """Returns the paths of weights of stacks that are read where they are: those in host
        memory, and adapters, which are small and change while the weights under them stay."""
        return self._graph.hosted | frozenset(filter(is_adapter, params))

    def abstract(self, params: Params) -> Params:
        """Returns the result of `prepare` with shapes in the place of the copies. `params` may be
        abstract."""
        stacks, others = _stacks(params, leave=self._not_copied(params))
        for stack in stacks:
            repeat = jax.eval_shape(self._copy, stack, np.int32(0))
            others |= {path: (each,) * _repeats(stack) for path, each in repeat.items()}
        return others

    def release(self) -> None:
        """Drops the copies of stacked weights; the next `prepare` makes them again."""
        self._identity = ArrayIdentity()
        self._copies: dict[str, tuple] = {}


def prepare_for_decoding(graph: Graph, params: Params) -> Params:
    """Returns the weights in the form that unrolled layers read: each weight of a stack as Repeats.

    `params` may be the result of DecodingWeights. Weights that are still stacked are copied here,
    so call it outside the loop of the steps.
    """
    stacks, prepared = _stacks(params)
    for stack in stacks:
        # Without the barrier XLA moves the copies into the loop.
        repeats = [
            jax.lax.optimization_barrier(_copy_repeat(graph, stack, r))
            for r in range(_repeats(stack))
        ]
        prepared |= {path: tuple(each[path] for each in repeats) for path in repeats[0]}
    for path, repeats in list(prepared.items()):
        if not isinstance(repeats, tuple):
            continue
        if isinstance(repeats[0], DecodingMatrices):
            del prepared[path]
            projections = [matrices.projections() for matrices in repeats]
            prepared |= {each: Repeats(own[each] for own in projections) for each in projections[0]}
        else:
            prepared[path] = Repeats(repeats)
    prepared = _with_dora_scales(graph, prepared)
    head = "embed_tokens" if graph.config.tied_head else "lm_head"
    if _makes_matrices(graph) and head not in graph.hosted:
        prepared[head] = _head(params[head])
    elif head not in graph.hosted:
        # Without the barrier XLA converts the head at each step.
        prepared[head] = jax.lax.optimization_barrier(_as_computed(graph, params[head]))
    return prepared


def _with_dora_scales(graph: Graph, params: Params) -> Params:
    """Returns the weights of unrolled layers with the scales of DoRA in the place of its
    magnitudes."""
    adapter = graph.runtime.adapter
    for path in [path for path in graph.paths if path + MAGNITUDE in params]:
        assert adapter is not None  # weights with magnitudes have one
        parts = [params[path + end] for end in ("", LORA_A, LORA_B)]
        magnitude: Any = params.pop(path + MAGNITUDE)
        rule = adapter.scale, graph.layer_dims(path)
        if isinstance(magnitude, Repeats):
            repeats = zip(*map(iter, (*parts, magnitude)), strict=True)
            params[path + DORA_SCALE] = Repeats(
                dora_scale(DoraParts._make(each), *rule) for each in repeats
            )
        else:
            params[path + DORA_SCALE] = dora_scale(DoraParts._make((*parts, magnitude)), *rule)
    return params


def _as_computed(graph: Graph, weight: Any) -> Any:
    """Returns a weight of products in the type of the activations; quantised ones as they are."""
    return weight if isinstance(weight, qwix.QArray) else weight.astype(graph.runtime.dtype)


def _makes_matrices(graph: Graph) -> bool:
    """Whether weights become DecodingMatrices: float32 on one CPU. Others are only split into
    repeats, in the type of the activations."""
    return (
        graph.layout.platform == "cpu"
        and graph.runtime.dtype == "float32"
        and graph.runtime.quantization is None
        and graph.layout.mesh.size == 1
    )


def _stacks(
    params: Params, leave: Collection[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (the stacked weights of each stack, all others). `leave`: paths that count as
    others."""
    stacks: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for path, weight in params.items():
        if path.startswith("stacks.") and path not in leave and not isinstance(weight, tuple):
            stacks.setdefault(path.split(".")[1], {})[path] = weight
        else:
            others[path] = weight
    return list(stacks.values()), others


def _repeats(stack: Params) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def _copy_repeat(graph: Graph, stack: Params, r: ArrayLike) -> Params:
    """Copies the weights of repeat r of a stack: DecodingMatrices under the first of their
    paths."""
    copies: dict[str, Any] = {}
    remaining = dict(stack)
    while remaining:
        path = next(iter(remaining))
        together = _read_together(graph, remaining, path)
        if together:
            weights = {each: remaining.pop(each)[r] for each in together}
            copies[together[0]] = DecodingMatrices.of(weights, len(graph.inputs[path]))
        else:
            weight = jax.tree.map(lambda a: a[r], remaining.pop(path))
            copies[path] = _as_computed(graph, weight) if path in graph.inputs else weight
    return copies


def _read_together(graph: Graph, stack: Params, path: str) -> list[str]:
    """Returns the paths of the weights that read the input of this one, itself included; none if it
    is no matrix."""
    if not _is_matrix(graph, stack, path):
        return []
    module, _, name = path.rpartition(".")
    names = next((names for names in READ_TOGETHER if name in names), (name,))
    return [
        p
        for p in (f"{module}.{name}" for name in names)
        if p in stack and _is_matrix(graph, stack, p)
    ]


def _is_matrix(graph: Graph, stack: Params, path: str) -> bool:
    """Whether this is a weight of floats whose products sum over the first dimensions of each
    repeat."""
    if (
        not _makes_matrices(graph)
        or path not in graph.inputs
        or path in graph.hosted
        or isinstance(stack[path], qwix.QArray)
    ):
        return False
    inputs = graph.inputs[path]
    return (
        inputs == tuple(range(1, len(inputs) + 1)) and path.rpartition(".")[2] not in NOT_PRODUCTS
    )


def _head(weight_VE: jax.Array) -> Projection:
    """Wraps the head, a table [V, E], which is stored transposed already."""
    V, E = weight_VE.shape
    return Projection(
        weight_VE.astype(jnp.float32), transposed=True, start=0, inputs=(E,), outputs=(V,)
    )
