"""The tasks of `rl eval`: their files, prompts from rows in the columns of their sources, and what
their rewards make of answers."""

import itertools
import json
import re
from pathlib import Path

import answer_strings
import pytest

from rewards import load
from rewards.registry import answer_of
from rl.data.encoding import ExampleEncoder
from rl.errors import ConfigError, DataError
from rl.evaluation import prepare, task
from rl.evaluation.flags import EvalFlags, with_flags
from rl.evaluation.model import fingerprint, identity
from rl.evaluation.own_file import own_task
from rollout import SamplingParams
from rollout.text.tokenizer import load_tokenizer

ROWS = Path(__file__).parents[1] / "fixtures" / "tasks"
FOLLOWING = [
    "Rain falls on the roof all night.",
    "<<Colours>>\n* red\n* blue",
    "Je préfère le thé au café, et vous, que buvez-vous le matin ?",
    "TEA IS GOOD FOR YOU AND FOR YOUR FRIENDS. DRINK THE TEA WHEN IT IS WARM!",
    '```json\n{"answer": 42}\n```',
]
"""Completions that follow the five rows of IFEval."""


@pytest.fixture(scope="module")
def encoder():
    return ExampleEncoder(load_tokenizer("bytes"))


def prepared(name, encoder, **flags):
    flags = EvalFlags(data=str(ROWS / Path(name).stem), **flags)
    chosen = with_flags(task.read(name), flags)
    return prepare.prepared(Path(name).stem, chosen, flags, encoder, SamplingParams(n=1))


def gold(name, number, row, example):
    """A completion that answers a row rightly."""
    if name == "gsm8k":
        return row["answer"]
    if name == "math500":
        return row["solution"]
    if name.startswith("aime"):
        return f"so the answer is $\\boxed{{{row.get('answer', row.get('Answer'))}}}$."
    if name == "ifeval":
        return FOLLOWING[number]
    letter = example.columns["answer"]
    return f"the answer is ({letter})." if name == "mmlu_pro" else f"Thus:\n**Answer: {letter}**"


def rewards_of(ready, completions):
    """score -> rewards of one completion for each problem."""
    result = {}
    examples = [problem.example for problem in ready.problems]
    for name, score in ready.task.scores.items():
        names = set().union(*(example.columns for example in examples))
        columns = {key: [example.columns.get(key) for example in examples] for key in names}
        function = load(score.reward)
        accepted = function.__code__.co_varnames[: function.__code__.co_argcount]
        columns = {key: value for key, value in columns.items() if key in accepted}
        prompts = [example.prompt for example in examples]
        result[name] = function(prompts, completions, **columns, **score.options)
    return result


@pytest.mark.parametrize("name", task.names())
def test_gold_answers_are_right_and_others_are_wrong(name, encoder):
    ready = prepared(name, encoder, few_shot=1 if name == "mmlu_pro" else None)
    split = ready.task.split
    rows = [json.loads(line) for line in (ROWS / name / f"{split}.jsonl").read_text().splitlines()]
    assert len(ready.problems) == len(rows) == 5
    examples = [problem.example for problem in ready.problems]
    right = [gold(name, *each) for each in zip(range(5), rows, examples, strict=True)]
    for score, values in rewards_of(ready, right).items():
        assert values == [1.0] * 5, score
    for values in rewards_of(ready, right[1:] + right[:1]).values():
        assert sum(values) < 5
    for score, values in rewards_of(ready, ["I cannot say, or can I?"] * 5).items():
        assert max(values) < 1, score
    assert len(set(ready.keys)) == 5
    assert task.read(name).rows >= 30


def test_a_chat_prompt_has_a_turn_for_each_shot(encoder):
    messages = prepared("gsm8k", encoder, few_shot=2).problems[0].example.prompt
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"].startswith("Solve each problem step by step.")
    assert messages[0]["content"].endswith("How many pens does he have?\nAnswer:")
    assert messages[1]["content"].endswith("12 pens.\n#### 12")
    assert messages[2]["content"].startswith("Question: A book has 90 pages")


