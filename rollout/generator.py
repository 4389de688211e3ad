"""The generator: prompts in, completions out, made by the policy's own weights. It keeps no copy of them,
but for a quantised one if that is wanted.

S slots, P prompts of one prefill, C tokens of one prefill call, K decoding steps of one dispatch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from policy import cache as caches
from policy import modes
from policy.cache import Step
from policy.config import StoredType
from policy.layers.quantization import TYPES
from policy.model import Model
from policy.sharding import settle
from rollout.chat import render_prompt
from rollout.sampling import SamplingParams, draw, uniforms
from rollout.scheduler import Request, Scheduler
from rollout.weights import QuantizedWeights

PREFILL_ROWS = (1, 4, 16)
# Above this many layers decoding is scanned on CPU too: unrolled it runs several times faster, but compiles longer.
UNROLLED_LAYERS = 32


@dataclass(frozen=True)
class GeneratorOptions:
    """prefill_chunk: prompt tokens of one prefill call. tokens_per_dispatch: decoding steps between two looks of the host.
    weights, kv_cache: types in which the weights of products, and keys, values and latents, are kept; None: as floats."""

    cache: Literal["contiguous"] = "contiguous"
    prefill_chunk: int = 256
    tokens_per_dispatch: int = 16
    weights: StoredType | None = None
    kv_cache: StoredType | None = None

    def __post_init__(self):
        for name in ("weights", "kv_cache"):
            if getattr(self, name) not in (None, *TYPES):
                raise ValueError(f"GeneratorOptions.{name}: {getattr(self, name)!r} is none of {', '.join(TYPES)}")
        if self.cache != "contiguous":
            raise ValueError(f"GeneratorOptions.cache: {self.cache!r} is not available; use 'contiguous'")
        if self.prefill_chunk < 1 or self.tokens_per_dispatch < 1:
            raise ValueError("GeneratorOptions: prefill_chunk and tokens_per_dispatch must be at least 1")


@dataclass(frozen=True)
class Completion:
    """`tokens` without the prompt, with the stop token; `logprobs` of each; `finish`: stop or length; `text` with a tokenizer."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    text: str | None


