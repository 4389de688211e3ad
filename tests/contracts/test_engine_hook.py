"""The engine hook gives the bits of the generator for rows that decode: tokens, log-probabilities
and caches of the generator's own decode program, and the logits of its decoding step. s rows, M
pages of a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, by_kind, random_model, short, tokens

from policy import families, hook, modes
from policy.cache.pages import Pages
from policy.config import LatentAttention, Recurrent
from rollout.engine.programs import DecoderPrograms, DecodeState
from rollout.engine.sampling import choose
from rollout.request import Request
from rollout.types import GeneratorOptions, SamplingParams

SLOTS, LENGTH, SIZE, NUMBER, STEPS = 4, 24, 4, 30, 3
PROMPTS = {0: 9, 2: 5, 3: 13}  # row -> tokens of its prompt; row 1 is idle
ACTIVE = np.array(sorted(PROMPTS))


def mixers(kind: str) -> set[type]:
    """The classes of the mixers of a tiny model."""
    return {type(mixer) for layer in families.read(short(kind)).layers for mixer in layer.mixers}


# The hook refuses recurrent mixers.
CASES = {
    kind: (kind, None)
    for kind in KINDS
    if not any(issubclass(mixer, Recurrent) for mixer in mixers(kind))
}
CASES |= {"Gemma3-int8": ("Gemma3", "int8"), "DeepseekV3-fp8": ("DeepseekV3", "fp8")}
# Latents, experts and two stacks.
ALWAYS = ("DeepseekV3",)


def assert_same(name, ours, theirs):
    """Every bit; of latent attention up to rounding, which XLA for CPUs with AVX-512 does
    differently in two programs."""
    compare = np.testing.assert_array_equal
    if LatentAttention in mixers(CASES[name][0]):
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, ours, theirs)


def decoding(name):
    """(model, the generator's functions, its cache with random entries, the state of its rows)."""
    kind, quantization = CASES[name]
    model = random_model(families.read(short(kind)), seed=3)
    options = GeneratorOptions(
        cache="paged", page_size=SIZE, tokens_per_dispatch=STEPS, kv_cache=quantization
    )
    functions, rng = DecoderPrograms(model.graph, options, SLOTS, LENGTH), np.random.default_rng(0)

    def fill(a):
        return jnp.asarray(
            rng.uniform(-2, 2, a.shape) * (50 if a.dtype == jnp.int8 else 1), a.dtype
        )

    cache = jax.tree.map(fill, jax.eval_shape(lambda: functions.empty(Pages(NUMBER, SIZE))))
    table = (
        (1 + rng.permutation(NUMBER - 1))[: SLOTS * LENGTH // SIZE]
        .reshape(SLOTS, -1)
        .astype(np.int32)
    )
    text, sampling = (
        tokens(SLOTS, 16, seed=2),
        SamplingParams(max_new_tokens=STEPS, temperature=0.8, top_k=40),
    )
    requests = [
        Request(tuple(text[row, :n].tolist()), sampling, row, cached=n - 1)
        for row, n in PROMPTS.items()
    ]
    requests.insert(1, None)
    state = DecodeState.of(requests, SLOTS, 1, seed=5, recent=0)
    return (
        model,
        functions,
        cache,
        dataclasses.replace(state, rows=np.arange(SLOTS, dtype=np.int32), pages=table),
    )


def rows_of(state):
    return hook.Rows(
        state.token, state.cached, jnp.where(state.active != 0, jnp.arange(SLOTS), -1), state.pages
    )


def decode_by_hook(model, caches, state, limit):
    """(caches, tokens [STEPS, s], log-probabilities [STEPS, s]): the loop of an engine that decodes
    on the device."""
    model = hook.prepare(model, SLOTS)

    def step(carry):
        i, caches, token, cached, tokens, logprobs = carry
        rows = dataclasses.replace(rows_of(state), tokens=token, positions=cached)
        hidden, caches, _ = hook.forward(model, rows, caches)
        drawn = choose(
            hook.logits(model, hidden), (state.prompt_id, state.sample, cached + 1), state.draws
        )
        new, logp = drawn.tokens, drawn.logprobs
        return (
            i + 1,
            caches,
            new,
            cached + state.active,
            tokens.at[i].set(new),
            logprobs.at[i].set(logp),
        )

    blank = jnp.zeros((STEPS, SLOTS), jnp.int32), jnp.zeros((STEPS, SLOTS))
    _, caches, _, _, *out = jax.lax.while_loop(
        lambda carry: carry[0] < limit, step, (0, caches, state.token, state.cached, *blank)
    )
    return caches, *out


@pytest.mark.parametrize("name", by_kind(CASES, always=ALWAYS))
def test_rows_that_decode_have_the_bits_of_the_generators_program(name, all_optimizations):
    model, functions, cache, state = decoding(name)
    caches, new, logp = jax.jit(decode_by_hook)(model, hook.by_layer(cache), state, STEPS)
    cache, _, output = jax.jit(functions.decode)(
        model.params, cache, state, np.array([STEPS, 0], np.int32)
    )
    np.testing.assert_array_equal(new[:, ACTIVE], output.tokens[:, ACTIVE])
    assert_same(name, (logp[:, ACTIVE], caches), (output.logprobs[:, ACTIVE], hook.by_layer(cache)))
    assert np.unique(output.logprobs[:, ACTIVE]).size > STEPS, "the model says the same everywhere"


@pytest.mark.parametrize("name", by_kind(CASES, always=()))
def test_their_logits_are_those_of_a_decoding_step_with_the_weights_as_stored(name):
    model, _, cache, state = decoding(name)

    @jax.jit
    def by_hook(model, caches, state):
        hidden, caches, _ = hook.forward(model, rows_of(state), caches)
        return hook.logits(model, hidden), caches

    @jax.jit
    def by_mode(model, cache, state):
        with model.graph.precision():
            step = modes.next_token_step(state.cached, state.active, state.pages)
            decoder = model.graph.decoder(model.params)
            states, cache = modes.next_token_states(
                decoder, state.token, step, cache, model.graph.runtime
            )
            return modes.logits(decoder, states, model.graph.runtime), cache

    logits, caches = by_hook(model, hook.by_layer(cache), state)
    expected, cache = by_mode(model, cache, state)
    assert_same(name, (logits[ACTIVE], caches), (expected[ACTIVE], hook.by_layer(cache)))
