"""Supervised fine-tuning: the mean negative log-probability of the demonstrations' tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised


@algorithm_options()
class Algorithm(Supervised):
    """nll: -logp; dft: -p logp with p a constant weight: less is learnt from what is improbable (arXiv:2508.05629)."""

    name: ClassVar[str] = "sft"

    loss_type: Literal["nll", "dft"] = Field("nll", description="nll, or dft: weighted by the token's own probability")
    train_on: Literal["assistant", "last_turn", "all"] = Field(
        "assistant",
        description="which tokens: what the assistant writes, and of a plain row the completion; of a conversation its last turn "
        "only; prompts too",
    )

    def loss(self, inputs):
        """Mean over the tokens of the whole optimiser batch, and metrics; of `inputs` only logp and mask are needed."""
        from rl.algorithms._losses import supervised_loss

        return supervised_loss(self, inputs)
