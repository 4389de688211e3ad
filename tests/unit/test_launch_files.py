"""What `rl launch` writes is what JobSet, xpk, gcloud, SLURM and SkyPilot accept, and its scripts
start a run again after the exit codes after which it can continue, and after no other."""

import copy
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from rl.commands import cli
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.launch.job import IN_KUBERNETES, IN_SECRET_MANAGER, Secret
from rl.launch.machines import TPUS, Machines

ROOT = Path(cli.__file__).parents[2]
SCHEMAS = ROOT / "tests" / "fixtures" / "launch"
QUICKSTART = str(ROOT / "configs" / "quickstart.yml")


def launch(kind, topology, directory, *options, config=QUICKSTART) -> int:
    return cli.main(
        ["launch", kind, config, "--topology", topology, "-o", str(directory), *options]
    )


def jobset(directory):
    return yaml.safe_load((directory / "jobset.yaml").read_text())


def pod(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def jobset_schema():
    schema = json.loads((SCHEMAS / "jobset.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def plain_jobset(tmp_path_factory):
    """The JobSet of four hosts, without options."""
    directory = tmp_path_factory.mktemp("jobset")
    assert launch("jobset", "v6e:4x4", directory) == 0
    return jobset(directory)


TOPOLOGIES = [
    # slices, hosts of a slice, chips of a host, label of the accelerator, label of the topology
    ("v5e:1x1", 1, 1, 1, "tpu-v5-lite-podslice", "1x1"),
    ("v5e:2x4", 1, 1, 8, "tpu-v5-lite-podslice", "2x4"),
    ("v6e:4x4", 1, 4, 4, "tpu-v6e-slice", "4x4"),
    ("v4:2x2x1", 1, 1, 4, "tpu-v4-podslice", "2x2x1"),
    ("v5p:8x8x4", 1, 64, 4, "tpu-v5p-slice", "4x8x8"),
    ("2xv5p:4x4x4", 2, 16, 4, "tpu-v5p-slice", "4x4x4"),
    ("4xv6e:16x16", 4, 64, 4, "tpu-v6e-slice", "16x16"),
    ("tpu7x:2x2x2", 1, 2, 4, "tpu7x", "2x2x2"),
]


@pytest.mark.parametrize(
    ("topology", "slices", "hosts", "chips", "accelerator", "shape"), TOPOLOGIES
)
def test_a_jobset_has_a_job_a_slice_and_a_pod_a_host(
    topology, slices, hosts, chips, accelerator, shape, tmp_path, jobset_schema
):
    assert launch("jobset", topology, tmp_path, "--bucket", "gs://b/runs/") == 0
    document = jobset(tmp_path)
    jobset_schema.validate(document)
    (replicated,) = document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == slices
    assert job["parallelism"] == job["completions"] == hosts
    assert job["backoffLimit"] == 0
    selector = pod(document)["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert selector["cloud.google.com/gke-tpu-topology"] == shape
    (container,) = pod(document)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": str(chips)}
    assert pod(document)["hostNetwork"] is True
    assert pod(document)["terminationGracePeriodSeconds"] >= 300
    assert "run.remote=gs://b/runs/quickstart" in container["command"]
    # GKE and jax join the processes of several hosts; a single one does not look for others.
    assert ("--processes" in container["command"]) == (slices * hosts == 1)


def test_a_jobset_fails_at_codes_1_to_6_and_starts_again_after_all_others(tmp_path, jobset_schema):
    assert launch("jobset", "v6e:4x4", tmp_path, "--max-restarts", "7") == 0
    document = jobset(tmp_path)
    (rule,) = document["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": pod(document)["containers"][0]["name"],
        "operator": "In",
        "values": [1, 2, 3, 4, 5, 6],
    }
    policy = document["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(each["action"], each["onJobFailureReasons"]) for each in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert pod(document)["restartPolicy"] == "Never"  # a podFailurePolicy is refused with any other


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document["spec"].update(replicatedJob=[]),
        lambda document: document["spec"]["failurePolicy"]["rules"][0].update(action="FailJob"),
        lambda document: pod(document).update(hostnetwork=True),
        lambda document: pod(document)["containers"][0]["resources"].update(limit={}),
        lambda document: pod(document).update(terminationGracePeriodSeconds="300"),
        lambda document: document["spec"]["failurePolicy"]["rules"][0].pop("name"),
    ],
)
def test_the_schema_of_a_jobset_refuses_what_kubernetes_refuses(spoil, plain_jobset, jobset_schema):
    document = copy.deepcopy(plain_jobset)
    spoil(document)
    assert not jobset_schema.is_valid(document)


def test_a_jobset_of_gpus_names_process_and_coordinator(tmp_path, jobset_schema):
    assert launch("jobset", "2xh100:8", tmp_path, "--name", "mine", "--reservation", "r") == 0
    document = jobset(tmp_path)
    jobset_schema.validate(document)
    (container,) = pod(document)["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    command = " ".join(container["command"])
    assert "--processes 2 --process $(JOB_COMPLETION_INDEX)" in command
    assert "--coordinator mine-workers-0-0.mine:8476" in command
    assert pod(document)["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
        "cloud.google.com/reservation-name": "r",
        "cloud.google.com/reservation-affinity": "specific",
    }


@pytest.mark.parametrize("topology", ["cpu:4", "2xcpu:4"])
def test_hosts_without_chips_are_for_trials(topology, tmp_path, jobset_schema):
    hosts = 2 if topology.startswith("2x") else 1
    for kind in ("jobset", "slurm", "sky"):
        assert launch(kind, topology, tmp_path / kind) == 0
        text = (tmp_path / kind / "files" / "run.yml").read_text()
        assert yaml.safe_load(text)["platform"] == "cpu"
    document = jobset(tmp_path / "jobset")
    jobset_schema.validate(document)
    assert pod(document)["containers"][0]["resources"]["limits"] == {"cpu": "4"}
    assert "nodeSelector" not in pod(document)
    assert '*.whl)" && rm' in (tmp_path / "jobset" / "Dockerfile.cpu").read_text()
    script = (tmp_path / "slurm" / "run.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=4\n" in script and " --cpus-per-task=4 " in script
    assert launch("slurm", topology, tmp_path / "five", "--cpus-per-task", "5") == 2
    task = sky(tmp_path / "sky")
    check_sky(task, json.loads((SCHEMAS / "sky.schema.json").read_text()))
    assert (task["num_nodes"], task["resources"]["cpus"]) == (hosts, "4+")
    for kind in ("xpk", "tpu-vm"):
        assert launch(kind, topology, tmp_path / kind) == 2


def test_without_a_secret_those_that_the_cluster_has_are_used(plain_jobset, jobset_schema):
    jobset_schema.validate(plain_jobset)
    references = [
        each["valueFrom"]["secretKeyRef"] for each in pod(plain_jobset)["containers"][0]["env"]
    ]
    assert references == [
        {"name": "duet-secrets", "key": name, "optional": True}
        for name in ("HF_TOKEN", "WANDB_API_KEY")
    ]


def test_secrets_are_names_and_spot_machines_are_selected(tmp_path, jobset_schema):
    secrets = ["--secret", "HF_TOKEN", "--secret", "WANDB_API_KEY=keys:wandb", "--spot"]
    assert launch("jobset", "v5e:4x4", tmp_path, *secrets) == 0
    document = jobset(tmp_path)
    jobset_schema.validate(document)
    assert pod(document)["containers"][0]["env"] == [
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "duet-secrets", "key": "HF_TOKEN"}},
        },
        {
            "name": "WANDB_API_KEY",
            "valueFrom": {"secretKeyRef": {"name": "keys", "key": "wandb"}},
        },
    ]
    assert pod(document)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "cloud.google.com/gke-spot" in [each["key"] for each in pod(document)["tolerations"]]


@pytest.mark.parametrize("kind", ["jobset", "xpk", "tpu-vm", "sky"])
def test_a_value_in_place_of_the_name_of_a_secret_is_refused_and_not_shown(kind, tmp_path, capsys):
    value = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
    assert launch(kind, "v6e:4x4", tmp_path / "x", "--secret", f"HF_TOKEN={value}") == 2
    told = capsys.readouterr()
    assert "never the value" in told.err and value not in told.err + told.out
    assert not (tmp_path / "x").exists()


def test_secrets_are_read_by_variable_name_and_key():
    assert Secret.read("A", IN_KUBERNETES) == Secret("A", None, "A")
    assert Secret.read("A=b.c:d_E", IN_KUBERNETES) == Secret("A", "b.c", "d_E")
    assert Secret.read("A=MY_TOKEN", IN_SECRET_MANAGER) == Secret("A", "MY_TOKEN", "A")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (IN_KUBERNETES, "MY_TOKEN"),
        (IN_KUBERNETES, "a" * 64),
        (IN_SECRET_MANAGER, "my.token"),
        (IN_SECRET_MANAGER, "my token"),
        (IN_SECRET_MANAGER, "0123456789abcdef" * 2 + "01234567"),  # as a key of Weights & Biases
        (IN_SECRET_MANAGER, "sk-proj-0123456789abcdefgh"),
        (IN_SECRET_MANAGER, "wandb_v1_AbCdEfGh0123456789"),
    ],
)
def test_a_name_that_the_store_has_not_or_that_looks_like_a_value_is_refused(names, text):
    with pytest.raises(ConfigError, match="--secret A=...: this is no name of a secret") as refused:
        Secret.read(f"A={text}", names)
    assert text not in str(refused.value)


