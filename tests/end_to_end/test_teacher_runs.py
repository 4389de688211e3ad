"""Runs of `distill`: from a teacher that is loaded, from files of `rl teach`, interrupted, and with
teachers that do not fit."""

import dataclasses
import json
import shutil

import jax
import launch
import numpy as np
import pytest
from oracles import configuration, random_model
from safetensors.numpy import load_file

import policy
from policy import families
from policy.ops.host_memory import on_a_device
from rl.commands import cli
from rl.config.model import TeacherOptions
from rl.data import teacher as teachers
from rl.plan import compiled, programs
from rl.plan.command import table
from rl.plan.estimate import Estimator, teacher_work
from rl.records import events
from rl.run import build
from rl.run.load import load
from rollout.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("distillation")
ALPHABET = "0123456789+-*= "
RUN = """
run: {checkpoint_every: 1, keep_checkpoints: 9}
platform: cpu
model: {source: MODEL, remat: none, scan: false}
tokenizer: {source: characters, alphabet: "0123456789+-*= "}
max_length: 16
data: {task: arithmetic, options: {max_operand: 9}}
teacher: TEACHER
stages:
  - algorithm: {name: distill, alpha: 1.0, alpha_end: 0.5}
    steps: 4
    prompts_per_step: 8
    updates_per_step: 2
    optimizer: {learning_rate: 1e-2}
"""
GENERATOR = "generator={slots: 32, tokens_per_dispatch: 6, batch_sizes: []}"
SFT = "{algorithm: sft, steps: 4, prompts_per_step: 8}"
TEACHER = {"vocab_size": 24, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES = TEACHER | {"hidden_size": 16, "num_hidden_layers": 1}


def saved(directory, sizes, seed, tokenizer=ALPHABET, **generation):
    model = random_model(families.read(configuration("Llama", **sizes)), seed=seed)
    policy.save(model, directory, generation=generation or None)
    if tokenizer:
        load_tokenizer("characters", tokenizer).save_pretrained(directory)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of models and of a finished run."""
    folder = tmp_path_factory.mktemp("distillation")
    saved(folder / "student", SIZES, 1, tokenizer=None)
    saved(folder / "teacher", TEACHER, 2)
    text = RUN.replace("MODEL", str(folder / "student")).replace("TEACHER", str(folder / "teacher"))
    (folder / "run.yml").write_text(text)
    assert cli.train_main([str(folder / "run.yml"), f"run.dir={folder / 'run'}"]) == 0
    return folder


def metrics_of(run) -> list[dict]:
    return [row["metrics"] for row in events.read(run / "events.jsonl")]


def test_a_run_learns_from_its_teacher_by_the_schedule(finished):
    rows = metrics_of(finished / "run")
    assert [row["distill/alpha"] for row in rows] == [1.0, 0.875, 0.75, 0.625]
    assert rows[-1]["distill/forward_kl"] < rows[0]["distill/forward_kl"]
    assert {
        "distill/agreement",
        "distill/teacher_entropy",
        "distill/student_entropy",
        "nll",
    } <= rows[0].keys()
    assert "time/logprob" not in rows[0] and rows[0]["perf/step_tflop"] > 0


def test_a_run_that_is_cut_off_goes_on_to_the_same_bits(finished, tmp_path):
    run = tmp_path / "again"
    shutil.copytree(finished / "run", run)
    shutil.rmtree(run / "export")
    for made in sorted((run / "checkpoints").iterdir())[2:]:
        shutil.rmtree(made)
    assert cli.train_main([str(finished / "run.yml"), f"run.dir={run}"]) == 0
    launch.assert_same_run(finished / "run", run)


def sampling(algorithm, **keys):
    """The arguments of a stage that samples, without rewards."""
    stage = {
        "algorithm": algorithm,
        "steps": 6,
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "max_logp_diff": 1e-4,
        "sampling": {"max_new_tokens": 6},
        "optimizer": {"learning_rate": 1e-2},
    }
    return [f"stages={json.dumps([stage | keys])}", GENERATOR]


ON_POLICY = {
    "gkd": {"name": "gkd", "divergence": "reverse"},
    "gkd, top 5": {"name": "gkd", "divergence": "forward", "top_k": 5, "temperature": 2.0},
    "opd": {"name": "opd"},
}


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=[pytest.mark.slow] * ("top" in case)) for case in ON_POLICY)],
)
def test_the_policy_learns_from_a_teacher_on_its_own_samples_without_rewards(
    case, finished, tmp_path
):
    """A run that is cut off goes on to the same bits."""
    arguments = [str(finished / "run.yml"), *sampling(ON_POLICY[case])]
    run, again = tmp_path / "run", tmp_path / "again"
    assert cli.train_main([*arguments, f"run.dir={run}"]) == 0
    rows = metrics_of(run)
    name = "distill/forward_kl" if "top" in case else "distill/reverse_kl"
    kl = [row[name] for row in rows]
    assert kl[-1] < 0.9 * kl[0], kl
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert not [name for name in rows[0] if "reward" in name]
    assert ("time/teacher" in rows[0]) == (case == "opd")
    shutil.copytree(run, again)
    shutil.rmtree(again / "export")
    for made in sorted((again / "checkpoints").iterdir())[2:]:
        shutil.rmtree(made)
    assert cli.train_main([*arguments, f"run.dir={again}"]) == 0
    launch.assert_same_run(run, again)


HINT = {"source": "reference", "prompt": "{answer}={prompt}"}
SUCCESS = {"source": "policy", "prompt": "{success}{prompt}", "correct_at": -1.0}


@pytest.mark.parametrize(
    ("teacher", "options", "more"),
    [
        (HINT, {"reference_every": 1, "reference_mix": 0.1}, []),
        pytest.param(SUCCESS, {}, ["rewards.functions=[exact_answer]"], marks=pytest.mark.slow),
    ],
    ids=["a hint, by the mean of the weights", "a success of the group"],
)
def test_the_policy_is_its_own_teacher_after_another_prompt(
    teacher, options, more, finished, tmp_path
):
    """A run that is cut off goes on to the same bits."""
    own = f"teacher={json.dumps({'files': None} | teacher)}"
    arguments = [str(finished / "run.yml"), own, "max_length=24", *more]
    arguments += sampling({"name": "opd"} | options)
    run, again = tmp_path / "run", tmp_path / "again"
    assert cli.train_main([*arguments, f"run.dir={run}"]) == 0
    rows = metrics_of(run)
    assert all(row["distill/scored"] == 1.0 and row["time/teacher"] > 0 for row in rows)
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    shutil.copytree(run, again)
    shutil.rmtree(again / "export")
    for made in sorted((again / "checkpoints").iterdir())[2:]:
        shutil.rmtree(made)
    assert cli.train_main([*arguments, f"run.dir={again}"]) == 0
    launch.assert_same_run(run, again)


@pytest.mark.slow
def test_samples_without_rewards_are_recorded_and_taught_later(finished, tmp_path):
    """The run on recorded samples has the first loss of the run that sampled them itself."""
    arguments = [str(finished / "run.yml"), *sampling("opd", steps=2)]
    recorded = tmp_path / "recorded"
    assert cli.main(["rollout", *arguments, f"run.dir={recorded}"]) == 0
    assert not [name for row in metrics_of(recorded) for name in row if "reward" in name]
    later = f"stages.0.rollouts={recorded}"
    for name, more in (("own", []), ("later", [later])):
        assert cli.train_main([*arguments, *more, f"run.dir={tmp_path / name}"]) == 0
    own, taught = (metrics_of(tmp_path / name)[0]["loss"] for name in ("own", "later"))
    assert own == taught


@pytest.mark.slow
def test_a_column_names_the_teacher_of_a_row(finished, tmp_path):
    """With the teacher of one source for all values, the run is the one of that source."""
    saved(tmp_path / "other", TEACHER, 7)
    rows = [{"prompt": f"{n}+1=", "kind": "xy"[n % 2]} for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, other = str(finished / "teacher"), str(tmp_path / "other")
    losses = {}
    for name, sources in (("one", [first, first]), ("two", [first, other])):
        column = {"source": None, "by": "kind", "sources": dict(zip("xy", sources, strict=True))}
        arguments = [
            str(finished / "run.yml"),
            f"data={json.dumps({'task': None, 'path': str(data)})}",
            f"teacher={json.dumps(column)}",
            *sampling("opd"),
        ]
        assert cli.train_main([*arguments, f"run.dir={tmp_path / name}"]) == 0
        losses[name] = [row["loss"] for row in metrics_of(tmp_path / name)]
    arguments[2] = f"teacher={first}"
    assert cli.train_main([*arguments, f"run.dir={tmp_path / 'source'}"]) == 0
    source = [row["loss"] for row in metrics_of(tmp_path / "source")]
    np.testing.assert_allclose(losses["one"], source, rtol=1e-5)
    assert abs(np.array(losses["two"]) - source).max() > 1e-3


@pytest.mark.parametrize("algorithm", ["gkd", "opd"])
def test_a_plan_counts_the_teacher_of_a_stage_that_samples(algorithm, finished, tmp_path):
    """Within the update, or as a program of its own."""
    config = load([finished / "run.yml"], [*sampling(algorithm), f"run.dir={tmp_path / 'plan'}"])
    planned = {
        each.kind: each
        for each in programs.programs(config, build.on_mesh(config, jax.devices()[:1]), None)
    }
    own = f"log-probabilities of {finished / 'teacher'}"
    assert (planned["update"].teacher is not None) == (algorithm == "gkd")
    assert (own in planned) == (algorithm == "opd")
    if own in planned:
        sizes = planned[own].graph.shapes.values()
        assert planned[own].resident >= 4 * sum(each.size for each in sizes)
        planned[own].lower()


@pytest.mark.parametrize(
    ("algorithm", "change", "said"),
    [
        ("gkd", "teacher=null", "gkd needs a teacher"),
        ("opd", "teacher=null", "opd needs a teacher"),
        (
            "opd",
            "teacher={source: null, files: x}",
            "files hold numbers for rows of data, and opd samples",
        ),
        ("grpo", "teacher=null", "grpo needs rewards"),
        ("opd", "stages.0.algorithm.reward_coef=1", "opd needs rewards"),
        ("gkd", "stages.0.algorithm.dynamic_batches=2", "chooses by rewards; set them"),
        ("opd", "until={metric: reward/mean, at_least: 1}", "no `rewards` are configured"),
        ("opd", "teacher=policy", "teaches itself nothing after its own prompt; give `prompt`"),
        ("gkd", "teacher=reference", "contain one other model"),
        ("gkd", "teacher.prompt=Hint {prompt}", "contain one other model"),
        ("opd", "teacher={source: policy, prompt: x, weights: int8}", "whose weights the run has"),
        ("opd", "teacher={source: policy, prompt: '{success}'}", "is told by rewards"),
        ("opd", "stages.0.algorithm.reference_every=1", "there is no reference model"),
    ],
)
def test_what_a_stage_that_samples_lacks_is_refused(
    algorithm, change, said, finished, tmp_path, capsys
):
    change = change.replace("until", "stages.0.until")
    arguments = [str(finished / "run.yml"), *sampling(algorithm), change]
    assert cli.train_main([*arguments, f"run.dir={tmp_path / 'refused'}"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_goes_on_with_the_teacher_of_its_first_steps_only(finished, tmp_path, capsys):
    """The other teacher has the same shapes, so that only its numbers differ."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    shutil.rmtree(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1])
    shutil.copytree(finished / "teacher", tmp_path / "kept")
    saved(finished / "teacher", TEACHER, 5)
    try:
        assert cli.train_main([str(finished / "run.yml"), f"run.dir={tmp_path / 'run'}"]) == 4
    finally:
        shutil.rmtree(finished / "teacher")
        shutil.copytree(tmp_path / "kept", finished / "teacher")
    assert "its files have changed since the first steps of distill" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.train_main([str(finished / "run.yml"), f"run.dir={tmp_path / 'run'}"]) == 0


@pytest.mark.parametrize("change", ["weights", "length", "config", "files"])
def test_the_identity_of_a_teacher_is_that_of_its_files(change, tmp_path):
    large = np.random.default_rng(0).integers(0, 255, 3 << 20, np.uint8).tobytes()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(large)
    (tmp_path / "notes.txt").write_text("of no weight")
    options = TeacherOptions(**{"files" if change == "files" else "source": str(tmp_path)})
    before = teachers.identity(options)
    if change != "files":
        (tmp_path / "notes.txt").write_text("changed")
    assert teachers.identity(options) == before
    if change == "config":
        (tmp_path / "config.json").write_text("[]")
    elif change == "files":
        (tmp_path / "notes.txt").write_text("changed")
    else:  # all numbers after the first MiB
        rest = large[1 << 20 :]
        rest = bytes(255 - each for each in rest) if change == "weights" else rest[:-1]
        (tmp_path / "model.safetensors").write_bytes(large[: 1 << 20] + rest)
    assert teachers.identity(options) != before


@pytest.mark.slow
def test_projections_of_features_are_kept_in_checkpoints_and_not_exported(finished, tmp_path):
    """Of another width and depth. A run that is cut off goes on to the same bits."""
    features = "stages.0.algorithm.features_coef=0.5", "stages.0.algorithm.features_layers=[[0, 1]]"
    arguments = [str(finished / "run.yml"), *features]
    assert cli.train_main([*arguments, f"run.dir={tmp_path / 'run'}"]) == 0
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["distill/features"] < rows[0]["distill/features"]
    assert rows[0]["distill/projections/optim/grad_norm"] > 0
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "export")
    for made in sorted((tmp_path / "again" / "checkpoints").iterdir())[2:]:
        shutil.rmtree(made)
    assert cli.train_main([*arguments, f"run.dir={tmp_path / 'again'}"]) == 0
    launch.assert_same_run(tmp_path / "run", tmp_path / "again")
    newest = sorted((tmp_path / "again" / "checkpoints").iterdir())[-1]
    named = json.loads((newest / "manifest.json").read_text())["arrays"]
    assert sum("projection.0.1" in name for name in named) == 3, "the matrix and its two moments"
    stored, plain = (
        load_file(folder / "export" / "model.safetensors")
        for folder in (tmp_path / "again", finished / "run")
    )
    assert stored.keys() == plain.keys()


