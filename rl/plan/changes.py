"""Lists settings that make a run smaller, as overrides of a command line. Imports no jax."""

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
from policy.json_types import JsonValue
from rl.config.run import RunConfig
from rl.config.stage import BY_MATRIX

REMAT = ("none", "minimal", "save_qkv_proj", "full")
"""Remat policies, from the one that keeps most for the backward pass to the one that keeps
least."""
_HEADS = ("heads", "kv_heads", "key_heads", "value_heads")


@dataclass(frozen=True)
class SettingsChange:
    """Settings by dotted key. results: whether they change what the run computes beyond
    rounding."""

    settings: dict[str, JsonValue]
    results: bool = False

    def __str__(self) -> str:
        """Writes the settings as overrides of a command line."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.settings.items())

    def __or__(self, other: SettingsChange) -> SettingsChange:
        return SettingsChange(self.settings | other.settings, self.results or other.results)

    def of(self, config: RunConfig) -> RunConfig | None:
        """Applies the settings to a configuration. Returns None if a value is not valid there."""
        values = config.model_dump(mode="json")
        for key, value in self.settings.items():
            *path, last = key.split(".")
            node: Any = values
            for part in path:
                node = node[int(part) if isinstance(node, list) else part]
            node[last] = value
        try:
            return RunConfig.model_validate(values)
        except ValidationError:
            return None


def possible(config: RunConfig) -> bool:
    """Returns whether a configuration passes all checks. Reads the model's files, which takes
    milliseconds."""
    from rl.run import checks

    return not checks.faults(config)


def _text(value: JsonValue) -> str:
    if isinstance(value, dict):
        return shlex.quote(
            "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
        )
    return value if isinstance(value, str) else json.dumps(value)


def knobs(config: RunConfig, meshes: list[dict[str, int]]) -> list[list[SettingsChange]]:
    """Lists settings that reduce memory, each with its values from the smallest change to the
    largest.

    Settings that change results come last. meshes: other meshes of the same number of devices.
    """
    micro = _micro(config)
    choices = [
        [
            SettingsChange({f"stages.{i}.micro_batch": max(1, rows // 2**n) for i, rows in micro})
            for n in _halvings(micro)
        ]
    ]
    choices.append(_remat(config))
    if any(stage.trains_on_rollouts for stage in rl.stages.create(config)):
        for key in ("slots", "prefill_chunk"):
            value = getattr(config.generator, key)
            choices.append(
                [
                    SettingsChange({f"generator.{key}": value // 2**n})
                    for n in (1, 2, 3)
                    if value // 2**n
                ]
            )
    choices.append(_moments(config))
    if not config.model.host_parameters and config.model.remat != "none":
        choices.append([SettingsChange({"model.host_parameters": True})])
    choices.append(
        [SettingsChange({f"mesh.{axis}": size for axis, size in mesh.items()}) for mesh in meshes]
    )
    if config.model.param_dtype == "float32":
        choices.append([SettingsChange({"model.param_dtype": "bfloat16"}, results=True)])
    lengths = [config.max_length // 2**n for n in range(1, config.max_length.bit_length() - 1)]
    return [*choices, [SettingsChange({"max_length": length}, results=True) for length in lengths]]


def together(most_aggressive: list[SettingsChange]) -> list[SettingsChange]:
    """Combines the first two of these changes, the first three, and so on."""
    return list(accumulate(most_aggressive, SettingsChange.__or__))[1:]


def meshes(config: RunConfig, devices: int, divisors: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yields the sizes of all mesh axes for the devices of one slice.

    `data` and `context` keep their sizes, where -1 counts as 1. `tensor` and `expert` divide
    `divisors`, and `fsdp` takes the remaining devices.
    """
    data = max(1, config.mesh.data)
    context = max(1, config.mesh.context)
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
    """Returns the numbers that the axes `tensor` (heads of every layer) and `expert` (experts) have
    to divide."""
    from rl.run import checks

    decoder = checks.decoder_of(config.model)
    assert decoder is not None, "the checks of the configuration have read the decoder"
    mixers = [mixer for spec in decoder.layers for mixer in spec.mixers]
    heads = [getattr(mixer, name, 0) for mixer in mixers for name in _HEADS]
    experts = [spec.moe.router.experts for spec in decoder.layers if spec.moe]
    return {"tensor": math.gcd(*heads) or 1, "expert": math.gcd(*experts) or 1}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _micro(config: RunConfig) -> list[tuple[int, int]]:
    """Lists (number of the stage, rows of a micro-batch) for each stage."""
    rows = [stage.rows_per_update for stage in rl.stages.create(config)]
    return [
        (i, min(stage.micro_batch or rows[i], rows[i])) for i, stage in enumerate(config.stages)
    ]


def _halvings(micro: list[tuple[int, int]]) -> range:
    return range(1, max(rows for _, rows in micro).bit_length())


def _remat(config: RunConfig) -> list[SettingsChange]:
    now = config.model.remat
    choices = []
    if now in REMAT:
        choices = [SettingsChange({"model.remat": name}) for name in REMAT[REMAT.index(now) + 1 :]]
    elif now != "custom":
        choices = [SettingsChange({"model.remat": "full"})]
    if now != "custom":
        choices.append(
            SettingsChange(
                {"model.remat": "custom", "model.remat_tensors": {"decoder_layer_input": "offload"}}
            )
        )
    return choices


def _moments(config: RunConfig) -> list[SettingsChange]:
    parts = [
        (i, name) for i, stage in enumerate(rl.stages.create(config)) for name in stage.optimizers
    ]
    here = [
        f"stages.{i}.{name}.host_memory"
        for i, name in parts
        if not getattr(config.stages[i], name).host_memory
        and getattr(config.stages[i], name).name not in BY_MATRIX
    ]
    return [SettingsChange(dict.fromkeys(here, True))] if here else []
