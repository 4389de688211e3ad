"""`rl explain` names what is wrong with runs that tests/illnesses/make.py made, and nothing in
healthy ones.

The fixtures are what the rules read of real runs. tests/end_to_end/test_illnesses.py makes some of
these runs anew.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl.commands import cli
from rl.errors import ConfigError
from rl.views.explain import findings, verdict
from rl.views.explain.series import Series, correlation

RUNS = Path(__file__).resolve().parents[1] / "illnesses" / "recorded"
ILL = {
    "learning_rate": "learning rate too high",
    "learning_rate_sft": "learning rate too high",
    "learning_rate_updates": "learning rate too high",
    "equal_rewards": "equal rewards",
    "length": "length runaway",
    "entropy": "entropy collapse",
    "kl": "KL blow-up",
    "truncated": "clipped completions",
    "mask": "wrong mask",
    "template_between": "wrong template",
    "template_plain": "wrong template",
    "stale": "stale groups",
    "faults": "reward faults",
    "faults_some": "reward faults",
    "exhausted": "data exhausted",
    "exhausted_sft": "data exhausted",
    "repeated": "data exhausted",
    "frozen": "learning rate too low",
    "frozen_sft": "learning rate too low",
    "held": "KL penalty too high",
    "filtered": "groups dropped",
    "memory": "memory near its end",
}
HEALTHY = ("base", "healthy", "healthy_kl", "healthy_sft", "healthy_texts")


@pytest.mark.parametrize("name", ILL)
def test_an_ill_run_is_named_with_number_step_and_key(name):
    lines = verdict(RUNS / name)
    assert 2 <= len(lines) <= 8
    assert any(line.startswith(ILL[name]) for line in lines[1:]), lines
    first = next(each for each in findings(RUNS / name) if each.name == ILL[name])
    assert first.stage and first.step is not None and len(first.change) > 10
    assert any(character.isdigit() for character in first.text) or first.name == "wrong template"


def test_advice_tells_a_default_from_a_value_that_was_set(tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(RUNS / "learning_rate", copy)
    record = (
        json.loads((copy / "run.json").read_text())
        if (copy / "run.json").exists()
        else {"attempts": [{}]}
    )

    def advice(*changed):
        record["attempts"][-1]["changed"] = list(changed)
        (copy / "run.json").write_text(json.dumps(record))
        return verdict(copy)[1]

    rate = findings(RUNS / "learning_rate")[0].change.partition("(now ")[2].partition(")")[0]
    assert f"stages.0.optimizer.learning_rate (by default {rate}) to a tenth" in advice(
        "stages.0.steps"
    )
    assert f"stages.0.optimizer.learning_rate (now {rate}) to a tenth" in advice(
        "stages.0.optimizer.learning_rate"
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name):
    assert not [each.message() for each in findings(RUNS / name) if each.level != "note"]
    assert verdict(RUNS / name)[0].endswith("no illness")


def test_the_root_cause_comes_first():
    assert verdict(RUNS / "learning_rate")[1].startswith("learning rate too high (grpo step 2)")


def run(directory: Path, rows: list[dict], stage: str = "grpo", **files: str) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [
        json.dumps({"stage": stage, "step": step, "metrics": row})
        for step, row in enumerate(rows, start=1)
    ]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    stages = (
        "stages: [{algorithm: {name: grpo}, steps: 20, prompts_per_step: 4, "
        "samples_per_prompt: 4}]\n"
    )
    (directory / "config.yml").write_text(files.pop("config", stages))
    for name, text in files.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory


def named(directory: Path) -> list[str]:
    return [each.name for each in findings(directory)]


def test_a_small_dataset_of_several_is_repeated_too_often(tmp_path):
    def rows(rare):
        return [
            {
                "nll": 2.0 - 0.01 * step,
                "data/epoch": 0.1 * step,
                "source/common/epoch": 0.05 * step,
                "source/rare/epoch": rare * step,
            }
            for step in range(1, 31)
        ]

    data = "data: [{path: a, name: common, weight: 9}, {path: b, name: rare, weight: 1}]\n"
    config = data + "stages: [{algorithm: {name: sft}, steps: 30, prompts_per_step: 4}]\n"
    assert "data exhausted" not in named(run(tmp_path / "few", rows(0.1), "sft", config=config))
    faults = findings(run(tmp_path / "many", rows(0.3), "sft", config=config))
    (exhausted,) = [each for each in faults if each.name == "data exhausted"]
    assert exhausted.text.startswith("the stage has gone over its dataset rare 9 times")
    assert "lower the weight of rare" in exhausted.change and exhausted.step == 14


def test_two_steps_say_little(tmp_path):
    equal = {
        "reward/frac_zero_std": 1.0,
        "reward/std": 0.0,
        "reward/mean": 0.0,
        "completion/truncated_ratio": 1.0,
    }
    assert named(run(tmp_path, [equal] * 2)) == []
    assert "fewer than 3 steps" in verdict(tmp_path)[0]
    assert named(run(tmp_path, [equal] * 3)) == ["wrong template or stop token", "equal rewards"]


def test_equal_rewards_of_solved_problems_are_no_illness(tmp_path):
    solved = {"reward/frac_zero_std": 0.9, "reward/std": 0.1, "reward/mean": 0.95}
    assert named(run(tmp_path, [solved] * 8)) == []
    assert named(run(tmp_path, [solved | {"reward/mean": 0.05}] * 8)) == ["equal rewards"]


def test_equal_rewards_are_no_illness_where_a_teacher_grades_tokens(tmp_path):
    row = {"reward/frac_zero_std": 1.0, "reward/std": 0.0, "reward/mean": 0.0, "loss": 1.0}
    assert named(run(tmp_path / "grpo", [row] * 8)) == ["equal rewards"]
    assert named(run(tmp_path / "opd", [row | {"distill/reverse_kl": 1.0}] * 8)) == []


def test_an_evaluation_that_leaves_completions_out_is_named(tmp_path):
    evaluated = {"eval/problems": 64.0, "eval/greedy_accuracy": 1.0, "eval/unscored": 0.0}
    assert named(run(tmp_path, [evaluated] * 3)) == []
    assert named(run(tmp_path, [evaluated, evaluated | {"eval/unscored": 32.0}])) == [
        "evaluation without scores"
    ]
    assert "32 of 64 completions" in verdict(tmp_path)[1]


def test_memory_that_grows_is_named_before_it_is_full(tmp_path):
    grows = [{"perf/host_memory_share": 0.5 + 0.03 * step} for step in range(10)]
    assert named(run(tmp_path, grows)) == ["memory near its end"]
    assert "full in about" in verdict(tmp_path)[1]
    assert named(run(tmp_path, [{"perf/host_memory_share": 0.6}] * 10)) == []
    assert named(run(tmp_path, [{"perf/device_memory_share": 0.97}])) == ["memory near its end"]


def test_updates_that_are_not_finite(tmp_path):
    rows = [{"optim/skipped": float(step > 2), "loss": None} for step in range(6)]
    assert findings(run(tmp_path, rows))[0].step == 4


def test_a_generator_that_differs_from_the_trainer(tmp_path):
    rows = [{"sampler/logp_diff_mean": 0.01}] * 4
    assert named(run(tmp_path, rows)) == ["generator and trainer disagree"]
    bfloat16 = "model: {dtype: bfloat16}\nstages: [{algorithm: grpo}]\n"
    assert named(run(tmp_path, rows, config=bfloat16)) == []


def test_completions_that_write_the_next_turn(tmp_path):
    rows = [{"completion/truncated_ratio": 0.5, "completion/mean_length": 9.0}] * 4
    text = [
        json.dumps({"stage": "grpo", "step": 4, "completion": f"4\nUser: {n}", "reward": 0.0})
        for n in range(9)
    ]
    assert named(run(tmp_path, rows)) == ["clipped completions"]
    assert named(run(tmp_path, rows, samples_jsonl="\n".join(text))) == [
        "wrong template or stop token"
    ]


def test_a_longer_answer_that_scores_better_is_no_illness(tmp_path):
    rows = [
        {"completion/mean_length": 100.0 + 10 * n, "reward/mean": 0.1 + 0.02 * n, "reward/std": 0.2}
        for n in range(30)
    ]
    assert named(run(tmp_path, rows)) == []
    assert named(run(tmp_path, [row | {"reward/mean": 0.3} for row in rows])) == ["length runaway"]


def test_a_small_learning_rate_is_an_illness_only_where_the_loss_of_sft_stays(tmp_path):
    stages = "stages: [{{algorithm: {{name: {}}}, optimizer: {{learning_rate: {}}}}}]\n"
    flat = [{"loss": 2.0, "optim/lr": 5e-7}] * 30
    falling = [row | {"loss": 2.0 - 0.01 * step} for step, row in enumerate(flat)]
    assert named(run(tmp_path, flat, "sft", config=stages.format("sft", 5e-7))) == [
        "learning rate too low"
    ]
    assert named(run(tmp_path, falling, "sft", config=stages.format("sft", 5e-7))) == []
    assert named(run(tmp_path, flat, "dpo", config=stages.format("dpo", 5e-7))) == []
    assert named(run(tmp_path, flat[:4], "dpo", config=stages.format("dpo", 1e-9))) == [
        "learning rate too low"
    ]


def test_a_rate_of_full_training_is_remarked_where_an_adapter_does_not_get_better(tmp_path):
    def remarks(rate: float, rise: float, more: str = "", model: str = "{adapter: {rank: 8}}"):
        rows = [
            {"reward/mean": 0.2 + rise * n, "reward/std": 0.4, "optim/lr": rate} for n in range(5)
        ]
        stage = f"{{algorithm: {{name: grpo}}, optimizer: {{learning_rate: {rate}}}{more}}}"
        path = run(tmp_path, rows, config=f"model: {model}\nstages: [{stage}]\n")
        return [(each.name, each.level) for each in findings(path)]

    remark = [("learning rate of an adapter", "note")]
    assert remarks(1e-6, 0.0) == remark
    assert remarks(1e-4, 0.0) == remarks(1e-6, 0.1) == []
    assert remarks(1e-6, 0.0, ", trains: weights") == remarks(1e-6, 0.0, model="{}") == []


def test_a_large_penalty_of_a_run_that_learns_is_no_illness(tmp_path):
    stages = "stages: [{algorithm: {name: grpo, kl_coef: 2.0}, prompts_per_step: 32}]\n"
    rows = [{"reward/mean": 0.1, "reward/std": 0.3, "kl/ref": 0.01}] * 12
    assert named(run(tmp_path, rows, config=stages)) == ["KL penalty too high"]
    learns = [row | {"reward/mean": 0.1 + 0.05 * step} for step, row in enumerate(rows)]
    assert named(run(tmp_path, learns, config=stages)) == []
    assert named(run(tmp_path, rows, config=stages.replace("2.0", "0.1"))) == []


def test_dynamic_sampling_that_fills_its_steps_is_no_illness(tmp_path):
    stages = "stages: [{algorithm: {name: dapo, dynamic_batches: 8}, prompts_per_step: 8}]\n"
    rows = [{"dynamic/kept_share": 0.15, "dynamic/without_difference": 0.0, "reward/mean": 0.3}] * 6
    assert named(run(tmp_path, rows, "dapo", config=stages)) == []
    unfilled = [row | {"dynamic/without_difference": 6.0} for row in rows]
    assert named(run(tmp_path, unfilled, "dapo", config=stages)) == ["groups dropped"]


def test_the_exit_code_and_damaged_lines(tmp_path):
    attempts = {"attempts": [{"exit_code": 0}, {"exit_code": 6}]}
    run(tmp_path, [{"loss": 1.0}] * 4, run_json=json.dumps(attempts))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "st\n{"stage": "grpo", "step": 5, "met')
    lines = verdict(tmp_path)
    assert lines[1].startswith("exit code 6") and "rl reward test" in lines[1]
    assert lines[2].startswith("damaged record") and "lines 5)" in lines[2]


def test_more_illnesses_than_lines(tmp_path):
    for name in ("config.yml", "events.jsonl"):
        shutil.copy(RUNS / "kl" / name, tmp_path)
    warnings = [
        {"check": check, "level": "warn", "text": f"text {n}", "change": "", "stage": f"stage-{n}"}
        for n, check in enumerate([2, 4, 5, 11] * 3)
    ]
    (tmp_path / "inspection.json").write_text(json.dumps({"findings": warnings}))
    lines = verdict(tmp_path)
    assert len(lines) == 8 and lines[-1].startswith("... and ")


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_folder_without_a_run_is_a_configuration_error(tmp_path, name):
    if name == "empty":
        (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match="not a run" if name == "nothing" else "no event yet"):
        verdict(tmp_path)


def test_the_command_prints_the_verdict_without_heavy_libraries(capsys):
    assert cli.main(["explain", str(RUNS / "kl")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == verdict(RUNS / "kl")
    assert cli.main(["explain", str(RUNS / "kl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["illness"] == "KL blow-up"
    code = f"""
