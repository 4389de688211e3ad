"""The verb `rl serve`: its exit codes, and how a server ends."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from served import KEY

from rl.commands import cli
from rl.serve.server import DrainingServer, server_config

pytestmark = pytest.mark.xdist_group("serve")


def serve(served_model, *arguments):
    return cli.main(["serve", str(served_model), "--platform", "cpu", *map(str, arguments)])


def test_other_machines_need_a_key(served_model, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("DUET_API_KEY", raising=False)
    assert serve(served_model, "--host", "0.0.0.0") == 2
    assert "--token-file" in capsys.readouterr().err
    monkeypatch.setenv("DUET_API_KEY", "short")
    assert serve(served_model, "--host", "0.0.0.0") == 2
    error = capsys.readouterr().err
    assert "DUET_API_KEY" in error and "short:" not in error
    assert serve(served_model, "--token-file", tmp_path / "none") == 2


def test_a_port_in_use_ends_the_verb_before_the_model_is_read(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert serve(tmp_path / "no_model", "--port", port) == 5
    assert str(port) in capsys.readouterr().err


def test_other_refusals(served_model, capsys):
    assert serve(served_model, "--slots", 0) == 2
    assert serve(served_model, "--max-body-mb", "inf") == 2
    assert "--max-body-mb" in capsys.readouterr().err
    assert serve(served_model, "--port", 0, "--chat-template", "none.jinja") == 2
    assert serve(served_model / "none", "--port", 0) == 4
    assert "none" in capsys.readouterr().err


@pytest.fixture
def process(served_model):
    code = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    sizes = ("--slots", "2", "--max-length", "2048", "--port", "0", "--platform", "cpu")
    command = [sys.executable, "-c", code, "serve", str(served_model), *sizes]
    environment = os.environ | {"DUET_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def line_of(process, seconds=300):
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready
    return process.stdout.readline()


HEADERS = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "a", "stream": True, "return_token_ids": True, "logit_bias": {"2": -100}}


def streaming(url, **fields):
    return httpx.stream(
        "POST", f"{url}/completions", json=BODY | fields, headers=HEADERS, timeout=300
    )


def tokens_of(lines):
    """The number of tokens of a stream, all of whose lines these are."""
    lines = [line for line in lines if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return sum(len(each["choices"][0]["token_ids"]) for each in events)


def test_a_signal_lets_streams_end_and_a_second_one_ends_at_once(process):
    url = line_of(process).split(" at ")[1].split()[0]
    refused = None
    with (
        streaming(url, max_tokens=800) as answer,
        streaming(url, max_tokens=2000, n=16) as longer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        others = longer.iter_lines()  # without a name it would be closed, and the request with it
        next(others)
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 60
        while refused is None and time.monotonic() < end:
            other = httpx.post(f"{url}/completions", json={"prompt": "a"}, headers=HEADERS)
            refused = other.status_code if other.status_code != 200 else None
        assert tokens_of([first, *lines]) == 800
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert refused == 503


def test_a_server_ends_with_its_last_stream(tiny_server, monkeypatch):
    service = tiny_server.service
    monkeypatch.setattr(service, "draining", False)
    server = DrainingServer(server_config(service, "127.0.0.1", KEY), service)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        with streaming(url, max_tokens=100, n=4) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.handle_exit(signal.SIGTERM, None)
            assert tokens_of([first, *lines]) == 400
        thread.join(30)
        assert not thread.is_alive()
        assert not server.force_exit
