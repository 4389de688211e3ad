"""The names of the compiled programs of a run, in its plan and in programs.json.

Besides these, a plan has the programs of the generator by the names of
`rollout.engine.runner.ModelRunner.executables`, its checks (`rollout.engine.exact.CHECKS`), and one
program for each reward model (`rl.stages.scorers.program_name`).
"""

from __future__ import annotations

from enum import StrEnum


class ProgramName(StrEnum):
    """A compiled program of a run."""

    UPDATE = "update"
    CRITIC_UPDATE = "update of the critic"
    REWARD_MODEL_UPDATE = "update of the reward model"
    HELD_OUT = "held-out loss"
    LOGPROBS = "log-probabilities"
    VALUES = "values"
    ENCODING = "encode pictures and sounds"
    RESHARD = "reshard"
    QUANTISED_COPY = "quantised copy"
    DECODE = "decode a token"
    FURTHER_CHUNK = "prefill, further chunk"


UPDATES = frozenset(
    {ProgramName.UPDATE, ProgramName.CRITIC_UPDATE, ProgramName.REWARD_MODEL_UPDATE}
)
"""The programs with a gradient."""
GENERATOR = {"decode": ProgramName.DECODE, "extend": ProgramName.FURTHER_CHUNK}
"""Name of a generator program -> its name in a plan, where they differ."""
