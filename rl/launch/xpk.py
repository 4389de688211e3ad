"""xpk on GKE: a script that creates a workload, whose JobSet xpk writes."""

from __future__ import annotations

import shlex

from rl.errors import ConfigError
from rl.launch.containers import dockerfile, image_commands, image_remarks
from rl.launch.job import RESTARTING_CODES, Capacity, ClusterJob, Command, Launched
from rl.launch.machines import Machines
from rl.launch.shell import lines, quoted, required

FILE = "xpk.sh"
VARIABLES = "variables.env"
_SCRIPT = """\
#!/bin/bash
# Made by `rl launch xpk` for xpk 1.16. xpk fails a workload at every exit code but those listed, 42
# and 127 to 255 (a killed pod). The run continues from its newest checkpoint, at most {restarts}
# times. `bash {file} --dry-run --output-manifest-file=manifest.yaml` writes the JobSet and starts
# nothing.
set -euo pipefail
cd "$(dirname "$0")"

exec {command} "$@"
"""
_NOT_IN_XPK = ("1x1", "2x2")


def check(machines: Machines, capacity: Capacity) -> None:
    """Raises ConfigError for machines that xpk does not know."""
    if machines.platform != "tpu":
        raise ConfigError(
            f"--topology {machines.name}: `rl launch xpk` is for TPUs; for GPUs: jobset, slurm, sky"
        )
    if machines.kind == "v5e" and machines.shape in _NOT_IN_XPK:
        raise ConfigError(
            f"--topology {machines.name}: xpk has no such slice (nearest: v5e:2x4); or: "
            "rl launch jobset"
        )


def launched(job: ClusterJob) -> Launched:
    """Returns the script that creates the workload, and the commands to type."""
    machines = job.machines
    name = machines.slice_name if machines.is_usual else f"{machines.tpu.prefix}-{machines.shape}"
    places = job.places
    words = [
        "xpk workload create",
        f"--workload={job.name}",
        f"--cluster={required('CLUSTER', places.cluster, 'my-cluster')}",
        f"--project={required('PROJECT', places.project, 'my-project')}",
        f"--zone={required('ZONE', places.zone, 'us-east5-a')}",
        f"--tpu-type={name}",
        f"--num-slices={machines.slices}",
        f"--docker-image={quoted(job.tag)}",
        # xpk runs the command in a shell of its own, which sends SIGTERM to its child.
        f"--command={quoted('exec ' + shlex.join(job.train_joined_by_jax()))}",
        f"--max-restarts={job.limits.max_restarts}",
        f"--restart-on-exit-codes={','.join(map(str, RESTARTING_CODES))}",
        f"--termination-grace-period-seconds={job.limits.grace}",
    ]
    files = dockerfile(job)
    remarks = image_remarks(job)
    if job.secrets:
        words.append(f"--env-file={VARIABLES}")
        files[VARIABLES] = "".join(f"{each.variable}\n" for each in job.secrets)
        remarks.append(
            "xpk copies the values of "
            + ", ".join(each.variable for each in job.secrets)
            + " from your shell into the JobSet, where everybody who can read it sees them"
        )
    if places.namespace:
        words.append(f"--namespace={quoted(places.namespace)}")
    if job.capacity.spot:
        words.append("--spot")
    if job.capacity.reservation is not None:
        words.append(f"--reservation={quoted(job.capacity.reservation)}")
    script = _SCRIPT.format(restarts=job.limits.max_restarts, file=FILE, command=lines(words))
    at = (
        f"--cluster={places.cluster or '$CLUSTER'} --project={places.project or '$PROJECT'} "
        f"--zone={places.zone or '$ZONE'}"
    )
    commands = [
        *image_commands(job),
        Command("start the run", f"bash {FILE}"),
        Command("watch it", f"xpk workload list {at}"),
        Command(
            "stop it; it continues when you start it again",
            f"xpk workload delete --workload={job.name} {at}",
        ),
    ]
    return Launched({FILE: script, **files}, commands, remarks)
