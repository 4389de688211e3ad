"""Which settings `rl plan` compiles: for a plan that does not fit, and in a search. What compiles
is replaced by numbers.
"""

import dataclasses
import math
import os

import pytest
import yaml

from rl.config import files
from rl.errors import ConfigError
from rl.plan import changes, search, slices, suggest
from rl.plan.children import Costs, Target, Trial
from rl.plan.command import _missing, _suggested, table
from rl.plan.compiled import ProgramReport
from rl.run.load import load

GIVEN = [
    "model=tiny-deepseek",
    "tokenizer=bytes",
    "data.task=arithmetic",
    "rewards.functions=[exact_answer]",
    "max_length=64",
]
STAGES = (
    "stages=[{algorithm: grpo, steps: 1, prompts_per_step: 8, samples_per_prompt: 4, "
    "sampling: {max_new_tokens: 16}}]"
)


def config(tmp_path, *more):
    (tmp_path / "run.yml").write_text("seed: 0\n")
    return load([tmp_path / "run.yml"], [*GIVEN, STAGES, *more])


def target(memory, count=8):
    return Target(slices.Topology.read(f"cpu:{count}"), memory, "cpu", count)


def report(needs, name="grpo: update"):
    return ProgramReport(name, (4, 64), 0, 0, 0, 0, int(needs), 0, 0.0, 0.0, {}, {}, 1.0, 0.0)


@pytest.fixture
def compiler(monkeypatch):
    """Estimates and compiles by a rule: 100 bytes are held, and each row of a micro-batch takes 10,
    half of it under `full`, and half of what is left for each further device that splits the rows.
    `wrong`: what a program takes over what is estimated."""
    calls = []

    class Rule:
        wrong, most = 1.0, 2

        def temporaries(self, made):
            rows = made.stages[0].micro_batch or 32
            return (
                10.0 * rows * (0.5 if made.model.remat == "full" else 1) / max(1, made.mesh.tensor)
            )

        def held(self, made):
            return 100.0 + made.generator.slots

        def estimated(self, configs, target):
            return [
                Costs(
                    {
                        "grpo: update": (
                            self.held(c),
                            self.temporaries(c),
                            self.temporaries(c) / 64 + 32 / (c.stages[0].micro_batch or 32),
                        )
                    }
                )
                for c in configs
            ]

        def attempted(self, configs, target, only=None):
            assert len(configs) <= self.most
            calls.extend(configs)
            needs = [self.held(c) + self.wrong * self.temporaries(c) for c in configs]
            return [Trial([report(n)], fits=n <= target.memory) for n in needs]

    rule = Rule()
    rule.calls = calls
    for module in (suggest, search):
        monkeypatch.setattr(module, "estimated", rule.estimated)
        monkeypatch.setattr(module, "attempted", rule.attempted)
    return rule


def suggested(rule, made, memory, most=6):
    needs = rule.held(made) + rule.wrong * rule.temporaries(made)
    assert needs > memory
    return [
        str(change)
        for change, _ in suggest.suggestions(made, target(memory), [report(needs)], most).fitting
    ]


def test_three_settings_are_suggested_and_the_smallest_change_of_each_comes_first(
    tmp_path, compiler
):
    made = config(tmp_path, "model.remat=none", "mesh={fsdp: 8}")
    result = suggested(compiler, made, memory=330.0)
    assert result[0] == "stages.0.micro_batch=16" and result[1] == "model.remat=full"
    assert result[2].startswith("mesh.data=1 mesh.fsdp=4 mesh.tensor=2") and len(result) == 3
    assert len(compiler.calls) <= 4, "what an estimate says will fit is compiled first"


def test_several_settings_at_once_come_before_those_that_change_results(tmp_path, compiler):
    """Rows and recomputation are not enough alone; both are, and so would a shorter run be."""
    compiler.held = lambda made: 100.0 + made.generator.slots + made.max_length / 2
    made = config(tmp_path, "model.remat=none", "mesh={fsdp: 1, data: 8}", "generator.slots=8")
    result = suggested(compiler, made, memory=146.0)
    assert result == ["stages.0.micro_batch=1 model.remat=full"]


