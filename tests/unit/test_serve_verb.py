"""The verb `rl serve`: its exit codes, and how a server ends."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from served import save_model

from rl.commands import cli


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    return directory


def serve(directory, *arguments):
    return cli.main(["serve", str(directory), "--platform", "cpu", *map(str, arguments)])


def test_other_machines_need_a_key(directory, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("DUET_API_KEY", raising=False)
    assert serve(directory, "--host", "0.0.0.0") == 2
    assert "--token-file" in capsys.readouterr().err
    monkeypatch.setenv("DUET_API_KEY", "short")
    assert serve(directory, "--host", "0.0.0.0") == 2
    error = capsys.readouterr().err
    assert "DUET_API_KEY" in error and "short:" not in error
    assert serve(directory, "--token-file", tmp_path / "none") == 2


def test_a_port_in_use_ends_the_verb_before_the_model_is_read(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert serve(tmp_path / "no_model", "--port", port) == 5
    assert str(port) in capsys.readouterr().err


def test_other_refusals(directory, capsys):
    assert serve(directory, "--slots", 0) == 2
    assert serve(directory, "--max-body-mb", "inf") == 2
    assert "--max-body-mb" in capsys.readouterr().err
    assert serve(directory, "--port", 0, "--chat-template", "none.jinja") == 2
    assert serve(directory / "none", "--port", 0) == 4
    assert "none" in capsys.readouterr().err


@pytest.fixture
def process(directory):
    code = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    sizes = ("--slots", "1", "--max-length", "2048", "--port", "0", "--platform", "cpu")
    command = [sys.executable, "-c", code, "serve", str(directory), *sizes]
    environment = os.environ | {"DUET_API_KEY": "a-key-for-the-tests"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def line_of(process, seconds=300):
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready
    return process.stdout.readline()


def test_a_signal_lets_streams_end_and_refuses_new_requests(process):
    url = line_of(process).split(" at ")[1].split()[0]
    headers = {"authorization": "Bearer a-key-for-the-tests"}
    body = {"prompt": "a", "max_tokens": 1500, "stream": True, "logit_bias": {"2": -100}}
    tokens = {"return_token_ids": True}
    refused = None
    with httpx.stream(
        "POST", f"{url}/completions", json=body | tokens, headers=headers, timeout=300
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 60
        while refused is None and time.monotonic() < end:
            other = httpx.post(f"{url}/completions", json={"prompt": "a"}, headers=headers)
            refused = other.status_code if other.status_code != 200 else None
        rest = [line for line in [first, *lines] if line]
    assert refused == 503
    assert rest[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
    assert sum(len(each["choices"][0]["token_ids"]) for each in events) == 1500
    assert process.wait(60) == 0


def test_a_second_signal_ends_at_once(process):
    url = line_of(process).split(" at ")[1].split()[0]
    headers = {"authorization": "Bearer a-key-for-the-tests"}
    body = {"prompt": "a", "max_tokens": 2000, "n": 8, "stream": True, "logit_bias": {"2": -100}}
    with httpx.stream(
        "POST", f"{url}/completions", json=body, headers=headers, timeout=300
    ) as answer:
        lines = answer.iter_lines()  # without a name it would be closed, and the request with it
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
