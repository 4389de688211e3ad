"""What towers share: projections, attention among the inputs of one item, the loop over blocks.

R items, N inputs of an item, K numbers of an input, D width of the tower, H heads, G key-value
heads, d their dimension; of a spectrogram N frames of K frequencies in I channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention.dot_product_attention import Mask, attend
from policy.cache.layer_cache import Visible
from policy.cache.step import Step
from policy.config import LayerNorm, Rope, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import Encoder
from policy.mesh.sharding import constrain
from policy.ops.linear import linear
from policy.ops.norms import MeanNorm
from policy.ops.parameter import Constant, normal, weight, zeros
from policy.ops.rope import rotate, wavelengths
from policy.remat import checkpointed

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
Table = tuple[jax.Array, jax.Array]


class Projections(nnx.Module):
    """A module with linear layers by name: NAME_proj [inputs, outputs], and NAME_bias where there
    is one. `spec`, set before the layers, says how their weights start.

    The weights of a tower are never quantised: its rows enter every layer of the decoder.
    """

    spec: Any  # of the tower, or of its blocks

    def add(
        self,
        rngs: nnx.Rngs,
        name: str,
        shape: tuple[tuple[int, ...], tuple[int, ...]],
        axes: tuple[tuple[str | None, ...], tuple[str | None, ...]],
        *,
        bias: bool = False,
        clipped: bool = False,
    ) -> None:
        """Declares the layer `name` that maps dimensions shape[0] to shape[1], with their logical
        axes. `clipped`: four stored numbers, NAME_input_min and so on, bound its inputs and
        outputs."""
        (inputs, outputs), (rows, columns) = shape, axes
        array = weight(
            rngs,
            inputs + outputs,
            rows + columns,
            normal(self.spec.initializer_range),
            inputs=tuple(range(len(inputs))),
            quantizable=False,
        )
        setattr(self, f"{name}_proj", array)
        if bias:
            named = tuple("norm" if axis == "embed" else axis for axis in columns)
            setattr(self, f"{name}_bias", weight(rngs, outputs, named, zeros))
        for bound in BOUNDS if clipped else ():
            infinite = jnp.float32(-np.inf if bound.endswith("min") else np.inf)
            setattr(self, f"{name}_{bound}", Constant(infinite, out_sharding=()))

    def project(self, x: jax.Array, name: str, runtime: Runtime, over: int = 1) -> jax.Array:
        """Maps the last `over` dimensions of x by the layer `name`, in x's dtype."""
        array = getattr(self, f"{name}_proj")[...]
        bias = getattr(self, f"{name}_bias", None)
        clipped = hasattr(self, f"{name}_input_min")
        i = "abcd"[:over]
        o = "uvw"[: array.ndim - over]
        x = self._bounded(x, name, "input") if clipped else x
        y = linear(f"...{i},{i}{o}->...{o}", x, array, runtime)
        y = y if bias is None else y + bias[...].astype(x.dtype)
        return self._bounded(y, name, "output") if clipped else y

    def _bounded(self, x: jax.Array, name: str, side: str) -> jax.Array:
        low, high = (
            getattr(self, f"{name}_{side}_{end}")[...].astype(x.dtype) for end in ("min", "max")
        )
        return jnp.clip(x, low, high)


