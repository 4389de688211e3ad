"""Gated delta net (arXiv 2412.06464): linear attention whose state is updated by the delta rule and decays by a gate.

B rows, T tokens, E hidden, K key heads, G value heads of a key head, D and V dimensions of keys and values, J = 2D + GV
channels of a key head in the convolution, W its width, N chunks of C tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from policy.attention.sequence_shards import replicate_length
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig, GatedDeltaNet, Runtime
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode, over_devices, reshard_like, spec_of
from policy.mesh.sharding import from_cache, to_cache
from policy.ops.linear import linear
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, ones, split_module, weight

CHUNK = 64
# Inputs of the convolution -> the names under which remat policies save them.
CONVOLVED = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}


def _log_uniform(key, shape, dtype):
    """Draws log(A) for A uniform in [0.01, 16); the lower bound keeps the logarithm finite."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


class DeltaNet(nnx.Module):
    """A gated delta net mixer. Weights: q_proj, k_proj [E, K, D]; v_proj, z_proj [E, K, GV]; b_proj, a_proj [E, K, G];
    q_conv, k_conv [K, D, W]; v_conv [K, GV, W]; A_log, dt_bias [K, G]; norm [V]; o_proj [K, GV, E]. The value heads of
    a key head are consecutive.

    Everything between the projections is float32, on every platform: errors of the state add up over the tokens.
    """

    def __init__(self, spec: GatedDeltaNet, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, K, D, V, W = config.hidden_size, spec.key_heads, spec.key_dim, spec.value_dim, spec.conv_width
        G = spec.value_heads // K
        init = normal(config.initializer_range)
        for name, dim in {"q": D, "k": D, "v": G * V, "z": G * V, "b": G, "a": G}.items():
            inputs = (0,) if name in "qkvz" else None
            setattr(self, f"{name}_proj", weight(rngs, (E, K, dim), ("embed", "kv_heads", "kv"), init, inputs=inputs))
        for name, dim in {"q": D, "k": D, "v": G * V}.items():
            setattr(self, f"{name}_conv", weight(rngs, (K, dim, W), ("kv_heads", "kv", None), init))
        self.A_log = weight(rngs, (K, G), ("kv_heads", None), _log_uniform)
        self.dt_bias = weight(rngs, (K, G), ("kv_heads", None), ones)
        self.norm = RMSNorm(V, spec.norm, rngs)
        self.o_proj = weight(rngs, (K, G * V, E), ("heads", "kv", "embed"), init, inputs=(0, 1))

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> tuple[jax.Array, LayerCache | None, LayerAux]:
        """Computes (x_BTE, cache, LayerAux). Padding gives 0 and leaves the cache as it is. Without a cache every
        document of a row starts from an empty state; with one, the first document of a row continues from the cached
        state."""
        if in_explicit_mode():
            return self._over_devices(x_BTE, step, runtime), cache, LayerAux()
        real, documents = step.segments != 0, number_documents(step.segments)
        x = jnp.where(real[..., None], replicate_length(x_BTE, runtime), 0)
        q, k, v, inputs = self._convolved(x, documents, cache, runtime)
        beta, g = (to_cache(a, runtime.layout) for a in self._gates(x, real))
        B, K, G, T, V = v.shape
        if cache is None:
            state = jnp.zeros((B, K, G, q.shape[-1], V), jnp.float32)
        else:
            state = cast(jax.Array, cache.arrays["state"])[cache.index].reshape(B, K, G, -1, V)
        tentative, aux = cache is not None and runtime.tentative, LayerAux()
        with jax.default_matmul_precision("highest"):
            if tentative:
                out, states = stepwise(q, k, v, beta, g, state)
                aux = LayerAux(states={"conv": self._windows(inputs, T), "state": states.reshape(B, T, K * G, -1, V)})
            elif T == 1:
                out, state = single(q, k, v, beta, g, state)
            else:
                out, state = chunked(q, k, v, beta, g, documents, state)
        if cache is not None and not tentative:
            cache = _with(cache, "conv", self._stored(_last_inputs(inputs, real, self.spec.conv_width - 1)))
            cache = _with(cache, "state", state.reshape(B, K * G, -1, V))
        out = checkpoint_name(out, "context")
        out = self.norm(from_cache(out, runtime.layout))
        out = out * jax.nn.silu(self._heads(self._project(x, "z", runtime).astype(jnp.float32)))
        out = jnp.swapaxes(out, 2, 3).reshape(B, K, T, G * V).astype(x.dtype)
        out = checkpoint_name(out, "attention_out")
        out = linear("bktv,kve->bte", out, self.o_proj[...], runtime)
        return checkpoint_name(out, "out_proj"), cache, aux

    def _over_devices(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        """Computes the output without a cache in explicit mode: each device takes full sequences of its rows and its
        own heads, and the outputs are summed over the devices that share the heads."""
        layout, (weights, module) = runtime.layout, split_module(self)
        assert layout is not None  # explicit mode has a mesh
        rows = layout.spec(("batch", None, None), x_BTE.shape)
        heads = layout.spec(("kv_heads",), (self.spec.key_heads,))[0]
        alone = replace(runtime, layout=None)

        def local(weights, x_bTE, step):
            out, _, _ = module(weights)(x_bTE, step, None, alone)
            return out if heads is None else jax.lax.psum(out, heads)

        places = [layout.used(spec_of(w)) for w in weights], rows, PartitionSpec(rows[0])
        out = over_devices(local, layout.mesh, places, rows, check_vma=False)(
            weights, x_BTE, Step(step.positions, step.segments)
        )
        return reshard_like(out, x_BTE)

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        return linear("bte,ekd->bktd", x_BTE, getattr(self, f"{name}_proj")[...], runtime)

    def _gate(self, x_BTE: jax.Array, name: str) -> jax.Array:
        return jnp.einsum("bte,ekg->bktg", x_BTE, getattr(self, f"{name}_proj")[...].astype(x_BTE.dtype))

    def _heads(self, a_BKTX: jax.Array) -> jax.Array:
        """Splits value heads: [B, K, T, GV] -> [B, K, G, T, V]."""
        return jnp.swapaxes(a_BKTX.reshape(*a_BKTX.shape[:3], -1, self.spec.value_dim), 2, 3)

    def _stored(self, inputs_BKTJ: jax.Array) -> jax.Array:
        """Reshapes inputs of the convolution to the form that the cache stores: [B, 1, T, KJ]."""
        B, K, T, J = inputs_BKTJ.shape
        return inputs_BKTJ.swapaxes(1, 2).reshape(B, 1, T, K * J)

    def _windows(self, inputs_BKTJ: jax.Array, T: int) -> jax.Array:
        """Returns the inputs of the convolution that the cache would store after each of the T tokens: [B, T, 1, W - 1,
        KJ]."""
        before = self.spec.conv_width - 1
        return jnp.stack([self._stored(inputs_BKTJ[:, :, t + 1 : t + 1 + before]) for t in range(T)], axis=1)

    def _convolved(self, x_BTE, documents_BT, cache, runtime):
        """Returns (q, k [B, K, T, D], v [B, K, G, T, V], inputs): float32 after convolution and silu, q and k of unit
        length, and the inputs of the convolution, preceded by the W - 1 inputs of earlier calls."""
        spec = self.spec
        inputs = [checkpoint_name(self._project(x_BTE, n, runtime), label) for n, label in CONVOLVED.items()]
        inputs = to_cache(jnp.concatenate(inputs, axis=-1), runtime.layout)
        B, K, _, J = inputs.shape
        before = spec.conv_width - 1
        if cache is None:
            inputs = jnp.pad(inputs, ((0, 0), (0, 0), (before, 0), (0, 0)))
        else:
            window = cast(jax.Array, cache.arrays["conv"])[cache.index].reshape(B, before, K, J).swapaxes(1, 2)
            inputs = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=2)
        kernel = jnp.concatenate([getattr(self, f"{name}_conv")[...].astype(jnp.float32) for name in CONVOLVED], axis=1)
        convolved = jax.nn.silu(convolve(inputs, kernel, documents_BT))
        q, k, v = jnp.split(convolved, [spec.key_dim, 2 * spec.key_dim], axis=-1)
        return _unit(q) * spec.key_dim**-0.5, _unit(k), self._heads(v), inputs

    def _gates(self, x_BTE, real_BT):
        """Returns (beta, g), float32[B, K, G, T]: the share of a value that is written, and the logarithm of the decay;
        0 on padding."""
        b, a = (self._gate(x_BTE, name).astype(jnp.float32).swapaxes(2, 3) for name in "ba")
        A_log, dt_bias = (w[...].astype(jnp.float32)[..., None] for w in (self.A_log, self.dt_bias))
        g = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)
        return tuple(jnp.where(real_BT[:, None, None], each, 0.0) for each in (jax.nn.sigmoid(b), g))


