"""The engine: runs what the scheduler decides on the model runner, and hands the tokens to their
requests.

Words of this folder. rollout/request.py defines those about a request. Engine step, multi-step
decode, preempt and prefix cache mean what they mean in vLLM; slot and row are words of this engine.

- step, or engine step: `start`, then `collect`.
- decode, or multi-step decode: one run of the decode program. It is a loop of decoding steps on the
  device.
- decoding step: one pass of the decoder over the rows of a batch. Each active row gets one token,
  or, with drafts, the accepted drafts and one token.
- slot: a place for one running request. There are S of them, the most requests that run at the same
  time (max_num_seqs in vLLM). In a contiguous cache a slot has room for `max_length` entries; in a
  paged cache it has a page table.
- row: a row of the arrays of one call. A row of the cache of all slots belongs to one slot.
- preempt: take the pages of a running request, so that others can go on. It is prefilled again
  later.

`start` first prefills the `cacheable` tokens of requests. While other requests decode, it begins no
prefill call after `prefill_budget` tokens of this step, so that a long prompt never stalls them.
Then it starts a decode of all slots whose request is `ready`. A decode stops early when requests
wait and enough slots are free for them, or when the active rows fit a smaller batch. While it runs,
the host processes the completions that have ended. `collect` waits for it.

Counters (`Engine.counts`), all cumulative: `steps`, decoding steps; `rows` of the batches of these
steps; `useful`, rows that produced a token; `prefill`, prefilled tokens without padding;
`dispatches`, decodes; `preempted`, preemptions. `Generator.counts` adds the counters of the
verifier under `exact`: `checked`, `replaced`, `scored` (rollout/engine/exact.py).

S slots, s rows of a batch, P rows of one prefill call, C tokens that it computes of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from policy.execution.array_identity import ArrayIdentity
from rollout.constraints import Matcher
from rollout.engine.active_batch import ActiveBatch
from rollout.engine.prefixes import Copies, PinStates, RestoreStates, UnpinStates
from rollout.engine.scheduler import Scheduler, prefill_lengths, prefill_rows
from rollout.request import Request
from rollout.types import Constraint, SamplingParams

if TYPE_CHECKING:
    from rollout.engine.programs import DecodeOutput
    from rollout.engine.runner import ModelRunner

StopString = Callable[[list[int], int, SamplingParams], "int | None"]
BadWords = Callable[[tuple[str, ...]], tuple[tuple[int, ...], ...]]
MakeMatcher = Callable[[Constraint], Matcher]


# Fields of a DecodeOutput that only requests with a filter have, and those that only requests with
# top_logprobs have.
_OF_FILTERS = ("filtered_logprobs", "kept", "kept_counts")
_OF_TOPS = ("raw_logprobs", "top_ids", "top_logprobs")


class _InFlightDecode(NamedTuple):
    """A decode that the device works on: the request of each row, and its output."""

    requests: tuple[Request | None, ...]
    output: DecodeOutput


class Engine:
    """Runs requests in S slots over one cache. `counts`: cumulative counters, listed in the
    docstring of the module."""

    def __init__(
        self,
        runner: ModelRunner,
        weights: Callable[[str | None], dict],
        seed: int,
        *,
        stop_string: StopString | None,
        bad_words: BadWords | None = None,
        matcher: MakeMatcher | None = None,
        prefill_budget: int,
    ):
        """weights: returns the arrays to compute with, for the name of an adapter or None. It is
        called before every prefill call, every decode and every `insert`. Only weak references are
        kept, which show whether the weights have changed.
        seed: the seed of the random draws.
        stop_string: `stop_string(tokens, before, params)` searches the tokens after the first
        `before`. It returns the number of tokens up to and including the one that completes a stop
        string; None if none does. Without it requests cannot have stop strings.
        bad_words: returns the token sequences of words. Without it requests cannot have bad words.
        matcher: returns the start of a completion under a constraint. Without it requests cannot
        have constraints.
        prefill_budget: tokens, padding included, after which a step prefills no more while others
        decode. The last call may exceed it."""
        self.runner = runner
        self._weights = weights
        self._seed = seed
        self._stop_string = stop_string
        self._bad_words = bad_words
        self._matcher = matcher
        self._budget = prefill_budget
        self.counts = {
            "steps": 0,
            "rows": 0,
            "useful": 0,
            "prefill": 0,
            "dispatches": 0,
            "preempted": 0,
        }
        self._weights_seen = ArrayIdentity()
        self.reset()

    def reset(self) -> None:
        """Gives up the cache and all requests."""
        self._scheduler: Scheduler | None = None
        self._batch: ActiveBatch | None = None
        self._pinned_states = None
        self._in_flight: _InFlightDecode | None = None

    @property
    def scheduler(self) -> Scheduler:
        """Returns the scheduler.

        It and the batch are made at the first use: the number of pages depends on the memory left
        then.
        """
        if self._scheduler is None:
            cache_manager = self.runner.cache_manager()
            self._scheduler = Scheduler(cache_manager, self.runner.limits, self.counts)
            self._batch = ActiveBatch(self.runner, cache_manager, self._seed)
        return self._scheduler

    @property
    def batch(self) -> ActiveBatch:
        """Returns the active batch, which holds the cache."""
        assert self.scheduler is not None and self._batch is not None
        return self._batch

    @property
    def free_slots(self) -> int:
        """Slots that a request can be inserted into."""
        return self.scheduler.free_slots

    @property
    def busy(self) -> bool:
        return self._scheduler is not None and bool(self._scheduler.running)

    # Requests.

    def insert(self, request: Request) -> int:
        """Returns the slot that the request runs in from the next step on. Raises ValueError if
        none is free, or as `check`."""
        self.check(request)
        request.bad_words = self.bad_words(request.params)
        if request.matcher is None:
            request.matcher = self._matcher_of(request.params)
            if request.matcher is not None:
                request.matcher.advance(request.tokens)
        scheduler = self.scheduler
        if not scheduler.free_slots:
            waiting = len(scheduler.waiting_for_pages)
            slots = self.runner.geometry.slots
            raise ValueError(
                f"insert: {waiting} admitted requests wait for pages and go first; call step() "
                "until they run"
                if waiting
                else f"insert: all {slots} slots are in use; call release(slot) first"
            )
        if self._weights_seen.update(self._weights(None).values()):
            self.reset_prefix_cache()
        return scheduler.admit(request)

    def check(self, request: Request) -> None:
        """Raises ValueError for a prompt that is empty, too long with its completion, or not of
        this vocabulary, for pictures that do not fit the model or its options, for stop strings
        without a tokenizer, and for a request that has ended or runs already; and as
        `check_params`."""
        if refusal := self.runner.refusal(request):
            raise ValueError(f"the prompt of a request {refusal}")
        self.check_params(request.params)
        if request.finish or request.left < 1:
            raise ValueError(
                f"a request that has ended: {len(request.tokens)} tokens, finish {request.finish}"
            )
        if self.busy and any(running is request for running in self.scheduler.running.values()):
            raise ValueError("a request that runs already")

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError for stop strings, bad words or a constraint without a tokenizer, for a
        bad word without tokens, for biases of tokens that the vocabulary does not have, where no
        token is left that may come first, for more than the decodes of a generator for clients have
        room for, and for a constraint that cannot be followed, or not with the options of this
        generator."""
        self._matcher_of(params)
        if params.stop and self._stop_string is None:
            raise ValueError(
                "stop strings need a tokenizer; pass one to Generator, or use stop_token_ids"
            )
        vocab = self.runner.vocab_size
        if outside := [token for token in params.logit_bias or () if not 0 <= token < vocab]:
            raise ValueError(f"logit_bias names token {outside[0]}, outside 0..{vocab - 1}")
        bad_words = self.bad_words(params)
        if refusal := self.runner.params_refusal(Request((0,), params, bad_words=bad_words)):
            raise ValueError(refusal)
        forbidden = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            forbidden.update(params.stop_token_ids)
        if forbidden.issuperset(range(vocab)):
            raise ValueError(
                f"bad_words and min_tokens forbid all {vocab} tokens of the vocabulary; leave some "
                "of them out"
            )

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of the bad words. Raises ValueError if there are some and no
        tokenizer, or if one has no tokens."""
        if not params.bad_words:
            return ()
        if self._bad_words is None:
            raise ValueError("bad_words need a tokenizer; pass one to Generator")
        return self._bad_words(params.bad_words)

    def _matcher_of(self, params: SamplingParams) -> Matcher | None:
        """Returns the start of a completion under the constraint of these parameters; None: they
        have none."""
        if params.constraint is None:
            return None
        if self._matcher is None:
            raise ValueError("a constraint needs a tokenizer; pass one to Generator")
        options = self.runner.options
        for name, excludes in (("speculative", options.speculative), ("exact", options.exact)):
            if excludes:
                raise ValueError(
                    f"a constraint does not go with {name}: the host names the tokens that may come "
                    f"next, one step at a time; leave generator.{name} out"
                )
        return self._matcher(params.constraint)

    def release(self, slot: int) -> Request:
        """Frees a slot and returns its request, which may have ended or not."""
        self._update_cache()
        request = self.scheduler.running[slot]
        if request.finish is not None and self.runner.records_routes:
            request.routes = self.batch.routes(slot)
        return self.scheduler.release(slot)

    def cancel(self, request: Request) -> None:
        """Releases the slot of a request, if it has one."""
        running = self.scheduler.running if self.busy else {}
        for slot in [slot for slot, other in running.items() if other is request]:
            self.release(slot)

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache: later requests share no entries of earlier ones."""
        self.scheduler.reset_prefix_cache()

    # An engine step.

    def step(self, next_request: Request | None = None) -> list[int]:
        """Runs one engine step: `start`, and its `collect` at once."""
        self.start(next_request)
        return self.collect()

    def start(self, next_request: Request | None = None) -> None:
        """Prefills prompts and starts a decode; the device works while the host goes on.
        next_request: the request that gets the next free slot, if one waits. Raises ValueError if
        the last decode has not been collected."""
        if self._in_flight is not None:
            raise ValueError("start: the last decode has not been collected; call collect() first")
        self.scheduler.next_request = next_request
        self.scheduler.next_turn()
        if running := self.scheduler.in_turn:  # an idle engine makes no copies of weights
            self.batch.expect(running, self._weights(self.scheduler.adapter))
        self._prefill_prompts()
        self._start_decode()

    def collect(self) -> list[int]:
        """Waits for the decode that was started and gives its tokens to their requests. Returns the
        slots whose requests ended; the caller releases them."""
        decode = self._in_flight
        self._in_flight = None
        return [] if decode is None else self._process_outputs(decode)

    def _update_cache(self) -> None:
        """Runs the updates of the cache that the scheduler has recorded."""
        runner = self.runner
        batch = self.batch
        for update in self.scheduler.updates.drain():
            match update:
                case Copies(rows, pages):
                    if rows:
                        batch.replace_cache(runner.copy_rows(batch.full_cache(), rows))
                    if pages:
                        batch.replace_cache(runner.copy_pages(batch.full_cache(), pages))
                case PinStates(slot):
                    self._pinned_states = runner.gather(
                        batch.full_cache(), batch.row_numbers([slot])
                    )
                case RestoreStates(slot):
                    numbers = batch.row_numbers([slot])
                    batch.replace_cache(
                        runner.scatter(batch.full_cache(), self._pinned_states, numbers)
                    )
                case UnpinStates():
                    self._pinned_states = None

    def _prefill_prompts(self) -> None:
        """Prefills the admitted prompts, chunk after chunk. While slots decode, no call begins once
        the budget is spent."""
        scheduler = self.scheduler
        scheduler.resume()
        decodes = len(scheduler.running) > len(scheduler.prefilling)
        spent = 0
        budget = self._budget if decodes else float("inf")
        while True:
            self._update_cache()
            slots = scheduler.next_prefill()
            if not slots or spent >= budget:
                break
            spent += self._prefill(slots)

    def _prefill(self, slots: list[int]) -> int:
        """Prefills the next chunk of these requests in one call. Returns P * C, the tokens that it
        computes with padding."""
        scheduler = self.scheduler
        runner = self.runner
        batch = self.batch
        requests = [scheduler.running[slot] for slot in slots]
        first_chunk = requests[0].cached == 0
        P = prefill_rows(len(slots))
        longest = max(request.needed - request.cached for request in requests)
        C = prefill_lengths(longest, runner.chunk)[-1] if first_chunk else runner.chunk
        padded = [*slots, *[None] * (P - len(slots))]
        inputs = runner.prefill_inputs(requests, P, C)
        places = (batch.row_numbers(padded), batch.page_tables(padded))
        cache = runner.prefill(
            self._weights(scheduler.adapter),
            batch.full_cache(),
            places,
            inputs,
            first_chunk=first_chunk,
        )
        batch.replace_cache(cache)
        for slot, end in zip(slots, inputs.ends, strict=True):
            if (
                slot not in scheduler.waiting_for_pages
            ):  # an earlier request of this call may have taken its pages
                scheduler.mark_prefilled(slot, end)
        self.counts["prefill"] += int(sum(np.minimum(inputs.lengths - inputs.starts, C)))
        return P * C

    def _start_decode(self) -> None:
        """Starts a decode if a slot can decode."""
        scheduler = self.scheduler
        batch = self.batch
        steps = scheduler.reserve_decode()  # may preempt requests, which leave `scheduler.decoding`
        self._update_cache()
        decoding = scheduler.decoding
        if not decoding:
            return
        if batch.prepare(scheduler.running, decoding, changed=scheduler.batch_changed):
            # The batch is built anew, so some slots may decode for the first time since their
            # prefill. Their states move past the prompt, so that no other slot can begin with them.
            for slot in decoding:
                scheduler.cache_manager.advance(slot)
        scheduler.batch_changed = False  # the device knows of all changes now
        waiting = scheduler.next_request is not None or bool(scheduler.prefilling)
        # The decode stops after `steps` decoding steps, or as soon as at most `threshold` rows are
        # active.
        threshold = batch.early_exit_threshold(len(decoding), waiting=waiting)
        output = batch.decode(self._weights(scheduler.adapter), (steps, threshold))
        self.counts["dispatches"] += 1
        self._in_flight = _InFlightDecode(batch.requests, output)

    def _process_outputs(self, decode: _InFlightDecode) -> list[int]:
        """Appends the output of a decode to its requests. Returns the slots whose requests
        ended."""
        filters = any(
            request is not None and request.params.has_filter for request in decode.requests
        )
        output = decode.output if filters else decode.output._replace(**dict.fromkeys(_OF_FILTERS))
        output = type(output)(*(None if array is None else np.asarray(array) for array in output))
        counts = (output.tokens >= 0).sum(axis=0).tolist()  # -1 where a row has no token
        steps = int(np.max(output.starts_step.sum(axis=0)))  # of the row that was active longest
        self.counts["steps"] += steps
        self.counts["rows"] += steps * len(decode.requests)
        self.counts["useful"] += int(output.starts_step.sum())
        ended = []
        slots = {id(request): slot for slot, request in self.scheduler.running.items()}
        for row, request in enumerate(decode.requests):
            slot = slots.get(id(request))  # None: released while the decode ran
            if request is None or slot is None or not counts[row] or request.finish is not None:
                continue
            self._append(request, output.row(row), counts[row])
            if request.finish is not None:
                ended.append(slot)
        return ended

    def _append(self, request: Request, output: DecodeOutput, count: int) -> None:
        """Appends the first `count` tokens of an output to a request, and notes how it ended if it
        did."""
        before = len(request.tokens)
        params = request.params
        lists = [
            getattr(request, name) for name in output._fields
        ]  # a request has a list for each field
        skipped = () if params.has_filter else _OF_FILTERS
        skipped += () if params.top_logprobs is not None else _OF_TOPS
        for name, values, new in zip(output._fields, lists, output, strict=True):
            if new is not None and name not in skipped:
                # A row of `kept` or `top_ids` stays an array, a copy: the output of all requests is
                # not kept for it.
                values += new[:count].tolist() if new.ndim == 1 else list(new[:count].copy())
        request.cached = request.needed  # the last token that was sampled has not been fed
        end = (
            self._stop_string(request.tokens, before, params)
            if params.stop and self._stop_string
            else None
        )
        if end is not None:
            for values in lists:
                del values[end:]
            request.cached = request.needed
            request.finish = "stop"
            self.scheduler.batch_changed = True
        elif request.tokens[-1] in params.stop_token_ids:
            request.finish = "stop"
        elif request.matcher is not None and request.matcher.advance(request.tokens[before:]):
            request.finish = "stop" if request.matcher.complete else "length"
            self.scheduler.batch_changed = True
        elif request.left == 0:
            request.finish = "length"
