"""`rl launch`: writes the files that start a run on other machines. Starts nothing itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.commands.overrides import add_files
from rl.commands.train import split_arguments

SUMMARY = "files that start a run on a cluster"
DESCRIPTION = """\
Writes files that start a run elsewhere, and prints the commands to type. It starts nothing and
needs no client of a cloud. KIND is jobset (JobSet on GKE), xpk, tpu-vm, slurm or sky (SkyPilot).
After a preemption the run is started again; it is not where it failed by itself (docs/launch.md).
"""
HELP = """\
  rl launch jobset configs/grpo_deepseek.yml --topology v5p:4x8x8 -o launch \\
     --image REGISTRY/duet:1 --bucket gs://BUCKET/runs --secret HF_TOKEN
  rl launch slurm run.yml seed=1 --topology 4xh100:8 -o launch --partition gpu --time 12:00:00
"""
_TOPOLOGY = (
    "machines: v5e:4x4, v6e:2x4, v5p:4x8x8, 2xv5p:4x4x4 for two slices, 4xh100:8 for 4 hosts"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("kind", metavar="KIND", help="jobset, xpk, tpu-vm, slurm or sky")
    add_files(parser)
    parser.add_argument("--topology", required=True, help=_TOPOLOGY)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="folder for the files",
    )
    parser.add_argument("--force", action="store_true", help="replace files of others in DIR")
    parser.add_argument("--name", help="of the job (by the name of the configuration)")
    parser.add_argument("--image", help="container image, in a registry that the machines reach")
    parser.add_argument(
        "--bucket",
        metavar="gs://...",
        help="remote folder, where the run is kept while machines go (run.remote)",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="VARIABLE[=SECRET[:KEY]]",
        help="variable of the run whose value is in this secret; never the value; may be repeated",
    )
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument("--spot", action="store_true", help="machines that may be taken away")
    capacity.add_argument("--reservation", metavar="NAME", help="machines that are reserved")
    parser.add_argument(
        "--chips-per-host", type=int, metavar="N", help="of v5e:2x4 and v6e:2x4: 8 or 4 (8)"
    )
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="extra of duet-rl that the run needs, as vision; may be repeated. Those of the "
        "bucket, trackers and tasks are known",
    )
    parser.add_argument(
        "--grace",
        type=_count,
        metavar="SECONDS",
        help="from the request to stop to the kill; a step and a checkpoint have to fit (300)",
    )
    parser.add_argument(
        "--max-restarts", type=_count, metavar="N", help="starts after the first (50)"
    )
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not check that paths and names of the configuration exist on this machine",
    )
    places = parser.add_argument_group("where the run goes; what is left out, the files ask for")
    places.add_argument("--project", help="xpk, tpu-vm: project of Google Cloud")
    places.add_argument("--zone", help="xpk, tpu-vm, sky: zone of Google Cloud")
    places.add_argument("--cluster", help="xpk: the cluster")
    places.add_argument("--namespace", help="jobset, xpk: namespace of Kubernetes")
    places.add_argument(
        "--service-account", help="jobset, tpu-vm: account that may write to the bucket"
    )
    places.add_argument("--partition", help="slurm")
    places.add_argument("--account", help="slurm")
    places.add_argument("--time", help="slurm: limit of time, as 12:00:00")
    places.add_argument("--cpus-per-task", type=_cores, metavar="N", help="slurm: cores of a host")
    places.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="slurm: a shell line before the run, as 'source venv/bin/activate'; may be repeated",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 0 or more")
    return int(text)


def _cores(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Writes the files and prints what to type. Returns the exit code."""
    from rl.launch import command

    return command.launch(arguments, *split_arguments(arguments.config))
