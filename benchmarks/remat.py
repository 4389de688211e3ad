"""Measures, for each remat policy, the bytes kept for the backward pass and the cost of its
gradient on a small model.

Prints for each policy the bytes kept in device and in host memory between forward and backward pass
(weights and inputs apart), the temporaries of the compiled gradient, its operations over those of
`full`, and its time over that of `full`, measured in turns. Kept bytes are those that jax keeps. On
CPU both memories are the same, so an offloading policy shows its bytes and correctness there, not
its speed. `--body` leaves out the head; with `--torch`, for a directory, the gradient of the same
weights in transformers takes part in the turns, on two threads.

    python benchmarks/remat.py [--model 1m|25m|NAME IN configs/models|DIRECTORY] [--rows 8]
    [--length 256] [--repeats 3] [--policies ...] [--body [--torch]]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from models import MODELS


@dataclass(frozen=True)
class Cost:
    """`device` and `host`: bytes kept. `temporaries`: bytes of the program. `operations` and
    `seconds` of one gradient."""

    policy: str
    device: int
    host: int
    temporaries: int
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
    parser.add_argument("--body", action="store_true", help="without the head")
    parser.add_argument("--torch", action="store_true", help="transformers takes part")
    options = parser.parse_args(argv)
    if options.torch and not (options.body and Path(options.model).is_dir()):
        parser.error("--torch needs --body and a directory as --model")
    costs, peer = measure(
        options.model,
        (options.rows, options.length),
        options.policies,
        options.repeats,
        body=options.body,
        torch=options.torch,
    )
    full = next((cost for cost in costs if cost.policy == "full"), costs[0])
    print(
        f"{options.model}, {options.rows} rows of {options.length} tokens, float32, layers "
        f"scanned; x: over {full.policy}"
    )
    print(
        f"{'policy':38} {'device MiB':>11} {'host MiB':>9} {'temp. MiB':>10} {'operations':>11} "
        f"{'time':>7} {'s':>7}"
    )
    for cost in costs:
        sizes = (cost.device / 2**20, cost.host / 2**20, cost.temporaries / 2**20)
        print(
            "{:38} {:11.2f} {:9.2f} {:10.1f}".format(cost.policy, *sizes)
            + f" {cost.operations / full.operations:10.2f}x {cost.seconds / full.seconds:6.2f}x"
            f" {cost.seconds:7.3f}"
        )
    if peer is not None:
        print(f"{'torch (transformers)':82} {peer / full.seconds:6.2f}x {peer:7.3f}")
    return costs


def measure(
    name: str,
    shape: tuple[int, int],
    policies: Sequence[str],
    repeats: int,
    *,
    body: bool = False,
    torch: bool = False,
) -> tuple[list[Cost], float | None]:
    """Returns (the least of `repeats` times of each policy, in turns, and that of transformers if
    `torch`)."""
    import jax
    import numpy as np

    import policy
    from policy import families

    if Path(name).is_dir():
        model = policy.load(name)
    else:
        model = policy.create(families.read(MODELS[name]) if name in MODELS else name)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    graphs = {each: model.graph.with_runtime(remat=each, skip_blocks=True) for each in policies}
    losses = {each: (body_loss if body else loss)(graphs[each], tokens) for each in policies}
    programs = {
        each: jax.jit(jax.grad(function)).lower(model.params).compile()
        for each, function in losses.items()
    }
    calls: dict[str, Callable] = {
        each: lambda program=program: jax.block_until_ready(program(model.params))
        for each, program in programs.items()
    }
    if torch:
        calls["torch"] = torch_gradient(name, tokens)
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, math.inf)
    for _ in range(repeats):
        for each, call in calls.items():
            start = time.perf_counter()
            call()
            best[each] = min(best[each], time.perf_counter() - start)
    costs = []
    for each in policies:
        kept = bytes_kept(losses[each], model.params)
        temporaries = getattr(programs[each].memory_analysis(), "temp_size_in_bytes", 0)
        work = operations(losses[each], model.params)
        costs.append(Cost(each, *kept, temporaries, work, best[each]))
    return costs, best.get("torch")


def body_loss(graph, tokens):
    """Returns the sum of the states after the final norm, weighted by random numbers, as a function
    of the weights."""
    import numpy as np

    from policy import modes

    step = modes.make_step(tokens)
    shape = (*tokens.shape, graph.config.hidden_size)
    weights = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def function(params):
        with graph.precision():
            states = graph.decoder(params)(tokens, step, None, graph.runtime)[0]
        return (states * weights).sum()

    return function


def torch_gradient(directory: str, tokens) -> Callable[[], None]:
    """Returns a function that computes the gradient of `body_loss` in transformers, in float32."""
    import numpy as np
    import torch
    from transformers import AutoModel

    torch.set_num_threads(2)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    shape = (*tokens.shape, model.config.hidden_size)
    weights = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ids, weights = torch.from_numpy(tokens), torch.from_numpy(weights)

    def run() -> None:
        model.zero_grad()
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        (states * weights).sum().backward()

    return run


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
