"""docs/metrics.md names every metric that a run writes, and no other."""

import dataclasses
import json
import re

import jax.numpy as jnp
import launch
import numpy as np
import pytest

import rl.algorithms
from rl.records import events
from rl.training.teachers.teacher import COMPARED
from rl.training.weights import WeightGroup

PREDICTION = ("mtp/loss", "mtp/acceptance", "mtp/grad_norm", "speculative/accepted_per_step")
EXACT = ("generator/replaced_share",)
ASKED_FOR = (
    *(
        "dynamic/batches",
        "dynamic/kept_share",
        "dynamic/carried",
        "dynamic/without_difference",
        "dynamic/reward_mean",
    ),
    "eval/maj@<k>",  # test_evaluation.py
    *("entropy_coef", "entropy_bonus_applied", "reward/greedy", "kl/coef"),
    *("sampler/kept_mean", "sampler/kept_overflow"),
)
REWARD_MODELS = ("time/reward_models",)
TEACHERS = ("time/teacher", "distill/scored")  # test_teacher_runs.py
RESHARDED = ("time/sync",)
HELD_OUT = ("held_out/<metric>", "time/held_out")  # test_held_out.py
SOURCES = (
    "eval/<source>/<metric>",
    *(
        f"source/<source>/{name}"
        for name in ("rows", "epoch", "reward_mean", "frac_zero_std", "mean_length", "nll")
    ),
)  # test_mixture_runs.py
PICTURES = tuple(
    f"media/{name}"
    for name in ("pictures", "rows", "distinct", "encoded", "encode_seconds", "wait_seconds")
)  # test_picture_runs.py
REPLAY = ("moe/replayed", "moe/replay_disagreement")
INDEXER = ("indexer/kl", "indexer/recall")
UTILISATION = (
    "perf/device_memory_share",
    "perf/sample_hbm_utilisation",
    "perf/mfu_sample",
    "perf/mfu_logprob",
    "perf/mfu_train",
    "perf/mfu_step",
)
CRITIC = (
    "optim/lr",
    "optim/grad_norm",
    "optim/update_norm",
    "optim/skipped",
    "moe/max_load",
    "moe/balance",
)


