"""`rl serve`: the endpoints of OpenAI, over a small model in this process."""

import asyncio
import concurrent.futures
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import scipy.special
from served import KEY

import policy
from rl.serve import bodies
from rl.serve.app import application
from rl.serve.errors import ApiError
from rl.serve.protocol.completions import CompletionBody
from rl.serve.sampling import draw_number
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture
def server(tiny_server):
    return tiny_server


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def generator(served_model):
    """A generator as training makes it: other slots, chunks and dispatches than the server's."""
    tokenizer = load_tokenizer(served_model)
    return Generator(policy.load(served_model), max_length=128, slots=2, tokenizer=tokenizer)


STOPS = (2,)


def completed(generator, prompt, prompt_id=0, **params):
    params = SamplingParams(stop_token_ids=STOPS, **params)
    [completions] = generator.generate([prompt], params, ids=[prompt_id])
    return completions


def test_a_greedy_completion_is_that_of_the_generator(client, generator):
    answer = client.completions.create(
        model="tiny",
        prompt="Once",
        max_tokens=20,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    [expected] = completed(generator, "Once", max_new_tokens=20, temperature=0)
    [choice] = answer.choices
    assert choice.token_ids == expected.tokens
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish
    tokens = len(expected.tokens)
    assert answer.usage.model_dump(
        include={"prompt_tokens", "completion_tokens", "total_tokens"}
    ) == {
        "prompt_tokens": 4,
        "completion_tokens": tokens,
        "total_tokens": 4 + tokens,
    }


def test_a_chat_is_rendered_by_the_template(client, generator):
    messages = [{"role": "developer", "content": "Be"}, {"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, seed=5, n=2
    )
    prompt = load_tokenizer("bytes").apply_chat_template(
        [{"role": "system", "content": "Be"}, messages[1]],
        tokenize=True,
        add_generation_prompt=True,
    )
    expected = completed(generator, prompt["input_ids"], 5, max_new_tokens=9, n=2)
    assert [each.message.content for each in answer.choices] == [each.text for each in expected]
    assert [each.finish_reason for each in answer.choices] == [each.finish for each in expected]
    assert answer.usage.prompt_tokens == len(prompt["input_ids"])


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_adds_up_to_the_answer(client, seed):
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": 40,
        "seed": seed,
        "n": 2,
        "stop": ["e", "\x02\x03"],
    }
    complete = client.chat.completions.create(**question)
    texts = {0: "", 1: ""}
    finishes = {}
    usage = None
    for chunk in client.chat.completions.create(
        **question, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    for choice in complete.choices:
        assert texts[choice.index] == choice.message.content
        assert finishes[choice.index] == choice.finish_reason
        assert "e" not in choice.message.content
    assert usage == complete.usage


def test_a_stop_string_is_cut_off(client, generator):
    [free] = completed(generator, "abc", 3, max_new_tokens=30)
    stop = free.text[8:11]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=30, seed=3, stop=stop)
    assert cut.choices[0].text == free.text[: free.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_prompts_may_be_texts_or_token_ids(client, generator):
    texts = client.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=6, n=2, seed=8
    )
    ids = load_tokenizer("bytes")(["one", "two"], add_special_tokens=False)["input_ids"]
    same = client.completions.create(model="tiny", prompt=ids, max_tokens=6, n=2, seed=8)
    one = client.completions.create(model="tiny", prompt=ids[1], max_tokens=6, n=2, seed=8)
    assert [each.text for each in texts.choices] == [each.text for each in same.choices]
    assert [each.index for each in texts.choices] == [0, 1, 2, 3]
    expected = completed(generator, "two", 8, max_new_tokens=6, n=2)
    assert [each.text for each in texts.choices[2:]] == [each.text for each in expected]
    assert [each.text for each in one.choices] == [each.text for each in expected]


def test_settings_change_the_draw_as_in_the_generator(client, generator):
    settings = {
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
    }
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 5}
    answer = client.completions.create(
        model="tiny",
        prompt="xy",
        max_tokens=12,
        seed=1,
        logit_bias={"70": 3.5},
        **settings,
        extra_body=more,
    )
    [expected] = completed(
        generator, "xy", 1, max_new_tokens=12, logit_bias={70: 3.5}, **settings, **more
    )
    assert answer.choices[0].text == expected.text