def test_each_kind_takes_the_names_of_its_store(tmp_path):
    secret = ["--secret", "HF_TOKEN=MY_TOKEN"]
    assert launch("tpu-vm", "v6e:4x4", tmp_path / "vm", *secret) == 0
    assert "--secret=MY_TOKEN" in (tmp_path / "vm" / "worker.sh").read_text()
    assert launch("xpk", "v6e:4x4", tmp_path / "xpk", *secret) == 0
    assert launch("jobset", "v6e:4x4", tmp_path / "jobset", *secret) == 2


@pytest.mark.parametrize(
    ("kind", "topology", "told"),
    [
        ("jobsets", "v5e:4x4", "nearest: jobset; valid: jobset, sky, slurm, tpu-vm, xpk"),
        ("jobset", "v5e:4x5", "nearest: v5e:4x4, v5e:4x8"),
        ("jobset", "v5p:5x5x5", "nearest: v5p:4x4x4"),
        ("jobset", "v5q:4x4", "nearest: v5p"),
        ("jobset", "v5e", "KIND:AxB"),
        ("jobset", "h100:8x8", "a host has 1 to 16 GPUs"),
        ("jobset", "l40s:8", "GKE has no such GPUs"),
        ("jobset", "gpu:8", "GKE has no such GPUs"),
        ("xpk", "h100:8", "jobset, slurm, sky"),
        ("xpk", "v5e:2x2", "nearest: v5e:2x4"),
        ("tpu-vm", "tpu7x:2x2x1", "GKE only; use rl launch jobset or xpk"),
        ("tpu-vm", "h100:8", "jobset, slurm or sky"),
        ("slurm", "v5e:4x4", "jobset, xpk, tpu-vm or sky"),
        ("sky", "2xv5e:4x4", "SkyPilot joins no slices"),
        ("sky", "v5p:4x4x16", "another topology"),
        ("sky", "tpu7x:2x2x1", "GKE only"),
        ("sky", "gpu:8", "the type of the GPUs"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(kind, topology, told, tmp_path, capsys):
    assert launch(kind, topology, tmp_path / "x") == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--name", "My_Run"], "--name My_Run"),
        (["--bucket", "bucket/runs"], "gs://BUCKET/FOLDER"),
        (["--grace", "60"], "at least 300"),
        (["--chips-per-host", "2"], "have 4 chips"),
        (["mesh.tensor=3"], "mesh: {'fsdp': -1, 'tensor': 3} does not fit the 16 devices"),
        (["mesh.dcn.data=2"], "mesh.dcn: {'data': 2} does not fit the 1 slices"),
        (["model=/no/such/folder"], "/no/such/folder"),
        (["stages.0.stepz=3"], "stepz"),
    ],
)
def test_a_wrong_option_is_refused_before_a_file_is_written(options, told, tmp_path, capsys):
    assert launch("jobset", "v6e:4x4", tmp_path / "x", *options) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("option", "text", "least"),
    [("--grace", "x", 0), ("--max-restarts", "-1", 0), ("--cpus-per-task", "0", 1)],
)
def test_a_number_that_is_none_is_named(option, text, least, tmp_path, capsys):
    with pytest.raises(SystemExit):
        launch("slurm", "gpu:1", tmp_path, option, text)
    assert (
        f"argument {option}: {text}: must be a number of {least} or more" in capsys.readouterr().err
    )


