"""Where `rl launch` can send a run: each kind is a module with `launched(job)`."""

from __future__ import annotations

from collections.abc import Callable

from rl.launch import jobset, sky, slurm, tpu_vm, xpk
from rl.launch.job import Job, Launched

KINDS: dict[str, Callable[[Job], Launched]] = {
    "jobset": jobset.launched,
    "xpk": xpk.launched,
    "tpu-vm": tpu_vm.launched,
    "slurm": slurm.launched,
    "sky": sky.launched,
}