@pytest.mark.slow
def test_files_with_all_tokens_are_the_teacher_and_a_stopped_command_goes_on(
    finished, tmp_path, capsys, monkeypatch
):
    files, teach = (
        tmp_path / "files",
        ["teach", str(finished / "run.yml"), "--top", "24", "--dtype", "float32"],
    )
    assert cli.main([*teach, "--output", str(files), "--rows-per-file", "40"]) == 0
    assert "90 rows, 24 tokens in each place" in capsys.readouterr().out
    part = files / "part-00002.safetensors"
    content = part.read_bytes()
    (files / "teacher.json").rename(files / "partial.json")  # as a kill between two parts leaves it
    stored = json.loads((files / "partial.json").read_text())
    del stored["parts"]
    (files / "partial.json").write_text(json.dumps(stored, indent=1))
    part.unlink()
    assert cli.main([*teach, "--output", str(files), "--rows-per-file", "40"]) == 0
    out = capsys.readouterr().out
    assert "part 3 of 3: 10 rows" in out and "part 1" not in out and part.read_bytes() == content
    from_files = f"teacher={{source: null, files: {files}}}"
    assert (
        cli.train_main([str(finished / "run.yml"), f"run.dir={tmp_path / 'run'}", from_files]) == 0
    )
    for one, other in zip(metrics_of(tmp_path / "run"), metrics_of(finished / "run"), strict=True):
        for name in ("loss", "nll", "distill/forward_kl", "optim/grad_norm"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, err_msg=name)
        assert one["distill/teacher_mass"] == pytest.approx(1.0)
    # Rows of another dataset, and another tokenizer, are refused before a model is built.
    for change, code, said in (
        ("data.options.style=reversed", 3, "row 19 of the data has other tokens"),
        ("tokenizer.alphabet='0123456789+-*= x'", 2, "was written with another tokenizer"),
        ("stages.0.algorithm.top_k=25", 2, "holds 24 tokens in each place, top_k asks for 25"),
        (
            "stages.0.sampling.stop_token_ids=[9]",
            2,
            "ends a completion with 2 ('<eos>'), the run with 2",
        ),
    ):
        refused = [str(finished / "run.yml"), f"run.dir={tmp_path / 'refused'}", from_files, change]
        assert cli.train_main(refused) == code, change
        assert said in " ".join(capsys.readouterr().err.split()), change


