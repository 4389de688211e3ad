"""The loss on held-out rows: that of training on equal rows, and that of transformers by the
formulas of TRL."""

import json
import shutil

import launch
import numpy as np
import pytest
from oracles import configuration, random_model

import policy
from policy import families
from rl.commands import cli
from rl.records import events

pytestmark = pytest.mark.xdist_group("held_out")
SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
CHARACTERS = "0123456789+-*= "
ALGORITHMS = ("sft", "dpo", "kto", "reward_model")
BETA = 0.1
HELD_OUT = range(20, 27)


def numbers_of(n: int) -> tuple[str, str, str]:
    """A prompt with a good and a bad answer, of several lengths."""
    return f"{n}+{n % 5}=", str(n + n % 5) * (1 + n % 3), "9" * (1 + n % 4) + str(n)


def rows_of(algorithm: str, numbers) -> list[dict]:
    rows = [numbers_of(n) for n in numbers]
    if algorithm == "sft":
        return [{"prompt": prompt, "completion": good} for prompt, good, _ in rows]
    if algorithm == "kto":
        answers = [
            (prompt, (bad, good)[n % 2], n % 2) for n, (prompt, good, bad) in enumerate(rows)
        ]
        return [
            {"prompt": prompt, "completion": answer, "label": label}
            for prompt, answer, label in answers
        ]
    return [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in rows]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(folder, algorithm: str, training, held_out, *changes: str, **stage) -> list[dict]:
    """Runs a stage and returns the metrics of each step, from step 0 on. training, held_out:
    numbers of rows."""
    if not (folder / "model").exists():
        policy.save(random_model(families.read(configuration("Llama", **SIZES))), folder / "model")
    own = write(folder / f"{algorithm}.jsonl", rows_of(algorithm, training))
    others = write(folder / f"{algorithm}_held_out.jsonl", rows_of(algorithm, held_out))
    stage = {"algorithm": algorithm, "steps": 2, "held_out": {"data": others, "every": 1}} | stage
    text = {
        "run": {"dir": str(folder / algorithm), "checkpoint_every": 1, "keep_checkpoints": 9},
        "platform": "cpu",
        "model": {"source": str(folder / "model"), "remat": "none", "scan": False},
        "tokenizer": {"source": "characters", "alphabet": CHARACTERS},
        "max_length": 16,
        "data": own,
        "stages": [stage],
    }
    file = folder / f"{algorithm}.yml"
    file.write_text(json.dumps(text))
    assert cli.train_main([str(file), *changes]) == 0
    return [row["metrics"] for row in events.read(folder / algorithm / "events.jsonl")]


def held_out(metrics: dict) -> dict:
    return {
        key.removeprefix("held_out/"): value
        for key, value in metrics.items()
        if key.startswith("held_out/")
    }


@pytest.mark.parametrize(
    "algorithm",
    [each if each == "sft" else pytest.param(each, marks=pytest.mark.slow) for each in ALGORITHMS],
)
def test_the_loss_on_the_rows_of_a_step_is_the_loss_of_that_step(algorithm, tmp_path):
    """The weights stay as they are."""
    still = {"optimizer": {"learning_rate": 1e-30}, "prompts_per_step": 8}
    steps = train(tmp_path, algorithm, range(8), range(8), **still)
    assert len(steps) == 3
    first = held_out(steps[0])
    assert first.keys() >= {"loss"} and all(key in steps[1] for key in first)
    for key, value in first.items():
        if key != "kto/correct_side":  # whether a difference of rounding is above 0
            assert value == pytest.approx(steps[1][key], rel=2e-5, abs=2e-6), key
    assert held_out(steps[1]) == held_out(steps[2]) == first


@pytest.mark.slow
def test_dropout_is_off(tmp_path):
    still = {"optimizer": {"learning_rate": 1e-30}, "prompts_per_step": 8}
    first = held_out(train(tmp_path, "sft", range(8), range(8), **still)[0])
    shutil.rmtree(tmp_path / "sft")
    steps = train(tmp_path, "sft", range(8), range(8), dropout=0.5, **still)
    assert held_out(steps[0]) == first and steps[1]["loss"] != pytest.approx(
        first["loss"], rel=1e-3
    )


def ids_of(weights):
    """Token ids of a text, and the end of sequence, by the exported tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    return lambda text, end=False: [
        *tokenizer.encode(text, add_special_tokens=False),
        *[tokenizer.eos_token_id] * end,
    ]


def sums(weights, sequences) -> np.ndarray:
    """The sum of the log-probabilities of each answer after its prompt, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    result = []
    for prompt, answer in sequences:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        result.append(
            sum(float(logp[place - 1, ids[0, place]]) for place in range(len(prompt), ids.shape[1]))
        )
    return np.array(result)


