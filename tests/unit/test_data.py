import json
from pathlib import Path

import pytest

from rl.config.data import DataOptions
from rl.data import datasets
from rl.data.datasets import load, order
from rl.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**values) -> DataOptions:
    return DataOptions.model_validate(values)


def jsonl(name: str, rows: list) -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return name


def parquet(name: str, rows: list[dict]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


def error(kind, **values) -> str:
    keywords = {key: values.pop(key) for key in ("demonstrations", "pairs", "held_out") if key in values}
    with pytest.raises(kind) as caught:
        load(options(**values), **keywords)
    return str(caught.value)


ROWS = [{"prompt": "1+1=", "completion": "2", "answer": "2"}, {"prompt": 'a "b",\nc', "completion": "d", "answer": "é"}]


def test_all_kinds_of_files_give_the_same_examples():
    Path("d.csv").write_text('prompt,completion,answer\n1+1=,2,2\n"a ""b"",\nc",d,é\n')
    Path("d.tsv").write_text('prompt\tcompletion\tanswer\n1+1=\t2\t2\n"a ""b"",\nc"\td\té\n')
    Path("d.json").write_text(json.dumps(ROWS))
    for name in (jsonl("d.jsonl", [ROWS[0], "", ROWS[1]]), "d.csv", "d.tsv", "d.json", parquet("d.parquet", ROWS)):
        dataset = load(options(path=name), demonstrations=True)
        assert [(e.prompt, e.completion, e.columns) for e in dataset] == [
            (row["prompt"], row["completion"], {"answer": row["answer"]}) for row in ROWS
        ], name


def test_a_folder_and_a_saved_dataset_are_read_with_their_splits():
    import datasets

    Path("folder").mkdir()
    jsonl("folder/train.jsonl", ROWS)
    jsonl("folder/test.jsonl", ROWS[:1])
    assert len(load(options(path="folder"))) == 2
    assert len(load(options(path="folder"), held_out=True)) == 1
    full = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": full, "dev": full.select([1])}).save_to_disk("saved")
    assert load(options(path="saved", split="dev"))[0].columns == {"answer": "é"}
    assert "there are train, dev" in error(DataError, path="saved", held_out=True)


def test_a_conversation_is_a_demonstration_of_its_last_answer():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    dataset = load(options(path=jsonl("m.jsonl", [{"messages": messages, "id": 3}]), system="be brief"))
    system = {"role": "system", "content": "be brief"}
    assert dataset[0].prompt == [system, messages[0]]
    assert dataset[0].messages == [system, *messages]
    assert dataset[0].columns == {"id": 3}
    split = [{"prompt": messages[:1], "completion": messages[1:]}]
    assert load(options(path=jsonl("s.jsonl", split)), demonstrations=True)[0].messages == messages


def test_templates_columns_and_chat_shape_the_prompt():
    path = jsonl("q.jsonl", [{"question": "2+2", "answer": "4"}])
    renamed = load(options(path=path, columns={"prompt": "question", "completion": "answer"}))[0]
    assert (renamed.prompt, renamed.completion, renamed.columns["answer"]) == ("2+2", "4", "4")
    assert load(options(path=path, prompt_template="Q: {question} {{}}"))[0].prompt == "Q: 2+2 {}"
    chat = load(options(path=path, columns={"prompt": "question"}, chat=True))[0]
    assert chat.prompt == [{"role": "user", "content": "2+2"}]
    assert "`question`, `answer`" in error(DataError, path=path, prompt_template="{query}")
    assert "not the name of a column" in error(ConfigError, path=path, prompt_template="{question.__class__}")


def test_every_malformed_line_is_named():
    rows = [{"prompt": "a"}, "{", "[1]", {"prompt": ""}, {"prompt": 3}, {"prompt": [{"role": "user"}]}, {"prompt": "b"}]
    said = error(DataError, path=jsonl("bad.jsonl", rows)).splitlines()
    assert [line.split(": ")[0] for line in said] == [f"bad.jsonl:{n}" for n in (2, 3, 4, 5, 6)]
    assert "not valid JSON" in said[0] and "is empty" in said[2] and "content of message 0" in said[4]
    Path("utf.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert error(DataError, path="utf.jsonl").startswith("utf.jsonl:2: not UTF-8")
    Path("bad.csv").write_text("prompt,answer\na,1\nb\nc,1,2\n")
    said = error(DataError, path="bad.csv").splitlines()
    assert said == [
        "bad.csv:3: 1 fields, but the header has 2",
        "bad.csv:4: 3 fields, but the header has 2",
    ]
    many = error(DataError, path=jsonl("many.jsonl", ["{"] * 100)).splitlines()
    assert len(many) == 21 and "80 more" in many[-1]


def test_missing_columns_empty_datasets_and_unreadable_files_are_errors():
    path = jsonl("q.jsonl", [{"question": "a", "answer": "b"}])
    assert "no column `prompt` (columns: `question`, `answer`); set data.columns.prompt=COLUMN" in error(
        DataError, path=path
    )
    only_prompts = jsonl("p.jsonl", [{"prompt": "a"}])
    assert "no column `completion`" in error(DataError, path=only_prompts, demonstrations=True)
    assert "no rows" in error(DataError, path=jsonl("empty.jsonl", []))
    Path("x.parquet").write_text("no")
    assert "not a readable Parquet file" in error(DataError, path="x.parquet")
    Path("x.doc").write_text("no")
    assert "unknown kind of file" in error(DataError, path="x.doc")
    assert "no such file" in error(ConfigError, path="missing.jsonl")
    assert "must be the assistant's" in error(
        DataError, path=jsonl("u.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]), demonstrations=True
    )


def test_only_the_first_rows_are_read_with_a_limit():
    assert len(load(options(path=jsonl("d.jsonl", [ROWS[0], ROWS[1], "{"]), limit=2))) == 2


def test_each_epoch_is_another_permutation_and_depends_on_the_seed_alone():
    epochs = [[order(5, 7, 7 * epoch + i) for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    datasets._permutation.cache_clear()
    assert [order(5, 7, 7 + i) for i in range(7)] == epochs[1]
    assert [order(6, 7, i) for i in range(7)] != epochs[0]
    # Pinned: a resumed run must find the order of the run it continues.
    assert epochs[0] == PINNED


PINNED = [0, 1, 4, 2, 6, 3, 5]


def test_prompts_that_do_not_fit_are_named():
    dataset = load(options(path=jsonl("d.jsonl", ROWS)))
    datasets.check_lengths(dataset, lambda e: len(e.prompt), 8, "raise max_length")
    with pytest.raises(DataError, match=r"d.jsonl:2: 8 tokens, but only 7 fit; raise max_length"):
        datasets.check_lengths(dataset, lambda e: len(e.prompt), 7, "raise max_length")


def test_tasks_take_the_held_out_split_for_evaluation():
    task = options(task="arithmetic", options={"max_operand": 9})
    train, held_out = load(task, demonstrations=True), load(task, held_out=True)
    assert len(train) + len(held_out) == 100
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert train[0].columns["answer"] == train[0].completion
    assert "splits train and eval" in error(ConfigError, task="arithmetic", split="test")


def say(role: str, content: str) -> dict:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = say("user", "hi"), say("assistant", "ho"), say("assistant", "hu")


def test_pairs_are_texts_or_messages_and_the_prompt_may_be_what_both_begin_with():
    rows = [
        {"prompt": "hi", "chosen": "ho", "rejected": "hu", "margin": 2},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": "hu"},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
    ]
    with pytest.raises(DataError, match="p.jsonl:2: `chosen` and `rejected` must both be texts"):
        load(options(path=jsonl("p.jsonl", rows)), pairs=True)
    result = load(options(path=jsonl("p.jsonl", [rows[0], *rows[2:]]), system="s"), pairs=True)
    system = say("system", "s")
    assert [e.prompt for e in result] == [[system, ASKED], [system, ASKED], [system, ASKED, GOOD, ASKED]]
    assert [e.pair for e in result] == [("ho", "hu"), ([GOOD], [BAD]), ([GOOD], [BAD])]
    assert [e.margin for e in result] == [2.0, 0.0, 0.0]
    assert result[0].where == "p.jsonl:1"


def test_a_pair_without_a_preference_is_named():
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
        {"chosen": [ASKED, GOOD], "rejected": [say("user", "ha"), BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
        {"prompt": "a", "chosen": [GOOD], "rejected": [ASKED]},
    ]
    said = error(DataError, path=jsonl("bad.jsonl", rows), pairs=True).splitlines()
    assert [line.split(": ")[0] for line in said] == [f"bad.jsonl:{n}" for n in range(1, 7)]
    texts = (
        "are equal",
        "is empty",
        "finite number",
        "begin with the same",
        "the beginning of the other",
        "must be the assistant's",
    )
    assert all(text in line for text, line in zip(texts, said, strict=True))
    assert "no column `rejected`" in error(
        DataError, path=jsonl("c.jsonl", [{"prompt": "a", "chosen": "b"}]), pairs=True
    )
    assert "no column `prompt`" in error(
        DataError, path=jsonl("d.jsonl", [{"chosen": "ab", "rejected": "ac"}]), pairs=True
    )