def test_stop_tokens_end_a_completion_and_are_not_shown(client, generator):
    [free] = completed(generator, "abc", 3, max_new_tokens=30)
    stop = free.tokens[7]
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, seed=3, extra_body={"stop_token_ids": [stop]}
    )
    first = free.tokens.index(stop)
    assert cut.usage.completion_tokens == first + 1
    assert cut.choices[0].text == load_tokenizer("bytes").decode(
        free.tokens[:first], skip_special_tokens=True
    )
    assert cut.choices[0].finish_reason == "stop"


def test_without_a_seed_answers_differ(client):
    answers = {
        client.completions.create(model="tiny", prompt="abc", max_tokens=8).choices[0].text
        for _ in range(4)
    }
    assert len(answers) > 1
    question = {"model": "tiny", "prompt": ["abc"] * 4, "max_tokens": 8}
    assert len({each.text for each in client.completions.create(**question).choices}) > 1
    seeded = client.completions.create(**question, seed=3).choices
    assert len({each.text for each in seeded}) == 1
    assert draw_number(5) == 5
    assert draw_number(-1) != draw_number(1 << 70) != draw_number(1 << 71)
    assert draw_number(-1) == draw_number(-1)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BAD = {
    "temperature": ({"temperature": 2.5}, "temperature"),
    "type": ({"temperature": "hot"}, "temperature"),
    "bool": ({"n": True}, "n"),
    "n": ({"n": 17}, "n"),
    "unknown": ({"temprature": 1}, "temprature"),
    "unsupported": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    "content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "b", "txt": "a"}]}]},
        "messages[0].content[0].txt",
    ),
    "no messages": ({"messages": []}, "messages"),
    "stops": ({"stop": ["a"] * 17}, "stop"),
    "many stops": ({"stop": [f"{number}" for number in range(10_000)]}, "stop"),
    "huge penalty": ({"repetition_penalty": 1e308}, "repetition_penalty"),
    "blank word": ({"bad_words": [" "]}, "bad_words"),
    "options without a stream": (
        {"stream_options": {"include_usage": True}},
        "stream_options",
    ),
    "likeliest tokens": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "a picture": (
        {
            "messages": [
                {"role": "system", "content": "a"},
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}],
                },
            ]
        },
        "messages[1].content",
    ),
    "empty stop": ({"stop": ""}, "stop"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias outside": ({"logit_bias": {"320": 1}}, "logit_bias"),
    "stop token": ({"stop_token_ids": [320]}, "stop_token_ids"),
    "counts in each event": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    "reserved": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_field_is_named(server, case):
    fields, param = BAD[case]
    answer = server.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert error["code"]


def test_neutral_values_and_names_of_users_are_accepted(server):
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "best_of": 1,
        "parallel_tool_calls": True,
        "logit_bias": None,
        "tools": None,
        "stop": None,
        "response_format": {"type": "text"},
        "top_k": -1,
    }
    assert server.post("/v1/chat/completions", CHAT | neutral).status_code == 200


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 100, max_tokens=29)
    assert caught.value.code == "context_length_exceeded"
    assert "128" in str(caught.value) and "100" in str(caught.value) and "29" in str(caught.value)
    fits = client.completions.create(model="tiny", prompt="x" * 100, max_tokens=28, temperature=0)
    assert fits.usage.completion_tokens <= 28