class Generator:
    """Decodes up to `slots` completions at the same time over a cache of `max_length` tokens each.

    A token's draw depends only on (seed, prompt id, sample index, position), so neither the other prompts of a call nor the
    number of slots changes a completion. The weights are read from `model.params` at every dispatch; quantised ones are made again
    when those have changed (rollout/weights.py).
    """

    def __init__(
        self,
        model: Model,
        *,
        max_length: int = 256,
        slots: int = 16,
        seed: int = 0,
        tokenizer=None,
        options: GeneratorOptions = GeneratorOptions(),
    ):
        if max_length < 2 or slots < 1:
            raise ValueError("Generator: max_length must be at least 2 and slots at least 1")
        if (limit := model.config.max_positions) is not None and max_length > limit:
            raise ValueError(f"Generator: max_length {max_length} is more than the {limit} positions of this model")
        self.model, self.max_length, self.slots = model, max_length, slots
        self.seed, self.tokenizer, self.options = seed, tokenizer, options
        self._programs = _Programs(model.graph, options.tokens_per_dispatch, options.kv_cache)
        self._quantized = QuantizedWeights(model.graph, options.weights) if options.weights else None
        self._cache = None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams = SamplingParams(),
        ids: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`params.n` completions of each prompt, as [prompt][sample].

        Prompts are lists of token ids, or strings with a tokenizer. `ids` are the prompt ids of the random draw, by default
        range(len(prompts)), so that equal calls give equal tokens. A string is encoded as training encodes prompts: with the
        special tokens that the tokenizer puts in front, without an end of sequence.

        Raises ValueError, before anything is computed, for an empty prompt, for token ids outside the vocabulary, for a prompt
        that with max_new_tokens is longer than max_length (naming the prompt), for strings without a tokenizer (prompts or stop
        strings), and for ids that are not one for each prompt or outside 0..2^31 - 1.
        """
        if isinstance(prompts, str):
            raise ValueError("generate: prompts is one string; give a list of prompts")
        if params.stop and self.tokenizer is None:
            raise ValueError("generate: stop strings need a tokenizer; pass one to Generator, or use stop_token_ids")
        encoded = [self._encode(i, prompt, params) for i, prompt in enumerate(prompts)]
        ids = range(len(encoded)) if ids is None else ids
        if len(ids) != len(encoded):
            raise ValueError(f"generate: {len(encoded)} prompts but {len(ids)} ids")
        if wrong := [i for i in ids if not 0 <= i < 2**31]:
            raise ValueError(f"generate: prompt id {wrong[0]} is outside 0..{2**31 - 1}")
        requests = [
            Request(i, sample, prompt, int(prompt_id))
            for i, (prompt, prompt_id) in enumerate(zip(encoded, ids, strict=True))
            for sample in range(params.n)
        ]
        self._run(requests, params)
        made = [Completion(r.tokens, r.logprobs, r.finish, self._text(r.tokens)) for r in requests]
        return [made[i : i + params.n] for i in range(0, len(made), params.n)]

    def _encode(self, i: int, prompt, params: SamplingParams) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"generate: prompt {i} is a string; pass a tokenizer to Generator, or token ids")
            prompt = render_prompt(self.tokenizer, prompt)
        prompt = tuple(int(token) for token in prompt)
        if not prompt:
            raise ValueError(f"generate: prompt {i} is empty")
        if min(prompt) < 0 or max(prompt) >= self.model.config.vocab_size:
            raise ValueError(f"generate: prompt {i} holds a token id outside 0..{self.model.config.vocab_size - 1}")
        if len(prompt) + params.max_new_tokens > self.max_length:
            raise ValueError(
                f"generate: prompt {i} has {len(prompt)} tokens; with max_new_tokens {params.max_new_tokens} it is longer than "
                f"max_length {self.max_length}"
            )
        return prompt

    @property
    def _params(self) -> dict:
        """The model's weights as they are now, quantised if so wanted."""
        return self._quantized.of(self.model.params) if self._quantized else self.model.params

    def _text(self, tokens: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _run(self, requests: list[Request], params: SamplingParams) -> None:
        """Fills in the tokens of all requests."""
        scheduler = Scheduler(self.slots)
        scheduler.add(requests)
        cache = self._programs.empty(self.slots, self.max_length) if self._cache is None else self._cache
        self._cache = None  # donated from here on; taken back when all went well
        prefixes: dict[int, tuple] = {}
        while scheduler.busy:
            while admitted := scheduler.admit(PREFILL_ROWS[-1]):
                cache = self._insert(cache, admitted, prefixes)
            waiting = {request.index for request in scheduler.waiting}
            prefixes = {index: prefix for index, prefix in prefixes.items() if index in waiting}
            cache, tokens_KS, logps_KS = self._programs.decode(
                self._params, cache, self._view(scheduler.running, params), params, self.seed
            )
            for slot in list(scheduler.running):
                if self._append(scheduler.running[slot], tokens_KS[:, slot], logps_KS[:, slot], params):
                    scheduler.release(slot)
        self._cache = cache

    def _insert(self, cache, admitted: dict[int, Request], prefixes: dict[int, tuple]):
        """Prefills the prompts that are new, once for all their samples, and copies each prefix to its slots."""
        new = {request.index: request.prompt[:-1] for request in admitted.values() if request.index not in prefixes}
        if new:
            prefix = self._prefill(list(new.values()))
            prefixes |= {index: (prefix, row) for row, index in enumerate(new)}
        by_prefix: dict[int, list[tuple[int, int]]] = {}
        for slot, request in admitted.items():
            prefix, row = prefixes[request.index]
            by_prefix.setdefault(id(prefix), []).append((slot, row))
        arrays = {id(prefix): prefix for prefix, _ in prefixes.values()}
        for key, pairs in by_prefix.items():
            slots = np.arange(self.slots, 2 * self.slots, dtype=np.int32)  # past the end: skipped
            rows = np.zeros(self.slots, np.int32)
            slots[: len(pairs)], rows[: len(pairs)] = zip(*pairs, strict=True)
            cache = self._programs.insert(cache, arrays[key], slots, rows)
        return cache

    def _prefill(self, prompts: list[tuple[int, ...]]):
        """A cache that holds these prompts, row i for prompt i."""
        P = next(rows for rows in PREFILL_ROWS if rows >= len(prompts))
        longest = max(1, max(map(len, prompts)))
        length = min(self.max_length, max(16, 1 << (longest - 1).bit_length()))
        C = min(self.options.prefill_chunk, length)
        tokens, lengths = np.zeros((P, -(-length // C) * C), np.int32), np.zeros(P, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        prefix = self._programs.empty(P, length)
        for start in range(0, longest, C):
            prefix = self._programs.prefill(self._params, prefix, tokens[:, start : start + C], start, lengths)
        return prefix

    def _view(self, running: dict[int, Request], params: SamplingParams) -> _Slots:
        columns = np.zeros((6, self.slots), np.int32)
        for slot, request in running.items():
            token = request.tokens[-1] if request.tokens else request.prompt[-1]
            cached = len(request.prompt) + len(request.tokens) - 1
            left = params.max_new_tokens - len(request.tokens)
            columns[:, slot] = token, cached, left, request.prompt_id, request.sample, 1
        return _Slots(*columns)

    def _append(self, request: Request, tokens_K: np.ndarray, logps_K: np.ndarray, params: SamplingParams) -> bool:
        """Takes what a dispatch made for one request; True when its completion has ended."""
        made = int((tokens_K >= 0).sum())
        before = len(request.tokens)
        request.tokens += tokens_K[:made].tolist()
        request.logprobs += logps_K[:made].tolist()
        if params.stop:
            end = self._stop_string(request.tokens, before, params.stop)
            if end is not None:
                del request.tokens[end:], request.logprobs[end:]
                request.finish = "stop"
                return True
        if request.tokens[-1] in params.stop_token_ids:
            request.finish = "stop"
        elif len(request.tokens) == params.max_new_tokens:
            request.finish = "length"
        return request.finish is not None

    def _stop_string(self, tokens: list[int], before: int, stop: tuple[str, ...]) -> int | None:
        """Number of tokens up to the one that completes a stop string, if one of those after `before` does."""

        def holds(end: int) -> bool:
            text = self.tokenizer.decode(tokens[:end], skip_special_tokens=False)
            return any(s in text for s in stop)

        if not holds(len(tokens)):
            return None
        return next(end for end in range(before + 1, len(tokens) + 1) if holds(end))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Slots:
    """int32[S] each: token to feed next, tokens already cached, tokens still to make, ids of the draw, and 1 where in use."""

    token: np.ndarray
    cached: np.ndarray
    left: np.ndarray
    prompt_id: np.ndarray
    sample: np.ndarray
    active: np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Draws:
    """How tokens are drawn, scalars. `filters` (top_k, top_p, min_p) or None: another program, without the sort they need."""

    seed: np.ndarray
    temperature: np.ndarray
    filters: tuple | None


class _Programs:
    """The compiled programs of a generator; caches are donated to them."""

    def __init__(self, graph, dispatch: int, kv_cache: StoredType | None):
        self.graph, self._dispatch, self._kv_cache = graph, dispatch, kv_cache
        self._scan = jax.default_backend() != "cpu" or len(graph.config.layers) > UNROLLED_LAYERS
        self._empty = jax.jit(self._empty_program, static_argnums=(0, 1))
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1)
        self._insert = jax.jit(self._insert_program, donate_argnums=0)
        self._decode = jax.jit(self._decode_program, donate_argnums=1)

    def empty(self, rows: int, length: int):
        return settle(self._empty(rows, length), self.graph.layout)

    def prefill(self, params, cache, tokens_PC, start: int, lengths_P):
        return settle(self._prefill(params, cache, tokens_PC, np.int32(start), lengths_P), self.graph.layout)

    def insert(self, cache, prefix, slots, rows):
        return settle(self._insert(cache, prefix, slots, rows), self.graph.layout)

    def decode(self, params, cache, slots: _Slots, sampling: SamplingParams, seed: int):
        """(cache, tokens int[K, S] with -1 where none was made, their log-probabilities), the latter two on the host."""
        stops, draws = np.asarray(sampling.stop_token_ids or (-1,), np.int32), None
        if not sampling.greedy:
            filters = np.int32(sampling.top_k), np.float32(sampling.top_p), np.float32(sampling.min_p)
            draws = _Draws(np.uint32(seed % 2**32), np.float32(sampling.temperature), filters if sampling.filtered else None)
        cache, tokens, logps = self._decode(params, cache, slots, stops, draws)
        settle(cache, self.graph.layout)
        return cache, np.asarray(tokens), np.asarray(logps)

    def _pinned(self, cache):
        """The cache where it belongs: left to itself the compiler may lay out a result otherwise than the cache that was given
        up for it, which is a copy now and another compilation at the next call."""
        layout = self.graph.layout
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, layout.sharding(caches.AXES, a.shape)), cache)

    def _empty_program(self, rows: int, length: int):
        dtype, kind = self.graph.runtime.dtype, self._kv_cache
        return self._pinned(caches.create(self.graph.config, rows, length, dtype, scan=self._scan, quantization=kind))

    def _insert_program(self, cache, prefix, slots, rows):
        return self._pinned(caches.insert(cache, prefix, slots, rows))

    def _prefill_program(self, params, cache, tokens_PC, start, lengths_P):
        positions = start + jnp.broadcast_to(jnp.arange(tokens_PC.shape[1]), tokens_PC.shape)
        step = Step(positions, (positions < lengths_P[:, None]).astype(jnp.int32))
        with self.graph.precision():
            return self._pinned(modes.prefill(self.graph.decoder(params), tokens_PC, step, cache, self.graph.runtime))

    def _decode_program(self, params, cache, slots: _Slots, stops, draws: _Draws | None):
        S = slots.token.shape[0]

        def go_on(carry):
            return (carry[0] < self._dispatch) & jnp.any(carry[5])

        def one(carry):
            i, cache, token, cached, left, active, tokens, logps = carry
            decoder = self.graph.decoder(params)
            logits, cache = modes.autoregressive(decoder, token, cached, active, cache, self.graph.runtime)
            if draws is None:
                new = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            else:
                logits = logits / draws.temperature
                u = uniforms(draws.seed, slots.prompt_id, slots.sample, cached + 1)
                new = draw(logits, u, draws.filters)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), new[:, None], axis=-1)[:, 0]
            tokens = tokens.at[i].set(jnp.where(active, new, -1))
            logps = logps.at[i].set(jnp.where(active, logp, 0.0))
            left = left - 1
            going = active & (left > 0) & ~jnp.isin(new, stops)
            return i + 1, cache, jnp.where(active, new, token), cached + active, left, going, tokens, logps

        with self.graph.precision():
            K = self._dispatch
            blank = jnp.full((K, S), -1, jnp.int32), jnp.zeros((K, S), jnp.float32)
            start = (0, cache, slots.token, slots.cached, slots.left, slots.active != 0, *blank)
            _, cache, _, _, _, _, tokens, logps = jax.lax.while_loop(go_on, one, start)
        return self._pinned(cache), tokens, logps
