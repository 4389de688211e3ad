"""A server of `rl serve` in this process, for tests of its endpoints."""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import uvicorn

import policy
from policy.huggingface import sources
from rl.data.media import processors_of
from rl.serve.limits import ServerLimits
from rl.serve.server import server_config
from rl.serve.service import Service
from rollout import Generator, GeneratorOptions
from rollout.adapter_pool import AdapterPool
from rollout.text.tokenizer import characters, load_tokenizer

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
PIECES = (
    "<think>",
    "rain?",
    "</think>",
    "Let me see.",
    "\n<tool_call>\n",
    '{"name": "weather", "arguments": {"city": "Ulm", "days": "2"}}',
    "\n</tool_call>",
    "<tool_call>",
    '{"name": "weather", "arguments": {"city": "Bonn"}}',
    "</tool_call>",
    "<tool_call>{broken}</tool_call>",
)
"""What the writer of the tests says: a reasoning, a text, two calls, and what is no call."""


def save_model(directory: Path) -> None:
    """Writes a small model with the tokenizer of bytes."""
    policy.save(policy.create(sources.preset("qwen3-0.6b", SMALL), seed=1), directory)
    load_tokenizer("bytes").save_pretrained(directory)


@dataclass
class Served:
    """A server that answers. url: without a path. http: a client that has the key."""

    service: Service
    url: str
    port: int
    generator: Generator
    http: httpx.Client
    config: uvicorn.Config

    def post(self, path: str, body: object) -> httpx.Response:
        return self.http.post(self.url + path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def idle(self, seconds: float = 60) -> bool:
        """Waits until no completion runs, in the service and in the engine."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.service.running and not self.generator.engine.busy:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def serving(
    directory: Path,
    limits: ServerLimits = ServerLimits(),
    max_length: int = 128,
    media: bool = False,
    adapters: Mapping[str, Path] | None = None,
    **options,
):
    """Serves a model at a free port while the block lasts. media: with its towers."""
    tokenizer = load_tokenizer(directory)
    processors = processors_of(directory, tokenizer) if media else None
    settings = {"tokens_per_dispatch": 4, "prefill_chunk": 64, "batch_sizes": (1,)} | options
    model = policy.load(directory, media=media)
    pool = AdapterPool(model, adapters) if adapters else None
    generator = Generator(
        pool.model if pool else model,
        adapters=pool,
        max_length=max_length,
        slots=4,
        tokenizer=tokenizer,
        options=GeneratorOptions(queue="arrival", **settings),
    )
    stops = (tokenizer.eos_token_id,)
    service = Service(generator, tokenizer, "tiny", stops, limits, processors)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = server_config(service, "127.0.0.1", KEY)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    service.engine.start()
    thread.start()
    headers = {"authorization": f"Bearer {KEY}"}
    limits_of_client = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    try:
        with httpx.Client(headers=headers, timeout=120, limits=limits_of_client) as http:
            yield Served(service, f"http://127.0.0.1:{port}", port, generator, http, config)
    finally:
        server.force_exit = True
        server.should_exit = True
        thread.join()
        service.close()


def save_writer(directory: Path, pieces: Sequence[str]) -> None:
    """Writes a model that answers every chat with these pieces, which are tokens, and then ends its
    turn. Each token has a row of its own in the head, which names the token after it."""
    tokenizer = characters("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_tokens(list(pieces))
    tokenizer.chat_template = WRITER_TEMPLATE
    size = len(tokenizer)
    sizes = SMALL | {"vocab_size": size, "hidden_size": size, "num_hidden_layers": 1}
    config = sources.preset("qwen3-0.6b", sizes | {"tie_word_embeddings": False})
    model = policy.create(config, seed=1)
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("<|assistant|>", *pieces)]
    head = np.zeros((size, size), np.float32)
    head[ids, [*ids[1:], tokenizer.eos_token_id]] = 3.0
    identity = np.eye(size, dtype=np.float32)
    for path, array in model.params.items():
        if path.endswith(("o_proj", "down_proj")):
            model.params[path] = array * 0
        elif path == "embed_tokens":
            model.params[path] = array * 0 + identity
        elif path == "lm_head":
            model.params[path] = array * 0 + head.T
    policy.save(model, directory)
    tokenizer.save_pretrained(directory)


WRITER_TEMPLATE = """\
{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}
{%- for message in messages -%}
{{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + call.function.arguments.city + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