def test_an_estimate_is_corrected_by_the_program_that_failed(tmp_path, compiler):
    """Its temporaries were four times what was estimated: half the rows are then not enough, and
    not compiled."""
    compiler.wrong = 4.0
    result = suggested(
        compiler, config(tmp_path, "mesh={fsdp: 8}", "model.remat=none"), memory=330.0
    )
    assert result[0] == "stages.0.micro_batch=4"
    assert len(compiler.calls) <= 6


def test_what_is_too_large_by_its_arguments_is_not_compiled_and_candidates_are_limited(
    tmp_path, compiler
):
    made = config(tmp_path, "mesh={fsdp: 8}")
    assert suggested(compiler, made, memory=110.0) == [] and {
        c.generator.slots for c in compiler.calls
    } <= {8}
    compiler.calls.clear()
    compiler.most = 1
    assert len(suggested(compiler, made, memory=300.0, most=1)) == len(compiler.calls) == 1


def test_what_is_missing_and_what_saves_most_are_shown_where_nothing_fits(tmp_path, compiler):
    made, shown = config(tmp_path, "mesh={fsdp: 8}", "model.remat=none"), []
    gib = 2**30
    compiler.held = lambda made: 100.0 * gib
    compiler.temporaries = lambda made: gib * (made.stages[0].micro_batch or 32)
    failed = report(132 * gib)
    result = suggest.suggestions(made, target(99.0 * gib), [failed], 2, shown.append)
    assert result.fitting == [] and shown == ["estimating other settings"]
    text = _suggested(result, 99.0 * gib)
    assert "stages.0.micro_batch=1  31.0 GiB less  2.0 GiB too many" in text
    text = _missing([failed, dataclasses.replace(failed, peak=math.inf)], target(99.0 * gib))
    assert (
        "99 GiB per device (cpu)" in text
        and "grpo: update: needs 132.0 GiB, 33.0 GiB too many" in text
    )
    assert "the compiler refuses it" in text


def test_compilations_are_told_before_they_begin(tmp_path, compiler):
    shown, made = [], config(tmp_path, "model.remat=none", "mesh={fsdp: 8}")
    result = suggest.suggestions(made, target(330.0), [report(428.0)], 6, shown.append)
    assert shown[1] == f"compiling with {result.fitting[0][0]}"
    search.search(config(tmp_path, "generator.slots=8"), target(200.0), 2, shown.append)
    assert (
        shown[-1].startswith("1 of at most 2: compiling with mesh.")
        or "2 of at most 2" in shown[-1]
    )


def test_a_program_that_the_compiler_refuses_has_no_sizes():
    refused = dataclasses.replace(report(0), peak=math.inf)
    row = table([refused], None).splitlines()[1]
    assert "refused" in row and "0.00" not in row


def test_changes_are_overrides_that_the_configuration_takes(tmp_path):
    made = config(tmp_path, "model.remat=none", "mesh={fsdp: 8}")
    every = [
        change for steps in changes.knobs(made, [{"fsdp": 4, "tensor": 2}]) for change in steps
    ]
    assert {change.results for change in every} == {False, True}
    for change in every:
        changed = change.of(made)
        if changes.possible(changed):
            (tmp_path / "made.yml").write_text(files.resolved_yaml(made))
            overrides = [
                text.replace("'", "")
                for text in str(change).split(" ")
                if "remat_tensors" not in text and "=" in text
            ]
            if "custom" not in str(change):
                assert load([tmp_path / "made.yml"], overrides) == changed, change
    assert not changes.possible(changes.SettingsChange({"max_length": 16}).of(made)), (
        "completions have 16 tokens"
    )
    named = {key for change in every if change.results for key in change.settings}
    assert named == {"max_length", "model.param_dtype"}


def test_search_takes_the_quickest_that_fits_and_nothing_larger_than_what_did_not(
    tmp_path, compiler
):
    made = config(tmp_path, "generator.slots=8")
    result = search.search(made, target(200.0), 6)
    assert len(result.tried) == 6 and result.looked_at > 20 and result.pruned == 0
    assert compiler.calls[0].mesh != compiler.calls[1].mesh
    good = search.best(result.tried, lambda reports: reports[0].needs)
    assert good and all(attempt.fits for _, attempt in good)
    sizes = [attempt.needs for _, attempt in good]
    assert sizes == sorted(sizes)
    (tmp_path / "best.yml").write_text(search.as_yaml(good[0][0].change))
    assert yaml.safe_load((tmp_path / "best.yml").read_text())["stages"].keys() == {0}
    (tmp_path / "made.yml").write_text(files.resolved_yaml(made))
    assert load([tmp_path / "made.yml", tmp_path / "best.yml"]) == good[0][0].config
    assert search.search(made, target(50.0), 6).tried == [], "arguments alone are too large"
    with pytest.raises(ConfigError, match="--memory"):
        search.search(made, target(None), 6)