def test_a_plan_counts_the_teacher(finished):
    config = load([finished / "run.yml"], [f"run.dir={finished / 'run'}"])
    sizes = {}
    for weights in ("null", "int8"):
        changed = load(
            [finished / "run.yml"], [f"run.dir={finished}", f"teacher.weights={weights}"]
        )
        ((stage, _),) = programs.stages(changed, build.on_mesh(config, jax.devices()[:1]), None)
        (update,) = [each for each in programs.planned(stage, None) if each.kind == "update"]
        teacher = on_a_device(stage.stage.frozen())
        assert update.teacher is stage.stage.trainer.teacher.graph
        assert (
            update.resident == stage.bytes == on_a_device(stage.state) + teacher
            and update.non_argument == 0
        )
        sizes[weights] = teacher
    assert sizes["null"] > 2 * sizes["int8"] > 0
    update.lower()


def test_the_least_time_of_an_update_counts_the_pass_of_the_teacher(finished):
    """The estimate against the products of the compiled update, which has the teacher's in addition
    to those of sft."""
    counted, estimated, planned = {}, {}, {}
    for name, changes in (
        ("distill", ["stages.0.algorithm={name: distill, alpha: 0.0, alpha_end: null}"]),
        ("sft", [f"stages=[{SFT}]", "teacher=null"]),
    ):
        config = load(
            [finished / "run.yml"], [f"run.dir={finished}", "stages.0.updates_per_step=1", *changes]
        )
        devices = jax.devices()[:1]
        (each,) = [
            p
            for p in programs.programs(config, build.on_mesh(config, devices), None)
            if p.kind == "update"
        ]
        planned[name] = each
        counted[name] = compiled.counts(each.lower().compile().as_text(), each)
        estimated[name] = Estimator(devices, None, None)(config)[each.name].seconds
    assert (
        teacher_work(planned["sft"]) is None
        and planned["distill"].trip_count == planned["sft"].trip_count
    )
    operations, moved = teacher_work(planned["distill"])
    more = {key: counted["distill"][key] - counted["sft"][key] for key in ("operations", "moved")}
    # The heads of both models are multiplied once more, for the divergence; attention counts full
    # squares here.
    assert 0.4 * more["operations"] < operations < 1.1 * more["operations"], (operations, more)
    assert 0.1 * more["moved"] < moved < 1.1 * more["moved"], (moved, more)
    assert estimated["distill"] > 1.3 * estimated["sft"]
    fields = {field.name: 0 for field in dataclasses.fields(compiled.ProgramReport)} | {
        "exchanged": {},
        "kernels": {},
        "notes": [],
    }
    shown = compiled.ProgramReport(
        **fields | {"name": "distill: update", "teacher": [operations, moved]}
    )
    assert "distill: update contains the teacher's passes, about " in table([shown], None)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("teacher=OTHER", 2, "was trained with another tokenizer"),
        (
            "teacher=STOPS",
            2,
            "ends a completion with 2 ('<eos>'), 7 ('<|end|>'), the run with 2 ('<eos>')",
        ),
        (
            "teacher=BARE",
            2,
            "its tokenizer cannot be read, so nothing shows that it reads the ids of the run",
        ),
        ("teacher=nowhere", 4, "no directory with a config.json, no finished run"),
        ("teacher=null", 2, "distill needs a teacher"),
        ("teacher={source: null, files: x}", 2, "holds no teacher.json; `rl teach` writes one"),
        (
            "teacher.weights=int8 mesh.shard_mode=explicit",
            2,
            "explicit sharding takes no weights of few bits",
        ),
        ("teacher.overrides={hidden_size: 8}", 2, "only random weights take overrides"),
        (
            "max_length=2000 teacher=gpt2",
            2,
            "max_length 2000 is more than the 1024 positions of this teacher",
        ),
        ("stages.0.algorithm.features_coef=0.1", 2, "the policy has 1 and this teacher 2 layers"),
        (
            "stages.0.algorithm.features_coef=0.1 stages.0.algorithm.features_layers=[[0,1],[0,1]]",
            2,
            "features_layers names the pair [0, 1] twice",
        ),
        ("stages.0.algorithm={name: sft, alpha: null, alpha_end: null}", 2, "no option"),
        ("stages=[{algorithm: sft, steps: 1}]", 2, "no stage learns from a teacher"),
        ("stages=[{algorithm: sft, steps: 1, teacher: TEACHER}]", 2, "sft learns from no teacher"),
        ("model.source=WIDE", 4, "the policy 40, and gives those beyond a probability of 0."),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(change, code, said, finished, tmp_path, capsys):
    places = {name: tmp_path / name.lower() for name in ("OTHER", "STOPS", "BARE", "WIDE")}
    name = next((name for name in places if name in change), None)
    if name == "WIDE":
        saved(places[name], SIZES | {"vocab_size": 40}, 3, tokenizer=None)
    elif name:
        alphabet = {"OTHER": "0123456789+-*/ ", "STOPS": ALPHABET, "BARE": None}[name]
        saved(
            places[name],
            TEACHER,
            2,
            alphabet,
            **({"eos_token_id": [2, 7]} if name == "STOPS" else {}),
        )
        change = change.replace(name, str(places[name]))
    change = change.replace("WIDE", str(places["WIDE"])).replace(
        "TEACHER", str(finished / "teacher")
    )
    changes = change.split() if "{" not in change else [change]
    assert (
        cli.train_main([str(finished / "run.yml"), f"run.dir={tmp_path / 'run'}", *changes]) == code
    )
    assert said in " ".join(capsys.readouterr().err.split())
    if name in ("OTHER", "STOPS", "BARE") or "nowhere" in change:  # before a run, too
        assert cli.train_main([str(finished / "run.yml"), "--check", *changes]) == code
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "checkpoints").exists() or not any(
        (tmp_path / "run" / "checkpoints").iterdir()
    )
