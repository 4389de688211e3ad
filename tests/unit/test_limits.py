"""Rows that are too long: refused in one message, left out, or cut at their end."""

import json

import numpy as np
import pytest

from policy.mesh import processes
from rl.data.encoded import Row
from rl.data.limits import Limit, cut_row, fit, too_long_key
from rl.data.reader import DataReader
from rl.errors import ConfigError, DataError
from rl.run.load import load
from rollout.media.expand import Expanded

PROMPTS = [{"prompt": "1" * n, "completion": "2" * 4, "answer": "x"} for n in (3, 9, 5, 30, 8)]
PAIRS = [
    {"prompt": "11", "chosen": "12345678901", "rejected": "2"},
    {"prompt": "1" * 20, "chosen": "3", "rejected": "4"},
    {"prompt": "11", "chosen": "5", "rejected": "6"},
    {"prompt": "11", "chosen": "1234567890", "rejected": "12345678901"},
]


@pytest.fixture
def stage(tmp_path):
    """Prepares the one stage of a run on rows of at most 12 tokens, and returns it; readers end
    with the test."""
    readers = []

    def make(algorithm, rows, *overrides, **more):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "model": {"source": "tiny-deepseek", "overrides": {"vocab_size": 264}},
            "tokenizer": {"source": "bytes"},
            "data": str(file),
            "rewards": {"functions": ["exact_answer"], "workers": 1},
            "max_length": 12,
            "stages": [{"algorithm": algorithm, "steps": 1, "sampling": {"max_new_tokens": 4}}],
        }
        (tmp_path / "run.yml").write_text(json.dumps(values | more))
        import rl.stages

        config = load([tmp_path / "run.yml"], list(overrides))
        readers.append(DataReader(config))
        [made] = rl.stages.create(config)
        made.prepare(readers[-1])
        return made

    yield make
    for each in readers:
        each.close()


def test_long_rows_are_refused_in_one_message_with_the_keys_that_help(stage):
    with pytest.raises(DataError) as caught:
        stage("sft", PROMPTS)
    said = str(caught.value)
    assert said.startswith("3 of 5 rows are longer than the 12 tokens that fit: first ")
    assert (
        "rows.jsonl:2 with 14 tokens; the longest, " in said
        and "rows.jsonl:4, has 35. max_length=35 fits" in said
    )
    assert said.endswith(
        "data.too_long=drop leaves the long ones out, data.too_long=truncate cuts their ends"
    )
    with pytest.raises(
        DataError,
        match=r"\(12 - 4 for the completion\).*data.too_long=drop leaves the long ones out$",
    ):
        stage("grpo", PROMPTS)
    own = {"algorithm": "sft", "steps": 1, "data": "rows.jsonl"}
    with pytest.raises(DataError, match=r"; stages.0.data.too_long=drop"):
        file = stage("sft", PROMPTS[:1]).datasets[0].path
        stage("sft", PROMPTS, data=None, stages=[own | {"data": file}])


def test_long_rows_are_left_out_and_counted(stage):
    sft = stage("sft", PROMPTS, "data.too_long=drop")
    assert [len(row.ids) for row in sft.rows.own] == [8, 10] and sft.rows.total == 2
    assert (
        sft.rows.effect
        == "3 of 5 rows are longer than the 12 tokens that fit (data.too_long: drop): 3 are left "
        "out"
    )
    assert [example.prompt for example in sft.rows.examples] == ["111", "11111"]
    grpo = stage("grpo", PROMPTS, "data.too_long=truncate")  # prompts are never cut
    assert [len(problem.ids) for problem in grpo.rows.own] == [
        3,
        5,
        8,
    ] and "2 are left out" in grpo.rows.effect
    with pytest.raises(DataError, match=r"no row is left: 1 of 1 rows .* Raise max_length \(12\)"):
        stage("sft", PROMPTS[3:4], "data.too_long=drop")


def test_a_demonstration_loses_its_end_and_its_end_of_sequence(stage):
    plain, cut = (
        stage("sft", PROMPTS, "max_length=64"),
        stage("sft", PROMPTS, "data.too_long=truncate"),
    )
    fitting = [plain.rows.own[number] for number in (0, 1, 2, 4)]
    assert [row.ids for row in cut.rows.own] == [row.ids[:12] for row in fitting]
    assert [row.mask for row in cut.rows.own] == [row.mask[:12] for row in fitting]
    assert cut.rows.effect.endswith("(data.too_long: truncate): 1 are left out and 2 are cut")
    assert 2 not in cut.rows.own[1].ids and cut.rows.own[0].ids[-1] == 2  # <eos>


def test_answers_of_pairs_lose_their_ends(stage):
    for algorithm in ("dpo", "kto"):
        rows = stage(algorithm, PAIRS, "data.too_long=truncate", "stages.0.prompts_per_step=2").rows
        if algorithm == "dpo":
            lengths = [[len(pair.chosen.ids), len(pair.rejected.ids)] for pair in rows.own]
        else:
            lengths = [[len(row.ids) for row, _ in answers] for answers in rows.own]
        assert lengths[:2] == [[12, 4], [4, 4]]
        # The last pair is equal once it is cut. KTO learns each answer by itself.
        assert lengths[2:] == ([] if algorithm == "dpo" else [[12, 12]])