def test_search_learns_from_what_it_compiled(tmp_path, compiler):
    """Programs need eight times their estimate: the first two attempts correct the estimates of the
    others."""
    compiler.wrong = 8.0
    result = search.search(config(tmp_path, "generator.slots=8"), target(200.0), 6)
    fits = [attempt.fits for _, attempt in result.tried]
    assert not any(fits[:2]) and all(fits[2:])


def test_meshes_divide_heads_experts_and_devices(tmp_path):
    result = list(
        changes.meshes(config(tmp_path, "mesh={data: 2}"), 16, {"tensor": 4, "expert": 6})
    )
    assert all(math.prod(mesh.values()) == 16 and mesh["data"] == 2 for mesh in result)
    assert {mesh["tensor"] for mesh in result} == {1, 2, 4} and {
        mesh["expert"] for mesh in result
    } == {1, 2}
    assert changes.divisors(config(tmp_path))["tensor"] > 1


def test_meshes_of_several_slices_divide_the_devices_of_one(tmp_path):
    def inside(topology, count, *more):
        return Target(slices.Topology.read(topology), None, "", count).inside(
            config(tmp_path, *more)
        )

    assert [inside("cpu:8", 8), inside("cpu:8", 8, "mesh.dcn={data: 2}")] == [8, 4]
    assert (
        inside("3xv5e:4x4", 48, "mesh.dcn={data: -1}")
        == inside("3xv5e:4x4", 48, "mesh.dcn={fsdp: 3}")
        == 16
    )


def test_a_topology_says_how_many_slices_there_are():
    for name, chips, number in [
        ("v5p:2x2x2", 8, 1),
        ("tpu7x:2x2x1", 4, 1),
        ("2xv6e:4x4", 16, 2),
        ("12xtpu7x:2x2x1", 4, 12),
    ]:
        result = slices.Topology.read(name)
        assert (result.platform, result.count, result.slices) == ("tpu", chips, number)
    for name in ("0xv5e:2x2", "xv5e:2x2", "2xcpu:4", "2x2xv5e:2x2", "v5e:2", "2xgpu"):
        with pytest.raises(ConfigError, match="no such topology; give"):
            slices.Topology.read(name)


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def test_a_copy_of_weights_that_is_dropped_is_stored_during_rollouts_only(tmp_path):
    """Nothing is compiled: bytes follow from shapes."""
    import jax

    from rl.plan.estimate import Estimator
    from rl.plan.programs import programs
    from rl.run import build

    def listed(*more):
        made = config(tmp_path, *more)
        costs = Estimator(jax.devices()[:1], None, None)(made)
        every = {
            each.kind: each for each in programs(made, build.on_mesh(made, jax.devices()[:1]), None)
        }
        assert {name: cost.resident for name, cost in costs.items()} == {
            each.name: each.resident for each in every.values()
        }
        return every

    quantised = "generator.weights=int8"
    plain, kept, dropped = (
        listed(),
        listed(quantised),
        listed(quantised, "generator.rules=stationary"),
    )
    copy = kept["update"].resident - plain["update"].resident
    assert copy > 0 and dropped["update"].resident == plain["update"].resident
    # The copies that decoding on CPU reads are of 8 bits as well.
    (resident,) = {each["decode a token"].resident for each in (kept, dropped)}
    cache_and_copies = plain["decode a token"].resident - plain["update"].resident
    assert 0 < resident - kept["update"].resident < cache_and_copies
    assert (
        dropped["reshard"].times == 1 and dropped["reshard"].resident == dropped["prefill"].resident
    )
    assert "quantised copy" in kept and "reshard" not in kept and "quantised copy" not in dropped


