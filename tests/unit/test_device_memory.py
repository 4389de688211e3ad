"""How much memory a device has: by its kind, by the limits of control groups, by what jax
reserves."""

from types import SimpleNamespace

import pytest

from policy.mesh import device_memory
from policy.mesh.device_memory import total_memory
from rl.accounting import chips


def test_memory_of_a_machine_is_the_smallest_limit_in_full_steps(tmp_path):
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    own = cgroup / "slice" / "job"
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    assert device_memory.host_memory(cgroup, proc) is None
    (proc / "meminfo").write_text(f"MemTotal: {8 * 2**20 - 3000} kB\n")
    assert device_memory.host_memory(cgroup, proc) == 8 * 2**30 - 2**28
    (proc / "self" / "cgroup").write_text("0::/slice/job\n")
    (own / "memory.max").write_text("max\n")
    assert device_memory.host_memory(cgroup, proc) == 8 * 2**30 - 2**28
    (cgroup / "slice" / "memory.max").write_text(f"{3 * 2**30}\n")
    assert device_memory.host_memory(cgroup, proc) == 3 * 2**30
    (cgroup / "memory.max").write_text(f"{2**30 + 5}\n")
    assert device_memory.host_memory(cgroup, proc) == 2**30


def test_memory_of_a_control_group_of_version_1(tmp_path):
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    (cgroup / "memory" / "job").mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {8 * 2**20} kB\n")
    (proc / "self" / "cgroup").write_text("5:cpu:/other\n4:memory:/job\n")
    (cgroup / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{2**31}\n")
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert device_memory.host_memory(cgroup, proc) == 2**31


def device(kind, platform, stats=None):
    return SimpleNamespace(
        device_kind=kind, platform=platform, process_index=0, memory_stats=lambda: stats
    )


@pytest.mark.parametrize(
    ("kind", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA L40S", 48),
        ("TPU v5 lite", 15.75),
        ("TPU v5p", 95.73),
    ],
)
def test_memory_of_a_known_kind(kind, gib):
    """Whatever jax reserves; on all of its devices the same."""
    assert total_memory([device(kind, "any", {"bytes_limit": 7})] * 2) == int(gib * 2**30)
    chip = chips.of(kind)
    assert chip is not None and chip.memory == gib


def test_memory_of_other_devices(monkeypatch):
    """What jax reserves; on a CPU a share of the memory of the host, and of this process alone."""
    monkeypatch.setattr(device_memory, "host_memory", lambda: 2**33)
    for kind in ("new", "NVIDIA GH200 480GB", "NVIDIA L40"):
        assert total_memory([device(kind, "gpu", {"bytes_limit": 7})]) == 7
        assert chips.of(kind) is None
    assert total_memory([device("new", "tpu")]) is None
    own, other = device("cpu", "cpu"), device("cpu", "cpu")
    other.process_index = 1
    assert total_memory([own] * 4) == total_memory([other, own, own, own, own]) == 2**31
    monkeypatch.setattr(device_memory, "host_memory", lambda: None)
    assert total_memory([own]) is None
