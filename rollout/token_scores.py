"""Raw log-probabilities of given tokens: of the tokens of a prompt, which are prefilled without
logits, and of completions that `exact` has verified.

A row of a call holds one text from column 0 on. Lengths and numbers of rows are few, so few
programs are compiled.

R rows, L tokens of a row, n tokens of a text, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache.media import Media, of_call
from policy.cache.paths import before
from policy.heads.vocab_tiles import TopTokens
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.programs.compiled_cache import CompiledCache
from rollout.types import MOST_TOP_LOGPROBS, TokenScores

SHORTEST = 32
"""Tokens of a row of the shortest program."""
TOKENS = 512
"""Tokens of all rows of a program, unless one row has more."""
ROWS = (1, 4, 16)
"""Numbers of rows of programs."""


class ScoredText(NamedTuple):
    """Tokens that are scored, with the pictures and sounds among them."""

    tokens: Sequence[int]
    media: Media | None = None


class TokenScorer:
    """Scores texts with the decoder of a generator, without its cache: the prefix that a prompt
    shares with earlier ones is computed again."""

    def __init__(self, graph: Graph, max_length: int):
        self._graph = graph
        self._max_length = max_length
        self._program = CompiledCache(jax.jit(self._scores), graph.layout.platform)

    def score(
        self, params: dict[str, Any], texts: Sequence[ScoredText], k: int
    ) -> list[TokenScores]:
        """Returns the scores of each text, with its k likeliest tokens in each place, from these
        weights."""
        results: list[TokenScores] = []
        for group in self._groups(texts):
            L = self._length(max(len(text.tokens) for text in group))
            tokens_RL, lengths_R, media = self._inputs(group, L)
            more = () if media is None else (media,)
            top = self._program(params, tokens_RL, lengths_R, *more)
            top = jax.tree.map(np.asarray, block_on_cpu_mesh(top, self._graph.layout))
            results += [self._of_row(top, row, text, k) for row, text in enumerate(group)]
        return results

    def _length(self, tokens: int) -> int:
        """Returns the tokens of a row of the program for so many tokens."""
        L = SHORTEST
        while tokens > L:
            L *= 2
        return min(L, max(self._max_length, SHORTEST))

    def _groups(self, texts: Sequence[ScoredText]) -> list[list[ScoredText]]:
        """Returns neighbouring texts that one call scores: of one length of a row and with one
        table of pictures."""
        groups: list[list[ScoredText]] = []
        last = None
        for text in texts:
            L = self._length(len(text.tokens))
            kind = L, None if text.media is None else id(text.media.table)
            if kind != last or len(groups[-1]) == min(ROWS[-1], max(1, TOKENS // L)):
                groups.append([])
            groups[-1].append(text)
            last = kind
        return groups

    def _inputs(
        self, group: list[ScoredText], L: int
    ) -> tuple[np.ndarray, np.ndarray, Media | None]:
        """Returns (tokens int32[R, L], lengths int32[R], pictures and sounds)."""
        shards = self._graph.layout.num_row_shards
        R = -(-min(rows for rows in ROWS if rows >= len(group)) // shards) * shards
        tokens_RL = np.zeros((R, L), np.int32)
        lengths_R = np.zeros(R, np.int32)
        for row, text in enumerate(group):
            tokens_RL[row, : len(text.tokens)] = text.tokens
            lengths_R[row] = len(text.tokens)
        prompts = [text.media for text in group if text.media is not None]
        if not prompts:
            return tokens_RL, lengths_R, None
        media = of_call(prompts, [0] * len(prompts), (R, L))
        # Ids of placeholders may lie outside the vocabulary.
        return np.where(media.index >= 0, 0, tokens_RL), lengths_R, media

    @staticmethod
    def _of_row(top: TopTokens, row: int, text: ScoredText, k: int) -> TokenScores:
        n = len(text.tokens)
        logprobs = np.array(top.target)[row, :n]
        ids = np.array(top.ids)[row, :n, :k]
        likeliest = np.array(top.logp)[row, :n, :k]
        unpredicted = np.arange(n) == 0
        if text.media is not None:
            index = np.asarray(text.media.part(0, n).index)
            unpredicted |= index >= 0
        logprobs[unpredicted] = np.nan
        ids[unpredicted] = -1
        likeliest[unpredicted] = np.nan
        return TokenScores(logprobs, ids, likeliest)

    def _scores(self, params, tokens_RL, lengths_R, media=None) -> TopTokens:
        graph = self._graph
        layout = graph.layout
        L = tokens_RL.shape[1]
        segments = (jnp.arange(L) < lengths_R[:, None]).astype(jnp.int32)
        tokens, segments = (constrain(a, ("batch", None), layout) for a in (tokens_RL, segments))
        k = min(MOST_TOP_LOGPROBS, graph.config.vocab_size)
        with graph.precision():
            decoder = graph.decoder(params)
            step = modes.make_step(tokens, segments=segments, media=media)
            states = before(decoder(tokens, step, None, graph.runtime).hidden)
            top = modes.top_logprobs_of_states(decoder, states, tokens, k, graph.runtime)
        # Replicated: the host of every process reads all of it.
        return jax.lax.with_sharding_constraint(top, layout.replicated)
