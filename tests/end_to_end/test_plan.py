"""`rl plan` on devices of the CPU: the programs of every stage, their memory next to live arrays
and against the memory of a run, settings with which they fit, and what is refused."""

import importlib.util
import json
import math
from dataclasses import asdict

import jax
import launch
import numpy as np
import pytest

import rl.algorithms
import rl.stages
from policy.config import Runtime
from policy.huggingface import classification, sources
from policy.model import Graph, Model
from policy.programs.compiled_cache import Memory
from rl.accounting import program_memory
from rl.commands import cli
from rl.config import files
from rl.data.reader import read_tokenizer
from rl.plan.children import describe_target
from rl.plan.estimate import Estimator
from rl.plan.programs import programs
from rl.run import build
from rl.run.load import load
from rl.stages.scorers import program_name
from rl.training.reward_model import RewardModelScorer
from rl.training.trainer import Trainer
from rollout.engine import exact
from rollout.generator import Generator
from rollout.types import GeneratorOptions

pytestmark = pytest.mark.xdist_group("plan")
MESH = ("mesh.fsdp=2", "mesh.tensor=2")
ONE = (
    "model={source: qwen3-0.6b, overrides: {vocab_size: 32, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8}}",
    "stages=[{algorithm: sft, steps: 1, prompts_per_step: 8, micro_batch: 8, sampling: "
    "{max_new_tokens: 6}}]",
)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def numbers(tmp_path, monkeypatch, known):
    """(exit code, what --json holds) of a plan of the small run."""
    monkeypatch.setenv("DUET_PLAN_CACHE", str(known))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

    def run(topology, *more, flags=()):
        file = tmp_path / "plan.json"
        file.unlink(missing_ok=True)
        given = launch.arguments(tmp_path / "run", *launch.LIGHT, *more)
        code = cli.main(["plan", *given, "--topology", topology, "--json", str(file), *flags])
        return code, json.loads(file.read_text()) if file.exists() else {"programs": []}

    return run


@pytest.fixture
def plan(numbers, capsys):
    """(exit code, programs by name, standard output and error) of a plan of the small run."""

    def run(topology, *more):
        code, result = numbers(topology, *more)
        return code, {each["name"]: each for each in result["programs"]}, capsys.readouterr()

    return run


@pytest.mark.slow
def test_every_program_of_every_stage_is_planned(plan, tmp_path):
    code, result, shown = plan("cpu:4", *MESH)
    assert code == 0
    assert {"sft: update", "grpo: update", "grpo: prefill"} <= result.keys() and any(
        "decode" in name for name in result
    )
    for name, each in result.items():
        assert each["operations"] > 0 and each["moved"] > 0 and each["arguments"] > 0, name
        assert each["peak"] >= each["arguments"], name
        assert name in shown.out
    assert {"all-gather", "all-reduce"} <= result["grpo: update"]["exchanged"].keys()
    assert not (tmp_path / "run").exists(), "a plan leaves no run behind"
    again = plan("cpu:4", *MESH)[1]
    assert again == result, "what is known is not compiled again"


@pytest.mark.slow
def test_the_program_that_lays_weights_out_is_planned_and_its_copy_counted(plan):
    result, sharded = (
        plan("cpu:4", *MESH, *more)[1] for more in ((), ("generator.rules=stationary",))
    )
    assert sharded["grpo: update"] == result["grpo: update"], "the copy is dropped before"
    reshard, decode = sharded["grpo: reshard"], "grpo: decode a token"
    assert (
        reshard["times"] == 1
        and reshard["exchanged"]
        and reshard["outputs"] > 0
        and "grpo: reshard" not in result
    )
    assert (
        sharded[decode]["non_argument"] + sharded[decode]["arguments"]
        > result[decode]["non_argument"] + result[decode]["arguments"]
    ), "the copy is stored during decoding"