def test_a_chat_without_a_limit_has_what_is_left(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT["messages"],
        seed=1,
        extra_body={"logit_bias": {"2": -100}},
    )
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(CHAT | {"model": "other"}))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_only_the_key_opens_the_server(server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nope"):
        assert httpx.get(server.url + path).status_code == 401
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    other = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": KEY})
    assert other.status_code == 200


OTHERS = {
    "itself": ({"origin": "http://localhost:8000"}, 200),
    "with a charset": ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    "another site": ({"origin": "https://evil.example"}, 403),
    "a name like it": ({"origin": "http://127.0.0.1.evil.example"}, 403),
    "a page without a place": ({"origin": "null"}, 403),
    "a form": ({"content-type": "text/plain"}, 415),
    "no type": ({"content-type": ""}, 415),
}


@pytest.mark.parametrize("case", OTHERS)
def test_without_a_key_pages_of_other_sites_get_no_answer(server, case):
    headers, status = OTHERS[case]
    transport = httpx.ASGITransport(application(server.service, "127.0.0.1", None))

    async def post():
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = json.dumps({"prompt": "a"})
            kinds = {"content-type": "application/json"} | headers
            return await client.post("/tokenize", content=body, headers=kinds)

    assert asyncio.run(post()).status_code == status


def test_what_is_nested_too_deep_or_named_oddly_is_no_error_of_the_server(server):
    odd = CHAT | {"chat_template_kwargs": {"tokenizer": 1}}
    assert server.post("/v1/chat/completions", odd).status_code == 200
    function = {"name": "f", "arguments": "[" * 100_000}
    turn = {"role": "assistant", "tool_calls": [{"function": function}]}
    deep = CHAT | {"messages": [*CHAT["messages"], turn, CHAT["messages"][0]]}
    assert server.post("/v1/chat/completions", deep).status_code == 200


def test_texts_become_tokens_and_back(server):
    answer = server.post("/tokenize", {"prompt": "hé", "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"]) == 3
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json()["prompt"].endswith("<|assistant|>")
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and "message" in info["chat_template"]
    assert server.post("/detokenize", {"tokens": [1 << 40]}).status_code == 400


RAW = {
    "not json": (b"{", 400),
    "a list": (b"[]", 400),
    "nothing": (b"", 400),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', 400),
    "infinite": (b'{"prompt": "a", "temperature": 1e999}', 400),
    "infinite where it is ignored": (b'{"prompt": "a", "metadata": {"a": -1e999}}', 400),
    "many prompts": (b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}', 400),
    "a long prompt": (b'{"prompt": [' + b"7," * 100_000 + b"7]}", 400),
    "half a pair": (b'{"prompt": "\\ud800"}', 400),
    "no utf-8": (b'{"prompt": "\xff"}', 400),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "huge number": (b'{"prompt": [1' + b"0" * 5000 + b"]}", 400),
    "too large": (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
}


@pytest.mark.parametrize("case", RAW)
def test_a_malformed_body_is_refused(server, case):
    body, status = RAW[case]
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [True] * 100_000},
        {"prompt": [[True]] * 100_000},
        {"prompt": "a", "stop": [True] * 100_000},
        {"prompt": "a", "logit_bias": {f"a{n}": True for n in range(100_000)}},
    ],
    ids=["ids", "prompts", "stops", "biases"],
)
def test_the_errors_of_a_body_are_few(fields, monkeypatch):
    """An error for each item of a list takes seconds and gigabytes."""
    counts = []
    first_error = bodies._first_error

    def counted(error, body):
        counts.append(error.error_count())
        return first_error(error, body)

    monkeypatch.setattr(bodies, "_first_error", counted)
    with pytest.raises(ApiError) as caught:
        CompletionBody.read(fields)
    assert caught.value.status == 400
    assert counts[0] < 10


