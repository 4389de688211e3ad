"""Curricula: which rows one may choose, what it observes, and the one that leaves out rows that are
always or never solved."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rl.stages
from rl.config.stage import CurriculumOptions
from rl.data.drawing.mixture import MixturePart
from rl.data.drawing.order import shuffled
from rl.data.encoded import Example
from rl.data.shard import Shard
from rl.errors import ConfigError, DataError
from rl.run.load import load
from rl.run.prepare import prepare, with_steps
from rl.stages.curriculum import named, pass_rate
from rl.stages.curriculum.interface import Candidates, Curriculum
from rl.stages.producers.curriculum_feedback import CurriculumFeedback
from rl.stages.producers.interface import Producer
from rl.views.report import sections

OWN = str(Path(__file__).parents[1] / "end_to_end" / "own_curricula.py") + ":resting"
RATES = (0.0, 0.25, 1.0, None, 0.999, 0.1, 1.0)


def shard(rates=RATES, parts=()):
    examples = [
        Example(f"p{n}", columns={"rate": rate}, where=f"rows.jsonl:{n + 1}")
        for n, rate in enumerate(rates)
    ]
    return Shard([each.prompt for each in examples], len(examples), examples, parts=parts)


def candidates(**options):
    return Candidates(shard(**options), 5)


def test_rows_that_are_left_keep_the_weights_of_their_datasets():
    rows = candidates(parts=[MixturePart("a", 4, 3.0), MixturePart("b", 3, 1.0)])
    taken = rows.among([6, 1, 4, 3]).take(range(16))
    assert [row < 4 for row in taken] == [True, True, False, True] * 4
    assert sorted(taken[:4] + taken[4:8])[:6] == [1, 1, 1, 3, 3, 3]
    assert {row for row in taken if row >= 4} == {4, 6}
    alone = (
        candidates(parts=[MixturePart("a", 4, 3.0), MixturePart("b", 3, 1.0)])
        .among([5])
        .take(range(3))
    )
    assert alone == [5] * 3


def test_all_rows_come_in_the_order_without_a_curriculum():
    assert candidates().among().take(range(20)) == [shuffled(5, 7, n) for n in range(20)]
    assert candidates().column("rate") == list(RATES)
    assert candidates().column("other") == [None] * 7


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [1, 3, 4, 5]),
        ({"missing": "leave_out"}, [1, 4, 5]),
        ({"above": 0.1, "below": 0.9}, [1, 3]),
        ({"above": -1, "below": 2}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_rows_between_two_pass_rates_stay(options, rows):
    made = pass_rate.PassRate(candidates(), column="rate", **options)
    assert made.rows == rows
    drawn = [*made.next(len(rows)), *made.next(len(rows))]
    assert sorted(drawn) == sorted(rows * 2)
    again = pass_rate.PassRate(candidates(), column="rate", **options)
    again.restore(json.loads(json.dumps(made.state())))
    assert again.next(5) == made.next(5)


def test_empty_cells_and_nan_are_no_pass_rates():
    rates = ("0.5", "", " ", math.nan, 1.0, "nan")
    made = pass_rate.PassRate(candidates(rates=rates), column="rate")
    assert made._rates == [0.5, None, None, None, 1.0, None] and made.rows == [0, 1, 2, 3, 5]
    with pytest.raises(DataError, match="no row has a column 'rate' with a value"):
        pass_rate.PassRate(candidates(rates=["", math.nan]), column="rate")


def test_the_note_and_the_histogram_count_every_row():
    made = pass_rate.PassRate(candidates(), column="rate")
    assert made.note == (
        "curriculum pass_rate: 3 of 7 rows are left out: 1 with a pass rate of at most 0, 2 of at "
        "least 1; 1 without one are kept"
    )
    bars = {each.label: (each.drawn, each.left_out) for each in made.histogram().bars}
    assert list(bars) == [
        *("0", "0 to 0.1", "0.1 to 0.2", "0.2 to 0.3", "0.3 to 0.4", "0.4 to 0.5", "0.5 to 0.6"),
        *("0.6 to 0.7", "0.7 to 0.8", "0.8 to 0.9", "0.9 to 1", "1", "unknown"),
    ]
    assert {label: bar for label, bar in bars.items() if bar != (0, 0)} == {
        "0": (0, 1),
        "0.1 to 0.2": (1, 0),
        "0.2 to 0.3": (1, 0),
        "0.9 to 1": (1, 0),
        "1": (0, 2),
        "unknown": (1, 0),
    }


def test_pass_rates_come_from_the_samples_of_a_run(tmp_path):
    def line(prompt, reward, **more):
        return json.dumps({"prompt": prompt, "reward": reward} | more) + "\n"

    lines = [line("p0", 1.0), line("p0", 1.0), line("p1", 1.0), line("p1", 0.5), line("p1", None)]
    lines += [line("p2", 0.0), line("p3", 1.0, eval=True), line("else", 1.0)]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    made = pass_rate.PassRate(candidates(), rollouts=str(tmp_path))
    assert made._rates == [1.0, 0.5, 0.0, None, None, None, None]
    assert made.rows == [1, 3, 4, 5, 6]
    easier = pass_rate.PassRate(candidates(), rollouts=str(tmp_path), correct_at=0.5)
    assert easier._rates[:3] == [1.0, 1.0, 0.0]
    with pytest.raises(DataError, match="other rows stay than at the start.* also with"):
        easier.restore(made.state())
    assert "dynamic_batches" not in made.note
    stages = [{"algorithm": {"name": "sft"}}, {"algorithm": {"name": "dapo", "dynamic_batches": 3}}]
    (tmp_path / "config.yml").write_text(json.dumps({"stages": stages}))
    noted = pass_rate.PassRate(candidates(), rollouts=str(tmp_path)).note
    assert "sampled with dynamic_batches (dapo), which drops groups" in noted
    without = pass_rate.PassRate(candidates(), rollouts=str(tmp_path), missing="leave_out")
    assert "dynamic_batches" not in without.note
    (tmp_path / "samples.jsonl").write_text(line("else", 1.0))
    with pytest.raises(DataError, match="none of the 7 prompts of the data is in"):
        pass_rate.PassRate(candidates(), rollouts=str(tmp_path))


@pytest.mark.parametrize(
    ("rates", "options", "message"),
    [
        ([0.5, 1.5], {}, "rows.jsonl:2: column 'rate' is no share from 0 to 1: 1.5"),
        (["half"], {}, "rows.jsonl:1: column 'rate' is no share from 0 to 1: 'half'"),
        ([0.5], {"column": "solved"}, "no row has a column 'solved'"),
        ([0.0, 1.0], {}, "no row is left: 2 of 2 rows are left out: 1 with a pass rate"),
    ],
)
def test_pass_rates_that_cannot_be_used_are_refused(rates, options, message):
    with pytest.raises(DataError, match=message):
        pass_rate.PassRate(candidates(rates=rates), **{"column": "rate"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pass_rat", "name: no curriculum 'pass_rat' .nearest: pass_rate"),
        ("pass_rate", "name: give exactly one of `column`"),
        ({"name": "pass_rate", "options": {"colum": "a"}}, "options.colum: .* no option `colum`"),
        (
            {"name": "pass_rate", "options": {"column": "a", "above": 1}},
            "options.above: `above` must be less than below, got 1 and 1",
        ),
        (
            {"name": "pass_rate", "options": {"column": "a", "correct_at": 1}},
            "options.correct_at: `correct_at` is for rewards of `rollouts`, and a column has",
        ),
        (
            {"name": "pass_rate", "options": {"rollouts": "nowhere"}},
            "options.rollouts: `rollouts`: nowhere has no samples.jsonl",
        ),
        ({"name": OWN, "options": {"most": 1}}, "options.most: .* has no option `most`"),
        (f"{OWN}s", "name: curriculum .*own_curricula.py:restings: no function 'restings'"),
    ],
)
def test_a_curriculum_that_cannot_be_used_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=f"stages.0.curriculum.{message}"):
        config(tmp_path, curriculum=options)


def config(folder, **stage):
    rows = [{"prompt": f"{n}=", "completion": "1", "rate": n / 4} for n in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"algorithm": "sft", "steps": 2, "prompts_per_step": 2} | stage
    text = {
        "run": {"dir": str(folder / "run")},
        "platform": "cpu",
        "model": {"source": "tiny-deepseek", "overrides": {"vocab_size": 320}},
        "tokenizer": {"source": "bytes"},
        "max_length": 16,
        "data": str(folder / "rows.jsonl"),
        "stages": [stage | {"sampling": {"max_new_tokens": 4}}],
    }
    file = folder / "run.yml"
    file.write_text(json.dumps(text))
    return load([file])


def test_an_epoch_has_the_rows_that_are_left(tmp_path):
    options = {"name": "pass_rate", "options": {"column": "rate"}}
    made = config(tmp_path, steps=None, epochs=2, curriculum=options)
    counted, notes = with_steps(made)
    assert counted.stages[0].steps == 3 and notes == [
        "sft: 3 steps of 2, for 2 epochs of 3 rows",
        "sft: curriculum pass_rate: 2 of 5 rows are left out: 1 with a pass rate of at most 0, 1 "
        "of at least 1",
    ]
    prepared = prepare(made)
    assert prepared.notes == notes
    stage = prepared.stages[0]
    assert sorted(stage.example_order.take(range(3))) == [1, 2, 3]  # also of the probe
    with pytest.raises(DataError, match="no row has a column 'rates'"):
        prepare(config(tmp_path, curriculum=options | {"options": {"column": "rates"}}))


def test_a_stage_that_is_over_needs_no_rollouts(tmp_path):
    def line(n):
        return json.dumps({"prompt": f"{n}=", "reward": 0.5}) + "\n"

    def saved(number, **place):
        folder = tmp_path / "run" / "checkpoints" / f"{number:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        host = {"stage": 0, "step": 2, "steps": 2, "ended": True} | place
        (folder / "host.json").write_text(json.dumps(host))

    rollouts = tmp_path / "earlier"
    rollouts.mkdir()
    (rollouts / "samples.jsonl").write_text("".join(map(line, range(5))))
    options = {"name": "pass_rate", "options": {"rollouts": str(rollouts)}}
    config(tmp_path, curriculum=options)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("{}\n")
    (rollouts / "samples.jsonl").unlink()
    made = config(tmp_path, curriculum=options)  # which stages are over is not known yet
    with pytest.raises(ConfigError, match="curriculum pass_rate: `rollouts`: .* has no samples"):
        prepare(made)
    saved(1)
    (stage,) = prepare(made).stages
    assert stage.is_over and stage.curriculum is None
    saved(0, step=1, ended=False)  # the run goes on from here if the newest one is damaged
    with pytest.raises(ConfigError, match="has no samples"):
        prepare(made)


def test_a_checkpoint_of_other_rows_is_refused_before_the_stage_starts(tmp_path):
    options = {"name": "pass_rate", "options": {"column": "rate"}}
    (stage,) = prepare(config(tmp_path, curriculum=options)).stages
    stage.restore_curriculum({"curriculum": stage.curriculum.state()})
    stage.restore_curriculum({})
    with pytest.raises(DataError, match="curriculum pass_rate: other rows stay"):
        stage.restore_curriculum({"curriculum": {"drawn": 2, "rows_sha256": "0"}})


def test_a_process_without_a_row_of_its_own_scores_too(tmp_path):
    rewards = {"functions": ["exact_answer"]}
    made = config(tmp_path, algorithm="grpo", steps=1, rewards=rewards)
    (stage,) = rl.stages.create(made)
    asked = []
    reader = SimpleNamespace(
        evaluation_problems=[],
        reward_runner=lambda rewards, prompts: asked.append(prompts) or "runner",
    )
    stage.prepare_rewards(reader, [])
    assert asked == [[]] and stage.runner == "runner"


def test_kto_takes_no_curriculum(tmp_path):
    with pytest.raises(ConfigError, match="stages.0.curriculum: a curriculum chooses rows"):
        config(tmp_path, algorithm="kto", curriculum=OWN)


def test_what_a_curriculum_returns_is_checked():
    class Wrong(Curriculum):
        def __init__(self, rows):
            self._rows = rows

        def next(self, count):
            return self._rows

    assert named.chosen(Wrong(np.asarray([2, 0])), "mine", 2, 3) == [2, 0]
    with pytest.raises(DataError, match="curriculum mine: asked for 2 rows, it chose 1 rows"):
        named.chosen(Wrong([1]), "mine", 2, 3)
    with pytest.raises(DataError, match="it chose row 3 of 3 rows"):
        named.chosen(Wrong([1, 3]), "mine", 2, 3)
    plain = CurriculumOptions(name=f"{__file__}:no_curriculum")
    with pytest.raises(ConfigError, match="returned dict, which has no `next`"):
        named.create(plain, candidates())


def no_curriculum(candidates):
    return {}


def test_rewards_are_observed_before_the_next_rows_and_before_a_checkpoint():
    calls = []

    class Listening(Curriculum):
        def observe(self, rows, rewards_RG):
            calls.append((list(rows), rewards_RG.tolist()))

    class Numbered(Producer):
        rows = iter(range(10))

        def take(self, count):
            calls.append("take")
            groups = [
                SimpleNamespace(row=next(self.rows), trajectories=[None, None])
                for _ in range(count)
            ]
            totals = np.arange(2.0 * count)
            scores = SimpleNamespace(rewards=totals[:, None], total=totals, faults=[], logs={})
            return SimpleNamespace(groups=groups, scores=SimpleNamespace(result=lambda: scores))

        def state(self):
            return {"inner": 1}

    feedback = CurriculumFeedback(Numbered(None), SimpleNamespace(curriculum=Listening()))
    feedback.take(2)
    assert calls == ["take"]
    feedback.take(1)
    assert calls[1:] == [([0, 1], [[0.0, 1.0], [2.0, 3.0]]), "take"]
    assert feedback.state() == {"inner": 1}
    assert calls[3:] == [([2], [[0.0, 1.0]])]
    feedback.take(1)
    assert calls[4:] == ["take"]  # observed once


def test_the_report_draws_the_histogram_and_escapes_it():
    bars = [{"label": "<b>0", "drawn": 0, "left_out": 30}, {"label": "1", "drawn": 60}, 7]
    run = SimpleNamespace(curricula={"grpo": {"title": "<i>Rows", "bars": bars}, "sft": 3})
    shown = sections.curricula(run)
    assert "grpo: &lt;i&gt;Rows" in shown and "&lt;b&gt;0" in shown and "<b>" not in shown
    assert 'class="v" width="100.0"' in shown and 'class="i" x="0.0" width="50.0"' in shown
    assert sections.curricula(SimpleNamespace(curricula={})) == ""
