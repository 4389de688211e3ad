"""Settings that make a run smaller, and how they are written down. Free of jax."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

import rl.stages
from rl.config.run import RunConfig

REMAT = ("none", "minimal", "save_qkv_proj", "full")
"""From most to least that is kept for the backward pass."""
_HEADS = ("heads", "kv_heads", "key_heads", "value_heads")


@dataclass(frozen=True)
class Change:
    """`settings` by dotted key. `results`: whether the run then computes other numbers, more than in their last bits."""

    settings: dict[str, Any]
    results: bool = False

    def __str__(self) -> str:
        """As overrides of a command line."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.settings.items())

    def __or__(self, other: Change) -> Change:
        return Change(self.settings | other.settings, self.results or other.results)

    def of(self, config: RunConfig) -> RunConfig | None:
        """The configuration with it; None where a value cannot be."""
        values = config.model_dump(mode="json")
        for key, value in self.settings.items():
            *path, last = key.split(".")
            node = values
            for part in path:
                node = node[int(part) if isinstance(node, list) else part]
            node[last] = value
        try:
            return RunConfig.model_validate(values)
        except ValidationError:
            return None


def possible(config: RunConfig) -> bool:
    """Whether the settings of a configuration go together. Takes some milliseconds: it reads the model's files."""
    from rl.config import checks

    return not checks.problems(config)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return shlex.quote("{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}")
    return value if isinstance(value, str) else json.dumps(value)


def levers(config: RunConfig, meshes: list[dict[str, int]]) -> list[list[Change]]:
    """Settings that may make the run fit, each with its values from the smallest change to the largest; those that change results
    come last. `meshes`: others of as many devices."""
    micro = _micro(config)
    found = [[Change({f"stages.{i}.micro_batch": max(1, rows // 2**n) for i, rows in micro}) for n in _halvings(micro)]]
    found.append(_remat(config))
    if any(stage.samples for stage in rl.stages.create(config)):
        for key in ("slots", "prefill_chunk"):
            value = getattr(config.generator, key)
            found.append([Change({f"generator.{key}": value // 2**n}) for n in (1, 2, 3) if value // 2**n])
    found.append(_moments(config))
    if not config.model.host_parameters and config.model.remat != "none":
        found.append([Change({"model.host_parameters": True})])
    found.append([Change({f"mesh.{axis}": size for axis, size in mesh.items()}) for mesh in meshes])
    if config.model.param_dtype == "float32":
        found.append([Change({"model.param_dtype": "bfloat16"}, results=True)])
    lengths = [config.max_length // 2**n for n in range(1, config.max_length.bit_length() - 1)]
    return [*found, [Change({"max_length": length}, results=True) for length in lengths]]


def together(strongest: list[Change]) -> list[Change]:
    """The first two of these, the first three, and so on."""
    found = list(accumulate(strongest, Change.__or__))
    return found[1:]


def meshes(config: RunConfig, devices: int, divisors: dict[str, int]) -> Iterator[dict[str, int]]:
    """Sizes of all axes for so many devices, those of a slice: `data` and `context` as they are, `tensor` and `expert` such that
    they divide what they cut (`divisors`), and `fsdp` the rest. An axis that is -1 counts as 1."""
    data, context = max(1, config.mesh.data), max(1, config.mesh.context)
    left = devices // (data * context)
    for tensor in _divisors(math.gcd(left, divisors["tensor"])):
        for expert in _divisors(math.gcd(left // tensor, divisors["expert"])):
            yield {
                "data": data,
                "fsdp": left // (tensor * expert),
                "tensor": tensor,
                "expert": expert,
                "context": context,
            }


def divisors(config: RunConfig) -> dict[str, int]:
    """What sizes of the mesh axes `tensor` and `expert` have to divide: all numbers of heads, all numbers of experts."""
    from rl.config import checks

    decoder = checks.decoder_of(config.model)
    heads = [getattr(spec.mixer, name, 0) for spec in decoder.layers for name in _HEADS]
    experts = [spec.moe.router.experts for spec in decoder.layers if spec.moe]
    return {"tensor": math.gcd(*heads) or 1, "expert": math.gcd(*experts) or 1}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _micro(config: RunConfig) -> list[tuple[int, int]]:
    """(number, rows of a micro-batch) of each stage."""
    rows = [stage.rows_per_update for stage in rl.stages.create(config)]
    return [(i, min(stage.micro_batch or rows[i], rows[i])) for i, stage in enumerate(config.stages)]


def _halvings(micro: list[tuple[int, int]]) -> range:
    return range(1, max(rows for _, rows in micro).bit_length())


def _remat(config: RunConfig) -> list[Change]:
    now, found = config.model.remat, []
    if now in REMAT:
        found = [Change({"model.remat": name}) for name in REMAT[REMAT.index(now) + 1 :]]
    elif now != "custom":
        found = [Change({"model.remat": "full"})]
    if now != "custom":
        found.append(Change({"model.remat": "custom", "model.remat_tensors": {"decoder_layer_input": "offload"}}))
    return found


def _moments(config: RunConfig) -> list[Change]:
    parts = [(i, name) for i, stage in enumerate(rl.stages.create(config)) for name in stage.optimizers]
    here = [f"stages.{i}.{name}.host_memory" for i, name in parts if not getattr(config.stages[i], name).host_memory]
    return [Change(dict.fromkeys(here, True))] if here else []
