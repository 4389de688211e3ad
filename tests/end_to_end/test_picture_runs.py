"""configs/vlm_quickstart.yml: a tiny model learns the colours of drawn pictures, and without them
it does not."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import launch
import numpy as np
import pytest
from safetensors.numpy import load_file

import policy
from policy.huggingface import sources
from rl.records import samples

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "vlm_quickstart.yml"
ACCURACY = "eval/greedy_accuracy"
PICTURES = tuple(
    f"media/{name}"
    for name in ("pictures", "rows", "distinct", "encoded", "encode_seconds", "wait_seconds")
)
SHUFFLED = """
from rl.tasks import pictures


def problems(split, **_):
    made = pictures.problems(pictures.Options(), split)
    for number, problem in enumerate(made):
        other = made[(number * 7919 + 13) % len(made)]
        yield {"prompt": problem.prompt, "completion": problem.completion} | problem.columns | {
            "image": other.columns["image"]
        }
"""


def train(folder: Path, *options: str) -> list[dict]:
    """Runs the configuration; returns its events."""
    code = "import sys; from rl.commands.cli import train_main; sys.exit(train_main())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(CONFIG), f"run.dir={folder}", *options],
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line | line.pop("metrics", {}) for line in lines]


@pytest.mark.slow
def test_the_quickstart_learns_what_pictures_show(tmp_path):
    events = train(tmp_path / "run")
    accuracies = [event[ACCURACY] for event in events if ACCURACY in event]
    assert accuracies[-1] >= 0.95 and accuracies[0] <= 0.05
    steps = [event for event in events if "media/encoded" in event]
    assert {name for event in events for name in event if name.startswith("media/")} == set(
        PICTURES
    )
    assert steps and all(event["media/encoded"] <= 64 for event in steps)
    assert max(event["media/encoded"] for event in steps if event["stage"] == "grpo") > 32
    # The tower is the random one of the start.
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    fresh = policy.create(sources.preset("tiny-vl", media=True), seed=0)
    name = next(name for name in exported if name.endswith("visual.blocks.0.attn.proj.bias"))
    assert np.array_equal(exported[name], np.asarray(fresh.params["image.blocks.o_bias"][0]))


@pytest.mark.slow
def test_with_shuffled_pictures_it_guesses(tmp_path):
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    task = ["data.task=shuffled.py:problems", "data.options={}"]
    task += ["evaluation.data.task=shuffled.py:problems", "evaluation.data.options={}"]
    events = train(tmp_path / "run", *task, "stages.1.steps=40")
    assert [event[ACCURACY] for event in events if ACCURACY in event][-1] <= 0.4


def on_processes(folder: Path, processes: int, devices: int) -> Path:
    """Two stages of two steps with a checkpoint after each; returns the folder of the run."""
    stages = json.dumps(
        [
            {
                "algorithm": "sft",
                "steps": 2,
                "prompts_per_step": 4,
                "optimizer": {"eps": 1e-4},
                "sampling": {"max_new_tokens": 6},
            },
            {
                "algorithm": {"name": "grpo", "kl_coef": 0.05},
                "steps": 2,
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "freeze": [],
                "optimizer": {"eps": 1e-4},
                "sampling": {"max_new_tokens": 6},
            },
        ]
    )
    options = [
        f"run.dir={folder}",
        f"stages={stages}",
        "evaluation.problems=8",
        "generator.slots=16",
    ]
    options += ["data.options.problems=100", "evaluation.every=2"]
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join = (
        ["--processes", str(processes), "--coordinator", f"127.0.0.1:{port}"]
        if processes > 1
        else []
    )
    running = [
        launch.process(
            str(CONFIG),
            *options,
            *join,
            *(["--process", str(i)] if join else []),
            environment=environment,
        )
        for i in range(processes)
    ]
    for code, _, err in [launch.finish(one) for one in running]:
        assert code == 0, err[-2000:]
    return folder


@pytest.mark.slow
def test_two_processes_make_the_numbers_of_one(tmp_path):
    """The second stage trains the tower, so its table and that of the reference are encoded
    again."""
    one, two = on_processes(tmp_path / "one", 1, 4), on_processes(tmp_path / "two", 2, 2)
    for ours, theirs in zip(launch.numbers(two), launch.numbers(one), strict=True):
        assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
        for name, value in theirs[2].items():
            np.testing.assert_allclose(
                ours[2][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{ours[:2]} {name}"
            )
    digests = {each["digest"] for line in samples.read(two) for each in line["media"]}
    assert digests == {path.stem for path in (two / "media").iterdir()}


PAIRS = """
from rl.tasks import pictures


