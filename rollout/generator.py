"""The generator: prompts in, completions out. It computes with the policy's own weights, or with a
copy that is quantised or resharded for decoding.

E hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.media import Media
from policy.media import is_tower
from policy.model import Model
from policy.ops.host_memory import on_a_device
from policy.ops.seeds import checked_seed
from policy.programs import freed_memory
from rollout.adapter_pool import AdapterPool
from rollout.constraints import Grammars
from rollout.engine.engine import Engine
from rollout.engine.exact import Verifier
from rollout.engine.runner import ModelRunner, Widths, widths_for_clients
from rollout.engine.weights import RolloutWeights
from rollout.request import MediaPrompt, Queue, Request
from rollout.text.chat import render_prompt
from rollout.text.interface import Tokenizer
from rollout.text.spelling import decode_after
from rollout.text.tokenizer import bad_word_tokens, first_stop
from rollout.token_scores import ScoredText, TokenScorer
from rollout.types import Completion, GeneratorOptions, SamplingParams


@dataclass(eq=False)
class _Stream:
    """The requests of one call of `stream` or `generate`, of which several may be open: left: ids
    of the objects that are not yet yielded; ended: those that a step of any stream completed;
    failure: the error of a step, which dropped all requests."""

    left: set[int]
    ended: deque[Request] = field(default_factory=deque)
    failure: BaseException | None = None


class Generator:
    """Decodes up to `slots` completions at the same time over a cache of `max_length` tokens each.

    The random number of a token depends only on (seed, prompt id, sample index, position). Apart
    from rounding, the other prompts of a call and the number of slots therefore do not change a
    completion; `GeneratorOptions.exact` removes the rounding too. The generator reads the weights
    from `model.params` at every prefill call and every decode. It renews its copies (`weights`)
    when the weights have changed (rollout/engine/weights.py).

    engine: runs the requests. verifier: checks their tokens, under GeneratorOptions.exact.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_length: int = 256,
        slots: int = 16,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        options: GeneratorOptions = GeneratorOptions(),
        adapters: AdapterPool | None = None,
    ):
        """adapters: those that requests may choose; `model` is then their `AdapterPool.model`.
        Raises ValueError for sizes and options that do not fit the model."""
        if adapters is not None and adapters.model is not model:
            raise ValueError("Generator: give the model of the adapters, AdapterPool.model")
        if max_length < 2 or slots < 1:
            raise ValueError("Generator: max_length must be at least 2 and slots at least 1")
        if (limit := model.config.max_positions) is not None and max_length > limit:
            raise ValueError(
                f"Generator: max_length {max_length} is more than the {limit} positions of this "
                "model"
            )
        if options.record_routes and not any(spec.moe for spec in model.config.layers):
            raise ValueError(
                "GeneratorOptions.record_routes: this model has no mixture of experts; no token "
                "is routed anywhere"
            )
        self.model = model
        self.adapters = adapters
        self.max_length = max_length
        self.slots = slots
        self.seed = checked_seed(seed)
        self.tokenizer = tokenizer
        self.options = options
        self.weights = RolloutWeights.from_options(model.graph, options)
        budget = options.prefill_budget or max(
            options.prefill_chunk, slots * options.tokens_per_dispatch
        )
        runner = ModelRunner(model.graph_for(max_length), options, slots, max_length)
        runner.reserved_bytes = (
            self.weights.bytes if self.weights and self.weights.reshards else runner.reserved_bytes
        )
        stop_string = None
        bad_words = None
        matcher = None
        if tokenizer is not None:
            matcher = Grammars(tokenizer, model.config.vocab_size).matcher
            stop_string = partial(_first_stop, tokenizer)
            bad_words = lru_cache(maxsize=64)(partial(bad_word_tokens, tokenizer))
        self.engine = Engine(
            runner,
            self._params_of,
            seed,
            stop_string=stop_string,
            bad_words=bad_words,
            matcher=matcher,
            prefill_budget=budget,
        )
        if options.record_values:
            self.set_value_head(
                jnp.zeros(
                    model.config.hidden_size, jnp.float32, device=model.graph.layout.replicated
                )
            )
        self._queue = Queue(options.queue)
        self._prefill_budget = budget
        self._streams: list[_Stream] = []
        self.verifier: Verifier | None = None
        if options.exact:
            scorer = model.scorer_for(max_length)
            kept = options.record_kept
            self.verifier = Verifier(scorer, seed, stop_string=stop_string, max_kept=kept)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str | MediaPrompt],
        params: SamplingParams = SamplingParams(),
        ids: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> list[list[Completion]]:
        """Samples `params.n` completions of each prompt; returns them as [prompt][sample].

        Prompts are lists of token ids, strings with a tokenizer, or prompts with pictures or
        sounds. `ids` are the prompt ids of the random draw, by default range(len(prompts)), so that
        equal calls give equal tokens. `adapter` is the name of one of the generator's adapters;
        None: the decoder alone. A string is encoded as training encodes prompts: with the
        special tokens that the tokenizer puts in front, without an end of sequence.

        Raises ValueError, before anything is computed, for an empty prompt, for token ids outside
        the vocabulary, for a prompt that with max_new_tokens is longer than max_length (naming the
        prompt), for strings without a tokenizer (prompts, stop strings or bad words), for a bad
        word without tokens, for biases of tokens outside the vocabulary, for ids that are not one
        for each prompt or outside 0..2^31 - 1, and for an unknown adapter.
        """
        completions: dict[tuple[int, int], Completion] = {}
        for index, sample, completion in self.stream(prompts, params, ids, adapter):
            completions[index, sample] = completion
        return [
            [completions[index, sample] for sample in range(params.n)]
            for index in range(len(prompts))
        ]

    def stream(
        self,
        prompts: Sequence[Sequence[int] | str | MediaPrompt],
        params: SamplingParams = SamplingParams(),
        ids: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yields (prompt, sample, completion) as soon as each completion has ended, while the
        others go on. Raises ValueError as `generate` does, at once."""
        requests = self._requests(prompts, params, ids)
        self._check_adapter(adapter)
        for request in requests:
            request.adapter = adapter
        return (
            (request.index, request.sample, self.completion(request))
            for request in self._run(requests)
        )

    def _requests(
        self, prompts, params: SamplingParams, ids: Sequence[int] | None
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise ValueError("generate: prompts is one string; give a list of prompts")
        try:
            self.engine.check_params(params)
        except ValueError as error:
            raise ValueError(f"generate: {error}") from None
        encoded = [self._encode(i, prompt, params) for i, prompt in enumerate(prompts)]
        ids = range(len(encoded)) if ids is None else ids
        if len(ids) != len(encoded):
            raise ValueError(f"generate: {len(encoded)} prompts but {len(ids)} ids")
        if wrong := [i for i in ids if not 0 <= i < 2**31]:
            raise ValueError(f"generate: prompt id {wrong[0]} is outside 0..{2**31 - 1}")
        return [
            prompt.request(params, int(prompt_id), sample, i)
            for i, (prompt, prompt_id) in enumerate(zip(encoded, ids, strict=True))
            for sample in range(params.n)
        ]

    def _run(self, requests: list[Request]) -> Iterator[Request]:
        self._queue.add(requests)
        stream = _Stream(set(map(id, requests)))
        self._streams.append(stream)
        try:
            while stream.left:
                if stream.failure is not None:
                    raise RuntimeError(
                        "another stream of this generator failed"
                    ) from stream.failure
                if not stream.ended:
                    self._advance()
                while stream.ended:
                    request = stream.ended.popleft()
                    stream.left.remove(id(request))
                    yield request
        finally:
            self._streams.remove(stream)
            if stream.left:  # the caller stopped early, or a step failed
                for request in requests:
                    self.cancel(request)

    def _advance(self) -> None:
        """Runs a step, and hands the requests that ended to their streams."""
        try:
            requests = self.step()
        except BaseException as error:
            for stream in self._streams:  # the step has dropped their requests
                stream.failure = error
            raise
        for request in requests:
            for stream in self._streams:
                if id(request) in stream.left:
                    stream.ended.append(request)

    def submit(self, request: Request) -> Request:
        """Adds a request to the queue. Repeated calls of `step` run it until `finish` is set.
        Raises ValueError if it cannot run (see Engine.check), and for an unknown adapter."""
        self._check_adapter(request.adapter)
        self.engine.check(request)
        self._queue.add([request])
        return request

    def cancel(self, request: Request) -> None:
        """Removes a request from the queue or from its slot. A request that has ended stays as it
        is."""
        self._queue.remove(request)
        self.engine.cancel(request)
        if self.verifier:
            self.verifier.remove(request)

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache, so that later calls do not depend on what ran before."""
        self.engine.reset_prefix_cache()

    def compile_ahead(
        self,
        longest: int,
        params: Iterable[SamplingParams],
        media_rows: Sequence[int] = (),
        *,
        strict: bool = False,
    ) -> int:
        """Compiles every program that prompts of up to `longest` tokens and these parameters need,
        in parallel; returns their number. A program that is needed later and not compiled then logs
        a warning, or raises rollout.engine.runner.LateCompilation if `strict`. `media_rows`:
        numbers of rows of the tables of pictures and sounds that prompts will have."""
        return self._compile_widths(longest, self._widths(params), media_rows, strict=strict)

    def compile_for_clients(self, longest: int, usual: SamplingParams) -> int:
        """Compiles as `compile_ahead`, for requests whose parameters strangers choose; returns the
        number of programs. A decode runs one of three programs of its number of rows: that of
        requests like `usual`, which is compiled now, that with log-probabilities, and one for all
        other parameters. No parameter makes the generator compile another one; those that need one
        are refused."""
        runner = self.engine.runner
        [widths] = self._widths([usual])
        runner.fix_widths(widths_for_clients(widths))
        return self._compile_widths(longest, [widths], (), strict=False)

    def _compile_widths(
        self, longest: int, widths: Sequence[Widths], media_rows: Sequence[int], *, strict: bool
    ) -> int:
        """Compiles all programs whose decodes have these widths."""
        weights, count = self._compile_copies()
        count += self.engine.runner.compile_ahead(
            weights, self._longest(longest), widths, media_rows, strict=strict
        )
        return count + (
            self.verifier.compile_ahead(self.model.params, self.max_length) if self.verifier else 0
        )

    def compile_in_background(
        self, longest: int, params: Iterable[SamplingParams], media_rows: Sequence[int] = ()
    ) -> int:
        """Starts to compile the programs of `compile_ahead`, those of the first dispatch first;
        returns their number. Calls of the generator wait for the programs that they need. The
        programs of `exact` are compiled now."""
        weights, count = self._compile_copies()
        runner = self.engine.runner
        count += runner.compile_in_background(
            weights, self._longest(longest), self._widths(params), media_rows
        )
        return count + (
            self.verifier.compile_ahead(self.model.params, self.max_length) if self.verifier else 0
        )

    def _compile_copies(self) -> tuple[dict[str, Any], int]:
        """Compiles the program that copies weights to other shardings. Returns (the weights that
        the other programs read, maybe abstract; the number of programs)."""
        weights = self.model.params
        if self.weights and self.weights.reshards:
            self.weights.compile_ahead(weights)
            return weights | self.weights.abstract, int(bool(self.weights.paths))
        return self._params, 0

    def _widths(self, params: Iterable[SamplingParams]) -> list[Widths]:
        """Returns the widths of decodes, each of requests with one of these parameters."""
        requests = [Request((0,), each, bad_words=self.engine.bad_words(each)) for each in params]
        widths = self.engine.runner.widths
        return list(dict.fromkeys(widths([request]) for request in requests))

    def _longest(self, longest: int) -> int:
        """Returns the most tokens that are prefilled, for prompts of up to `longest` tokens."""
        return self.max_length if self.options.prefills_completions else longest

    def reshard_for_rollout(self) -> None:
        """Copies the weights to the shardings of `options.rules` now, if there are rules and the
        copy is not up to date. Without this call the next program copies them."""
        if self.weights and self.weights.reshards:
            jax.block_until_ready(self._params)

    def release(self) -> None:
        """Gives up the copy of the weights of `reshard_for_rollout` and, on CPU, the copy that
        decodes read; they are made again when they are needed. All that sampling freed goes back to
        the operating system."""
        if self.weights and self.weights.reshards:
            self.weights.release()
        if copies := self.engine.runner.decoding_weights:
            copies.release()
        freed_memory.give_back()

    @property
    def compiled_ahead(self) -> bool:
        """Whether the programs are known, compiled or not: `compile_ahead` or
        `compile_in_background` has run."""
        return self.engine.runner.compiled_ahead

    def step(self) -> list[Request]:
        """Collects the output of the last decode, fills free slots from the queue, prefills, and
        starts the next decode. Returns the requests that ended; the caller processes them while the
        device works.

        If it is interrupted or fails, it drops all requests and the cache, which may have been
        donated to a program that never returned.
        """
        try:
            ended = [self.engine.release(slot) for slot in self.engine.collect()]
            self._fill_slots()
            self.engine.start(self._queue.first)
            return self._verified(self.verifier, ended) if self.verifier else ended
        except BaseException:
            self._queue.clear()
            self.engine.reset()
            if self.verifier:
                self.verifier.clear()
            raise

    def _fill_slots(self) -> None:
        """Fills free slots from the queue, and scores the prompts that ask for it. Once these have
        more tokens than a step may prefill, the others wait."""
        unscored: dict[tuple[str | None, int], list[Request]] = {}
        left = self._prefill_budget
        while self._queue and self.engine.free_slots and left > 0:
            request = self._queue.pop()
            self.engine.insert(request)
            k = request.params.prompt_logprobs
            if k is not None and request.prompt_scores is None and not self.verifier:
                unscored.setdefault((request.adapter, k), []).append(request)
                left -= len(request.prompt)
        for (adapter, k), group in unscored.items():
            keys = [request.shared_keys(len(request.prompt)) for request in group]
            texts = {
                key: ScoredText(request.prompt, request.media)
                for key, request in zip(keys, group, strict=True)
            }
            weights = self._params_of(adapter)
            scores = self._token_scorer.score(weights, list(texts.values()), k)
            by_key = dict(zip(texts, scores, strict=True))
            for key, request in zip(keys, group, strict=True):
                request.prompt_scores = by_key[key]

    @cached_property
    def _token_scorer(self) -> TokenScorer:
        return TokenScorer(self.engine.runner.graph, self.max_length)

    def _score_verified(self, request: Request) -> None:
        """Scores prompt and completion of a verified request, as far as it asks for it."""
        params = request.params
        asked = [k for k in (params.top_logprobs, params.prompt_logprobs) if k is not None]
        if not asked:
            return
        text = ScoredText((*request.prompt, *request.tokens), request.media)
        weights = self._params_of(request.adapter)
        [scores] = self._token_scorer.score(weights, [text], max(asked))
        start = len(request.prompt)
        if params.top_logprobs is not None:
            request.scores = scores.part(start, None, params.top_logprobs)
        if params.prompt_logprobs is not None:
            request.prompt_scores = scores.part(0, start, params.prompt_logprobs)

    def _verified(self, verifier: Verifier, ended: list[Request]) -> list[Request]:
        """Returns the requests that are verified, of these and of earlier ones. Those with a wrong
        token return to the queue."""
        verifier.add(ended)
        if not verifier.due(waiting=bool(self._queue)):
            return []
        verified, resumed = verifier.check(self._own_params)
        self._queue.add(resumed)
        for request in verified:
            self._score_verified(request)
        return verified

    def set_value_head(self, head_E: jax.Array) -> None:
        """Sets the value head, float32[E], that the recorded values are computed with. The
        generator keeps a copy, because an update may donate the array."""
        self.engine.runner.value_head = jnp.copy(head_E)

    @property
    def counts(self) -> dict[str, int]:
        """Returns the counts of engine and verifier."""
        return self.engine.counts | (self.verifier.counts if self.verifier else {})

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes per device of the weights that decoding reads."""
        read = self.model.params | (self.weights.abstract if self.weights else {})
        return on_a_device({path: array for path, array in read.items() if not is_tower(path)})

    def completion(self, request: Request) -> Completion:
        """Returns the completion of a request that has ended. Raises ValueError if it has not."""
        if request.finish is None:
            raise ValueError("completion: the request has not ended")
        text = None
        raw = None
        steps = sum(request.starts_step)
        routes = request.routes
        if self.tokenizer is not None:
            text = decode_after(self.tokenizer, request.tokens, skip_special_tokens=True)
            raw = self._raw(request, text)
        if routes is not None:
            routes = {
                path: np.asarray(array)[: request.needed].copy() for path, array in routes.items()
            }
        values = request.values if self.options.record_values else None
        recorded: dict[str, Any] = {}
        if self.options.record_kept and request.params.has_filter:
            recorded["filtered_logprobs"] = request.filtered_logprobs
            recorded["kept_counts"] = request.kept_counts
            most = min(self.options.record_kept, max(request.kept_counts, default=0))
            recorded["kept"] = np.asarray(request.kept, np.int32).reshape(len(request.kept), -1)[
                :, :most
            ]
        recorded["scores"] = request.scores
        recorded["prompt_scores"] = request.prompt_scores
        how = steps, routes, values, raw
        return Completion(request.tokens, request.logprobs, request.finish, text, *how, **recorded)

    def _raw(self, request: Request, text: str) -> str:
        """Returns the text of a completion with special tokens. text: without them."""
        ended = (
            request.finish == "stop"
            and request.tokens[-1:]
            and request.tokens[-1] in request.params.stop_token_ids
        )
        tokens = request.tokens[:-1] if ended else request.tokens
        if self._special_ids.isdisjoint(tokens):
            return text
        assert self.tokenizer is not None  # the caller has one
        return decode_after(self.tokenizer, tokens, skip_special_tokens=False)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token for token, how in added.items() if how.special}
        return frozenset(special | set(getattr(self.tokenizer, "all_special_ids", ())))

    def _encode(
        self, i: int, prompt: str | Sequence[int] | MediaPrompt, params: SamplingParams
    ) -> EncodedPrompt:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"generate: prompt {i} is a string; pass a tokenizer to Generator, or token ids"
                )
            prompt = render_prompt(self.tokenizer, prompt)
        if isinstance(prompt, MediaPrompt):
            encoded = EncodedPrompt(tuple(map(int, prompt.tokens)), prompt.media, prompt.keys)
        else:
            encoded = EncodedPrompt(tuple(map(int, prompt)))
        if refusal := self.engine.runner.refusal(encoded.request(params)):
            raise ValueError(f"generate: prompt {i} {refusal}")
        return encoded

    @property
    def _params(self) -> dict:
        """Returns the model's current weights, with copies where the options ask for them."""
        return self._params_of(None)

    def _params_of(self, adapter: str | None) -> dict:
        """Returns the same with an adapter."""
        params = self._own_params(adapter)
        return self.weights.with_copies(params) if self.weights else params

    def _own_params(self, adapter: str | None) -> dict:
        """Returns the model's own weights with an adapter."""
        return self.model.params if self.adapters is None else self.adapters.params(adapter)

    def _check_adapter(self, adapter: str | None) -> None:
        """Raises ValueError for a name that no adapter has."""
        names = () if self.adapters is None else self.adapters.names
        if adapter is not None and adapter not in names:
            known = ", ".join(names) or "none"
            raise ValueError(f"no adapter {adapter!r}; this generator has {known}")


def _first_stop(
    tokenizer: Tokenizer, tokens: list[int], before: int, params: SamplingParams
) -> int | None:
    return first_stop(tokenizer, tokens, before, params.stop, params.min_tokens)


class EncodedPrompt(NamedTuple):
    """A prompt as token ids; `media` and `keys` are those of `Request`, None for text."""

    tokens: tuple[int, ...]
    media: Media | None = None
    keys: tuple[int, ...] | None = None

    def request(
        self, params: SamplingParams, prompt_id: int = 0, sample: int = 0, index: int = 0
    ) -> Request:
        """Returns the request for one sample of this prompt, which is number `index` of its
        call."""
        return Request(
            self.tokens, params, prompt_id, sample, index, media=self.media, keys=self.keys
        )
