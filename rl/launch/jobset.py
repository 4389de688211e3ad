"""JobSet on GKE: a Job a slice, a pod a host."""

from __future__ import annotations

from policy.json_types import JsonValue
from rl.errors import ConfigError
from rl.launch.containers import dockerfile, image_commands, image_remarks
from rl.launch.job import FAILING_CODES, PORT, RUNS, Capacity, ClusterJob, Command, Launched, Secret
from rl.launch.machines import Machines
from rl.launch.yaml_text import dump

FILE = "jobset.yaml"
_CONTAINER = "duet"
_WORKERS = "workers"
_OPTIONAL = ("HF_TOKEN", "WANDB_API_KEY")
_HEADER = """\
# Made by `rl launch jobset`. Exit codes {codes} of a pod fail the JobSet, since a new start would
# fail in the same way; after any other failure, and after a node is lost, all pods start again and
# the run continues from its newest checkpoint, at most {restarts} times.
"""


def check(machines: Machines, capacity: Capacity) -> None:
    """Raises ConfigError for a GPU that GKE does not have."""
    if machines.platform == "gpu" and machines.gpu.gke is None:
        raise ConfigError(f"--topology {machines.name}: GKE has no such GPUs")


def launched(job: ClusterJob) -> Launched:
    """Returns the JobSet with its Dockerfile, and the commands to type."""
    codes = f"{FAILING_CODES[0]} to {FAILING_CODES[-1]}"
    text = _HEADER.format(codes=codes, restarts=job.limits.max_restarts) + dump(_jobset(job))
    at = f" -n {job.places.namespace}" if job.places.namespace else ""
    commands = [*image_commands(job)]
    commands += [
        Command(
            f"keep the secret {name} in the cluster, from variables of your shell",
            f"kubectl create secret generic {name}{at} "
            + " ".join(f'--from-literal={each.key}="${each.variable}"' for each in secrets),
        )
        for name, secrets in _by_store(job).items()
    ]
    commands += [
        Command("start the run", f"kubectl apply{at} -f {FILE}"),
        Command(
            "watch it", f"kubectl get jobset,pods{at} -l jobset.sigs.k8s.io/jobset-name={job.name}"
        ),
        Command(
            "read the console of process 0",
            f"kubectl logs{at} -f -l jobset.sigs.k8s.io/jobset-name={job.name},"
            "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0",
        ),
        Command(
            "stop it; it continues when you start it again", f"kubectl delete{at} jobset {job.name}"
        ),
    ]
    return Launched({FILE: text, **dockerfile(job)}, commands, image_remarks(job))


def _by_store(job: ClusterJob) -> dict[str, list[Secret]]:
    stores: dict[str, list[Secret]] = {}
    for each in job.secrets:
        stores.setdefault(each.kubernetes, []).append(each)
    return stores


def _jobset(job: ClusterJob) -> dict[str, JsonValue]:
    machines = job.machines
    metadata: dict[str, JsonValue] = {"name": job.name}
    if job.places.namespace:
        metadata["namespace"] = job.places.namespace
    if machines.platform == "tpu":
        # Each Job has the nodes of a slice to itself.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": job.limits.max_restarts,
                "rules": [
                    {
                        "name": "failed",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _WORKERS,
                    "replicas": machines.slices,
                    "template": {"spec": _job(job)},
                }
            ],
        },
    }


def _job(job: ClusterJob) -> dict[str, JsonValue]:
    return {
        "parallelism": job.machines.hosts,
        "completions": job.machines.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "In",
                        "values": list(FAILING_CODES),
                    },
                }
            ]
        },
        "template": {"spec": _pod(job)},
    }


def _pod(job: ClusterJob) -> dict[str, JsonValue]:
    pod: dict[str, JsonValue] = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": job.limits.grace,
        "containers": [_container(job)],
        "volumes": [
            {"name": "runs", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if selector := _selector(job):
        pod["nodeSelector"] = selector
    if tolerations := _tolerations(job):
        pod["tolerations"] = tolerations
    if job.places.service_account:
        pod["serviceAccountName"] = job.places.service_account
    return pod


def _selector(job: ClusterJob) -> dict[str, str]:
    machines = job.machines
    selector = {}
    if machines.platform == "tpu":
        selector = {
            "cloud.google.com/gke-tpu-accelerator": machines.tpu.gke,
            "cloud.google.com/gke-tpu-topology": machines.shape,
        }
    elif machines.platform == "gpu":
        selector = {"cloud.google.com/gke-accelerator": str(machines.gpu.gke)}
    if job.capacity.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    if job.capacity.reservation is not None:
        selector["cloud.google.com/reservation-name"] = job.capacity.reservation
        if machines.platform == "gpu":
            selector["cloud.google.com/reservation-affinity"] = "specific"
    return selector


def _tolerations(job: ClusterJob) -> list[dict[str, str]]:
    tolerations = []
    if job.machines.platform != "cpu":
        taint = {"key": _resource(job), "operator": "Exists", "effect": "NoSchedule"}
        tolerations.append(taint)
    if job.capacity.spot:
        tolerations.append(
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        )
    return tolerations


def _resource(job: ClusterJob) -> str:
    names = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu", "cpu": "cpu"}
    return names[job.machines.platform]


def _container(job: ClusterJob) -> dict[str, JsonValue]:
    machines = job.machines
    chips = {_resource(job): str(machines.chips)}
    ports = [PORT]
    if machines.platform == "tpu":
        ports += [8471, 8080]  # of chips within a slice, and of slices
    container: dict[str, JsonValue] = {
        "name": _CONTAINER,
        "image": job.tag,
        "command": _command(job),
        "env": _variables(job),
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if machines.platform == "tpu":
        container["securityContext"] = {"privileged": True}
    return container


def _variables(job: ClusterJob) -> list[dict[str, JsonValue]]:
    """Returns the variables of the job's secrets. Without any, those of the hub and of Weights &
    Biases are set where the cluster has them."""
    secrets = job.secrets or [Secret(name, None, name) for name in _OPTIONAL]
    optional = {} if job.secrets else {"optional": True}
    return [
        {
            "name": each.variable,
            "valueFrom": {"secretKeyRef": {"name": each.kubernetes, "key": each.key, **optional}},
        }
        for each in secrets
    ]


def _command(job: ClusterJob) -> list[str]:
    """Returns the command of a pod. On TPUs GKE sets the variables that jax reads; elsewhere jax
    would ask Kubernetes, which needs a client and rights."""
    machines = job.machines
    if machines.platform == "tpu" or machines.all_hosts == 1:
        return job.train_joined_by_jax()
    first = f"{job.name}-{_WORKERS}-0-0.{job.name}:{PORT}"
    number = "$(JOB_COMPLETION_INDEX)"
    joined = ["--processes", str(machines.hosts), "--process", number, "--coordinator", first]
    return [*job.train(), *joined]
