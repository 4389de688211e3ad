"""Calls of tools: what published chat templates write is read back, and broken calls are named."""

import json
import re
from importlib import resources

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rollout.calls import formats
from rollout.calls.formats import response_template
from rollout.calls.grammars import call_constraint
from rollout.calls.replies import Call, ReplyReader, ReplyText, checked_arguments
from rollout.constraints import Grammars
from rollout.text.tokenizer import byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "a city"},
                    "days": {"type": "integer", "description": "days"},
                    "exact": {"type": "boolean", "description": "b"},
                },
                "required": ["city"],
            },
        },
    }
]
# Chat templates of models, from the package trl, and the end of a turn.
TEMPLATES = {
    "qwen2_5": ("<|im_end|>", 2),
    "qwen3": ("<|im_end|>", 2),
    "qwen3_instruct_2507": ("<|im_end|>", 2),
    "qwen3_5_think": ("<|im_end|>", 2),
    "nemotron_3_nano": ("<|im_end|>", 2),
    "llama3_1": ("<|eot_id|>", 1),
    "llama3_2": ("<|eot_id|>", 1),
    "glm4moe": ("<|observation|>", 2),
    "gemma4": ("<|tool_response>", 2),
    "deepseekv3": ("<｜end▁of▁sentence｜>", 2),
    "gptoss": ("<|call|>", 1),
}


class Named:
    """What the format is read from."""

    def __init__(self, chat_template):
        self.chat_template = chat_template


def published(name):
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def render(template, messages, **options):
    [text], _ = render_jinja_template(
        [messages], chat_template=template, tools=TOOLS, bos_token="", eos_token="", **options
    )
    return text


def read(template, prefix, text, *, stopped=True, size=None):
    """Reads a reply in pieces of `size` characters. Returns (content, reasoning, calls)."""
    reader = ReplyReader(template, prefix, TOOLS)
    parts = []
    for start in range(0, len(text), size or max(1, len(text))):
        parts += reader.feed(text[start : start + (size or len(text))])
    parts += reader.finish(stopped=stopped)
    texts = [part for part in parts if isinstance(part, ReplyText)]
    content = "".join(part.text for part in texts if not part.reasoning)
    reasoning = "".join(part.text for part in texts if part.reasoning)
    return content, reasoning, [part for part in parts if isinstance(part, Call)]


ARGUMENTS = ({"city": 'Bad "Ems", {x}', "days": 3}, {"city": "Ulm", "exact": True})


@pytest.mark.parametrize("size", (None, 1))
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_published_template_writes_is_read_back(name, size):
    template = published(name)
    end, count = TEMPLATES[name]
    as_text = name == "deepseekv3"
    calls = [
        {
            "type": "function",
            "id": f"call_{n}",
            "function": {
                "name": "weather",
                "arguments": json.dumps(each) if as_text else each,
            },
        }
        for n, each in enumerate(ARGUMENTS[:count])
    ]
    question = [{"role": "user", "content": "How is it?"}]
    prompt = render(template, question, add_generation_prompt=True)
    answer = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = render(template, answer)
    # Some templates begin a thought in the prompt that they leave out of the history.
    bare = render(template, question)
    before = prompt if text.startswith(prompt) else bare
    assert text.startswith(before)
    written = text[len(before) :].partition(end)[0]
    prefix = before[len(bare) :]
    content, _, result = read(response_template(Named(template)), prefix, written, size=size)
    assert [(call.status, call.name, call.arguments) for call in result] == [
        ("ok", "weather", each) for each in ARGUMENTS[:count]
    ]
    if text.startswith(prompt):
        assert content.strip() == ""


