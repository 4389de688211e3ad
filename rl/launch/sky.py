"""SkyPilot: a managed job, which starts again elsewhere when its machines are taken away."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from policy.json_types import JsonValue
from rl.errors import ConfigError
from rl.launch.containers import FILES, extras, packages, wheel_command
from rl.launch.job import PORT, RESTARTING_CODES, Capacity, ClusterJob, Command, Launched
from rl.launch.machines import Machines
from rl.launch.yaml_text import dump

FILE = "sky.yaml"
SETTINGS = "sky.config.yaml"
_HEADER = """\
# Made by `rl launch sky` for SkyPilot 0.14. A managed job: SkyPilot starts it again when its
# machines are taken away, and after the exit codes {codes} of the run; it fails at any other.
"""
_SETUP = """\
export PATH="$HOME/.local/bin:$PATH"
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
uv venv --allow-existing --python 3.12 ~/duet
uv pip install --python ~/duet/bin/python "$(echo *.whl){extras}"{packages}
"""


def launched(job: ClusterJob) -> Launched:
    """Returns the task of a managed job, and the commands to type."""
    codes = " and ".join(map(str, RESTARTING_CODES))
    files = {FILE: _HEADER.format(codes=codes) + dump(_task(job))}
    options = "".join(f" --secret {each.variable}" for each in job.secrets)
    if job.capacity.reservation is not None:
        files[SETTINGS] = dump({"gcp": {"specific_reservations": [job.capacity.reservation]}})
        options += f" --config {SETTINGS}"
    commands = [
        wheel_command(job),
        Command("start the run", f"sky jobs launch{options} {FILE}"),
        Command("watch it", "sky jobs queue"),
        Command("read its console", f"sky jobs logs --name {job.name}"),
        Command("stop it", f"sky jobs cancel --name {job.name}"),
    ]
    remarks = []
    if job.image is not None and job.machines.platform == "tpu":
        remarks.append("--image is not used: SkyPilot installs the wheel on TPU VMs")
    return Launched(files, commands, remarks)


def check(machines: Machines, capacity: Capacity) -> None:
    """Raises ConfigError for machines that SkyPilot has no name for."""
    refused = None
    if machines.platform == "gpu":
        refused = "SkyPilot needs the type of the GPUs" if machines.gpu.sky is None else None
    elif machines.platform == "cpu":
        pass
    elif machines.tpu.runtime is None:
        refused = f"{machines.kind} comes with GKE only; use rl launch jobset or xpk"
    elif machines.slices > 1:
        refused = "SkyPilot joins no slices; use rl launch jobset, xpk or tpu-vm"
    elif not machines.is_usual:
        refused = (
            f"SkyPilot names slices by their size, and {machines.slice_name} is another topology; "
            "use rl launch jobset, xpk or tpu-vm"
        )
    if refused:
        raise ConfigError(f"--topology {machines.name}: {refused}")


def _task(job: ClusterJob) -> dict[str, JsonValue]:
    task: dict[str, JsonValue] = {
        "name": job.name,
        "num_nodes": 1 if job.machines.platform == "tpu" else job.machines.hosts,
        "workdir": FILES,
        "resources": _resources(job),
    }
    if job.secrets:  # SkyPilot takes the values from the shell that types `--secret`
        task["secrets"] = {each.variable: None for each in job.secrets}
    if job.bucket is not None:
        address = urlsplit(job.bucket)
        source = f"{address.scheme}://{address.netloc}"
        task["file_mounts"] = {"/bucket": {"source": source, "mode": "MOUNT"}}
    task["setup"] = _SETUP.format(extras=extras(job), packages=packages(job))
    task["run"] = _run(job)
    return task


def _resources(job: ClusterJob) -> dict[str, JsonValue]:
    machines = job.machines
    resources: dict[str, JsonValue]
    if machines.platform == "tpu":
        resources = {
            "infra": _infra(job),
            "accelerators": {f"tpu-{machines.slice_name}": 1},
            "accelerator_args": {"tpu_vm": True, "runtime_version": machines.tpu.runtime},
        }
    else:
        resources = {"cpus": f"{machines.chips}+"}
        if machines.platform == "gpu":
            resources = {"accelerators": {str(machines.gpu.sky): machines.chips}}
        if job.capacity.reservation is not None or job.places.zone is not None:
            resources = {"infra": _infra(job), **resources}
        if job.image is not None:
            resources["image_id"] = f"docker:{job.image}"
    resources["use_spot"] = job.capacity.spot
    resources["job_recovery"] = {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": list(RESTARTING_CODES),
    }
    return resources


def _infra(job: ClusterJob) -> str:
    zone = job.places.zone
    return f"gcp/{zone.rpartition('-')[0]}/{zone}" if zone else "gcp"


def _run(job: ClusterJob) -> str:
    """Returns the shell line of the run, in which the shell of the machine expands $HOME."""
    folder = f'run.dir="$HOME"/runs/{job.name}'
    words = job.train()
    text = " ".join(folder if word.startswith("run.dir=") else shlex.quote(word) for word in words)
    if job.machines.all_hosts == 1:
        text += " --processes 1"
    elif job.machines.platform != "tpu":
        text += (
            ' --processes "$SKYPILOT_NUM_NODES" --process "$SKYPILOT_NODE_RANK"'
            f' --coordinator "$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"'
        )
    return f"exec ~/duet/bin/{text}\n"
