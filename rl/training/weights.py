"""The weights of a stage, in named groups.

A group is a flat dict of arrays by path, or a part of the policy's dict. A program gets the groups
that learn in it, which it changes in place, and those that it only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import jax

from policy.cache.media import MediaTable
from policy.config import Runtime
from policy.media import is_tower
from policy.ops.parameter import MatrixDims

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from policy.model import Graph

Value = TypeVar("Value")
Params = dict[str, jax.Array]
_MODULES = "mtp."  # starts the paths of policy/heads/multi_token_prediction.py


class WeightGroup(StrEnum):
    """A named group of weights.

    POLICY: the decoder. TOWERS, PREDICTION_MODULES: parts of the policy, in the same dict and with
    its optimizer; the gradient of a tower goes through the table of its rows, and prediction
    modules may be clipped by a norm of their own. CRITIC: a value head, with the trunk that it may
    have. PROJECTIONS: maps of the policy's features to the width of a teacher. REWARD_MODEL: a
    trunk with a score head.

    The values of the groups with an optimizer of their own are names of fields of Weights and of
    the state of their trainer.
    """

    POLICY = "policy"
    TOWERS = "towers"
    PREDICTION_MODULES = "prediction modules"
    CRITIC = "critic"
    PROJECTIONS = "projections"
    REWARD_MODEL = "reward_model"

    @property
    def prefix(self) -> str:
        """Returns what the names of the metrics of its updates begin with. The group has an
        optimizer of its own."""
        return _PREFIXES[self]


_PREFIXES = {
    WeightGroup.POLICY: "",
    WeightGroup.REWARD_MODEL: "",
    WeightGroup.CRITIC: "value/",
    WeightGroup.PROJECTIONS: "distill/projections/",
}


def group_of(path: str) -> WeightGroup:
    """Returns the group of a weight of a policy: POLICY, TOWERS or PREDICTION_MODULES."""
    if path.startswith(_MODULES):
        return WeightGroup.PREDICTION_MODULES
    return WeightGroup.TOWERS if is_tower(path) else WeightGroup.POLICY


class LearningModel(Protocol):
    """A model whose weights an optimizer changes: the decoder of a policy (`Graph`), a critic or a
    reward model (`Critic`), projections of features (`FeatureProjections`)."""

    @property
    def axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each weight, by path. None: the axis has no name."""
        ...

    @property
    def matrices(self) -> Mapping[str, MatrixDims]:
        """Dimensions of the weights that products read, by path."""
        ...

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Dimensions of each weight, by path."""
        ...

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of each weight, by path."""
        ...

    @property
    def untrained(self) -> frozenset[str]:
        """Paths of arrays that never have a gradient, such as the selection biases of routers:
        what is added to the scores of experts when a router chooses, moved by their load alone."""
        ...

    @property
    def hosted(self) -> frozenset[str]:
        """Paths of weights in host memory, tables among them."""
        ...

    @property
    def host_tables(self) -> frozenset[str]:
        """Paths of tables in host memory, of which a pass reads a few rows."""
        ...

    @property
    def runtime(self) -> Runtime:
        """How its layers are computed, and in which dtype its weights are stored."""
        ...

    @property
    def trunk(self) -> Graph:
        """The decoder that its forward pass runs."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that a loss reads, in groups. An absent group is empty.

    policy, critic, projections, reward_model: as in WeightGroup. teacher: a frozen model, by its
    own paths; its arrays may be quantised. media_table: the rows of pictures and sounds of the
    batch, from frozen towers or from towers that this update trains; None without them.
    """

    policy: Params = field(default_factory=dict)
    critic: Params = field(default_factory=dict)
    projections: Params = field(default_factory=dict)
    reward_model: Params = field(default_factory=dict)
    teacher: Params = field(default_factory=dict)
    media_table: MediaTable | None = None

    def __getitem__(self, group: WeightGroup) -> Params:
        return getattr(self, group)

    def with_group(self, group: WeightGroup, params: Params) -> Weights:
        """Returns these weights with another group."""
        return replace(self, **{group.value: params})

    def __or__(self, other: Weights) -> Weights:
        """Returns the weights of both; where both have a path, the array of `other`."""
        groups = {
            each.name: getattr(self, each.name) | getattr(other, each.name)
            for each in fields(self)
            if each.name != "media_table"
        }
        media_table = self.media_table if other.media_table is None else other.media_table
        return Weights(**groups, media_table=media_table)


def split(
    params: Mapping[str, Value], paths: Iterable[str]
) -> tuple[dict[str, Value], dict[str, Value]]:
    """Returns (the arrays at these paths, the others)."""
    chosen = frozenset(paths)
    return (
        {path: array for path, array in params.items() if path in chosen},
        {path: array for path, array in params.items() if path not in chosen},
    )
