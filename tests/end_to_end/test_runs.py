"""Full runs: what they leave behind, and what happens when one is started again, watched or asked
to stop."""

import hashlib
import json
import shutil
import signal
import sys
from pathlib import Path

import full_disk
import jax
import launch
import numpy as np
import pytest
from oracles import configuration, random_model

import policy
import rl.stages
from policy import families
from rl.records import events, run_files, samples
from rl.records.timeline import CHECKPOINTS, FILE, RUN, WORKERS
from rl.run.checkpoint import Checkpoints
from rl.run.folder import RunFolder
from rl.run.load import load
from rl.run.prepare import prepare
from rl.stages.online import Stage
from rl.tasks import arithmetic
from rl.training.trainer import Trainer

SFT = (
    "{algorithm: sft, steps: 3, prompts_per_step: 8, optimizer: {learning_rate: 2e-3}, "
    "sampling: {max_new_tokens: 6}}"
)
ONLY_SFT = f"stages=[{SFT}]"
STAGES = [("sft", 3), ("grpo", 3), ("grpo-2", 1)]
SAMPLE_KEYS = {
    *(
        "stage",
        "step",
        "prompt_id",
        "sample",
        "prompt",
        "completion",
        "tokens",
        "finish",
        "rewards",
        "reward",
        "advantage",
        "version",
        "columns",
        "n_prompt",
        "n",
        "at",
    ),
}


