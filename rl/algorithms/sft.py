"""Supervised fine-tuning: the mean negative log-probability of the tokens of demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs


@algorithm_options()
class Algorithm(Supervised):
    """nll: -logp; dft: -p logp with a constant weight p, so improbable tokens count less
    (arXiv:2508.05629)."""

    name: ClassVar[str] = "sft"

    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="nll, or dft: weighted by the token's own probability"
    )
    train_on: Literal["assistant", "last_turn", "all"] = Field(
        "assistant",
        description="which tokens: what the assistant writes, and of a plain row the completion; "
        "of a conversation its last turn only; prompts too",
    )

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean over the tokens of the mini-batch, and metrics. Only logp and mask are
        needed."""
        from rl.algorithms._losses import supervised_loss

        return supervised_loss(self.loss_type, inputs)
