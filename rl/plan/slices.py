"""Describes the devices of a plan: TPU slices that need not be present, CPU devices, or the GPUs of
this machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rl.errors import ConfigError, ResourceError

TPUS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
HOW = (
    "give KIND:AxB or KIND:AxBxC (v5p:8x8x4, v6e:4x4, v5e:4x4, v4:2x2x2, tpu7x:2x2x1), "
    "2xKIND:AxB for two slices, cpu:N, or gpu"
)


class PlannedDevice(Protocol):
    """A device of jax, as far as a plan reads it."""

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


@dataclass(frozen=True)
class Topology:
    """platform: tpu, cpu or gpu. name: as the user gave it. count: chips per slice; None: all GPUs
    of this machine."""

    platform: str
    name: str
    count: int | None
    slices: int = 1

    @classmethod
    def read(cls, name: str) -> Topology:
        """Parses the name of a topology. Raises ConfigError for an unknown one."""
        kind, _, shape = name.partition(":")
        if kind == "gpu" and not shape:
            return cls("gpu", name, None)
        if kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape):
            return cls("cpu", name, int(shape))
        match = re.fullmatch(
            rf"(?:([1-9]\d*)x)?({'|'.join(TPUS)}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name
        )
        if match:
            return cls("tpu", name, math.prod(map(int, match[3].split("x"))), int(match[1] or 1))
        raise ConfigError(f"--topology {name}: no such topology; {HOW}")

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables of a process that compiles for these devices. Set them before jax
        is imported."""
        if self.platform == "gpu":
            return {"JAX_PLATFORMS": "cuda,cpu"}
        flags = os.environ.get("XLA_FLAGS", "")
        if self.platform == "cpu":
            flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
            return {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={self.count}".strip(),
            }
        # libtpu ends the process at a flag that it does not know.
        flags = " ".join(
            flag for flag in flags.split() if not flag.startswith(("--xla_cpu_", "--xla_gpu_"))
        )
        return {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": flags,
        }

    def memory(self, device: PlannedDevice) -> float | None:
        """Returns the bytes that a program may use on a device; None if there is no limit, as on a
        CPU."""
        from rl.accounting import chips

        if self.platform == "gpu":
            limit = (device.memory_stats() or {}).get("bytes_limit")  # the memory that jax reserves
            if limit:
                return float(limit)
        chip = chips.of(device.device_kind)
        return chip and chip.memory * 2**30

    def devices(self) -> list:
        """Lists the devices; the process must have `environment`. Raises ResourceError if they
        cannot be described."""
        import jax

        if self.platform != "tpu":
            try:
                return jax.devices(self.platform)[: self.count]
            except RuntimeError as error:
                hint = (
                    "; install jax for GPUs: `pip install 'duet-rl[cuda]'`"
                    if self.platform == "gpu"
                    else ""
                )
                raise ResourceError(
                    f"--topology {self.name}: no such device here{hint}. jax says: {error}"
                ) from None
        from jax.experimental import topologies

        try:
            one = self.name.removeprefix(f"{self.slices}x")
            more: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
            if one.startswith(
                "v4:"
            ):  # jax makes no mesh of single cores, which libtpu describes by default
                more["chip_config_name"] = "megacore"
            return list(topologies.get_topology_desc(one, platform="tpu", **more).devices)
        except Exception as error:  # libtpu and its plugin raise many kinds of errors
            text = str(error).splitlines()[0] if str(error) else repr(error)
            signs = ("no libtpu", "libtpu.so", "tpu support not installed")
            missing = isinstance(error, ModuleNotFoundError) or any(
                sign in text.lower() for sign in signs
            )
            hint = "; `pip install 'duet-rl[tpu]'` brings the compiler" if missing else ""
            says = "" if missing else f". jax says: {text}"
            raise ResourceError(
                f"--topology {self.name}: jax cannot describe this slice here{hint}{says}"
            ) from None