class TowerBlock(Projections):
    """A pre-norm transformer block with biases, as SigLIP, Whisper and the towers of Qwen and Llama
    have."""

    def __init__(self, spec: Encoder, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        H = spec.heads
        d = spec.head_dim
        inner = spec.mlp_width
        self.input_norm = MeanNorm(D, LayerNorm(spec.eps), rngs)
        for name in "qkv":
            self.add(rngs, name, ((D,), (H, d)), (("embed",), ("heads", "kv")), bias=True)
        self.add(rngs, "o", ((H, d), (D,)), (("heads", "kv"), ("embed",)), bias=True)
        self.mlp_norm = MeanNorm(D, LayerNorm(spec.eps), rngs)
        self.add(rngs, "up", ((D,), (inner,)), (("embed",), ("mlp",)), bias=True)
        self.add(rngs, "down", ((inner,), (D,)), (("mlp",), ("embed",)), bias=True)

    def __call__(
        self, x_RND: jax.Array, mask: Mask, turn: Callable | None, runtime: Runtime
    ) -> jax.Array:
        """Returns x_RND after the block. `turn` rotates queries and keys [R, H, N, d]."""
        h = self.input_norm(x_RND)
        q, k, v = (jnp.swapaxes(self.project(h, name, runtime), 1, 2) for name in "qkv")
        q, k = (a if turn is None else turn(a) for a in (q, k))
        h = attention(q * self.spec.head_dim**-0.5, k, v, mask, runtime)
        x_RND = x_RND + checkpoint_name(self.project(h, "o", runtime, over=2), "out_proj")
        h = checkpoint_name(self.project(self.mlp_norm(x_RND), "up", runtime), "mlpwi_0")
        h = self.project(ACTIVATIONS[self.spec.activation](h), "down", runtime)
        return x_RND + checkpoint_name(h, "mlpwo")


def attention(
    q_RHNd: jax.Array, k_RGNd: jax.Array, v_RGNd: jax.Array, mask: Mask, runtime: Runtime
) -> jax.Array:
    """Computes softmax attention [R, N, H, d] with the scale already in q. Queries are taken in
    chunks of `runtime.attention_chunk`, so that memory grows with N, not with N^2."""
    q, k, v = (
        checkpoint_name(a, name)
        for a, name in ((q_RHNd, "query_proj"), (k_RGNd, "key_proj"), (v_RGNd, "value_proj"))
    )
    out = checkpoint_name(attend(q, k, v, mask, runtime.attention_chunk), "context")
    return jnp.swapaxes(out, 1, 2)


def within(groups_RN: jax.Array) -> Mask:
    """Returns the mask that lets the inputs of an item see all inputs of their group; group 0 is
    padding. It is the decoder's mask with groups as segments and all positions 0, so that causality
    excludes nothing."""
    nowhere = jnp.zeros_like(groups_RN)
    return Mask(Step(nowhere, groups_RN), Visible({}, nowhere, groups_RN))


def real_inputs(shape_R2: jax.Array, length: int) -> jax.Array:
    """Returns bool[R, N]: which inputs are not padding, by the shapes of the items."""
    return jnp.arange(length) < jnp.prod(shape_R2, axis=1)[:, None]


def prepared(values_RNK: jax.Array, real_RN: jax.Array | None, runtime: Runtime) -> jax.Array:
    """Returns the inputs, sharded by items, in the dtype of the activations, with zeros for
    padding."""
    x = values_RNK if real_RN is None else jnp.where(real_RN[..., None], values_RNK, 0)
    return constrain(x.astype(runtime.dtype), ("batch", None, None), runtime.layout)


def grid_positions(shape_R2: jax.Array, length: int, merge: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns (row, column) of each patch, int32[R, N]. Patches are in the order of the blocks of
    `merge` x `merge` patches; 1: row by row."""
    number = jnp.arange(length)
    across = jnp.maximum(shape_R2[:, 1:] // merge, 1)
    block = number // merge**2
    inside = number % merge**2
    return block // across * merge + inside // merge, block % across * merge + inside % merge


def axis_angles(positions_RN: jax.Array, dim: int, theta: float) -> jax.Array:
    """Computes position * theta^(-2i/dim), float32[R, N, dim / 2]: the angles of one axis of a
    grid."""
    return positions_RN[..., None].astype(jnp.float32) * (1 / wavelengths(theta, dim))


def turn_by(
    angles_RNd: jax.Array, *, interleaved: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """Returns the rotation of [R, H, N, d] by angles [R, N, d / 2], of the pairs (2i, 2i+1) or (i,
    i + d/2)."""
    rope = Rope(2 * angles_RNd.shape[-1], 1.0, interleaved=interleaved)
    table: Table = (jnp.cos(angles_RNd), jnp.sin(angles_RNd))
    return lambda x: rotate(x, rope, table)


def convolved(x_RNKI: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes a convolution of stride 2 over time and frequency with a kernel [3, 3, I, channels]
    and zeros around."""
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x_RNKI, kernel.astype(x_RNKI.dtype), (2, 2), ((1, 1), (1, 1)), dimension_numbers=dims
    )


def for_towers(runtime: Runtime) -> Runtime:
    """Returns the runtime of a tower, whose products are not quantised."""
    return replace(runtime, quantization=None)


def run(
    blocks: nnx.Module,
    x: jax.Array,
    apply: Callable,
    runtime: Runtime,
    after: Sequence[int] = (),
    each: tuple[np.ndarray, ...] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs stacked blocks: x <- apply(block, x, *own) for each, as a scan or unrolled, with remat
    as `runtime` says. `own` are the entries of the arrays `each`, which have one entry for each
    block. Returns (x, [x after each block number in `after`, ascending])."""
    graph, weights = nnx.split(blocks)
    stack = (weights, each)

    def body(x, one):
        block_weights, own = one
        x = constrain(
            x, ("batch", None, None), runtime.layout
        )  # gathers weights rather than sums activations
        return apply(
            nnx.merge(graph, block_weights), checkpoint_name(x, "decoder_layer_input"), *own
        )

    body = checkpointed(body, runtime.remat, runtime.remat_tensors, scanned=runtime.scan)
    depth = len(jax.tree.leaves(weights)[0])
    start = 0
    kept = []
    for end in (*(number + 1 for number in after), depth):
        if runtime.scan and end > start:
            part = jax.tree.map(lambda a, start=start, end=end: a[start:end], stack)
            x, _ = jax.lax.scan(lambda x, one: (body(x, one), None), x, part)
        for number in range(start, end) if not runtime.scan else ():
            x = body(x, jax.tree.map(lambda a, number=number: a[number], stack))
        kept.append(x)
        start = end
    return x, kept[:-1]