def test_the_configuration_is_that_of_the_machines_with_the_files_that_it_names(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("mine/own.py").write_text(
        "def score(prompts, completions, **columns):\n    return [1.0]\n"
    )
    options = [
        *("data.path=mine/rows.jsonl", "data.task=null", "data.options={}"),
        "rewards.functions.0.name=mine/own.py:score",
        *("evaluation=null", "stages.1.until=null"),
    ]
    assert launch("jobset", "2xv6e:4x4", "out", *options) == 0
    files = tmp_path / "out" / "files"
    config = RunConfig.model_validate(yaml.safe_load((files / "run.yml").read_text()))
    assert config.platform == "tpu" and config.mesh.dcn.data == -1
    assert (files / "mine" / "rows.jsonl").read_bytes() == Path("mine/rows.jsonl").read_bytes()
    assert (files / "mine" / "own.py").is_file()
    told = capsys.readouterr().out
    assert "platform: tpu (the configuration says cpu)" in told and "mesh.dcn.data: -1" in told
    assert launch("slurm", "gpu:2", "slurm", *options) == 0
    assert [path.name for path in (tmp_path / "slurm" / "files").iterdir()] == ["run.yml"]
    docker = (tmp_path / "out" / "Dockerfile.tpu").read_text()
    assert "COPY files/ ./" in docker and "[tpu]" in docker


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    read = Path.read_bytes

    def refused(path):
        if path.name == "rows.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert launch("jobset", "v6e:4x4", "out", "data.system=rows.jsonl", "--no-check") == 2
    assert "rows.jsonl is to be copied: " in capsys.readouterr().err
    assert not Path("out").exists()


def test_the_image_has_the_extras_of_what_the_configuration_names(tmp_path):
    options = ["rewards.functions.0.name=math", "run.mlflow={}", "--extra", "vision", "--no-check"]
    assert launch("jobset", "v6e:4x4", tmp_path, "--bucket", "gs://b/r", *options) == 0
    text = (tmp_path / "Dockerfile.tpu").read_text()
    assert '[tpu,gcs,mlflow,tasks,vision]" && rm' in text
    azure = "abfs://c@account.dfs.core.windows.net/x"
    assert launch("jobset", "2xh100:8", tmp_path / "azure", "--bucket", azure) == 0
    assert '[cuda]" adlfs && rm' in (tmp_path / "azure" / "Dockerfile.gpu").read_text()
    assert launch("jobset", "2xh100:8", tmp_path / "s3", "--bucket", "s3://b/r") == 0
    assert '[cuda]" s3fs && rm' in (tmp_path / "s3" / "Dockerfile.gpu").read_text()


def test_paths_of_the_machines_need_not_exist_here(tmp_path):
    options = ["model=/no/such/folder", "--no-check"]
    assert launch("slurm", "h100:8", tmp_path, *options) == 0
    assert "/no/such/folder" in (tmp_path / "files" / "run.yml").read_text()


def test_a_text_that_is_too_long_for_a_name_is_no_file(tmp_path):
    """A name of more than 255 characters is an error of the file system, not of the user."""
    option = f"data.system={'Think. ' * 50}"
    assert launch("jobset", "v6e:4x4", tmp_path, option) == 0
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["run.yml"]


def test_only_files_that_nobody_changed_are_replaced(tmp_path, capsys):
    assert launch("jobset", "v6e:4x4", tmp_path) == 0
    assert launch("jobset", "v6e:4x8", tmp_path) == 0
    (tmp_path / "jobset.yaml").write_text("mine")
    assert launch("jobset", "v6e:4x4", tmp_path) == 2
    assert "jobset.yaml" in capsys.readouterr().err
    assert (tmp_path / "jobset.yaml").read_text() == "mine"
    assert (tmp_path / "files" / "run.yml").read_text()
    assert launch("jobset", "v6e:4x4", tmp_path, "--force") == 0
    assert jobset(tmp_path)["kind"] == "JobSet"


# `xpk workload create --help` of xpk 1.16.0: options, of which those of FLAGS have no value.
XPK = """--base-docker-image --cluster --command --debug-dump-gcs --device-type --docker-image
--docker-image-pull-secret --docker-name --env --env-file --experiment-name --max-restarts
--namespace --num-nodes --num-slices --output-manifest-file --priority --project --project-number
--ramdisk-directory --reservation --restart-on-exit-codes --scheduler --script-dir --storage
--termination-grace-period-seconds --tpu-type --ttl-seconds-after-finished --workload --zone"""
XPK_FLAGS = "--dry-run --enable-debug-logs --flex --mtc-enabled --on-demand --quiet --spot"


def words_of_xpk(directory, *options) -> list[str]:
    """Runs the script with an `xpk` that prints its arguments."""
    (directory / "bin").mkdir()
    stub(directory / "bin", "xpk", 'printf "%s\\n" "$@"')
    environment = os.environ | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    environment |= {"CLUSTER": "c", "PROJECT": "p", "ZONE": "z"}
    done = subprocess.run(
        ["bash", str(directory / "xpk.sh"), *options],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("topology", "tpu_type", "slices"),
    [
        ("v5e:4x4", "v5litepod-16", 1),
        ("v6e:2x4", "v6e-8", 1),
        ("3xv5p:4x8x8", "v5p-512", 3),
        ("v5p:4x4x16", "v5p-4x4x16", 1),
        ("v4:2x2x2", "v4-16", 1),
        ("tpu7x:4x4x4", "tpu7x-128", 1),
    ],
)
def test_the_script_of_xpk_has_options_that_xpk_has(topology, tpu_type, slices, tmp_path):
    options = ["--spot", "--secret", "HF_TOKEN", "--namespace", "team", "--image", "host/a:b"]
    assert launch("xpk", topology, tmp_path, *options) == 0
    assert subprocess.run(["bash", "-n", str(tmp_path / "xpk.sh")]).returncode == 0
    words = words_of_xpk(tmp_path, "--dry-run")
    assert words[:2] == ["workload", "create"]
    given = dict(word.partition("=")[::2] for word in words[2:])
    assert not {name for name, value in given.items() if value} - set(XPK.split())
    assert not {name for name, value in given.items() if not value} - set(XPK_FLAGS.split())
    assert (given["--tpu-type"], given["--num-slices"]) == (tpu_type, str(slices))
    assert given["--restart-on-exit-codes"] == "75,76"
    assert int(given["--termination-grace-period-seconds"]) >= 300
    assert int(given["--max-restarts"]) > 0
    assert given["--command"].startswith("exec rl-train run.yml run.dir=/runs/quickstart")
    assert (tmp_path / given["--env-file"]).read_text() == "HF_TOKEN\n"


def test_the_name_of_a_slice_stands_for_the_topology_that_is_nearest_to_a_cube():
    usual = ["2x2x1", "2x2x4", "4x4x4", "4x4x12", "4x8x8", "8x8x8", "4x12x12", "8x8x16", "12x16x20"]
    assert all(Machines.read(f"v5p:{shape}").is_usual for shape in usual)
    assert not any(Machines.read(f"v5p:{shape}").is_usual for shape in ("4x4x16", "4x4x32"))


@pytest.mark.slow
def test_xpk_has_the_slices_under_these_names():
    table = pytest.importorskip("xpk.core.system_characteristics", reason="pip install xpk")
    known = table.UserFacingNameToSystemCharacteristics
    for kind, tpu in TPUS.items():
        for shape in tpu.shapes:
            machines = Machines.read(f"{kind}:{'x'.join(map(str, shape))}")
            if kind == "v5e" and machines.shape in ("1x1", "2x2"):
                continue
            slice_of_xpk = known[f"{tpu.prefix}-{machines.shape}"]
            assert slice_of_xpk.gke_accelerator == tpu.gke
            if machines.chips != 8:  # xpk takes two hosts with 4
                assert (slice_of_xpk.vms_per_slice, slice_of_xpk.chips_per_vm) == (
                    machines.hosts,
                    machines.chips,
                )
            if machines.is_usual:
                assert known[machines.slice_name].topology == machines.shape


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


# Options of `sbatch` that the script may have (sbatch(1) of SLURM 24.11).
SBATCH = """--account --chdir --constraint --cpus-per-gpu --cpus-per-task --dependency --error
--exclusive --gpus-per-node --gres --job-name --mail-type --mem --mem-per-gpu --nodes
--ntasks-per-node --open-mode --output --partition --qos --requeue --reservation --signal --time"""


def test_the_options_of_sbatch_are_options_of_sbatch(tmp_path):
    options = ["--partition", "gpu", "--account", "a", "--time", "12:00:00", "--reservation", "r"]
    assert launch("slurm", "4xh100:8", tmp_path, *options) == 0
    text = (tmp_path / "run.sbatch").read_text()
    given = dict(
        line.removeprefix("#SBATCH ").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    assert set(given) <= set(SBATCH.split())
    assert (given["--nodes"], given["--ntasks-per-node"]) == ("4", "1")
    assert given["--gpus-per-node"] == "h100:8"
    assert given["--signal"] == "B:USR1@300" and "--requeue" in given
    assert "srun --kill-on-bad-exit" in text
    # sbatch ignores options below the first command.
    first = next(n for n, line in enumerate(text.splitlines()) if line and line[0] != "#")
    assert "#SBATCH" not in "\n".join(text.splitlines()[first:])


def run_sbatch(directory, *codes, restarts=0, sent=None) -> tuple[int, str]:
    """Runs the batch script where `srun` runs as many tasks as codes, each of which ends with its
    code. Returns the exit code, and what `scontrol` and `scancel` were asked."""
    folder = directory / "bin"
    folder.mkdir(exist_ok=True)
    log = directory / "log"
    log.write_text("")
    stub(
        folder,
        "srun",
        'while [ "$1" != bash ]; do shift; done\nworst=0\n'
        + "".join(
            f'SLURM_PROCID={number} CODE={code} "$@"; c=$?; [ $c -gt $worst ] && worst=$c\n'
            for number, code in enumerate(codes)
        )
        + "exit $worst",
    )
    wait = "sleep 1; " if sent else ""
    stub(folder, "rl-train", f'{wait}echo "rl-train $*" >> {log}; exit $CODE')
    stub(folder, "scontrol", f'[ "$1" = show ] && echo node7 || echo "scontrol $*" >> {log}')
    stub(folder, "scancel", f'echo "scancel $*" >> {log}')
    stub(folder, "sleep", '[ "$1" = 1 ] && exec /bin/sleep 1; exit 0')
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    process = subprocess.Popen(["bash", str(directory / "run.sbatch")], env=environment)
    if sent:
        subprocess.run(["/bin/sleep", "0.5"])
        process.send_signal(sent)
    return process.wait(30), log.read_text()


def test_a_batch_job_is_queued_again_after_75_76_and_kills_and_after_nothing_else(tmp_path):
    assert launch("slurm", "2xh100:8", tmp_path, "--max-restarts", "3") == 0
    again = {75, 76, 137, 143, 139}
    for code in sorted(again | {0, 1, 2, 3, 4, 5, 6, 130}):
        ended, log = run_sbatch(tmp_path, code, code)
        assert ended == code
        assert ("scontrol requeue 42" in log) == (code in again), code
    assert "requeue" not in run_sbatch(tmp_path, 75, 75, restarts=3)[1]
    # A task that says what is wrong wins over others that have lost it.
    assert run_sbatch(tmp_path, 76, 3)[0] == 3
    assert "requeue" not in run_sbatch(tmp_path, 76, 3)[1]
    log = run_sbatch(tmp_path, 0, 0)[1]
    assert "--processes 2 --process 1 --coordinator node7:8476" in log


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_batch_job_stops_the_step_and_is_queued_again_only_at_the_end_of_its_time(sent, tmp_path):
    assert launch("slurm", "h100:8", tmp_path) == 0
    ended, log = run_sbatch(tmp_path, 75, sent=sent)
    assert ended == 75
    assert log.index("scancel --signal=TERM 42.0") < log.index("rl-train")
    assert ("scontrol requeue" in log) == (sent == signal.SIGUSR1)


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("duet:1", "duet:1"),
        ("team/duet:1", "team/duet:1"),
        ("docker.io/team/duet:1", "team/duet:1"),
        ("ghcr.io/team/duet:1", '"ghcr.io#team/duet:1"'),
        ("node:5000/duet:1", '"node:5000#duet:1"'),
        ("localhost/duet", '"localhost#duet"'),
        ("/images/duet.sqsh", "/images/duet.sqsh"),
        ("./duet.sqsh", "./duet.sqsh"),
    ],
)
def test_the_image_of_a_batch_job_is_named_as_pyxis_names_it(image, named, tmp_path):
    assert launch("slurm", "gpu:4", tmp_path, "--image", image) == 0
    assert f"--container-image={named} " in (tmp_path / "run.sbatch").read_text()


