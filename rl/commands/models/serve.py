"""`rl serve`: answers requests of clients of OpenAI and Anthropic with a model."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.commands import environment, sampled_model
from rl.errors import ConfigError, ModelError
from rl.listener import address_of, bound, loopback

if TYPE_CHECKING:
    from policy.model import Model
    from rollout import Generator
    from rollout.adapter_pool import AdapterPool
    from rollout.media.processors import Processors
    from rollout.text.interface import Tokenizer

SUMMARY = "serve a model over HTTP, for clients of OpenAI and Anthropic"
HELP = (
    "SIGTERM and Ctrl-C refuse new requests and wait for running ones; a second one ends at once."
)
MOST_TOKENS = 4096
SLOTS = 16
# Between two looks at new requests and at streams: more would keep both waiting.
TOKENS_PER_DISPATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    sampled_model.add_model(parser)
    _add_address(parser)
    _add_sizes(parser)
    _add_limits(parser)
    sampled_model.add_computation(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    """Adds where the server listens, and to whom."""
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: any free one (8000)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument(
        "--token-file",
        type=os.path.expanduser,
        metavar="FILE",
        help="file with the key that requests must have (that of DUET_API_KEY, or none); a host "
        "that other machines reach needs one",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIRECTORY",
        help="adapter of PEFT that requests choose as the model NAME; may be given several times",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the model (that of its folder)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds how much the generator computes at a time, and how."""
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"most tokens of a prompt with its completion ({MOST_TOKENS}, or as many as the model "
        "has positions)",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=SLOTS,
        metavar="N",
        help=f"completions that are decoded at the same time ({SLOTS})",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="completions depend on the prompt and the seed only, to the last bit; they arrive "
        "when they have been verified (docs/exact.md)",
    )
    parser.add_argument(
        "--chat-template",
        type=os.path.expanduser,
        metavar="FILE",
        help="jinja template that replaces the tokenizer's own",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds what the server accepts."""
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="completions that may wait for a slot; more are answered with 429 (256)",
    )
    parser.add_argument(
        "--max-n", type=int, default=16, metavar="N", help="most samples of a prompt (16)"
    )
    parser.add_argument(
        "--max-body-mb",
        type=float,
        default=4,
        metavar="N",
        help="most megabytes of a request; more are answered with 413 (4)",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=30,
        metavar="N",
        help="seconds that running requests have to end after SIGTERM (30)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C: takes the port, reads the model, compiles, and listens."""
    _check(arguments)
    try:
        import uvicorn  # noqa: F401

        from rl.serve import server
        from rl.serve.limits import ServerLimits
        from rl.serve.service import Service
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`rl serve` needs {error.name}; type: pip install 'duet-rl[serve]'"
        ) from None
    key = server.key(arguments.token_file)
    if key is None and not loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host}: other machines could use the model; name a key with "
            "--token-file FILE or DUET_API_KEY"
        )
    listener = bound(arguments.host, arguments.port)
    with listener:
        served = _load(arguments)
        limits = ServerLimits(
            arguments.max_queue,
            arguments.max_n,
            int(arguments.max_body_mb * 2**20),
            arguments.drain_s,
        )
        service = Service(
            served.generator,
            served.tokenizer,
            served.name,
            served.stop_token_ids,
            limits,
            served.processors,
        )
        address = address_of(listener, arguments.host)
        sizes = f"max length {service.max_length}, {arguments.slots} slots"
        print(f"{service.name} at {address}/v1 ({sizes}); Ctrl-C ends it", flush=True)
        server.serve(service, listener, arguments.host, key)


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for numbers that no server can have."""
    least = {"slots": 1, "max_queue": 0, "max_n": 1, "max_body_mb": 0.001, "drain_s": 0}
    for name, number in least.items():
        value = getattr(arguments, name)
        if not value >= number:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {number}")
    if math.isinf(arguments.max_body_mb):
        raise ConfigError("--max-body-mb inf: must be a number of megabytes, such as 64")


@dataclass(frozen=True)
class _Served:
    """A model that is ready to answer. tokenizer: with the chat template of the server."""

    name: str
    tokenizer: Tokenizer
    generator: Generator
    stop_token_ids: tuple[int, ...]
    processors: Processors | None


def _load(arguments: argparse.Namespace) -> _Served:
    """Reads the model and compiles its programs."""
    environment.choose_platform(arguments.platform)
    environment.use_program_cache(environment.default_program_cache())
    environment.leave_torch_out()
    from rl.run.health import devices
    from rollout import Generator, GeneratorOptions

    devices.check(arguments.platform)
    source = sampled_model.find(arguments)
    tokenizer = _with_template(source.tokenizer, arguments.chat_template)
    max_length = arguments.max_length
    if max_length is None:
        max_length = min(MOST_TOKENS, source.positions.number) if source.positions else MOST_TOKENS
    source.check_length(max_length, "--max-length", "Lower --max-length")
    processors = source.processors
    model = source.load(media=processors is not None)
    adapters = _adapters(model, arguments.adapter)
    options = GeneratorOptions(
        tokens_per_dispatch=TOKENS_PER_DISPATCH,
        # Others cost more to compile than they save, and adapters copy rows where they take turns.
        batch_sizes=() if adapters else (1, max(1, arguments.slots // 4)),
        exact=arguments.exact,
        queue="arrival",
    )
    sizes = {"max_length": max_length, "slots": arguments.slots}
    try:
        generator = Generator(
            adapters.model if adapters else model,
            **sizes,
            tokenizer=tokenizer,
            options=options,
            adapters=adapters,
        )
    except ValueError as error:
        raise ConfigError(f"--max-length: {error}") from None
    name = arguments.name or Path(arguments.model).resolve().name
    if adapters and name in adapters.names:
        raise ConfigError(f"--adapter {name}=...: the model itself has this name; see --name")
    print(f"{name}: compiling, which takes minutes the first time", file=sys.stderr, flush=True)
    generator.compile_for_clients(max_length, source.params)
    return _Served(name, tokenizer, generator, source.params.stop_token_ids, processors)


def _adapters(model: Model, named: Sequence[str]) -> AdapterPool | None:
    """Reads the adapters of the command line. Raises ConfigError for one without a name, ModelError
    for one that cannot be read or does not fit."""
    from policy.huggingface.tensorfiles import ModelFileError
    from rollout.adapter_pool import AdapterPool

    directories = {}
    for text in named:
        name, _, directory = text.partition("=")
        if not name or not directory or name in directories:
            raise ConfigError(f"--adapter {text}: write NAME=DIRECTORY, each name once")
        directories[name] = os.path.expanduser(directory)
    try:
        return AdapterPool(model, directories) if directories else None
    except (ModelFileError, ValueError) as error:
        raise ModelError(f"--adapter: {error}") from None


def _with_template(tokenizer: Tokenizer, file: str | None) -> Tokenizer:
    """Returns the tokenizer with the chat template of a file. Raises ConfigError."""
    if file is None:
        return tokenizer
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file}: {error}") from None
    tokenizer.chat_template = template  # type: ignore[misc]
    return tokenizer