OPENS = {
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
    "gemma4": "<|tool_call>call:weather{",
    "glm4moe": "<tool_call>weather\n",
    "gptoss": " to=functions.weather<|channel|>commentary json<|message|>",
    "llama3_1": '{"name": "weather", "parameters": ',
    "mistral": "[TOOL_CALLS] [",
    "nemotron_3_nano": "<tool_call>\n<function=weather>\n",
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": ',
}
SPECIAL = re.compile(r"<｜[^｜]*｜>|<\|[^|>]*\|>|<\|tool_call>|<tool_call\|>|\[TOOL_CALLS\]")


@pytest.mark.parametrize("special", (True, False))
@pytest.mark.parametrize("name", OPENS)
def test_a_call_that_must_be_is_what_templates_write(name, special):
    pytest.importorskip("llguidance")
    if name == "mistral":
        format = formats.MISTRAL
        texts = [f'[TOOL_CALLS] [{{"name": "weather", "arguments": {json.dumps(ARGUMENTS[0])}}}]']
    else:
        template = published(name)
        format = response_template(Named(template))
        texts = [_written(name, template, each) for each in ARGUMENTS]
    tokenizer = byte_level()
    marks = dict.fromkeys(SPECIAL.findall("".join(texts)))
    tokenizer.add_tokens(list(marks), special_tokens=special)
    constraint = call_constraint(format, TOOLS, tokenizer)
    grammars = Grammars(tokenizer, len(tokenizer))

    def spelled(text):
        """How much of a text the grammar allows, and whether it is a call."""
        matcher = grammars.matcher(constraint)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for number, token in enumerate(tokens):
            if not matcher.mask()[token // 32] >> token % 32 & 1:
                return tokenizer.decode(tokens[:number]), False
            matcher.advance([token])
        return text, matcher.complete

    for text, arguments in zip(texts, ARGUMENTS, strict=False):
        assert spelled(text) == (text, True)
        [call] = read(format, "", text)[2]
        assert (call.status, call.arguments) == ("ok", arguments)
        for wrong in (text.replace("weather", "wether"), text.replace("city", "town"), f" {text}"):
            assert not spelled(wrong)[1]
        assert not spelled(text.replace("city", "days"))[1]  # a text where a number must be
    if name != "mistral":
        assert not spelled(_written(name, template, {"days": 3}))[1]  # the city is missing


def _written(name, template, arguments):
    """How a template writes a call."""
    shown = json.dumps(arguments) if name == "deepseekv3" else arguments
    call = {"type": "function", "id": "a", "function": {"name": "weather", "arguments": shown}}
    question = [{"role": "user", "content": "How is it?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = render(template, [*question, answer])
    start = text.index(OPENS[name])
    return text[start:].partition(TEMPLATES[name][0])[0].rstrip("\n")


HERMES = {
    "two": (
        'A <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": "7"}}\n</tool_call> B',
        ["ok", "ok"],
        "A B",
    ),
    "one is broken": (
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',
        ["not_json", "ok"],
        "",
    ),
    "a list": ("<tool_call>[1, 2]</tool_call>", ["no_name"], ""),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ["no_name"], ""),
    "not a number": (
        '<tool_call>{"name": "weather", "arguments": {"city": "a", "days": NaN}}</tool_call>',
        ["not_json"],
        "",
    ),
    "another tool": (
        '<tool_call>{"name": "wether", "arguments": {}}</tool_call>',
        ["unknown_tool"],
        "",
    ),
    "missing": (
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
        ["bad_arguments"],
        "",
    ),
    "type": (
        '<tool_call>{"name": "weather", "arguments": {"city": "a", "days": "x"}}</tool_call>',
        ["bad_arguments"],
        "",
    ),
    "thought": ('<think><tool_call>{"name": "weather"}</tool_call></think>no', [], "no"),
    "prose": ("a < b, <tool", [], "a < b, <tool"),
}


@pytest.mark.parametrize("size", (None, 1, 3))
@pytest.mark.parametrize("case", HERMES)
def test_each_call_has_its_own_status(case, size):
    text, statuses, expected = HERMES[case]
    content, _, calls = read(formats.HERMES, "<|im_start|>assistant\n", text, size=size)
    assert [call.status for call in calls] == statuses
    assert content.split() == expected.split()
    assert content == content.strip()


def test_texts_are_cast_to_the_types_of_the_schema():
    _, _, calls = read(formats.HERMES, "", HERMES["two"][0])
    assert calls[1].arguments == {"city": "Bonn", "days": 7}
    xml = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    _, _, [call] = read(formats.FUNCTIONS, "", xml)
    assert call.arguments == {"city": "12", "exact": True}


def test_a_call_that_is_cut_off_is_none():
    for template, text in (
        (formats.HERMES, '<tool_call>{"name": "weather", "argu'),
        (formats.FUNCTIONS, "<tool_call><function=weather><parameter=city>\nUl"),
        (formats.FUNCTIONS, "<tool_call><function=weather><parameter=city>\nUlm\n</parameter>"),
    ):
        _, _, [call] = read(template, "", text, stopped=False)
        assert call.status == "unclosed"


def test_a_parameter_that_is_not_closed_is_not_lost():
    text = "<tool_call><function=weather><parameter=city>Ulm<parameter=days>3</parameter></function></tool_call>"
    _, _, [call] = read(formats.FUNCTIONS, "", text)
    assert call.status != "ok" or call.arguments["city"].startswith("Ulm")
    text = text.replace("3</parameter>", "3")
    _, _, [call] = read(formats.FUNCTIONS, "", text)
    assert call.status == "unclosed"


def test_what_the_prompt_opens_is_continued():
    content, reasoning, calls = read(
        formats.HERMES, "<|im_start|>assistant\n<think>\n", "I think</think>\n\nso"
    )
    assert (content, reasoning, calls) == ("so", "I think", [])


def test_a_response_template_of_the_tokenizer_comes_first():
    named = Named(published("qwen3"))
    assert response_template(named) is formats.HERMES
    named.response_template = {"fields": {}}
    assert response_template(named) is named.response_template
    assert response_template(Named("{{ messages }}")) is None


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, 7]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"required": 5},
        {"required": [["a"], 1]},
        {"properties": [1]},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [5, {}], "anyOf": 3, "oneOf": [None]}}},
        {"properties": {"a": nested(5_000)}},
    ],
    ids=["required", "names", "properties", "type", "types", "deep"],
)
def test_what_is_no_schema_restricts_nothing(schema):
    assert checked_arguments({"a": "1"}, schema) == ({"a": "1"}, "")