def send(server, path, body, extra=""):
    """Sends a request over a socket of its own, which the caller closes."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(content)}\r\n{extra}\r\n".encode()
        + content
    )
    return connection


@pytest.mark.parametrize("stream", (True, False))
def test_the_completions_of_a_client_that_goes_are_dropped(server, stream):
    before = server.generator.counts["useful"]
    body = {"prompt": "go", "max_tokens": 120, "n": 16, "stream": stream, "logit_bias": {"2": -100}}
    connection = send(server, "/v1/completions", body)
    while server.service.running < 4 or server.generator.counts["useful"] == before:
        time.sleep(0.01)
    connection.close()
    assert server.idle()
    assert server.generator.counts["useful"] - before < 16 * 120
    assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_two_hundred_requests_at_once_are_all_answered(server, generator):
    def ask(seed):
        body = {"prompt": "many", "max_tokens": 4, "seed": seed}
        return server.post("/v1/completions", body).json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    for seed in (0, 77, 199):
        assert answers[seed] == completed(generator, "many", seed, max_new_tokens=4)[0].text


def test_a_failed_step_is_answered_and_the_server_goes_on(server, monkeypatch, capfd):
    def fail():
        raise RuntimeError("no device")

    monkeypatch.setattr(server.generator.engine, "collect", fail)
    answer = server.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert "no device" in capfd.readouterr().err
    assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_the_snippets_of_the_document_run(server, tmp_path, monkeypatch, capsys):
    document = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
    snippets = re.findall(
        r"^<!-- needs: server -->\n```python\n(.*?)^```$", document.read_text(), re.M | re.S
    )
    assert snippets
    for snippet in snippets:
        text = snippet.replace("http://127.0.0.1:8000", server.url)
        text = text.replace('api_key="none"', f"api_key={KEY!r}").replace('"first"', '"tiny"')
        exec(compile(text, str(document), "exec"), {})
    assert capsys.readouterr().out


def test_metrics_count_requests_and_tokens(server):
    def numbers():
        lines = server.get("/metrics").text.splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line[0] != "#"
        }

    before = numbers()
    server.post("/v1/chat/completions", CHAT | {"logit_bias": {"2": -100}})
    after = numbers()
    ok = 'duet_requests_total{endpoint="/v1/chat/completions",status="200"}'
    for name, more in {
        ok: 1,
        "duet_generated_tokens_total": 2,
        "duet_prompt_tokens_total": 4,
    }.items():
        assert after[name] - before.get(name, 0) == more
    assert after["duet_requests_running"] == 0
    assert after["duet_time_to_first_token_seconds_count"] > 0


def raw_logprobs(served_model, ids):
    """float32[T, V] of log softmax(logits), computed with the model itself."""
    model = policy.load(served_model)
    logits = np.asarray(model.logits(np.asarray([ids], np.int32)))[0].astype(np.float64)
    return logits - scipy.special.logsumexp(logits, axis=-1, keepdims=True)


def test_logprobs_of_a_chat_are_raw_and_name_the_likeliest(client, served_model):
    answer = client.chat.completions.create(
        **(CHAT | {"max_tokens": 6}),
        seed=3,
        temperature=0.5,
        logprobs=True,
        top_logprobs=20,
        extra_body={"return_token_ids": True},
    )
    [choice] = answer.choices
    ids = choice.token_ids
    prompt = answer.prompt_token_ids
    expected = raw_logprobs(served_model, [*prompt, *ids])[len(prompt) - 1 :]
    assert len(choice.logprobs.content) == len(ids)
    for entry, token, row in zip(choice.logprobs.content, ids, expected, strict=False):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(
            sorted(row)[::-1][:20], abs=1e-4
        )
    spelled = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert spelled.decode("utf-8", "replace").startswith(choice.message.content)


def test_a_stream_has_the_same_logprobs(client):
    question = CHAT | {"max_tokens": 9, "seed": 3, "logprobs": True, "top_logprobs": 2}
    [complete] = client.chat.completions.create(**question).choices
    streamed = [
        entry
        for chunk in client.chat.completions.create(**question, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == complete.logprobs.content


def test_echo_scores_prompts_as_lm_eval_posts_them(client, server, served_model):
    prompts = [[70, 71, 72, 73, 80], [90, 91, 92]]
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = server.post("/v1/completions", body).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        expected = raw_logprobs(served_model, prompt)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        for place in range(1, len(prompt)):
            row = expected[place - 1]
            number = logprobs["token_logprobs"][place]
            top = logprobs["top_logprobs"][place]
            assert number == pytest.approx(row[prompt[place]], abs=1e-4)
            assert max(top.values()) == pytest.approx(row.max(), abs=1e-4)
            assert number in top.values()
            assert (number == max(top.values())) == (row.argmax() == prompt[place])
        # The last one is the token that was sampled greedily.
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
        text = load_tokenizer("bytes").decode(prompt)
        assert choice["text"].startswith(text)
        assert logprobs["text_offset"][:3] == [0, 1, 2]


def test_a_prompt_may_be_scored_alone_and_streamed(client):
    question = {"model": "tiny", "prompt": "abc", "logprobs": 2, "echo": True}
    [alone] = client.completions.create(**question, max_tokens=0).choices
    assert alone.text == "abc"
    assert len(alone.logprobs.tokens) == 3
    [complete] = client.completions.create(**question, max_tokens=7, seed=1).choices
    parts = [
        chunk.choices[0]
        for chunk in client.completions.create(**question, max_tokens=7, seed=1, stream=True)
    ]
    assert "".join(part.text for part in parts) == complete.text
    assert complete.text.startswith("abc")
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for part in parts for each in getattr(part.logprobs, name)] == getattr(
            complete.logprobs, name
        )
    assert complete.logprobs.token_logprobs[:3] == alone.logprobs.token_logprobs


@pytest.mark.parametrize("major", (2, 3))
def test_both_majors_of_the_client_are_understood(server, major):
    """OPENAI_2 names a folder with openai 2, which other packages still ask for."""
    folder = os.environ.get("OPENAI_2") if major == 2 else ""
    if folder is None:
        pytest.skip("OPENAI_2 names no folder with openai 2")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    script = Path(__file__).resolve().parents[1] / "openai_client.py"
    done = subprocess.run(
        [sys.executable, str(script), server.url, KEY],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["version"].startswith(f"{major}.")
    assert got["models"] == ["tiny"]
    assert got["text"] == got["streamed"]
    assert got["logprobs"] == got["tokens"] > 0
    assert got["legacy"] and got["error"] == "n"


def test_clients_make_a_generator_compile_few_programs(served_model, generator):
    tokenizer = load_tokenizer(served_model)
    options = GeneratorOptions(batch_sizes=(), prefill_chunk=32, tokens_per_dispatch=4)
    fixed = Generator(
        policy.load(served_model), max_length=32, slots=1, tokenizer=tokenizer, options=options
    )
    fixed.compile_for_clients(32, SamplingParams(stop_token_ids=STOPS))
    decode = fixed.engine.runner.executables["decode"]
    assert len(decode.shapes) == 1
    everything = {
        "top_logprobs": 20,
        "logit_bias": dict.fromkeys(range(3, 300), -1.0),
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
        "bad_words": [chr(number) for number in range(33, 97)],
        "min_tokens": 3,
        "stop_token_ids": (2, *range(100, 115)),
    }
    for kind in ({}, {"top_logprobs": 0}, {"presence_penalty": 1.0}, everything):
        params = SamplingParams(**{"max_new_tokens": 8, "temperature": 0} | kind)
        [[completion]] = fixed.generate(["ab"], params)
        assert (completion.scores is None) == ("top_logprobs" not in kind)
        if kind in ({}, everything):
            [[expected]] = generator.generate(["ab"], params)
            assert completion.tokens == expected.tokens
    widths = {each.shape for each in fixed.engine.runner.fixed_widths}
    assert {shape[1:] for shape in decode.shapes} == widths
    assert len(decode.shapes) == 3
    for refused in ({"bad_words": ["a" * 100]}, {"stop_token_ids": tuple(range(99))}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            fixed.generate(["ab"], SamplingParams(max_new_tokens=8, **refused))
