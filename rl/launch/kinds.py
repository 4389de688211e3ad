"""Where `rl launch` can send a run: each kind is a module with `check` and `launched`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl.launch import jobset, sky, slurm, tpu_vm, xpk
from rl.launch.job import Capacity, ClusterJob, Launched
from rl.launch.machines import Machines


@dataclass(frozen=True)
class Kind:
    """check: raises ConfigError for machines that the kind does not have. launched: returns the
    files of a job, and the commands to type."""

    check: Callable[[Machines, Capacity], None]
    launched: Callable[[ClusterJob], Launched]


KINDS = {
    "jobset": Kind(jobset.check, jobset.launched),
    "xpk": Kind(xpk.check, xpk.launched),
    "tpu-vm": Kind(tpu_vm.check, tpu_vm.launched),
    "slurm": Kind(slurm.check, slurm.launched),
    "sky": Kind(sky.check, sky.launched),
}