def test_an_estimate_counts_the_weights_that_learn_with_the_state_of_their_optimizer(tmp_path):
    """Numbers of 4 bytes per weight, read and written: itself, and 2, 1 or no moments. A table of
    the means of rows and columns is small. What is frozen has neither a gradient nor moments."""
    import jax

    from rl.accounting.chips import Chip
    from rl.plan.estimate import Estimator
    from rl.plan.programs import programs
    from rl.run import build

    slow = Chip(
        "slow", tflops=1e6, memory=1.0, bandwidth=1e-3, links=0.0
    )  # HBM traffic takes longest
    device = jax.devices()[:1]

    def update(*more, chip=slow):
        made = config(tmp_path, "model=qwen3-0.6b", *more)
        (program,) = (
            each
            for each in programs(made, build.on_mesh(made, device), None)
            if each.kind == "update"
        )
        return program, Estimator(device, chip, None)(made)["sft: update"]

    def stage(optimizer, freeze="null"):
        options = f"optimizer: {optimizer}, freeze: {freeze}"
        return f"stages=[{{algorithm: sft, steps: 1, {options}}}]"

    adamw, cost = update(stage("{weight_decay: 0.1}"))
    parameters = adamw.graph.parameters
    assert adamw.gradient == 4 * parameters
    assert adamw.stepped == pytest.approx(12 * parameters, abs=64)  # and counters
    for optimizer, each in {"{name: lion}": 2, "{name: sgd, momentum: 0.0}": 1}.items():
        program, other = update(stage(optimizer))
        assert program.stepped == pytest.approx(4 * each * parameters, abs=64)
        saved = 2 * (adamw.stepped - program.stepped) / (slow.bandwidth * 1e9)
        assert cost.seconds - other.seconds == pytest.approx(program.times * saved, abs=1e-9)
    assert 4 * parameters < update(stage("{name: adafactor}"))[0].stepped < 4.5 * parameters
    matrices = update(stage("{name: muon}"))[0].stepped
    assert 8 * parameters < matrices < 12 * parameters, "its other weights have AdamW's moments"
    busy = Chip("busy", tflops=1e-3, memory=1.0, bandwidth=1e6, links=0.0)
    program, other = update(stage("{name: muon}"), chip=busy)
    work = program.optimizer_operations / (busy.tflops * 1e12)
    of_adamw = update(stage("{name: adamw}"), chip=busy)[1]
    assert work > 0 and other.seconds - of_adamw.seconds == pytest.approx(program.times * work)
    head, less = update(stage("{}", freeze="[model.layers]"))
    learning = parameters - sum(
        math.prod(shape.shape)
        for path, shape in head.graph.shapes.items()
        if path.startswith("stacks.")
    )
    assert 0 < learning < parameters and head.gradient == 4 * learning
    assert head.stepped == pytest.approx(12 * learning, abs=64)
    assert cost.temporaries - less.temporaries == 4 * (parameters - learning)


def test_moments_go_to_host_memory_where_the_optimizer_allows_it(tmp_path):
    made = config(
        tmp_path,
        "stages=[{algorithm: sft, steps: 1, optimizer: {name: muon}}, {algorithm: sft, steps: 1}]",
    )
    every = [change for choice in changes.knobs(made, []) for change in choice]
    (moments,) = (change for change in every if "stages.1.optimizer.host_memory" in change.settings)
    assert moments.settings == {"stages.1.optimizer.host_memory": True}
    assert moments.of(made) is not None


def test_a_compiler_for_tpus_is_given_no_flags_of_other_compilers(monkeypatch):
    """libtpu ends the process otherwise."""
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_dump_to=x --xla_gpu_autotune_level=0",
    )
    assert slices.Topology.read("v5p:2x2x1").environment["XLA_FLAGS"] == "--xla_dump_to=x"
    assert (
        slices.Topology.read("cpu:2")
        .environment["XLA_FLAGS"]
        .startswith("--xla_cpu_use_fusion_emitters=false ")
    )


def test_the_table_has_the_bytes_moved_over_the_arguments():
    """A program that the compiler refused has no arguments to compare with."""
    read_once = dataclasses.replace(
        report(8, "grpo: decode a token"), arguments=2**31, moved=2.5 * 2**30
    )
    header, first, second, *_ = table([read_once, report(8)], None).splitlines()
    places = [i for i in range(len(header)) if header.startswith("ratio", i)]
    assert [line[places[0] : places[0] + 5].strip() for line in (first, second)] == ["1.25", "-"]
