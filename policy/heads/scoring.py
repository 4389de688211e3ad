"""Log-probabilities whose last bits depend on nothing but the tokens before.

The sums of a matrix product, of a softmax over keys or of a block of experts round otherwise in arrays of another shape: on CPU a
row of 41 tokens, padded to 64 or to 128, alone or among others, gives up to five versions of a log-probability that differ by
2e-6. So the shapes here are fixed. Every document has a row of its own and begins at column 0; token t is scored in the program of
the first of the lengths 128, 256, 512, ... that is more than t, which has always the same number of rows. Within one program a
number does not depend on the other rows, on its own row's number, or on what follows in its row.

The price: a document of n tokens goes through the decoder at every length up to the first that holds it, n to 4 n tokens and
2.9 n on average (n spread evenly in logarithm; any other factor than 2 is no cheaper by more than a sixteenth), and through the
head once.

R rows, L tokens of a row, T = L - `first(L)` of them scored, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.execution.compiled_cache import CompiledCache
from policy.mesh.sharding import block_on_cpu_mesh, constrain

SHORTEST = 128
# Of a program, as far as a row has no more: on CPU a product of 512 rows is as fast for each of them as one of more.
TOKENS = 512


class Document(NamedTuple):
    """Tokens start .. end - 1 of row `row` of a batch."""

    row: int
    start: int
    end: int


def documents(segments_BT: np.ndarray, positions_BT: np.ndarray, limit: int | None) -> list[Document] | None:
    """The documents of a batch: runs of one segment number other than 0. None where a number comes in two runs of a row, or a
    document has other positions than 0, 1, 2, ..., or more than `limit` of them."""
    found = []
    for row, segments in enumerate(segments_BT):
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        runs = [Document(row, a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a and segments[a] != 0]
        if len({int(segments[run.start]) for run in runs}) < len(runs):
            return None
        for _, start, end in runs:
            plain = np.array_equal(positions_BT[row, start:end], np.arange(end - start))
            if not plain or (limit is not None and end - start > limit):
                return None
        found += runs
    return found


class Scorer:
    """The programs of fixed shapes of a graph, `states` and `scores`."""

    def __init__(self, graph):
        self.graph, self._limit = graph, graph.config.max_positions
        self.states, self.scores = map(self.program, (self._states_program, self._scores_program))

    def program(self, function: Callable) -> CompiledCache:
        """One whose results every device has."""
        layout = self.graph.layout
        return CompiledCache(jax.jit(function, out_shardings=layout.replicated), layout.platform)

    def lengths(self, longest: int) -> list[int]:
        """Those that documents of up to `longest` tokens go through. A model with a last position has no longer one."""
        found = [SHORTEST]
        while found[-1] < longest:
            found.append(2 * found[-1])
        return found if self._limit is None else sorted({min(length, self._limit) for length in found})

    def first(self, L: int) -> int:
        """The first token that is scored at this length."""
        return 0 if L <= SHORTEST else max(length for length in self.lengths(L) if length < L)

    def rows(self, L: int) -> int:
        """Rows of the program: as many as TOKENS has room for, a multiple of what the mesh cuts a batch into."""
        rows, mesh = max(1, TOKENS // L), self.graph.layout.mesh
        ways = int(np.prod([mesh.shape[axis] for axis in dict(self.graph.layout.rules)["batch"]]))
        return -(-rows // ways) * ways

    def hidden(self, params, tokens_RL: np.ndarray, lengths_R: np.ndarray) -> jax.Array:
        """[R, T, E]: at token t the state that it is predicted from, which is that of the token before. Row r holds a document
        of lengths[r] tokens."""
        return block_on_cpu_mesh(self.states(params, tokens_RL, lengths_R), self.graph.layout)

    def score(
        self, params, hidden_RTE: jax.Array, tokens_RT: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(logp, entropy), float32[R, T] on the host. What they say of the first token of a document is of no meaning."""
        found = block_on_cpu_mesh(
            self.scores(params, hidden_RTE, tokens_RT, np.float32(temperature)), self.graph.layout
        )
        return tuple(np.asarray(each) for each in found)

    def tiles(
        self, rows: Iterable[tuple[int, np.ndarray]], L: int
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        """(numbers, tokens int32[R, L], lengths int32[R]) for the programs of this length; `rows` are numbered documents, those
        that have no token to score there are passed over."""
        given = [(number, tokens[:L]) for number, tokens in rows if len(tokens) > self.first(L)]
        R = self.rows(L)
        for i in range(0, len(given), R):
            some = given[i : i + R]
            tokens_RL, lengths_R = np.zeros((R, L), np.int32), np.zeros(R, np.int32)
            for row, (_, tokens) in enumerate(some):
                tokens_RL[row, : len(tokens)], lengths_R[row] = tokens, len(tokens)
            yield [number for number, _ in some], tokens_RL, lengths_R

    def logprobs(
        self, params, tokens_BT: np.ndarray, found: list[Document], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(logp, entropy), float32[B, T]; both 0 at the first token of a document and outside of all."""
        out = np.zeros((2, *tokens_BT.shape), np.float32)
        texts = [tokens_BT[each.row, each.start : each.end] for each in found]
        for L in self.lengths(max(map(len, texts), default=0)):
            first = self.first(L)
            for numbers, tokens_RL, lengths_R in self.tiles(enumerate(texts), L):
                hidden = self.hidden(params, tokens_RL, lengths_R)
                both = np.stack(self.score(params, hidden, tokens_RL[:, first:], temperature))
                for r, number in enumerate(numbers):
                    row, start, _ = found[number]
                    begin = max(first, 1)
                    out[:, row, start + begin : start + lengths_R[r]] = both[:, r, begin - first : lengths_R[r] - first]
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
            return modes.score(self.graph.decoder(params), hidden_RTE, tokens_RT, temperature, self.graph.runtime)
