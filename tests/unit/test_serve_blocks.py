"""OpenAI's Responses API and Anthropic's Messages over `rl serve`, with their own clients."""

import json

import anthropic
import openai
import pytest
from served import KEY, PIECES

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
CUSTOM = {"name": "weather", "description": "the weather", "input_schema": SCHEMA}
CALLS = [("weather", {"city": "Ulm", "days": 2}), ("weather", {"city": "Bonn"})]


pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture
def writer(writer_server):
    return writer_server


@pytest.fixture
def server(tiny_server):
    return tiny_server


def openai_client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def anthropic_client(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def test_a_response_is_what_the_chat_says(server):
    client = openai_client(server)
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    question = {"model": "tiny", "instructions": "Be", "max_output_tokens": 12, "temperature": 0}
    forms = (
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    )
    for form in forms:
        response = client.responses.create(**question, input=form)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
        cut = chat.choices[0].finish_reason == "length"
        assert response.status == ("incomplete" if cut else "completed")


def test_a_stream_of_a_response_ends_in_the_response(writer):
    question = {"model": "tiny", "input": "Ulm?", "temperature": 0, "tools": [WEATHER]}
    client = openai_client(writer)
    complete = client.responses.create(**question)
    with client.responses.stream(**question) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    ] == sorted(event.sequence_number for event in events if hasattr(event, "sequence_number"))
    for response in (complete, final):
        assert response.status == "completed"
        assert [item.type for item in response.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "message",
        ]
        calls = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert response.output[0].content[0].text == "rain?"
        assert response.output_text == "Let me see.{broken}"


def test_the_output_of_a_response_is_input_of_the_next(writer):
    client = openai_client(writer)
    question = {"model": "tiny", "temperature": 0, "tools": [WEATHER]}
    first = client.responses.create(**question, input="Ulm?")
    items = [item.model_dump(exclude_none=True) for item in first.output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "dry"}
        for item in items
        if item["type"] == "function_call"
    ]
    again = client.responses.create(
        **question, input=[{"role": "user", "content": "Ulm?"}, *items, *results]
    )
    assert again.status == "completed"
    assert again.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"n": 2}, "n"),
    ],
)
def test_what_needs_a_state_or_is_unknown_is_refused(server, fields, param):
    answer = server.post("/v1/responses", {"input": "hi"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_a_message_is_what_the_chat_says(server):
    chat = openai_client(server).chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "hi"}],
        max_tokens=12,
        temperature=0,
    )
    client = anthropic_client(server)
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    for system, content in (("Be", "hi"), ([{"type": "text", "text": "Be"}], parts)):
        question = {"model": "tiny", "system": system, "extra_body": {"temperature": 0}}
        messages = [{"role": "user", "content": content}]
        message = client.messages.create(**question, messages=messages, max_tokens=12)
        assert [block.text for block in message.content] == [chat.choices[0].message.content]
        assert message.usage.input_tokens == chat.usage.prompt_tokens
        assert message.usage.output_tokens == chat.usage.completion_tokens
        count = client.messages.count_tokens(model="tiny", system=system, messages=messages)
        assert count.input_tokens == chat.usage.prompt_tokens
    reason = {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    assert message.stop_reason == reason


def test_a_stop_sequence_is_named(server):
    client = anthropic_client(server)
    question = {
        "model": "tiny",
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 30,
    }
    text = client.messages.create(**question).content[0].text
    stop = text[6:8]
    cut = client.messages.create(**question, stop_sequences=[stop, "never"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_a_turn_that_is_begun_is_continued(writer):
    for count in (1, 3):
        begun = {"role": "assistant", "content": "".join(PIECES[:count])}
        answer = anthropic_client(writer).messages.create(
            model="tiny",
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "Ulm?"}, begun],
            max_tokens=30,
        )
        assert answer.content[0].text == "".join(PIECES[count:])


def test_tools_of_messages_with_a_stream(writer):
    client = anthropic_client(writer)
    question = {
        "model": "tiny",
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": "Ulm?"}],
        "max_tokens": 64,
        "tools": [CUSTOM],
    }
    complete = client.messages.create(**question)
    with client.messages.stream(**question) as stream:
        streamed = stream.get_final_message()
    for message in (complete, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
            "text",
        ]
        uses = [block for block in message.content if block.type == "tool_use"]
        assert [(use.name, use.input) for use in uses] == CALLS
        assert message.content[0].thinking == "rain?"
    assert streamed.usage.output_tokens == complete.usage.output_tokens
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "dry"}]}
        for use in uses
    ]
    content = [block.model_dump(exclude_none=True) for block in complete.content]
    history = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    again = client.messages.create(**(question | {"messages": [*question["messages"], *history]}))
    assert again.usage.input_tokens > complete.usage.input_tokens


@pytest.mark.parametrize("choice", [{"type": "tool"}, {"type": "auto", "name": "weather"}])
def test_a_choice_of_tools_names_one_only_as_type_tool(writer, choice):
    messages = [{"role": "user", "content": "Ulm?"}]
    fields = {"messages": messages, "max_tokens": 8, "tools": [CUSTOM], "tool_choice": choice}
    answer = writer.post("/v1/messages", fields)
    assert answer.status_code == 400
    assert "tool_choice: `name`" in answer.json()["error"]["message"]


def test_an_empty_last_turn_of_the_assistant_is_left_out(server):
    user = {"role": "user", "content": "hi"}
    fields = {"max_tokens": 8, "temperature": 0}
    one, other = (
        server.post("/v1/messages", fields | {"messages": messages}).json()["content"]
        for messages in ([user], [user, {"role": "assistant", "content": []}])
    )
    assert one == other


def test_errors_have_the_form_of_anthropic(server):
    client = anthropic_client(server)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=200
        )
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="x", messages=[{"role": "user", "content": "a"}], max_tokens=2)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0).messages.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=2
        )
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_failed_stream_of_responses_ends_with_its_error(server, monkeypatch, capfd):
    def fail():
        raise RuntimeError("no device")

    monkeypatch.setattr(server.generator.engine, "collect", fail)
    stream = openai_client(server).responses.create(model="tiny", input="hi", stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert isinstance(last, openai.types.responses.ResponseErrorEvent)
    assert "RuntimeError" in last.message and last.param is None
    assert "no device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
            "text.format: ",
        ),
        ("/v1/responses", {"stop": ["a"] * 17}, "stop: "),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
            "output_config.format: ",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            "messages[0]: ",
        ),
    ],
)
def test_fields_have_the_names_of_their_api(server, path, body, message):
    asked = {"input": "a"} if path == "/v1/responses" else {"max_tokens": 2}
    if path == "/v1/messages":
        asked["messages"] = [{"role": "user", "content": "a"}]
    answer = server.post(path, asked | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