@pytest.mark.slow
def test_arguments_are_the_bytes_of_the_live_arrays(plan, tmp_path):
    """Of an update on one device: weights, moments and what it reads of the batch; the first two
    are written in place.
    """
    result = plan("cpu:1")[1]["sft: update"]
    file, *more = launch.arguments(tmp_path / "run", *launch.LIGHT)
    config = load([file], more)
    options = config.stages[0]
    graph = build.graph(config, build.on_mesh(config, jax.devices()[:1]))
    trainer = Trainer(graph, options, rl.algorithms.get("sft"))
    state = trainer.start(graph.init(0), seed=0)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    updated = held - 4  # the count of the schedule follows from the number of the update
    assert result["aliased"] == updated
    # tokens, segments and mask, how many tokens count, and the number of the update
    read = 3 * 4 * math.prod(result["shape"]) + 4 + 4
    assert result["arguments"] == updated + read
    estimated = Estimator(jax.devices()[:1], None, None)(config)
    assert estimated["sft: update"].resident == held, (
        "what lies there all the time is known without compiling"
    )
    update = estimated["grpo: update"].resident
    assert update > 1.3 * held, "a reference, and the cache"
    assert estimated["grpo: prefill"].resident > update, "copies of weights, as a CPU decodes"


@pytest.mark.slow
def test_a_run_says_what_its_own_programs_take_and_a_plan_had_said_so(plan, tmp_path):
    """On one device, quantised weights in rollouts: what rows of `max_length` compile to is what
    runs."""
    more = (*launch.LIGHT, "stages.0.steps=1", "stages.1.steps=1", "stages.2.steps=0")
    more = (*more, "generator.weights=int8", "generator.prefill_chunk=16")
    planned = plan("cpu:1", *more)[1]
    assert launch.train(tmp_path / "run", *more) == 0
    # Prompts of the data are short.
    left_out = {
        "grpo: quantised copy",
        "grpo: prefill, further chunk",
        *(name for name in planned if name.startswith("grpo-2")),
    }
    assert {
        "sft: update",
        "grpo: update",
        "grpo: log-probabilities",
        "grpo: prefill",
        "grpo: decode a token",
    } <= planned.keys()
    assert_ran_as_planned(
        tmp_path / "run", {name: each for name, each in planned.items() if name not in left_out}
    )
    assert planned["grpo: update"]["notes"][0].startswith("shared prefix: 4 sequences share ")
    assert (
        planned["grpo: quantised copy"]["aliased"] > 0
        and planned["grpo: quantised copy"]["times"] == 2
    )


PACKED = ("update", "log-probabilities", "values")


def assert_ran_as_planned(directory, planned):
    """Every planned program ran, and took to the byte what the plan had said. The shape of packed
    rows follows from the lengths of a batch: where the run had others, they took no more than those
    of the plan, the largest."""
    ran = json.loads((directory / program_memory.FILE).read_text())["programs"]
    ran = {
        (
            each["name"].partition(": ")[2],
            each["name"].partition(": ")[0],
            tuple(each["shape"]),
        ): each
        for each in ran
    }
    for name, each in planned.items():
        (stage, _, kind), shape = name.partition(": "), tuple(each["shape"])
        mine = ran.get((kind, stage, shape), ran.get((kind, "generator", shape)))
        if mine is None and kind in PACKED:
            peaks = [other["peak"] for key, other in ran.items() if key[:2] == (kind, stage)]
            assert peaks and max(peaks) <= each["peak"], (name, peaks, each["peak"])
            continue
        assert mine, (name, shape, sorted(ran))
        parts = ("arguments", "temporaries", "outputs", "aliased", "peak")
        assert [mine[part] for part in parts] == [each[part] for part in parts], name


CHECKS = {f"grpo: {kind}" for kind in exact.CHECKS}


