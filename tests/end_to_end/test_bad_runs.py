"""Runs that cannot work: text, the documented exit code, and nothing built before. And rewards that
go wrong in a real run.
"""

import json

import launch
import pytest
from oracles import configuration, random_model
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.model import Graph
from rl.commands import cli
from rl.records import events

OWN = "tests/end_to_end/own_rewards.py"
GRPO = (
    "{algorithm: {name: grpo, kl_coef: 0.05}, steps: 1, prompts_per_step: 4, "
    "samples_per_prompt: 4, updates_per_step: 2"
)
ONE_STEP = f"stages=[{GRPO}, optimizer: {{learning_rate: 1e-3}}, sampling: {{max_new_tokens: 6}}}}]"


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test if a model is built."""

    def build(*_):
        raise AssertionError("a model was built")

    monkeypatch.setattr(Graph, "__init__", build)


def refused(capsys, code, *words, arguments) -> str:
    """Runs the command, which ends with this exit code and an error that holds these words and no
    traceback."""
    capsys.readouterr()
    result = cli.train_main(arguments)
    said = capsys.readouterr().err
    assert result == code, said
    for word in words:
        assert word in said, said
    assert "Traceback" not in said
    return said


BAD_CONFIGURATIONS = {
    "a misspelt key": (["stages.1.learning_rat=1"], "stages.1.learning_rat"),
    "a value of another type": (["seed=many"], "seed"),
    "no such file": (
        ["data.path=data/missing.jsonl", "data.task=null", "data.options=null"],
        "data/missing.jsonl",
    ),
    "no such configuration": (["missing.yml"], "missing.yml"),
    "an unknown reward": (["rewards.functions=[exact_answr]"], "exact_answer"),
    "a reward file without the function": ([f"rewards.functions=['{OWN}:digitz']"], "digits"),
    "an option that a reward does not have": (
        ["rewards.functions=[{name: exact_answer, options: {paten: x}}]"],
        "pattern",
    ),
    "an unknown model": (["model.source=tiny-depseek"], "tiny-deepseek"),
    "an unknown task": (["data.task=arithmetik"], "arithmetic"),
    "an unknown algorithm": (["stages.1.algorithm.name=grpp"], "grpo"),
    "an option of another algorithm": (["stages.1.algorithm.gamma=0.5"], "gamma"),
    "no room for a prompt": (["stages.1.sampling.max_new_tokens=32"], "max_length"),
    "a template that is not there": (["tokenizer.chat_template=none.jinja"], "none.jinja"),
}


@pytest.mark.parametrize("case", BAD_CONFIGURATIONS)
def test_a_bad_configuration_is_exit_code_2(case, tmp_path, capsys, no_model):
    more, *words = BAD_CONFIGURATIONS[case]
    refused(capsys, 2, *words, arguments=launch.arguments(tmp_path / "run", *more))
    assert not (tmp_path / "run" / "checkpoints").exists()


def on_rows(tmp_path, rows, *more, name="data.jsonl") -> list[str]:
    """Arguments of a small GRPO run on a file of these rows (objects, or lines of text)."""
    path = tmp_path / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    where = [
        "data.task=null",
        "data.options=null",
        f"data.path={path}",
        "evaluation=null",
        ONE_STEP,
    ]
    return launch.arguments(tmp_path / "run", *where, *more)


GOOD = {"prompt": "1+1=", "answer": "2"}
BAD_DATA = {
    "an empty file": ([], [], "data.jsonl", "no rows"),
    "a line that is no JSON": ([GOOD, GOOD, '{"prompt": '], [], "data.jsonl:3", "not valid JSON"),
    "a row without a prompt": ([GOOD, {"question": "1+1="}], [], "data.jsonl:2", "prompt"),
    "an empty prompt": ([GOOD, GOOD | {"prompt": ""}], [], "data.jsonl:2", "empty"),
    "a token without an embedding": (
        [{"prompt": "11", "answer": "2"}, GOOD],
        ["model.overrides.vocab_size=20"],
        "data.jsonl:2",
        "token 21 ('=') is outside the model's vocabulary of 20",
    ),
    "a prompt that is too long": (
        [GOOD, GOOD | {"prompt": "1" * 30}],
        [],
        "data.jsonl:2",
        "1 of 2 rows are longer than the 26 tokens that fit (32 - 6 for the completion)",
        "30 tokens",
        "max_length=36 fits all rows; data.too_long=drop leaves",
    ),
    "a reward without its column": (
        [GOOD],
        [f"rewards.functions=['{OWN}:needs_a_column']"],
        "data.jsonl:1",
        "'difficulty'",
        "answer",
    ),
    "a column that one row lacks": (
        [GOOD, GOOD, {"prompt": "2+2="}],
        ["rewards.functions=[exact_answer]"],
        "data.jsonl:3",
        "'answer'",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_exit_code_3(case, tmp_path, capsys, no_model):
    rows, more, *words = BAD_DATA[case]
    arguments = on_rows(tmp_path, rows, *more)
    refused(capsys, 3, *words, arguments=arguments)
    assert not (tmp_path / "run").exists()
    refused(capsys, 3, *words, arguments=["--check", *arguments])
    assert cli.main(["inspect", *arguments]) == 3
    printed = capsys.readouterr()
    assert all(word in printed.out + printed.err for word in words), printed


def test_demonstrations_without_an_answer_are_exit_code_3(tmp_path, capsys, no_model):
    sft = "stages=[{algorithm: sft, steps: 1, sampling: {max_new_tokens: 6}}]"
    refused(capsys, 3, "data.jsonl:1", "completion", arguments=on_rows(tmp_path, [GOOD], sft))


@pytest.mark.slow
def test_a_broken_model_directory_is_exit_code_4_and_names_the_tensor(tmp_path, capsys):
    directory = tmp_path / "model"
    policy.save(random_model(families.read(configuration("Llama", vocab_size=64))), directory)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "layers.1.mlp.up" not in k},
        directory / "model.safetensors",
    )
    arguments = [str(launch.QUICKSTART), f"run.dir={tmp_path / 'run'}", f"model={directory}"]
    refused(
        capsys,
        4,
        "missing tensor model.layers.1.mlp.up_proj.weight",
        str(directory),
        arguments=arguments,
    )
    # Nothing was begun, so the directory of the run is free for what the user tries next.
    (directory / "config.json").write_text("{")
    refused(capsys, 4, "config.json:1", "not valid JSON", arguments=[*arguments, "seed=5"])
    (directory / "config.json").write_text('{"model_type": "mamba"}')
    refused(capsys, 4, "mamba", arguments=arguments)


def test_a_mesh_without_enough_devices_is_exit_code_5(tmp_path, capsys, no_model):
    refused(
        capsys,
        5,
        "needs 4 devices, there are 1",
        arguments=launch.arguments(tmp_path / "run", "mesh.tensor=4"),
    )


@pytest.mark.parametrize(("platform", "extra"), [("tpu", "tpu"), ("gpu", "cuda")])
def test_a_platform_that_is_not_here_is_exit_code_5(tmp_path, platform, extra):
    code, out, err = launch.finish(
        launch.process(*launch.arguments(tmp_path / "run", f"platform={platform}"))
    )
    assert code == 5, err
    assert (
        "not enough resources" in err and f"platform: {platform}" in err and "Traceback" not in err
    )
    assert f"pip install 'duet-rl[{extra}]'" in err
    assert "stage sft" not in out and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_reward_that_fails_stops_the_run_with_on_error_stop(tmp_path, capsys):
    more = [
        ONE_STEP,
        f"rewards.functions=['{OWN}:always_raises']",
        "rewards.on_error=stop",
        *launch.LIGHT,
    ]
    result = cli.train_main(launch.arguments(tmp_path / "run", *more))
    said = capsys.readouterr().err
    assert result == 6 and said.startswith(
        "stopped by a reward: reward always_raises failed (raised)"
    )
    assert (
        "ZeroDivisionError: this one never works" in said
        and "own_rewards.py" in said
        and "prompt:" in said
    )


def test_a_run_in_which_nothing_is_scored_ends_with_exit_code_6(tmp_path, capsys):
    more = [f"rewards.functions=['{OWN}:always_raises']", *launch.LIGHT]
    arguments = launch.arguments(tmp_path / "run", ONE_STEP.replace("steps: 1", "steps: 3"), *more)
    assert cli.train_main(arguments) == 6
    said = capsys.readouterr().err
    assert "grpo: no completion of the last 2 steps has a score" in said and "Traceback" not in said
    assert "always_raises failed (raised): ZeroDivisionError: this one never works" in said
    assert launch.lines(tmp_path / "run") == 1 and not (tmp_path / "run" / "export").exists()


@pytest.mark.slow
def test_rewards_that_raise_hang_or_give_nan_never_stop_a_run(tmp_path, caplog):
    more = [
        f"rewards.functions=['{OWN}:faulty']",
        "rewards.timeout_s=1.2",
        "rewards.workers=4",
        *launch.LIGHT,
    ]
    assert launch.train(tmp_path / "run", ONE_STEP.replace("steps: 1", "steps: 2"), *more) == 0
    samples = launch.trained(tmp_path / "run")
    kind = {row["prompt_id"]: int(row["prompt"].split("+")[0]) % 4 for row in samples}
    assert len(samples) == 32 and all(
        (row["reward"] is None) == (kind[row["prompt_id"]] != 3) for row in samples
    )
    assert all(row["advantage"] == 0 for row in samples if row["reward"] is None)
    for step in (1, 2):
        metrics = events.read(tmp_path / "run" / "events.jsonl")[step - 1]["metrics"]
        kinds = [kind[row["prompt_id"]] for row in samples if row["step"] == step]
        assert metrics["reward/faults"] == sum(k != 3 for k in kinds)
        assert metrics["reward/timeouts"] == sum(k == 1 for k in kinds)
        assert metrics["optim/skipped"] == 0 and metrics["loss"] is not None
    assert set(kind.values()) == {0, 1, 2, 3}, "the draw of this seed has every kind"
    assert (
        "reward faulty failed (" in caplog.text and "further ones are only counted" in caplog.text
    )
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_stage_without_a_finite_update_is_exit_code_4_however_often_it_is_started(
    tmp_path, capsys
):
    model = random_model(families.read(configuration("Llama", vocab_size=64)))
    model.params = {path: weight * float("nan") for path, weight in model.params.items()}
    policy.save(model, tmp_path / "model")
    sft = (
        "{algorithm: sft, steps: 2, prompts_per_step: 4, updates_per_step: 2, sampling: "
        "{max_new_tokens: 6}}"
    )
    more = [
        f"model={{source: {tmp_path / 'model'}}}",
        f"stages=[{sft}]",
        "evaluation=null",
        "run.checkpoint_every=1",
    ]
    arguments = [str(launch.QUICKSTART), f"run.dir={tmp_path / 'run'}", *more]
    for _ in range(2):
        refused(
            capsys,
            4,
            "no update of this stage changed the weights",
            "optim/grad_norm",
            arguments=arguments,
        )
        assert [
            row["metrics"]["optim/skipped"]
            for row in events.read(tmp_path / "run" / "events.jsonl")
        ] == [1, 1]
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.slow
def test_a_run_without_any_score_goes_on_and_changes_nothing_by_it(tmp_path):
    more = [
        f"rewards.functions=['{OWN}:always_raises']",
        "evaluation=null",
        "rewards.unscored_steps=0",
        "stages.0.router={bias_rate: 0}",
    ]
    assert launch.train(tmp_path / "run", ONE_STEP, *more) == 0
    (row,) = events.read(tmp_path / "run" / "events.jsonl")
    assert row["metrics"]["reward/mean"] is None and row["metrics"]["optim/grad_norm"] == 0
    start = policy.create(policy.load(tmp_path / "run" / "export").config, 0).params
    end = policy.load(tmp_path / "run" / "export").params
    assert all((start[path] == end[path]).all() for path in start)


def test_a_run_whose_weights_are_not_finite_exports_nothing(tmp_path, capsys):
    sft = (
        "stages=[{algorithm: sft, steps: 3, prompts_per_step: 4, optimizer: {learning_rate: 1e38}}]"
    )
    arguments = launch.arguments(tmp_path / "run", sft, "run.checkpoint_every=1", *launch.LIGHT)
    said = refused(
        capsys, 4, "sft: the last update made weights that are not finite", arguments=arguments
    )
    assert "stages.0.optimizer.learning_rate" in said and not (tmp_path / "run/export").exists()
    assert not list((tmp_path / "run/checkpoints").glob("[0-9]*"))


@pytest.mark.slow
def test_a_run_goes_on_with_the_rows_that_it_started_with(tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) for n in range(8)]
    data.write_text("\n".join(rows))
    sft = "stages=[{algorithm: sft, steps: 1, prompts_per_step: 4}]"
    more = (sft, f"data={data}", "evaluation=null", "rewards=null")
    assert launch.train(tmp_path / "run", *more) == 0
    data.write_text("\n".join(rows[:6]))
    longer = [str(tmp_path / "run"), "stages.0.steps=2"]
    before = (tmp_path / "run" / "config.yml").read_bytes()
    refused(
        capsys,
        3,
        "changed: 8 rows when the run was last started, 6 now",
        "run.changed_data=allow",
        arguments=longer,
    )
    assert (tmp_path / "run/export").is_dir() and (
        tmp_path / "run" / "config.yml"
    ).read_bytes() == before
    assert cli.train_main([*longer, "run.changed_data=allow"]) == 0
    assert (tmp_path / "run/export-sft-1").is_dir()
    first, *_, last = json.loads((tmp_path / "run/run.json").read_text())["attempts"]
    assert (first["data"]["sft"]["rows"], last["data"]["sft"]["rows"]) == (8, 6)
