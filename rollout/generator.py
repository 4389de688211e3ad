"""The generator: prompts in, completions out, made by the policy's own weights. It keeps no copy of them,
but for a quantised one if that is wanted.

S slots, P prompts of one prefill, C tokens of one prefill call, K decoding steps of one dispatch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policy.config import StoredType
from policy.layers.quantization import TYPES
from policy.model import Model
from rollout.chat import render_prompt
from rollout.programs import Made, Programs, Slots
from rollout.sampling import SamplingParams
from rollout.scheduler import Request, Scheduler
from rollout.speculative import SpeculativePrograms
from rollout.weights import QuantizedWeights

PREFILL_ROWS = (1, 4, 16)


@dataclass(frozen=True)
class GeneratorOptions:
    """prefill_chunk: prompt tokens of one prefill call. tokens_per_dispatch: decoding steps between two looks of the host.

    speculative: tokens that the model's prediction modules draft at each step, 0 for none; a step then makes 1 to
    1 + `speculative` tokens, the same as without (rollout/speculative.py). weights, kv_cache: types in which the weights of
    products, and keys, values and latents, are kept; None: as floats.
    """

    cache: Literal["contiguous"] = "contiguous"
    prefill_chunk: int = 256
    tokens_per_dispatch: int = 16
    speculative: int = 0
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
        if self.speculative < 0:
            raise ValueError("GeneratorOptions: speculative must be 0 (none) or more")


@dataclass(frozen=True)
class Completion:
    """`tokens` without the prompt, with the stop token; `logprobs` of each; `finish`: stop or length; `text` with a tokenizer;
    `steps`: forward passes of the decoder that made it, fewer than tokens where drafts were accepted."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    text: str | None
    steps: int = 0


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
        if options.speculative:
            self._programs = SpeculativePrograms(model.graph, options)
        else:
            self._programs = Programs(model.graph, options)
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
        made = [Completion(r.tokens, r.logprobs, r.finish, self._text(r.tokens), sum(r.opens)) for r in requests]
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
            view = self._view(scheduler.running, params)
            cache, made = self._programs.decode(self._params, cache, view, params, self.seed)
            for slot in list(scheduler.running):
                if self._append(scheduler.running[slot], made.of(slot), params):
                    scheduler.release(slot)
        self._cache = cache

    def _insert(self, cache, admitted: dict[int, Request], prefixes: dict[int, tuple]):
        """Prefills the prompts that are new, once for all their samples, and copies each prefix to its slots."""
        new = {request.index: request.prompt for request in admitted.values() if request.index not in prefixes}
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
        """A cache that holds these prompts but for their last token, row i for prompt i."""
        P = next(rows for rows in PREFILL_ROWS if rows >= len(prompts))
        longest = max(1, max(map(len, prompts)) - 1)
        length = min(self.max_length, max(16, 1 << (longest - 1).bit_length()))
        C, ahead = min(self.options.prefill_chunk, length), self._programs.ahead
        tokens, lengths = np.zeros((P, -(-length // C) * C + ahead), np.int32), np.zeros(P, np.int32)
        for row, prompt in enumerate(prompts):
            lengths[row] = len(prompt) - 1
            seen = prompt if ahead else prompt[:-1]
            tokens[row, : len(seen)] = seen
        prefix = self._programs.empty(P, length)
        for start in range(0, longest, C):
            prefix = self._programs.prefill(self._params, prefix, tokens[:, start : start + C + ahead], start, lengths)
        return prefix

    def _view(self, running: dict[int, Request], params: SamplingParams) -> Slots:
        columns, width = np.zeros((6, self.slots), np.int32), self._programs.recent
        recent = np.zeros((self.slots, width), np.int32)
        for slot, request in running.items():
            token = request.tokens[-1] if request.tokens else request.prompt[-1]
            cached = len(request.prompt) + len(request.tokens) - 1
            left = params.max_new_tokens - len(request.tokens)
            columns[:, slot] = token, cached, left, request.prompt_id, request.sample, 1
            if width:
                last = (*request.prompt[-width:], *request.tokens[-width:])[-width:]
                recent[slot, width - len(last) :] = last
        return Slots(*columns, recent if width else None)

    def _append(self, request: Request, made: Made, params: SamplingParams) -> bool:
        """Takes what a dispatch made for one request; True when its completion has ended."""
        count = int((made.tokens >= 0).sum())
        before = len(request.tokens)
        request.tokens += made.tokens[:count].tolist()
        request.logprobs += made.logprobs[:count].tolist()
        request.opens += made.opens[:count].tolist()
        if params.stop:
            end = self._stop_string(request.tokens, before, params.stop)
            if end is not None:
                del request.tokens[end:], request.logprobs[end:], request.opens[end:]
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
