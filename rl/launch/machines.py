"""Reads `--topology` of `rl launch`: the slices, hosts and chips of a run, and their names at the
clouds.

Topologies and machine types of TPUs: Google's pages "Plan TPUs in GKE" and those of each version of
Cloud TPU. Labels of GPUs: "GPU platforms" of Compute Engine, and SkyPilot's catalog.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rewards.suggest import nearest
from rl.errors import ConfigError

HOW = (
    "give KIND:AxB or KIND:AxBxC (v5e:4x4, v6e:2x4, v4:2x2x2, v5p:4x8x8, tpu7x:2x2x1), "
    "2xKIND:... for two slices, h100:8 for a host with 8 GPUs, 4xh100:8 for four hosts, or cpu:8"
)

_SIDE = 64
"""Cubes along a side of the longest slice."""
_NAMED = 6144
"""Chips of the largest slice whose name stands for the topology nearest to a cube."""


@dataclass(frozen=True)
class TpuKind:
    """A version of TPUs.

    gke: value of the node label gke-tpu-accelerator. prefix, per_chip: a slice is named
    PREFIX-NUMBER; NUMBER is chips x per_chip. runtime: software version of a TPU VM; None: it comes
    with GKE only. cubes: 4x4x4 of the largest slice of three dimensions; 0: it has two.
    devices: devices of jax in a chip. sizes: numbers of chips for which the name of a slice stands
    for one of several topologies, that nearest to a cube; None: all up to 6144.
    """

    gke: str
    prefix: str
    per_chip: int
    runtime: str | None
    cubes: int = 0
    devices: int = 1
    sizes: tuple[int, ...] | None = None

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The topologies of a slice, with the smallest dimension first."""
        if not self.cubes:
            sides = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
            return list[tuple[int, ...]](sides)
        small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
        if self.prefix == "tpu7x":
            small = [(1, 1, 1), *small]
        cubes = range(1, self.cubes + 1)
        return [
            *small,
            *(
                (4 * a, 4 * b, 4 * c)
                for a in cubes
                for b in range(a, self.cubes // a + 1)
                for c in range(b, min(self.cubes // (a * b), _SIDE) + 1)
            ),
        ]


TPUS = {
    "v4": TpuKind(
        "tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base", 64, sizes=(256, 512, 768, 1024, 2048)
    ),
    "v5e": TpuKind("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": TpuKind("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5", cubes=140),
    "v6e": TpuKind("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
    "tpu7x": TpuKind("tpu7x", "tpu7x", 2, None, cubes=144, devices=2),
}


@dataclass(frozen=True)
class GpuKind:
    """A type of GPUs. gke: value of the node label gke-accelerator; None: GKE has none. sky,
    slurm: its names there; slurm None: the cluster has one type."""

    gke: str | None
    sky: str | None
    slurm: str | None


GPUS = {
    "a100": GpuKind("nvidia-tesla-a100", "A100", "a100"),
    "a100-80gb": GpuKind("nvidia-a100-80gb", "A100-80GB", "a100"),
    "h100": GpuKind("nvidia-h100-80gb", "H100", "h100"),
    "h100-mega": GpuKind("nvidia-h100-mega-80gb", "H100-MEGA", "h100"),
    "h200": GpuKind("nvidia-h200-141gb", "H200", "h200"),
    "b200": GpuKind("nvidia-b200", "B200", "b200"),
    "l4": GpuKind("nvidia-l4", "L4", "l4"),
    "l40s": GpuKind(None, "L40S", "l40s"),
    "gpu": GpuKind(None, None, None),
}


@dataclass(frozen=True)
class Machines:
    """The machines of a run.

    name: as the user gave it. hosts: of a slice; without TPUs there is one slice. chips: of a host,
    TPU chips, GPUs or cores. shape: topology of a slice, as the clouds write it; "" without TPUs.
    """

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    kind: str
    slices: int
    hosts: int
    chips: int
    shape: str = ""

    @classmethod
    def read(cls, name: str, chips_per_host: int | None = None) -> Machines:
        """Parses the name of a topology.

        chips_per_host: 4 or 8, where machines with both make a slice; None: 8 there.
        Raises ConfigError, with the nearest names.
        """
        match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][\w-]*):([1-9]\d*(?:x[1-9]\d*)*)", name)
        kind = match[2] if match else name.partition(":")[0]
        known = [*TPUS, *GPUS, "cpu"]
        if kind not in known:
            raise ConfigError(f"--topology {name}: no {kind} here{nearest(kind, known)}; {HOW}")
        if match is None:
            raise ConfigError(f"--topology {name}: no such topology; {HOW}")
        count = int(match[1] or 1)
        numbers = [int(number) for number in match[3].split("x")]
        if kind in TPUS:
            shape = _shape(name, kind, numbers)
            chips = _chips_of_host(name, kind, shape, chips_per_host)
            hosts = math.prod(shape) // chips
            return cls(name, "tpu", kind, count, hosts, chips, _text(shape))
        what, most = ("cores", 1024) if kind == "cpu" else ("GPUs", 16)
        if len(numbers) > 1 or numbers[0] > most:
            raise ConfigError(
                f"--topology {name}: a host has 1 to {most} {what}; {kind}:8 is one host, "
                f"2x{kind}:8 two"
            )
        if chips_per_host not in (None, numbers[0]):
            raise ConfigError(f"--chips-per-host {chips_per_host}: {name} says {numbers[0]}")
        return cls(name, "cpu" if kind == "cpu" else "gpu", kind, 1, count, numbers[0])

    @property
    def all_hosts(self) -> int:
        return self.slices * self.hosts

    @property
    def devices(self) -> int:
        """Devices of jax in a slice."""
        if self.platform == "cpu":
            return self.hosts
        return self.hosts * self.chips * (self.tpu.devices if self.platform == "tpu" else 1)

    @property
    def tpu(self) -> TpuKind:
        return TPUS[self.kind]

    @property
    def gpu(self) -> GpuKind:
        return GPUS[self.kind]

    @property
    def slice_name(self) -> str:
        """Name of a slice of TPUs at the clouds, such as v5p-128 or v5litepod-16. Two topologies
        with equal chips have the same."""
        return f"{self.tpu.prefix}-{self.hosts * self.chips * self.tpu.per_chip}"

    @property
    def is_usual(self) -> bool:
        """Whether the name of the slice stands for this topology."""
        chips = self.hosts * self.chips
        same = [shape for shape in self.tpu.shapes if math.prod(shape) == chips]
        sizes = self.tpu.sizes
        if len(same) > 1 and (chips > _NAMED if sizes is None else chips not in sizes):
            return False
        return self.shape == _text(min(same, key=lambda shape: (max(shape), -min(shape))))

    def described(self) -> str:
        """Returns the machines as text: `2 slices of 4 hosts with 4 chips`."""
        what = {"tpu": "chips", "gpu": "GPUs", "cpu": "cores"}[self.platform]
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)} with {self.chips} {what}"
        return f"{self.slices} slices of {hosts}" if self.slices > 1 else hosts


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _shape(name: str, kind: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the topology as the clouds write it: v5p:8x8x4 is v5p:4x8x8. Raises ConfigError."""
    by_sides = {tuple(sorted(shape)): shape for shape in TPUS[kind].shapes}
    shape = by_sides.get(tuple(sorted(numbers)))
    if shape is None:
        close = sorted(by_sides.values(), key=lambda each: _distance(each, numbers))[:3]
        names = ", ".join(f"{kind}:{_text(each)}" for each in close)
        raise ConfigError(f"--topology {name}: {kind} has no such slice (nearest: {names}); {HOW}")
    return shape


def _distance(shape: Sequence[int], numbers: Sequence[int]) -> float:
    """How far sides are from the given ones, on a scale of factors."""
    pairs = itertools.zip_longest(sorted(shape), sorted(numbers), fillvalue=1)
    return sum(abs(math.log(one / other)) for one, other in pairs)


def _chips_of_host(name: str, kind: str, shape: Sequence[int], asked: int | None) -> int:
    chips = math.prod(shape)
    possible = [min(chips, 4)]
    if not TPUS[kind].cubes and chips == 8:
        possible = [8, 4]
    if asked is not None and asked not in possible:
        raise ConfigError(
            f"--chips-per-host {asked}: hosts of {name} have "
            f"{' or '.join(map(str, possible))} chips"
        )
    return asked or possible[0]
