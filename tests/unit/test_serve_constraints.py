"""Constrained answers of `rl serve`: JSON schemas, regular expressions, and calls that must be."""

import concurrent.futures
import json
import re
import threading

import anthropic
import jsonschema
import openai
import pydantic
import pytest
from served import KEY, save_model, serving

pytest.importorskip("llguidance")

# Short, since the model writes random texts.
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "go"}]
TEMPLATE = (
    "{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
    "{%- for message in messages -%}{{- message.content -}}"
    "{%- if message.content == 'fail' -%}{{- raise_exception('never this') -}}{%- endif -%}"
    "{%- for call in message.tool_calls or [] -%}<tool_call>{%- endfor -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with serving(directory, max_length=1024) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def chat(client, **fields):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1, **fields)


def test_an_answer_follows_a_schema(client):
    [choice] = chat(client, response_format=FORMAT).choices
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"
    stream = chat(client, response_format=FORMAT, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == choice.message.content


def test_a_class_of_pydantic_is_a_schema(client):
    class Answer(pydantic.BaseModel):
        yes: bool

    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    response = client.responses.parse(model="tiny", input="go", text_format=Answer, temperature=0)
    assert isinstance(response.output_parsed, Answer)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[ab]{2}-[0-9]"}, "[ab]{2}-[0-9]"),
        ({"choice": ["yes (a|b)", "no\\d"]}, r"yes \(a\|b\)|no\\d"),
        ({"grammar": 'start: "x" | "yy"'}, "x|yy"),
        ({"json": {"enum": ["q"]}}, '"q"'),
    ],
)
def test_outputs_of_vllm(client, outputs, pattern):
    more = {"structured_outputs": outputs}
    assert re.fullmatch(pattern, chat(client, extra_body=more).choices[0].message.content)
    answer = client.completions.create(model="tiny", prompt="a", extra_body=more, max_tokens=64)
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_other_apis_have_schemas_too(client, server):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = client.responses.create(model="tiny", input="go", text=form)
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    message = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0).messages.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=300,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [tool("one")],
                "tool_choice": {"type": "function", "function": {"name": "two"}},
            },
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_before_a_stream(server, fields, param):
    body = {"messages": MESSAGES, "stream": True} | fields
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_conversation_that_the_template_refuses_is_answered_with_its_reason(server):
    messages = [{"role": "user", "content": "fail"}]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400
    assert "never this" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


def test_a_call_that_must_be_is_made(client, server):
    tools = [tool("one"), tool("two")]
    [choice] = chat(client, tools=tools, tool_choice="required").choices
    [call] = choice.message.tool_calls
    assert call.function.name in ("one", "two")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    named = {"type": "function", "function": {"name": "two"}}
    [choice] = chat(client, tools=tools, tool_choice=named).choices
    assert choice.message.tool_calls[0].function.name == "two"
    response = client.responses.create(
        model="tiny",
        input="go",
        tools=[{"type": "function", "name": "one", "parameters": SCHEMA, "strict": True}],
        tool_choice="required",
    )
    assert [item.type for item in response.output] == ["function_call"]
    message = anthropic.Anthropic(base_url=server.url, api_key=KEY).messages.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=300,
        tools=[{"name": "one", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "one"},
    )
    assert [block.type for block in message.content] == ["tool_use"]


def test_a_grammar_that_takes_long_keeps_no_other_request_waiting(server):
    waits = threading.Event()
    server.service._grammars.submit(waits.wait, 60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            body = {"messages": MESSAGES, "structured_outputs": {"regex": "[xy]"}}
            constrained = pool.submit(server.post, "/v1/chat/completions", body)
            plain = {"messages": MESSAGES, "max_tokens": 1}
            assert server.post("/v1/chat/completions", plain).status_code == 200
            assert not constrained.done()
        finally:
            waits.set()
        content = constrained.result().json()["choices"][0]["message"]["content"]
    assert content in ("x", "y")
