"""One decoder used in its two ways on the same tokens: the full row at once, and through a cache,
prompt first and then token by token. B rows, T tokens, E hidden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache import cache as caches
from policy.cache.step import Step


def forward(model, tokens_BT, segments_BT=None, **runtime):
    """(hidden float32[B, T, E], Aux) without a cache, under the model's runtime with these
    changes."""
    graph = model.graph.with_runtime(**runtime)

    def run(params, tokens, step):
        with graph.precision():
            hidden, _, aux = graph.decoder(params)(tokens, step, None, graph.runtime)
        return hidden, aux

    tokens = jnp.asarray(tokens_BT)
    hidden, aux = jax.jit(run)(model.params, tokens, modes.make_step(tokens, segments=segments_BT))
    return np.asarray(hidden), aux


def through_cache(
    model, tokens_BT, lengths_B, prompt, *, chunk=None, capacity=None, scan=False, **runtime
):
    """(hidden [B, T, E], selections path -> int[R, B, T, k] where they are recorded): `prompt`
    tokens of each row, or all that it has, in calls of `chunk`, then one by one. Rows end at their
    lengths: they are padding in the prompt and inactive after."""
    graph, tokens, lengths = (
        model.graph.with_runtime(**runtime),
        np.asarray(tokens_BT),
        np.asarray(lengths_B)[:, None],
    )
    B, T = tokens.shape
    cache = caches.create(graph.config, B, capacity or T, graph.runtime.dtype, scan=scan)

    @jax.jit
    def run(params, tokens, step, cache):
        with graph.precision():
            hidden, cache, aux = graph.decoder(params)(tokens, step, cache, graph.runtime)
        return hidden, cache, aux.by_layer("selection")

    starts = [*range(0, prompt, chunk or prompt), *range(prompt, T)]
    hidden, selections = [], []
    for start, end in zip(starts, [*starts[1:], T], strict=True):
        positions = np.broadcast_to(np.arange(start, end), (B, end - start))
        step = Step(jnp.asarray(positions), jnp.asarray(positions < lengths, jnp.int32))
        result, cache, selected = run(model.params, jnp.asarray(tokens[:, start:end]), step, cache)
        hidden.append(np.asarray(result))
        selections.append(selected)
    return np.concatenate(hidden, axis=1), {
        path: np.concatenate([np.asarray(each[path]) for each in selections], axis=2)
        for path in selections[0]
    }
