"""Limits of `rl serve`, broken connections, and exact completions."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import socket
import threading
import time

import openai
import pytest
from served import KEY, serving

import policy
from rl.serve import connections
from rl.serve import service as service_module
from rl.serve.engine_thread import EngineThread, Job
from rl.serve.errors import ApiError
from rl.serve.limits import ServerLimits
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.request import Request
from rollout.text.tokenizer import load_tokenizer

LONG = {"prompt": "go", "max_tokens": 120, "logit_bias": {"2": -100}}


pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture
def server(tiny_server, monkeypatch):
    limits = ServerLimits(queue=2, body=10_000)
    monkeypatch.setattr(tiny_server.service, "limits", limits)
    return tiny_server


def exchange(server, *parts):
    """Sends bytes over a socket of its own; returns what comes back until it is closed."""
    received = b""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # the server has closed the connection
            pass
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def head(method, path, *lines):
    text = (f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *lines)
    return ("\r\n".join(text) + "\r\n\r\n").encode()


def test_more_completions_than_the_queue_holds_are_refused(server):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.post, "/v1/completions", LONG | {"n": 3}) for _ in range(2)]
        while server.service.waiting < 2:
            time.sleep(0.005)
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_full"
        assert [each.result().status_code for each in waiting] == [200, 200]
    too_many = server.post("/v1/completions", LONG | {"n": 7})
    assert too_many.status_code == 400
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_more_requests_than_are_read_at_a_time_are_refused(server, monkeypatch):
    """The thread that encodes waits, so that requests gather in front of it."""
    waits = threading.Event()
    monkeypatch.setattr(service_module, "_LEAST_ENCODINGS", 2)
    monkeypatch.setattr(server.service, "limits", ServerLimits(queue=0))
    monkeypatch.setattr(server.service, "_slots", 2)
    server.service._encoding.submit(waits.wait, 60)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            asked = [pool.submit(server.post, "/tokenize", {"prompt": "a"}) for _ in range(6)]
            first = itertools.islice(concurrent.futures.as_completed(asked, 60), 4)
            assert {each.result().json()["error"]["code"] for each in first} == {"queue_full"}
        finally:
            waits.set()
        statuses = sorted(each.result().status_code for each in asked)
    assert statuses == [200] * 2 + [429] * 4


def test_a_client_that_goes_while_its_prompt_is_read_gets_no_completion(server):
    waits = threading.Event()
    server.service._encoding.submit(waits.wait, 60)
    try:
        body = json.dumps(LONG).encode()
        start = head("POST", "/v1/completions", f"Content-Length: {len(body)}")
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(start + body)
            while not server.service._encodings:
                time.sleep(0.005)
        while server.service._encodings:
            time.sleep(0.005)
    finally:
        waits.set()
    assert not server.service.running


@pytest.mark.parametrize(
    "part", [b"", b"GET /health HT", head("GET", "/v1/models")[:-2]], ids=["none", "line", "head"]
)
def test_a_client_that_sends_no_request_is_left(server, monkeypatch, part):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_a_connection_is_kept_from_one_request_to_the_next(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for _ in range(3):
            time.sleep(0.3)
            connection.sendall(head("GET", "/health"))
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.3)
        body = json.dumps(LONG | {"n": 2}).encode()
        connection.sendall(head("POST", "/v1/completions", f"Content-Length: {len(body)}") + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(server.service, "limits", ServerLimits(sending=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head("POST", "/v1/completions", "Content-Length: 50") + b"{")
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in received


def test_connections_have_a_limit(server, monkeypatch):
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            idle.append(stack.enter_context(connection))
        idle[0].sendall(head("GET", "/health"))
        assert idle[0].recv(1000).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(server.config, "limit_concurrency", 5)
        another = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        with another, contextlib.suppress(ConnectionResetError):
            assert another.recv(100) == b""
    monkeypatch.undo()
    assert server.get("/health").status_code == 200


MALFORMED = {
    "no HTTP": (b"hello\r\n\r\n",),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n",),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
    "a wrong length": (head("POST", "/tokenize", "Content-Length: x"),),
    "a huge header": (head("GET", "/v1/models", f"X: {'a' * 200_000}"),),
    "both lengths": (
        head("POST", "/tokenize", "Content-Length: 3", "Transfer-Encoding: chunked"),
        b"0\r\n\r\n",
    ),
    "half a body": (head("POST", "/v1/completions", "Content-Length: 100"), b'{"prompt'),
    "broken chunks": (head("POST", "/tokenize", "Transfer-Encoding: chunked"), b"zz\r\n"),
    "nothing": (b"",),
    "a method": (head("BREW", "/v1/models"),),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_hurts_nobody(server, case, capfd):
    received = exchange(server, *MALFORMED[case])
    status = received.split(b" ")[1:2]
    assert status in ([], [b"400"], [b"405"], [b"431"]), received[:200]
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert not capfd.readouterr().err


def test_a_body_in_chunks_has_the_same_limit(server):
    chunks = [b"%x\r\n%s\r\n" % (4000, b" " * 4000)] * 4
    start = head("POST", "/v1/completions", "Transfer-Encoding: chunked")
    received = exchange(server, start, *chunks, b"0\r\n\r\n")
    assert b" 413 " in received.split(b"\r\n")[0]


def test_a_failed_step_ends_a_stream_with_its_error(server, monkeypatch, capfd):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    stream = client.completions.create(model="tiny", stream=True, **LONG)
    next(stream)

    def fail():
        raise RuntimeError("no device")

    monkeypatch.setattr(server.generator.engine, "collect", fail)
    with pytest.raises(openai.APIError, match="RuntimeError"):
        list(stream)
    monkeypatch.undo()
    assert "no device" in capfd.readouterr().err
    assert server.idle()
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("name", ["submit", "cancel", "collect"])
def test_an_error_around_the_steps_ends_its_request_alone(server, monkeypatch, capfd, name):
    call = getattr(server.generator, name, None)

    def fail(argument):
        if name == "cancel":
            call(argument)
        raise RuntimeError("no memory")

    def fail_to_collect(job):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patches:
        if name != "submit":
            patches.setattr(Job, "collect", fail_to_collect)
        if name != "collect":
            patches.setattr(server.generator, name, fail)
        answer = server.post("/v1/completions", LONG)
        assert answer.status_code == 500
        assert "RuntimeError" in answer.json()["error"]["message"]
    assert "no memory" in capfd.readouterr().err
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.idle()
    assert server.get("/health").status_code == 200


def test_a_thread_that_ends_is_seen_and_answered():
    class Ended(BaseException):
        pass

    class Broken:
        def submit(self, request):
            raise Ended

    async def ask():
        jobs = [Job([Request((5,), SamplingParams())], exact=False) for _ in range(3)]
        for job in jobs[:2]:
            thread.submit(job)
        thread.start()
        for job in jobs:
            if job is jobs[2]:
                thread.submit(job)
            with pytest.raises(ApiError, match="ended") as caught:
                async for _ in job.updates():
                    pass
            assert caught.value.status == 500
        with pytest.raises(ApiError):
            await thread.call(lambda generator: generator)

    thread = EngineThread(Broken())  # type: ignore[arg-type]
    previous = threading.excepthook
    threading.excepthook = lambda args: None
    try:
        asyncio.run(asyncio.wait_for(ask(), 20))
    finally:
        threading.excepthook = previous
    assert thread.ended


def test_exact_completions_are_those_of_training_to_the_last_bit(served_model):
    tokenizer = load_tokenizer(served_model)
    options = GeneratorOptions(exact=True, tokens_per_dispatch=16)
    generator = Generator(
        policy.load(served_model), max_length=128, slots=2, tokenizer=tokenizer, options=options
    )
    params = SamplingParams(n=2, max_new_tokens=20, stop_token_ids=(2,), top_logprobs=2)
    [expected] = generator.generate(["exact"], params, ids=[7])
    with serving(served_model, exact=True) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        question = {"model": "tiny", "prompt": "exact", "max_tokens": 20, "n": 2, "seed": 7}
        answer = client.completions.create(**question, logprobs=2)
        texts = {0: "", 1: ""}
        for chunk in client.completions.create(**question, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.text == completion.text == texts[choice.index]
        assert choice.logprobs.token_logprobs == completion.scores.logprobs.tolist()
