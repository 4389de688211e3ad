"""Multi-token prediction (arXiv 2412.19437, section 2.2): modules beside the decoder that predict the tokens after the next one.

Module d = 1..D turns the state of position i and the token at i + d into a state that predicts the token at i + d + 1:

    h^d_i = layer_d(P_d [enorm_d(embedding of token i + d) | hnorm_d(h^(d-1)_i)]),  h^0 the decoder's own state

Embedding and head are those of the decoder. Entry i of a module sits at position i: every module counts from 0, which under
rotary embeddings is the same as the offset of d that other implementations give it.

B rows, T tokens, E hidden, D depth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.cache import LayerCache
from policy.cache.step import Step
from policy.config import Runtime
from policy.heads import head
from policy.intermediates import Aux, Predictions
from policy.layers.prediction_module import LAYER, NAME

if TYPE_CHECKING:
    from policy.decoder import Decoder


def predict(decoder: Decoder, d: int, hidden_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime):
    """Module d on the states of module d - 1 and the step's tokens, those d places on.

    Returns (what module d + 1 reads, the states of the head, cache, LayerAux).
    """
    spec = decoder.config.multi_token_prediction
    graph, weights = nnx.split(decoder.mtp)
    module = nnx.merge(graph, jax.tree.map(lambda a: a[d - 1], weights))
    step = decoder.make_step(step.tokens, step)
    if step.dropout is not None:
        step = step.at(len(decoder.config.layers) + d - 1)
    x, cache, aux = module(hidden_BTE, decoder.embed(step, runtime), step, cache, runtime)
    normed = module.post_norm(x) if spec.final_norm else decoder.norm(x)
    return normed if spec.input == "post_norm" else x, normed, cache, aux


def predicted(segments_BT: jax.Array, d: int) -> jax.Array:
    """bool[B, T]: the tokens that module d predicts, which are those with d + 1 tokens of their segment before them."""
    return (_shifted(segments_BT, -d - 1) == segments_BT) & (segments_BT != 0)


def predictions(decoder: Decoder, tokens_BT, step: Step, hidden_BTE, aux: Aux, temperature, runtime: Runtime) -> Aux:
    """`aux` with the Predictions of all modules, at logits / temperature, and with the findings of their layers.

    `hidden` are the decoder's states after its norm. The agreement costs one more product with the head for the decoder and for
    each module, without a gradient. No entry looks past its segment: it is padding where the token d places on is another's.
    Routes are those of the decoder's layers: routers of the modules choose themselves.
    """
    read = aux.mtp_input
    if runtime.mtp == "detached":
        graph, own, rest = nnx.split(decoder, nnx.PathContains(NAME), ...)
        decoder = nnx.merge(graph, own, jax.lax.stop_gradient(rest))
        read = jax.lax.stop_gradient(read)
    config = decoder.config
    tiling = head.Tiling(runtime.num_vocab_tiling, runtime.layout)
    best = _likeliest(decoder, hidden_BTE, 1, tiling)

    def module(d, read):
        segments = jnp.where(_shifted(step.segments, d) == step.segments, step.segments, 0)
        seat = replace(step, tokens=_shifted(tokens_BT, d), segments=segments, routes=None)
        read, normed, _, found = predict(decoder, d, read, seat, None, runtime)
        return read, normed, found

    logps, agrees, layers = [], [], []
    for d in range(1, config.multi_token_prediction.depth + 1):
        run = partial(module, d)
        read, normed, found = (run if runtime.remat == "none" else jax.checkpoint(run))(read)
        rows, targets = _rows(normed, d + 1), tokens_BT.reshape(-1)
        logp, _ = head.logprobs(rows, decoder.head_weight, targets, temperature, config.logit_softcap, tiling)
        valid = predicted(step.segments, d)
        logps.append(jnp.where(valid, logp.reshape(valid.shape), 0.0))
        agrees.append(jnp.where(valid, _likeliest(decoder, normed, d + 1, tiling) == best, False).astype(jnp.float32))
        layers.append(found)
    found = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    return replace(
        aux, layers=aux.layers | {LAYER: found}, predictions=Predictions(jnp.stack(logps), jnp.stack(agrees))
    )


def _shifted(x_BT: jax.Array, by: int) -> jax.Array:
    """At t what stood at t + by; 0 where that is outside."""
    T, beside = x_BT.shape[1], [(0, 0)] * (x_BT.ndim - 2)
    by = max(-T, min(T, by))
    return jnp.pad(x_BT[:, max(by, 0) : T + min(by, 0)], ((0, 0), (max(-by, 0), max(by, 0)), *beside))


def _rows(hidden_BTE: jax.Array, back: int) -> jax.Array:
    """[B * T, E]: at each token the state `back` places before it."""
    return _shifted(hidden_BTE, -back).reshape(-1, hidden_BTE.shape[-1])


def _likeliest(decoder: Decoder, hidden_BTE: jax.Array, back: int, tiling: head.Tiling) -> jax.Array:
    """int32[B, T]: the likeliest token at each place, by the state `back` places before it."""
    best = head.likeliest(_rows(hidden_BTE, back), decoder.head_weight, decoder.config.logit_softcap, tiling)
    return best.reshape(hidden_BTE.shape[:2])
