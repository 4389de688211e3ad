"""Measures decoding with latent attention over its own cache and over the caches of other
frameworks.

Absorbed against expanded: one layer with the heads of DeepSeek-V3 (128 of 128 + 64 dimensions,
values of 128, latents of 512) on a small hidden size, so that attention takes nearly all of the
time. Absorbed is Duet's layer: it keeps 576 numbers a token and multiplies queries and outputs by
the expanding matrix. Expanded keeps keys and values, 128 * (128 + 64 + 128) = 40,960 numbers a
token. Both use the same weights, the same projections and the same `attend`, and make the same
output.

Selected against masked: the same layer with the indexer of DeepSeek-V3.2 (64 heads of 128).
Selected gathers the `topk` latents that were selected, masked reads all and masks the others. Both
score every index key. With --heads, --index-heads and --topk smaller you can look for the crossing.

Both sides decode in one compiled loop whose cache is carried in place. `floor` is the time to read
once what a step must read (the layer's weights and the visible part of the cache) at the rate at
which this machine sums a large array; `above` is how many times longer the step took: matrix
products of so few rows, softmax, and the passes over scores.

    python benchmarks/latent_attention.py [--repeats 3] [--slots 4] [--lengths 256 1024]
    [--sparse-lengths 4096 16384] [--topk 2048]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from side_by_side import Row, in_turns, table

HIDDEN = 256
NOPE = 128
ROTATED = 64
LATENT = 512
VALUES = 128
Q_RANK = 256
STEPS = 4


@dataclass(frozen=True)
class Case:
    """One shape: `slots` rows that decode at position `length - STEPS` of caches of `length`."""

    slots: int
    length: int
    heads: int
    index_heads: int | None = None
    topk: int = 0


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each program (default 3)")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--lengths", nargs="*", type=int, default=[256, 1024])
    parser.add_argument("--sparse-lengths", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--topk", type=int, default=2048)
    options = parser.parse_args(argv)
    rate = read_rate()
    rows = [
        expanded(Case(options.slots, C, options.heads), options.repeats, rate)
        for C in options.lengths
    ]
    rows += [
        masked(
            Case(options.slots, C, options.heads, options.index_heads, options.topk),
            options.repeats,
            rate,
        )
        for C in options.sparse_lengths
    ]
    print(f"memory is read at {rate / 1e9:.1f} GB/s")
    print(table(rows, "s/step", rate=False))
    return rows


def layer_of(case: Case):
    """Returns (MultiHeadLatentAttention, Runtime) with random float32 weights."""
    from flax import nnx

    from policy.attention.mla import MultiHeadLatentAttention
    from policy.config import DecoderConfig, Indexer, LatentAttention, Norm, Rope, Runtime

    rope = Rope(ROTATED, 1e4, interleaved=True)
    scale = (NOPE + ROTATED) ** -0.5
    indexer = (
        None
        if case.index_heads is None
        else Indexer(case.index_heads, 128, case.topk, Rope(ROTATED, 1e4))
    )
    spec = LatentAttention(case.heads, Q_RANK, LATENT, NOPE, VALUES, scale, rope, indexer=indexer)
    config = DecoderConfig(1, HIDDEN, (), Norm(), "", "", initializer_range=0.05)
    with nnx.use_eager_sharding(False):
        return MultiHeadLatentAttention(spec, config, nnx.Rngs(0)), Runtime()


def loop(layer, case: Case, attention):
    """Returns a function () -> the outputs [STEPS, slots, HIDDEN] of decoding, as a program that
    waits. `attention(layer, x, step, arrays)` gives (output [slots, 1, HIDDEN], arrays); `arrays`
    is the cache, by name."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from policy.cache.step import Step
    from policy.ops.rope import rotation

    ropes = {layer.spec.rope} | ({layer.spec.indexer.rope} if layer.spec.indexer else set())
    graph, weights = nnx.split(layer)

    def decode(weights, x, arrays):
        def one(arrays, i):
            positions = jnp.full((case.slots, 1), case.length - STEPS + i)
            step = Step(
                positions,
                jnp.ones_like(positions),
                rotations={str(r): rotation(r, positions) for r in ropes},
            )
            out, arrays = attention(nnx.merge(graph, weights), x + i, step, arrays)
            return arrays, out[:, 0]

        return jax.lax.scan(one, arrays, jnp.arange(STEPS))

    program = jax.jit(decode, donate_argnums=2)
    x = jax.random.normal(jax.random.key(1), (case.slots, 1, HIDDEN))
    held = {}

    def run(arrays=None):
        held["cache"], out = program(weights, x, held["cache"] if arrays is None else arrays)
        return jax.block_until_ready(out)

    return run


def absorbed(layer, x, step, arrays):
    """Duet's layer over its cache."""
    from policy.cache.layer_cache import LayerCache
    from policy.config import Runtime

    out, cache, _ = layer(x, step, LayerCache(arrays, 0), Runtime())
    return out, cache.arrays


