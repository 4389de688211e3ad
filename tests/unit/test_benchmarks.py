"""The scripts of benchmarks/: the numbers that they make of what they read, and that each one
runs."""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the folder as it imports its neighbours itself."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def write_run(directory: Path, sft: list[float], grpo: list[float], every: int = 10) -> str:
    """A run whose stages were evaluated every 10 steps."""
    directory.mkdir()
    rows = []
    for stage, curve in (("sft", sft), ("grpo", grpo)):
        for step in range((len(curve) - 1) * every + 1):
            metrics = {"time/step": 0.5, "loss": 1.0} if step else {}
            if step % every == 0:
                metrics |= {"eval/greedy_accuracy": curve[step // every], "time/eval": 2.0}
            rows.append({"stage": stage, "step": step, "metrics": metrics})
    (directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


GOOD = [0.3, 0.4, 0.5, 0.6, 0.7]


def test_the_curve_the_seconds_and_the_gain_of_a_quickstart(script, tmp_path, capsys):
    numbers = script("quickstart_numbers")
    run = write_run(tmp_path / "run", [0.0, 0.1, 0.3], GOOD)
    result = numbers.read(run)
    assert result.after_sft == 0.3 and result.gain == pytest.approx(0.4)
    assert result.seconds == {"sft": 20 * 0.5 + 3 * 2.0, "grpo": 40 * 0.5 + 5 * 2.0}
    assert result.quarters() == (0.6, 0.7)
    assert numbers.main([run, "--check"]) == 0
    said = capsys.readouterr()
    assert (
        "grpo     30     0.600  " + "#" * 30 + "\n" in said.out
        and "GRPO +0.400" in said.out
        and not said.err
    )


@pytest.mark.parametrize(
    ("sft", "grpo", "expected"),
    [
        ([0, 0.19], [0.19, 0.4, 0.5, 0.6, 0.6], "accuracy after SFT is 0.190"),
        ([0, 0.61], [0.61, 0.7, 0.8, 0.85, 0.9], "accuracy after SFT is 0.610"),
        ([0, 0.3], [0.3, 0.3, 0.4, 0.4, 0.44], "GRPO added +0.140, less than 0.15"),
        ([0, 0.3], [0.3, 0.3, 0.4, 0.5, 0.54], "mean of 1 runs, less than 0.25"),
        (
            [0, 0.3],
            [0.3, 0.4, 0.6, 0.7, 0.66],
            "GRPO declined, 0.700 in its third quarter and 0.660 in its last",
        ),
        ([0, 0.3], [0.3, 0.7], "too few evaluations"),
    ],
)
def test_a_quickstart_that_falls_short_is_told_so(script, tmp_path, capsys, sft, grpo, expected):
    run = write_run(tmp_path / "run", sft, grpo)
    assert script("quickstart_numbers").main([run, "--check"]) == 1
    assert expected in capsys.readouterr().err


def test_one_weak_seed_is_made_up_for_by_the_others_and_a_failed_one_is_not(script, tmp_path):
    numbers = script("quickstart_numbers")
    good = write_run(tmp_path / "good", [0, 0.3], GOOD)
    weak = write_run(tmp_path / "weak", [0, 0.3], [0.3, 0.35, 0.4, 0.45, 0.46])
    failed = write_run(tmp_path / "failed", [0, 0.3], [0.3, 0.3, 0.3, 0.3, 0.4])
    assert numbers.main([good, weak, "--check"]) == 0
    assert numbers.main([weak, "--check"]) == 1
    assert numbers.main([good, failed, "--check"]) == 1


def test_what_is_no_finished_quickstart_is_named(script, tmp_path, capsys):
    numbers = script("quickstart_numbers")
    assert numbers.main([str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    assert numbers.main([write_run(tmp_path / "run", [0, 0.3], [0.3])]) == 2
    assert "before and after grpo" in capsys.readouterr().err


def test_turns_alternate_and_the_ratio_is_that_of_the_medians(script):
    side_by_side = script("side_by_side")
    calls = []
    ours, theirs = side_by_side.in_turns(lambda: calls.append("a"), lambda: calls.append("b"), 3)
    assert calls == ["a", "b"] * 4 and len(ours) == len(theirs) == 3
    row = side_by_side.Row("x", "peer", 100, (1.0, 2.0, 9.0), (4.0, 5.0, 3.0))
    assert row.ratio == 2.0
    assert side_by_side.table([row], "tokens/s", rate=True).splitlines()[1].split() == [
        "x",
        "50",
        "100",
        "25",
        "33",
        "2.00",
        "peer",
    ]


@pytest.mark.slow
def test_bytes_and_operations_of_remat_policies(script):
    """Offloading moves what `minimal` keeps to the host, and recomputes as much; what is kept is
    not recomputed."""
    import numpy as np

    from policy import families
    from policy.config import Runtime
    from policy.mesh.sharding import layout
    from policy.model import Graph

    remat = script("remat")
    graph = Graph(families.read(script("models").MODELS["1m"]), Runtime(), layout({"fsdp": 1}))
    device, host, operations = {}, {}, {}
    for policy in ("none", "full", "minimal", "minimal_offloaded"):
        function = remat.loss(graph.with_runtime(remat=policy), np.zeros((2, 32), int))
        device[policy], host[policy] = remat.bytes_kept(function, graph.shapes)
        operations[policy] = remat.operations(function, graph.shapes)
    # q, k, v and out of 4 heads of 32 and 128 numbers, two projections to 512: float32, 4 layers of
    # 64 tokens.
    kept = 4 * 4 * 64 * (4 * 128 + 2 * 512)
    assert host == {"none": 0, "full": 0, "minimal": 0, "minimal_offloaded": kept}
    assert (
        device["minimal"] - device["full"] == kept
        and device["minimal_offloaded"] == device["full"] < device["none"]
    )
    assert (
        operations["none"]
        < operations["minimal"]
        == operations["minimal_offloaded"]
        < operations["full"]
    )


@pytest.mark.parametrize(("name", "weights"), [("1m", 1_115_500), ("25m", 26_224_000)])
def test_the_models_have_the_sizes_that_they_are_named_for(script, name, weights):
    from policy import families
    from policy.config import Runtime
    from policy.mesh.sharding import layout
    from policy.model import Graph

    graph = Graph(families.read(script("models").MODELS[name]), Runtime(), layout({"fsdp": 1}))
    assert graph.parameters == pytest.approx(weights, rel=2e-3)


@pytest.mark.slow
def test_the_benchmark_of_the_head_computes_the_same_in_all_forms(script, capsys):
    small = ["--vocab", "300", "--tokens", "8", "--hidden", "16", "--softcap", "5"]
    results = script("head").main(["--repeats", "1", "--tile-logits", "800", *small])
    printed = capsys.readouterr().out
    assert "8 tokens x 300, 16 wide, float32; chosen: kept" in printed
    assert [each.form for each in results] == ["plain", "kept, 800", "again, 800"]
    assert all(each.difference < 1e-5 and each.form in printed for each in results)


@pytest.mark.slow
def test_the_benchmark_of_latent_attention_computes_the_same_twice(script, capsys):
    small = [
        "--heads",
        "4",
        "--index-heads",
        "4",
        "--slots",
        "2",
        "--lengths",
        "16",
        "--sparse-lengths",
        "64",
        "--topk",
        "8",
    ]
    result = script("latent_attention").main(["--repeats", "1", *small])
    printed = capsys.readouterr().out
    assert "cache 576 and 1,280 numbers a token" in printed and [row.peer for row in result] == [
        "expanded",
        "masked",
    ]
    assert all(
        float(row.note.rpartition("differ by ")[2]) < 1e-5 and f"{row.ratio:.2f}" in printed
        for row in result
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "rows"),
    [
        ("generate", ["--batches", "1", "2", "--new-tokens", "4"], 4),
        ("train", ["--rows", "2", "--length", "8"], 1),
        ("grpo", ["--peers", "plain"], 1),
        ("long_tail", ["--requests", "4"], 1),
        ("exact", ["--batches", "2", "--new-tokens", "4"], 1),
        ("speculative", ["--steps", "2", "--batches", "1", "--drafts", "2"], 2),
        ("quantization", ["--kinds", "int8", "--batch", "2", "--new-tokens", "4"], 2),
    ],
)
def test_each_benchmark_runs(script, name, arguments, rows, capsys):
    pytest.importorskip("torch")
    result = script(name).main(["--models", "1m", "--repeats", "1", *arguments])
    assert len(result) >= rows
    printed = capsys.readouterr().out
    for row in result:
        assert (
            all(math.isfinite(seconds) and seconds > 0 for seconds in (*row.ours, *row.theirs))
            and row.work > 0
        )
        assert f"{row.ratio:.2f}" in printed


def test_the_start_of_a_command_is_timed_and_its_packages_are_listed(script):
    cells = [cell.strip() for cell in script("startup").row("rl schema", ["schema"], 1).split("|")]
    assert cells[1] == "`rl schema`" and float(cells[3]) > 0 and cells[4] == "-"
    assert cells[5].endswith(" ms")
    assert (
        "numpy"
        in script("startup").run(["reward", "test", "exact_answer"])[2].rpartition("\0")[2].split()
    )


def test_the_script_that_measures_parity_prints_a_line_for_each_kind(script, capsys):
    pytest.importorskip("torch")
    script("parity").main(["Simple"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| simple | SimpleLM | 2 |") and 0 < float(line.split("|")[5]) < 2e-5
    with pytest.raises(SystemExit):
        script("parity").main(["Nothing"])


@pytest.mark.slow
def test_penalties_are_measured(script):
    sizes = ["--rows", "2", "--vocabulary", "64", "--tokens", "8", "--steps", "2", "--repeats", "1"]
    result = script("penalties").main(sizes)
    assert (
        set(result) == {"none", "bias, words, ends", "penalties", "all", "counting"}
        and min(result.values()) > 0
    )


def test_few_computed_tokens_are_padding_in_updates_of_every_kind(script):
    """Over 30 steps of lognormal lengths, in few shapes of rows."""
    packing = script("packing")
    for kind in packing.KINDS:
        for size, least in ((8, 0.90), (32, 0.95)):
            share = packing.measure(kind, packing.lognormal, size, steps=30)
            assert sum(share.shares) / 30 >= least, (kind.name, size)
            assert len(share.shapes) <= 9, (kind.name, size)


def test_lora_compares_the_last_evaluations_of_runs(script, tmp_path, capsys):
    lora = script("lora")
    for seed, last in ((0, 0.8), (1, 0.6)):
        curve = [0.1, 0.2, 0.3, last, last, last, last]
        run = tmp_path / f"weights-0.001-{seed}"
        write_run(run, [0.0, 0.5], curve)
        (run / "export").mkdir()
        run = tmp_path / f"32-0.002-{seed}"
        write_run(run, [0.0, 0.5], curve)
        (run / "export").mkdir()
    options = ["--folder", str(tmp_path), "--seeds", "0", "1", "--rates", "2e-3"]
    lora.main(options)
    rows = capsys.readouterr().out.splitlines()
    half = 12.71 * 0.2 / 2  # two seeds: the deviation is 0.2 / sqrt 2
    expected = f"| 0.800 | 0.600 | 0.700 +- {half:.3f} | 30 | 0.000 +- 0.000 |"
    assert rows[2] == f"| weights, rate 0.001 {expected}"
    assert rows[3] == f"| adapter of rank 32, rate 0.002 {expected}"


def test_ways_to_learn_are_compared_after_equal_tokens_and_equal_processor_seconds(script):
    """A step counts the median of its run, without evaluations; a teacher's texts count as drawn
    and as its seconds."""
    teachers = script("teachers")
    clock = teachers.Clock((0.0, 100.0), (0.0, 200.0))  # two busy processors
    rows = [{"step": 0, "time": 10.0, "metrics": {"eval/greedy_accuracy": 0.1, "time/eval": 2.0}}]
    for step in (1, 2, 3):
        metrics = {"perf/step_tokens": 50.0, "batch/trained_share": 0.5}
        rows.append({"step": step, "time": 10.0 + 4 * step, "metrics": metrics})
    rows[-1]["metrics"] |= {"eval/greedy_accuracy": 0.5, "time/eval": 1.0}
    of_texts = list(teachers.evaluations(rows, clock, 3.0))
    assert of_texts == [teachers.Mark(0.0, 0.0, 0.1), teachers.Mark(150.0, 3 * (8 + 3), 0.5)]
    for row in rows[1:]:
        row["metrics"]["completion/mean_length"] = 0.25
    drawn = 0.25 * teachers.PROMPTS * teachers.SAMPLES
    of_policy = list(teachers.evaluations(rows, clock, 0.0))
    assert of_policy[-1] == teachers.Mark(3 * (25 + drawn), 3 * 8.0, 0.5)
    curves = {"sft": [of_texts], "grpo": [of_policy]}
    lines = teachers.table(curves, "seconds", lambda mark: mark.seconds).splitlines()
    assert lines[0] == "| seconds | 0 | 6 | 12 | 18 | 24 |"
    assert lines[2] == "| sft | 0.100 | 0.173 | 0.245 | 0.318 | 0.391 |"
    assert lines[3] == "| grpo | 0.100 | 0.200 | 0.300 | 0.400 | 0.500 |"


def test_seconds_of_processors_are_those_of_a_process_and_its_children(script, tmp_path):
    psutil = pytest.importorskip("psutil")
    teachers = script("teachers")
    before = teachers.processor_seconds(psutil.Process())
    ended = time.process_time() + 0.2
    while time.process_time() < ended:
        pass
    assert teachers.processor_seconds(psutil.Process()) - before >= 0.15


def test_costs_are_compared_with_the_first_program(script):
    pytest.importorskip("peft")
    costs = script("adapter_costs")
    steps = [{"step": s, "processor": 2 * s, "memory": 2**20 * m} for s, m in ((1, 90), (3, 100))]
    first = costs.cost("Duet, weights", steps)
    assert first == costs.Cost("Duet, weights", 100 * 2**20, 2.0, 4.0)
    half = costs.Cost("Duet, adapter", 50 * 2**20, 1.0, 3.0)
    row = costs.table("sft, 1m", [first, half]).splitlines()[-1]
    assert row == "| Duet, adapter | 50 | 0.50 | 1.00 | 0.50 | 3.00 | 0.75 |"
