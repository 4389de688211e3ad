"""Where `rl launch` can send a run: each kind is a module with `check` and `launched`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl.launch import jobset, sky, slurm, tpu_vm, xpk
from rl.launch.job import (
    IN_ANY_STORE,
    IN_KUBERNETES,
    IN_SECRET_MANAGER,
    Capacity,
    ClusterJob,
    Launched,
    SecretNames,
)
from rl.launch.machines import Machines


@dataclass(frozen=True)
class Kind:
    """check: raises ConfigError for machines that the kind does not have. launched: returns the
    files of a job, and the commands to type. secrets: names that `--secret` may give."""

    check: Callable[[Machines, Capacity], None]
    launched: Callable[[ClusterJob], Launched]
    secrets: SecretNames = IN_ANY_STORE


KINDS = {
    "jobset": Kind(jobset.check, jobset.launched, IN_KUBERNETES),
    "xpk": Kind(xpk.check, xpk.launched),
    "tpu-vm": Kind(tpu_vm.check, tpu_vm.launched, IN_SECRET_MANAGER),
    "slurm": Kind(slurm.check, slurm.launched),
    "sky": Kind(sky.check, sky.launched),
}