def test_commands_before_the_run_and_the_container_are_in_the_batch_script(tmp_path):
    options = ["--setup", "module load cuda", "--image", "host/duet:1", "--secret", "HF_TOKEN"]
    assert launch("slurm", "gpu:4", tmp_path, *options) == 0
    text = (tmp_path / "run.sbatch").read_text()
    assert "\nmodule load cuda\n" in text and "--container-image=host/duet:1" in text
    assert ': "${HF_TOKEN:?' in text and "--gpus-per-node=4\n" in text
    assert subprocess.run(["bash", "-n", str(tmp_path / "run.sbatch")]).returncode == 0


def test_the_container_sees_the_folder_of_the_run_and_that_of_its_configuration(
    tmp_path, monkeypatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    for output, mounts in (("out", f"{here}:{here}"), (there, f"{here}:{here},{there}:{there}")):
        assert launch("slurm", "gpu:4", output, "--image", "host/duet:1") == 0
        assert f"--container-mounts={mounts} " in (here / output / "run.sbatch").read_text()


def test_the_cores_of_a_host_are_asked_of_sbatch_and_srun(tmp_path, capsys):
    assert launch("slurm", "gpu:4", tmp_path, "--cpus-per-task", "32") == 0
    text = (tmp_path / "run.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=32\n" in text
    assert "--cpus-per-task=32 " in text[text.index("srun --kill") :]
    assert "--cpus-per-task is missing" not in capsys.readouterr().out
    assert launch("slurm", "gpu:4", tmp_path) == 0
    assert "--cpus-per-task is missing" in capsys.readouterr().out
    assert "--cpus-per-task" not in (tmp_path / "run.sbatch").read_text()


def run_tpu_vm(directory, states, codes) -> tuple[int, list[str]]:
    """Runs the script where gcloud answers with these states, one a call, and hosts with these
    codes, a list a round. Returns its exit code and the calls of gcloud."""
    folder = directory / "bin"
    folder.mkdir(exist_ok=True)
    (directory / "states").write_text("\n".join(states) + "\n")
    rounds = [" ".join(map(str, each)) for each in codes]
    (directory / "codes").write_text("\n".join(rounds) + "\n")
    log = directory / "log"
    log.write_text("")
    take = "head -n 1 {0}; sed -i 1d {0}"
    stub(
        folder,
        "gcloud",
        f'echo "$*" >> {log}\n'
        f'case "$*" in\n*describe*) state=$({take.format(directory / "states")})\n'
        '  case "$state" in none) echo "NOT_FOUND: no such resource" >&2; exit 1 ;;\n'
        '  away) echo "timed out" >&2; exit 1 ;; *) echo "$state" ;; esac ;;\n'
        f"*duet.code*) line=$({take.format(directory / 'codes')})\n"
        '  [ "$line" = gone ] && exit 255\n'
        '  for code in $line; do echo "code $code"; done ;;\nesac',
    )
    stub(folder, "sleep", "exit 0")
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PROJECT": "p",
        "ZONE": "z",
    }
    done = subprocess.run(
        ["bash", str(directory / "tpu-vm.sh")], env=environment, timeout=60, capture_output=True
    )
    return done.returncode, log.read_text().splitlines()


@pytest.mark.parametrize(
    ("states", "codes", "ended", "creations", "deletions"),
    [
        (["none", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"], [[0, 0]], 0, 1, 0),
        (["none", "ACTIVE"], [[3, 76]], 3, 1, 0),
        (["ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"], [[75, 76], [0, 0]], 0, 0, 0),
        (["none", "ACTIVE", "SUSPENDED", "ACTIVE"], [["gone"], [0, 0]], 0, 2, 1),
        (["ACTIVE"] * 6, [[75, 75]] * 3, 76, 0, 0),
        (["away", "away", "away", "ACTIVE"], [[0, 0]], 0, 0, 0),
    ],
)
def test_tpu_vms_are_created_again_after_a_preemption_and_the_code_is_that_of_the_run(
    states, codes, ended, creations, deletions, tmp_path
):
    assert launch("tpu-vm", "v6e:2x4", tmp_path, "--max-restarts", "2", "--spot") == 0
    code, calls = run_tpu_vm(tmp_path, states, codes)
    assert code == ended
    created = [call for call in calls if "queued-resources create" in call]
    assert len(created) == creations
    assert len([call for call in calls if "queued-resources delete" in call]) == deletions
    for call in created:
        assert call == (
            "compute tpus queued-resources create quickstart --node-id=quickstart "
            "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot --project=p --zone=z"
        )
    assert any("tpu-vm ssh quickstart --worker=all" in call for call in calls)


def test_several_slices_of_tpu_vms_are_nodes_of_one_resource(tmp_path):
    assert launch("tpu-vm", "2xv5p:4x4x16", tmp_path, "--reservation", "r") == 0
    _, calls = run_tpu_vm(tmp_path, ["none", "ACTIVE"], [[0], [0]])
    (created,) = [call for call in calls if "queued-resources create" in call]
    assert "--node-count=2 --node-prefix=quickstart --type=v5p --topology=4x4x16" in created
    assert created.startswith("alpha compute tpus") and "--reservation=r" in created
    assert [call for call in calls if "scp worker.sh quickstart-1:" in call]


def run_worker(
    directory, *codes, gcloud='echo "value of $*"', start=""
) -> tuple[int, list[str], str]:
    """Runs the script of a host where containers end with these codes. Returns its exit code, the
    calls of docker and the code that it leaves."""
    folder = directory / "bin"
    folder.mkdir(exist_ok=True)
    (directory / "codes").write_text("\n".join(map(str, codes)) + "\n")
    log = directory / "log"
    log.write_text("")
    stub(folder, "sudo", 'while [[ "$1" == --preserve-env* ]]; do shift; done; exec "$@"')
    stub(folder, "gcloud", gcloud)
    take = f"head -n 1 {directory / 'codes'}; sed -i 1d {directory / 'codes'}"
    stub(
        folder,
        "docker",
        f'echo "$* [$HF_TOKEN]" >> {log}\ncase "$1" in wait) {take} ;; inspect) exit 1 ;;\n'
        f"run) {start} ;; esac",
    )
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(directory / "worker.sh")], env=environment, cwd=directory, timeout=60
    )
    return done.returncode, log.read_text().splitlines(), (directory / "duet.code").read_text()


def test_a_host_runs_once_and_leaves_the_code(tmp_path):
    """tpu-vm.sh counts the starts: a loop here would multiply them."""
    options = ["--secret", "HF_TOKEN=hf-token", "--image", "us-docker.pkg.dev/p/r/duet:1"]
    assert launch("tpu-vm", "v6e:4x4", tmp_path, *options) == 0
    assert subprocess.run(["bash", "-n", str(tmp_path / "tpu-vm.sh")]).returncode == 0
    for ended in (0, 3, 75, 137):
        code, calls, left = run_worker(tmp_path, ended, 0)
        assert (code, left) == (ended, f"{ended}\n")
        (started,) = [call for call in calls if call.startswith("run ")]
    assert "-e HF_TOKEN us-docker.pkg.dev/p/r/duet:1 rl-train run.yml" in started
    assert "--secret=hf-token" in started  # the value, which the stub of gcloud makes


def test_a_host_without_the_secret_or_the_image_leaves_code_5(tmp_path):
    """Without a code the host would count as lost, and all would start again."""
    assert launch("tpu-vm", "v6e:4x4", tmp_path, "--secret", "HF_TOKEN") == 0
    code, calls, left = run_worker(tmp_path, 0, gcloud="exit 1")
    assert (code, calls, left) == (5, [], "5\n")
    code, calls, left = run_worker(tmp_path, 0, start="exit 125")
    assert (code, left) == (5, "5\n")
    assert not [call for call in calls if call.startswith("wait")]


@pytest.mark.parametrize(
    ("kind", "typed"),
    [
        ("tpu-vm", "gcloud secrets create HF_TOKEN --data-file=- --project=p"),
        ("tpu-vm", "queued-resources delete quickstart --force --project=p --zone=z"),
        ("xpk", "xpk workload list --cluster=$CLUSTER --project=p --zone=z"),
        ("xpk", "workload delete --workload=quickstart --cluster=$CLUSTER --project=p --zone=z"),
    ],
)
def test_the_commands_to_type_name_project_and_zone(kind, typed, tmp_path, capsys):
    options = ["--secret", "HF_TOKEN", "--project", "p", "--zone", "z"]
    assert launch(kind, "v6e:4x4", tmp_path, *options) == 0
    assert f"{typed}\n" in capsys.readouterr().out


def sky(directory):
    return yaml.safe_load((directory / "sky.yaml").read_text())


def check_sky(task, schemas):
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    for mount in task.get("file_mounts", {}).values():
        jsonschema.validate(mount, schemas["storage"])


SKY = [
    ("v6e:2x4", {"tpu-v6e-8": 1}, 1),
    ("v5e:4x4", {"tpu-v5litepod-16": 1}, 1),
    ("v5p:4x8x8", {"tpu-v5p-512": 1}, 1),
    ("h200:8", {"H200": 8}, 1),
    ("4xa100-80gb:8", {"A100-80GB": 8}, 4),
]


@pytest.mark.parametrize(("topology", "accelerators", "nodes"), SKY)
def test_a_task_of_skypilot_recovers_from_75_and_76_only(topology, accelerators, nodes, tmp_path):
    options = ["--bucket", "gs://b/runs", "--secret", "HF_TOKEN", "--spot"]
    assert launch("sky", topology, tmp_path, *options) == 0
    task = sky(tmp_path)
    check_sky(task, json.loads((SCHEMAS / "sky.schema.json").read_text()))
    assert task["resources"]["accelerators"] == accelerators
    assert task["num_nodes"] == nodes
    assert task["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [75, 76],
    }
    assert task["resources"]["use_spot"] is True
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["file_mounts"] == {"/bucket": {"source": "gs://b", "mode": "MOUNT"}}
    assert ("runtime_version" in task["resources"].get("accelerator_args", {})) == (
        "tpu" in str(accelerators)
    )
    assert ("SKYPILOT_NODE_RANK" in task["run"]) == (nodes > 1)
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_task_of_skypilot_keeps_its_bucket_and_its_zone(tmp_path, capsys):
    options = ["--bucket", "gs://lab/RUNS", "--zone", "us-east5-a"]
    assert launch("sky", "2xh100:8", tmp_path, *options) == 0
    task = sky(tmp_path)
    check_sky(task, json.loads((SCHEMAS / "sky.schema.json").read_text()))
    assert 'run.dir="$HOME"/runs/quickstart run.remote=gs://lab/RUNS/quickstart ' in task["run"]
    assert task["resources"]["infra"] == "gcp/us-east5/us-east5-a"
    assert "is not used" not in capsys.readouterr().out
    limits = ["--grace", "600", "--max-restarts", "0", "--image", "host/duet:1"]
    assert launch("sky", "v6e:2x4", tmp_path, *limits) == 0
    told = capsys.readouterr().out
    for option in ("--grace", "--max-restarts", "--image"):
        assert f"{option} is not used" in told


@pytest.mark.slow
def test_skypilot_accepts_its_tasks(tmp_path):
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    known = {
        "task": schemas.get_task_schema(),
        "resources": schemas.get_resources_schema(),
        "storage": schemas.get_storage_schema(),
    }
    for topology, _, _ in SKY:
        folder = tmp_path / topology.replace(":", "-")
        options = ["--bucket", "gs://b", "--secret", "A", "--reservation", "r", "--zone", "us-e5-a"]
        assert launch("sky", topology, folder, *options) == 0
        check_sky(sky(folder), known)
        settings = yaml.safe_load((folder / "sky.config.yaml").read_text())
        jsonschema.validate(settings, schemas.get_config_schema())
    task = sky(folder)
    task["resources"]["use_spots"] = True
    with pytest.raises(jsonschema.ValidationError):
        check_sky(task, known)


SHIPPED = [
    ("lora_llama3_8b", "v5e:2x4"),
    ("lora_llama3_8b", "v6e:4x4"),
    ("grpo_deepseek", "v5p:8x8x4"),
    ("grpo_deepseek", "2xv5p:8x8x4"),
    ("quickstart", "v5e:1x1"),
    ("quickstart", "2xv6e:4x4"),
]


@pytest.mark.parametrize(("config", "topology"), SHIPPED)
def test_shipped_configurations_are_launched(
    config, topology, tmp_path, jobset_schema, monkeypatch
):
    monkeypatch.chdir(ROOT)
    for kind in ("jobset", "xpk", "tpu-vm"):
        assert launch(kind, topology, tmp_path / kind, config=f"configs/{config}.yml") in (0, 2)
    if topology != "v5e:1x1":  # xpk has no such slice
        assert (tmp_path / "xpk" / "xpk.sh").is_file()
    document = jobset(tmp_path / "jobset")
    jobset_schema.validate(document)
    assert document["metadata"]["name"] == config.replace("_", "-")
    if config != "quickstart":
        assert (tmp_path / "jobset/files/configs/data/competition.jsonl").is_file()
    for script in tmp_path.rglob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_the_commands_to_type_are_printed_with_the_folder(tmp_path, capsys):
    assert launch("jobset", "v6e:4x4", tmp_path, "--image", "host/duet:1", "--secret", "A") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    typed = lines[lines.index("type:") + 1 :]
    assert typed[0] == f"cd {shlex.quote(str(tmp_path))}"
    assert "docker push host/duet:1" in typed and "kubectl apply -f jobset.yaml" in typed
    assert "--bucket is missing" in "\n".join(lines)
    assert not re.search(r"(?m)^\s*#.*[A-Z]_TOKEN=", "\n".join(lines))


def test_urls_of_the_configuration_name_the_clients_in_the_image(tmp_path):
    options = ["run.remote=s3://b/r", "data=gs://b/rows.jsonl", "--no-check"]
    assert launch("jobset", "2xh100:8", tmp_path, *options) == 0
    assert '[cuda,gcs]" s3fs && rm' in (tmp_path / "Dockerfile.gpu").read_text()


def test_a_launch_json_of_somebody_else_is_kept(tmp_path, capsys):
    """Editors have a file of this name too."""
    file = tmp_path / "launch.json"
    file.write_text('{"version": "0.2.0", "configurations": []}')
    assert launch("jobset", "v6e:4x4", tmp_path) == 2
    assert "launch.json" in capsys.readouterr().err and not (tmp_path / "jobset.yaml").exists()
    assert "configurations" in file.read_text()
    assert launch("jobset", "v6e:4x4", tmp_path, "--force") == 0


def test_options_of_another_kind_are_named_and_unknown_extras_refused(tmp_path, capsys):
    assert launch("slurm", "2xh100:8", tmp_path, "--zone", "us-east5-a", "--time", "1:00") == 0
    said = capsys.readouterr().out
    assert "--zone is not used: it is for xpk, tpu-vm, sky" in said and "--time is" not in said
    assert launch("slurm", "2xh100:8", tmp_path, "--extra", "visoin") == 2
    assert "--extra visoin: duet-rl has no such extra (nearest: vision" in capsys.readouterr().err


def test_a_name_is_made_of_the_letters_of_the_file(tmp_path):
    file = tmp_path / "Über Läufe 1.yml"
    file.write_text(Path(QUICKSTART).read_text())
    assert launch("jobset", "v6e:4x4", tmp_path / "o", "--no-check", config=str(file)) == 0
    assert jobset(tmp_path / "o")["metadata"]["name"] == "uber-laufe-1"


@pytest.mark.parametrize(
    "option",
    [
        ["--partition", "gpu\nrm -rf /"],
        ["--image", "host/duet 1"],
        ["--reservation", "a b"],
        ["--time", "$(date)"],
    ],
)
def test_a_name_that_would_break_a_line_is_refused(option, tmp_path, capsys):
    assert launch("slurm", "2xh100:8", tmp_path / "x", *option) == 2
    assert f"{option[0]} '" in capsys.readouterr().err and not (tmp_path / "x").exists()