def sft(weights, start, ids) -> dict:
    sequences = [(ids(prompt), ids(good, True)) for prompt, good, _ in map(numbers_of, HELD_OUT)]
    loss = -sums(weights, sequences).sum() / sum(len(answer) for _, answer in sequences)
    return {"loss": loss, "nll": loss}


def dpo(weights, start, ids) -> dict:
    """TRL's `sigmoid`: -logsigmoid(beta * ((chosen - rejected) - (reference chosen - reference
    rejected)))."""
    rows = [
        tuple(map(ids, (prompt,))) + (ids(good, True), ids(bad, True))
        for prompt, good, bad in map(numbers_of, HELD_OUT)
    ]
    chosen, rejected = ([(row[0], row[which]) for row in rows] for which in (1, 2))
    margin = BETA * (
        sums(weights, chosen)
        - sums(start, chosen)
        - sums(weights, rejected)
        + sums(start, rejected)
    )
    loss = np.logaddexp(0.0, -margin).mean()
    return {
        "loss": loss,
        "rewards/margins": margin.mean(),
        "rewards/accuracies": (margin > 0).mean(),
    }


def kto(weights, start, ids) -> dict:
    """TRL's `kto`, with the KL of each block of two answers, and 0 for the last answer, which has
    no other."""
    rows = rows_of("kto", HELD_OUT)
    prompts, answers = (
        [ids(row["prompt"]) for row in rows],
        [ids(row["completion"], True) for row in rows],
    )
    good = np.array([row["label"] == 1 for row in rows])

    def ratios(sequences):
        return sums(weights, sequences) - sums(start, sequences)

    other = [n + 1 if n % 2 == 0 else n - 1 for n in range(len(rows) - 1)]
    mismatched = ratios([(prompts[n], answers[m]) for n, m in enumerate(other)])
    z = [
        max(0.0, mismatched[n : n + 2].mean()) for n in range(0, len(other), 2) for _ in range(2)
    ] + [0.0]
    away = np.where(good, 1, -1) * (ratios(list(zip(prompts, answers, strict=True))) - z)
    return {"loss": (1 - 1 / (1 + np.exp(-BETA * away))).mean(), "kto/desirable_share": good.mean()}


def ranking(weights, start, ids) -> dict:
    """TRL's RewardTrainer: -logsigmoid(score of chosen - score of rejected). The first head is
    random, and no file has it."""
    import torch
    from transformers import AutoModelForSequenceClassification

    if weights == start:
        return {}
    model = AutoModelForSequenceClassification.from_pretrained(weights, dtype=torch.float32).eval()
    scores = []
    for prompt, *both in map(numbers_of, HELD_OUT):
        with torch.no_grad():
            scores.append(
                [
                    float(model(torch.tensor([[*ids(prompt), *ids(each, True)]])).logits[0, 0])
                    for each in both
                ]
            )
    margin = np.array(scores)[:, 0] - np.array(scores)[:, 1]
    metrics = {"reward_model/margin": margin.mean(), "reward_model/accuracy": (margin > 0).mean()}
    return metrics | {"loss": np.logaddexp(0.0, -margin).mean()}


@pytest.mark.slow
@pytest.mark.parametrize("expected", [sft, dpo, kto, ranking])
def test_after_updates_it_is_the_loss_that_transformers_gives_the_exported_weights(
    expected, tmp_path
):
    """Seven rows in updates of two: four blocks, the last one with a row of padding."""
    algorithm = "reward_model" if expected is ranking else expected.__name__
    learn = {"optimizer": {"learning_rate": 3e-3}, "prompts_per_step": 4, "updates_per_step": 2}
    steps = train(tmp_path, algorithm, range(8), HELD_OUT, **learn)
    start, end = tmp_path / "model", tmp_path / algorithm / "export"
    for measured, weights in ((held_out(steps[0]), start), (held_out(steps[-1]), end)):
        for key, value in expected(weights, start, ids_of(end)).items():
            if key == "loss" or weights is end:
                assert measured[key] == pytest.approx(value, rel=3e-5, abs=3e-6), key
    assert held_out(steps[0])["loss"] != pytest.approx(held_out(steps[-1])["loss"], rel=1e-4)


