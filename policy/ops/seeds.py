"""The seeds that random draws can have."""

from __future__ import annotations

SEEDS = 2**32
"""Number of seeds, from 0. jax takes a larger one modulo this number, so that two seeds would draw
the same."""


def checked_seed(seed: int) -> int:
    """Returns the seed. Raises ValueError if it is none of 0 to SEEDS - 1."""
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed {seed}: a seed is a number from 0 to {SEEDS - 1}")
    return seed
