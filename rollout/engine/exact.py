"""Exact completions: the decoder generates them, and the programs that `Model.logprobs` runs verify
them.

The decoder's numbers change in their last bits with the shape of a call: how many rows decode
together, where a prompt was cut into chunks, how the cache is stored. About one token in ten
thousand then differs, because its random number falls between the two versions of a cumulative sum,
or two tokens change places. So a completion of the decoder is unverified when it ends. The scoring
programs (policy/programs/scoring.py), whose bits depend on the tokens alone, run over it once. At
every position the token is drawn again, from their logits and by the same random number that the
decoder used. The first that differs replaces the decoder's, the tokens after it are discarded, and
the request goes back to the queue. The final completion is a function of the weights, the prompt,
and (seed, prompt id, sample) only; its log-probabilities equal `Model.logprobs`, bit for bit.

R rows, L tokens of each, the last T of them scored, E hidden, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from policy.heads import head
from policy.mesh.sharding import block_on_cpu_mesh
from policy.programs.compiled_cache import CompiledCache
from policy.programs.scoring import Scorer
from rollout.engine.programs import IDLE
from rollout.engine.sampling import Drawn, Draws, choose
from rollout.logits_processors import LogitsProcessors, ProcessorSizes
from rollout.request import Request
from rollout.types import SamplingParams

CHECKS = ("check, hidden states", "check, log-probabilities", "check, draws")
"""Names of the programs of a check in a plan: one of all layers, and two of the head alone."""

# While others decode, so many completions are collected before a check: fewer do not fill the rows
# of the scoring program.
MIN_COMPLETIONS = 8


@dataclass(eq=False)
class _Unverified:
    """A request that the engine has ended. matches: whether all tokens compared until now were the
    ones drawn."""

    request: Request
    finish: str
    matches: bool = True

    @property
    def tokens(self) -> np.ndarray:
        """Returns the tokens of prompt and completion."""
        return np.asarray((*self.request.prompt, *self.request.tokens), np.int32)

    @property
    def first_unverified(self) -> int:
        """Returns the first position that is not verified yet; the prompt counts."""
        return len(self.request.prompt) + self.request.verified_tokens


class Verifier:
    """Holds the requests that the engine has ended until their tokens are verified.

    counts: checked tokens, replaced tokens, and tokens that the scoring programs computed
    ("scored").
    """

    def __init__(
        self, scorer: Scorer, seed: int, *, stop_string: Callable | None, max_kept: int = 0
    ):
        """max_kept: the most ids that filters leave which are recorded of each token; 0: none."""
        self.scorer = scorer
        self._seed = seed
        self._stop_string = stop_string
        self._max_kept = min(max_kept, scorer.graph.config.vocab_size)
        self._unverified: list[_Unverified] = []
        self.counts = {"checked": 0, "replaced": 0, "scored": 0}
        self._draw = scorer.program(self._draw_program)

    @property
    def executables(self) -> dict[str, CompiledCache]:
        """Returns the programs of a check, by the names of CHECKS."""
        return dict(zip(CHECKS, (self.scorer.states, self.scorer.scores, self._draw), strict=True))

    def program_inputs(self, params: dict, L: int) -> dict[str, tuple]:
        """Returns the arguments of each program at length L, for abstract weights `params`."""
        R = self.scorer.rows(L)
        T = L - self.scorer.first(L)
        texts = params, np.zeros((R, L), np.int32), np.zeros(R, np.int32)
        states = jax.eval_shape(self.scorer.states.jitted, *texts)
        hidden = jax.ShapeDtypeStruct(
            states.shape, states.dtype, sharding=self.scorer.graph.layout.replicated
        )
        scored = params, hidden, np.zeros((R, T), np.int32), np.float32(1.0)
        drawn = params, hidden, *self._draw_inputs([None] * R, L)
        return dict(zip(CHECKS, (texts, scored, drawn), strict=True))

    def add(self, requests: Iterable[Request]) -> None:
        """Takes requests that have ended. They count as running until `check` returns them."""
        for request in requests:
            assert request.finish is not None, "a completion is verified when it has ended"
            self._unverified.append(_Unverified(request, request.finish))
            request.finish = None

    def remove(self, request: Request) -> None:
        """Removes a request if it is here."""
        self._unverified = [
            completion for completion in self._unverified if completion.request is not request
        ]

    def clear(self) -> None:
        self._unverified.clear()

    def due(self, *, waiting: bool) -> bool:
        """Whether to run a check now. waiting: whether requests wait for a slot."""
        return len(self._unverified) >= (MIN_COMPLETIONS if waiting else 1)

    def check(self, weights: Callable[[str | None], dict]) -> tuple[list[Request], list[Request]]:
        """Returns (requests that have ended, requests that must continue from their last token).
        weights: returns the arrays to compute with, for the name of an adapter or None."""
        completions = self._unverified
        self._unverified = []
        groups: dict[tuple[str, float], list[_Unverified]] = {}
        for each in completions:
            request = each.request
            kind = request.adapter or "", _temperature(request.params)
            groups.setdefault(kind, []).append(each)
        for (adapter, temperature), group in sorted(groups.items(), key=lambda each: each[0]):
            self._compare(weights(adapter or None), group, temperature)
        ended = []
        resumed = []
        for completion in completions:
            request = completion.request
            if completion.matches:
                request.finish = completion.finish
                ended.append(request)
            elif (finish := self._finish(request)) is not None:
                self._unverified.append(
                    _Unverified(request, finish)
                )  # the new token has no log-probability yet
            else:
                resumed.append(request)
        return ended, resumed

    def compile_ahead(self, params: dict, longest: int) -> int:
        """Runs every program that texts of up to `longest` tokens need, on empty rows; returns
        their number. On one device the lengths are compiled in parallel threads; on several,
        programs must start in the same order everywhere."""
        lengths = self.scorer.lengths(longest)
        scorer = self.scorer

        def run(L: int) -> None:
            R = scorer.rows(L)
            T = L - scorer.first(L)
            hidden = scorer.hidden(params, np.zeros((R, L), np.int32), np.zeros(R, np.int32))
            scorer.score(params, hidden, np.zeros((R, T), np.int32), 1.0)
            self._draw_positions(params, hidden, [None] * R, L)

        with ThreadPoolExecutor(
            os.cpu_count() if scorer.graph.layout.mesh.size == 1 else 1
        ) as pool:
            list(pool.map(run, lengths))
        return 3 * len(lengths)

    def _compare(self, params, completions: list[_Unverified], temperature: float) -> None:
        """Verifies the tokens of each completion up to the first that is not the one drawn, which
        is replaced."""
        scorer = self.scorer
        media = {
            i: each.request.media
            for i, each in enumerate(completions)
            if each.request.media is not None
        }
        for L in scorer.lengths(max(len(completion.tokens) for completion in completions)):
            first = scorer.first(L)
            rows = [
                (i, completion.tokens)
                for i, completion in enumerate(completions)
                if completion.matches and completion.first_unverified < L
            ]
            for numbers, tokens_RL, lengths_R, own_media in scorer.tiles(rows, L, media):
                hidden = scorer.hidden(params, tokens_RL, lengths_R, own_media)
                self.counts["scored"] += tokens_RL.size
                logp, _ = scorer.score(params, hidden, tokens_RL[:, first:], temperature)
                batch = [completions[i] for i in numbers]
                requests = [each.request for each in batch] + [None] * (len(lengths_R) - len(batch))
                drawn = self._draw_positions(params, hidden, requests, L)
                for row, completion in enumerate(batch):
                    columns = slice(completion.first_unverified - first, lengths_R[row] - first)
                    own = jax.tree.map(lambda a, row=row, columns=columns: a[row, columns], drawn)
                    self._verify(
                        completion, tokens_RL[row, first:][columns], own, logp[row, columns]
                    )

    def _verify(
        self, completion: _Unverified, decoded: np.ndarray, drawn: Drawn, logp: np.ndarray
    ) -> None:
        """Compares the decoder's tokens, from the first unverified one on, with the tokens drawn.
        Replaces the first that differs and discards the tokens after it."""
        request = completion.request
        mismatches = np.flatnonzero(decoded != drawn.tokens)
        num_equal = int(mismatches[0]) if len(mismatches) else len(decoded)
        first = request.verified_tokens
        request.logprobs[first : first + num_equal] = logp[:num_equal].tolist()
        if self._max_kept and request.params.has_filter:
            request.filtered_logprobs += drawn.filtered_logprobs[:num_equal].tolist()
            request.kept += list(drawn.kept[:num_equal].copy())
            request.kept_counts += drawn.kept_counts[:num_equal].tolist()
        request.verified_tokens += num_equal
        self.counts["checked"] += min(num_equal + 1, len(decoded))
        if num_equal == len(decoded):
            return
        completion.matches = False
        self.counts["replaced"] += 1
        request.tokens[request.verified_tokens :] = [int(drawn.tokens[num_equal])]
        for values in (request.logprobs, request.starts_step):
            del values[request.verified_tokens + 1 :]

    def _finish(self, request: Request) -> str | None:
        """Returns how a request ends with its last token; None if it goes on."""
        tokens = request.tokens
        params = request.params
        if tokens[-1] in params.stop_token_ids:
            return "stop"
        if (
            params.stop
            and self._stop_string
            and self._stop_string(tokens, len(tokens) - 1, params) is not None
        ):
            return "stop"
        return "length" if request.left == 0 else None

    def _draw_positions(
        self, params, hidden_RTE: jax.Array, requests: list[Request | None], L: int
    ) -> Drawn:
        """Returns arrays [R, T] on the host: what each row's request draws at every position.
        Log-probabilities before filters are left out: `Scorer.score` gives them."""
        sizes = ProcessorSizes.of(requests)
        inputs = self._draw_inputs(requests, L)
        if sizes is None:
            drawn = self._draw(params, hidden_RTE, *inputs)
        else:
            processors = LogitsProcessors.of(requests, len(requests), L, sizes)
            drawn = self._draw(params, hidden_RTE, *inputs, processors)
        return jax.tree.map(np.asarray, block_on_cpu_mesh(drawn, self.scorer.graph.layout))

    def _draw_inputs(self, requests: list[Request | None], L: int) -> tuple:
        """Returns the parameters of each row's draws, and the first position."""
        ids = np.asarray([(r.prompt_id, r.sample) if r else (0, 0) for r in requests], np.int32).T
        return (
            *ids,
            Draws.of([r.params if r else IDLE for r in requests], self._seed),
            np.int32(self.scorer.first(L)),
        )

    def _draw_program(
        self, params, hidden_RTE, prompt_ids_R, samples_R, draws: Draws, first, processors=None
    ):
        """Draws from a few rows of logits at a time, as the head computes them. processors: the
        LogitsProcessors of the rows; None: no row has any."""
        graph = self.scorer.graph
        R, T, E = hidden_RTE.shape
        V = graph.config.vocab_size
        places = R * T
        m = head.Tiling(graph.runtime.num_vocab_tiling).rows(places, V)
        positions = jnp.broadcast_to(first + jnp.arange(T, dtype=jnp.int32), (R, T)).reshape(places)
        repeated = draws.repeat(T)
        rows = (
            repeated.temperature,
            repeated.top_k,
            repeated.top_p,
            repeated.min_p,
            jnp.repeat(prompt_ids_R, T),
            jnp.repeat(samples_R, T),
            positions,
        )
        numbers = () if processors is None else (jnp.repeat(jnp.arange(R, dtype=jnp.int32), T),)

        def in_chunks(a):
            return jnp.pad(a, [(0, -places % m)] + [(0, 0)] * (a.ndim - 1)).reshape(
                -1, m, *a.shape[1:]
            )

        with graph.precision():
            weight = graph.decoder(params).head_weight

            def draw_chunk(xs):
                hidden_mE, (*row_params, ids, samples, positions), *numbers = xs
                logits = head.logits(hidden_mE, weight, graph.config.logit_scaling)
                processed = None
                if processors is not None:
                    own = processors.take(*numbers)
                    processed = own.process(logits, positions, own.seen(positions, V))
                draw_ids = (ids, samples, positions)
                row_draws = Draws(draws.seed, *row_params)
                drawn = choose(logits, draw_ids, row_draws, graph.layout, processed, self._max_kept)
                return drawn._replace(logprobs=None)

            drawn = jax.lax.map(
                draw_chunk,
                (
                    in_chunks(hidden_RTE.reshape(places, E)),
                    tuple(map(in_chunks, rows)),
                    *map(in_chunks, numbers),
                ),
            )
        return jax.tree.map(
            lambda a: a.reshape(-1, *a.shape[2:])[:places].reshape(R, T, *a.shape[2:]), drawn
        )


def _temperature(params: SamplingParams) -> float:
    """Returns the temperature of the log-probabilities."""
    return params.temperature or 1.0