def asking(directory):
    """(overrides, source) of a run with exact completions that asks a reward model, whose directory
    is written."""
    sizes = (
        "hidden_size: 32, intermediate_size: 32, num_attention_heads: 2, num_key_value_heads: "
        "1, head_dim: 16"
    )
    sizes += ", vocab_size: 32"
    model = f"model={{source: qwen3-0.6b, overrides: {{num_hidden_layers: 1, {sizes}}}}}"
    config = load([launch.SMALL], [model])
    source, graph = (
        str(directory / "reward_model"),
        build.graph(config, build.on_mesh(config, jax.devices()[:1])),
    )
    trunk = Graph(sources.trunk(graph.config), graph.runtime, graph.layout)
    classification.write(source, trunk, trunk.init(1), np.ones(32, np.float32), pad_id=None)
    read_tokenizer(config)[0].save_pretrained(source)
    scorer = {"functions": [{"name": "reward_model", "options": {"source": source}}], "workers": 1}
    stage = {
        "algorithm": "grpo",
        "steps": 1,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "rewards": scorer,
    }
    stages = [stage | {"sampling": {"max_new_tokens": 6}}]
    return (
        model,
        "evaluation=null",
        f"stages={json.dumps(stages)}",
        "generator.exact=true",
        "generator.slots=1",
    ), source


@pytest.mark.slow
def test_reward_models_and_the_check_of_exact_completions_are_planned_as_they_are_compiled(
    tmp_path,
):
    more, source = asking(tmp_path)
    config = load([launch.SMALL], more)
    mesh = build.on_mesh(config, jax.devices()[:1])
    expected = {f"grpo: scores of {source}", *CHECKS}
    listed = {each.name: each for each in programs(config, mesh, None) if each.name in expected}
    assert listed.keys() == expected
    planned = {
        name: asdict(Memory.of(each.lower().compile(), "cpu"))
        | {"shape": each.shape, "times": each.times}
        for name, each in listed.items()
    }
    graph, [stage] = build.graph(config, mesh), rl.stages.create(config)
    stage.bind(graph)
    scorer = RewardModelScorer.read(
        source, Runtime(), mesh, config.max_length, stage.trainer.sharing
    )
    options = GeneratorOptions(exact=True)
    generator = Generator(
        Model(graph, graph.init(0)), max_length=config.max_length, slots=1, options=options
    )
    generator.verifier.compile_ahead(generator.model.params, config.max_length)
    assert np.isfinite(scorer([[1, 2, 3]] * 3)).all()
    largest = program_memory.ProgramMemoryLog(tmp_path).look(
        "grpo", {program_name(source): scorer.executable}, generator
    )
    assert_ran_as_planned(tmp_path, planned)
    assert largest["peak"] == max(each["peak"] for each in planned.values())
    assert [planned[name]["times"] for name in (f"grpo: scores of {source}", *CHECKS)] == [
        1,
        4,
        4,
        4,
    ]


@pytest.mark.slow
def test_a_run_that_asks_a_reward_model_and_checks_takes_what_was_planned(plan, tmp_path):
    more, source = asking(tmp_path)
    planned = plan("cpu:1", *more)[1]
    assert launch.train(tmp_path / "run", *more) == 0
    assert {
        f"grpo: scores of {source}",
        "grpo: update",
        "grpo: prefill",
        "grpo: decode a token",
        *CHECKS,
    } == planned.keys()
    assert_ran_as_planned(tmp_path / "run", planned)
    update, scores = planned["grpo: update"], planned[f"grpo: scores of {source}"]
    read = (
        4 * 4 * scores["shape"][0] * scores["shape"][1]
    )  # tokens; node, last and position in trees
    weights = scores["arguments"] - read
    assert (
        weights > 0
        and update["aliased"] + update["non_argument"] <= weights + scores["non_argument"]
    ), "all of it lies there all the time; with scores also the copies that decoding reads"


@pytest.mark.slow
def test_where_it_does_not_fit_settings_are_named_that_fit(numbers, capsys):
    """`remat: auto` would keep less instead."""
    one = (*ONE, "model.remat=full")
    code, result = numbers("cpu:1", *one)
    assert code == 0
    (update,) = result["programs"]
    limit = (update["peak"] - 1) / 2**30
    code, result = numbers("cpu:1", *one, flags=("--memory", repr(limit), "--candidates", "4"))
    shown = capsys.readouterr().out
    assert code == 1 and "sft: update" in shown.partition("does not fit")[2]
    each = result["suggestions"][0]
    assert (
        each["needs"] <= limit * 2**30
        and not each["changes_results"]
        and each["settings"] == {"stages.0.micro_batch": 2}
    )
    assert "stages.0.micro_batch=2 " in shown


