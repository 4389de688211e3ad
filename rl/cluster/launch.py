"""The processes of a run: how they find each other.

Clusters say how many processes there are and where the first one is (SLURM, Open MPI, Cloud TPU, GKE: what `jax.distributed` can
detect); anywhere else the command line does. Process 0 also is the coordinator through which jax connects them.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.mesh import serialization
from rl.errors import ConfigError, DuetError, ResourceError

if TYPE_CHECKING:
    from rl.cluster.watchdog import Watch

# Seconds in which all processes have to be there, and after which one that sends jax no heartbeat is lost: rl/cluster/watchdog.py is quicker.
START, HEARTBEAT = 300, 25
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Launch:
    """How a process joins the others: the address of process 0 as "host:port", how many there are, and its own number. `devices`:
    those of this machine that are its own, None: all."""

    coordinator: str
    count: int
    index: int
    devices: tuple[int, ...] | None = None


def launch(count: int | None, index: int | None, coordinator: str | None) -> Launch | None:
    """What the command line says, or the cluster where that says nothing; None: a run of one process.

    Raises ConfigError for numbers that do not fit each other.
    """
    given = {"--processes": count, "--process": index, "--coordinator": coordinator}
    if count == 1 and not index:
        return None
    if all(value is None for value in given.values()):
        return None if "jax" in sys.modules else _detected()  # a program that has imported jax has made its choice
    if missing := [name for name, value in given.items() if value is None]:
        raise ConfigError(f"{', '.join(missing)}: --processes, --process and --coordinator go together")
    if not 0 <= index < count:
        raise ConfigError(f"--process {index}: {count} processes have the numbers 0 to {count - 1}")
    if not coordinator.rpartition(":")[2].isdigit() or not coordinator.rpartition(":")[0]:
        raise ConfigError(
            f"--coordinator {coordinator}: wanted HOST:PORT, a port of the machine of process 0 that is free"
        )
    return Launch(coordinator, count, index)


def _detected() -> Launch | None:
    """What the cluster says, if there is one and it has started several processes."""
    environment = os.environ
    here = _on_one_machine(environment)
    several = int(environment.get("SLURM_NTASKS", 1)) > 1 or int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    # A pod of any other kind is none of several; jax would ask Kubernetes, and fail.
    pods = "JOB_COMPLETION_INDEX" in environment
    tpu = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if not (several or pods or tpu):
        return None
    from jax._src import clusters

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, index, devices = detect(here, None, None, None, None, START)
    except Exception as error:  # Kubernetes' and Google's clients have errors of their own
        raise ResourceError(
            f"the cluster does not say which processes there are: {error} (--processes 1: do not ask)"
        ) from None
    if address is None or not count or count == 1:
        return None
    return Launch(address, count, index, None if devices is None else tuple(devices))


def _on_one_machine(environment: Mapping[str, str]) -> str | None:
    """An address for process 0 that no other machine reaches, where the launcher has started all processes on this one."""
    slurm = environment.get("SLURM_STEP_NUM_NODES") == "1"
    mpi = environment.get("OMPI_COMM_WORLD_SIZE", "") == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if not (slurm or mpi):
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")
    job = ".".join(environment.get(name, "") for name in names)
    return f"127.0.0.1:{61440 + zlib.crc32(job.encode()) % 4096}"


def start(where: Launch) -> Watch:
    """Joins the others, before anything of jax has run. Raises ResourceError where they are not found."""
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
            coordinator_bind_address=f"{host.replace('localhost', '127.0.0.1')}:{port}" if host in _LOOPBACK else None,
        )
        return Watch(host.strip("[]"), host in _LOOPBACK)
    except (RuntimeError, OSError) as error:
        text = f"process {where.index} of {where.count} has not met the others at {where.coordinator}: {error}"
        raise ResourceError(text) from None


serialization.register_type(DuetError, *DuetError.__subclasses__())


def _tried(act: Callable[[], Any]) -> tuple[Any, DuetError | None]:
    """(what `act()` gives, None), or (None, the one of rl.errors that it raised)."""
    try:
        return act(), None
    except DuetError as error:
        return None, error


def raise_on_all(act: Callable[[], Any]) -> Any:
    """What `act()` gives on each process; if it raises one of rl.errors on one, all raise that."""
    from policy.mesh import processes

    found, error = _tried(act)
    for one in processes.all_gather_object(error):
        if one is not None:
            raise one
    return found


def on_first(act: Callable[[], Any]) -> Any:
    """What `act()` gives on process 0, which alone does it; if it raises one of rl.errors, all do."""
    from policy.mesh import processes

    found, error = processes.broadcast(_tried(act if processes.first() else lambda: None))
    if error is not None:
        raise error
    return found
