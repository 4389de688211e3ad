"""Measures one GPU or TPU: attention kernels, an SFT update and decoding, in bfloat16 with random
weights in float32.

- Attention, on a GPU: seconds of the kernel that training uses next to the portable form, forward
  and with gradients, and of the kernel that decoding uses on pages. `apart` is
  ||kernel - portable|| / ||portable||, of the worst of output and gradients.
- An update: rows of random tokens, all of them trained on, AdamW. Operations are those of
  `perf/train_tflops_per_s`: recomputation does not count.
- Decoding: all slots at once, with prefill, in a generator of `length` tokens.

`--profile N` adds the N kernels that take longest, of one update and of one call of the generator.

    python benchmarks/accelerator.py [--model qwen3-0.6b] [--rows 32] [--length 1024]
    [--remat full] [--slots 128] [--new-tokens 128] [--parts attention update decode] [--profile 0]
"""

from __future__ import annotations

import argparse
import collections
import glob
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

PARTS = ("attention", "update", "decode")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="name of a file in configs/models/")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--profile", type=int, default=0)
    options = parser.parse_args(argv)
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    if "attention" in options.parts:
        attention(options.length)
        pages(options.slots)
    if "update" in options.parts or "decode" in options.parts:
        measure_model(options)


def attention(T: int) -> None:
    """Prints a line for one document of T tokens, and for T / 8 tokens each."""
    from policy.attention.dot_product_attention import Mask, attend
    from policy.attention.gpu_attention import flash_attention
    from policy.cache.layer_cache import Visible
    from policy.modes import make_step

    B, H, K, D = 4, 16, 8, 128
    for documents in (1, 8):
        segments = np.repeat(np.arange(1, documents + 1), T // documents)[None].repeat(B, axis=0)
        ids = jnp.asarray(segments, jnp.int32)
        step = make_step(ids, segments=ids)
        mask = Mask(step, Visible({}, step.positions, step.segments))
        q, k, v, given = (
            (jax.random.normal(jax.random.key(i), (B, heads, T, D)) / D**0.25).astype("bfloat16")
            for i, heads in enumerate((H, K, K, H))
        )
        kernel = jax.jit(lambda q, k, v, ids=ids: flash_attention(q, k, v, ids))
        portable = jax.jit(lambda q, k, v, mask=mask: attend(q, k, v, mask, 512))
        gradients = [_with_gradients(each) for each in (kernel, portable)]
        forward = [seconds(each, q, k, v) for each in (kernel, portable)]
        both = [seconds(each, q, k, v, given) for each in gradients]
        results = [each(q, k, v, given) for each in gradients]
        print(
            f"attention {B} x {T}, {documents} documents a row, {H} heads of {D}: forward "
            f"{1e3 * forward[0]:.2f} ms, portable {1e3 * forward[1]:.2f}; with gradients "
            f"{1e3 * both[0]:.2f}, portable {1e3 * both[1]:.2f}; apart {apart(*results):.1e}",
            flush=True,
        )


def _with_gradients(function: Callable) -> Callable:
    """Returns a program that computes the output and the gradients of q, k and v."""

    def run(q, k, v, given):
        out, back = jax.vjp(function, q, k, v)
        return [out, *back(given)]

    return jax.jit(run)


def pages(rows: int) -> None:
    """Prints a line for one query of each row over pages that are half full on average."""
    from policy.attention.gpu_attention import attend_pages

    K, G, D, P, M = 8, 2, 128, 64, 16
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(rows, K * G, D)), jnp.bfloat16) * 0.3
    shape = (K, rows * M + 1, P, D)
    k, v = (jax.random.normal(jax.random.key(i), shape).astype("bfloat16") for i in (1, 2))
    table = jnp.asarray(rng.permutation(np.arange(1, shape[1])).reshape(rows, M), jnp.int32)
    lengths = jnp.asarray(rng.integers(1, M * P + 1, rows), jnp.int32)

    @jax.jit
    def portable(q, k, v):
        keys, values = (a[:, table].reshape(K, rows, M * P, D) for a in (k, v))
        queries = q.reshape(rows, K, G, D)
        scores = jnp.einsum("bkgd,kbtd->bkgt", queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.arange(M * P) < lengths[:, None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("bkgt,kbtd->bkgd", weights, values).reshape(q.shape)

    kernel = jax.jit(lambda q, k, v: attend_pages(q, k, v, table, lengths))
    taken = [seconds(each, q, k, v) for each in (kernel, portable)]
    live = 4 * int(lengths.sum()) * K * D  # bytes of keys and values
    print(
        f"pages of {P} tokens, {rows} rows: {1e3 * taken[0]:.3f} ms, {live / taken[0] / 1e12:.2f} "
        f"TB/s of the live part; portable {1e3 * taken[1]:.3f}; apart "
        f"{apart([kernel(q, k, v)], [portable(q, k, v)]):.1e}",
        flush=True,
    )


def apart(ours: list[jax.Array], theirs: list[jax.Array]) -> float:
    """Returns the largest relative difference by the Frobenius norm."""

    def norm(array):
        return float(jnp.linalg.norm(array.astype(jnp.float32)))

    return max(norm(a - b) / norm(b) for a, b in zip(ours, theirs, strict=True))


def measure_model(options: argparse.Namespace) -> None:
    """Prints a line for the update and one for decoding."""
    import policy
    from policy.config import Runtime

    runtime = Runtime(dtype="bfloat16", remat=options.remat)
    model = policy.create(options.model, runtime=runtime)
    if "update" in options.parts:
        update, flops = sft_update(model, options.rows, options.length)
        taken = seconds(update)
        tokens = options.rows * options.length
        print(
            f"update of {options.rows} x {options.length}, remat {options.remat}: {taken:.4f} s, "
            f"{tokens / taken:,.0f} tokens/s, {flops / taken / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        kernels(update, options.profile)
    if "decode" in options.parts:
        call = decoding(model, options.slots, options.length, options.new_tokens)
        taken = seconds(call)
        print(
            f"decode of {options.slots} rows, {options.new_tokens} tokens each: {taken:.4f} s, "
            f"{options.slots * options.new_tokens / taken:,.0f} tokens/s",
            flush=True,
        )
        kernels(call, options.profile)


def sft_update(model, rows: int, length: int) -> tuple[Callable[[], float], float]:
    """Returns an update by the program that `rl-train` runs, and its floating-point operations."""
    import rl.algorithms
    from rl.config.stage import StageOptions
    from rl.training.batch import padded_batch
    from rl.training.trainer import Trainer

    stage = {"algorithm": "sft", "steps": 1000, "optimizer": {"learning_rate": 1e-5}}
    stage_options = StageOptions.model_validate(stage)
    trainer = Trainer(model.graph, stage_options, rl.algorithms.get("sft"))
    state = trainer.start({path: jnp.copy(array) for path, array in model.params.items()}, seed=0)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, length))
    mask = [0] + [1] * (length - 1)
    batch = padded_batch([(row, mask) for row in tokens.tolist()], length)
    state, _ = trainer.update(state, batch)
    flops = trainer.total_flops

    def update() -> float:
        nonlocal state
        state, metrics = trainer.update(state, batch)
        return float(metrics["loss"])

    return update, flops


def decoding(model, slots: int, length: int, new_tokens: int) -> Callable[[], object]:
    """Returns a call that samples completions of prompts of 64 tokens."""
    from rollout import Generator, GeneratorOptions, SamplingParams

    options = GeneratorOptions(tokens_per_dispatch=32)
    generator = Generator(model, max_length=length, slots=slots, options=options)
    prompts = np.random.default_rng(1).integers(0, model.config.vocab_size, (slots, 64)).tolist()
    params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0)
    return lambda: generator.generate(prompts, params)


def seconds(function: Callable, *arguments, repeats: int = 7) -> float:
    """Returns the median seconds of a call; the first two do not count."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def kernels(function: Callable, count: int) -> None:
    """Prints the `count` kernels of a call that take longest: milliseconds, calls, program part."""
    if not count:
        return
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function()
        totals = collections.Counter()
        calls = collections.Counter()
        for path in glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True):
            with gzip.open(path) as file:
                events = json.load(file)["traceEvents"]
            devices = {
                event["pid"]
                for event in events
                if event.get("name") == "process_name" and "/device:" in event["args"]["name"]
            }
            for event in events:
                if event.get("ph") == "X" and event["pid"] in devices:
                    totals[event["name"]] += event["dur"]
                    calls[event["name"]] += 1
    print(f"  {sum(totals.values()) / 1e3:.1f} ms on the device")
    for name, duration in totals.most_common(count):
        print(f"  {duration / 1e3:9.2f} ms  {calls[name]:6} calls  {name[:100]}")


if __name__ == "__main__":
    main()