@pytest.mark.slow
def test_search_prints_a_file_that_fits(numbers, capsys, tmp_path):
    flags = ("--search", "--memory", "1", "--candidates", "1")
    code, result = numbers("cpu:2", *ONE, flags=flags)
    assert code == 0 and result["pruned"] == 0 and len(result["candidates"]) == 1
    best = result["candidates"][0]
    assert (
        best["fits"]
        and best["seconds"] > 0
        and best["settings"]["mesh.fsdp"] * best["settings"]["mesh.tensor"] == 2
    )
    file = tmp_path / "best.yml"
    file.write_text(capsys.readouterr().out.partition("configuration:\n\n")[2])
    small, *more = launch.arguments(tmp_path / "run", *launch.LIGHT, *ONE)
    (tmp_path / "run.yml").write_text(files.resolved_yaml(load([small], more)))
    assert load([tmp_path / "run.yml", file]).model.remat == best["settings"]["model.remat"]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu compiles for TPU; it is not installed",
)
@pytest.mark.parametrize(
    ("topology", "kind", "count"),
    [
        ("v4:2x2x1", "TPU v4", 4),
        ("v5p:2x2x1", "TPU v5", 4),
        ("tpu7x:2x2x1", "TPU7x", 8),
        ("2xv5e:2x2", "TPU v5 lite", 8),
    ],
)
def test_the_devices_of_a_slice_are_those_that_a_run_there_has(topology, kind, count):
    """Chips; of TPU7x the two cores of each."""
    target = describe_target(topology, None)
    assert (target.device, target.count) == (
        kind,
        count,
    ) and target.memory == target.chip.memory * 2**30


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu compiles for TPU; it is not installed",
)
def test_a_search_for_a_tpu_slice_ends_with_settings_that_a_plan_finds_to_need_the_same(
    numbers, monkeypatch, tmp_path
):
    """A stack of two repeats on four chips."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    sizes = (
        "{num_hidden_layers: 2, hidden_size: 128, intermediate_size: 128, vocab_size: 512, "
        "head_dim: 128}"
    )
    more = (f"model={{source: qwen3-0.6b, overrides: {sizes}}}", ONE[1])
    code, result = numbers("v5p:2x2x1", *more, flags=("--search", "--candidates", "2"))
    best, other = result["candidates"]
    assert code == 0 and best["fits"] and other["fits"] and 0 < best["seconds"] <= other["seconds"]
    assert best["needs"] <= result["memory"] == 95.73 * 2**30
    settings = [f"{key}={json.dumps(value)}" for key, value in best["settings"].items()]
    monkeypatch.setenv(
        "DUET_PLAN_CACHE", str(tmp_path / "new")
    )  # what is known already would only be read again
    code, result = numbers("v5p:2x2x1", *more, *settings)
    assert (
        code == 0
        and max(each["peak"] + each["non_argument"] for each in result["programs"]) == best["needs"]
    )


@pytest.mark.parametrize(
    ("topology", "more", "code", "text"),
    [
        ("v5p:8by8", (), 2, "--topology v5p:8by8: no such topology; give KIND:AxB"),
        ("v9:2x2", (), 2, "no such topology"),
        ("cpu:0", (), 2, "no such topology"),
        pytest.param(
            "cpu:3", ("mesh.fsdp=2",), 5, "needs 2 devices, there are 3", marks=pytest.mark.slow
        ),
        ("cpu:2", ("stages.0.steps=x",), 2, "stages.0.steps"),
    ],
)
def test_what_cannot_be_planned_is_refused(plan, topology, more, code, text):
    result, _, shown = plan(topology, *more)
    assert result == code and text in shown.err