def digest(directory: Path) -> dict[str, str]:
    """Every file below by its hash."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_every_step_is_an_event_and_every_stage_is_evaluated_at_both_ends(uninterrupted):
    rows = events.read(uninterrupted / "events.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [
        (n, step) for n, steps in STAGES for step in range(steps + 1)
    ]
    evaluated = [
        (row["stage"], row["step"]) for row in rows if "eval/greedy_accuracy" in row["metrics"]
    ]
    assert evaluated == [
        ("sft", 0),
        ("sft", 2),
        ("sft", 3),
        ("grpo", 0),
        ("grpo", 2),
        ("grpo", 3),
        ("grpo-2", 0),
        ("grpo-2", 1),
    ]
    for row in rows:
        metrics = row["metrics"]
        if (row["stage"], row["step"]) in evaluated:
            assert (
                0 <= metrics["eval/greedy_accuracy"] <= 1
                and 0 <= metrics["eval/pass@1"] <= metrics["eval/pass@2"] <= 1
            )
        if row["step"]:
            assert {
                "loss",
                "entropy",
                "optim/grad_norm",
                "optim/lr",
                "moe/max_load",
                "time/step",
                "time/update",
            } <= metrics.keys()
        if row["step"] and row["stage"] != "sft":
            rewards = {
                "reward/mean",
                "reward/std",
                "reward/frac_zero_std",
                "rewards/digits/mean",
                "reward/faults",
            }
            assert {
                *rewards,
                "kl/ref",
                "advantage/mean",
                "completion/mean_length",
                "time/sample",
            } <= metrics.keys()
            assert metrics["sampler/logp_diff_max"] < 1e-5
            # The second update of a step is measured against the log-probabilities from before the
            # first.
            assert abs(metrics["kl/approx_update"]) > 1e-6
    values = [v for row in rows for v in row["metrics"].values()]
    assert all(v is not None for v in values)


def test_every_completion_is_a_sample_whose_numbers_agree_with_the_events(uninterrupted):
    rows = launch.trained(uninterrupted)
    assert len(rows) == 4 * 4 * 4 and all(row.keys() - {"raw"} == SAMPLE_KEYS for row in rows)
    assert sorted({row["prompt_id"] for row in rows}) == list(
        range(16)
    )  # counted through the stages
    means = {
        (r["stage"], r["step"]): r["metrics"].get("reward/mean")
        for r in events.read(uninterrupted / "events.jsonl")
    }
    for place in {(row["stage"], row["step"]) for row in rows}:
        mine = [row for row in rows if (row["stage"], row["step"]) == place]
        assert [row["sample"] for row in mine] == [0, 1, 2, 3] * 4
        np.testing.assert_allclose(
            np.mean([row["reward"] for row in mine]), means[place], rtol=1e-6
        )
        group = np.array([row["advantage"] for row in mine]).reshape(4, 4)
        np.testing.assert_allclose(group.mean(axis=1), 0, atol=1e-6)
    for row in rows:
        assert row["rewards"] == {"digits": row["reward"]} and row["finish"] in ("stop", "length")
        assert row["reward"] == sum(c.isdigit() for c in row["completion"]) / max(
            1, len(row["completion"])
        )
        assert 1 <= len(row["tokens"]) <= 6 and (row["finish"] == "stop") == (
            row["tokens"][-1] == 2
        )


def test_the_tokens_of_every_completion_have_their_numbers(uninterrupted):
    file, config = uninterrupted / samples.SAMPLES, load([uninterrupted])
    every = list(samples.read(uninterrupted))
    assert (
        len(every)
        == 64
        + sum("eval/problems" in r["metrics"] for r in events.read(uninterrupted / "events.jsonl"))
        * 24
    )
    differences = {}
    for row in every:
        tokens = samples.read_tokens(file, row)
        prompt, completion = np.split(tokens, [row["n_prompt"]])
        assert completion["id"].tolist() == row["tokens"] and len(prompt) == len(row["prompt"])
        assert (
            (prompt["turn"] == 0).all()
            and (completion["turn"] == 1).all()
            and np.isnan(prompt["logp"]).all()
        )
        assert (completion["logp"] < 0).all() and not prompt["flags"].any()
        assert bool(completion["flags"][-1] & samples.STOP) == (row["finish"] == "stop")
        assert set(row["columns"]) == {"answer", "problem"} and row["columns"]["answer"].isdigit()
        if row.get("eval"):
            assert row["advantage"] is None and np.isnan(completion["gap"]).all()
            continue
        assert (completion["flags"] & samples.TRAINED).all() and (completion["entropy"] > 0).all()
        np.testing.assert_allclose(completion["advantage"], row["advantage"], atol=1e-3)
        differences.setdefault((row["stage"], row["step"]), []).extend(
            np.abs(completion["gap"]).tolist()
        )
    metrics = {
        (r["stage"], r["step"]): r["metrics"] for r in events.read(uninterrupted / "events.jsonl")
    }
    for place, gaps in differences.items():
        # The event has the mean over two updates; the tokens are those of both.
        assert np.mean(gaps) == pytest.approx(
            metrics[place]["sampler/logp_diff_mean"], rel=0.1, abs=1e-7
        )
    assert config.stages[1].updates_per_step == 2


def test_the_export_holds_the_last_weights_and_the_tokenizer(uninterrupted, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    model = policy.load(uninterrupted / "export")
    generation = GenerationConfig.from_pretrained(uninterrupted / "export")
    assert (generation.eos_token_id, generation.pad_token_id, generation.do_sample) == (2, 0, True)
    config = load([uninterrupted])
    stage = rl.stages.create(config)[-1]
    stage.bind(model.graph)
    checkpoints = Checkpoints(uninterrupted / "checkpoints", 2)
    number, state, host = checkpoints.restore(stage.abstract())
    checkpoints.close()
    progress = {"prompts": 16, "version": 3 + 3 * 2 + 2, "drawn": 4, "producer": {}, "controls": {}}
    progress["unscored_steps"] = 0
    packed_rows = host["progress"].pop("packed_rows")
    assert packed_rows["updates"] == 2 and packed_rows["shapes"]
    assert (number, host) == (
        9,
        {"stage": 2, "step": 1, "steps": 1, "ended": True, "progress": progress},
    )
    jax.tree.map(np.testing.assert_array_equal, model.params, state.policy.params)
    fresh = policy.create(model.config, config.seed)
    moved = [
        path for path in model.params if not np.array_equal(model.params[path], fresh.params[path])
    ]
    assert set(moved) == set(model.params)
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "export")
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34=" and tokenizer.eos_token_id == 2
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == [
        "0000000007",
        "0000000009",
    ]
    assert {
        "config.yml",
        "events.jsonl",
        "samples.jsonl",
        "tokens.bin",
        "run.json",
        "checkpoints",
        "export",
    } <= {p.name for p in uninterrupted.iterdir()}


def test_run_json_holds_every_attempt(uninterrupted):
    (attempt,) = run_files.attempt_entries(uninterrupted, [])
    assert (
        attempt["exit_code"] == 0
        and attempt["weights"] == "random"
        and attempt["start"] < attempt["end"]
    )
    assert attempt["versions"]["jax"] == jax.__version__ and attempt["devices"]["count"] == 1
    assert attempt["command"][1:] == [str(each) for each in launch.arguments(uninterrupted)]
    times = [row["time"] for row in events.read(uninterrupted / "events.jsonl")]
    assert times == sorted(times) and attempt["start"] < times[0] and times[-1] < attempt["end"]


def test_a_pipe_gets_the_configuration_and_plain_lines(uninterrupted):
    text = (uninterrupted.parent / "stdout").read_text()
    assert "\x1b" not in text and "max_length: 32" in text
    random = (
        "model tiny-deepseek names an architecture without weights: the weights are random (seed 0)"
    )
    assert (
        text.index(random)
        < text.index("stage sft: 3 steps")
        < text.index("sft 3/3")
        < text.index("stage grpo-2: 1 steps")
    )
    assert f"final weights in {uninterrupted / 'export'}" in text.splitlines()[-1]


def test_a_finished_run_says_so_and_is_left_as_it_is(uninterrupted, capsys):
    before = digest(uninterrupted)
    assert launch.cli.train_main([str(uninterrupted)]) == 0
    said = capsys.readouterr().out
    assert (
        f"{uninterrupted} is finished" in said
        and f"model={uninterrupted}/export" in said
        and "stage sft" not in said
    )
    assert digest(uninterrupted) == before


def test_a_run_is_not_continued_under_another_configuration(uninterrupted, capsys):
    before = digest(uninterrupted)
    assert launch.cli.train_main([str(uninterrupted), "stages.1.optimizer.weight_decay=0.5"]) == 2
    said = capsys.readouterr().err
    assert (
        "stages.1.optimizer.weight_decay: 0.0 there, 0.5 here" in said and "Traceback" not in said
    )
    assert digest(uninterrupted) == before


@pytest.mark.slow
def test_a_finished_run_with_more_steps_is_the_longer_run(uninterrupted, tmp_path, capsys):
    longer, extended = ["stages.2.steps=3"], tmp_path / "extended"
    shutil.copytree(uninterrupted, extended)
    assert launch.cli.train_main([str(extended), "stages.1.steps=4"]) == 2
    capsys.readouterr()
    assert launch.cli.train_main([str(extended), *longer]) == 0
    assert "continuing" in capsys.readouterr().out
    assert launch.train(tmp_path / "full", *longer) == 0
    one, other = extended, tmp_path / "full"
    assert launch.weights(one) == launch.weights(other)

    def trained(run):
        """What the run was trained on and its numbers. Only the short run evaluates after its last
        step."""
        numbers = [
            (*place, {k: v for k, v in m.items() if "eval/" not in k})
            for *place, m in launch.numbers(run)
        ]
        return numbers, [{k: v for k, v in row.items() if k != "at"} for row in launch.trained(run)]

    assert trained(one) == trained(other)
    assert (
        launch.weights(uninterrupted)
        == (extended / "export-grpo-2-1" / "model.safetensors").read_bytes()
    )
    assert [attempt.code for attempt in run_files.attempts(extended, [])] == [0, 0]


def test_a_run_in_use_is_left_alone(uninterrupted, capsys):
    with RunFolder(load([uninterrupted])):
        assert launch.cli.train_main([f"resume={uninterrupted}"]) == 5
    assert "in use by another process" in capsys.readouterr().err


@pytest.mark.slow
def test_signals_finish_the_step_and_save_it_and_the_next_start_goes_on(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    running = launch.process(*launch.arguments(directory))
    launch.wait_for(lambda: launch.lines(directory) >= 1, running)
    running.send_signal(signal.SIGTERM)
    code, _, err = launch.finish(running)
    assert code == 75, err
    assert (
        "SIGTERM: saved after step" in err
        and f"rl-train {directory}" in err
        and "Traceback" not in err
    )
    stage, step = [(row["stage"], row["step"]) for row in events.read(directory / "events.jsonl")][
        -1
    ]
    assert (
        f"after step {step} of {stage}" in err and step > 0 and not (directory / "export").exists()
    )

    running = launch.process(str(directory))
    reached = launch.lines(directory)
    launch.wait_for(lambda: launch.lines(directory) > reached, running)
    running.send_signal(signal.SIGINT)
    code, out, err = launch.finish(running)
    assert code == 75 and "SIGINT: saved" in err, err
    assert f"continuing {directory} after step {step} of {stage}" in out

    assert launch.train(directory) == 0
    launch.assert_same_run(directory, uninterrupted)
    # Three processes have written it; no step was begun that did not end.
    of_the_run = [span for span in spans(directory) if span["tid"] == RUN]
    steps = [span["args"] for span in of_the_run if span["name"] == "step"]
    assert steps == [
        {"stage": n, "step": step} for n, count in STAGES for step in range(1, count + 1)
    ]
    continued = "reading a checkpoint"
    assert {span["name"] for span in of_the_run} - {continued} == {
        span["name"] for span in spans(uninterrupted) if span["tid"] == RUN
    }
    assert continued in {span["name"] for span in of_the_run}


def spans(directory) -> list[dict]:
    result = json.loads((directory / FILE).read_text().rstrip(",\n") + "]")
    return [event for event in result if event["ph"] == "X"]


def test_the_timeline_covers_the_run_and_every_call_of_a_reward(uninterrupted):
    result = spans(uninterrupted)
    every = sorted(
        ((s["ts"], s["ts"] + s["dur"], s["name"]) for s in result if s["tid"] == RUN),
        key=lambda s: (s[0], -s[1]),
    )
    names = {
        *(
            "reading the data",
            "looking for a checkpoint",
            "loading the model",
            "starting the stage",
            "compiling the generator",
        ),
        *(
            "step",
            "data",
            "sampling",
            "batch",
            "log-probabilities",
            "waiting for rewards",
            "advantages",
            "updates",
        ),
        *(
            "log-probabilities of the reference",
            "writing samples",
            "evaluation",
            "checkpoint",
            "export",
        ),
    }
    assert {name for _, _, name in every} == names
    covered, end = 0.0, every[0][0]
    for start, stop, _ in every:
        covered, end = covered + max(0.0, stop - max(start, end)), max(end, stop)
    assert covered > 0.9 * (end - every[0][0])
    saved = [s for s in result if s["tid"] == CHECKPOINTS]
    assert {s["name"] for s in saved} == {"writing a checkpoint"} and len(saved) == sum(
        n == "checkpoint" for _, _, n in every
    )
    calls = [s for s in result if s["tid"] == WORKERS]
    evaluations = sum(name == "evaluation" for _, _, name in every)
    assert (
        sum(s["args"]["completions"] for s in calls)
        == launch.lines(uninterrupted, samples.SAMPLES)
        == len(launch.trained(uninterrupted)) + evaluations * 8 * (1 + 2)
    )
    assert {s["name"] for s in calls} == {"digits"} and len(result) == len(every) + len(
        saved
    ) + len(calls)
    meant = [(a, b) for a, b, name in every if name in ("step", "evaluation")]
    assert all(any(a <= s["ts"] and s["ts"] + s["dur"] <= b + 1e4 for a, b in meant) for s in calls)


def test_a_step_that_ends_on_a_full_disk_keeps_the_last_good_one_and_goes_on(
    tmp_path, monkeypatch, caplog
):
    from rl.run import checkpoint

    seal, sealed = checkpoint.seal, []

    def full(directory, content):
        sealed.append(content["number"])
        if len(sealed) > 1:
            raise OSError(28, "No space left on device")
        seal(directory, content)

    monkeypatch.setattr(checkpoint, "seal", full)
    assert launch.train(tmp_path / "run", ONLY_SFT, *launch.LIGHT, "run.checkpoint_every=1") == 0
    assert sealed == [1, 2, 3]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["0000000001"]
    assert "checkpoint 2 was NOT saved" in caplog.text and "safe up to checkpoint 1" in caplog.text
    assert [step for _, step, _ in launch.numbers(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_weights_that_find_no_room_are_written_by_the_next_start(tmp_path, capsys, monkeypatch):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = (tmp_path / "run", ONLY_SFT, *launch.LIGHT)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # a module that is imported meanwhile would be cut, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        assert launch.train(*run) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert (
        "the final weights cannot be written" in said
        and f"rl-train {tmp_path / 'run'}" in said
        and "Traceback" not in said
    )
    assert not list((tmp_path / "run").glob("export*"))
    assert launch.train(*run) == 0 and launch.weights(tmp_path / "run")


@pytest.mark.skipif(not full_disk.available(), reason="no process may mount a file system here")
@pytest.mark.slow
def test_a_run_on_a_full_disk_is_exit_code_5_and_goes_on_after_room_was_made(tmp_path):
    shares = (0, 2, 5, 8, 12, 20, 30, 40, 50, 60, 80)
    done = full_disk.run(Path(__file__).with_name("full_disk_runs.py"), tmp_path, *shares)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert 5 in codes.values(), codes


@pytest.mark.slow
def test_what_evaluation_asks_occurs_in_no_prompt_and_no_demonstration_of_the_quickstart():
    prepared = prepare(load([launch.QUICKSTART]))
    prepared.close()

    def what(text):
        return arithmetic.identity(text.removesuffix("="))

    sft, grpo = prepared.stages
    trained = {what(problem.example.prompt) for problem in grpo.rows.own}
    prompts = (
        [i for i, trained_on in zip(ids, mask, strict=True) if not trained_on]
        for ids, mask, _ in sft.rows.own
    )
    demonstrated = {what(prepared.tokenizer.decode(ids)) for ids in prompts}
    held_out = {what(problem.example.prompt) for problem in prepared.evaluation_problems}
    assert (
        len({problem.example.prompt for problem in prepared.evaluation_problems}) == 512
    )  # 12+34 and 34+12 are on one side together
    assert len(trained) > 3000 and demonstrated == trained
    assert not held_out & trained
    texts = {prepared.tokenizer.decode(row.ids) for row in sft.rows.own} | {
        p.example.prompt for p in grpo.rows.own
    }
    assert not any(
        text.startswith(problem.example.prompt)
        for problem in prepared.evaluation_problems
        for text in texts
    )


@pytest.mark.slow
def test_the_same_file_gives_the_same_bits_and_other_seeds_do_not(uninterrupted, tmp_path):
    code, _, err = launch.finish(launch.process(*launch.arguments(tmp_path / "again")))
    assert code == 0, err
    launch.assert_same_run(tmp_path / "again", uninterrupted)
    assert launch.train(tmp_path / "other", "seed=1") == 0
    assert launch.samples(tmp_path / "other") != launch.samples(uninterrupted)


@pytest.mark.slow
def test_a_micro_batch_changes_the_speed_only(tmp_path):
    # With an eps of 1e-8 AdamW makes a step of the learning rate of a gradient that is 0 but for
    # rounding.
    options = [f"stages.{n}.optimizer.eps=1e-4" for n in range(3)]
    assert launch.train(tmp_path / "full", *options) == 0
    assert (
        launch.train(tmp_path / "cut", *options, *(f"stages.{n}.micro_batch=3" for n in range(3)))
        == 0
    )
    for ours, theirs in zip(
        launch.numbers(tmp_path / "cut"), launch.numbers(tmp_path / "full"), strict=True
    ):
        assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
        for key in ours[2]:
            np.testing.assert_allclose(
                ours[2][key], theirs[2][key], rtol=1e-4, atol=1e-5, err_msg=f"{ours[:2]} {key}"
            )
    one, other = (
        policy.load(directory / "export").params
        for directory in (tmp_path / "cut", tmp_path / "full")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


@pytest.mark.slow
def test_a_run_with_a_critic_that_warms_up(tmp_path):
    """On the policy's own states, with everything of VAPO's and a coefficient that moves."""
    stages = json.dumps(
        [
            {
                "algorithm": {
                    "name": "ppo",
                    "critic_trunk": "policy",
                    "critic_warmup": 1,
                    "kl_target": 1e-6,
                    "kl_horizon": 16,
                    "lam_critic": 1.0,
                    "lam_alpha": 0.5,
                    "bootstrap_truncated": True,
                    "whiten_rewards": True,
                    "positive_nll_coef": 0.1,
                    "positive_above": -1.0,
                    "entropy_target": 5.0,
                },
                "steps": 3,
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "updates_per_step": 2,
                "optimizer": {"learning_rate": 1e-3},
                "critic": {"learning_rate": 1e-3},
                "sampling": {"max_new_tokens": 6},
            }
        ]
    )
    assert launch.train(tmp_path / "run", f"stages={stages}", "run.checkpoint_every=1") == 0
    rows = {row["step"]: row["metrics"] for row in events.read(tmp_path / "run" / "events.jsonl")}
    assert (
        "loss" not in rows[1]
        and rows[1]["value/loss"] > 0
        and "value/explained_variance" in rows[1]
    )
    assert {
        "loss",
        "kl/ref",
        "kl/reward",
        "value/clip_frac",
        "value/return_mean",
        "positive_nll",
    } <= rows[2].keys()
    # Eight completions a step; it waits for the policy to move.
    assert [rows[step]["kl/coef"] for step in (1, 2, 3)] == pytest.approx([0.05, 0.05, 0.05 * 0.9])
    shutil.rmtree(tmp_path / "run" / "export")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0000000003")
    before = launch.numbers(tmp_path / "run"), launch.samples(tmp_path / "run")
    assert launch.train(tmp_path / "run", f"stages={stages}", "run.checkpoint_every=1") == 0
    assert (launch.numbers(tmp_path / "run"), launch.samples(tmp_path / "run")) == before


@pytest.mark.slow
def test_a_critic_on_the_states_of_the_policy_takes_its_values_from_the_generator(
    tmp_path, monkeypatch
):
    """No pass for values is made, but for one that the end of a completion which was cut off needs;
    the numbers are those of a run that makes it every step."""
    algorithm = {
        "name": "ppo",
        "critic_trunk": "policy",
        "critic_warmup": 1,
        "value_init_std": 1.0,
        "kl_reward_coef": 0.0,
    }
    stage = {
        "algorithm": algorithm,
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "optimizer": {"learning_rate": 1e-3},
    }
    stages = [
        stage
        | {
            "critic": {"learning_rate": 1e-2},
            "sampling": {"max_new_tokens": 6},
            "updates_per_step": 2,
        }
    ]
    passes, values = [], Trainer.values

    def counted(self, state, batch, table=None):
        passes.append(batch)
        return values(self, state, batch, table)

    def train(name: str) -> int:
        passes.clear()
        assert (
            launch.train(
                tmp_path / name,
                f"stages={json.dumps(stages)}",
                *launch.LIGHT,
                "run.checkpoint_every=0",
            )
            == 0
        )
        return len(passes)

    monkeypatch.setattr(Trainer, "values", counted)
    assert train("sampled") == 0
    with monkeypatch.context() as other:
        other.setattr(Stage, "sampled_values", False)
        assert train("computed") == 3
    for ours, theirs in zip(
        launch.numbers(tmp_path / "sampled"), launch.numbers(tmp_path / "computed"), strict=True
    ):
        assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], rel=1e-3, abs=1e-5)
    algorithm["bootstrap_truncated"] = True
    assert train("cut off") == 3


@pytest.mark.slow
def test_a_stage_ends_early_at_its_bound_and_a_run_killed_after_it_goes_on_with_the_next(tmp_path):
    reached, missed = "{metric: loss, at_most: 100}", "{metric: eval/greedy_accuracy, at_least: 2}"
    bounds = f"stages.0.until={reached}", f"stages.1.until={missed}"
    how = (
        tmp_path / "run",
        f"stages=[{SFT}, {SFT}]",
        *bounds,
        launch.LIGHT[0],
        "run.checkpoint_every=0",
    )
    assert launch.train(*how) == 0
    weights, numbers = launch.weights(tmp_path / "run"), launch.numbers(tmp_path / "run")
    assert [(stage, step) for stage, step, _ in numbers] == [
        ("sft", 0),
        ("sft", 1),
        *(("sft-2", step) for step in range(4)),
    ]
    assert "eval/greedy_accuracy" in numbers[1][2]  # evaluated after the last step, whichever it is
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").iterdir()))
    shutil.rmtree(tmp_path / "run" / "export")
    assert launch.train(*how) == 0
    assert (
        launch.weights(tmp_path / "run") == weights and launch.numbers(tmp_path / "run") == numbers
    )


@pytest.mark.slow
def test_modules_that_the_weights_lack_start_fresh_and_go_on_as_they_are_saved(tmp_path, capfd):
    policy.save(
        random_model(families.read(configuration("Llama", vocab_size=64))), tmp_path / "model"
    )
    stages = (
        "stages=[{algorithm: sft, steps: 2, prompts_per_step: 8, mtp: {}, sampling: "
        "{max_new_tokens: 6}}]"
    )

    def train(name, source):
        model = (
            f"model.source={source}",
            "model.overrides=null",
            "model.multi_token_prediction.depth=1",
        )
        assert (
            launch.train(
                tmp_path / name, *model, stages, "run.checkpoint_every=1", "evaluation=null"
            )
            == 0
        )
        said = "".join(capfd.readouterr())
        assert "the weights are random" not in said
        return "start from random weights" in said

    assert train("run", tmp_path / "model")
    full = launch.weights(tmp_path / "run"), launch.numbers(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").iterdir()))
    assert not train("run", tmp_path / "model")
    assert (launch.weights(tmp_path / "run"), launch.numbers(tmp_path / "run")) == full
    assert not train("further", tmp_path / "run" / "export")
