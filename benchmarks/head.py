"""Measures the head's log-probabilities and entropies with their gradient against a plain `jnp`
form that keeps its logits.

Each program computes the logits of `--tokens` states, the log-probability of one target and the
entropy of each, and the gradient of their sum with respect to states and weight. `kept` is
`policy.heads.head.logprobs` with its logits kept for the backward pass, `again` with logits that
are computed twice. They run in turns, the plain form first. A line has the median seconds of a form
and their ratio to the plain form's; the ratio of the seconds of all threads of the host's
processor, which other programs on a CPU disturb less; the rate of matrix products (6 operations a
weight and token, whatever is computed twice); the temporaries of the program; and the largest
difference of a gradient from the plain form's, over its largest number. `chosen` is the form that
the sizes choose here.

    python benchmarks/head.py [--vocab 49152 128256 151936] [--tokens 512] [--hidden 576]
    [--dtype float32 bfloat16] [--softcap 30] [--tile-logits 1048576 ...] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case, and the type of states and weight."""

    vocab: int
    tokens: int
    hidden: int
    dtype: str

    @property
    def operations(self) -> float:
        """Returns the operations of the three products of a gradient."""
        return 6.0 * self.vocab * self.tokens * self.hidden


@dataclass(frozen=True)
class Result:
    """The figures of one form: median seconds, median seconds of all threads, bytes of temporaries,
    and the largest difference of its gradients from the plain form's."""

    form: str
    seconds: float
    processor: float
    temporaries: int
    difference: float


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", nargs="+", type=int, default=[49_152, 128_256, 151_936])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--softcap", type=float, help="soft cap of the logits (default: none)")
    parser.add_argument(
        "--tile-logits",
        nargs="+",
        type=int,
        default=[None],
        help="most logits of a tile (default: the head's choice on this platform)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each program (default 5)")
    options = parser.parse_args(argv)

    import jax

    from policy.config import LogitScaling

    print(f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}")
    results = []
    for dtype in options.dtype:
        for tokens in options.tokens:
            for vocab in options.vocab:
                sizes = Sizes(vocab, tokens, options.hidden, dtype)
                scaling = LogitScaling(softcap=options.softcap)
                measured = measure(sizes, scaling, options.tile_logits, options.repeats)
                show(sizes, measured)
                results += measured
    return results


def show(sizes: Sizes, results: Sequence[Result]) -> None:
    """Prints the figures of the forms of one case."""
    from policy.heads.head import Tiling

    chosen = "kept" if Tiling().keeps(sizes.tokens, sizes.vocab) else "again"
    print(
        f"\n{sizes.tokens} tokens x {sizes.vocab}, {sizes.hidden} wide, {sizes.dtype}; "
        f"chosen: {chosen}"
    )
    header = ("seconds", "ratio", "processor", "GFLOP/s", "temp. MiB", "difference")
    print(f"{'form':20}" + "".join(f"{title:>11}" for title in header))
    plain = results[0]
    for each in results:
        rate = sizes.operations / each.seconds / 1e9
        print(
            f"{each.form:20}{each.seconds:11.4f}{each.seconds / plain.seconds:11.2f}"
            f"{each.processor / plain.processor:11.2f}{rate:11.0f}"
            f"{each.temporaries / 2**20:11.1f}{each.difference:11.1e}",
            flush=True,
        )


def measure(sizes: Sizes, scaling: Any, tiles: Sequence[int | None], repeats: int) -> list[Result]:
    """Returns the results of the plain form, and of both forms of the head for each size of
    tiles."""
    import jax
    import numpy as np

    arrays = inputs(sizes)
    programs = {"plain": compiled(plain, scaling, arrays)}
    for size in tiles:
        for form in ("kept", "again"):
            name = form if size is None else f"{form}, {size:,}"
            with_size = chosen(form, size)
            with with_size:
                programs[name] = compiled(own, scaling, arrays)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    processor: dict[str, list[float]] = {name: [] for name in programs}
    gradients: dict[str, list[np.ndarray]] = {}
    for name, program in programs.items():  # not timed: the first run allocates
        made = jax.block_until_ready(program(*arrays))
        gradients[name] = [np.asarray(g.astype("float32")) for g in made[1]]
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            start_of_threads = time.process_time()
            jax.block_until_ready(program(*arrays))
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - start_of_threads)
    return [
        Result(
            name,
            statistics.median(seconds[name]),
            statistics.median(processor[name]),
            program.memory_analysis().temp_size_in_bytes,
            max(
                float(np.abs(a - b).max() / np.abs(b).max())
                for a, b in zip(gradients[name], gradients["plain"], strict=True)
            ),
        )
        for name, program in programs.items()
    ]


def inputs(sizes: Sizes) -> tuple:
    """Returns states [M, E], weight [V, E], targets [M] and the factors of both results [2, M]."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    M, E, V = sizes.tokens, sizes.hidden, sizes.vocab
    hidden = rng.standard_normal((M, E), np.float32)
    weight = rng.standard_normal((V, E), np.float32) / np.sqrt(np.float32(E))
    factors = rng.standard_normal((2, M), np.float32) / M
    return (
        jnp.asarray(hidden, sizes.dtype),
        jnp.asarray(weight, sizes.dtype),
        jnp.asarray(rng.integers(0, V, M)),
        jnp.asarray(factors),
    )


def plain(hidden, weight, targets, scaling) -> tuple:
    """Computes log-probabilities and entropies from all logits at once."""
    import jax
    import jax.numpy as jnp

    z = jnp.einsum("me,ve->mv", hidden, weight, preferred_element_type=jnp.float32)
    if scaling.softcap is not None:
        z = scaling.softcap * jnp.tanh(z / scaling.softcap)
    log_p = jax.nn.log_softmax(z, axis=-1)
    logp = jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]
    return logp, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def own(hidden, weight, targets, scaling) -> tuple:
    """Computes the same with the head of a run."""
    from policy.heads import head

    return head.logprobs(hidden, weight, targets, 1.0, scaling)


def chosen(form: str, size: int | None) -> Any:
    """Returns a context in which the head keeps its logits (`kept`) or not, with tiles of `size`
    logits."""
    from unittest import mock

    from policy.heads import head

    values: dict[str, Any] = {"KEPT_SHARE": 1.0 if form == "kept" else 0.0}
    if size is not None:
        values |= {"CPU_TILE_LOGITS": size, "CHUNK_LOGITS": size, "LEAST_TOKENS": 1}
    return mock.patch.multiple(head, **values)


def compiled(function: Callable, scaling: Any, arrays: tuple) -> Any:
    """Compiles ((values), (gradients of states and weight)) of a form."""
    import jax
    import jax.numpy as jnp

    def loss(hidden, weight, targets, factors):
        logp, entropy = function(hidden, weight, targets, scaling)
        return jnp.sum(factors[0] * logp + factors[1] * entropy), (logp, entropy)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(lambda *given: step(*given)).lower(*arrays).compile()


if __name__ == "__main__":
    main()
