"""Log-probabilities whose last bits depend on the preceding tokens alone.

The sums of a matrix product, of a softmax over keys or of a block of experts round differently in
arrays of another shape: padding and the other rows of a batch change a log-probability by up to
2e-6. So the shapes here are fixed. Every document has a row of its own and begins at column 0.
Token t is scored in the program of the first of the lengths 128, 256, 512, ... that is more than t,
and each program has a fixed number of rows. Within one program a result does not depend on the
other rows, on the number of its row, or on the later tokens of its row.

The price: a document of n tokens goes through the decoder at every length up to the first that
holds it, n to 4 n tokens and 2.9 n on average, and through the head once.

B rows and T tokens of a call; R rows of a tile, L tokens of a row, T = L - `first(L)` of them
scored, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache.media import Media, of_call
from policy.cache.paths import before
from policy.cache.step import Step
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.programs.compiled_cache import CompiledCache

Params = dict[str, jax.Array]

# The shortest program, in tokens of a row.
SHORTEST = 128
# Tokens of all rows of a program, unless one row has more: on CPU a product of more than 512 rows
# is no faster per row.
TOKENS = 512
NO_MEDIA: Mapping[int, Media] = MappingProxyType({})


class Document(NamedTuple):
    """A document of a batch: tokens start .. end - 1 of row `row`."""

    row: int
    start: int
    end: int


def documents(
    segments_BT: np.ndarray, positions_BT: np.ndarray, limit: int | None
) -> list[Document] | None:
    """Returns the documents of a batch: runs of one segment number other than 0.

    None if a number occurs in two runs of a row, or a document has other positions than 0, 1, 2,
    ..., or more than `limit` tokens.
    """
    spans = []
    for row, segments in enumerate(segments_BT):
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        runs = [
            Document(row, a, b)
            for a, b in zip(edges, edges[1:], strict=False)
            if b > a and segments[a] != 0
        ]
        if len({int(segments[run.start]) for run in runs}) < len(runs):
            return None
        for _, start, end in runs:
            counts_from_0 = np.array_equal(positions_BT[row, start:end], np.arange(end - start))
            if not counts_from_0 or (limit is not None and end - start > limit):
                return None
        spans += runs
    return spans


def media_of(step: Step, spans: list[Document]) -> dict[int, Media]:
    """Returns the pictures and sounds of the documents of a batch, by number of the document;
    documents of text are left out."""
    if step.media is None:
        return {}
    positions = np.asarray(step.positions)
    media = step.media
    if media.index is None:
        index = np.full(positions.shape, -1, np.int32)
        media = replace(media, index=index, table=np.zeros((1, 1), np.float32))
    index, turns, until = (
        None if a is None else np.asarray(a) for a in (media.index, media.turns, media.until)
    )
    assert index is not None
    result = {}
    for number, (row, start, end) in enumerate(spans):
        part = (row, slice(start, end))
        own = positions[row, start:end]
        plain = (
            np.all(index[part] < 0)
            and (turns is None or np.all(turns[part] == own[:, None]))
            and (until is None or np.all(until[part] == own))
        )
        if not plain:
            result[number] = replace(
                media,
                index=index[part],
                turns=None if turns is None else turns[part],
                until=None if until is None else until[part],
            )
    return result


class Scorer:
    """Scores documents by two programs of fixed shapes: `states` runs the decoder and `scores` the
    head. Documents with pictures or sounds have programs of their own."""

    def __init__(self, graph: Any):
        self.graph = graph
        self._limit = graph.config.max_positions
        self.states, self.scores = map(self.program, (self._states_program, self._scores_program))

    def program(self, function: Callable) -> CompiledCache:
        """Compiles a program whose results are replicated."""
        layout = self.graph.layout
        return CompiledCache(jax.jit(function, out_shardings=layout.replicated), layout.platform)

    def lengths(self, longest: int) -> list[int]:
        """Returns the lengths of the programs that score documents of up to `longest` tokens, at
        most the number of positions."""
        lengths = [SHORTEST]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return (
            lengths
            if self._limit is None
            else sorted({min(length, self._limit) for length in lengths})
        )

    def first(self, L: int) -> int:
        """Returns the first token that is scored at this length."""
        return 0 if L <= SHORTEST else max(length for length in self.lengths(L) if length < L)

    def rows(self, L: int) -> int:
        """Returns the rows of the program: TOKENS / L, rounded up to a multiple of the parts into
        which the mesh cuts a batch."""
        shards = self.graph.layout.num_row_shards
        return -(-max(1, TOKENS // L) // shards) * shards

    def hidden(
        self,
        params: Params,
        tokens_RL: np.ndarray,
        lengths_R: np.ndarray,
        media: Media | None = None,
    ) -> jax.Array:
        """Returns the state that predicts each token, which is the state of the token before it,
        [R, T, E].

        Row r holds a document of lengths[r] tokens. media: the pictures and sounds of the rows.
        """
        more = () if media is None else (media,)
        return block_on_cpu_mesh(
            self.states(params, tokens_RL, lengths_R, *more), self.graph.layout
        )

    def score(
        self, params: Params, hidden_RTE: jax.Array, tokens_RT: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (logp, entropy), float32[R, T] on the host.

        The values at the first token of a document have no meaning.
        """
        scores = self.scores(params, hidden_RTE, tokens_RT, np.float32(temperature))
        logp, entropy = block_on_cpu_mesh(scores, self.graph.layout)
        return np.asarray(logp), np.asarray(entropy)

    def tiles(
        self,
        rows: Iterable[tuple[int, np.ndarray]],
        L: int,
        media: Mapping[int, Media] = NO_MEDIA,
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray, Media | None]]:
        """Yields (numbers, tokens int32[R, L], lengths int32[R], Media or None), the inputs
        of the programs of this length.

        rows: numbered documents. Documents without a token to score at this length are skipped.
        media: the pictures and sounds of documents, by number. Rows of one call have one table, or
        none.
        """
        groups: dict[int | None, list[tuple[int, np.ndarray]]] = {}
        for number, tokens in rows:
            if len(tokens) > self.first(L):
                table = id(media[number].table) if number in media else None
                groups.setdefault(table, []).append((number, tokens[:L]))
        R = self.rows(L)
        for table, documents in groups.items():
            for i in range(0, len(documents), R):
                batch = documents[i : i + R]
                tokens_RL = np.zeros((R, L), np.int32)
                lengths_R = np.zeros(R, np.int32)
                for row, (_, tokens) in enumerate(batch):
                    tokens_RL[row, : len(tokens)], lengths_R[row] = tokens, len(tokens)
                numbers = [number for number, _ in batch]
                own = None
                if table is not None:
                    own = of_call([media[number] for number in numbers], [0] * len(batch), (R, L))
                    # ids may lie outside the vocabulary
                    tokens_RL = np.where(own.index >= 0, 0, tokens_RL)
                yield numbers, tokens_RL, lengths_R, own

    def logprobs(
        self,
        params: Params,
        tokens_BT: np.ndarray,
        spans: list[Document],
        temperature: float,
        media: Mapping[int, Media] = NO_MEDIA,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (logp, entropy), float32[B, T]; both are 0 at the first token of a document and
        outside of documents. media: the pictures and sounds of documents, by number."""
        out = np.zeros((2, *tokens_BT.shape), np.float32)
        documents = [tokens_BT[span.row, span.start : span.end] for span in spans]
        for L in self.lengths(max(map(len, documents), default=0)):
            first = self.first(L)
            for numbers, tokens_RL, lengths_R, own in self.tiles(enumerate(documents), L, media):
                hidden = self.hidden(params, tokens_RL, lengths_R, own)
                logp_and_entropy = np.stack(
                    self.score(params, hidden, tokens_RL[:, first:], temperature)
                )
                for r, number in enumerate(numbers):
                    row, start, _ = spans[number]
                    begin = max(first, 1)
                    out[:, row, start + begin : start + lengths_R[r]] = logp_and_entropy[
                        :, r, begin - first : lengths_R[r] - first
                    ]
        return out[0], out[1]

    def _states_program(self, params, tokens_RL, lengths_R, media=None):
        L = tokens_RL.shape[1]
        layout = self.graph.layout
        segments = (jnp.arange(L) < lengths_R[:, None]).astype(jnp.int32)
        tokens, segments = (constrain(a, ("batch", None), layout) for a in (tokens_RL, segments))
        with self.graph.precision():
            output = self.graph.decoder(params)(
                tokens,
                modes.make_step(tokens, segments=segments, media=media),
                None,
                self.graph.runtime,
            )
        return before(output.hidden)[:, self.first(L) :]

    def _scores_program(self, params, hidden_RTE, tokens_RT, temperature):
        with self.graph.precision():
            return modes.logprobs_of_states(
                self.graph.decoder(params), hidden_RTE, tokens_RT, temperature, self.graph.runtime
            )