import sys
from rl.commands import cli
cli.main(["explain", {str(RUNS / "kl")!r}])
print([name for name in ("jax", "numpy", "pydantic", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_series():
    series = Series(range(1, 11), [5, 5, 5, 1, 5, 1, 1, 1, 1, 1])
    assert series.since(lambda value: value < 2) == 4
    assert series.first == 5 and series.last == 1 and series.falls()
    assert Series([], []).since(bool) is None and not Series([1], [2.0]).rises()
    assert (
        correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
        and correlation([1, 2], [1, 1]) == 0.0
    )


def test_a_configuration_is_explained_with_its_numbers(monkeypatch, capsys):
    monkeypatch.chdir(RUNS.parents[2])
    changes = [
        "stages.1.algorithm={name: grpo, kl_coef: 0.02, epsilon_high: 0.28}",
        "stages.1.updates_per_step=2",
    ]
    assert cli.main(["explain", "configs/quickstart.yml", *changes]) == 0
    text = capsys.readouterr().out
    assert "64 prompts x 8 samples = 512 completions, 2 updates of 256" in text
    assert (
        "L = -min(R A, clip(R, 0.8, 1.28) A) + 0.02 KL, mean over all tokens of the update" in text
    )
    assert "changed  kl_coef 0.02 (default 0.0), epsilon_high 0.28 (default None)" in text
    assert "120 steps, 61,440 completions, at most 368,640 sampled tokens" in text


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "kto", "rloo", "reward_model"])
def test_every_kind_of_stage_is_explained(monkeypatch, capsys, algorithm):
    monkeypatch.chdir(RUNS.parents[2])
    stages = f"stages=[{{algorithm: {algorithm}, steps: 2, sampling: {{max_new_tokens: 6}}}}]"
    assert cli.main(["explain", "configs/quickstart.yml", stages]) == 0
    assert f"== {algorithm}: " in capsys.readouterr().out


def test_the_losses_on_the_policys_own_samples_are_explained(monkeypatch, capsys):
    monkeypatch.chdir(RUNS.parents[2])
    config = "configs/opd_quickstart.yml"
    assert cli.main(["explain", config]) == 0
    text = capsys.readouterr().out
    assert "L = the Jensen-Shannon divergence of q and p with weight 0.5 of q, mean over" in text
    assert "p: the policy, q: the teacher, at temperature 1" in text
    assert cli.main(["explain", config, "stages.1.algorithm={name: opd, reward_coef: 0.5}"]) == 0
    text = capsys.readouterr().out
    assert "A = 1 (log q - old log p) + 0.5 A_r, q: the teacher" in text
    assert "A_r = (r - mean of the group) / (std of the group + 0.0001)" in text


def test_samples_below_greedy_answers_and_a_falling_entropy_are_no_illness_while_accuracy_rises(
    tmp_path,
):
    """As SmolLM2 learns sums (docs/real_weights.md): samples at temperature 1 score 0.06 where
    greedy scores 0.43."""
    config = (
        "evaluation: {data: {task: arithmetic}, problems: 128}\n"
        "stages: [{algorithm: {name: grpo}, steps: 20, prompts_per_step: 8, samples_per_prompt: "
        "8}]\n"
    )
    steps = [
        {
            "reward/mean": 0.06 + 0.04 * n,
            "reward/std": 0.3,
            "entropy": 0.6 * 0.9**n,
            "completion/mean_length": 4.0,
        }
        for n in range(20)
    ]
    directory = run(tmp_path, steps, config=config)

    def with_accuracy(last: float) -> list[str]:
        rows = [(0, 0.43), (20, last)]
        lines = [
            json.dumps(
                {
                    "stage": "grpo",
                    "step": step,
                    "metrics": {"eval/greedy_accuracy": value, "eval/reward_mean": value},
                }
            )
            for step, value in rows
        ]
        events = (directory / "events.jsonl").read_text().splitlines()
        (directory / "events.jsonl").write_text(
            "\n".join([lines[0], *events[-20:], lines[1]]) + "\n"
        )
        return named(directory)

    assert not {"wrong template", "entropy collapse"} & set(with_accuracy(0.92))
    assert "entropy collapse" in with_accuracy(0.43)
    steps[0] |= {"reward/mean": 0.0, "entropy": 0.1}
    run(tmp_path, steps, config=config)
    assert "wrong template" in with_accuracy(0.92)


def test_a_reward_that_stays_at_a_tiny_learning_rate(tmp_path):
    def illnesses(rate: float, last: float) -> list[str]:
        steps = [
            {
                "reward/mean": 0.2 + (last - 0.2) * n / 39,
                "reward/std": 0.4,
                "completion/mean_length": 4.0,
                "optim/lr": rate,
            }
            for n in range(40)
        ]
        optimizer = f"optimizer: {{learning_rate: {rate}}}"
        stage = (
            f"{{algorithm: {{name: grpo}}, steps: 40, prompts_per_step: 8, "
            f"samples_per_prompt: 8, {optimizer}}}"
        )
        return named(run(tmp_path, steps, config=f"stages: [{stage}]\n"))

    assert "learning rate too low" in illnesses(1e-7, 0.21)
    assert "learning rate too low" not in illnesses(1e-7, 0.7)
    assert "learning rate too low" not in illnesses(1e-6, 0.21)


@pytest.mark.parametrize(
    ("optimizer", "too_high"),
    [
        ("{learning_rate: 0.3}", True),
        ("{name: lion, learning_rate: 0.3}", True),
        ("{name: sgd, learning_rate: 0.3}", False),
        ("{name: muon, learning_rate: 0.03, update_scale: original}", False),
        ("{name: adafactor, learning_rate: 0.03, scale_parameter: true}", False),
    ],
)
def test_a_rate_is_high_for_rules_that_move_weights_by_it(tmp_path, optimizer, too_high):
    rate = float(optimizer.partition("rate: ")[2].split(",")[0].strip("}"))
    steps = [{"loss": 1.0 - n / 100, "optim/lr": rate} for n in range(10)]
    stage = f"{{algorithm: {{name: sft}}, steps: 10, prompts_per_step: 8, optimizer: {optimizer}}}"
    illnesses = named(run(tmp_path, steps, "sft", config=f"stages: [{stage}]\n"))
    assert ("learning rate too high" in illnesses) == too_high
