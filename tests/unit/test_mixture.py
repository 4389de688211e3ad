"""Several datasets in one stage: which rows it takes, where they come from, what is refused."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from policy.mesh import processes
from rl.config import files
from rl.config.data import ColumnNames, NamedDataOptions
from rl.data import datasets
from rl.data.drawing.mixture import Mixture, MixturePart
from rl.data.drawing.order import RowOrder, shuffled
from rl.data.shard import Shard, joined
from rl.errors import ConfigError, DataError
from rl.run.load import load
from rl.run.prepare import prepare
from rl.stages import metric_names
from rl.stages.curriculum.interface import Candidates
from rl.stages.sampling import by_source

STAGE = {
    "algorithm": "sft",
    "steps": 2,
    "prompts_per_step": 4,
    "sampling": {"max_new_tokens": 4},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sums = [{"prompt": f"{n}+1=", "completion": f"{n + 1}", "answer": f"{n}"} for n in range(5)]
    write(tmp_path / "sums.jsonl", sums)
    doubles = [
        {"question": f"2*{n}=", "solution": f"{2 * n}", "kind": "ab"[n % 2]} for n in range(8)
    ]
    write(tmp_path / "doubles.jsonl", doubles)
    pairs = [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(3)]
    write(tmp_path / "pairs.jsonl", pairs)
    labels = [{"prompt": f"{n}", "completion": "a", "label": n > 1} for n in range(3)]
    write(tmp_path / "labels.jsonl", labels)
    return tmp_path


DOUBLES = {"path": "doubles.jsonl", "columns": {"prompt": "question", "completion": "solution"}}


def config(folder, data, stage=None, **sections):
    text = {
        "run": {"dir": str(folder / "run")},
        "platform": "cpu",
        "model": {"source": "tiny-deepseek", "overrides": {"vocab_size": 320}},
        "tokenizer": {"source": "bytes"},
        "max_length": 16,
        "data": data,
        "stages": [STAGE | (stage or {})],
    }
    file = folder / "run.yml"
    file.write_text(json.dumps(text | sections))
    return load([file])


def stage_of(folder, data, **stage):
    return prepare(config(folder, data, stage)).stages[0]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((3, 1), "AABAAABA"),
        ((1, 3), "BABBBABB"),
        ((1, 1, 1), "ABCABC"),
        ((5, 3, 2), "ABACABACBAABACABACBA"),
        ((1,), "AAA"),
    ],
)
def test_datasets_take_turns_by_their_weights(weights, expected):
    mixture = Mixture(weights)
    assert "".join("ABC"[mixture.place(n).part] for n in range(len(expected))) == expected
    backwards = Mixture(weights)  # a resumed run asks for a late row first
    assert [backwards.place(n) for n in reversed(range(len(expected)))] == [
        mixture.place(n) for n in reversed(range(len(expected)))
    ]


@pytest.mark.parametrize("weights", [(7, 2, 1), (1, 2, 3, 4, 5, 6), (1, 100), (13, 13, 1)])
def test_each_dataset_gives_its_share_to_within_one_row(weights):
    mixture = Mixture(weights)
    counts = Counter()
    for drawn in range(1, 2 * sum(weights) + 5):
        place = mixture.place(drawn - 1)
        assert place.taken == counts[place.part]
        counts[place.part] += 1
        shares = [Fraction(weight * drawn, sum(weights)) for weight in weights]
        assert all(abs(share - counts[part]) < 1 for part, share in enumerate(shares))
        assert mixture.counts(drawn) == [counts[part] for part in range(len(weights))]


def test_rows_of_a_rare_dataset_are_counted_without_looking_for_the_last_one():
    mixture = Mixture((3000, 1))
    mixture.place(2900)
    places = mixture.place
    mixture.place = lambda number: pytest.fail(f"looked at row {number}")
    counts = mixture.counts(2900)
    assert sum(counts) == 2900 and counts[1] == sum(places(n).part for n in range(2900)) == 1
    assert mixture.counts(3001 * 5) == [15000, 5] and mixture.counts(0) == [0, 0]


def test_rows_are_numbered_from_the_first_dataset_on_and_keep_their_own_order():
    order = RowOrder([MixturePart("a", 5, 0.75), MixturePart("b", 3, 0.25)], seed=7)
    rows = order.take(range(40))
    own = {"a": [row for row in rows if row < 5], "b": [row - 5 for row in rows if row >= 5]}
    assert own["a"] == [shuffled(7, 5, n) for n in range(30)]  # the order of the dataset alone
    assert own["b"] == [shuffled(7, 3, n, 1) for n in range(10)]
    assert all(sorted(own["a"][n : n + 5]) == [*range(5)] for n in range(0, 30, 5))
    assert order.take(range(17, 40)) == rows[17:]
    assert order.epochs(8) == {"a": 6 / 5, "b": 2 / 3}
    same = [shuffled(7, 9, n) for n in range(9)], [shuffled(7, 9, n, 1) for n in range(9)]
    assert same[0] != same[1]


def test_without_weights_each_row_comes_once_in_a_pass(folder):
    stage = stage_of(folder, ["sums.jsonl", DOUBLES], epochs=2, steps=None)
    assert stage.options.steps == 7  # 2 * 13 / 4, rounded up
    assert sorted(stage.example_order.take(range(13))) == [*range(13)]
    assert stage.example_order.take(range(26))[13:] != stage.example_order.take(range(13))


def test_rows_of_a_step_follow_the_weights(folder):
    stage = stage_of(
        folder, [{"path": "sums.jsonl", "weight": 1}, DOUBLES | {"weight": 3, "name": "twice"}]
    )
    assert stage.rows.total == 13
    for start in (0, 4, 8, 100):
        step = stage.example_order.take(range(start, start + 4))
        assert Counter(stage.rows.sources[n] for n in step) == {"sums": 1, "twice": 3}
    texts = [example.prompt for example in stage.rows.examples]
    assert texts == [f"{n}+1=" for n in range(5)] + [f"2*{n}=" for n in range(8)]
    assert stage.rows.examples[0].columns["source"] == "sums"  # what a reward gets
    assert stage.rows.take([5]) == [stage.rows.own[5]]


def test_one_dataset_is_drawn_as_before_in_a_list_too(folder):
    alone = stage_of(folder, "sums.jsonl")
    listed = stage_of(folder, [{"path": "sums.jsonl", "weight": 0.1}])
    assert alone.rows.sources is None and alone.rows.parts == ()
    assert alone.rows.examples[0].source is None
    assert "source" not in alone.rows.examples[0].columns
    expected = [shuffled(0, 5, n) for n in range(20)]
    assert alone.example_order.take(range(20)) == listed.example_order.take(range(20)) == expected
    assert listed.rows.sources == ["sums"] * 5


def test_a_column_says_where_a_row_came_from(folder):
    columns = DOUBLES["columns"] | {"source": "kind"}
    stage = stage_of(folder, DOUBLES | {"columns": columns})
    assert stage.rows.sources == list("abababab") and not stage.rows.parts
    with pytest.raises(DataError, match=r"sums.jsonl:1: no column 'kind', which `columns.source`"):
        stage_of(folder, {"path": "sums.jsonl", "columns": {"source": "kind"}})


def test_a_row_keeps_a_column_of_its_own_that_is_called_source(folder):
    rows = [{"prompt": "1", "completion": "1", "source": "book"}]
    write(folder / "own.jsonl", rows)
    stage = stage_of(folder, [{"path": "own.jsonl"}])
    assert stage.rows.sources == ["own"]
    assert stage.rows.examples[0].columns["source"] == "book"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data: a list of datasets has one or more, got none"),
        (["sums.jsonl", "./sums.jsonl"], "two datasets are called 'sums'; give each a `name`"),
        ([{"path": "sums.jsonl", "weight": 0}], "data.0.weight: must be greater than 0, got 0"),
        ([{"path": "sums.jsonl", "weight": -1}], "data.0.weight: must be greater than 0"),
        (
            [{"path": "sums.jsonl", "weight": 1}, "pairs.jsonl"],
            "pairs has no weight and others have one; give all a `weight`, or none",
        ),
        ({"path": "sums.jsonl", "weight": 1}, "data.weight: unknown key"),
        ([{"path": "sums.jsonl", "wieght": 1}], "data.0.wieght: unknown key (nearest: weight"),
        ([{"path": "sums.jsonl", "name": "a b"}], "data.0.name: has letters, digits and _ . -"),
        (["sums.jsonl", "sms.jsonl"], "data.1.path: no such file or directory: sms.jsonl"),
        ([{"path": "sums.jsonl", "task": "arithmetic"}], "data.0: give exactly one of"),
        ([{"path": "a", "options": {"b": 1}}], "data.0.options: only a task takes options"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_at_its_entry(data, message, folder):
    with pytest.raises(ConfigError) as refused:
        config(folder, data)
    assert message in str(refused.value)


def test_names_come_from_paths_and_tasks(folder):
    data = [
        {"path": "sums.jsonl"},
        {"task": "arithmetic"},
        {"path": "openai/gsm8k", "subset": "main"},
        {"path": "hf://org/my.data@v1.0"},
        {"path": "sums.jsonl", "name": "again"},
    ]
    read = config(folder, data)
    assert [each.label for each in read.data] == [
        *("sums", "arithmetic", "gsm8k", "my.data", "again")
    ]
    resolved = folder / "resolved.yml"
    resolved.write_text(files.resolved_yaml(read))
    assert load([resolved]) == read
    assert (
        load([resolved], ["data.0.weight=2", *(f"data.{n}.weight=1" for n in range(1, 5))])
        .data[0]
        .weight
        == 2
    )
    with pytest.raises(ConfigError, match="write data.0.path="):
        load([resolved], ["data.path=pairs.jsonl"])


def test_errors_of_rows_name_their_dataset(folder):
    write(folder / "empty.jsonl", [])
    with pytest.raises(DataError, match=r"empty.jsonl: the dataset has no rows"):
        stage_of(folder, ["sums.jsonl", "empty.jsonl"])
    write(folder / "long.jsonl", [{"prompt": "a" * 20, "completion": "b"}])
    with pytest.raises(DataError, match=r"long.jsonl:1 .*data.1.too_long=drop"):
        stage_of(folder, ["sums.jsonl", "long.jsonl"])
    write(folder / "long.jsonl", [{"prompt": "a" * 9 * n, "completion": "b"} for n in (1, 2)])
    stage = stage_of(folder, ["sums.jsonl", {"path": "long.jsonl", "too_long": "drop"}])
    assert stage.rows.total == 6
    assert stage.rows.effect.startswith("of long 1 of 2 rows are longer than the 16 tokens")
    assert "data.1.too_long: drop" in stage.rows.effect
    rewards = {"functions": ["exact_answer"]}
    with pytest.raises(DataError, match=r"doubles.jsonl:1: .*exact_answer"):
        prepare(config(folder, ["sums.jsonl", DOUBLES], {"algorithm": "grpo"}, rewards=rewards))


def test_pairs_and_labelled_answers_do_not_mix(folder):
    message = "kto: some rows of pairs.jsonl, labels.jsonl are pairs and others answers"
    with pytest.raises(DataError, match=message):
        stage_of(folder, ["pairs.jsonl", "labels.jsonl"], algorithm="kto")
    stage = stage_of(
        folder,
        [{"path": "pairs.jsonl", "weight": 1}, {"path": "pairs.jsonl", "weight": 1, "name": "b"}],
        algorithm="kto",
    )
    assert stage.examples == 12  # both answers of each pair
    step = stage.example_order.take(range(12))
    assert sorted(step) == [*range(12)] and [n < 6 for n in step] == [True, False] * 6


def test_a_held_out_share_is_that_of_each_task_of_the_list(folder):
    tasks = [{"task": "arithmetic", "options": {"eval_share": 0.2}}, "sums.jsonl"]
    evaluation = {"data": [{"task": "arithmetic"}, {"path": "sums.jsonl"}]}
    with pytest.raises(ConfigError, match=r"evaluation.data.0.options.eval_share: None here"):
        config(folder, tasks, evaluation=evaluation, rewards={"functions": ["exact_answer"]})
    evaluation = {"data": [{"path": "sums.jsonl", "too_long": "drop"}]}
    with pytest.raises(ConfigError, match="`too_long` cannot change held-out rows"):
        config(folder, tasks, evaluation=evaluation, rewards={"functions": ["exact_answer"]})


def test_metrics_by_source_can_end_a_stage(folder):
    held_out = {"data": ["sums.jsonl", DOUBLES], "every": 1}
    data = [{"path": "sums.jsonl", "weight": 1}, DOUBLES | {"weight": 1}]
    stage = stage_of(folder, data, held_out=held_out)
    assert stage.held_out_rows.sources == ["sums"] * 5 + ["doubles"] * 8
    for name in ("source/sums/nll", "source/doubles/epoch", "held_out/sums/loss"):
        assert metric_names.problem(stage, name) is None, name
    assert "samples no completions" in metric_names.problem(stage, "source/sums/reward_mean")
    assert "one source" in metric_names.problem(stage_of(folder, "sums.jsonl"), "source/sums/rows")


def test_losses_of_sources_are_means_over_their_tokens():
    logp = -np.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
    mask = np.asarray([[0, 1, 1], [1, 0, 0], [0, 0, 1]], np.float32)
    assert by_source.of_losses(["a", "b", "a"], logp, mask) == {
        "source/a/nll": (2 + 3 + 9) / 3,
        "source/b/nll": 4.0,
    }
    assert by_source.of_rows(["a", "b", "a"]) == {"source/a/rows": 2.0, "source/b/rows": 1.0}


def test_processes_know_the_sources_of_rows_that_others_hold(folder, monkeypatch):
    options = [
        NamedDataOptions(path="sums.jsonl"),
        NamedDataOptions(path="doubles.jsonl", columns=ColumnNames(**DOUBLES["columns"])),
    ]

    def shards(index):
        loaded = [datasets.load(each, part=(index, 2)) for each in options]
        return [Shard([e.prompt for e in each], each.total, each.examples) for each in loaded]

    def on(index, others, work):
        with monkeypatch.context() as one:
            one.setattr(processes, "index", lambda: index)
            one.setattr(processes, "count", lambda: 2)
            told = []
            one.setattr(
                processes, "all_gather_object", lambda own: told.append(own) or [*others, own]
            )
            return work(), told[-1]

    part = on(1, [], lambda: joined(shards(1), options))[1]
    rows, own = on(0, [part], lambda: joined(shards(0), options))
    assert rows.sources == ["sums"] * 5 + ["doubles"] * 8
    assert [number for number, _ in part] == [1, 3, 6, 8, 10, 12]
    assert [number for number, _ in own] == [0, 2, 4, 5, 7, 9, 11]
    numbered = on(0, [], lambda: [rows.numbered(), processes.all_gather_object(0)])[0][0]
    assert numbered == {n: f"{n}+1=" for n in (0, 2, 4)} | {5 + n: f"2*{n}=" for n in (0, 2, 4, 6)}
    of_other = {number: f"value {number}" for number, _ in part}
    values = on(0, [of_other], lambda: Candidates(rows, 0).values(lambda each: each.prompt))[0]
    assert values[:4] == ["0+1=", "value 1", "2+1=", "value 3"] and values[12] == "value 12"
