"""Calls of tools over `rl serve`, with a model that writes known texts."""

import json

import openai
import pytest
from served import KEY, PIECES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Ulm?"}],
    "temperature": 0,
    "tools": TOOLS,
}
CALLS = [("weather", {"city": "Ulm", "days": 2}), ("weather", {"city": "Bonn"})]


pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture
def server(writer_server):
    return writer_server


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_calls_are_read_from_an_answer(client):
    [choice] = client.chat.completions.create(**CHAT).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    read = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert read == CALLS
    assert len({call.id for call in message.tool_calls}) == 2
    assert message.content == "Let me see.{broken}"
    assert message.reasoning_content == "rain?"


def test_a_stream_has_the_same_calls(client):
    calls = {}
    content = reasoning = ""
    finish = None
    for chunk in client.chat.completions.create(**CHAT, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            calls[call.index] = (call.function.name, json.loads(call.function.arguments))
    assert [calls[number] for number in sorted(calls)] == CALLS
    assert (content, reasoning, finish) == ("Let me see.{broken}", "rain?", "tool_calls")


def test_without_tools_the_text_is_the_content(client):
    for changes in ({"tools": []}, {"tool_choice": "none"}):
        [choice] = client.chat.completions.create(**(CHAT | changes)).choices
        assert choice.message.content == "".join(PIECES)
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_call_that_is_cut_off_is_no_call(client):
    for most in range(1, 13):
        [choice] = client.chat.completions.create(**CHAT, max_tokens=most).choices
        assert choice.finish_reason == ("length" if most < 12 else "tool_calls")
        assert len(choice.message.tool_calls or ()) == (most > 5) + (most > 8)
        content = ""
        calls = []
        for chunk in client.chat.completions.create(**CHAT, max_tokens=most, stream=True):
            content += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or ()
        assert content == (choice.message.content or "")
        assert len(calls) == len(choice.message.tool_calls or ())


def test_results_go_back_to_the_model(client):
    [choice] = client.chat.completions.create(**CHAT).choices
    message = choice.message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "dry"}
        for call in choice.message.tool_calls
    ]
    again = client.chat.completions.create(
        **(CHAT | {"messages": [*CHAT["messages"], message, *results]})
    )
    assert again.choices[0].finish_reason == "tool_calls"
    assert again.usage.prompt_tokens > len("Ulm?Bonndrydry")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_wrong_tools_are_named(server, changes, param):
    answer = server.post("/v1/chat/completions", CHAT | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