def over_expanded(layer, x, step, arrays):
    """Computes the same layer with keys and values of every head in the cache."""
    import jax.numpy as jnp

    from policy.attention.dot_product_attention import Mask, attend
    from policy.cache.layer_cache import LayerCache, extend
    from policy.config import Runtime
    from policy.ops.rope import rotate

    spec = layer.spec
    table_ = step.rotations[str(layer.spec.rope)]
    runtime = Runtime()
    q_nope, q_rope = jnp.split(
        layer._queries(x, layer._query_latent(x, step, runtime), runtime), [spec.nope_dim], axis=-1
    )
    latent, k_rope = jnp.split(x @ layer.kv_a_proj[...], [spec.kv_lora_rank], axis=-1)
    new = jnp.einsum("btc,chd->bhtd", layer.kv_a_layernorm(latent), layer.kv_b_proj[...])
    k_rope = jnp.broadcast_to(
        rotate(k_rope[:, None], spec.rope, table_), (*new.shape[:3], spec.rope.dim)
    )
    keys = jnp.concatenate([new[..., : spec.nope_dim], k_rope], axis=-1)
    visible, cache = extend(LayerCache(arrays, 0), step, k=keys, v=new[..., spec.nope_dim :])
    q = jnp.concatenate([q_nope, rotate(q_rope, spec.rope, table_)], axis=-1) * spec.scale
    out = attend(q, visible.arrays["k"], visible.arrays["v"], Mask(step, visible), 512)
    return jnp.einsum("bhtd,hde->bte", out, layer.o_proj[...]), cache.arrays


def expanded(case: Case, repeats: int, rate: float) -> Row:
    """Measures absorbed decoding against decoding over expanded keys and values of the same
    tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    layer, _ = layer_of(case)
    latent = jax.random.normal(jax.random.key(0), (1, case.slots, 1, case.length, LATENT + ROTATED))
    ours = loop(layer, case, absorbed)
    theirs = loop(layer, case, over_expanded)
    made = jnp.einsum("rskcl,lhd->rshcd", latent[..., :LATENT], layer.kv_b_proj[...])
    k_rope = jnp.broadcast_to(latent[..., LATENT:], (*made.shape[:4], ROTATED))
    both = {"k": jnp.concatenate([made[..., :NOPE], k_rope], axis=-1), "v": made[..., NOPE:]}
    sizes = latent.nbytes, both["k"].nbytes + both["v"].nbytes
    same = np.abs(np.asarray(ours({"latent": latent})) - np.asarray(theirs(both))).max()
    row = Row(
        f"absorbed, {case.slots} x {case.length}",
        "expanded",
        STEPS,
        *in_turns(ours, theirs, repeats),
    )
    tokens = case.slots * case.length
    numbers = [size // tokens // 4 for size in sizes]
    text = (
        f"cache {numbers[0]:,} and {numbers[1]:,} numbers a token, {sizes[0] / 1e6:.0f} and "
        f"{sizes[1] / 1e6:.0f} MB"
    )
    return replace(
        row, note=f"{text}; {gap(row, weight_bytes(layer), sizes, rate)}; differ by {same:.0e}"
    )


def masked(case: Case, repeats: int, rate: float) -> Row:
    """Measures decoding over the selected latents against decoding over all latents with a mask."""
    import jax
    import numpy as np

    from policy.attention import sparse_attention

    layer, _ = layer_of(case)
    shapes = {"latent": LATENT + ROTATED, "index": 128}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0)), strict=True))

    def cache():
        return {
            name: jax.random.normal(keys[name], (1, case.slots, 1, case.length, dim))
            for name, dim in shapes.items()
        }

    ours = loop(layer, case, absorbed)
    theirs = loop(layer, case, absorbed)
    chosen = sparse_attention._gathers
    selected = ours(cache())
    try:
        sparse_attention._gathers = lambda *_: False
        same = np.abs(np.asarray(selected) - np.asarray(theirs(cache()))).max()
    finally:
        sparse_attention._gathers = chosen
    row = Row(
        f"selected {case.topk}, {case.slots} x {case.length}",
        "masked",
        STEPS,
        *in_turns(ours, theirs, repeats),
    )
    index, latents = (case.slots * case.length * dim * 4 for dim in (128, LATENT + ROTATED))
    sizes = index + latents * min(case.topk, case.length) // case.length, index + latents
    return replace(row, note=f"{gap(row, weight_bytes(layer), sizes, rate)}; differ by {same:.0e}")


def weight_bytes(layer) -> int:
    import jax
    from flax import nnx

    return sum(a.nbytes for a in jax.tree.leaves(nnx.state(layer)))


def gap(row: Row, weights: int, caches: Sequence[int], rate: float) -> str:
    """Returns the bytes that a step of both must read, and how many times longer it takes than
    reading them."""
    sides = []
    for seconds, cache in zip((row.ours, row.theirs), caches, strict=True):
        floor = (weights + cache) / rate
        sides.append(
            f"{(weights + cache) / 1e6:.0f} MB, floor {floor:.4f} s, above "
            f"{min(seconds) / STEPS / floor:.1f}x"
        )
    return f"reads {sides[0]} against {sides[1]}"


def read_rate(megabytes: int = 512) -> float:
    """Bytes per second at which a compiled sum reads a large array, best of five."""
    import time

    import jax
    import jax.numpy as jnp

    array = jnp.ones(megabytes * 2**18)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        total(array).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return array.nbytes / min(seconds)


if __name__ == "__main__":
    main()
