"""Multi-token prediction (arXiv 2412.19437, section 2.2): extra modules predict the tokens after
the next one.

Module d = 1..depth turns the state of position i and the token at i + d into a state that predicts
the token at i + d + 1:

    h^d_i = layer_d(P_d [enorm_d(embedding of token i + d) | hnorm_d(h^(d-1)_i)]),  h^0 the
    decoder's own state

The modules share the decoder's embedding and head. Entry i of a module has position i: every module
counts from 0, which under rotary embeddings is the same as the offset of d in other
implementations.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.layer_cache import LayerCache
from policy.cache.paths import Tree, before, scored
from policy.cache.step import Step
from policy.config import MultiTokenPrediction, Runtime
from policy.heads import head
from policy.intermediates import Aux, LayerAux, Predictions
from policy.layers.prediction_module import LAYER, NAME

if TYPE_CHECKING:
    from policy.decoder import Decoder


class ModuleOutput(NamedTuple):
    """What a prediction module makes of tokens [B, T].

    states: the input of the next module, [B, T, E]. head_input: the input of the head, [B, T, E].
    cache: with the entries of these tokens; None without one. aux: of the module's layer.
    """

    states: jax.Array
    head_input: jax.Array
    cache: LayerCache | None
    aux: LayerAux


def predict(
    decoder: Decoder,
    d: int,
    hidden_BTE: jax.Array,
    step: Step,
    cache: LayerCache | None,
    runtime: Runtime,
) -> ModuleOutput:
    """Runs module d on the states of module d - 1 and the step's tokens, which are the tokens d
    places on."""
    spec = _spec(decoder)
    assert step.tokens is not None, "modules read the step's tokens"
    graph, weights = nnx.split(decoder.mtp)
    module = nnx.merge(graph, jax.tree.map(lambda a: a[d - 1], weights))
    step = decoder.complete_step(step.tokens, step, runtime)
    if step.dropout is not None:
        step = step.for_layer(len(decoder.config.layers) + d - 1)
    x, cache, aux = module(hidden_BTE, decoder.embed(step, runtime), step, cache, runtime)
    normed = module.post_norm(x) if spec.final_norm else decoder.norm(x)
    return ModuleOutput(normed if spec.input == "post_norm" else x, normed, cache, aux)


def _spec(decoder: Decoder) -> MultiTokenPrediction:
    spec = decoder.config.multi_token_prediction
    assert spec is not None, "the decoder has no prediction modules"
    return spec


def predictions(
    decoder: Decoder,
    tokens_BT: jax.Array,
    step: Step,
    hidden_BTE: jax.Array,
    aux: Aux,
    temperature: jax.typing.ArrayLike,
    runtime: Runtime,
) -> Aux:
    """Adds to `aux` the Predictions of all modules, at logits / temperature, and the LayerAux of
    their layers.

    hidden: the decoder's states after its norm. `Predictions.agrees` costs one more product with
    the head for the decoder and for each module, without a gradient. An entry is padding where the
    token d places on does not continue the sequence. In a tree the tokens up to `depth` places on
    have to be the same on all paths, so beginnings that sequences share end `depth` tokens before
    they differ. Routers of the modules choose their experts themselves: `step.routes` is for the
    decoder's layers.
    """
    states = aux.mtp_input
    if runtime.mtp == "detached":
        graph, own, rest = nnx.split(decoder, nnx.PathContains(NAME), ...)
        decoder = nnx.merge(graph, own, jax.lax.stop_gradient(rest))
        states = jax.lax.stop_gradient(states)
    config = decoder.config
    # The logits of all modules would be kept at once, until the gradients of the first begin.
    tiling = head.Tiling(runtime.num_vocab_tiling, runtime.layout, kept_mib=0)
    best = _likeliest(decoder, hidden_BTE, step.tree, 1, tiling)

    def module(d, states):
        goes_on = _goes_on(step, d)
        shifted = replace(
            step,
            tokens=_ahead(tokens_BT, d),
            segments=jnp.where(goes_on, step.segments, 0),
            routes=None,
        )
        if step.tree is not None:  # a node of which `last` is 0 is seen by no query
            shifted = replace(
                shifted, tree=replace(step.tree, last=jnp.where(goes_on, step.tree.last, 0))
            )
        return predict(decoder, d, states, shifted, None, runtime)

    logps = []
    agrees = []
    layers = []
    for d in range(1, _spec(decoder).depth + 1):
        run = partial(module, d)
        output = (run if runtime.remat == "none" else jax.checkpoint(run))(states)
        states = output.states
        normed = output.head_input
        rows = _rows(normed, step.tree, d + 1)
        targets = tokens_BT.reshape(-1)
        logp, _ = head.logprobs(
            rows, decoder.head_weight, targets, temperature, config.logit_scaling, tiling
        )
        valid = scored(step.segments, step.tree, d + 1)
        logps.append(jnp.where(valid, logp.reshape(valid.shape), 0.0))
        agrees.append(
            jnp.where(
                valid, _likeliest(decoder, normed, step.tree, d + 1, tiling) == best, False
            ).astype(jnp.float32)
        )
        layers.append(output.aux)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    return replace(
        aux,
        layers=aux.layers | {LAYER: stacked},
        predictions=Predictions(jnp.stack(logps), jnp.stack(agrees)),
    )


def _ahead(x_BT: jax.Array, d: int) -> jax.Array:
    """Returns [B, T]: at t the entry of the token d places on; 0 where the row has no such
    token."""
    return jnp.pad(x_BT[:, d:], ((0, 0), (0, min(d, x_BT.shape[1]))))


def _goes_on(step: Step, d: int) -> jax.Array:
    """Returns bool[B, T]: whether the token d places on continues the sequence of each token."""
    ahead = _ahead(step.segments, d)
    if step.tree is None:
        return ahead == step.segments
    return (step.segments <= ahead) & (ahead <= step.tree.last)


def _rows(hidden_BTE: jax.Array, tree: Tree | None, back: int) -> jax.Array:
    """Returns for each token the state `back` tokens before it, [B * T, E]."""
    return before(hidden_BTE, tree, back).reshape(-1, hidden_BTE.shape[-1])


def _likeliest(
    decoder: Decoder, hidden_BTE: jax.Array, tree: Tree | None, back: int, tiling: head.Tiling
) -> jax.Array:
    """Returns the likeliest token at each place by the state `back` tokens before it, int32[B,
    T]."""
    best = head.likeliest(
        _rows(hidden_BTE, tree, back), decoder.head_weight, decoder.config.logit_scaling, tiling
    )
    return best.reshape(hidden_BTE.shape[:2])
