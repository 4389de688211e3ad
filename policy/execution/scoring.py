"""Log-probabilities whose last bits depend on the preceding tokens alone.

The sums of a matrix product, of a softmax over keys or of a block of experts round differently in arrays of another
shape: padding and the other rows of a batch change a log-probability by up to 2e-6. So the shapes here are fixed. Every
document has a row of its own and begins at column 0. Token t is scored in the program of the first of the lengths 128,
256, 512, ... that is more than t, and each program has a fixed number of rows. Within one program a result does not
depend on the other rows, on the number of its row, or on the later tokens of its row.

The price: a document of n tokens goes through the decoder at every length up to the first that holds it, n to 4 n
tokens and 2.9 n on average, and through the head once.

R rows, L tokens of a row, T = L - `first(L)` of them scored, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.execution.compiled_cache import CompiledCache
from policy.mesh.sharding import block_on_cpu_mesh, constrain

Params = dict[str, jax.Array]

# The shortest program, in tokens of a row.
SHORTEST = 128
# Tokens of all rows of a program, unless one row has more: on CPU a product of more than 512 rows is no faster per row.
TOKENS = 512


class Document(NamedTuple):
    """A document of a batch: tokens start .. end - 1 of row `row`."""

    row: int
    start: int
    end: int


def documents(segments_BT: np.ndarray, positions_BT: np.ndarray, limit: int | None) -> list[Document] | None:
    """Returns the documents of a batch: runs of one segment number other than 0.

    None if a number occurs in two runs of a row, or a document has other positions than 0, 1, 2, ..., or more than
    `limit` tokens.
    """
    spans = []
    for row, segments in enumerate(segments_BT):
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        runs = [Document(row, a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a and segments[a] != 0]
        if len({int(segments[run.start]) for run in runs}) < len(runs):
            return None
        for _, start, end in runs:
            counts_from_0 = np.array_equal(positions_BT[row, start:end], np.arange(end - start))
            if not counts_from_0 or (limit is not None and end - start > limit):
                return None
        spans += runs
    return spans


class Scorer:
    """Scores documents by two programs of fixed shapes: `states` runs the decoder and `scores` the head."""

    def __init__(self, graph: Any):
        self.graph, self._limit = graph, graph.config.max_positions
        self.states, self.scores = map(self.program, (self._states_program, self._scores_program))

    def program(self, function: Callable) -> CompiledCache:
        """Compiles a program whose results are replicated."""
        layout = self.graph.layout
        return CompiledCache(jax.jit(function, out_shardings=layout.replicated), layout.platform)

    def lengths(self, longest: int) -> list[int]:
        """Returns the lengths of the programs that score documents of up to `longest` tokens, at most the number
        of positions."""
        lengths = [SHORTEST]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return lengths if self._limit is None else sorted({min(length, self._limit) for length in lengths})

    def first(self, L: int) -> int:
        """Returns the first token that is scored at this length."""
        return 0 if L <= SHORTEST else max(length for length in self.lengths(L) if length < L)

    def rows(self, L: int) -> int:
        """Returns the rows of the program: TOKENS / L, rounded up to a multiple of the parts into which the mesh cuts a
        batch."""
        rows, mesh = max(1, TOKENS // L), self.graph.layout.mesh
        num_row_shards = int(np.prod([mesh.shape[axis] for axis in dict(self.graph.layout.rules)["batch"]]))
        return -(-rows // num_row_shards) * num_row_shards

    def hidden(self, params: Params, tokens_RL: np.ndarray, lengths_R: np.ndarray) -> jax.Array:
        """Returns the state that predicts each token, which is the state of the token before it, [R, T, E].

        Row r holds a document of lengths[r] tokens.
        """
        return block_on_cpu_mesh(self.states(params, tokens_RL, lengths_R), self.graph.layout)

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
        self, rows: Iterable[tuple[int, np.ndarray]], L: int
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        """Yields (numbers, tokens int32[R, L], lengths int32[R]), the inputs of the programs of this length.

        rows: numbered documents. Documents without a token to score at this length are skipped.
        """
        documents = [(number, tokens[:L]) for number, tokens in rows if len(tokens) > self.first(L)]
        R = self.rows(L)
        for i in range(0, len(documents), R):
            batch = documents[i : i + R]
            tokens_RL, lengths_R = np.zeros((R, L), np.int32), np.zeros(R, np.int32)
            for row, (_, tokens) in enumerate(batch):
                tokens_RL[row, : len(tokens)], lengths_R[row] = tokens, len(tokens)
            yield [number for number, _ in batch], tokens_RL, lengths_R

    def logprobs(
        self, params: Params, tokens_BT: np.ndarray, spans: list[Document], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (logp, entropy), float32[B, T]; both are 0 at the first token of a document and outside of
        documents."""
        out = np.zeros((2, *tokens_BT.shape), np.float32)
        documents = [tokens_BT[span.row, span.start : span.end] for span in spans]
        for L in self.lengths(max(map(len, documents), default=0)):
            first = self.first(L)
            for numbers, tokens_RL, lengths_R in self.tiles(enumerate(documents), L):
                hidden = self.hidden(params, tokens_RL, lengths_R)
                logp_and_entropy = np.stack(self.score(params, hidden, tokens_RL[:, first:], temperature))
                for r, number in enumerate(numbers):
                    row, start, _ = spans[number]
                    begin = max(first, 1)
                    out[:, row, start + begin : start + lengths_R[r]] = logp_and_entropy[
                        :, r, begin - first : lengths_R[r] - first
                    ]
        return out[0], out[1]

    def _states_program(self, params, tokens_RL, lengths_R):
        L, layout = tokens_RL.shape[1], self.graph.layout
        segments = (jnp.arange(L) < lengths_R[:, None]).astype(jnp.int32)
        tokens, segments = (constrain(a, ("batch", None), layout) for a in (tokens_RL, segments))
        with self.graph.precision():
            hidden, _, _ = self.graph.decoder(params)(
                tokens, modes.make_step(tokens, segments=segments), None, self.graph.runtime
            )
        return modes.shift_right(hidden)[:, self.first(L) :]

    def _scores_program(self, params, hidden_RTE, tokens_RT, temperature):
        with self.graph.precision():
            return modes.logprobs_of_states(
                self.graph.decoder(params), hidden_RTE, tokens_RT, temperature, self.graph.runtime
            )
