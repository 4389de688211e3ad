"""Data that several processes hold together: each its own rows, and the errors of all."""

import json

import pytest

from policy.mesh import processes
from rl.cluster.launch import raise_on_all
from rl.config.data import DataOptions
from rl.data import datasets
from rl.data.shard import Shard
from rl.errors import DataError


def test_each_process_keeps_and_checks_every_nth_row_and_tells_the_others(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(5)) + "not json\n"
    )
    options = DataOptions(path=str(file))
    with pytest.raises(DataError, match="rows.jsonl:6: not valid JSON"):
        datasets.load(options, part=(1, 2))
    # A row that another process holds is that process's to refuse, and one of theirs is an error of
    # all.
    assert [example.prompt for example in datasets.load(options, part=(0, 2))] == ["p0", "p2", "p4"]
    with monkeypatch.context() as other:
        other.setattr(processes, "all_gather_object", lambda own: [own, DataError("row 6")])
        with pytest.raises(DataError, match="row 6"):
            raise_on_all(lambda: "fine here")

    parts = [datasets.load(options.model_copy(update={"limit": 5}), part=(i, 2)) for i in range(2)]
    assert [part.total for part in parts] == [5, 5]
    shards = [Shard([example.prompt for example in part], part.total) for part in parts]
    told: list[dict] = []

    def take(index: int, all_gather_object) -> list[str]:
        with monkeypatch.context() as one:
            one.setattr(processes, "index", lambda: index)
            one.setattr(processes, "count", lambda: 2)
            one.setattr(processes, "all_gather_object", all_gather_object)
            return shards[index].take([3, 0, 4, 3])

    for index in range(2):
        with pytest.raises(KeyError):  # nobody else has answered
            take(index, lambda own: told.append(own) or [own])
    assert told == [{0: "p0", 4: "p4"}, {3: "p3"}]
    assert take(0, lambda own: told) == take(1, lambda own: told) == ["p3", "p0", "p4", "p3"]
    assert Shard("abc", 3).take([2, 0]) == ["c", "a"]
