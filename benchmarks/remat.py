"""Measures, for each remat policy, the bytes kept for the backward pass and the cost of its
gradient on a small model.

Prints for each policy the bytes kept in device and in host memory between forward and backward pass
(weights and inputs apart), the operations of the compiled gradient over those of `full`, and its
time over that of `full`, measured in turns. Bytes are those that jax keeps; what the compiler does
with its own temporaries comes on top. On CPU both memories are the same, so an offloading policy
shows its bytes and correctness there, not its speed.

    python benchmarks/remat.py [--model 1m|25m|NAME IN configs/models] [--rows 8] [--length 256]
    [--repeats 3] [--policies ...]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from models import MODELS


@dataclass(frozen=True)
class Cost:
    """`device` and `host`: bytes kept. `operations` and `seconds` of one gradient."""

    policy: str
    device: int
    host: int
    operations: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> list[Cost]:
    """Runs the benchmark from the command line."""
    from policy import remat

    policies = [name for name in remat.NAMES if name != "custom"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="1m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=policies, choices=policies)
    options = parser.parse_args(argv)
    costs = measure(
        options.model, (options.rows, options.length), options.policies, options.repeats
    )
    full = next((cost for cost in costs if cost.policy == "full"), costs[0])
    print(
        f"{options.model}, {options.rows} rows of {options.length} tokens, float32, layers "
        f"scanned; x: over {full.policy}"
    )
    print(f"{'policy':40} {'device MiB':>11} {'host MiB':>9} {'operations':>11} {'time':>7}")
    for cost in costs:
        mib = f"{cost.device / 2**20:11.2f} {cost.host / 2**20:9.2f}"
        print(
            f"{cost.policy:40} {mib} {cost.operations / full.operations:10.2f}x "
            f"{cost.seconds / full.seconds:6.2f}x"
        )
    return costs


def measure(name: str, shape: tuple[int, int], policies: Sequence[str], repeats: int) -> list[Cost]:
    """Returns the least of `repeats` times of each policy, in turns."""
    import jax
    import numpy as np

    import policy
    from policy import families

    model = policy.create(families.read(MODELS[name]) if name in MODELS else name)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    losses = {each: loss(model.graph.with_runtime(remat=each), tokens) for each in policies}
    programs = {
        each: jax.jit(jax.grad(function)).lower(model.params).compile()
        for each, function in losses.items()
    }
    best = dict.fromkeys(policies, math.inf)
    for _ in range(repeats):
        for each, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(model.params))
            best[each] = min(best[each], time.perf_counter() - start)
    costs = []
    for each in policies:
        kept = bytes_kept(losses[each], model.params)
        costs.append(Cost(each, *kept, operations(losses[each], model.params), best[each]))
    return costs


def loss(graph, tokens):
    """Returns the mean negative log-probability as a function of the weights."""
    from policy import modes

    step = modes.make_step(tokens)
    return lambda params: -graph.logprobs(params, tokens, step, 1.0)[0].mean()


def bytes_kept(function, params) -> tuple[int, int]:
    """Returns (device, host) bytes of forward results that the backward pass reads, without the
    weights."""
    import jax

    program = jax.make_jaxpr(lambda p: jax.vjp(function, p))(params).jaxpr
    sizes = {False: 0, True: 0}
    for variable in {v for v in program.outvars if not hasattr(v, "val")} - {
        *program.invars,
        *program.constvars,
    }:
        sizes[variable.aval.memory_space == jax.memory.Space.Host] += (
            variable.aval.size * variable.aval.dtype.itemsize
        )
    return sizes[False], sizes[True]


def operations(function, params) -> float:
    """Multiplications and additions of the matrix products of the gradient; bodies of loops as
    often as they run."""
    import jax

    def count(program) -> float:
        total = 0.0
        for equation in program.eqns:
            if equation.primitive.name == "dot_general":
                contracted = equation.params["dimension_numbers"][0][0]
                shape = equation.invars[0].aval.shape
                total += (
                    2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
                )
            inner = [p for p in jax.tree.leaves(equation.params, is_leaf=_program) if _program(p)]
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            total += times * sum(count(getattr(p, "jaxpr", p)) for p in inner)
        return total

    return count(jax.make_jaxpr(jax.grad(function))(params).jaxpr)


def _program(value) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


if __name__ == "__main__":
    main()
