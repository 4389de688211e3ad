"""Algorithms that need more than rewards: other groups, greedy completions, penalties in the
rewards, adaptive coefficients.
Dynamic sampling with filters: the groups that it carries over survive a kill, with the ids that
filters left."""

import json
import os
import signal

import launch
import pytest
from test_metrics import ASKED_FOR, documented, written

from rl.commands import cli
from rl.records import events

OPTIONS = {
    "dapo": {"dynamic_batches": 3, "mask_truncated": True},
    "grpo": {
        "combine": "normalize_then_sum",
        "kl_coef": 0.05,
        "kl": "unbiased",
        "reference_every": 1,
        "reference_mix": 0.6,
        "entropy_target": 5.0,
        "correction": "token_truncate",
        "rejection": "sequence_mean_k3",
        "rejection_max": 0.1,
        "rejection_changes_denominator": True,
    },
    "reinforce_pp": {"kl_reward_coef": 0.05, "kl_target": 0.1, "old_logp": "sampler"},
    "remax": {},
    "rloo": {"kl_reward_coef": 0.05, "normalize_advantages": True},
}
FILTERS = {"dapo": {"top_p": 0.9, "top_k": 14}, "remax": {"min_p": 0.2, "max_kept": 3}}
SIZES = (
    "vocab_size: 32, num_hidden_layers: 1, hidden_size: 32, intermediate_size: 32, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16"
)
DENSE = (
    f"model={{source: qwen3-0.6b, overrides: {{{SIZES}}}}}",
    "evaluation=null",
    "run.checkpoint_every=1",
)


def stage(name, steps=1, **more):
    options = {
        "steps": steps,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "optimizer": {"learning_rate": 1e-3},
    }
    return (
        options
        | {
            "algorithm": {"name": name} | OPTIONS.get(name, {}),
            "sampling": {"max_new_tokens": 6} | FILTERS.get(name, {}),
            "max_logp_diff": 1e-4,
        }
        | more
    )


def run(directory, stages, *more):
    overrides = (*DENSE, f"stages={json.dumps(stages)}", *more)
    return launch.finish(launch.process(*launch.arguments(directory), *overrides), timeout=900)


@pytest.mark.slow
def test_what_they_ask_for_is_there(tmp_path):
    stages = [stage(name, updates_per_step=2 if name == "grpo" else 1) for name in OPTIONS]
    code, _, err = run(tmp_path, stages)
    assert code == 0, err
    rows = [row for row in events.read(tmp_path / "events.jsonl") if row["step"]]
    assert [row["stage"] for row in rows] == list(OPTIONS)
    assert not written(tmp_path) - documented() and set(ASKED_FOR) <= written(tmp_path)
    for row in rows:
        metrics = row["metrics"]
        assert metrics["optim/grad_norm"] > 0 and metrics["optim/skipped"] == 0, row
        assert metrics["sampler/logp_diff_max"] < 1e-5 and metrics["advantage/std"] > 0, row
    by_stage = {row["stage"]: row["metrics"] for row in rows}
    assert by_stage["grpo"]["entropy_coef"] == 0.0  # of the first update of the step; then it grows
    assert (
        "reward/greedy" in by_stage["remax"]
        and "kl/reward" in by_stage["rloo"]
        and "dynamic/kept_share" in by_stage["dapo"]
    )


@pytest.mark.slow
def test_programs_of_greedy_completions_are_compiled_ahead(tmp_path):
    """They have no logits processors, and the samples of the stage do."""
    sampling = {"max_new_tokens": 6, "min_tokens": 3}
    code, _, err = run(
        tmp_path, [stage("remax", sampling=sampling)], "generator.strict_shapes=true"
    )
    assert code == 0, err
    (metrics,) = [row["metrics"] for row in events.read(tmp_path / "events.jsonl") if row["step"]]
    assert metrics["sampler/logp_diff_max"] < 1e-5 and metrics["sampler/kept_overflow"] == 0


@pytest.mark.slow
def test_groups_left_over_are_used_after_a_kill(tmp_path):
    """A run that is killed after its second step goes on as one that was not, with the groups that
    it carried."""
    reward = "rewards={functions: [tests/end_to_end/own_rewards.py:seldom], workers: 1}"
    given = (
        *DENSE,
        f"stages={json.dumps([stage('dapo', steps=4)])}",
        reward,
        "data.options.problems=10000",
    )
    full, broken = tmp_path / "full", tmp_path / "broken"
    code, _, err = launch.finish(launch.process(*launch.arguments(full), *given))
    assert code == 0, err
    running = launch.process(*launch.arguments(broken), *given)
    launch.wait_for((broken / "checkpoints" / "0000000002").exists, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert cli.train_main([str(broken)]) == 0
    launch.assert_same_run(broken, full)
    metrics = [row["metrics"] for row in events.read(full / "events.jsonl") if row["step"] > 2]
    assert any(each["dynamic/carried"] and each["async/staleness_max"] for each in metrics)
