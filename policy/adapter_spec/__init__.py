"""What an adapter of low rank is, as data: rank, scale and the weights that it adapts. Free of
jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from policy.options import option

AllLinear = Literal["all-linear"]
FULL_TRAINING_RATE = 1e-5
"""A learning rate up to which an optimizer that moves a weight by about the rate usually trains all
weights; adapters take about 10 times as much (docs/adapters.md)."""

LORA_A = ".lora_a"
LORA_B = ".lora_b"
MAGNITUDE = ".magnitude"
"""End the paths of the arrays of an adapter, after the path of the weight that they adapt."""
DORA_SCALE = ".dora_scale"
"""Ends the path of DoRA's m / |W + scale B A| (`Adapted.dora_scale`), where a program computes it
once for many calls."""


@dataclass(frozen=True)
class AdaptedWeight:
    """An adapted weight of a decoder.

    path: of the weight. rank: of its factors. repeats: the repeats of its stack that have the
    adapter, while both factors of the others stay 0; None: all of them have it, or the weight is in
    no stack.
    """

    path: str
    rank: int
    repeats: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """Factors A and B of rank `rank` for each adapted weight W: the product reads W + scale B A
    (LoRA, arXiv 2106.09685), or with `dora` that sum with its outputs scaled to trained lengths
    (DoRA, arXiv 2402.09353).

    adapted: the weights of one decoder that have the adapter, which follow from the options and the
    names of its weights (policy/huggingface/peft/targets.py); empty until they are known.
    """

    rank: int = option(32, ge=1, description="rank of the factors")
    alpha: float = option(
        32.0,
        gt=0,
        description="the product of the factors is multiplied by alpha / rank",
    )
    targets: AllLinear | tuple[str, ...] = option(
        "all-linear",
        description="adapted weights: all-linear (attention and other mixers, dense, shared and "
        "routed experts), or regular expressions over stored module names, such as q_proj, "
        "matched with a full name or with its end after a dot",
    )
    exclude: tuple[str, ...] = option(
        (), description="regular expressions, as those of targets, of modules to leave out"
    )
    experts: Literal["each", "shared", "none"] = option(
        "each",
        description="routed experts: factors for each, or with the factor on the hidden size "
        "shared by all, or no adapter",
    )
    expert_rank: int | None = option(
        None,
        ge=1,
        description="rank of the factors of routed experts; null: rank divided by the experts "
        "that a token chooses, at least 1",
    )
    rank_stabilised: bool = option(
        False, description="multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)"
    )
    dora: bool = option(False, description="learn the length of each output's weights (DoRA)")
    train: tuple[str, ...] = option(
        (), description="paths of weights that are trained in full (PEFT's modules_to_save)"
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", description="number format of the factors"
    )
    adapted: tuple[AdaptedWeight, ...] = ()

    @property
    def scale(self) -> float:
        """The factor of B A, one for all adapted weights."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)