@pytest.mark.parametrize(
    ("index", "numbers", "lengths", "other"),
    [(0, [0], [8], ([(1, 0), (3, 0)], 2, 0)), (1, [1, 2], [10, 8], ([(0, 0)], 2, 0))],
)
def test_rows_that_are_left_out_leave_no_gap_on_several_processes(
    stage, monkeypatch, index, numbers, lengths, other
):
    """Of four rows the third is too long; each of two processes holds every second row."""

    def all_gather(own):
        return [own, other] if isinstance(own, tuple) else [own]

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: index)
    monkeypatch.setattr(processes, "all_gather_object", all_gather)
    rows = stage("sft", [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[0]], "data.too_long=drop").rows
    assert rows.total == 3 and list(rows.numbers) == numbers
    assert [len(row.ids) for row in rows.own] == lengths
    assert {number: len(row.ids) for number, row in rows.numbered().items()} == dict(
        zip(numbers, lengths, strict=True)
    )
    assert rows.held([0, 1, 2]) == list(rows.own)


@pytest.mark.parametrize("index", [0, 1])
def test_a_refusal_counts_the_rows_of_all_processes(stage, monkeypatch, index):
    rows = [PROMPTS[3], PROMPTS[0], PROMPTS[1], PROMPTS[4]]
    with pytest.raises(DataError) as alone:
        stage("sft", rows)
    other = (
        [((1, 0), 8, "b"), ((3, 0), 13, "d")]
        if index == 0
        else [((0, 0), 35, "a"), ((2, 0), 14, "c")]
    )

    def all_gather(own):
        return [own, other] if isinstance(own, list) and len(own) == 2 else [own]

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: index)
    monkeypatch.setattr(processes, "all_gather_object", all_gather)
    with pytest.raises(DataError) as shared:
        stage("sft", rows)
    assert str(alone.value).startswith("3 of 4 rows") and str(shared.value).startswith(
        "3 of 4 rows"
    )
    assert str(shared.value).split("max_length=")[1] == str(alone.value).split("max_length=")[1]
    assert ("first a with 35" in str(shared.value)) == (index == 1)


def test_the_key_of_a_refusal_is_that_of_the_stage(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PROMPTS[0]) + "\n")
    own = {"algorithm": "sft", "steps": 1, "data": str(file)}
    tree = {
        "model": "tiny-vl",
        "tokenizer": "bytes",
        "data": str(file),
        "stages": [own, own, own | {"data": None}],
    }
    (tmp_path / "run.yml").write_text(json.dumps(tree))
    config = load([tmp_path / "run.yml"])
    sources = [stage.data or config.data for stage in config.stages]
    assert [too_long_key(config, source) for source in sources] == [
        "stages.0.data.too_long",
        "stages.1.data.too_long",
        "data.too_long",
    ]


def test_held_out_rows_beyond_those_of_an_evaluation_may_be_long(stage, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps(row) + "\n" for row in (PROMPTS[0], PROMPTS[2], PROMPTS[3]))
    )
    evaluation = {"data": str(held_out), "problems": 2}
    made = stage("grpo", PROMPTS[:1], evaluation=evaluation)
    reader = DataReader(made.config)
    reader.read_evaluation(made.config.evaluation, made.config.stages)
    assert [len(problem.ids) for problem in reader.evaluation_problems] == [3, 5]
    with pytest.raises(DataError, match="1 of 3 rows are longer than the 8 tokens"):
        reader.read_evaluation(
            made.config.evaluation.model_copy(update={"problems": 3}), made.config.stages
        )


def test_the_rows_of_an_evaluation_are_never_left_out(stage):
    held_out = {"data": {"path": "rows.jsonl", "too_long": "drop"}}
    with pytest.raises(ConfigError, match="evaluation.data.*too_long.*cannot change held-out rows"):
        stage("sft", PROMPTS[:1], evaluation=held_out)


def test_a_cut_stops_before_a_picture():
    """Of two texts, a picture of two tiles with a separator before, between and after them, and a
    text whose two tokens are of one character."""
    index = np.array([-1, -1, -1, 0, 1, -1, 2, 3, -1, -1, -1])
    starts = np.array([0, 1, 2, 2, 2, 2, 2, 2, 2, 9, 9])
    media = Expanded(np.arange(11), index, None, None, (), starts)
    row = Row(list(range(11)), [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1], media)
    for end, left in ((10, 10), (9, 9), *((inside, 2) for inside in range(2, 9))):
        cut = cut_row(row, end)
        assert (
            cut.ids == row.ids[:left]
            and cut.mask == row.mask[:left]
            and len(cut.expanded.index) == left
        )
    assert cut_row(row, 1) is None
    limit = Limit(4, too_long="truncate", key="data.too_long")
    fitting = fit([row, Row([1], [1])], limit, lambda each: len(each.ids), cut_row)
    assert fitting.numbers == [0, 1] and fitting.cut == 1
