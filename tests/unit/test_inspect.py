"""The checks of `rl inspect`: each with data that fails it, and none with the shipped
configurations."""

import json
from pathlib import Path

import pytest
from oracles import configuration, write_weight_file

from rl.commands import cli
from rl.data.encoding import ExampleEncoder
from rl.data.inspect import Refused, end_of_turn_problem, inspect
from rl.data.prompts import Prompt, problems
from rl.errors import DataError
from rl.run.health.start_checks import start_checks
from rl.run.load import load
from rollout.text.tokenizer import CHAT_TEMPLATE, byte_level, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TURNS = CHAT_TEMPLATE.replace("message['content'] + eos_token", "message['content'] + '<|end|>'")
FORGETS = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' and not loop.last -%}
{{- '<|assistant|>' + message['content'].split('#')[-1] + eos_token -}}
{%- else -%}{{- '<|' + message['role'] + '|>' + message['content'] + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
SPACED = CHAT_TEMPLATE.replace(
    "message['content'] + eos_token", "' ' + message['content'] + eos_token"
)
NUMBERED = [
    {"prompt": f"{n}+{n}=", "completion": str(2 * n), "answer": str(2 * n)} for n in range(12)
]


@pytest.fixture
def inspected(tmp_path):
    """Writes rows and a template, and returns the findings (check, level) of a run on them."""

    def findings(
        rows, *overrides, template=None, stages=("sft",), model="tiny-deepseek", tokenizer="bytes"
    ):
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        values = {
            "model": {"source": model, "overrides": {"vocab_size": 320}},
            "tokenizer": {"source": tokenizer},
            "data": {"path": str(tmp_path / "rows.jsonl")},
            "rewards": {"functions": ["exact_answer"], "workers": 1},
            "max_length": 64,
            "stages": [
                {
                    "algorithm": name,
                    "steps": 1,
                    "prompts_per_step": 1,
                    "sampling": {"max_new_tokens": 8},
                }
                for name in stages
            ],
        }
        if template:
            (tmp_path / "template.jinja").write_text(template)
            values["tokenizer"]["chat_template"] = str(tmp_path / "template.jinja")
        (tmp_path / "run.yml").write_text(json.dumps(values))
        config = load([tmp_path / "run.yml"], list(overrides))
        return inspect(config, rewards=False).faults

    return findings


def levels(findings, check):
    return [each.level for each in findings if each.check == check]


def test_good_rows_have_no_warning(inspected):
    findings = inspected(NUMBERED, stages=("sft", "grpo"))
    assert {each.level for each in findings} == {"note"}
    assert [each.text for each in findings] == [
        "37% of the tokens are trained on",
        "weights: random",
    ]


def test_1_a_beginning_of_sequence_inside_a_prompt(inspected):
    assert levels(inspected([{"prompt": "a<bos>b", "completion": "c"}]), 1) == ["refuse"]


MARKED = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- bos_token + 'system\nYou are helpful' + eos_token + '\n' -}}
{%- endif -%}
{{- bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- bos_token + 'assistant\n' -}}{%- endif -%}
"""
RENDERED = "<bos>system\nBe brief<eos>\n<bos>user\n1+1=<eos>\n<bos>assistant\n"
LONG = "max_length=256"


def test_1_a_template_that_opens_turns_with_the_beginning_of_sequence(inspected):
    stages = ("sft", "grpo")
    findings = inspected(NUMBERED, "data.chat=true", LONG, template=MARKED, stages=stages)
    assert {each.level for each in findings} == {"note"}
    conversations = [turns("a", "b", f"{n}", "c") for n in range(3)]
    assert [
        each.message()
        for each in inspected(conversations, LONG, template=MARKED)
        if each.level != "note"
    ] == []
    pairs = [{"prompt": f"{n}+1=", "chosen": "2", "rejected": "3"} for n in range(3)]
    pairs = inspected(pairs, "data.chat=true", LONG, template=MARKED, stages=("dpo",))
    assert {each.level for each in pairs} == {"note"}


def test_1_a_marker_of_turns_that_no_template_wrote(inspected):
    in_a_message = [turns("a", "b"), turns("<bos>user\na", "b")]
    [stray] = [each for each in inspected(in_a_message, LONG, template=MARKED) if each.check == 1]
    assert (
        stray.level == "refuse" and stray.text.startswith("1 of 2 rows") and "(<bos>)" in stray.text
    )
    pairs = [{"prompt": "1+1=", "chosen": "2<bos>", "rejected": "3"}]
    assert levels(
        inspected(pairs, "data.chat=true", LONG, template=MARKED, stages=("dpo",)), 1
    ) == ["refuse"]
    assert levels(inspected([{"prompt": "a<bos>b", "completion": "c"}], template=MARKED), 1) == [
        "refuse"
    ]


def test_1_plain_prompts_that_another_program_has_rendered(inspected):
    rendered = [{"prompt": RENDERED, "completion": "2"}]
    assert not levels(inspected(rendered, LONG, template=MARKED), 1)
    assert levels(inspected(rendered, LONG, template=CHAT_TEMPLATE), 1) == ["refuse"]


def test_1_two_beginnings_at_the_front_of_such_a_template(inspected):
    twice = "{{- bos_token -}}" + MARKED
    findings = inspected(NUMBERED, "data.chat=true", LONG, template=twice)
    assert any(each.level == "refuse" and "two beginnings" in each.text for each in findings)


def test_2_the_end_of_turn_is_no_stop(inspected):
    for stages, level in ((("sft",), "warn"), (("sft", "grpo"), "refuse")):
        findings = inspected(NUMBERED, "data.chat=true", template=TURNS, stages=stages)
        assert level in levels(findings, 2)
    named = next(each for each in findings if each.check == 2 and each.level == "refuse")
    assert (
        "'<|end|>' (7)" in named.text and named.change == "Set stages.1.sampling.stop_token_ids=[7]"
    )
    mended = [f"stages.{n}.sampling.stop_token_ids=[7]" for n in range(2)]
    assert not levels(
        inspected(NUMBERED, "data.chat=true", *mended, template=TURNS, stages=("sft", "grpo")), 2
    )


def test_2_the_function_that_others_call():
    tokenizer = load_tokenizer("bytes")
    assert end_of_turn_problem(tokenizer, (2,)) is None
    assert "no stop of the run (<unk> (3))" in end_of_turn_problem(tokenizer, (3,))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    assert "writes no token after" in end_of_turn_problem(tokenizer, (2,))


def test_3_stops_that_disagree(tmp_path):
    directory = tmp_path / "model"
    load_tokenizer("characters", "0123456789+=").save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (directory / "config.json").write_text(json.dumps(configuration("Llama", eos_token_id=5)))
    write_weight_file(directory)
    values = {
        "model": str(directory),
        "data": {"task": "arithmetic"},
        "stages": [{"algorithm": "sft", "steps": 1}],
    }
    (tmp_path / "run.yml").write_text(json.dumps(values))
    [disagree] = [each for each in inspect(load([tmp_path / "run.yml"])).faults if each.check == 3]
    assert "tokenizer [2], config.json [5], generation_config.json [2, 7]" in disagree.text


def test_4_no_row_ends_with_a_stop(inspected):
    assert levels(inspected(NUMBERED, "data.chat=true", template=TURNS), 4) == ["refuse"]


def turns(*contents):
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    }


def test_5_a_template_that_rewrites_earlier_turns(inspected):
    rows = [turns("a", "think#b", "c", "think#d")]
    findings = inspected(rows, template=FORGETS)
    assert levels(findings, 5) == ["warn"] and "1 of 1 conversations are 2 rows" in str(findings)
    last = inspected(rows, "tokenizer.chat_template.history=last", template=FORGETS)
    assert not levels(last, 5) and len(last) < len(findings)
    assert not levels(
        inspected(rows, "stages.0.algorithm={name: sft, train_on: last_turn}", template=FORGETS), 5
    )
    assert not levels(inspected([turns("a", "think#b")], template=FORGETS), 5)
    assert not levels(inspected(rows, template=CHAT_TEMPLATE), 5)


def test_6_markers_that_are_no_tokens(inspected):
    template = CHAT_TEMPLATE.replace(
        "'<|' + message['role'] + '|>'", "'<|im_start|>' + message['role']"
    ).replace("'<|assistant|>'", "'<|im_start|>assistant'")
    [marker] = [
        each for each in inspected(NUMBERED, "data.chat=true", template=template) if each.check == 6
    ]
    assert "<|im_start|>" in marker.text


def test_7_a_template_that_adds_a_space(inspected):
    findings = inspected(NUMBERED, "data.chat=true", template=SPACED)
    [differs] = [each for each in findings if each.check == 7]
    assert differs.level == "warn" and "'0' (23) when sampled, ' ' (228)" in differs.text


def test_8_plain_prompts_for_a_chat_model(inspected):
    assert levels(inspected(NUMBERED, template=TURNS), 8) == ["warn"]
    assert not levels(inspected(NUMBERED, "data.chat=true", template=TURNS), 8)


def test_9_tokens_outside_the_vocabulary(inspected):
    assert levels(
        inspected([{"prompt": "\u00ff", "completion": "z"}], "model.overrides.vocab_size=100"), 9
    ) == ["refuse"]


def test_9_unknown_tokens(inspected):
    characters = ("tokenizer={source: characters, alphabet: '0123456789+='}",)
    assert levels(inspected([{"prompt": "3 + 4 =", "completion": "7"}], *characters), 9) == ["warn"]
    assert not levels(inspected(NUMBERED, *characters), 9)


def test_10_rows_that_do_not_fit(inspected):
    rows = [*NUMBERED, {"prompt": "1" * 90, "completion": "2", "answer": "2"}]
    for stage in ("sft", "grpo"):
        [long] = [each for each in inspected(rows, stages=(stage,)) if each.check == 10]
        assert long.level == "refuse" and "1 of 13" in long.text and "max_length=" in long.change


def test_10_rows_that_are_left_out_are_counted_and_none_left_is_refused(inspected):
    rows = [*NUMBERED, {"prompt": "1" * 70, "completion": "2", "answer": "2"}]
    findings = inspected(rows, "data.too_long=drop")
    assert levels(findings, 10) == ["note"] and "1 of 13 rows are longer than the 64 tokens" in str(
        findings
    )
    assert any("no row is left" in each.text for each in inspected(rows[-1:], "data.too_long=drop"))


def test_11_prompts_that_are_trained_on(inspected):
    assert levels(inspected(NUMBERED, "stages.0.algorithm={name: sft, train_on: all}"), 11) == [
        "warn"
    ]
    assert levels(inspected(NUMBERED), 11) == ["note"]


def test_12_duplicates_and_prompts_of_the_evaluation(inspected, tmp_path):
    rows = [*NUMBERED, {**NUMBERED[3], "prompt": " 3+3= "}]
    assert levels(inspected(rows), 12) == ["warn"]
    (tmp_path / "held.jsonl").write_text(json.dumps(NUMBERED[0]))
    findings = inspected(NUMBERED, f"evaluation={{data: {{path: {tmp_path}/held.jsonl}}}}")
    assert [each.text for each in findings if each.check == 12] == [
        "1 training prompts are in the evaluation (1 of its 1)"
    ]


def test_14_columns_and_special_tokens(inspected):
    same = [{**row, "level": "easy"} for row in NUMBERED]
    assert "`level` is 'easy' in all 12 rows" in next(
        e.text for e in inspected(same) if e.check == 14
    )
    mixed = [{**row, "answer": n if n % 2 else str(n)} for n, row in enumerate(NUMBERED)]
    assert "6 text, 6 number" in next(e.text for e in inspected(mixed) if e.check == 14)
    empty = [{**row, "answer": "" if n == 0 else row["answer"]} for n, row in enumerate(NUMBERED)]
    assert "empty in 1 of 12" in next(e.text for e in inspected(empty) if e.check == 14)
    special = [*NUMBERED, {"prompt": "x", "completion": "a<|end|>b", "answer": "1"}]
    assert "'<|end|>'" in next(e.text for e in inspected(special) if e.check == 14)


def test_15_random_weights_without_a_teacher(inspected):
    assert levels(inspected(NUMBERED, stages=("grpo",)), 15) == ["warn", "note"]
    assert levels(inspected(NUMBERED, stages=("sft", "grpo")), 15) == ["note"]


def test_17_more_prompts_a_step_than_rows(inspected):
    assert not levels(inspected(NUMBERED, "stages.0.prompts_per_step=12"), 17)
    [few] = [
        each for each in inspected(NUMBERED, "stages.0.prompts_per_step=13") if each.check == 17
    ]
    assert (
        few.level == "warn" and "12 rows" in few.text and "stages.0.prompts_per_step" in few.change
    )


def test_18_roles_that_the_template_does_not_name(inspected):
    def of_role(role, template=CHAT_TEMPLATE):
        rows = [
            turns("a", "b"),
            {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]},
        ]
        return [each for each in inspected(rows, template=template) if each.check == 18]

    for role in ("usr", "User", "assitant", "sytem"):
        [wrong] = of_role(role)
        assert wrong.level == "refuse" and "rows.jsonl:2" in wrong.text and repr(role) in wrong.text
        assert "nearest: " in wrong.text
    [unusual] = of_role("human")
    assert unusual.level == "warn" and "usual: system" in unusual.text
    assert (
        not of_role("usr", CHAT_TEMPLATE + "{# 'usr' #}")
        and not of_role("tool")
        and not of_role("developer")
    )
    pairs = [{"prompt": turns("a")["messages"], "chosen": "b", "rejected": "c"}]
    pairs[0]["prompt"][0]["role"] = "usr"
    assert levels(inspected(pairs, stages=("dpo",), template=CHAT_TEMPLATE), 18) == ["refuse"]


def test_18_roles_of_prompts_to_complete(tmp_path):
    tokenizer = byte_level()
    prompt = Prompt("p.jsonl:3", {"prompt": [{"role": "usr", "content": "a"}]})
    with pytest.raises(DataError, match=r"p.jsonl:3: .*'usr' \(nearest: user\)"):
        problems([prompt], ExampleEncoder(tokenizer, None), tmp_path)


def test_malformed_rows_are_a_refusal(inspected):
    assert any(each.level == "refuse" for each in inspected([{"question": "a"}]))


@pytest.fixture
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_13_demonstrations_are_scored(in_the_root, capsys):
    arguments = [
        "inspect",
        "configs/quickstart.yml",
        "data.limit=40",
        "evaluation=null",
        "stages.1.until=null",
        "stages.0.prompts_per_step=8",
    ]
    assert cli.main([*arguments, "--rows", "1", "--stage", "sft", "--strict"]) == 0
    printed = capsys.readouterr().out
    assert "64" not in printed and "40 demonstrations get a mean reward of 1 (1 to 1)" in printed
    assert ".8:'0' .18:'+' .8:'0' .19:'=' +8:'0' !2:'<eos>'" in printed
    wrong = "rewards={functions: [{name: regex_format, options: {pattern: x}}], workers: 1}"
    arguments = [*arguments, wrong, "--json", "--rows", "0"]
    assert cli.main([*arguments, "--stage", "sft"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert any(each["check"] == 13 and each["level"] == "warn" for each in values["findings"])
    assert cli.main([*arguments, "--stage", "sft", "--strict"]) == 3


def test_13_rewards_that_a_stage_of_demonstrations_does_not_call_refuse_nothing(
    inspected, tmp_path, capsys
):
    inspected([{"prompt": "1+1=", "completion": "2"}] * 4)
    assert cli.main(["inspect", str(tmp_path / "run.yml"), "--rows", "0"]) == 0
    assert "the demonstrations are not scored: " in capsys.readouterr().out


def test_the_page_escapes_what_rows_contain(inspected, tmp_path, capsys):
    inspected([{"prompt": "</script><img onerror=alert(1)>", "completion": "x", "answer": "x"}] * 2)
    page = tmp_path / "page.html"
    assert (
        cli.main(["inspect", str(tmp_path / "run.yml"), "--html", str(page), "--no-rewards"]) == 0
    )
    assert (
        "<img" not in page.read_text()
        and "&lt;" in page.read_text()
        and "default-src 'none'" in page.read_text()
    )


def test_an_unknown_stage_is_a_configuration_error(in_the_root, capsys):
    assert cli.main(["inspect", "configs/quickstart.yml", "--stage", "ppo"]) == 2
    assert "the stages are sft, grpo" in capsys.readouterr().err


def test_a_run_refuses_at_its_start_what_inspect_refuses(inspected, tmp_path):
    import rl.stages
    from rl.data.reader import DataReader

    inspected(NUMBERED, "data.chat=true", template=TURNS, stages=("sft", "grpo"))
    config = load([tmp_path / "run.yml"], ["data.chat=true"])
    data, stages = DataReader(config), rl.stages.create(config)
    try:
        for stage in stages:
            stage.prepare(data)
        with pytest.raises(Refused, match=r"check  2  grpo: .*\n.*check  4  sft") as refused:
            start_checks(config, data, stages)
        assert refused.value.exit_code == 3
    finally:
        data.close()