def test_a_plain_prompt_has_the_shots_before_it(encoder):
    ready = prepared("gsm8k", encoder, few_shot=1, chat=False)
    text = ready.problems[1].example.prompt
    assert text == (
        "Solve each problem step by step. End each solution with a line of #### and the number "
        "alone.\n\nQuestion: Tom has 3 boxes of 4 pens. How many pens does he have?\nAnswer: He "
        "has 3*4=<<3*4=12>>12 pens.\n#### 12\n\nQuestion: A bike of $1,250 costs $200 less in a "
        "sale. What does it cost?\nAnswer:"
    )
    assert ready.problems[1].ids == encoder.tokenizer.encode(text)
    assert ready.params.stop == ("Question:",)
    assert prepared("gsm8k", encoder).params.stop == ()  # a chat model ends its turn
    named = prepared("gsm8k", encoder, stop=("END",))
    assert named.params.stop == ("END",) and named.settings["stop"] == ["END"]
    plain = prepared("gsm8k", encoder, stop=("END",), chat=False)
    assert plain.params.stop == ("Question:", "END")


def test_shots_of_mmlu_pro_are_of_the_category_of_the_question(encoder):
    ready = prepared("mmlu_pro", encoder, few_shot=1, chat=False)
    texts = [problem.example.prompt for problem in ready.problems]
    shots = ["What falls", "What falls", "What is 2 + 2", "What is 2 + 2", "What sorts"]
    for text, shot in zip(texts, shots, strict=True):
        first, question = text.split("\n\nQuestion:\n")[1:]
        assert first.startswith(shot) and "The answer is (" in first
        assert question.endswith("\nAnswer: Let's think step by step.")
    assert texts[2].rpartition("Options:\n")[2].startswith("A. 21\nB. 27\n")
    assert "J. 83\nAnswer" in texts[2]
    with pytest.raises(DataError, match="no 2 shots with category 'computer science'"):
        prepared("mmlu_pro", encoder, few_shot=2)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("gsm8k", {"chat": False, "few_shot": 0}, {"chat": True, "few_shot": 2}),
        ("mmlu_pro", {"chat": False, "few_shot": 1}, {"chat": True, "few_shot": 0}),
        ("gpqa", {"seed": 0}, {"seed": 1}),
    ],
)
def test_a_problem_has_the_same_key_however_it_is_asked(name, one, other, encoder):
    first = prepared(name, encoder, **one)
    second = prepared(name, encoder, **other)
    assert first.keys == second.keys and len(set(first.keys)) == 5
    assert first.settings["rows"] == second.settings["rows"]
    assert first.settings["prompts"] != second.settings["prompts"]


def test_a_row_of_ones_own_has_the_same_key_however_it_is_asked(tmp_path, encoder):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1?", "answer": "{n + 1}"}}\n' for n in range(4)))
    keys = []
    for more in ({}, {"chat": True, "system": "Be brief."}, {"few_shot": 1}):
        flags = EvalFlags(data=str(file), rewards=("numeric_answer",), **more)
        own = with_flags(own_task(str(file), flags), flags)
        keys.append(prepare.prepared("own", own, flags, encoder, SamplingParams(n=1)).keys)
    assert keys[0] == keys[1] and keys[0][1:] == keys[2]


def test_options_of_gpqa_are_shuffled_by_the_seed(encoder):
    def letters(seed):
        examples = [each.example for each in prepared("gpqa", encoder, seed=seed).problems]
        lines = [each.prompt[-1]["content"].splitlines() for each in examples]
        answers = [each.columns["answer"] for each in examples]
        rights = ["carbon", "9.5e15 m", "in the nucleus", "0", "carbon dioxide"]
        for shown, answer, right in zip(lines, answers, rights, strict=True):
            assert f"{answer}) {right}" in shown
            assert [line[0] for line in shown if line[1:2] == ")"] == [*"ABCD"]
        return answers

    assert letters(0) == letters(0)
    assert len({tuple(letters(seed)) for seed in range(4)}) > 1
    assert len({answer for seed in range(6) for answer in letters(seed)}) == 4


STRINGS = {
    "STRICT_NUMBERS": ("numeric_answer", task.read("gsm8k").scores["strict"].options),
    "LAST_NUMBERS": ("numeric_answer", {}),
    "BOXED": ("math", {}),
    "STRICT_LETTERS": ("choice_answer", task.read("mmlu_pro").scores["strict"].options),
    "LETTERS": ("choice_answer", {}),
}


@pytest.mark.parametrize("table", STRINGS)
def test_answers_are_read_from_completions(table):
    answer = answer_of(*STRINGS[table])
    assert answer is not None
    rows = getattr(answer_strings, table)
    assert [(text, answer(text)) for text, _ in rows] == rows


def first_match(pattern, text):
    """The filter `regex` of lm-eval 0.4.13 with group_select 0."""
    matches = re.findall(pattern, text)
    return matches[0].strip() if matches else "[invalid]"


