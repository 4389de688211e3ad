"""Selects the weights that a stage trains.

All other weights stay bit-identical: no gradient, no weight decay, no moments, no bias update. An
array of which only some layers or experts are frozen has a gradient and moments; the gradient and
the change are 0 there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rl.algorithms
from policy import families
from policy.config import Runtime
from policy.fields.stored_names import prefixes
from policy.huggingface.model_directory import places
from policy.layers.layer_embeddings import TABLE
from policy.media import TOWERS, is_tower
from policy.model import Graph
from policy.ops.host_memory import on_a_device
from rewards.suggest import nearest
from rl.config.stage import StageOptions
from rl.data.towers import names_tower
from rl.errors import ConfigError
from rl.training.critic import Critic
from rl.training.weights import LearningModel, WeightGroup, group_of

INDEXER = ".indexer."
"""Is part of the path of every weight of a key indexer (policy/attention/indexer.py)."""


@dataclass(frozen=True)
class Frozen:
    """The weights that a stage does not train.

    paths: of full arrays. parts: of further arrays, by path, which entries along the first axes are
    frozen: bool[layers], bool[layers, experts] or bool[experts].
    """

    paths: frozenset[str] = frozenset()
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    def filled(
        self, arrays: Mapping[str, jax.Array], values: float | Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns arrays by path with other values in the frozen parts: a number, or those of other
        arrays by path."""

        def fill(path: str, array: jax.Array) -> jax.Array:
            part = self.parts[path]
            mask = part.reshape(part.shape + (1,) * (array.ndim - part.ndim))
            value = values[path] if isinstance(values, Mapping) else values
            return jnp.where(mask, jnp.asarray(value, array.dtype), array)

        return {
            path: fill(path, array) if path in self.parts else array
            for path, array in arrays.items()
        }

    def without_changes(
        self, transform: optax.GradientTransformationExtraArgs
    ) -> optax.GradientTransformationExtraArgs:
        """Returns an optimizer whose steps leave the frozen parts as they are, as weight decay
        would not."""
        if not self.parts:
            return transform

        def update(grads, state, weights=None, **more):
            changes, state = transform.update(grads, state, weights, **more)
            return self.filled(
                cast(Any, changes), -0.0
            ), state  # 0 + -0.0 is 0, and -0.0 + -0.0 is -0.0

        return optax.GradientTransformationExtraArgs(transform.init, cast(Any, update))

    def note(self, moments: optax.OptState) -> str | None:
        """Returns a line of a plan about the parts; None: there are none.

        moments: the state of the optimizer, as shapes with their shardings.
        """
        if not self.parts:
            return None
        spent = 0.0
        for keys, moment in jax.tree_util.tree_leaves_with_path(moments):
            path = next((k.key for k in keys if isinstance(k, jax.tree_util.DictKey)), "")
            if path in self.parts:
                spent += on_a_device(moment) * self.parts[path].mean()
        return (
            f"freeze takes parts of {len(self.parts)} stacked arrays, such as "
            f"{_counted(self, next(iter(self.parts)))}: their gradient is 0 there, and "
            f"{spent / 2**20:.1f} MiB of moments per device stay for these parts"
        )


NOTHING = Frozen()


def _counted(frozen: Frozen, path: str) -> str:
    part = frozen.parts[path]
    return f"{int(part.sum())} of the {part.size} tensors of {path}"


def is_named(path: str, name: str) -> bool:
    """Whether `name` names the weight at `path`: it is the path, or parts at its beginning."""
    return path == name or path.startswith(f"{name}.")


def trained_paths(
    paths: Iterable[str], runtime: Runtime, frozen: Frozen = NOTHING
) -> frozenset[str]:
    """Returns the paths of the weights that are trained.

    Indexers and prediction modules are trained only by their own losses, so without these losses
    they stay as they are. During dense warm-up only indexers are trained. The table of the
    embeddings for each layer is trained if the runtime says so. frozen: what the stage does not
    train besides; arrays of which it freezes parts are trained.
    """

    def is_trained(path: str) -> bool:
        if group_of(path) is WeightGroup.PREDICTION_MODULES and runtime.mtp is None:
            return False
        if path == TABLE and not runtime.train_layer_embeddings:
            return False
        if path in frozen.paths:
            return False
        return runtime.indexer != ("off" if INDEXER in path else "dense_warmup")

    return frozenset(filter(is_trained, paths))


def frozen_weights(model: LearningModel, stage: StageOptions) -> Frozen:
    """Returns the weights of a model that a stage does not train.

    Weights can be frozen in a policy, and in the trunk of a reward model, which starts as a copy of
    the policy; a critic and projections of features learn in full. Names that no weight has mean
    nothing here: `check_freeze` refuses them.
    """
    if isinstance(model, Graph):
        return _frozen(model, TOWERS if stage.freeze is None else stage.freeze)
    if isinstance(model, Critic) and _trains_reward_model(stage):
        return _frozen(model.trunk, stage.freeze or ())
    return NOTHING


def _trains_reward_model(stage: StageOptions) -> bool:
    options = stage.algorithm.model_extra or {}
    return rl.algorithms.get(stage.algorithm.name, **options).stage == "reward_model"


