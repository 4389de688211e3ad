"""Runs whose data mix rows of text with rows that have pictures or sounds (mixed_rows.py): on two
processes of which one holds text only, in stages that train the tower and stages that do not, and
after a kill."""

import json
import os
import signal
import socket
from pathlib import Path

import launch
import numpy as np
import pytest

from rl.records import samples

HERE = Path(__file__).parent
CONFIG, ROWS = HERE / "mixed.yml", HERE / "mixed_rows.py"
COMMON = {
    "prompts_per_step": 4,
    "steps": 2,
    "optimizer": {"eps": 1e-4},
    "sampling": {"max_new_tokens": 6},
}
SAMPLED = COMMON | {"samples_per_prompt": 4}
TRAINED = SAMPLED | {
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "freeze": [],
    "updates_per_step": 4,
}


def of(name: str) -> dict:
    return {"task": f"{ROWS}:{name}"}


def rewards(name: str) -> dict:
    return {"functions": [f"{ROWS}:{name}"], "workers": 1}


def arguments(folder: Path, stages: list[dict], *options: str) -> list[str]:
    return [str(CONFIG), f"run.dir={folder}", f"stages={json.dumps(stages)}", *options]


def on_devices(count: int) -> dict[str, str]:
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


def run(
    folder: Path, stages: list[dict], *options: str, processes: int = 1, devices: int = 1
) -> Path:
    """Returns the folder of a run that ends well."""
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
            *arguments(folder, stages, *options),
            *join,
            *(["--process", str(i)] if join else []),
            environment=on_devices(devices),
        )
        for i in range(processes)
    ]
    for code, _, err in [launch.finish(one) for one in running]:
        assert code == 0, err[-2000:]
    return folder


def by_stage(folder: Path) -> dict[str, list[dict]]:
    """The metrics of the steps of each stage, without evaluations before the first."""
    steps: dict[str, list[dict]] = {}
    for stage, step, metrics in launch.numbers(folder):
        if step:
            steps.setdefault(stage, []).append(metrics)
    return steps


@pytest.mark.slow
def test_a_process_without_a_picture_takes_part(tmp_path):
    """Its rows have the column `images` for rewards, and it decodes the pictures of the other."""
    stages = [
        COMMON | {"algorithm": "sft", "prompts_per_step": 8},
        COMMON | {"algorithm": "dpo", "data": of("pairs")},
        TRAINED,
    ]
    one = run(tmp_path / "one", stages, devices=4)
    two = run(tmp_path / "two", stages, processes=2, devices=2)
    for ours, theirs in zip(launch.numbers(two), launch.numbers(one), strict=True):
        assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
        for name, value in theirs[2].items():
            np.testing.assert_allclose(
                ours[2][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{ours[:2]} {name}"
            )
    shown = [each["digest"] for line in samples.read(two) for each in line.get("media", ())]
    assert set(shown) == {path.stem for path in (two / "media").iterdir()}
    assert {len(line.get("media", ())) for line in samples.read(two)} == {0, 1, 2}


def going_on() -> list[dict]:
    """Steps of text alone; groups that are carried to the next step; a stage that trains the
    tower, with mini-batches that have no picture; one that does not."""
    return [
        COMMON | {"algorithm": "sft", "data": of("text"), "steps": 1},
        SAMPLED
        | {"algorithm": "dapo", "samples_per_prompt": 2, "steps": 3, "rewards": rewards("odd")},
        TRAINED,
        COMMON | {"algorithm": "sft", "data": of("conversations")},
    ]


@pytest.mark.slow
def test_a_run_of_text_and_pictures_goes_on_to_the_same_bits_after_kills(tmp_path):
    straight, killed = run(tmp_path / "straight", going_on()), tmp_path / "killed"
    steps = by_stage(straight)
    assert all(each["media/pictures"] == each["media/encoded"] == 0 for each in steps["sft"])
    assert all(
        each["media/encoded"] <= each["media/distinct"] * each["media/pictures"]
        for each in steps["sft-2"]
    )
    assert {name: len(each) for name, each in steps.items()} == {
        "sft": 1,
        "dapo": 3,
        "grpo": 2,
        "sft-2": 2,
    }
    carried = [each["dynamic/carried"] for each in steps["dapo"]]
    assert carried[1] > 0, "no group is carried, so this test says nothing about them"
    saved = "run.checkpoint_every=1"
    for lines in (4, 9):  # after the first steps of `dapo` and `grpo`
        running = launch.process(*arguments(killed, going_on(), saved), environment=on_devices(1))
        launch.wait_for(lambda lines=lines: launch.lines(killed) >= lines, running)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    run(killed, going_on(), saved)
    for (*ours, metrics), (*theirs, others) in zip(
        launch.numbers(killed), launch.numbers(straight), strict=True
    ):
        # What a table that is made anew encodes it would otherwise have copied.
        assert ours == theirs and repr(metrics | {"media/encoded": 0}) == repr(
            others | {"media/encoded": 0}
        )
    assert launch.weights(killed) == launch.weights(straight) and launch.samples(
        killed
    ) == launch.samples(straight)


@pytest.mark.slow
def test_more_meshes_and_quantised_rollouts(tmp_path):
    """Rows of text and rows with two pictures, with a trained tower: replicas, sequences that are
    cut."""
    one = by_stage(run(tmp_path / "one", [TRAINED], "evaluation=null"))["grpo"]
    meshes = {"data": ["mesh.data=2", "mesh.fsdp=1"], "context": ["mesh.context=2", "mesh.fsdp=1"]}
    for name, mesh in meshes.items():
        options = ("evaluation=null", "mesh.sharding_tolerance=0.1", *mesh)
        for ours, theirs in zip(
            by_stage(run(tmp_path / name, [TRAINED], *options, devices=2))["grpo"], one, strict=True
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
                    ours[key], theirs[key], rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}"
                )
    stored = (
        "evaluation=null",
        "generator.weights=int8",
        "generator.kv_cache=int8",
        "generator.cache=paged",
    )
    steps = by_stage(run(tmp_path / "int8", [TRAINED], *stored, "generator.page_size=16"))["grpo"]
    assert all(0 < each["sampler/logp_diff_mean"] < 0.05 for each in steps)


@pytest.mark.slow
def test_sounds_pictures_and_text_through_a_model_with_experts(tmp_path):
    """Rows with a sound, with a picture and a sound, and of text; replayed routes choose the
    experts of the update."""
    sft = COMMON | {"algorithm": "sft", "freeze": []}
    grpo = SAMPLED | {"algorithm": {"name": "grpo", "kl_coef": 0.05}, "router_replay": True}
    model = ["model.source=tiny-omni", "model.overrides={text_config: {mlp_only_layers: []}}"]
    data = [f"{key}.task={ROWS}:sounds" for key in ("data", "evaluation.data")]
    alphabet = 'tokenizer.alphabet="abcdefghijklmnopqrstuvwxyz ?#ABCDEFG"'
    folder = run(
        tmp_path / "run", [sft, grpo], *model, *data, alphabet, f"rewards.functions=[{ROWS}:odd]"
    )
    steps = by_stage(folder)
    assert all(each["sampler/logp_diff_max"] < 1e-5 for each in steps["grpo"])
    assert all(each["media/encoded"] > 0 for each in (*steps["sft"], *steps["grpo"]))
    shown = {tuple(each["kind"] for each in line.get("media", ())) for line in samples.read(folder)}
    assert shown == {("audio",), ("image", "audio"), ()}
