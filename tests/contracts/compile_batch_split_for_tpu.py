"""Compiles the gradient of two DeepSeek-V3 layers for four chips of a TPU v5p, without one: run by
test_experts_for_tpu.py.

    python compile_batch_split_for_tpu.py split|plain [rule of quantization]

Prints what the scheduled program does with tokens between devices, as a JSON list of [kind,
batches, products]: an all-gather or a reduce-scatter, the micro-batches whose tokens it moves, and
the micro-batches of each grouped product between its start and its end. Needs libtpu.
"""

import json
import math
import re
import sys

from tpu_compiler import program_text  # isort: split

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from oracles import STANDARD, configuration

from policy import families
from policy.config import Runtime
from policy.layers import batch_split
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.modes import make_step

ROWS, LENGTH, DEVICES = 8, 768, 4
SIZES = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def compiled(split: bool, rule: str | None) -> str:
    """The text of the scheduled program, in bfloat16, with all that the schedule asks of the
    compiler."""
    mesh = layout(
        {"expert": DEVICES},
        devices=topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices,
    )
    config = families.read(configuration("DeepseekV3", **STANDARD["DeepseekV3"] | SIZES))
    asked = Runtime(
        dtype="bfloat16",
        param_dtype="bfloat16",
        scan=False,
        remat="none",
        batch_split=True,
        quantization=rule,
    )
    options = batch_split.compiler_options(Graph(config, asked, mesh).runtime)
    graph = Graph(config, asked, mesh).with_runtime(batch_split=split)

    def put(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(axes, shape))

    def loss(trained, still, tokens, segments):
        hidden, *_ = graph.decoder(trained | still)(
            tokens, make_step(tokens, segments=segments), None, graph.runtime
        )
        return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

    params = {path: put(s.shape, s.dtype, *graph.axes[path]) for path, s in graph.shapes.items()}
    trained = {path: p for path, p in params.items() if path not in graph.untrained}
    still = {path: p for path, p in params.items() if path in graph.untrained}
    tokens = put((ROWS, LENGTH), jnp.int32, "batch", None)
    places = {path: p.sharding for path, p in trained.items()}
    jax.jit(jax.grad(loss), out_shardings=places).lower(trained, still, tokens, tokens).compile(
        compiler_options=options
    )
    return program_text()


class Program:
    """The entry computation of a scheduled program: its instructions in their order, and whose
    tokens each result depends on.

    A micro-batch is named after its first gather of tokens. What depends on several is taken for
    nobody's: the loss is of all. So a gather of gradients starts out as nobody's too, and belongs
    to the micro-batch of whatever it is first used together with.
    """

    def __init__(self, text: str):
        entry = text[re.search(r"^ENTRY ", text, re.M).start() :]
        self.lines = [result for line in entry.splitlines() if (result := _instruction(line))]
        self.same: dict[str, str] = {}  # gathers that are not the first of their micro-batch
        while result := self._recognised():
            self.same |= result

    def moves(self) -> list[list]:
        """See the docstring of the file."""
        moves, under_way, owners = [], {}, self._owners()
        for name, kind, operation, shapes, *_ in self.lines:
            root = name.split(".call-")[0]
            if kind == "product":
                for products in under_way.values():
                    products.append(owners[name])
            elif kind and operation == "async-update":
                under_way[root] = []
            elif kind and operation == "async-done":
                products = under_way.pop(root)
                if _of_tokens(shapes, kind):
                    moves.append([kind, owners[name], products])
        return moves

    def _owners(self) -> dict[str, str | None]:
        """The micro-batch of every result."""
        owners, elements = (
            {},
            {},
        )  # by element of a tuple, so that what only passes through one together stays apart
        for name, kind, operation, shapes, operands, index in self.lines:
            if operation == "get-tuple-element" and operands[0] in elements:
                owners[name] = elements[operands[0]][index]
                continue
            if operation == "tuple":
                elements[name] = [owners[operand] for operand in operands]
            result = {owners.get(operand) for operand in operands} - {None}
            owners[name] = result.pop() if len(result) == 1 else None
            if (
                not result
                and owners[name] is None
                and self._gathers_tokens(kind, operation, shapes)
            ):
                owners[name] = self.same.get(name, name)
        return owners

    def _gathers_tokens(self, kind, operation, shapes) -> bool:
        return kind == "all-gather" and operation == "async-done" and _of_tokens(shapes, kind)

    def _recognised(self) -> dict[str, str]:
        """Gathers taken for the first of a micro-batch that are used together with something of
        another one."""
        owners = self._owners()
        firsts = [name for name, kind, operation, shapes, *_ in self.lines if owners[name] == name]
        for first in firsts:
            carried = {first}
            for name, _, operation, _, operands, _ in self.lines:
                if carried.isdisjoint(operands):
                    continue
                if operation in ("bitcast", "copy", "get-tuple-element"):
                    carried.add(name)
                    continue
                others = {owners.get(operand) for operand in operands} - {None, first}
                if len(others) == 1:
                    return {first: others.pop()}
        return {}


def _instruction(line: str):
    """(name, "product", a collective or None, operation, shapes of the result, operands, index) of
    a line of a program.
    """
    result = re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)", line)
    if not result:
        return None
    name, shapes, operation, rest = result.groups()
    operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
    index = re.search(r"index=(\d+)", rest.split(")", 1)[-1])
    collective = re.match(r"(all-gather|reduce-scatter)", name)
    kind = (
        "product" if name.startswith("ragged-dot-none") else collective[1] if collective else None
    )
    return name, kind, operation, shapes, operands, int(index[1]) if index else None


def _of_tokens(shapes: str, kind: str) -> bool:
    """Whether a collective moves hidden states: its result is [tokens, hidden] of all devices, or
    of one."""
    dims = [int(d) for d in re.search(r"\[([\d,]*)\]", shapes)[1].split(",") if d]
    tokens = math.prod(dims) // SIZES["hidden_size"]
    full = ROWS * LENGTH // (1 if kind == "all-gather" else DEVICES)
    return dims[-1:] == [SIZES["hidden_size"]] and tokens in (full, full // batch_split.PARTS)


if __name__ == "__main__":
    print(json.dumps(Program(compiled(sys.argv[1] == "split", *sys.argv[2:] or [None])).moves()))
