"""A decoder with random indexers goes through the stages that make it sparse."""

import launch
import numpy as np
import pytest

from rl.records import events

FILE = """
model:
  overrides: {architectures: [DeepseekV32ForCausalLM], model_type: deepseek_v32, index_topk: 4, index_n_heads: 8,
    index_head_dim: 8, initializer_range: 0.3}
data: {options: {problems: 10000}}  # the model memorises few, and the indexers' losses stay informative
evaluation: null
stages:
  - {algorithm: sft, steps: 16, prompts_per_step: 16, optimizer: {learning_rate: 2e-2},
    indexer: {training: dense_warmup}}
  - {algorithm: sft, steps: 12, prompts_per_step: 16, optimizer: {learning_rate: 5e-3}, indexer: {training: sparse}}
"""
GRPO = (
    "{algorithm: grpo, steps: 2, prompts_per_step: 4, samples_per_prompt: 4, sampling: "
    "{max_new_tokens: 6}, indexer: {training: sparse}}"
)


def trained(directory, *more) -> dict[str, list[dict]]:
    """The metrics of every step of a run, by stage."""
    file = directory / "sparse.yml"
    file.write_text(FILE)
    assert launch.train(directory / "run", str(file), *more) == 0
    stages = {}
    for row in events.read(directory / "run" / "events.jsonl"):
        if row["step"]:
            stages.setdefault(row["stage"], []).append(row["metrics"])
    return stages


@pytest.mark.slow
def test_indexers_learn_in_a_warm_up_and_go_on_learning_with_the_rest(tmp_path):
    stages = trained(tmp_path)
    warm, sparse = stages["sft"], stages["sft-2"]
    for metrics in warm:
        assert "nll" not in metrics and np.isclose(
            metrics["loss"], 2 * metrics["indexer/kl"]
        )  # of two layers
    for rows, drop in ((warm, 0.7), (sparse, 0.95)):
        kl = [metrics["indexer/kl"] for metrics in rows]
        assert 0 < np.mean(kl[-3:]) < drop * np.mean(kl[:3]), kl
    assert np.mean([m["indexer/recall"] for m in warm[-3:]]) > np.mean(
        [m["indexer/recall"] for m in warm[:3]]
    )
    assert sparse[-1]["nll"] < sparse[0]["nll"]


@pytest.mark.slow
def test_reinforcement_learning_trains_what_it_samples_with(tmp_path):
    for metrics in trained(tmp_path, f"stages=[{GRPO}]")["grpo"]:
        assert metrics["indexer/kl"] > 0 and metrics["sampler/logp_diff_max"] < 1e-5
