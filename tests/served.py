"""A server of `rl serve` in this process, for tests of its endpoints."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

import policy
from policy.huggingface import sources
from rl.serve.app import application
from rl.serve.service import ServerLimits, Service
from rollout import Generator, GeneratorOptions
from rollout.text.tokenizer import load_tokenizer

SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KEY = "a-key-for-the-tests"


def save_model(directory: Path) -> None:
    """Writes a small model with the tokenizer of bytes."""
    policy.save(policy.create(sources.preset("qwen3-0.6b", SMALL), seed=1), directory)
    load_tokenizer("bytes").save_pretrained(directory)


@dataclass
class Served:
    """A server that answers. url: without a path."""

    service: Service
    url: str
    port: int
    generator: Generator

    def post(self, path: str, body: object, **options) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120, **options)

    def get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.get(self.url + path, headers=headers, timeout=120)

    def idle(self, seconds: float = 60) -> bool:
        """Waits until no completion runs, in the service and in the engine."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.service.running and not self.generator.engine.busy:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def serving(directory: Path, limits: ServerLimits = ServerLimits(), **options):
    """Serves a model at a free port while the block lasts."""
    tokenizer = load_tokenizer(directory)
    settings = {"tokens_per_dispatch": 4, "prefill_chunk": 64, "batch_sizes": (1,)} | options
    generator = Generator(
        policy.load(directory),
        max_length=128,
        slots=4,
        tokenizer=tokenizer,
        options=GeneratorOptions(queue="arrival", **settings),
    )
    service = Service(generator, tokenizer, "tiny", (tokenizer.eos_token_id,), limits)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        application(service, "127.0.0.1", KEY), log_level="error", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    service.engine.start()
    thread.start()
    try:
        yield Served(service, f"http://127.0.0.1:{port}", port, generator)
    finally:
        server.force_exit = True
        server.should_exit = True
        thread.join()
        service.close()
