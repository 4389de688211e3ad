"""The devices of a plan: slices of TPUs that need not be there, devices of the CPU, or the GPUs of this machine."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from rl.errors import ConfigError, ResourceError

TPUS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
HOW = "give KIND:AxB or KIND:AxBxC (v5p:8x8x4, v6e:4x4, v5e:4x4, v4:2x2x2, tpu7x:2x2x1), 2xKIND:AxB for two slices, cpu:N, or gpu"


@dataclass(frozen=True)
class Topology:
    """`platform`: tpu, cpu or gpu. `name`: as it was asked for. `count`: chips of a slice; None: all GPUs that are here."""

    platform: str
    name: str
    count: int | None
    slices: int = 1

    @classmethod
    def read(cls, name: str) -> Topology:
        """Raises ConfigError for a name that is none."""
        kind, _, shape = name.partition(":")
        if kind == "gpu" and not shape:
            return cls("gpu", name, None)
        if kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape):
            return cls("cpu", name, int(shape))
        found = re.fullmatch(rf"(?:([1-9]\d*)x)?({'|'.join(TPUS)}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name)
        if found:
            return cls("tpu", name, math.prod(map(int, found[3].split("x"))), int(found[1] or 1))
        raise ConfigError(f"--topology {name}: no such topology; {HOW}")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that compiles for it. They must stand before jax is imported."""
        if self.platform == "gpu":
            return {"JAX_PLATFORMS": "cuda,cpu"}
        flags = os.environ.get("XLA_FLAGS", "")
        if self.platform == "cpu":
            flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
            return {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={self.count}".strip(),
            }
        # libtpu ends a process that has a flag which it does not know.
        flags = " ".join(flag for flag in flags.split() if not flag.startswith(("--xla_cpu_", "--xla_gpu_")))
        return {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": flags,
        }

    def memory(self, device) -> float | None:
        """Bytes that a program may take on a device; None: as many as the machine has, as on a CPU."""
        from rl.reporting import chips

        if self.platform == "gpu":
            limit = (device.memory_stats() or {}).get("bytes_limit")  # what jax has set aside of it
            if limit:
                return float(limit)
        chip = chips.of(device.device_kind)
        return chip and chip.memory * 2**30

    def devices(self) -> list:
        """In a process with that environment. Raises ResourceError where they cannot be described here."""
        import jax

        if self.platform != "tpu":
            try:
                return jax.devices(self.platform)[: self.count]
            except RuntimeError as error:
                raise ResourceError(f"--topology {self.name}: {error}") from None
        from jax.experimental import topologies

        try:
            one = self.name.removeprefix(f"{self.slices}x")
            more = {"num_slices": self.slices} if self.slices > 1 else {}
            if one.startswith("v4:"):  # else libtpu describes its two cores apart, which jax lays no mesh over
                more["chip_config_name"] = "megacore"
            return list(topologies.get_topology_desc(one, platform="tpu", **more).devices)
        except Exception as error:  # libtpu and its plugin raise errors of many kinds
            text = str(error).splitlines()[0] if str(error) else repr(error)
            missing = "no libtpu" in text.lower() or isinstance(error, ModuleNotFoundError) or "libtpu.so" in text
            hint = "; `pip install libtpu` brings the compiler" if missing else ""
            raise ResourceError(
                f"--topology {self.name}: jax cannot describe this slice here{hint}. It says: {text}"
            ) from None
