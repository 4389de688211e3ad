import json
import re
from pathlib import Path

import datasets as library
import pyarrow
import pyarrow.parquet
import pytest

from rl.config.data import DataOptions
from rl.data import datasets
from rl.data.datasets import load
from rl.data.drawing import order
from rl.data.drawing.order import shuffled
from rl.data.rows.files import Malformed, read_file
from rl.data.rows.forms import read_labelled
from rl.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**values) -> DataOptions:
    return DataOptions.model_validate(values)


def jsonl(name: str, rows: list) -> str:
    Path(name).write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return name


def parquet(name: str, rows: list[dict]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


def error(kind, **values) -> str:
    keywords = {
        key: values.pop(key) for key in ("demonstrations", "pairs", "held_out") if key in values
    }
    with pytest.raises(kind) as caught:
        load(options(**values), **keywords)
    return str(caught.value)


ROWS = [
    {"prompt": "1+1=", "completion": "2", "answer": "2"},
    {"prompt": 'a "b",\nc', "completion": "d", "answer": "é"},
]


def test_all_kinds_of_files_give_the_same_examples():
    Path("d.csv").write_text('prompt,completion,answer\n1+1=,2,2\n"a ""b"",\nc",d,é\n')
    Path("d.tsv").write_text('prompt\tcompletion\tanswer\n1+1=\t2\t2\n"a ""b"",\nc"\td\té\n')
    Path("d.json").write_text(json.dumps(ROWS))
    for name in (
        jsonl("d.jsonl", [ROWS[0], "", ROWS[1]]),
        "d.csv",
        "d.tsv",
        "d.json",
        parquet("d.parquet", ROWS),
    ):
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


def test_pictures_of_a_saved_dataset_are_not_decoded_for_a_model_of_text():
    features = library.Features(
        {"prompt": library.Value("string"), "shown": library.Image(decode=True)}
    )
    rows = [{"prompt": "a", "shown": {"bytes": b"no picture", "path": None}}] * 2
    library.Dataset.from_list(rows, features=features).save_to_disk("broken")
    [first, _] = load(options(path="broken"))
    assert first.columns["shown"]["bytes"] == b"no picture"


def test_rows_of_a_saved_dataset_that_the_library_cannot_read_are_errors(monkeypatch):
    library.Dataset.from_list(ROWS).save_to_disk("saved")

    def rows(self):
        yield ROWS[0]
        raise KeyError("a decoder")

    monkeypatch.setattr(library.Dataset, "__iter__", rows)
    assert "saved: no row after row 0 can be read: KeyError: 'a decoder'" in error(
        DataError, path="saved"
    )


@pytest.mark.parametrize(
    "name, content, expected",
    [
        (
            "r.json",
            {"prompt": ["a", "b"], "completion": ["c", "d"]},
            "one object with a list for each column",
        ),
        ("r.json", {"data": [{"prompt": "a"}]}, "its rows stand below the key 'data'"),
        ("r.jsonl.gz", {}, "a packed file; unpack it"),
        (
            "r.jsonl",
            {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
            "'gpt', here 'assistant'",
        ),
        (
            "r.jsonl",
            {"messages": [{"role": "user", "content": "a"}, {"role": "Assistant", "content": "b"}]},
            "'Assistant', here 'assistant'",
        ),
        ("r.jsonl", {"instruction": "a", "output": "b"}, "set data.columns.prompt=instruction"),
        ("r.jsonl", {"prompt": "a", "response": "b"}, "set data.columns.completion=response"),
        ("r.jsonl", {"story": "a"}, "set data.columns.prompt=COLUMN"),
    ],
)
def test_rows_of_other_forms_are_refused_with_what_to_type(name, content, expected):
    Path(name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=re.escape(expected)):
        load(options(path=name), demonstrations=True)


@pytest.mark.parametrize(
    "content", [{"messages": []}, {"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "a"}]
)
def test_a_file_with_one_object_is_a_row(content):
    Path("r.json").write_text(json.dumps(content))
    assert [row for _, row in read_file(Path("r.json"))] == [content]


def test_few_wide_rows_of_a_parquet_file_are_in_memory():
    pool = pyarrow.default_memory_pool()
    table = pyarrow.table({"prompt": [str(number) + "x" * 200_000 for number in range(300)]})
    pyarrow.parquet.write_table(
        table, "wide.parquet", compression="none", use_dictionary=False, write_batch_size=10
    )
    size = table.nbytes
    del table
    before, largest = pool.bytes_allocated(), 0
    for number, (_, row) in enumerate(read_file(Path("wide.parquet"))):
        largest = max(largest, pool.bytes_allocated() - before)
        assert row["prompt"].startswith(f"{number}x")
    assert number == 299 and largest < size / 2


def test_a_conversation_is_a_demonstration_of_its_last_answer():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    dataset = load(
        options(path=jsonl("m.jsonl", [{"messages": messages, "id": 3}]), system="be brief")
    )
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
    assert "not the name of a column" in error(
        ConfigError, path=path, prompt_template="{question.__class__}"
    )


def test_every_malformed_line_is_named():
    rows = [
        {"prompt": "a"},
        "{",
        "[1]",
        {"prompt": ""},
        {"prompt": 3},
        {"prompt": [{"role": "user"}]},
        {"prompt": "b"},
    ]
    said = error(DataError, path=jsonl("bad.jsonl", rows)).splitlines()
    assert [line.split(": ")[0] for line in said] == [f"bad.jsonl:{n}" for n in (2, 3, 4, 5, 6)]
    assert (
        "not valid JSON" in said[0] and "is empty" in said[2] and "content of message 0" in said[4]
    )
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
    assert (
        "no column `prompt` (columns: `question`, `answer`); set data.columns.prompt=question"
        in error(DataError, path=path)
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
        DataError,
        path=jsonl("u.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]),
        demonstrations=True,
    )


def test_only_the_first_rows_are_read_with_a_limit():
    assert len(load(options(path=jsonl("d.jsonl", [ROWS[0], ROWS[1], "{"]), limit=2))) == 2


def test_each_epoch_is_another_permutation_and_depends_on_the_seed_alone():
    epochs = [[shuffled(5, 7, 7 * epoch + i) for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    order._permutation.cache_clear()
    assert [shuffled(5, 7, 7 + i) for i in range(7)] == epochs[1]
    assert [shuffled(6, 7, i) for i in range(7)] != epochs[0]
    # Pinned: a resumed run must find the order of the run it continues.
    assert epochs[0] == PINNED


PINNED = [0, 1, 4, 2, 6, 3, 5]


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
    assert [e.prompt for e in result] == [
        [system, ASKED],
        [system, ASKED],
        [system, ASKED, GOOD, ASKED],
    ]
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


SYSTEM, OTHER = say("system", "be kind"), say("user", "ha")


def only(row: dict, **values):
    """Returns the example of a row, read by keywords of `load`."""
    keywords = {
        key: values.pop(key) for key in ("demonstrations", "pairs", "read") if key in values
    }
    return load(options(path=jsonl("one.jsonl", [row]), **values), **keywords)[0]


@pytest.mark.parametrize("prompt", ["hi", "hi\n", [ASKED]])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_an_answer_that_repeats_the_prompt_is_read_once(prompt, system):
    full = [*system, ASKED, GOOD]
    pair = only({"prompt": prompt, "chosen": full, "rejected": [*system, ASKED, BAD]}, pairs=True)
    assert [message["role"] for message in pair.prompt] == [
        *(each["role"] for each in system),
        "user",
    ]
    assert pair.pair == ([GOOD], [BAD])
    for form in ({"demonstrations": True}, {"read": read_labelled}):
        example = only({"prompt": prompt, "completion": full, "label": True}, **form)
        assert [message["role"] for message in example.messages] == [
            *(m["role"] for m in system),
            "user",
            "assistant",
        ]
        assert example.prompt == example.messages[:-1] and example.first == len(example.prompt)


def test_the_system_message_of_the_data_comes_before_that_of_the_options():
    row = {"prompt": "hi", "chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}
    assert only(row, pairs=True, system="be brief").prompt == [SYSTEM, ASKED]


def test_an_answer_goes_on_after_a_prompt_that_ends_with_the_assistant():
    example = only({"prompt": [ASKED, GOOD], "completion": [OTHER, BAD]}, demonstrations=True)
    assert example.messages == [ASKED, GOOD, OTHER, BAD]


def test_answers_that_neither_follow_the_prompt_nor_repeat_it_are_refused():
    rows = [
        {"prompt": "hi", "chosen": [OTHER, GOOD], "rejected": [OTHER, BAD]},
        {"prompt": [SYSTEM, ASKED], "chosen": [say("system", "x"), ASKED, GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [SYSTEM, ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [GOOD]},
    ]
    said = error(DataError, path=jsonl("bad.jsonl", rows), pairs=True).splitlines()
    texts = ("not the prompt's", "another system message", "the same system message", "are equal")
    assert [text in line for text, line in zip(texts, said, strict=True)] == [True] * 4, said
    completion = [{"prompt": "hi", "completion": [OTHER, GOOD]}]
    assert "data.columns.prompt=none" in error(
        DataError, path=jsonl("sft.jsonl", completion), demonstrations=True
    )
    conversations = load(
        options(path=jsonl("p.jsonl", rows[:1]), columns={"prompt": "none"}), pairs=True
    )
    assert conversations[0].prompt == [OTHER]


def test_messages_next_to_a_prompt_are_the_demonstration():
    row = {"prompt": "hi", "prompt_id": "7", "messages": [ASKED, GOOD]}  # ultrachat_200k
    assert only(row, demonstrations=True).messages == [ASKED, GOOD]
    assert only(row).prompt == "hi"


def test_rows_of_sharegpt_are_read():
    turns = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "ho"},
    ]
    assert only({"conversations": turns}, demonstrations=True).messages == [SYSTEM, ASKED, GOOD]
    row = {
        "conversations": turns[:2],
        "chosen": turns[2],
        "rejected": {"from": "gpt", "value": "hu"},
    }
    pair = only(row, pairs=True)
    assert (pair.prompt, pair.pair) == ([SYSTEM, ASKED], ([GOOD], [BAD]))
    unknown = [{"conversations": [{"from": "bard", "value": "hi"}]}]
    assert "from 'bard'; there are human" in error(DataError, path=jsonl("s.jsonl", unknown))


def test_calls_of_tools_are_read_in_the_form_of_openai_and_of_arrow():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        say("tool", "3"),
        GOOD,
    ]
    for path in (
        jsonl("t.jsonl", [{"messages": messages}]),
        parquet("t.parquet", [{"messages": messages}]),
    ):
        example = load(options(path=path), demonstrations=True)[0]
        assert example.messages[0] == ASKED and "tool_calls" not in example.messages[3]
        assert example.messages[1]["content"] == ""
        assert example.messages[1]["tool_calls"][0]["function"] == {
            "name": "add",
            "arguments": {"a": 1, "b": 2},
        }
    for wrong in ("{", "[1]"):
        call["function"]["arguments"] = wrong
        assert "`arguments` of add" in error(
            DataError, path=jsonl("w.jsonl", [{"messages": messages}])
        )
    messages[1]["tool_calls"] = {"name": "add"}
    assert "`tool_calls` must be a list" in error(
        DataError, path=jsonl("w.jsonl", [{"messages": messages}])
    )


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss_mask": 0}])
def test_a_turn_with_weight_0_keeps_it(mark):
    example = only(
        {"messages": [ASKED, GOOD | mark, ASKED, GOOD | {"weight": 1}]}, demonstrations=True
    )
    assert example.messages == [ASKED, GOOD | {"weight": 0}, ASKED, GOOD]
    wrong = [
        {"messages": [ASKED | {"weight": 1}, GOOD]},
        {"messages": [ASKED, GOOD | {"weight": 0.5}]},
    ]
    said = error(DataError, path=jsonl("w.jsonl", wrong)).splitlines()
    assert "only turns of the assistant" in said[0] and "must be 0 or 1, got 0.5" in said[1]


def test_rows_that_nothing_can_read_are_named():
    deep = "[" * 101 + "]" * 101
    rows = [
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "answer": {"b": ["\\udc00"]}}',
        '{"prompt": "a", "n": ' + "9" * 5000 + "}",
        '{"prompt": "a", "n": ' + deep + "}",
        '{"prompt": "a", "n": ' + "[" * 10**5 + "]" * 10**5 + "}",
        '{"prompt": "\\ud83d\\ude00"}',
    ]
    said = error(DataError, path=jsonl("bad.jsonl", rows)).splitlines()
    assert [line.split(": ")[0] for line in said] == [f"bad.jsonl:{n}" for n in range(1, 6)]
    texts = ("surrogate", "surrogate", "4,300 digits", "nested more than 100", "nested too deeply")
    assert [text in line for text, line in zip(texts, said, strict=True)] == [True] * 5, said
    for row, text in zip(rows[2:5:2], (texts[2], texts[4]), strict=True):
        Path("bad.json").write_text(f"[{row}]")
        assert text in error(DataError, path="bad.json")


def test_a_csv_file_with_long_cells_odd_characters_and_empty_lines_is_read():
    long = "x" * 140_000
    Path("d.csv").write_text(f'prompt,answer\n{long},1\n\n"a \ufffd\n b",2\n', encoding="utf-8")
    dataset = load(options(path="d.csv"))
    assert [example.prompt for example in dataset] == [long, "a \ufffd\n b"]
    Path("d.csv").write_bytes('prompt,answer\na,1\n"caf\u00e9\nb",2\nc,3\n'.encode("latin-1"))
    assert (
        error(DataError, path="d.csv")
        == "d.csv:3: not UTF-8 (byte 0xe9 at place 4); save the file as UTF-8"
    )
    Path("d.csv").write_text("prompt,answer,answer\na,1,2\n")
    assert "d.csv:1: the header has the column `answer` twice" in error(DataError, path="d.csv")
    Path("d.csv").write_text('"prompt"x,answer\na,1\n')
    assert "d.csv:1: not valid CSV" in error(DataError, path="d.csv")
    Path("d.csv").write_text('prompt,answer\na,1\n"b,2\nc,3\n')
    assert "d.csv:3: not valid CSV" in error(DataError, path="d.csv")
    Path("d.json").write_text('[\n {"prompt": "a"},\n]')
    assert "d.json: not valid JSON" in error(DataError, path="d.json") and "line 3" in error(
        DataError, path="d.json"
    )


TYPED = [
    {"prompt": "a", "answer": "007", "day": "2024-01-31", "none": "null", "float": "1e5"},
    {"prompt": "b", "answer": "12", "day": "2024-02-01", "none": "NA", "float": "2"},
]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.tsv", "d.parquet"])
def test_texts_stay_texts_in_a_file_and_in_a_folder(name):
    import csv

    Path("folder").mkdir()
    file = Path("folder") / name
    if file.suffix == ".parquet":
        parquet(str(file), TYPED)
    elif file.suffix in (".json", ".jsonl"):
        file.write_text(
            json.dumps(TYPED) if file.suffix == ".json" else "\n".join(map(json.dumps, TYPED))
        )
    else:
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(
                opened, TYPED[0], delimiter="\t" if file.suffix == ".tsv" else ","
            )
            writer.writeheader()
            writer.writerows(TYPED)
    for path in (str(file), "folder"):
        assert [{"prompt": e.prompt, **e.columns} for e in load(options(path=path))] == TYPED, path


def test_all_files_of_a_folder_are_read_each_in_its_own_form():
    for folder in ("both/a", "splits", "mixed"):
        Path(folder).mkdir(parents=True)
    jsonl("both/rows.jsonl", [{"prompt": "a"}])
    Path("both/a/more.csv").write_text("prompt\nb\n")
    Path("both/.hidden.jsonl").write_text("{")
    Path("both/dataset_info.json").write_text("{}")
    assert [(e.prompt, e.where) for e in load(options(path="both"))] == [
        ("b", "both/a/more.csv:2"),
        ("a", "both/rows.jsonl:1"),
    ]
    assert "no split 'test', there are train" in error(DataError, path="both", held_out=True)
    jsonl("splits/train-00000-of-00002.jsonl", [{"prompt": "a"}])
    jsonl("splits/train-00001-of-00002.jsonl", [{"prompt": "b"}])
    Path("splits/data").mkdir()
    jsonl("splits/data/train_hard-00000-of-00001.jsonl", [{"prompt": "c"}])
    jsonl("splits/dev.jsonl", [{"prompt": "d"}])
    assert [e.prompt for e in load(options(path="splits"))] == ["a", "b"]
    assert [
        load(options(path="splits", split=name))[0].prompt
        for name in ("train_hard", "dev", "validation")
    ] == [*"cdd"]
    jsonl("splits/extra.jsonl", [{"prompt": "e"}])
    assert "extra.jsonl belongs to no split" in error(DataError, path="splits")
    jsonl("mixed/a.jsonl", [{"prompt": "a"}])
    Path("mixed/b.jsonl.gz").write_bytes(b"")
    assert "a.jsonl and b.jsonl.gz; unpack the files" in error(DataError, path="mixed")


def test_tools_of_a_row_of_messages_reach_the_template():
    from rl.data.encoding import ExampleEncoder
    from rollout.text.tokenizer import load_tokenizer

    Path("chat.jinja").write_text(
        "{{ tools | length if tools else 0 }}{% for m in messages %}{{ m.content }}<eos>{% endfor "
        "%}"
    )
    tokenizer = load_tokenizer("bytes", chat_template="chat.jinja")
    encoder = ExampleEncoder(tokenizer)
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    for tools, count in (([tool], 1), (json.dumps([tool, tool]), 2), (None, 0), ([], 0)):
        example = only({"messages": [ASKED, GOOD], "tools": tools}, demonstrations=True)
        assert (
            tokenizer.decode(encoder.demonstration(example, "assistant")[0].ids)
            == f"{count}hi<eos>ho<eos>"
        )
        assert tokenizer.decode(encoder.prompt(example)[0]) == f"{count}hi<eos>"
        pair = only(
            {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "tools": tools}, pairs=True
        )
        assert tokenizer.decode(encoder.answer(pair, pair.pair[1]).ids) == f"{count}hi<eos>hu<eos>"
    assert only({"messages": [ASKED, GOOD], "tools": [tool]}).tools == [
        {"type": "function", "function": {"name": "add"}}
    ]
    assert only({"messages": [ASKED], "tools": ""}).tools is None
    assert only({"prompt": "hi", "tools": "hammer"}).columns == {"tools": "hammer"}
    wrong = jsonl("w.jsonl", [{"messages": [ASKED, GOOD], "tools": ["hammer"]}])
    assert "`tools` must be a list of JSON schemas" in error(DataError, path=wrong)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompts_of_a_file_are_lines_and_nothing_else(name):
    from rl.data.prompts import read_prompts

    lines = ["a\u2028b", "c\x0bd", "e"]
    texts = (
        lines
        if name.endswith(".txt")
        else [json.dumps({"prompt": text}, ensure_ascii=False) for text in lines]
    )
    Path(name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    assert [(prompt.where, prompt.row["prompt"]) for prompt in read_prompts(name)] == [
        (f"{name}:{number}", text) for number, text in enumerate(lines, start=1)
    ]
    Path("p.jsonl").write_text('{"prompt": "\\ud800"}')
    with pytest.raises(DataError, match="p.jsonl:1: a text holds half of a surrogate pair"):
        read_prompts("p.jsonl")


def test_a_column_that_rewards_cannot_take_is_named_with_its_row():
    import datetime
    from decimal import Decimal

    from rl.config.data import RewardSettings

    Path("own.py").write_text(
        "def near(completions, day): ...\ndef any_column(completions, **columns): ..."
    )
    near = RewardSettings.model_validate({"functions": ["own.py:near"]})
    for value, kind in (
        (datetime.date(2024, 1, 31), "date"),
        (Decimal("1.5"), "Decimal"),
        ([b"a"], "bytes"),
    ):
        rows = [{"prompt": "a", "day": None}, {"prompt": "b", "day": value}]
        examples = load(options(path=parquet("d.parquet", rows))).examples
        [text] = datasets.column_problems(near, examples)
        assert (
            text.startswith("d.parquet: row 1: column 'day'")
            and f"is a {kind}; rewards receive text" in text
        )
        open_ended = RewardSettings.model_validate({"functions": ["own.py:any_column"]})
        assert not list(datasets.column_problems(open_ended, examples))
    examples = load(options(path=jsonl("d.jsonl", [{"prompt": "a"}]))).examples
    assert "it needs 'day'" in next(datasets.column_problems(near, examples))


def test_columns_that_are_null_in_a_row_of_another_form_are_not_there():
    """Arrow gives every row all columns of a file."""
    rows = [
        {"prompt": None, "completion": None, "messages": [ASKED, GOOD], "conversations": None},
        {"prompt": "hi", "completion": "ho", "messages": None, "conversations": None},
        {
            "prompt": None,
            "completion": None,
            "messages": None,
            "conversations": [{"from": "human", "value": "hi"}],
        },
    ]
    messages, texts, shared = load(options(path=jsonl("n.jsonl", rows)))
    assert (messages.messages, texts.prompt, shared.prompt) == ([ASKED, GOOD], "hi", [ASKED])
    labelled = {"prompt": "a", "completion": None, "label": None, "chosen": "b", "rejected": "c"}
    assert only(labelled, read=read_labelled).pair == ("b", "c")
    missing = jsonl("m.jsonl", [{"q": None, "x": 1}])
    assert "`q` is null" in error(DataError, path=missing, prompt_template="{q}")


def test_a_completion_of_messages_is_trained_on_without_the_turns_of_its_prompt():
    from rl.data.encoding import ExampleEncoder
    from rollout.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("bytes")
    for completion in ("hu", [BAD]):
        example = only(
            {"prompt": [ASKED, GOOD, OTHER], "completion": completion}, demonstrations=True
        )
        [(ids, mask, _)] = ExampleEncoder(tokenizer).demonstration(example, "assistant")
        assert (
            tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
            == "hu<eos>"
        )
        assert example.prompt == [ASKED, GOOD, OTHER]


def test_nulls_that_a_text_of_json_writes_stay():
    call = {"function": {"name": "add", "arguments": '{"limit": null}', "other": None}, "id": None}
    example = only(
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    assert example.messages[1]["tool_calls"] == [
        {"function": {"name": "add", "arguments": {"limit": None}}}
    ]
    empty = {"role": "assistant", "content": "ho", "tool_calls": []}
    assert only({"messages": [ASKED, empty]}).messages == [ASKED, GOOD]


def test_prompts_are_rows_of_any_form_of_data_and_lines_of_texts():
    from rl.data.prompts import read_prompts

    rows = [{"prompt": "a, b"}, {"prompt": "c"}]
    Path("p.csv").write_text('prompt\n"a, b"\nc\n')
    Path("p.json").write_text(json.dumps(rows))
    Path("p.txt").write_text("a, b\nc\n")
    for name in ("p.csv", "p.json", "p.txt", parquet("p.parquet", rows), jsonl("p.jsonl", rows)):
        assert [prompt.row["prompt"] for prompt in read_prompts(name)] == ["a, b", "c"], name
    messages = [{"role": "user", "content": "a"}]
    assert read_prompts(jsonl("m.jsonl", [{"messages": messages}]))[0].row["prompt"] == messages
    Path("q.csv").write_text("question\na\n")
    with pytest.raises(
        DataError, match=r"q.csv:2: not an object with `prompt`.*\(columns: question\)"
    ):
        read_prompts("q.csv")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_of_json_that_are_not_finite_are_refused_by_row_and_column(tmp_path, number):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "1+1=", "level": 1.5}\n{"prompt": "2+2=", "level": [{"x": ' + number + "}]}\n"
    )
    rows = dict(read_file(file))
    assert rows[f"{file}:1"] == {"prompt": "1+1=", "level": 1.5}
    wrong = rows[f"{file}:2"]
    assert isinstance(wrong, Malformed)
    assert wrong.text.startswith("column `level` holds ")
