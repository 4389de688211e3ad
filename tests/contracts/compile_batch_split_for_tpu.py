"""Compiles the gradient of a DeepSeek-V3 layer for four chips of a TPU v5p, without one: run by test_experts_for_tpu.py.

    python compile_batch_split_for_tpu.py split|plain

Prints the schedule of the compiled program as a JSON list of [what, scope]: "all-gather start", "all-gather done", "reduce-scatter
start", "reduce-scatter done" or "product", with the name of the operation in the program. Needs libtpu.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

dump = tempfile.TemporaryDirectory()
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump.name}"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from the cache is not dumped
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from oracles import STANDARD, configuration  # noqa: E402

from policy import batch_split, families  # noqa: E402
from policy.config import Runtime  # noqa: E402
from policy.model import Graph  # noqa: E402
from policy.modes import sit  # noqa: E402
from policy.sharding import layout  # noqa: E402

SIZES = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def compiled(split: bool) -> str:
    """The text of the scheduled program, in bfloat16, with all that the schedule asks of the compiler."""
    mesh = layout({"expert": 4}, devices=topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices)
    config = families.read(configuration("DeepseekV3", **STANDARD["DeepseekV3"] | SIZES))
    asked = Runtime(dtype="bfloat16", param_dtype="bfloat16", scan=False, remat="none", batch_split=True)
    options = batch_split.compiler_options(Graph(config, asked, mesh).runtime)
    graph = Graph(config, asked, mesh).at(batch_split=split)

    def placed(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(axes, shape))

    def loss(trained, still, tokens, segments):
        hidden, *_ = graph.decoder(trained | still)(tokens, sit(tokens, segments=segments), None, graph.runtime)
        return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

    params = {path: placed(s.shape, s.dtype, *graph.axes[path]) for path, s in graph.shapes.items()}
    trained = {path: p for path, p in params.items() if path not in graph.untrained}
    still = {path: p for path, p in params.items() if path in graph.untrained}
    tokens = placed((8, 512), jnp.int32, "batch", None)
    places = {path: p.sharding for path, p in trained.items()}
    lowered = jax.jit(jax.grad(loss), out_shardings=places).lower(trained, still, tokens, tokens)
    lowered.compile(compiler_options=options)
    return max(Path(dump.name).glob("*.after_optimizations.txt"), key=lambda file: file.stat().st_size).read_text()


def schedule(text: str) -> list[list[str]]:
    """The events of the entry computation in their order. What runs on a sparse core is started twice: prepared, and then
    given its operands by an update, which counts as its start."""
    bodies = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)}
    entry = re.search(r"^ENTRY %(\S+)", text, re.M)[1]
    scopes, events = {}, []
    for line in bodies[entry].splitlines():
        name, operation = re.match(r"\s*(?:ROOT )?%(\S+) = .*? ([\w-]+)\(", line).groups()
        scope = re.search(r'op_name="([^"]*)"', line)
        if name.startswith("ragged-dot-none"):
            events.append(["product", scope[1] if scope else ""])
        kind = re.match(r"(all|reduce).(gather|scatter)", name)
        if not kind:
            continue
        kind, root = f"{kind[1]}-{kind[2]}", name.rsplit(".call-", 1)[0]
        if operation == "async-start":
            scopes[root] = _scope_of_call(line, bodies)
        if operation in ("async-update", "async-done"):
            events.append([f"{kind} {'start' if operation == 'async-update' else 'done'}", scopes[root]])
    return events


def _scope_of_call(line: str, bodies: dict[str, str]) -> str:
    """The name of the collective that an asynchronous call wraps, through as many computations as there are."""
    waiting = [line]
    while waiting:
        text = waiting.pop()
        found = re.search(r' (?:all-gather|reduce-scatter)\(.*?op_name="([^"]*)"', text)
        if found:
            return found[1]
        waiting += [bodies[callee] for callee in re.findall(r"(?:calls=|called_computations=\{)%([^\s,}]+)", text)]
    return ""


if __name__ == "__main__":
    print(json.dumps(schedule(compiled(sys.argv[1] == "split"))))