def _with(cache: LayerCache, name: str, value: jax.Array) -> LayerCache:
    array = cast(jax.Array, cache.arrays[name])
    return replace(cache, arrays=cache.arrays | {name: array.at[cache.index].set(value.astype(array.dtype))})


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def number_documents(segments_BT: jax.Array) -> jax.Array:
    """Returns int32[B, T]: the number of each token's document in its row, from 0. Padding counts as part of the
    document before it (or after it, at the start of a row), so that only a real token begins a document."""
    index = jnp.arange(segments_BT.shape[1])
    last = jax.lax.cummax(jnp.where(segments_BT != 0, index, 0), axis=1)
    filled = jnp.take_along_axis(segments_BT, last, axis=1)
    before = jnp.pad(filled[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum((filled != before) & (before != 0), axis=1, dtype=jnp.int32)


def _last_inputs(inputs_BKTJ: jax.Array, real_BT: jax.Array, count: int) -> jax.Array:
    """Returns [B, K, count, J]: the `count` inputs up to the last real token. The first `count` inputs come from
    earlier calls and are returned if no token is real."""
    end = jnp.max(jnp.where(real_BT, 1 + jnp.arange(real_BT.shape[1]), 0), axis=1)
    at = end[:, None] + jnp.arange(count)
    return jnp.take_along_axis(inputs_BKTJ, at[:, None, :, None], axis=2)


def convolve(inputs_BKTJ: jax.Array, kernel_KJW: jax.Array, documents_BT: jax.Array) -> jax.Array:
    """Computes a causal depthwise convolution, float32[B, K, T, J]: out_t = sum_w kernel[w] in_(t + w), where the last
    of the W inputs belongs to token t itself. `inputs` starts with W - 1 inputs of earlier calls. A tap in another
    document counts as 0."""
    W, T = kernel_KJW.shape[-1], documents_BT.shape[1]
    sources = jnp.pad(documents_BT, ((0, 0), (W - 1, 0)))
    out = jnp.float32(0.0)
    for w in range(W):
        same = (sources[:, w : w + T] == documents_BT)[:, None, :, None]
        out = out + jnp.where(same, inputs_BKTJ[:, :, w : w + T], 0) * kernel_KJW[:, None, :, w]
    return out


def single(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence for one token: (out [B, K, G, 1, V], state). Arguments as in `chunked`, with T = 1.

    The state is read once for k and q: S^T q = e^g S_before^T q + (k . q) u.
    """
    decay = jnp.exp(g)[..., None]
    seen = jnp.einsum("bkxd,bkgdv->bkgxv", jnp.concatenate([k, q], axis=2), state_BKGDV)
    written = beta[..., None] * (v - decay * seen[..., :1, :])
    match = jnp.sum(k * q, axis=-1)[:, :, None, :, None]
    out = decay * seen[..., 1:, :] + match * written
    return out, decay * state_BKGDV + k.swapaxes(2, 3)[:, :, None] * written


def stepwise(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence token by token: (out [B, K, G, T, V], states after each token [B, T, K, G, D, V])."""

    def one(state, xs):
        q, k, v, beta, g = (jnp.expand_dims(x, axis) for x, axis in zip(xs, (2, 2, 3, 3, 3), strict=True))
        out, state = single(q, k, v, beta, g, state)
        return state, (out[:, :, :, 0], state)

    xs = tuple(jnp.moveaxis(x, axis, 0) for x, axis in ((q, 2), (k, 2), (v, 3), (beta, 3), (g, 3)))
    _, (out, states) = jax.lax.scan(one, state_BKGDV, xs)
    return jnp.moveaxis(out, 0, 3), jnp.moveaxis(states, 0, 1)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    documents_BT: jax.Array,
    state_BKGDV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence over T tokens, C at a time: (out [B, K, G, T, V], state after the last token).

    q, k [B, K, T, D]; v [B, K, G, T, V]; beta, g [B, K, G, T]. Within a chunk the written values u_i = beta_i (v_i -
    S_i^T k_i) solve a unit lower triangular system (section 3.3): u = U - W S with S the state before the chunk. U, W
    and all else that does not depend on S are computed for all chunks at once; three products remain in the scan.
    """
    T = v.shape[3]
    C = min(CHUNK, T)
    q, k, v, beta, g = (_chunks(a, axis, C) for a, axis in ((q, 2), (k, 2), (v, 3), (beta, 3), (g, 3)))
    decay, entering = _decays(g, _chunks(documents_BT, 1, C, mode="edge"))
    solution = unit_lower_inverse(beta[..., None] * decay * _products(k, k)) * beta[..., None, :]
    U, W = solution @ v, (solution * entering[..., None, :]) @ k[:, :, :, None]
    remaining = decay[..., -1, :, None]

    def chunk(state, xs):
        U, W, k, remaining, kept = xs
        u = U - W @ state
        after = kept[..., None] * state + jnp.einsum("bkcd,bkgcv->bkgdv", k, remaining * u)
        return after, (state, u)

    state, (states, u) = jax.lax.scan(chunk, state_BKGDV, (U, W, k, remaining, entering[..., -1:]))
    out = entering[..., None] * jnp.einsum("nbkcd,nbkgdv->nbkgcv", q, states) + (decay * _products(q, k)) @ u
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :T], state


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """Computes the inverse of I + tril(a, -1), [..., C, C], from blocks of size 1 to C, two neighbours at a time:
    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]].

    It uses products only. On CPU a batched triangular solve calls a threaded BLAS, which is slow and can hang in a
    backward pass. The series I - a + a^2 - ... loses all digits for equal keys.
    """
    C = a.shape[-1]

    def quarters(size):
        """Returns the lower left quarters Q of the diagonal blocks of size 2 `size`."""
        block = jnp.arange(C) // size
        return jnp.where((block[:, None] // 2 == block // 2) & (block[:, None] > block), a, 0)

    inverse, size = jnp.eye(C, dtype=a.dtype) - quarters(1), 2
    while size < C:
        inverse = inverse - inverse @ quarters(size) @ inverse
        size *= 2
    return inverse


def _inverse_forward(a):
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    with jax.default_matmul_precision("highest"):  # traced outside the caller's context
        return (-jnp.tril(transposed @ cotangent @ transposed, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _chunks(a: jax.Array, axis: int, C: int, mode: str = "constant") -> jax.Array:
    """Pads the tokens of `a`, along `axis`, to a multiple of C and splits them into chunks: [N, ..., C, ...]."""
    pad = [(0, 0)] * a.ndim
    pad[axis] = (0, -a.shape[axis] % C)
    a = jnp.pad(a, pad, mode=mode)
    return jnp.moveaxis(a.reshape(*a.shape[:axis], -1, C, *a.shape[axis + 1 :]), axis, 0)


def _products(a_NBKCD: jax.Array, b_NBKCD: jax.Array) -> jax.Array:
    """Returns [N, B, K, 1, C, C]: a_i . b_j, the same for all value heads of a key head."""
    return jnp.einsum("nbkid,nbkjd->nbkij", a_NBKCD, b_NBKCD)[:, :, :, None]


def _decays(g_NBKGC: jax.Array, documents_NBC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the decay at token i of the value that token j wrote, [N, B, K, G, C, C], and of the state before the
    chunk, [N, B, K, G, C]; 0 for the future and for other documents.

    The logarithms of the pairs are sums over j < l <= i. Differences of one cumulative sum would lose digits after a
    strong decay: float32 has a spacing of 6e-5 at 1000. The upper half is masked before the exponential, where it would
    overflow.
    """
    C = g_NBKGC.shape[-1]
    later = jnp.tril(jnp.ones((C, C), bool), -1)
    pairs = jnp.cumsum(jnp.where(later, g_NBKGC[..., :, None], 0.0), axis=-2)
    same = documents_NBC[..., :, None] == documents_NBC[..., None, :]
    allowed = (same & jnp.tril(jnp.ones((C, C), bool)))[:, :, None, None]
    first = jnp.zeros_like(documents_NBC[:1, :, -1:])
    carried = documents_NBC == jnp.concatenate([first, documents_NBC[:-1, :, -1:]])
    total = jnp.where(carried[:, :, None, None], jnp.cumsum(g_NBKGC, axis=-1), -jnp.inf)
    return jnp.exp(jnp.where(allowed, pairs, -jnp.inf)), jnp.exp(total)
