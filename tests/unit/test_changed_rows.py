"""Rows that change between the start of a run and its continuation."""

import json
from pathlib import Path

import pytest

from policy.mesh import processes
from rl.data.shard import Shard
from rl.errors import DataError
from rl.run.health.changed_rows import check, fingerprints
from rl.run.load import load
from rl.run.prepare import prepare

ROWS = [{"prompt": f"{n}+{n}=", "completion": str(2 * n), "answer": str(2 * n)} for n in range(20)]


def write(name, rows) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Reads the rows of a run of three stages with an evaluation: overrides -> (configuration,
    fingerprints)."""
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", ROWS)
    write("held.jsonl", ROWS[:4])
    write(
        "pairs.jsonl",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "d", "rejected": "c"},
        ],
    )
    stage = {"steps": 1, "prompts_per_step": 2, "sampling": {"max_new_tokens": 4}}
    values = {
        "model": {"source": "tiny-deepseek", "overrides": {"vocab_size": 320}},
        "tokenizer": "bytes",
        "data": "rows.jsonl",
        "evaluation": {"data": "held.jsonl"},
        "rewards": {"functions": ["exact_answer"], "workers": 1},
        "max_length": 64,
        "stages": [
            stage | {"algorithm": "sft"},
            stage | {"algorithm": "dpo", "data": "pairs.jsonl"},
            stage | {"algorithm": "grpo", "samples_per_prompt": 2},
        ],
    }
    Path("run.yml").write_text(json.dumps(values))

    def read(*overrides):
        config = load(["run.yml"], list(overrides))
        prepared = prepare(config)
        prepared.close()
        return config, prepared.fingerprints

    return read


def record(data) -> None:
    Path("run.json").write_text(
        json.dumps({"attempts": [{"data": {}}, {"data": data}, {"start": 1.0}]})
    )


def refused(config, now, stage=0, ended=False) -> str:
    with pytest.raises(DataError) as caught:
        check(config, now, Path(), stage, ended)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_the_same_rows_have_the_same_fingerprint_wherever_they_lie(started):
    config, then = started()
    assert {name: each["rows"] for name, each in then.items()} == {
        "sft": 20,
        "dpo": 2,
        "grpo": 20,
        "evaluation": 4,
    }
    Path("rows.jsonl").rename("other.jsonl")
    _, now = started("data=other.jsonl")
    assert then == now
    record(then)
    assert check(config, now, Path(), 0, False) is None


def test_changed_rows_are_refused_and_named(started):
    _, then = started()
    record(then)
    write("rows.jsonl", ROWS[:6])
    config, now = started()
    said = refused(config, now)
    assert (
        "the rows of sft (rows.jsonl) changed: 20 rows when the run was last started, 6 now" in said
    )
    assert (
        "the rows of grpo (rows.jsonl) changed" in said
        and "dpo" not in said
        and "held-out" not in said
    )
    assert "run.changed_data=allow" in said
    assert "rows of sft" not in refused(config, now, stage=1)  # that stage is over
    assert check(config, now, Path(), 2, True) is None  # so are all
    write("rows.jsonl", ROWS)
    write("held.jsonl", [ROWS[0] | {"answer": "1"}, *ROWS[1:4]])
    config, now = started()
    assert refused(config, now, stage=2).startswith(
        "the held-out rows (held.jsonl) changed: 4 rows as before, with other"
    )


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("rows.jsonl", [ROWS[1], ROWS[0], *ROWS[2:]]),  # another order
        ("rows.jsonl", [ROWS[0] | {"completion": "7"}, *ROWS[1:]]),
        ("rows.jsonl", [ROWS[0] | {"answer": "7"}, *ROWS[1:]]),  # a column of the rewards
        (
            "pairs.jsonl",
            [
                {"prompt": "a", "chosen": "c", "rejected": "b"},
                {"prompt": "a", "chosen": "d", "rejected": "c"},
            ],
        ),
    ],
)
def test_every_change_of_a_row_counts(started, file, rows):
    _, then = started()
    record(then)
    write(file, rows)
    config, now = started()
    assert "with other contents" in refused(config, now)


def test_changed_rows_are_allowed_with_the_key_and_noted(started):
    _, then = started()
    record(then)
    write("rows.jsonl", ROWS[:6])
    config, now = started("run.changed_data=allow")
    assert "20 rows when the run was last started, 6 now" in check(config, now, Path(), 0, False)


def test_runs_of_older_versions_are_continued(started):
    config, now = started()
    assert check(config, now, Path(), 0, False) is None
    Path("run.json").write_text('{"attempts": [{"start": 1.0}]}')
    assert check(config, now, Path(), 0, False) is None


def test_the_number_of_processes_does_not_matter(monkeypatch):
    rows = ["a", "b", "a", "c", "d"]

    class Stage:
        name = "sft"

        def __init__(self, rows):
            self.rows = rows

    def together(parts):
        sums = []
        monkeypatch.setattr(processes, "all_gather_object", lambda own: sums.append(own) or [own])
        monkeypatch.setattr(processes, "count", lambda: parts)
        for index in range(parts):
            monkeypatch.setattr(processes, "index", lambda index=index: index)
            fingerprints([Stage(Shard(rows[index::parts], len(rows)))], [])
        monkeypatch.setattr(processes, "all_gather_object", lambda own: sums)
        return fingerprints([Stage(Shard(rows[::parts], len(rows)))], [])

    assert together(1) == together(2) == together(3)
