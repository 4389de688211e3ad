"""SLURM: a batch script with a task a node, whose folder all nodes see."""

from __future__ import annotations

import shlex
from pathlib import Path

from rl.errors import ConfigError
from rl.launch.containers import FILES, dockerfile, image_commands
from rl.launch.job import (
    FAILING_CODES,
    PORT,
    RUN_FILE,
    Capacity,
    ClusterJob,
    Command,
    Folders,
    Launched,
)
from rl.launch.machines import Machines
from rl.launch.shell import AGAIN, lines, quoted

FILE = "run.sbatch"
_SHIFT = 200
_SCRIPT = """\
#!/bin/bash
{options}
# Made by `rl launch slurm`. {grace} seconds before the end of its time, SLURM sends USR1: the run
# stops and saves, and the job is queued again, as after the loss of a node, at most {restarts}
# times. Exit codes 1 to {last} of the run end the job, and so does TERM, which `scancel` sends: the
# run saves, and the job is not queued again.
set -uo pipefail
cd {folder}
{checks}{setup}
# srun ends with the highest code of its tasks. Codes 1 to {last} of one task, which say what is
# wrong, have to win over 76 of the others.
task='
    trap : TERM  # the run gets it too, and ends by itself
    {train}
    code=$?
    if ((code >= 1 && code <= {last})); then code=$((code + {shift})); fi
    if ((code == 75)); then sleep 10; fi  # --kill-on-bad-exit waits for no other task
    exit $code'
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{srun} bash -c "$task" "$first:{port}" &
step=$!
stopped=
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do  # a signal ends `wait` before the step has ended
    wait "$step"
    code=$?
done

case $code in
    {shift_pattern}) exit $((code - {shift})) ;;
    {again})
        if [ -z "$stopped" ] && ((${{SLURM_RESTART_COUNT:-0}} < {restarts})); then
            scontrol requeue "$SLURM_JOB_ID"
            sleep 60
        fi
        ;;
esac
exit "$code"
"""


def launched(job: ClusterJob) -> Launched:
    """Returns the batch script. Raises ConfigError for a path with a quotation mark."""
    last = FAILING_CODES[-1]
    checks = "".join(
        f': "${{{each.variable}:?set it where you type sbatch}}"\n' for each in job.secrets
    )
    script = _SCRIPT.format(
        options="\n".join(f"#SBATCH {each}" for each in _options(job)),
        grace=job.limits.grace,
        restarts=job.limits.max_restarts,
        folder=quoted(job.folders.working),
        checks=checks,
        setup="".join(f"{line}\n" for line in job.places.setup),
        last=last,
        shift=_SHIFT,
        shift_pattern="|".join(str(code + _SHIFT) for code in FAILING_CODES),
        train=_train(job),
        srun=lines(_srun(job)),
        port=PORT,
        again=AGAIN,
    )
    commands = [
        *(image_commands(job) if job.image else []),
        Command("start the run", f"sbatch {FILE}"),
        Command("watch it", f"squeue --me --name={job.name}"),
        Command(
            "stop it when it runs; it saves, and continues when you start it again",
            f"scancel --batch --signal=TERM --name={job.name}",
        ),
        Command("take it out of the queue", f"scancel --state=PENDING --name={job.name}"),
    ]
    remarks = []
    if job.machines.platform == "gpu" and job.places.cpus_per_task is None:
        remarks.append(
            "--cpus-per-task is missing: each host gives the run as many cores as the cluster gives "
            "to a task, often one"
        )
    if not job.image:
        remarks.append(
            "the nodes run the `rl-train` that --setup activates, or else that of your shell"
        )
    return Launched({FILE: script, **(dockerfile(job) if job.image else {})}, commands, remarks)


def check(machines: Machines, capacity: Capacity) -> None:
    """Raises ConfigError for TPUs and what SLURM has no word for."""
    if machines.platform == "tpu":
        raise ConfigError(
            f"--topology {machines.name}: `rl launch slurm` is for GPUs, as 2xh100:8; for "
            "TPUs: jobset, xpk, tpu-vm or sky"
        )
    if capacity.spot:
        raise ConfigError("--spot: SLURM has none; name a partition with --partition")


def _options(job: ClusterJob) -> list[str]:
    machines = job.machines
    places = job.places
    options = [
        f"--job-name={job.name}",
        f"--nodes={machines.hosts}",
        "--ntasks-per-node=1",
        *_chips(machines),
        *_cores(job),
        f"--output={job.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.limits.grace}",
    ]
    named = {
        "partition": places.partition,
        "account": places.account,
        "time": places.time,
        "reservation": job.capacity.reservation,
    }
    return options + [f"--{name}={value}" for name, value in named.items() if value is not None]


def _chips(machines: Machines) -> list[str]:
    if machines.platform == "cpu":
        return []
    kind = f"{machines.gpu.slurm}:" if machines.gpu.slurm else ""
    return [f"--gpus-per-node={kind}{machines.chips}"]


def _cores(job: ClusterJob) -> list[str]:
    """Returns the option of the cores of a host, for sbatch and, since SLURM 22.05, srun too."""
    asked = job.places.cpus_per_task
    if job.machines.platform == "cpu":
        if asked not in (None, job.machines.chips):
            raise ConfigError(
                f"--cpus-per-task {asked}: --topology {job.machines.name} says {job.machines.chips}"
            )
        asked = job.machines.chips
    return [] if asked is None else [f"--cpus-per-task={asked}"]


def _srun(job: ClusterJob) -> list[str]:
    words = ["srun --kill-on-bad-exit=1", *_cores(job)]
    if job.image:
        words += [
            f"--container-image={quoted(_image(job.image))}",
            f"--container-mounts={quoted(_mounts(job.folders))}",
            f"--container-workdir={quoted(job.folders.working)}",
        ]
    return words


def _mounts(folders: Folders) -> str:
    """Returns the folders that the container sees under the same paths: the run writes into one,
    and its configuration lies in the other."""
    names = [folders.working]
    if not Path(folders.output).is_relative_to(folders.working):
        names.append(folders.output)
    return ",".join(f"{name}:{name}" for name in names)


def _image(name: str) -> str:
    """Returns an image as pyxis names it: REGISTRY#IMAGE:TAG, IMAGE:TAG of Docker Hub, or the path
    of a file, which begins with / or ./."""
    registry, _, image = name.partition("/")
    if registry in ("", "."):
        return name
    if registry == "docker.io":
        return image
    is_registry = bool(image) and ("." in registry or ":" in registry or registry == "localhost")
    return f"{registry}#{image}" if is_registry else name


def _train(job: ClusterJob) -> str:
    """Returns the command of a task, for a text in single quotes. jax would give a task the one
    device with the number of the task on its node; with these options it has all."""
    file = f"{job.folders.output}/{FILES}/{RUN_FILE}"
    words = [quoted(word) for word in job.train(f"{job.folders.working}/runs", file)]
    words.append(f"--processes {job.machines.hosts}")
    if job.machines.hosts > 1:
        words.append('--process "$SLURM_PROCID" --coordinator "$0"')
    text = lines(words, indent=" " * 8)
    if "'" in text:
        raise ConfigError(f"{shlex.quote(text)}: paths with a quotation mark cannot be used here")
    return text
