"""What the stages of a run share, and how far the run has come."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from policy.model import Model
from rl.config.run import RunConfig
from rl.data.prepare import Prepared
from rl.errors import ModelError
from rl.reporting.events import Events
from rl.reporting.timeline import Timeline
from rl.run.checkpoint import Checkpoints
from rl.run.folder import StopWish
from rl.stages.dynamic_sampling import Group
from rollout import Generator


@dataclass
class Progress:
    """What a checkpoint holds besides arrays. `prompts`: sampled so far in the run, the id of the next one; `version`: updates of
    the policy so far. Of the stage: `drawn`, prompts taken from its data; `carried`, groups sampled and not used yet; `controls`,
    what the algorithm moves from update to update."""

    prompts: int = 0
    version: int = 0
    drawn: int = 0
    carried: list[Group] = field(default_factory=list)
    controls: dict[str, float] = field(default_factory=dict)

    def start_stage(self, controls: dict[str, float]) -> None:
        self.drawn, self.carried, self.controls = 0, [], dict(controls)

    def plain(self) -> dict:
        """All of it as JSON can hold it."""
        return dataclasses.asdict(dataclasses.replace(self, carried=[])) | {
            "carried": [group.plain() for group in self.carried]
        }

    @classmethod
    def read(cls, plain: dict | None) -> Progress:
        """Raises ModelError for what another version of Duet wrote."""
        names = {each.name for each in dataclasses.fields(cls)}
        if plain is None or plain.keys() != names:
            found = "nothing" if plain is None else ", ".join(plain)
            raise ModelError(
                f"the newest checkpoint was written by another version of Duet: of the run's progress it holds {found}, where this "
                f"one wants {', '.join(sorted(names))}. Continue the run with that version, or start a new one in another run.dir"
            )
        return cls(**plain | {"carried": [Group.read(each) for each in plain["carried"]]})


@dataclass
class Run:
    """What the stages of a run share, and how far it has come."""

    config: RunConfig
    prepared: Prepared
    model: Model
    generator: Generator
    events: Events
    checkpoints: Checkpoints
    stop: StopWish
    progress: Progress
    timeline: Timeline
