"""`rl report` and `rl compare`: what they read, choose and compute, and that the page escapes and
stays small."""

import base64
import hashlib
import html
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.commands import cli
from rl.errors import ConfigError
from rl.records.run_files import Attempt
from rl.records.samples import TRAINED
from rl.statistics import wilson
from rl.views.report import charts, read, samples, sections, series, settings, svg

EVIL = '</script><img src=x onerror="document.title=1"><!-- \u2028 \x00 & "quotes"'


def event(stage: str, step: int, **metrics) -> dict:
    return {
        "stage": stage,
        "step": step,
        "metrics": {name.replace("__", "/"): value for name, value in metrics.items()},
    }


def sample(step: int, number: int, **changes) -> dict:
    row = {
        "stage": "grpo",
        "step": step,
        "prompt_id": step,
        "sample": number,
        "prompt": "1+1=",
        "completion": "2",
    }
    row |= {
        "tokens": [1, 2],
        "finish": "stop",
        "rewards": {"exact": 1.0},
        "reward": 1.0,
        "advantage": 0.0,
    }
    return row | changes


def write_run(path: Path, events: list, rows: list = (), config: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    lines = [each if isinstance(each, str) else json.dumps(each) + "\n" for each in events]
    (path / "events.jsonl").write_text("".join(lines))
    if rows:
        (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yml").write_text(
        config or "model: {source: tiny}\nstages: [{algorithm: {name: grpo}, steps: 9}]\n"
    )
    return path


def learning(path: Path, steps: int = 20, shift: float = 0.0) -> Path:
    """A run of SFT, then GRPO, whose accuracy rises by equal amounts."""
    events = [event("sft", step, loss=2 / step, time__step=1.0) for step in range(1, 6)]
    for step in range(steps + 1):
        metrics = (
            {"reward__mean": step / steps, "reward__std": 0.1, "time__step": 2.0, "loss": 0.0}
            if step
            else {}
        )
        if step % 5 == 0:
            metrics |= {
                "eval__greedy_accuracy": max(0.0, step / steps - shift),
                "eval__pass@4": 0.9,
                "eval__problems": 100,
            }
        events.append(event("grpo", step, **metrics))
    return write_run(
        path,
        events,
        [sample(step, n, reward=n / 4) for step in range(1, steps + 1) for n in range(4)],
    )


def report(run: Path, *options: str) -> tuple[int, str]:
    code = cli.main(["report", str(run), *options])
    return code, (run / "report.html").read_text()


# Series


def test_no_more_buckets_than_asked_for_and_no_spike_is_lost():
    x, value = np.arange(10_000), np.sin(np.arange(10_000) / 500)
    value[1234], value[7777] = 90.0, -80.0
    shown = series.curve(x, np.zeros(10_000, int), value)
    assert len(shown.x) == series.BUCKETS == 400
    assert shown.high.max() == 90 and shown.low.min() == -80 and shown.count.sum() == 10_000
    bucket = int(np.searchsorted(shown.x, 1234 + 12.5))
    assert shown.mean.max() < 10 and 90 in shown.high[max(0, bucket - 1) : bucket + 1]
    assert np.average(shown.mean, weights=shown.count) == pytest.approx(value.mean())


def test_few_values_stay_as_they_are_and_values_that_are_not_finite_are_kept_apart():
    shown = series.curve(np.arange(4), np.zeros(4, int), np.asarray([1.0, math.nan, math.inf, 4.0]))
    assert (
        shown.x.tolist() == [0, 3]
        and shown.mean.tolist() == [1, 4]
        and shown.lost.tolist() == [1, 2]
    )
    assert not shown.bucketed


def test_a_bucket_holds_one_stage():
    stage = np.repeat([0, 1], 1000)
    shown = series.curve(np.arange(2000), stage, np.where(stage == 0, 0.0, 1.0), count=7)
    assert set(shown.mean.tolist()) == {0.0, 1.0}


def test_stages_follow_each_other_and_runs_share_them(tmp_path):
    first, second = (
        read.read_run(learning(tmp_path / "a", 20)),
        read.read_run(learning(tmp_path / "b", 10)),
    )
    axis = series.axis([second, first])
    assert [(each.name, each.start, each.end) for each in axis.stages] == [
        ("sft", 0, 4),
        ("grpo", 4, 24),
    ]
    x, stage = axis.positions(second, second.metrics["eval/greedy_accuracy"])
    assert x.tolist() == [4, 9, 14] and set(stage.tolist()) == {1}


def test_interval_of_a_share():
    # 81 of 263: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    low, high = wilson(np.asarray([81 / 263]), 263)
    assert (low[0], high[0]) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    low, high = wilson(np.asarray([0.0, 1.0]), 512)
    assert low[0] == 0 and 0 < high[0] < 0.01 and 0.99 < low[1] < 1 and high[1] == pytest.approx(1)


def test_ticks_and_texts():
    assert series.ticks(0, 1) == pytest.approx([0, 0.5, 1]) and series.ticks(1e-6, 1e-3, log=True)[
        0
    ] == pytest.approx(1e-6)
    assert [series.text(v) for v in (0, 4940, 0.918, 12.34, 7.1e-6, 3.2e6, None)] == [
        *("0", "4,940", "0.918", "12.3", "7.1e-6", "3.2M", "-")
    ]
    assert [series.seconds_text(v) for v in (0.42, 41, 725, 12000)] == [
        "0.42 s",
        "41 s",
        "12 min 5 s",
        "3 h 20 min",
    ]


def test_scale_is_logarithmic_only_for_positive_values_that_span_a_thousand():
    assert series.is_log(1e-3, 1.0) and not series.is_log(1e-2, 1.0) and not series.is_log(0.0, 1e6)


# Reading


def test_torn_last_line_is_no_damage(tmp_path):
    run = read.read_run(write_run(tmp_path, [event("grpo", 1, loss=1.0), '{"stage":"grpo","st']))
    assert run.damage == [] and run.steps == {"grpo": (1, 1)}


@pytest.mark.parametrize(
    "line", ['{"stage":"grpo","ste\n', "[1]\n", '{"stage":"grpo"}\n', "\x00\x00\n", "null\n"]
)
def test_damaged_lines_are_named_and_the_report_is_written(tmp_path, line, capsys):
    events = [event("grpo", 1, loss=1.0), line, event("grpo", 2, loss=2.0)]
    code, page = report(write_run(tmp_path, events, [sample(1, 0)]))
    assert code == 3 and f"{tmp_path}/events.jsonl:2" in capsys.readouterr().err
    assert "events.jsonl:2" in page and 'id="chart-loss"' in page


def test_a_damaged_line_of_samples_is_named(tmp_path, capsys):
    run = write_run(tmp_path, [event("grpo", 1, loss=1.0)])
    (run / "samples.jsonl").write_text(
        json.dumps(sample(1, 0)) + '\n{"stage":"grp\n' + json.dumps(sample(1, 1)) + "\n"
    )
    code, page = report(run)
    assert (
        code == 3
        and "samples.jsonl:2" in capsys.readouterr().err
        and page.count('class="sample"') == 2
    )


@pytest.mark.parametrize("name", ["config.yml", "run.json", "programs.json"])
def test_a_damaged_file_is_named(tmp_path, name, capsys):
    run = write_run(tmp_path, [event("grpo", 1, loss=1.0)])
    (run / name).write_text('{"a": [')
    assert report(run)[0] == 3 and name in capsys.readouterr().err


def test_an_object_that_is_no_step_is_a_damaged_line(tmp_path):
    events = [
        event("grpo", 1, loss=1.0),
        {"event": "news", "text": "x"},
        event("grpo", 2, loss=1.0),
    ]
    run = read.read_run(write_run(tmp_path, events))
    assert [each.line for each in run.damage] == [2] and run.steps == {"grpo": (1, 2)}


def test_attempts_are_those_of_run_json(tmp_path):
    run = write_run(tmp_path, [event("grpo", 1, loss=1.0)])
    attempt = {"start": 1.7e9, "end": 1.7e9 + 60, "exit_code": 6, "weights": "random"}
    (run / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    code, page = report(run)
    assert (
        code == 0
        and "exit 6: stopped by a reward" in page
        and "2023-11-14" in page
        and "random weights" in page
    )


def test_numbers_that_are_no_floats(tmp_path):
    events = [
        '{"stage":"grpo","step":1,"metrics":{"a":null,"b":true,"c":"text","d":[1],"e":NaN,"f":1'
        + "0" * 400
        + "}}\n"
    ]
    run = read.read_run(write_run(tmp_path, events))
    assert (
        run.metrics["b"].value.tolist() == [1] and "c" not in run.metrics and "d" not in run.metrics
    )
    assert all(np.isnan(run.metrics[name].value[0]) for name in "aef")
    assert report(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stage", "grp"], "no such stage (valid: grpo, sft)"),
        (["--steps", "500:"], "recorded no step there"),
        (["--steps", "9:1"], "not a range"),
        (["--steps", "x"], "not a range"),
        (["--against", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_wrong_options_end_with_2(tmp_path, options, words, capsys):
    assert cli.main(["report", str(learning(tmp_path / "a")), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_a_run_ends_with_2(tmp_path, capsys):
    learning(tmp_path / "runs" / "a")
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert f"Runs below it: {tmp_path}/runs/a" in capsys.readouterr().err


def test_a_part_of_a_run(tmp_path):
    run = learning(tmp_path / "a")
    assert (
        report(run, "--stage", "grpo", "--steps", "5:10", "--json", str(tmp_path / "n.json"))[0]
        == 0
    )
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["stages"] == [{"stage": "grpo", "first": 5, "last": 10}]
    assert [each["step"] for each in numbers["evaluations"]] == [5, 10]
    chosen = samples.choose(run, 200, read.ReportPart("grpo", 5, 10), [])
    assert {row["step"] for row in chosen.records} == set(range(5, 11))


# Samples


def test_each_kind_has_its_share_and_the_choice_is_the_same_each_time():
    draw = np.random.default_rng(1)
    reward, length = draw.normal(size=1000), draw.integers(1, 1000, 1000)
    cut, faulted, gap = draw.random(1000) < 0.3, np.arange(1000) == 77, draw.random(1000)
    chosen = samples.pick(reward, length, cut, faulted, gap, 70, seed=3)
    kinds = {kind: {row for row, why in chosen.items() if kind in why} for kind in samples.KINDS}
    assert len(chosen) == 70 and kinds["faulted"] == {77}
    for kind, values in (("best", reward), ("worst", -reward), ("longest", length), ("gap", gap)):
        assert set(np.argsort(-values)[:10].tolist()) <= kinds[kind], kind
    assert (
        len(kinds["cut off"]) >= 10
        and all(cut[row] for row in kinds["cut off"])
        and len(kinds["random"]) >= 10
    )
    assert chosen == samples.pick(reward, length, cut, faulted, gap, 70, seed=3)
    assert chosen != samples.pick(reward, length, cut, faulted, gap, 70, seed=4)


def test_unscored_completions_are_faulted_and_neither_best_nor_worst(tmp_path):
    rows = [
        sample(1, n, reward=None if n < 3 else float(n), rewards={"exact": None}) for n in range(30)
    ]
    chosen = samples.choose(write_run(tmp_path, [], rows), 14, read.ReportPart(), [])
    why = {row["sample"]: row["why"] for row in chosen.records}
    assert chosen.total == 30 and all(
        not {"best", "worst"} & set(why[n]) for n in range(3) if n in why
    )
    assert sum("faulted" in each for each in why.values()) == 2  # two of 14 for each of seven kinds
    assert "best" in why[29] and "worst" in why[3]


def test_numbers_are_cut_out_of_a_line_as_they_are_parsed():
    rows = [
        *(
            sample(3, 1),
            sample(3, 1, reward=None),
            sample(3, 1, finish="length", reward=-1e-5, tokens=[]),
        ),
        sample(3, 1, faults={"exact": "raised"}, reward=None, n=2, at=99),
        sample(
            3, 1, completion='"reward":9,"step":7,"finish":"length"', prompt='{"tokens":[1,2,3]}'
        ),
        {
            key: value
            for key, value in sample(4, 2, n=77, at=1234, faults={"exact": "timeout"}).items()
            if key != "tokens"
        },
        {
            key: value
            for key, value in sample(4, 2, n=77, at=0, faults={}).items()
            if key != "tokens"
        },
    ]
    for separators in ((",", ":"), (", ", ": ")):
        for row in rows:
            line = json.dumps(row, separators=separators).encode() + b"\n"
            assert repr(samples._cut_out(line)) == repr(samples._parsed(line)), row
    assert (
        samples._cut_out(b'{"stage":"a","step":\n') is None
        and samples._cut_out(b'{"stage":"a","step":}\n') is None
    )


def test_large_files_give_the_same_choice(tmp_path, monkeypatch):
    run = learning(tmp_path / "a", 60)
    before = samples.choose(run, 50, read.ReportPart(), [])
    monkeypatch.setattr(samples, "_PARSED", 0)
    assert samples.choose(run, 50, read.ReportPart(), []) == before
    monkeypatch.setattr(samples, "_READ", 20_000)
    monkeypatch.setattr(samples, "_BLOCKS", 4)
    part = samples.choose(run, 50, read.ReportPart(), [])
    steps = [row["step"] for row in part.records]
    assert part.partial and 0 < part.total < before.total and min(steps) < 20 and max(steps) > 40


@pytest.mark.parametrize(
    "files", [("samples.jsonl", "tokens.bin"), ("samples/000003-grpo-00001.jsonl",) * 2]
)
def test_tokens_give_the_gap(tmp_path, files):
    run, tokens = write_run(tmp_path, [event("grpo", 1, loss=1.0)]), np.zeros(40, samples.TOKEN)
    (run / "samples").mkdir()
    tokens["flags"] = TRAINED
    tokens["gap"][12], tokens["gap"][25], tokens["flags"][25], tokens["gap"][30:] = (
        -0.25,
        9.0,
        0,
        np.nan,
    )
    tokens.tofile((run / files[1]).with_suffix(".bin"))
    rows = [
        sample(1, n, at=10 * n, columns={"answer": "42"}, reward_log={"exact": "why <b>"})
        for n in range(4)
    ]
    (run / files[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = samples.choose(run, 7, read.ReportPart(), [])
    assert [row.get("gap") for row in chosen.records] == [
        None,
        0,
        0.25,
        0,
    ]  # the newest has no update
    assert ["gap" in row["why"] for row in chosen.records] == [False, False, True, False]
    code, page = report(run)
    assert code == 0 and "answer: 42" in page and "why &lt;b&gt;" in page


def test_restarts_follow_from_the_starts_of_attempts(tmp_path):
    run = write_run(
        tmp_path, [event("grpo", step, loss=1.0) | {"time": 100.0 + step} for step in range(1, 9)]
    )
    attempts = [
        {"start": 90.0},
        {"start": 104.5, "end": 105.0, "exit_code": 75},
        {"start": 104.6, "exit_code": 0},
    ]
    (run / "run.json").write_text(json.dumps({"attempts": attempts}))
    assert read.read_run(run).restarts == [("grpo", 5)]
    assert 'class="restart"' in report(run)[1]


# The page


def test_texts_of_a_run_are_escaped(tmp_path):
    metrics = {"reward__mean": 1.0, "loss": 1.0, f"rewards/{EVIL}/mean": 0.5}
    events = [
        event(stage, step, **metrics | {EVIL: step})
        for stage in ("grpo", EVIL)
        for step in range(9)
    ]
    rows = [
        sample(
            1,
            0,
            prompt=[{"role": EVIL, "content": EVIL}],
            completion=EVIL,
            rewards={EVIL: 1.0},
            columns={EVIL: EVIL},
        )
    ]
    run = write_run(
        tmp_path / "<i>run</i>",
        events,
        rows,
        f"model: {{source: {json.dumps(EVIL)}}}\nstages: []\n",
    )
    code, page = report(run)
    assert code == 0 and "<img" not in page and "<i>run" not in page
    assert page.count("</script>") == page.count("<script") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[
        1
    ]
    assert "<" not in data and EVIL in [
        line["n"] for chart in json.loads(data)["charts"] for line in chart["s"]
    ]
    assert html.escape(EVIL).replace("\x00", "\u2400") in page and "\x00" not in page


def test_half_a_surrogate_pair_does_not_stop_the_report(tmp_path):
    run = write_run(tmp_path, [event("grpo", 1, loss=1.0)])
    (run / "samples.jsonl").write_text(
        json.dumps(sample(1, 0)).replace('"2"', '"a\\ud800b"') + "\n"
    )
    assert report(run)[0] == 0


def test_the_policy_names_the_hashes_of_the_one_script_and_style(tmp_path):
    _, page = report(learning(tmp_path / "a"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    for kind, tag in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        [content] = re.findall(tag, page, re.DOTALL)
        assert (
            f"{kind}-src "
            f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            in policy
        )
    assert (
        " style=" not in page
        and " onclick" not in page
        and "http" not in re.sub(r'http-equiv|"http://www.w3.org/\S+"', "", page)
    )
    assert len((Path(svg.__file__).parent / "report.js").read_text().splitlines()) <= 200


def test_the_page_in_its_order(tmp_path, monkeypatch):
    run = learning(tmp_path / "a")
    monkeypatch.setattr(
        "rl.views.report.command.verdict", lambda run: [f"{run.path}: 9 steps", "reward rose <b>"]
    )
    _, page = report(run)
    places = [
        "Verdict</h2><p>9 steps</p>",
        "<li>reward rose &lt;b&gt;</li>",
        'id="stages"',
        'id="charts"',
        'id="evaluation"',
        'id="samples"',
    ]
    places += ['id="configuration"', 'id="chart-reward"', 'id="chart-loss"']
    at = [page.index(place) for place in places]
    assert at[:7] == sorted(at[:7]) and at[3] < at[7] < at[8] < at[4]
    drawn = re.findall(r'<svg class="plot[^>]*role="img" aria-label="([^"]+)"', page)
    assert "Reward. mean: first 0.05, last 1, lowest 0.05, highest 1" in drawn
    assert "Evaluation" in page and "0.904 to 1" not in page and "0.963 to 1" in page  # 100 of 100


def test_headline_charts_only_with_data_in_their_order(tmp_path):
    run = read.read_run(learning(tmp_path / "a"))
    chosen = charts.choose([run], series.axis([run]))
    assert [each.key for each in chosen.headline] == ["reward", "evaluation", "loss"]
    evaluation = chosen.headline[1]
    assert [line.label for line in evaluation.lines] == ["greedy accuracy", "pass@4"]
    assert evaluation.lines[0].low[-1] == pytest.approx(0.963, abs=1e-3)  # of eval/problems
    assert chosen.headline[0].lines[0].high[-1] == pytest.approx(1.1)  # one standard deviation
    assert "time/step" in [each.key for each in chosen.other]


def test_two_megabytes_hold_two_hundred_long_samples_and_many_metrics(tmp_path):
    draw = np.random.default_rng(0)
    names = ["reward/mean", "loss", "entropy", *(f"activation/std/{n}" for n in range(300))]
    events = [
        {"stage": "grpo", "step": step, "metrics": {n: float(draw.random()) for n in names}}
        for step in range(450)
    ]
    rows = [
        sample(n, 0, completion=f"<b>{n}</b> \u4e16 & " * 9000, prompt="x" * 20_000)
        for n in range(210)
    ]
    code, page = report(write_run(tmp_path, events, rows))
    assert (
        code == 0
        and page.count('class="sample"') == 200
        and 1_000_000 < len(page.encode()) <= 2_000_000
    )
    assert "characters are left out" in page


def test_the_configuration_shows_what_differs_from_the_defaults(tmp_path):
    config = {
        "model": {"source": "tiny", "remat": "auto"},
        "seed": 7,
        "max_length": 1024,
        "gone": 3,
        "old": None,
    }
    config["stages"] = [
        {
            "algorithm": {"name": "grpo", "kl_coef": 0.1, "epsilon": 0.2},
            "steps": 5,
            "prompts_per_step": 32,
        }
    ]
    assert settings.changed(config) == {
        "model": {"source": "tiny"},
        "seed": 7,
        "gone": 3,
        "stages": [{"algorithm": {"name": "grpo", "kl_coef": 0.1}, "steps": 5}],
    }


# Comparison


def test_compare_as_text(tmp_path, capsys):
    learning(tmp_path / "a")
    learning(tmp_path / "b", shift=0.3)
    (tmp_path / "b" / "config.yml").write_text(
        "model: {source: tiny}\nseed: 3\nstages: [{algorithm: {name: grpo}, steps: 9}]\n"
    )
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--text"]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["eval/greedy_accuracy", "a", "0", "1", "1", "grpo 20"] in lines and [
        "b",
        "0",
        "0.7",
        "0.7",
        "grpo 20",
    ] in lines
    assert ["0.2", "grpo 5, 15 s", "grpo 10, 25 s"] in lines and [
        "0.8",
        "grpo 20, 45 s",
        "not reached",
    ] in lines
    assert ["seed", "-", "3"] in lines


def test_settings_of_stages_are_compared_by_their_names(tmp_path, capsys):
    """`stages.1` of one run is `stages.0` of the other."""
    grpo = "{algorithm: {name: grpo}, steps: 9, prompts_per_step: "
    sft = "{algorithm: {name: sft}, steps: 4, optimizer: {learning_rate: 0.5, clip_norm: 1.0}}"
    stages = {"a": f"[{sft}, {grpo}8}}]", "b": f"[{grpo}16}}]"}
    for name, text in stages.items():
        learning(tmp_path / name)
        (tmp_path / name / "config.yml").write_text(f"seed: 3\nstages: {text}\n")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines if line.startswith("stages.")]
    assert rows == [
        ["stages.sft.algorithm.name", '"sft"', "-"],
        ["stages.sft.steps", "4", "-"],
        ["stages.sft.optimizer.learning_rate", "0.5", "-"],
        ["stages.grpo.prompts_per_step", "8", "16"],
    ]


def test_compare_draws_each_run_once_in_a_chart(tmp_path):
    runs = [
        str(learning(tmp_path / name / "run", shift=shift))
        for name, shift in (("a", 0.0), ("b", 0.2))
    ]
    assert (
        cli.main(
            ["compare", *runs, "-o", str(tmp_path / "c.html"), "--json", str(tmp_path / "c.json")]
        )
        == 0
    )
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "c.html").read_text(), re.DOTALL)[1]
    for chart in json.loads(data)["charts"]:
        assert [line["n"] for line in chart["s"]] == ["a/run", "b/run"]
    assert len(json.loads((tmp_path / "c.json").read_text())["runs"]) == 2


def test_against_draws_a_reference(tmp_path):
    run, other = learning(tmp_path / "a"), learning(tmp_path / "b")
    code, page = report(run, "--against", str(other))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert code == 0 and [line["n"] for line in data["charts"][0]["s"] if line.get("r")] == ["b"]
    assert "dashed: b" in page and 'class="l ref"' in page


def test_report_starts_without_heavy_packages(tmp_path):
    code = f"""
import sys
from rl.commands import cli
cli.main(["report", {str(learning(tmp_path / "a"))!r}])
print([name for name in ("jax", "transformers", "datasets", "wandb", "rich", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_folder_that_is_none_is_refused_with_the_nearest(tmp_path):
    run = learning(tmp_path / "quickstart-1")
    with pytest.raises(ConfigError, match=r"no such folder \(nearest: .*/quickstart-1;"):
        read.read_run(tmp_path / "quickstart-2")
    with pytest.raises(ConfigError, match=f"a file. Name the folder of the run: {run}"):
        read.read_run(run / "events.jsonl")


def test_output_numbers_and_browser(tmp_path, monkeypatch, capsys):
    run, opened = learning(tmp_path / "a"), []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["report", str(run), "-o", str(tmp_path / "r.html"), "--open"]) == 0
    assert opened == [(tmp_path / "r.html").as_uri()] and not (run / "report.html").exists()
    capsys.readouterr()
    assert cli.main(["report", str(run), "-o", "-"]) == 0 and capsys.readouterr().out.startswith(
        "<!DOCTYPE html>"
    )
    assert cli.main(["report", str(run), "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["headline"]["reward/mean"]["best"] == {"value": 1, "stage": "grpo", "step": 20}
    assert numbers["evaluations"][-1]["low"] == pytest.approx(0.963, abs=1e-3)
    assert cli.main(["report", str(run), "-o", str(tmp_path / "no" / "r.html")]) == 5
    assert "Choose another file with -o" in capsys.readouterr().err


def test_a_run_before_its_first_step(tmp_path):
    code, page = report(write_run(tmp_path, []))
    assert code == 0 and "not finished" in page and 'id="charts"' not in page


@pytest.mark.slow
def test_ten_thousand_steps_of_eighty_metrics_keep_their_spikes_within_two_megabytes(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    make = importlib.import_module("report")
    make.write_run(tmp_path, steps=10_000, metrics=80, samples=2_000)
    code, page = report(tmp_path)
    run = read.read_run(tmp_path)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    lines = [line for chart in data["charts"] for line in chart["s"]]
    assert code == 0 and len(page.encode()) <= 2_000_000 and page.count('class="sample"') == 200
    assert len(lines) >= 80 and all(len(line["y"]) <= 400 for line in lines)
    assert sum(len(line["y"]) == 400 for line in lines) >= 70
    for name, label in (
        ("entropy", "entropy"),
        ("optim/grad_norm", "policy"),
        ("activation/std/0", "activation/std/0"),
    ):
        shown = next(line for line in lines if line["n"] == label)
        assert (
            max(shown["hi"]) == pytest.approx(run.metrics[name].value.max(), rel=1e-3)
            and max(shown["hi"]) > 20
        )


def test_a_stage_that_got_more_steps_shows_the_best_step_of_its_last_attempt():
    def attempt(step: int, value: float) -> Attempt:
        return Attempt(facts={"best": {"sft": {"step": step, "metric": "loss", "value": value}}})

    run = read.RecordedRun(Path("run"), "run", ["sft"], {"sft": (1, 110)})
    run.attempts = [attempt(100, 3.41), attempt(110, 0.43), Attempt()]
    assert sections._stage_rows(run)[0][1] == "110; best: step 110 (loss 0.43)"
