"""Connects the processes of a run.

A cluster announces the number of processes and the address of the first (SLURM, Open MPI, Cloud
TPU, GKE: all that `jax.distributed` can detect). Elsewhere the command line does. Process 0 is also
the coordinator of jax.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from policy.mesh import serialization
from rl.errors import ConfigError, DuetError, ProcessLost, ResourceError

if TYPE_CHECKING:
    from rl.cluster.watchdog import Watch

# Seconds for all processes to connect, and without a heartbeat until jax declares a process lost.
# rl/cluster/watchdog.py notices a lost process earlier.
START = 300
HEARTBEAT = 25
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Launch:
    """How a process connects to the others.

    coordinator: address of process 0 as "host:port".
    count: number of processes.
    index: number of this process, from 0.
    devices: the local devices that it uses; None: all.
    """

    coordinator: str
    count: int
    index: int
    devices: tuple[int, ...] | None = None


def launch(count: int | None, index: int | None, coordinator: str | None) -> Launch | None:
    """Returns how this process connects, from the command line or else the cluster; None: the run
    has one process.

    Raises ConfigError for options that contradict each other.
    """
    options = {"--processes": count, "--process": index, "--coordinator": coordinator}
    if count == 1 and not index:
        return None
    if all(value is None for value in options.values()):
        return (
            None if "jax" in sys.modules else _detected()
        )  # jax detects clusters only before it starts
    missing = [name for name, value in options.items() if value is None]
    if count is None or index is None or coordinator is None:
        raise ConfigError(
            f"{', '.join(missing)}: --processes, --process and --coordinator go together"
        )
    if not 0 <= index < count:
        raise ConfigError(f"--process {index}: {count} processes have the numbers 0 to {count - 1}")
    if not coordinator.rpartition(":")[2].isdigit() or not coordinator.rpartition(":")[0]:
        raise ConfigError(
            f"--coordinator {coordinator}: use HOST:PORT, the machine of process 0 and a port "
            "that is free there"
        )
    return Launch(coordinator, count, index)


def _detected() -> Launch | None:
    """Returns what the cluster announces, or None if there is no cluster or it started one
    process."""
    environment = os.environ
    loopback = _on_one_machine(environment)
    several = (
        int(environment.get("SLURM_NTASKS", 1)) > 1
        or int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    )
    # For any other pod jax would ask Kubernetes, and fail.
    pods = "JOB_COMPLETION_INDEX" in environment
    tpu = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if not (several or pods or tpu):
        return None
    from jax._src import clusters

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, index, devices = detect(loopback, None, None, None, None, START)
    except Exception as error:  # the clients of Kubernetes and Google raise their own errors
        raise ResourceError(
            f"the cluster does not announce its processes: {error} (--processes 1: do not ask it)"
        ) from None
    if address is None or index is None or not count or count == 1:
        return None
    return Launch(address, count, index, None if devices is None else tuple(devices))


def _on_one_machine(environment: Mapping[str, str]) -> str | None:
    """Returns a loopback address for process 0 if the launcher started all processes on this
    machine, else None."""
    slurm = environment.get("SLURM_STEP_NUM_NODES") == "1"
    mpi = environment.get("OMPI_COMM_WORLD_SIZE", "") == environment.get(
        "OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    if not (slurm or mpi):
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")
    job = ".".join(environment.get(name, "") for name in names)
    return f"127.0.0.1:{61440 + zlib.crc32(job.encode()) % 4096}"


def start(where: Launch) -> Watch:
    """Connects to the other processes. Call it before any jax computation. Raises ProcessLost on
    failure: all start again, and the others may come later."""
    import jax

    from rl.cluster.watchdog import Watch

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, _, port = where.coordinator.rpartition(":")
    try:
        jax.distributed.initialize(
            where.coordinator,
            where.count,
            where.index,
            list(where.devices) if where.devices else None,
            "deactivate",
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=60,
            coordinator_bind_address=f"{host.replace('localhost', '127.0.0.1')}:{port}"
            if host in _LOOPBACK
            else None,
        )
        return Watch(host.strip("[]"), host in _LOOPBACK)
    except (RuntimeError, OSError) as error:
        text = (
            f"process {where.index} of {where.count} cannot connect to the others at "
            f"{where.coordinator}: {error}"
        )
        raise ProcessLost(text) from None


serialization.register_type(DuetError, *DuetError.__subclasses__())

Result = TypeVar("Result")


def _tried(act: Callable[[], Result]) -> tuple[Result | None, DuetError | None]:
    """Returns (result of `act()`, None), or (None, the DuetError that it raised)."""
    try:
        return act(), None
    except DuetError as error:
        return None, error


def raise_on_all(act: Callable[[], Result]) -> Result:
    """Returns the result of `act()` on each process. If it raises a DuetError on one process, all
    raise it."""
    from policy.mesh import processes

    result, error = _tried(act)
    for one in processes.all_gather_object(error):
        if one is not None:
            raise one
    return cast(Result, result)


def on_first(act: Callable[[], Result]) -> Result:
    """Calls `act()` on process 0 and returns its result on all. If it raises a DuetError, all raise
    it."""
    from policy.mesh import processes

    result, error = processes.broadcast(_tried(act if processes.first() else lambda: None))
    if error is not None:
        raise error
    return cast(Result, result)
