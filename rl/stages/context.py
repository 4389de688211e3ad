"""Objects that a run shares with its stages: the model, the generator, the events and the progress
of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl.errors import ModelError

if TYPE_CHECKING:
    from policy.model import Model
    from rl.config.run import RunConfig
    from rl.records.events import Events
    from rl.records.timeline import Timeline
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt, MediaTables, StepTable
    from rollout import Generator
    from rollout.media.expand import Expanded


# Fields of Progress with another name in the files of checkpoints.
_JSON_KEYS = {"next_prompt_id": "prompts", "examples_drawn": "drawn", "adaptive_coefs": "controls"}
# Fields that the JSON of a checkpoint may lack, with their values then.
_ADDED: dict[str, Any] = {"unscored_steps": 0, "packed_rows": {}}


@dataclass
class Progress:
    """The part of a checkpoint that holds no arrays.

    Two fields belong to the run:

    - next_prompt_id: the id of the next prompt that a step samples. Ids count from 0 through all
      stages, so that no two prompts of a run have the same random draws.
    - version: number of updates that the policy has seen. Groups and tokens carry the version that
      sampled them.

    The other fields belong to the stage:

    - examples_drawn: how many examples of its shuffled data it has taken. The order goes on from
      here.
    - producer: state of what chooses rows and makes groups, as values that JSON can hold:
      `carried`, the groups that dynamic sampling (DAPO) has sampled beyond the need of a step;
      `steps_taken` of recorded samples; `curriculum`, the state of a curriculum. Of the checkpoint
      that was read or is to be written (`StageKind.producer_state`).
    - adaptive_coefs: scalars that the algorithm adapts from update to update.
    - unscored_steps: how many steps in a row, up to the last one, had no completion with a score
      (`rewards.unscored_steps`).
    - packed_rows: the `RowHistory` of its updates, as values that JSON can hold: of the checkpoint
      that was read or is to be written.
    """

    next_prompt_id: int = 0
    version: int = 0
    examples_drawn: int = 0
    producer: dict[str, Any] = field(default_factory=dict)
    adaptive_coefs: dict[str, float] = field(default_factory=dict)
    unscored_steps: int = 0
    packed_rows: dict[str, Any] = field(default_factory=dict)

    def start_stage(self, coefs: dict[str, float]) -> None:
        """Resets the fields of the stage. `coefs`: initial `adaptive_coefs`."""
        self.examples_drawn = 0
        self.producer = {}
        self.adaptive_coefs = dict(coefs)
        self.unscored_steps = 0
        self.packed_rows = {}

    def to_json(self) -> dict:
        """Returns the progress as values that JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {_JSON_KEYS.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict | None, place: str = "the newest checkpoint") -> Progress:
        """Reads the output of `to_json`, also that of a version whose only state of a producer was
        `carried`. Raises ModelError, which names the place, for values that another version of Duet
        wrote."""
        names = cls().to_json().keys()
        values = None if values is None else _ADDED | values
        if values is not None and "carried" in values and "producer" not in values:
            values["producer"] = {"carried": values.pop("carried")}
        if values is None or values.keys() != names:
            stored = "nothing" if values is None else ", ".join(values)
            raise ModelError(
                f"{place} was written by another version of Duet: of the run's progress it holds "
                f"{stored}, where this version reads "
                f"{', '.join(sorted(names))}. Continue the run with that version, or start a new "
                "one in another run.dir"
            )
        fields: dict[str, Any] = dict(values)
        for name, key in _JSON_KEYS.items():
            fields[name] = fields.pop(key)
        return cls(**fields)


@dataclass
class Context:
    """The objects that the stages of a run share.

    common_folder: whether all processes see the folder of the run.
    """

    config: RunConfig
    tokenizer: Any
    stop_ids: tuple[int, ...]
    model: Model
    generator: Generator
    events: Events
    progress: Progress
    timeline: Timeline
    tables: MediaTables | None  # None: no row of the run has pictures or sounds
    common_folder: bool = field(default=True, kw_only=True)

    def media_table(
        self, expanded: Sequence[Expanded | None], *, counted: bool = True, again: bool = False
    ) -> StepTable:
        """Returns the table of the items of these prompts, by the current weights.

        counted: False, for probes and evaluations, drops the metrics since the last step, with
        those of this call. again: the metrics of the step have them already, so only the
        encoding is counted. Raises DataError for a content that cannot be decoded.
        """
        assert self.tables is not None, (
            "the stage asks for a table only if the run has pictures or sounds"
        )
        with self.timeline.span("pictures and sounds"):
            table = self.tables.of(self.model.params, expanded, again=again)
        if not counted:
            self.tables.metrics()
        return table

    def with_media(self, batch: Batch, shown: ExpandedAt) -> tuple[Batch, StepTable | None]:
        """Returns (the batch with the places of its pictures and sounds, their table). In a run of
        text the batch is as it was and the table None.

        Raises DataError for a content that cannot be decoded.
        """
        if self.tables is None:
            return batch, None
        table = self.media_table([expanded for _, _, expanded in shown])
        return table.add(batch, shown), table

    @contextmanager
    def resharded(self) -> Iterator[dict[str, float]]:
        """Keeps the weights in the layout of `generator.rules` while rollouts read them, and gives
        up all copies of weights afterwards. Yields metrics of the copy."""
        metrics = {}
        if self.config.generator.rules is not None:
            with self.timeline.span("laying out weights") as span:
                self.generator.reshard_for_rollout()
            metrics["time/sync"] = span.seconds
        try:
            yield metrics
        finally:
            self.generator.release()