def test_types_inside_of_unions_are_read():
    assert checked_arguments({"a": "1"}, {"properties": {"a": nested(3)}}) == ({"a": 1}, "")


ADDRESS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, {"city": "Paris"}),
        ({"anyOf": [{"type": "string"}, {}]}, 5),
        ({"anyOf": [{"const": 7}, {"type": "null"}]}, 7),
        ({"$ref": "#/$defs/Loop"}, 5),
    ],
    ids=["reference", "any", "constant", "circle"],
)
def test_each_branch_of_a_union_allows_its_values(schema, value):
    definitions = {"Address": ADDRESS, "Loop": {"$ref": "#/$defs/Loop"}}
    schema = {"properties": {"a": schema}, "$defs": definitions}
    assert checked_arguments({"a": value}, schema) == ({"a": value}, "")


def test_a_text_is_cast_to_a_type_of_a_reference():
    schema = {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}
    schema = {"properties": {"a": schema}, "$defs": {"Address": ADDRESS}}
    assert checked_arguments({"a": '{"city": "Paris"}'}, schema) == ({"a": {"city": "Paris"}}, "")


def test_without_tools_the_channels_of_gpt_oss_are_apart():
    template = formats.without_calls(formats.GPT_OSS)
    reply = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>final<|message|>so"
    assert read(template, "<|start|>assistant", reply) == ("so", "I think", [])
    assert formats.without_calls(formats.HERMES) is None