@pytest.mark.slow
def test_it_ends_the_stage_and_a_run_that_is_continued_has_the_same_numbers(tmp_path, monkeypatch):
    """`until` looks at it, also where nothing else is measured; measuring changes no weight."""
    learn = {"optimizer": {"learning_rate": 3e-3}, "prompts_per_step": 4, "steps": 4}
    steps = train(tmp_path, "sft", range(8), HELD_OUT, "stages.0.held_out.every=2", **learn)
    assert [n for n, metrics in enumerate(steps) if held_out(metrics)] == [0, 2, 4]
    run, again = tmp_path / "sft", tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "export")
    for path in sorted((again / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    every = "stages.0.held_out.every=2"
    assert cli.train_main([str(tmp_path / "sft.yml"), f"run.dir={again}", every]) == 0
    launch.assert_same_run(run, again)
    without = tmp_path / "without"
    assert (
        cli.train_main([str(tmp_path / "sft.yml"), f"run.dir={without}", "stages.0.held_out=null"])
        == 0
    )
    assert launch.weights(without) == launch.weights(run)
    bound = held_out(steps[2])["loss"] * 1.0001
    ended = tmp_path / "ended"
    until = f"stages.0.until={{metric: held_out/loss, at_most: {bound}}}"
    assert cli.train_main([str(tmp_path / "sft.yml"), f"run.dir={ended}", every, until]) == 0
    assert launch.numbers(ended) == launch.numbers(run)[:3]


WORST = {"optimizer": {"learning_rate": 3e-3}, "prompts_per_step": 4, "steps": 3}
WORST |= {"best": {"metric": "held_out/loss", "mode": "max"}}
"""The loss falls, so its largest value after an update comes first: the best step is not the last
one."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_the_best_step_is_kept_exported_and_taken_again(algorithm, tmp_path, capsys):
    few = ("run.keep_checkpoints=1", "run.checkpoint_every=0")
    steps = train(tmp_path, algorithm, range(8), HELD_OUT, *few, **WORST)
    losses = [held_out(each)["loss"] for each in steps]
    assert losses[1] == max(losses[1:]) and losses[3] < losses[1]
    run, file = tmp_path / algorithm, str(tmp_path / f"{algorithm}.yml")
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [1, 3]
    assert (
        f"held_out/loss is best after step 1 ({losses[1]:.6g}): its weights go on"
        in capsys.readouterr().out
    )
    attempt = json.loads((run / "run.json").read_text())["attempts"][-1]
    assert attempt["best"] == {
        algorithm: {"step": 1, "metric": "held_out/loss", "value": losses[1]}
    }
    short, last, again = (tmp_path / name for name in ("short", "last", "again"))
    assert cli.train_main([file, f"run.dir={short}", "stages.0.steps=1", "stages.0.best=null"]) == 0
    assert launch.weights(short) == launch.weights(run)
    # Killed between the checkpoint of the last step and the export; then before the last step.
    for lost in ((), ("0000000003",)):
        shutil.copytree(run, again)
        for path in (
            again / "export",
            again / "reward_models",
            *(again / "checkpoints" / name for name in lost),
        ):
            shutil.rmtree(path, ignore_errors=True)
        assert cli.train_main([file, f"run.dir={again}", *few]) == 0
        launch.assert_same_run(run, again)
        assert sorted(int(path.name) for path in (again / "checkpoints").iterdir()) == [1, 3]
        shutil.rmtree(again)
    assert cli.train_main([file, f"run.dir={last}", "stages.0.best.take=last", *few]) == 0
    assert launch.numbers(last) == launch.numbers(run) and launch.weights(last) != launch.weights(
        run
    )
    assert sorted(int(path.name) for path in (last / "checkpoints").iterdir()) == [1, 3]


@pytest.mark.slow
def test_the_next_stage_starts_from_the_best_step(tmp_path):
    train(tmp_path, "dpo", range(8), HELD_OUT, **WORST)
    file, run = tmp_path / "dpo.yml", tmp_path / "two"
    text = json.loads(file.read_text())
    text["stages"] *= 2
    file.write_text(json.dumps(text))
    assert cli.train_main([str(file), f"run.dir={run}", "run.keep_checkpoints=1"]) == 0
    metrics = {
        (row["stage"], row["step"]): held_out(row["metrics"])
        for row in events.read(run / "events.jsonl")
    }
    first, second = metrics["dpo", 1], metrics["dpo-2", 0]
    assert second["logps/chosen"] == first["logps/chosen"] != metrics["dpo", 3]["logps/chosen"]
    assert (
        second["rewards/margins"] == 0 != first["rewards/margins"]
    )  # its reference has these weights, too
    numbers = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert numbers == [
        5,
        7,
    ]  # 4 steps and step 0 of the first stage; its best step is not needed any more


@pytest.mark.slow
def test_a_plan_has_its_program(tmp_path):
    import jax

    from rl.plan.programs import programs
    from rl.run import build
    from rl.run.load import load

    still = {"optimizer": {"learning_rate": 1e-30}, "prompts_per_step": 4}
    train(tmp_path, "dpo", range(8), HELD_OUT, **still)
    config = load([tmp_path / "dpo.yml"], ["stages.0.epochs=2", "stages.0.held_out.every=2"])
    planned = {
        each.kind: each for each in programs(config, build.on_mesh(config, jax.devices()[:1]), None)
    }
    update, measured = planned["update"], planned["held-out loss"]
    assert measured.shape == update.shape and measured.times == 0.5
    needs = [
        each.lower().compile().memory_analysis().temp_size_in_bytes for each in (measured, update)
    ]
    assert 0 < needs[0] < needs[1]
    ran = json.loads((tmp_path / "dpo" / "programs.json").read_text())
    assert "held-out loss" in json.dumps(ran)


def test_what_has_no_such_loss_is_refused_and_so_are_rows_that_cannot_be_read(tmp_path, capsys):
    policy.save(random_model(families.read(configuration("Llama", **SIZES))), tmp_path / "model")
    rows, bad = write(tmp_path / "rows.jsonl", rows_of("sft", range(8))), tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "1+1=", "completion": "2" * 40}) + "\n")
    text = {
        "model": str(tmp_path / "model"),
        "tokenizer": {"source": "characters", "alphabet": CHARACTERS},
        "max_length": 16,
        "data": rows,
        "stages": [
            {"algorithm": "sft", "steps": 2, "held_out": {"data": rows}, "prompts_per_step": 4}
        ],
    }
    file = tmp_path / "run.yml"
    file.write_text(json.dumps(text))

    def check(*changes: str) -> tuple[int, str]:
        code = cli.train_main([str(file), "--check", *changes])
        out = capsys.readouterr()
        return code, out.out + out.err

    assert check()[0] == 0
    code, said = check(f"stages.0.held_out.data={bad}")
    assert code == 3 and "stages.0.held_out.data.too_long=drop leaves the long ones out" in said
    code, said = check(f"stages.0.held_out.data={{path: {bad}, too_long: drop}}")
    assert code == 3 and "no row is left: 1 of 1 rows are longer" in said
    code, said = check("stages.0.held_out.data=./rows.jsnl")
    assert (
        code == 2 and "stages.0.held_out.data.path: no such file or directory: ./rows.jsnl" in said
    )
    for metric in ("held_out/loss", "held_out/nll", "time/held_out"):
        assert check(f"stages.0.until={{metric: {metric}, at_most: 1}}")[0] == 0
    code, said = check("stages.0.until={metric: held_out/los, at_most: 1}")
    assert code == 2 and "no metric 'held_out/los' (nearest: held_out/loss" in said
    code, said = check("stages.0.until={metric: held_out/rewards/margins, at_most: 1}")
    assert code == 2 and "no metric 'held_out/rewards/margins'" in said
    code, said = check(
        "stages.0.until={metric: held_out/loss, at_most: 1}", "stages.0.held_out=null"
    )
    assert code == 2 and "sft never has the metric held_out/loss: `held_out` is null" in said
    best = "stages.0.best={{metric: {}, mode: min}}".format
    assert check(best("held_out/loss"))[0] == 0
    code, said = check(best("held_out/los"))
    assert (
        code == 2
        and "stages.0.best.metric: no metric 'held_out/los' (nearest: held_out/loss" in said
    )
    code, said = check(best("loss"))
    assert (
        code == 2
        and "'loss' is no metric of an evaluation (eval/...) or of held-out rows (held_out/...)"
        in said
    )
    code, said = check(best("eval/greedy_accuracy"))
    assert (
        code == 2
        and "never has the metric eval/greedy_accuracy: no `evaluation` is configured" in said
    )
    code, said = check("stages.0.best={metric: held_out/loss}")
    assert code == 2 and "stages.0.best.mode: this key is required" in said
    grpo = (
        "stages.0.algorithm=grpo",
        "stages.0.sampling.max_new_tokens=4",
        "rewards={functions: [length]}",
    )
    code, said = check(*grpo)
    assert (
        code == 2
        and "grpo has no loss of rows: it samples completions; leave it out, or use `evaluation`"
        in said
    )
