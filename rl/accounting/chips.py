"""Peak rates of devices: the denominators of utilisation, and the rates of a plan.

The makers publish the rates: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and
"Ironwood (TPU7x)"; NVIDIA's data sheets of A100, H100, H200, B200, L4 and L40S. GPU rates are
dense, without sparsity. No page has the rate between slices of v4; it is taken from v5p.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy.mesh.device_memory import KIND_GIB, known_kind


@dataclass(frozen=True)
class Chip:
    """Peak rates of one device.

    tflops: 10^12 bfloat16 operations per second.
    memory: GiB, of policy/mesh/device_memory.py.
    bandwidth: 10^9 bytes per second of its memory.
    links: 10^9 bytes per second to other chips of its slice or host; 0: it has no such links.
    between: 10^9 bytes per second to other slices, over the network of the data center; 0: unknown.
    """

    name: str
    tflops: float
    memory: float
    bandwidth: float
    links: float
    between: float = 0.0


# About two cores, to compare plans on the CPU with each other: makers of CPUs publish no such
# numbers.
CPU = Chip("cpu", tflops=0.1, memory=0.0, bandwidth=20.0, links=5.0)

# Key of KIND_GIB -> chip.
_KINDS = {
    # Half a chip: each of its two cores is a jax device.
    "TPU7x": Chip("tpu7x", 1153.5, KIND_GIB["TPU7x"], 3690.0, 600.0, 6.25),
    "TPU v6": Chip("v6e", 918.0, KIND_GIB["TPU v6"], 1640.0, 448.0, 12.5),
    "TPU v5 lite": Chip("v5e", 197.0, KIND_GIB["TPU v5 lite"], 819.0, 200.0, 3.125),
    "TPU v5e": Chip("v5e", 197.0, KIND_GIB["TPU v5e"], 819.0, 200.0, 3.125),
    "TPU v5": Chip("v5p", 459.0, KIND_GIB["TPU v5"], 2765.0, 600.0, 6.25),
    "TPU v4": Chip("v4", 275.0, KIND_GIB["TPU v4"], 1228.0, 300.0, 6.25),
    "B200": Chip("b200", 2250.0, KIND_GIB["B200"], 8000.0, 900.0),
    "H200": Chip("h200", 989.0, KIND_GIB["H200"], 4800.0, 450.0),
    "H100": Chip("h100", 989.0, KIND_GIB["H100"], 3350.0, 450.0),
    "A100-SXM4-40GB": Chip("a100", 312.0, KIND_GIB["A100-SXM4-40GB"], 1555.0, 300.0),
    "A100-PCIE-40GB": Chip("a100", 312.0, KIND_GIB["A100-PCIE-40GB"], 1555.0, 300.0),
    "A100": Chip("a100", 312.0, KIND_GIB["A100"], 2039.0, 300.0),
    "L40S": Chip("l40s", 362.0, KIND_GIB["L40S"], 864.0, 0.0),
    "L4": Chip("l4", 121.0, KIND_GIB["L4"], 300.0, 0.0),
}


def of(device_kind: str) -> Chip | None:
    """Returns the chip with this jax `device_kind`, or None for one that is not listed, for
    instance a CPU."""
    kind = known_kind(device_kind)
    return None if kind is None else _KINDS[kind]
