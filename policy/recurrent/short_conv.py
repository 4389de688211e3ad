"""Short convolutions (LFM2, arXiv 2511.23404): a causal depthwise convolution over few tokens
between two gates.

B rows, T tokens, E hidden, W width of the convolution. Each of the E channels is computed by
itself.
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
from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.paths import number_documents
from policy.cache.step import Step
from policy.config import DecoderConfig, Runtime, ShortConv
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode, over_devices, reshard_like, spec_of
from policy.mesh.sharding import from_cache, to_cache
from policy.ops.linear import linear
from policy.ops.parameter import normal, split_module, weight, zeros
from policy.recurrent.convolution import convolve, convolve_paths, last_inputs, with_state

# Input projections -> the names under which remat policies save their results.
PROJECTED = {"c": "query_proj", "b": "key_proj", "x": "value_proj"}


class ShortConvolution(nnx.Module):
    """A short convolution mixer. Weights: b_proj, c_proj, x_proj, o_proj [E, E]; conv [E, W]; with
    a bias b_bias, c_bias, x_bias, conv_bias, o_bias [E]."""

    def __init__(self, spec: ShortConv, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        init = normal(config.initializer_range)
        for name in PROJECTED:
            setattr(self, f"{name}_proj", weight(rngs, (E, E), ("embed", "mlp"), init, inputs=(0,)))
        self.conv = weight(rngs, (E, spec.conv_width), ("mlp", None), init)
        self.o_proj = weight(rngs, (E, E), ("mlp", "embed"), init, inputs=(0,))
        if spec.bias:
            for name in PROJECTED:
                setattr(self, f"{name}_bias", weight(rngs, (E,), ("mlp",), zeros))
            self.conv_bias = weight(rngs, (E,), ("mlp",), zeros)
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the output of the mixer. Padding leaves the cache as it is. Without a cache
        every document of a row starts without inputs before it; with one, the first document of a
        row continues from the cached inputs. In trees the inputs before a token are those on its
        path."""
        if in_explicit_mode():
            output = LayerOutput(self._over_devices(x_BTE, step, runtime), cache, LayerAux())
        else:
            output = self._channels(x_BTE, step, cache, runtime)
        out = output.hidden
        if self.spec.bias:
            out = out + self.o_bias[...].astype(out.dtype)
        return output._replace(hidden=checkpoint_name(out, "out_proj"))

    def _channels(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the share of this module's channels in the output, without its bias."""
        real = step.segments != 0
        before = self.spec.conv_width - 1
        x_BTE = replicate_length(x_BTE, runtime)
        c, b, x = (
            checkpoint_name(self._project(x_BTE, n, runtime), label)
            for n, label in PROJECTED.items()
        )
        inputs = to_cache(jnp.where(real[..., None], b * x, 0)[:, None], runtime.layout)
        if cache is None:
            inputs = jnp.pad(inputs, ((0, 0), (0, 0), (before, 0), (0, 0)))
        else:
            window = cast(jax.Array, cache.arrays["conv"])[cache.index]
            inputs = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=2)
        kernel = self.conv[...].astype(jnp.float32)[None]
        if step.tree is None:
            convolved = convolve(inputs, kernel, number_documents(step.segments))
        else:
            convolved = convolve_paths(inputs[:, :, before:], kernel, step.tree)
        aux = LayerAux()
        if cache is not None and runtime.tentative:
            windows = [inputs[:, :, t + 1 : t + 1 + before] for t in range(x_BTE.shape[1])]
            aux = LayerAux(states={"conv": jnp.stack(windows, axis=1)})
        elif cache is not None:
            cache = with_state(cache, "conv", last_inputs(inputs, real, before))
        if self.spec.bias:
            convolved = convolved + self.conv_bias[...].astype(jnp.float32)
        convolved = checkpoint_name(from_cache(convolved, runtime.layout)[:, 0], "context")
        out = checkpoint_name((c * convolved).astype(x_BTE.dtype), "attention_out")
        out = linear("btf,fe->bte", out, self.o_proj[...], runtime)
        return LayerOutput(out, cache, aux)

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        out = linear("bte,ef->btf", x_BTE, getattr(self, f"{name}_proj")[...], runtime)
        return out + getattr(self, f"{name}_bias")[...].astype(out.dtype) if self.spec.bias else out

    def _over_devices(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        """Computes `_channels` without a cache in explicit mode: each device takes full sequences
        of its rows and its own channels, and the outputs are summed over the devices that share the
        channels."""
        layout = runtime.layout
        weights, module = split_module(self)
        assert layout is not None  # explicit mode has a mesh
        rows = layout.spec(("batch", None, None), x_BTE.shape)
        channels = layout.spec(("mlp",), x_BTE.shape[-1:])[0]
        alone = replace(runtime, layout=None)

        def local(weights, x_bTE, step):
            convolution = cast(ShortConvolution, module(weights))
            out = convolution._channels(x_bTE, step, None, alone).hidden
            return out if channels is None else jax.lax.psum(out, channels)

        places = [layout.used(spec_of(w)) for w in weights], rows, PartitionSpec(rows[0])
        out = over_devices(local, layout.mesh, places, rows, check_vma=False)(
            weights, x_BTE, Step(step.positions, step.segments, tree=step.tree)
        )
        return reshard_like(out, x_BTE)
