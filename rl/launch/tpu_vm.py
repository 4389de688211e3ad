"""TPU VMs of Google Cloud: a queued resource, and a container on each host."""

from __future__ import annotations

import shlex

from rl.errors import ConfigError
from rl.launch.containers import dockerfile, image_commands, image_remarks
from rl.launch.job import Capacity, ClusterJob, Command, Launched, Secret
from rl.launch.machines import Machines
from rl.launch.shell import FAILED, lines, quoted, required

FILE = "tpu-vm.sh"
WORKER = "worker.sh"
_SCRIPT = """\
#!/bin/bash
# Made by `rl launch tpu-vm`. Creates the TPU VMs, and creates them again when they were taken away.
# Runs {worker} on each host, and again on all of them while the run can continue. Exit codes 1 to 6
# of the run end it; the script then ends with the code of the run. Run it where it can go on, for
# example in tmux; if it is cut off, start it again: the containers go on, and it follows them. It
# never deletes TPU VMs that run; you pay until you type
#   gcloud compute tpus queued-resources delete {name} --force --project=... --zone=...
set -uo pipefail
cd "$(dirname "$0")"

project={project}
zone={zone}
nodes=({nodes})

tpus() {{ gcloud compute tpus "$@" --project="$project" --zone="$zone"; }}

# Prints the state of the queued resource: NONE if there is none, UNKNOWN if nobody answers.
state() {{
    local text
    if text=$(tpus queued-resources describe {name} --format='value(state.state)' 2> gcloud.log); then
        echo "$text"
    elif grep -q NOT_FOUND gcloud.log; then
        echo NONE
    else
        cat gcloud.log >&2
        echo UNKNOWN
    fi
}}
create() {{
    {create}
}}

# Runs a command on every host of every slice.
on_all() {{
    local failed=0 node
    for node in "${{nodes[@]}}"; do
        tpus tpu-vm ssh "$node" --worker=all --quiet --command="$1" &
    done
    for job in $(jobs -p); do wait "$job" || failed=1; done
    return $failed
}}

for ((start = 0; start <= {restarts}; start++)); do
    case $(state) in
        SUSPENDING | SUSPENDED | FAILED)
            tpus queued-resources delete {name} --force --quiet
            create || exit 5
            ;;
        NONE) create || exit 5 ;;
    esac
    until [ "$(state)" = ACTIVE ]; do
        case $(state) in SUSPENDED | FAILED | NONE) continue 2 ;; esac
        echo "waiting for the TPU VMs"
        sleep 30
    done
    for node in "${{nodes[@]}}"; do
        tpus tpu-vm scp {worker} "$node": --worker=all --quiet
    done
    on_all 'bash {worker}'
    # The code of each host; a host that is gone has none.
    codes=$(on_all 'echo "code $(cat duet.code)"' | sed -n 's/^code //p') && gone= || gone=yes
    failed=$(grep -x -m 1 '{failed}' <<< "$codes")
    [ -z "$failed" ] || exit "$failed"
    [ -n "$gone" ] || grep -q -v -x 0 <<< "$codes" || exit 0
    sleep 10
done
echo "started {times} times; giving up" >&2
exit 76
"""
_WORKER = """\
#!/bin/bash
# Made by `rl launch tpu-vm`: runs on each host of the TPU VMs, and leaves the exit code of the run
# in duet.code. A container that runs already is followed.
set -uo pipefail

rm -f duet.code
ended() {{ echo "$1" > duet.code; exit "$1"; }}

{prepare}if [ "$(sudo docker inspect -f '{{{{.State.Running}}}}' {name} 2> /dev/null)" != true ]; then
    sudo docker rm -f {name} > /dev/null 2>&1
    {run} > /dev/null || ended 5
fi
sudo docker logs -f {name} &
code=$(sudo docker wait {name})
wait
ended "$code"
"""


