"""The engine hook gives the bits of the generator for rows that decode: tokens, log-probabilities and caches of the generator's own
decode program, and the logits of its decoding step. s rows, M pages of a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, random_model, short, tokens

from policy import families, hook, modes
from policy.cache.pages import Pages
from rollout.engine.programs import DecoderPrograms, DecodeState
from rollout.engine.sampling import choose
from rollout.request import Request
from rollout.types import GeneratorOptions, SamplingParams

SLOTS, LENGTH, SIZE, NUMBER, STEPS = 4, 24, 4, 30, 3
PROMPTS = {0: 9, 2: 5, 3: 13}  # row -> tokens of its prompt; row 1 is idle
CASES = {kind: (kind, None) for kind in KINDS if kind not in ("Qwen3Next", "Qwen3_5")}
CASES |= {"Gemma3-int8": ("Gemma3", "int8"), "DeepseekV3-fp8": ("DeepseekV3", "fp8")}
ALWAYS = ("Gemma3", "DeepseekV3")


def prefilled(model, quantization):
    """(the generator's functions, its cache after the prompts, the state of its rows)."""
    options = GeneratorOptions(
        cache="paged", page_size=SIZE, tokens_per_dispatch=1, prefill_chunk=16, kv_cache=quantization
    )
    functions = DecoderPrograms(model.graph, options, SLOTS, LENGTH)
    rng = np.random.default_rng(0)
    table = (1 + rng.permutation(NUMBER - 1))[: SLOTS * LENGTH // SIZE].reshape(SLOTS, -1).astype(np.int32)
    text = tokens(SLOTS, 16, seed=2).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=STEPS, temperature=0.8, top_k=40)
    prompts = {row: Request(tuple(text[row, :n].tolist()), sampling, row, cached=n - 1) for row, n in PROMPTS.items()}
    lengths = np.array([PROMPTS.get(row, 0) for row in range(SLOTS)], np.int32)
    cache = jax.jit(lambda: functions.empty(Pages(NUMBER, SIZE)))()
    inputs = np.arange(SLOTS), text, np.zeros(SLOTS, np.int32), np.maximum(lengths - 1, 0), table
    cache = jax.jit(functions.prefill)(model.params, cache, *inputs)
    state = DecodeState.of([prompts.get(row) for row in range(SLOTS)], SLOTS, 1, seed=5, recent=0)
    return functions, cache, dataclasses.replace(state, rows=np.arange(SLOTS, dtype=np.int32), pages=table)


def rows_of(state):
    request = jnp.where(state.active != 0, jnp.arange(SLOTS), -1)
    return hook.Rows(state.token, state.cached, request, state.pages)


def hooked(model, caches, state):
    """(caches, tokens, log-probabilities) of one step of an engine that prepares the weights as the generator does."""
    model = hook.prepare(model, SLOTS)
    hidden, caches, _ = hook.forward(model, rows_of(state), caches)
    return caches, *choose(hook.logits(model, hidden), (state.prompt_id, state.sample, state.cached + 1), state.draws)


def logits_of_hook(model, caches, state):
    hidden, caches, _ = hook.forward(model, rows_of(state), caches)
    return hook.logits(model, hidden), caches


def logits_of_mode(model, cache, state):
    """Those of a decoding step of the generator, with the weights as they are stored."""
    with model.graph.precision():
        step = modes.next_token_step(state.cached, state.active, state.pages)
        return modes.autoregressive(model.graph.decoder(model.params), state.token, step, cache, model.graph.runtime)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.every_family) for name in CASES]
)
def test_rows_that_decode_have_the_bits_of_the_generator(name):
    kind, quantization = CASES[name]
    model = random_model(families.read(short(kind)), seed=3)
    functions, cache, state = prefilled(model, quantization)
    decode, step, active = jax.jit(functions.decode), jax.jit(hooked), np.array(sorted(PROMPTS))
    caches, same = hook.by_layer(cache), functools.partial(jax.tree.map, np.testing.assert_array_equal)
    for _ in range(STEPS):
        logits, after = jax.jit(logits_of_hook)(model, caches, state)
        expected, cache_of_mode = jax.jit(logits_of_mode)(model, cache, state)
        np.testing.assert_array_equal(logits[active], expected[active])
        same(after, hook.by_layer(cache_of_mode))
        caches, new, logp = step(model, caches, state)
        cache, state, output = decode(model.params, cache, state, np.array([1, 0], np.int32))
        np.testing.assert_array_equal(new[active], output.tokens[0, active])
        np.testing.assert_array_equal(logp[active], output.logprobs[0, active])
        same(caches, hook.by_layer(cache))
    assert np.unique(output.logprobs[0, active]).size == len(active)
