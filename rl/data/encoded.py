"""Defines rows of data as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl.data.datasets import Example

Row = tuple[list[int], list[int]]  # token ids of a sequence, and 1 where a token is trained on


@dataclass(frozen=True)
class Problem:
    """An example with its prompt as token ids."""

    example: Example
    ids: list[int]


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt as token ids, each after the prompt.

    Like a sampled completion, an answer ends with the last token that the assistant writes.
    """

    chosen: Row
    rejected: Row
    margin: float