def check(machines: Machines, capacity: Capacity) -> None:
    """Raises ConfigError for machines that are no TPU VMs."""
    if machines.platform != "tpu":
        raise ConfigError(
            f"--topology {machines.name}: no TPUs; for GPUs: rl launch jobset, slurm or sky"
        )
    if machines.tpu.runtime is None:
        raise ConfigError(
            f"--topology {machines.name}: {machines.kind} comes with GKE only; use rl launch "
            "jobset or xpk"
        )


def launched(job: ClusterJob) -> Launched:
    """Returns the scripts that create and follow TPU VMs, and the commands to type."""
    machines = job.machines
    several = machines.slices > 1
    nodes = [f"{job.name}-{number}" for number in range(machines.slices)] if several else [job.name]
    places = job.places
    script = _SCRIPT.format(
        name=job.name,
        worker=WORKER,
        project=required("PROJECT", places.project, "my-project"),
        zone=required("ZONE", places.zone, "us-east5-a"),
        nodes=" ".join(nodes),
        create=lines(_create(job), indent=" " * 8),
        restarts=job.limits.max_restarts,
        times=job.limits.max_restarts + 1,
        failed=FAILED,
    )
    project = f"--project={places.project or '$PROJECT'}"
    zone = f"--zone={places.zone or '$ZONE'}"
    commands = [
        *image_commands(job),
        *(
            Command(
                f"keep {each.variable} in Secret Manager, from a variable of your shell",
                f'printf %s "${each.variable}" | '
                f"gcloud secrets create {_secret(each)} --data-file=- {project}",
            )
            for each in job.secrets
        ),
        Command("start the run, and follow it", f"bash {FILE}"),
        Command(
            "delete the TPU VMs when the run has ended",
            f"gcloud compute tpus queued-resources delete {job.name} --force {project} {zone}",
        ),
    ]
    files = {FILE: script, WORKER: _worker(job), **dockerfile(job)}
    return Launched(files, commands, image_remarks(job))


def _create(job: ClusterJob) -> list[str]:
    machines = job.machines
    # Only the alpha track has --reservation.
    words = [f"{_gcloud(job)} compute tpus queued-resources create {job.name}"]
    if machines.slices > 1:
        words += [f"--node-count={machines.slices}", f"--node-prefix={job.name}"]
    else:
        words.append(f"--node-id={job.name}")
    if machines.is_usual:
        words.append(f"--accelerator-type={machines.slice_name}")
    else:
        words += [f"--type={machines.kind}", f"--topology={machines.shape}"]
    words.append(f"--runtime-version={machines.tpu.runtime}")
    if job.places.service_account:
        words.append(f"--service-account={quoted(job.places.service_account)}")
    if job.capacity.spot:
        words.append("--spot")
    if job.capacity.reservation is not None:
        words.append(f"--reservation={quoted(job.capacity.reservation)}")
    return [*words, '--project="$project"', '--zone="$zone"']


def _gcloud(job: ClusterJob) -> str:
    return "gcloud alpha" if job.capacity.reservation else "gcloud"


def _secret(secret: Secret) -> str:
    return secret.secret or secret.variable


def _worker(job: ClusterJob) -> str:
    host = job.tag.partition("/")[0]
    prepare = ""
    if host.endswith(("pkg.dev", "gcr.io")):
        prepare += f"sudo gcloud auth configure-docker {host} --quiet 2> /dev/null\n"
    for each in job.secrets:
        value = f"gcloud secrets versions access latest --secret={_secret(each)}"
        prepare += f"{each.variable}=$({value}) || ended 5\nexport {each.variable}\n"
    names = ",".join(each.variable for each in job.secrets)
    sudo = f"sudo --preserve-env={names}" if names else "sudo"
    words = [
        f"{sudo} docker run -d --name {job.name}",
        f"--privileged --net=host --shm-size=16g --stop-timeout={job.limits.grace}",
        "-v /var/lib/duet/runs:/runs",
        *(f"-e {each.variable}" for each in job.secrets),
        quoted(job.tag),
        *(shlex.quote(word) for word in job.train_joined_by_jax()),
    ]
    return _WORKER.format(
        prepare=prepare,
        name=job.name,
        run=lines(words, indent=" " * 8),
    )
