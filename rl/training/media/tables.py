"""Tables of the pictures and sounds of a step, which the generator, the passes and the updates
share.

A picture is encoded once in a step, whatever the number of prompts and completions that show it.
Towers that no stage trains give the same rows in every step, so the rows of the last table are also
taken again.

N rows of a batch, T tokens, M rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from policy.cache.media import Media, MediaTable
from policy.execution.encoding import MediaEncoder, PaddedInputs
from policy.media import Item, Kind, is_tower
from policy.mesh import processes
from rl.data.encoded import EncodedRow, expanded_of
from rl.errors import DataError
from rl.training.trainable import frozen_weights, trained_paths
from rollout.media.loader import Loader
from rollout.request import MediaPrompt, prefix_keys

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.config.run import RunConfig
    from rl.config.stage import StageOptions
    from rl.training.batch import Batch
    from rollout.media.expand import Expanded
    from rollout.media.processors import Processors

    ExpandedAt = Sequence[tuple[int, int, Expanded | None]]
    """(row, first column, pictures and sounds) of sequences of a batch."""


def table_rows(rows: Iterable[Sequence[Expanded]], count: int) -> int:
    """Returns how many rows a table needs, a power of 2, to hold the items of any `count` of these
    rows of data.

    All processes must call this, each with the rows of data that it holds.
    """
    distinct: set[Item] = set()
    each = []
    for expanded in rows:
        own = {item for one in expanded for item in one.items}
        distinct |= own
        each.append(_rows_of(own))
    parts = processes.all_gather_object((sorted(each)[-count:], _rows_of(distinct)))
    most = sum(sorted(number for numbers, _ in parts for number in numbers)[-count:])
    needed = min(most, sum(total for _, total in parts))
    return _power_of_2(needed)


def planned_rows(config: RunConfig) -> int:
    """Returns the rows of the tables of a run by its configuration alone; 0: it plans no pictures
    and sounds."""
    return _power_of_2(evaluated_at_once(config) * (config.model.media_rows or 0))


def evaluated_at_once(config: RunConfig) -> int:
    """Returns how many problems of an evaluation with pictures or sounds are completed in one call:
    as many as the largest step has prompts."""
    return max(stage.prompts_per_step for stage in config.stages)


def trains_towers(graph: Graph, stage: StageOptions) -> bool:
    """Whether a stage of the policy trains a weight of a tower, or an adapter of one."""
    adapter = graph.runtime.adapter
    if adapter is not None and stage.trains != "weights":
        return any(map(is_tower, (*adapter.train, *(each.path for each in adapter.adapted))))
    return any(
        is_tower(path)
        for path in trained_paths(graph.paths, graph.runtime, frozen_weights(graph, stage))
    )


@dataclass(frozen=True)
class StepTable:
    """A table of media embeddings, and where each item begins in it.

    inputs: what the towers read of each item; None: the stage trains no tower.
    """

    table: MediaTable
    first: Mapping[Item, int]
    encoder: MediaEncoder
    inputs: Mapping[Item, np.ndarray] | None = None

    @property
    def _decoder(self) -> Any:
        return self.encoder.graph.config

    def index(self, expanded: Expanded) -> np.ndarray:
        """Returns the row of the table at each token, int32[T], -1 at text."""
        rows = [np.arange(item.rows) + self.first[item] for item in expanded.items]
        own = np.concatenate(rows) if rows else np.zeros(1, int)
        return np.where(expanded.index >= 0, own[np.maximum(expanded.index, 0)], -1).astype(
            np.int32
        )

    def media(self, expanded: Expanded) -> Media:
        """Returns where the rows stand, with the arrays that the decoder reads."""
        positions = np.arange(len(expanded.tokens), dtype=np.int32)
        turns = expanded.turns
        until = expanded.until
        if self._decoder.has_sections and turns is None:
            turns = np.repeat(positions[:, None], 3, axis=1)
        if self._decoder.looks_ahead and until is None:
            until = positions
        media = Media(index=self.index(expanded), turns=turns, until=until)
        return media.in_table(self.table)

    def prompt(self, ids: Sequence[int], expanded: Expanded | None) -> Any:
        """Returns a prompt as the generator takes it."""
        if expanded is None:
            return ids
        parts = [(item.digest, number) for item in expanded.items for number in range(item.rows)]
        keys = prefix_keys(
            ids, [None if row < 0 else parts[row] for row in expanded.index.tolist()]
        )
        return MediaPrompt(tuple(ids), self.media(expanded), keys)

    def add(self, batch: Batch, shown: ExpandedAt) -> Batch:
        """Returns the batch with its pictures and sounds, and 0 in place of the ids of
        placeholders.

        shown: of the sequences with pictures or sounds; a sequence may go on with text after the
        tokens of its `Expanded`. All other sequences are text.
        """
        positions = _positions(batch.segments)
        sections = self._decoder.has_sections
        media = Media(
            index=np.full(batch.tokens.shape, -1, np.int32),
            turns=np.repeat(positions[..., None], 3, axis=2) if sections else None,
            until=positions.copy() if self._decoder.looks_ahead else None,
        )
        made: dict[int, Media] = {}  # by identity: the completions of a prompt share one
        for row, start, expanded in shown:
            if expanded is None:
                continue
            if id(expanded) not in made:
                made[id(expanded)] = self.media(expanded)
            length = int(np.count_nonzero(batch.segments[row] == batch.segments[row, start]))
            media.put(made[id(expanded)].part(0, length), row, slice(start, start + length))
        # ids at these places may lie outside the vocabulary
        tokens = np.where(media.index >= 0, 0, batch.tokens)
        return batch.replace(tokens=tokens.astype(np.int32), media=media)

    def tower_inputs(self, batch: Batch) -> list[PaddedInputs] | None:
        """Returns the inputs of the items that this batch shows, for an update that trains towers;
        None: the stage trains none."""
        if self.inputs is None:
            return None
        assert batch.media is not None
        used = set(np.unique(batch.media.index).tolist())
        shown = {item: each for item, each in self.inputs.items() if self.first[item] in used}
        return self.encoder.padded(shown, self.first, len(self.table.rows), round_up=True)


@dataclass
class MediaTables:
    """Makes the tables of a run.

    loader: decodes the contents. M: rows of every table. trained: whether the current stage trains
    a tower. sizes: kinds and shapes of the items of the run. block: problems of an evaluation that
    are completed at once.

    `forget` drops the last table after an update that changes the towers; `start_stage` drops it
    where the training of towers begins or ends, since the tables of such stages alone hold
    `inputs`.
    """

    encoder: MediaEncoder
    loader: Loader
    M: int
    trained: bool = False
    sizes: Collection[tuple[Kind, tuple[int, int]]] = ()
    block: int = 1
    _last: StepTable | None = None
    _counts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_blocks(
        cls, graph: Graph, processors: Processors, blocks: Iterable[Sequence[EncodedRow]]
    ) -> MediaTables:
        """Returns what makes the tables of blocks of rows of data, each with a table of its own."""
        M = max(table_rows([expanded_of(row) for row in block], len(block)) for block in blocks)
        return cls(MediaEncoder(graph), Loader(processors), M)

    def start_stage(self, trained: bool) -> None:
        """Goes on to the next stage. trained: whether it trains a tower."""
        if trained != self.trained:
            self._last = None
        self.trained = trained

    def of(
        self,
        params: Mapping[str, jax.Array],
        expanded: Sequence[Expanded | None],
        *,
        again: bool = False,
    ) -> StepTable:
        """Returns the table of the items of these prompts or conversations. again: the metrics have
        counted them before.

        Raises DataError for a content that cannot be decoded.
        """
        shown = [each for each in expanded if each is not None]
        counted = [] if again else shown
        items = dict.fromkeys(item for each in shown for item in each.items)
        starts = np.cumsum([0, *(item.rows for item in items)]).tolist()
        # writes beyond the last row would be dropped without a word
        assert starts[-1] <= self.M, f"{starts[-1]} rows in a table of {self.M}"
        first = dict(zip(items, starts, strict=False))
        if self._last is not None and self._last.first == first:
            self._count(counted, 0, 0.0, 0.0)
            return self._last
        known = {} if self._last is None else self._last.first
        new = [item for item in items if item not in known]
        loaded, waited = self._load(shown, items if self.trained else new)
        began = perf_counter()
        table = self._copied([item for item in items if item in known], first)
        padded = self.encoder.padded({item: loaded[item] for item in new}, first, self.M)
        table = jax.block_until_ready(self.encoder.write(params, table, padded))
        self._count(counted, len(new), perf_counter() - began, waited)
        self._last = StepTable(table, first, self.encoder, loaded if self.trained else None)
        return self._last

    def with_weights(
        self, params: Mapping[str, jax.Array], table: StepTable | None
    ) -> MediaTable | None:
        """Returns the table of the same items for `params`: encoded again if the stage trains a
        tower, else the table as it is. None: there is no table."""
        if table is None or table.inputs is None:
            return table and table.table
        padded = self.encoder.padded(table.inputs, table.first, self.M)
        return self.encoder.write(params, self.encoder.empty(self.M), padded)

    def compile_ahead(self, params: Mapping[str, jax.Array]) -> int:
        """Compiles the programs that encode the items of the run. Returns their number."""
        sizes: set[tuple[Kind, int]] = {
            (kind, self.encoder.spec(kind).padded_inputs(math.prod(shape)))
            for kind, shape in self.sizes
        }
        return self.encoder.compile_ahead(params, sizes, self.M)

    def prefetch(self, rows: Iterable[EncodedRow]) -> None:
        """Starts to decode the contents of these rows of data, the first ones first."""
        shown = [each for row in rows for each in expanded_of(row)]
        self.loader.prefetch([reference for each in shown for reference in each.references])

    def forget(self) -> None:
        """Drops the last table after an update, if it changed the towers."""
        if self.trained:
            self._last = None

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        counts = self._counts
        self._counts = {}
        if not counts:
            return {}
        distinct = counts.pop("distinct")
        pictures = counts["media/pictures"]
        return counts | {"media/distinct": distinct / pictures if pictures else 1.0}

    def _load(
        self, shown: Sequence[Expanded], items: Iterable[Item]
    ) -> tuple[dict[Item, np.ndarray], float]:
        contents = {item.content for item in items}
        references = {
            (reference.kind, reference.digest): reference
            for each in shown
            for reference in each.references
            if (reference.kind, reference.digest) in contents
        }
        waited = self.loader.waited
        try:
            inputs = self.loader.inputs(list(references.values())) if references else {}
        except ValueError as error:  # a MediaError, which names file and row
            raise DataError(str(error)) from None
        return inputs, self.loader.waited - waited

    def _copied(self, kept: Sequence[Item], first: Mapping[Item, int]) -> MediaTable:
        """Returns a new table with the rows of items that the last one holds."""
        if not kept:
            return self.encoder.empty(self.M)
        assert self._last is not None
        sources = np.full(self.M, -1, np.int32)
        for item in kept:
            start = self._last.first[item]
            sources[first[item] : first[item] + item.rows] = np.arange(start, start + item.rows)
        return self.encoder.copied(self._last.table, sources)

    def _count(
        self, shown: Sequence[Expanded], encoded: int, seconds: float, waited: float
    ) -> None:
        items = [item for each in shown for item in each.items]
        added = {
            "media/pictures": len(items),
            "media/rows": sum(item.rows for item in items),
            "distinct": len(set(items)),
            "media/encoded": encoded,
            "media/encode_seconds": seconds,
            "media/wait_seconds": waited,
        }
        for name, number in added.items():
            self._counts[name] = self._counts.get(name, 0.0) + number


def _rows_of(items: Iterable[Item]) -> int:
    return sum(item.rows for item in items)


def _power_of_2(rows: int) -> int:
    """Returns the smallest power of 2 that is not less than `rows`, and 0 for 0."""
    return 1 << (rows - 1).bit_length() if rows else 0


def _positions(segments_NT: np.ndarray) -> np.ndarray:
    """Returns the position of each token in its sequence, int32[N, T]."""
    columns = np.broadcast_to(np.arange(segments_NT.shape[1], dtype=np.int32), segments_NT.shape)
    begins = np.diff(segments_NT, axis=1, prepend=-1) != 0
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