def _frozen(graph: Graph, names: Sequence[str]) -> Frozen:
    paths: set[str] = set()
    parts: dict[str, np.ndarray] = {}
    for name in names:
        named = {path for path in graph.paths if is_named(path, name)}
        paths |= named
        if named:
            continue
        matches = _matcher(name)
        for tensor in _tensors(graph):
            if not any(map(matches, tensor.names)):
                continue
            size = graph.shapes[tensor.path].shape[: len(tensor.index)]
            parts.setdefault(tensor.path, np.zeros(size, bool))[tensor.index] = True
    full = {path for path, part in parts.items() if part.all()}
    paths |= full
    return Frozen(
        frozenset(paths), {path: part for path, part in parts.items() if path not in paths}
    )


def _matcher(name: str) -> Callable[[str], Any]:
    """Returns a function that tells whether an entry of `freeze` matches a stored name: one of
    letters, digits, _ and dots is some of its words, any other a regular expression that is
    searched in it."""
    if re.fullmatch(r"[\w.]+", name):
        words = re.escape(name.strip("."))
        return re.compile(rf"(?:^|\.){words}(?:\.|$)").search
    return re.compile(name).search


class _Tensor(NamedTuple):
    """A tensor of a file: the path of our weight, where it stands along its first axes, and the
    names that files may have for it."""

    path: str
    index: tuple[int, ...]
    names: list[str]


def _tensors(graph: Graph) -> Iterator[_Tensor]:
    """Yields the tensors that the weights of a graph are stored in. One that holds several weights
    occurs for each, the shards of a table are one."""
    family = families.get(graph.config.family)
    # Files of some multimodal models have the head in the language model, others outside of it.
    has_head = any(ours == "lm_head." for ours, _ in getattr(family, "MULTIMODAL", ()))
    pairs = [pair for pair in prefixes(family) if has_head or pair[1] != "lm_head."]
    for weight in places(graph):
        spellings = (weight.stored, *weight.stored.also)
        numbered = any(each.numbered for each in spellings)
        layers = (None,) if weight.layers is None else weight.layers
        numbers = graph.shapes[weight.path].shape[weight.layers is not None] if numbered else 1
        for row, layer in enumerate(layers):
            for number in range(numbers):
                index = (row,) * (weight.layers is not None) + (number,) * numbered
                names = [
                    spelled
                    for each in spellings
                    for spelled in _spelled(weight.name(each, layer, number), pairs)
                ]
                yield _Tensor(weight.path, index, names)


def _spelled(name: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a name of the tables, and the same with the prefixes that files may have."""
    return [
        name,
        *(stored + name.removeprefix(ours) for stored, ours in pairs if name.startswith(ours)),
    ]


def check_freeze(graph: Graph, stages: Sequence[StageOptions]) -> Graph:
    """Returns the graph, of the policy. Raises ConfigError for a name in `freeze` that no weight of
    the trained model has, if nothing is left to train, and for parts of arrays in host memory.
    Names of weights of towers go with a model that was built without towers, for rows of text, and
    with a reward model, which has none."""
    has_towers = any(map(is_tower, graph.paths))
    for number, stage in enumerate(stages):
        where = f"stages.{number}.freeze"
        scores = bool(stage.freeze) and _trains_reward_model(stage)
        model = Critic(graph) if scores else graph
        trunk = model.trunk
        for name in stage.freeze or ():
            absent = names_tower(name) and (scores or not has_towers)
            if absent or _has_weights(_frozen(trunk, [name])):
                continue
            if _has_weights(_frozen(graph, [name])):
                raise ConfigError(
                    f"{where}: {name!r} is no part of a reward model, which has neither output "
                    "head nor prediction modules; leave it out"
                )
            raise ConfigError(
                f"{where}: the path of no weight begins with {name!r}, and no stored name has "
                f"it{nearest(name.replace(chr(92), ''), _valid_names(trunk))}"
            )
        frozen = frozen_weights(model, stage)
        if not trained_paths(model.axes, replace(graph.runtime, **stage.runtime), frozen):
            raise ConfigError(f"{where}: no weight is left to train; name fewer parts")
        in_host_memory = trunk.hosted - trunk.host_tables or stage.optimizer.host_memory
        refused = [path for path in frozen.parts if in_host_memory or path in trunk.host_tables]
        if refused:
            raise ConfigError(
                f"{where}: takes {_counted(frozen, refused[0])}, whose weights or moments are in "
                "host memory; there freeze takes all of an array, or nothing of it"
            )
    return graph


def _has_weights(frozen: Frozen) -> bool:
    return bool(frozen.paths or frozen.parts)


def _valid_names(graph: Graph) -> set[str]:
    """Returns the beginnings of paths, and the stored names, of the first of several experts."""
    valid = set()
    for path in graph.paths:
        words = path.split(".")
        valid |= {".".join(words[:n]) for n in range(1, len(words) + 1)}
    for weight in places(graph):
        for layer in weight.layers or (None,):
            valid.add(weight.name(weight.stored, layer))
    return valid