def documented() -> set[str]:
    text = (launch.ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def written(directory) -> set[str]:
    return {
        general(name) for row in events.read(directory / "events.jsonl") for name in row["metrics"]
    }


def general(name: str) -> str:
    """The name as the document has it: one entry for all functions, layers and parts, and for all
    k."""
    name = re.sub(r"^rewards/[^/]+/", "rewards/<name>/", name)
    name = re.sub(r"^(activation/\w+)/\d+$", r"\1/<layer>", name)
    return re.sub(r"@\d+$", "@<k>", re.sub(r"^grad_norm/\w+$", "grad_norm/<part>", name))


def of_the_losses() -> set[str]:
    """Metrics of policy-gradient losses with everything switched on that adds some, and of PPO's
    critic."""
    options = {
        "correction": "token_truncate",
        "rejection": "token_k3",
        "rejection_max": 1.0,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
    }
    algorithm = rl.algorithms.get("ppo", dual_clip=3.0, positive_nll_coef=0.1, **options)
    ones = jnp.ones((2, 3))
    arrays = dict.fromkeys(("logp", "old_logp", "sampler_logp", "ref_logp"), -ones)
    inputs = rl.algorithms.PolicyInputs(
        mask=ones, entropy=ones, advantages=ones[:, 0], correct=ones, max_length=3, **arrays
    )
    others = [rl.algorithms.get(name) for name in rl.algorithms.known()]
    others += [
        rl.algorithms.get("distill", divergence=kind, features_coef=1.0)
        for kind in ("reverse", "jsd")
    ]
    inputs = dataclasses.replace(
        inputs, extra={"label": ones, "kl": ones}, divergence=ones, features=ones
    )
    inputs = dataclasses.replace(inputs, teacher=dict.fromkeys(COMPARED, ones))
    pairs = dataclasses.replace(inputs, segments=jnp.array([[1, 1, 2]] * 2), scores=ones)
    result = {
        name
        for each in others
        for name in each.loss(pairs if each.stage in ("preference", "reward_model") else inputs)[1]
    } | set(algorithm.loss(inputs)[1])
    result |= set(algorithm.value_loss(ones, ones, ones, inputs)[1])
    host = np.ones((2, 3))
    result |= others[-1].adaptive_coefs.keys()
    return result | set(algorithm.advantages_per_token(np.ones(2), -host, -host, host, host)[2])


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(uninterrupted):
    assert not written(uninterrupted) - documented()


def test_tokens_per_second_are_those_of_the_samples(uninterrupted):
    """On one device. A prompt has a token for each character."""
    samples = launch.trained(uninterrupted)
    rows = [
        row
        for row in events.read(uninterrupted / "events.jsonl")
        if row["step"] and row["stage"] != "sft"
    ]
    assert len(rows) == 4
    for row in rows:
        metrics, mine = (
            row["metrics"],
            [s for s in samples if (s["stage"], s["step"]) == (row["stage"], row["step"])],
        )
        made = sum(len(sample["tokens"]) for sample in mine)
        tokens = {"sample": made} | dict.fromkeys(
            ("logprob", "train", "step"), made + sum(len(s["prompt"]) for s in mine)
        )
        assert metrics["perf/step_tokens"] == tokens["step"] > made > 0
        for part, time in {
            "sample": "sample",
            "logprob": "logprob",
            "train": "update",
            "step": "step",
        }.items():
            assert metrics[f"perf/{part}_tokens_per_s"] * metrics[f"time/{time}"] == pytest.approx(
                tokens[part]
            )


def test_every_metric_of_the_losses_is_documented_and_no_other_name(uninterrupted):
    losses = of_the_losses()
    assert not losses - documented()
    possible = (
        losses
        | written(uninterrupted)
        | {f"value/{name}" for name in CRITIC}
        | {
            f"{WeightGroup.PROJECTIONS.prefix}{name}"
            for name in CRITIC
            if name.startswith("optim/")
        }
        | {*PREDICTION, *INDEXER, *EXACT, *REPLAY}
    )
    possible |= {
        *ASKED_FOR,
        *UTILISATION,
        *RESHARDED,
        *REWARD_MODELS,
        *TEACHERS,
        *PICTURES,
        *HELD_OUT,
        *SOURCES,
    }
    # Only where a completion ended by itself, which those of a run of three steps may not have.
    possible |= {f"completion/{name}_terminated_length" for name in ("mean", "min", "max")}
    assert not documented() - possible


@pytest.mark.slow
def test_every_metric_of_a_run_with_a_critic_is_documented(tmp_path):
    stage = {
        "algorithm": "ppo",
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "sampling": {"max_new_tokens": 4},
    }
    assert launch.train(tmp_path / "run", f"stages={json.dumps([stage])}") == 0
    names = written(tmp_path / "run")
    assert not names - documented()
    assert {f"value/{name}" for name in CRITIC} <= names


@pytest.mark.slow
def test_every_metric_of_a_run_that_drafts_is_documented(tmp_path):
    stage = {
        "algorithm": "grpo",
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "sampling": {"max_new_tokens": 8},
    }
    stages = [stage | {"mtp": {"detach": True}, "optimizer": {"learning_rate": 1e-2}}]
    changes = (
        "model.multi_token_prediction.depth=1",
        "generator.speculative=2",
        f"stages={json.dumps(stages)}",
    )
    assert launch.train(tmp_path / "run", *changes) == 0
    names = written(tmp_path / "run")
    assert not names - documented() and set(PREDICTION) <= names
    last = events.read(tmp_path / "run" / "events.jsonl")[-1]["metrics"]
    assert last["mtp/grad_norm"] > 0 and last["sampler/logp_diff_max"] < 1e-4
    assert launch.train(tmp_path / "again", "generator.speculative=0", *changes[::2]) == 0
    tokens = [[line["tokens"] for line in launch.trained(tmp_path / d)] for d in ("run", "again")]
    assert tokens[0] == tokens[1]