def problems(split):
    names = list(pictures.COLOURS)
    for problem in pictures.problems(pictures.Options(problems=60), split):
        right = problem.columns["answer"]
        wrong = names[(names.index(right) + 1) % len(names)]
        yield {"prompt": problem.prompt, "chosen": right, "rejected": wrong, "image": problem.columns["image"]}
"""
COMMON = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "steps": 2,
    "sampling": {"max_new_tokens": 6},
}


def every_kind(pairs: Path) -> list[dict]:
    """A stage of each kind; rewards come from a reward model of the run. Only one trains the
    tower."""
    data, scored = (
        {"task": f"{pairs}:problems"},
        {"name": "reward_model", "options": {"source": "reward_model"}},
    )
    stages = [
        {"algorithm": "reward_model", "data": data},
        {"algorithm": "dpo", "data": data},
        {"algorithm": "kto", "data": data},
        {"algorithm": {"name": "ppo", "critic_trunk": "own"}},
        {"algorithm": {"name": "ppo", "critic_trunk": "policy"}},
        {"algorithm": "remax", "rewards": {"functions": [scored]}},
        {"algorithm": "dapo", "prompts_per_step": 3},
        {"algorithm": {"name": "grpo", "kl_coef": 0.05}, "freeze": []},
        {"algorithm": "sft"},
    ]
    return [COMMON | stage for stage in stages]


@pytest.mark.slow
def test_every_kind_of_stage_reads_pictures_and_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    (tmp_path / "pairs.py").write_text(PAIRS)
    options = [f"stages={json.dumps(every_kind(tmp_path / 'pairs.py'))}", "run.checkpoint_every=1"]
    options += [
        "data.options.problems=60",
        "evaluation.problems=8",
        "evaluation.every=2",
        "generator.slots=8",
    ]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    code, _, err = launch.finish(launch.process(str(CONFIG), f"run.dir={straight}", *options))
    assert code == 0, err[-2000:]
    for lines in (8, 19):
        running = launch.process(str(CONFIG), f"run.dir={killed}", *options)
        launch.wait_for(lambda lines=lines: launch.lines(killed) >= lines, running)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    code, _, err = launch.finish(launch.process(str(killed)))
    assert code == 0, err[-2000:]
    # A table that a continued stage makes anew encodes what it would otherwise have copied.
    assert without(launch.numbers(killed), "media/encoded") == without(
        launch.numbers(straight), "media/encoded"
    )
    assert launch.weights(killed) == launch.weights(straight) and launch.samples(
        killed
    ) == launch.samples(straight)


def without(numbers: list[tuple], name: str) -> list[tuple]:
    return [
        (stage, step, {key: repr(value) for key, value in metrics.items() if key != name})
        for stage, step, metrics in numbers
    ]


@pytest.mark.slow
def test_meshes_make_the_numbers_of_one_device(tmp_path):
    stage = COMMON | {
        "algorithm": {"name": "grpo", "kl_coef": 0.05},
        "freeze": [],
        "optimizer": {"eps": 1e-4},
    }
    options = [
        f"stages={json.dumps([stage])}",
        "evaluation=null",
        "data.options.problems=60",
        "generator.slots=8",
    ]
    options += ["mesh.sharding_tolerance=0.1"]
    meshes = {
        "one": [],
        "fsdp": ["mesh.fsdp=2"],
        "tensor": ["mesh.fsdp=1", "mesh.tensor=2"],
        "context": ["mesh.fsdp=1", "mesh.context=2", "model.context_parallel=ulysses"],
        "exact": ["generator.exact=true"],
    }
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for name, mesh in meshes.items():
        how = environment if name in ("fsdp", "tensor", "context") else {}
        code, _, err = launch.finish(
            launch.process(
                str(CONFIG), f"run.dir={tmp_path / name}", *options, *mesh, environment=how
            )
        )
        assert code == 0, err[-2000:]
    for name in ("fsdp", "tensor", "context"):
        for ours, theirs in zip(
            launch.numbers(tmp_path / name), launch.numbers(tmp_path / "one"), strict=True
        ):
            for key in (
                "loss",
                "optim/grad_norm",
                "reward/mean",
                "kl/ref",
                "entropy",
                "media/encoded",
            ):
                np.testing.assert_allclose(
                    ours[2][key], theirs[2][key], rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}"
                )
    assert all(
        metrics["sampler/logp_diff_max"] == 0
        for _, _, metrics in launch.numbers(tmp_path / "exact")
    )
