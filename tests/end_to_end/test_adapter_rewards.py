"""A run whose stages train an adapter, that of a reward model over the same weights, and that of a
critic, rewarded by the reward model."""

import json
import shutil

import launch
import pytest

from rl.commands import cli

STEP = {"prompts_per_step": 4, "optimizer": {"learning_rate": 1e-2}}
SAMPLED = STEP | {"samples_per_prompt": 4, "sampling": {"max_new_tokens": 6}}
SCORED = {"functions": [{"name": "reward_model", "options": {"source": "reward_model"}}]}


@pytest.mark.slow
def test_a_reward_model_over_the_weights_of_the_policy_rewards_it_and_goes_on_after_a_kill(
    tmp_path, capsys
):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "9" * 3} for n in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = [
        STEP | {"algorithm": "dpo", "steps": 1, "data": str(pairs)},
        STEP | {"algorithm": "reward_model", "steps": 2, "data": str(pairs)},
        SAMPLED | {"algorithm": "ppo", "steps": 1, "rewards": SCORED},
    ]
    given = (
        *launch.LIGHT,
        "run.checkpoint_every=1",
        "run.keep_checkpoints=9",
        "model.adapter={rank: 2}",
        f"stages={json.dumps(stages)}",
    )
    run = tmp_path / "run"
    assert launch.train(run, *given) == 0
    steps = {(stage, step): metrics for stage, step, metrics in launch.numbers(run)}
    assert steps["dpo", 1]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps["reward_model", 2]["loss"] < steps["reward_model", 1]["loss"]
    assert steps["ppo", 1]["optim/update_norm"] > 0
    assert steps["ppo", 1]["sampler/logp_diff_max"] < 1e-5
    arrays = 0
    for file in (run / "checkpoints").glob("*/manifest.json"):
        names = json.loads(file.read_text())["arrays"]
        assert not any(name.endswith(("q_proj", "embed_tokens", "o_proj")) for name in names)
        arrays += len(names)
    assert arrays > 0
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "export")
    shutil.rmtree(again / "reward_models")
    first = min(
        int(file.parent.name)
        for file in (again / "checkpoints").glob("*/host.json")
        if json.loads(file.read_text())["stage"] == 1
    )
    for checkpoint in (again / "checkpoints").iterdir():
        if int(checkpoint.name) > first:
            shutil.rmtree(checkpoint)
    assert launch.train(again, *given) == 0
    assert launch.numbers(again) == launch.numbers(run)
    for file in ("export/adapter_model", "reward_models/reward_model/model"):
        contents = [(each / f"{file}.safetensors").read_bytes() for each in (again, run)]
        assert contents[0] == contents[1], file
    out = str(tmp_path / "out")
    assert cli.main(["export", str(run), out, "--step", "reward_model:1"]) == 2
    printed = capsys.readouterr().err
    assert "the stage reward_model trains a reward model" in printed
    written = run / "reward_models" / "reward_model"
    assert str(written) in printed
    assert cli.main(["export", str(written), out, "--dtype", "bfloat16"]) == 0
    assert "the scores after" in capsys.readouterr().out