def plain_number(text):
    """What the metric of its task gsm8k compares: texts without these characters."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text


ENDS = ("", ".", ",", " dollars", "!", "%", "\n", " (rounded)", "**", "\n\nSo: #### 7")


def test_the_strict_score_of_gsm8k_is_that_of_lm_eval():
    """Except for the value of a number: 12.00 is 12 here, and another text there."""
    score = task.read("gsm8k").scores["strict"]
    heads = ("It costs $5.\n", "", "3 + 4 = 7\n**")
    forms = ("#### {}", "####{}", "####  {}", "#### ${}", "The answer is {}", "#### so {}")
    numbers = ("18", "1,080", "-7", "0", "2.5", "3,000,000", "1e3", "x", "6/2")
    parts = itertools.product(heads, forms, numbers, ENDS)
    texts = [head + form.format(number) + end for head, form, number, end in parts]
    for right in ("18", "1080", "-7", "0", "2.5", "3000000", "7", "1", "6"):
        given = [first_match(r"#### (\-?[0-9\.\,]+)", text) for text in texts]
        theirs = [plain_number(each) == plain_number(f"#### {right}") for each in given]
        scores = load(score.reward)([""] * len(texts), texts, [right] * len(texts), **score.options)
        ours = [each == 1 for each in scores]
        assert [pair for pair in zip(texts, theirs, ours, strict=True) if pair[1] != pair[2]] == []
        assert 20 < sum(ours) < len(texts)


def test_the_strict_score_of_mmlu_pro_is_that_of_lm_eval():
    score = task.read("mmlu_pro").scores["strict"]
    forms = (
        *("the answer is ({})", "answer is {}", "The answer is: {}", "the answer is not {}"),
        *(
            "the answer is {}. No, the answer is (A)",
            "the answer is {}orrect",
            "answer is(B) or {}",
        ),
        *("the answer is **{}**", "({})", "the answer is I think ({})", "The Answer is ({})"),
    )
    texts = [form.format(letter) + end for form in forms for letter in "ABCIJKZ" for end in ENDS]
    for right in "ABCIJ":
        theirs = [first_match(r"answer is \(?([ABCDEFGHIJ])\)?", text) == right for text in texts]
        scores = load(score.reward)([""] * len(texts), texts, [right] * len(texts), **score.options)
        assert [each == 1 for each in scores] == theirs
        assert 20 < sum(theirs) < len(texts)


def test_there_are_two_hundred_strings():
    assert sum(len(getattr(answer_strings, table)) for table in STRINGS) >= 200


def test_a_reward_agrees_with_the_answer_that_it_tells():
    """Whatever a completion answers, it is right where the row has this answer."""
    for table, (name, options) in STRINGS.items():
        rows = [row for row in getattr(answer_strings, table) if row[1] is not None]
        texts, answers = map(list, zip(*rows, strict=True))
        scores = load(name)([""] * len(rows), texts, answer=answers, **options)
        wrong = [row for row, score in zip(rows, scores, strict=True) if score != 1]
        assert wrong == [], table


OWN = """about: own rows
source: {source}
columns: {{question: Frage}}
prompt: "{{{{ question }}}}"
answer: "{{{{ Antwort }}}}"
scores: {{exact: exact_answer}}
"""


def test_a_task_of_ones_own_is_a_file(tmp_path, encoder):
    (tmp_path / "rows.jsonl").write_text('{"Frage": "1+1?", "Antwort": 2}\n')
    file = tmp_path / "own.yml"
    file.write_text(OWN.format(source=tmp_path / "rows.jsonl"))
    ready = prepare.prepared("own", task.read(str(file)), EvalFlags(), encoder, SamplingParams(n=1))
    assert ready.problems[0].example.prompt == [{"role": "user", "content": "1+1?"}]
    assert rewards_of(ready, ["<answer>2</answer>"]) == {"exact": [1.0]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("about: own rows\n", "", "about: this key is required"),
        ("prompt:", "promt:", r"own.yml:4: promt: unknown key \(nearest: prompt"),
        ("question }}", "question }", "prompt: no Jinja template"),
        ("exact_answer", "exact_anser", "nearest: exact_answer"),
        ("exact_answer}", "{reward: exact_answer, options: {strp: x}}}", "no option 'strp'"),
        ("scores:", "samples: 0\nscores:", "samples: must be greater than or equal to 1, got 0"),
        ("scores:", "shots: {split: test, target: x}\nscores:", "from another split"),
        ("{exact: ", "{low: ", "'low' is a number of every evaluation"),
        ("scores:", "choices: {right: Antwort}\nscores:", "`right` and `wrong` go together"),
        ("scores:", "choices: {}\nscores:", "exactly one of `options` and `right`"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_line(tmp_path, old, new, message):
    text = OWN.format(source="rows.jsonl")
    assert old in text
    file = tmp_path / "own.yml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        task.read(str(file))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Frage}", "Question}", r"rows.jsonl:1: no column 'Question' \(columns: Frage, Antwort\)"),
        ("{{ Antwort", "{{ Antwrt", "'Antwrt' is undefined"),
        ("{{ question", "{{ question.__class__.__mro__", "unsafe"),
        ("{{ question", "{{ 1 // 0", "ZeroDivisionError"),
    ],
)
def test_rows_that_a_task_cannot_read_are_refused(tmp_path, encoder, old, new, message):
    (tmp_path / "rows.jsonl").write_text('{"Frage": "1+1?", "Antwort": 2}\n')
    text = OWN.format(source=tmp_path / "rows.jsonl")
    assert old in text
    file = tmp_path / "own.yml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        prepare.prepared("own", task.read(str(file)), EvalFlags(), encoder, SamplingParams(n=1))


def test_without_a_network_the_error_says_what_to_type(encoder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        prepare.prepared("math500", task.read("math500"), EvalFlags(), encoder, SamplingParams(n=1))
    assert "hf download HuggingFaceH4/MATH-500 --repo-type dataset --revision 6e4ed1a2" in str(
        error.value
    )
    assert "--data MATH-500" in str(error.value)


def test_one_file_has_no_shots(encoder):
    file = str(ROWS / "gsm8k" / "test.jsonl")
    flags = EvalFlags(data=file)
    with pytest.raises(DataError, match="--few-shot 0"):
        prepare.prepared("gsm8k", task.read("gsm8k"), flags, encoder, SamplingParams(n=1))
    flags = EvalFlags(data=file, few_shot=0, limit=2)
    ready = prepare.prepared("gsm8k", task.read("gsm8k"), flags, encoder, SamplingParams(n=1))
    assert len(ready.problems) == 2
    assert [each.example.columns["answer"] for each in ready.problems] == ["45", "1,050"]


def test_a_split_without_a_shot_is_refused(tmp_path, encoder):
    for split, rows in (
        ("test", '{"Frage": "1+1?", "Antwort": 2, "kind": "sum"}\n'),
        ("train", ""),
    ):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    shots = "shots: {split: train, count: 1, target: x, same: kind}\n"
    file = tmp_path / "own.yml"
    file.write_text(OWN.format(source=tmp_path) + shots)
    with pytest.raises(DataError, match="no 1 shots with kind 'sum'"):
        prepare.prepared("own", task.read(str(file)), EvalFlags(), encoder, SamplingParams(n=1))


def test_weights_have_one_name_however_their_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    paths = ("runs/a", "./runs/a/", str(tmp_path / "runs" / "a"))
    assert {str(identity(each, tmp_path, "7", "float32")["name"]) for each in paths} == {"runs/a"}
    assert identity("org/name", tmp_path, "7", "float32")["name"] == "org/name"


def test_weights_are_told_apart_by_their_content(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytearray(3_000_000)
    file.write_bytes(content)
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("other texts do not count")
    assert fingerprint(tmp_path) == first
    step = len(content) // 256  # a block of each step is read
    content[5 * step + 3] = 1
    file.write_bytes(content)
    assert fingerprint(tmp_path) != first
    (tmp_path / "config.json").write_text("{}")
    single = tmp_path / "x.gguf"
    single.write_bytes(b"GGUF")
    assert fingerprint(single) != fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"options": "yes or no", "right": 0}, "`options` is no list of options"),
        ({"options": ["yes", "no"], "right": 2}, "`right` is 2, of 2 options"),
        ({"options": ["yes", "no"], "right": None}, "`right` is no number of an option"),
    ],
)
def test_options_that_are_no_list_are_refused(row, message, tmp_path, encoder):
    """The letters of a text would be its options."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"Frage": "?", **row}) + "\n")
    text = OWN.format(source=file).replace('answer: "{{ Antwort }}"\n', "")
    own = tmp_path / "own.yml"
    own.write_text(text + "choices: {options: options, right_index: right}\n")
    with pytest.raises(DataError, match=message):
        prepare.prepared("own", task.read(str(own)), EvalFlags(), encoder, SamplingParams(n=1))
