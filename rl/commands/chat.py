"""`rl chat`: talks with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rewards.text import for_terminal
from rl.commands import environment, sampled_model
from rl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from rollout import Generator
    from rollout.request import Request

SUMMARY = "talk with a model"
HELP = (
    "Each line is your next turn. /reset begins a new conversation; the end of the input "
    "(Ctrl-D) ends the program."
)

MOST_TOKENS = 4096
TOKENS_PER_DISPATCH = 8  # between two looks at the text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    sampled_model.add_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"most tokens of a conversation ({MOST_TOKENS}, or as many as the model has "
        "positions)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Answers the lines of standard input, each as the next turn of a conversation."""
    environment.choose_platform(arguments.platform)
    environment.use_program_cache(environment.default_program_cache())
    environment.leave_torch_out()
    from rl.run.health import devices
    from rollout import Generator, GeneratorOptions
    from rollout.generator import EncodedPrompt
    from rollout.text.chat import render_prompt

    devices.check(arguments.platform)
    source = sampled_model.find(arguments)
    tokenizer = source.tokenizer
    params = source.params
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{arguments.model}: the tokenizer has no chat template; use `rl generate`"
        )
    max_length = arguments.max_length
    if max_length is None:
        max_length = min(MOST_TOKENS, source.positions.number) if source.positions else MOST_TOKENS
    source.check_length(max_length, "--max-length", "Lower --max-length")
    model = source.load()
    try:
        generator = Generator(
            model,
            max_length=max_length,
            slots=1,
            seed=arguments.seed,
            tokenizer=tokenizer,
            options=GeneratorOptions(tokens_per_dispatch=TOKENS_PER_DISPATCH),
        )
    except ValueError as error:
        raise ConfigError(f"--max-length: {error}") from None
    try:
        generator.engine.check_params(params)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(first)
    print(HELP, file=sys.stderr)
    for turn, text in enumerate(_turns()):
        if text == "/reset":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": text})
        try:
            request = EncodedPrompt(tuple(render_prompt(tokenizer, messages))).request(params, turn)
            generator.submit(request)
        except ValueError as error:
            messages.pop()
            print(f"{error}; /reset begins a new conversation", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": _print_answer(generator, request)})


def _print_answer(generator: Generator, request: Request) -> str:
    """Prints a completion while it is sampled, and returns its text."""
    from rl.serve.texts import TextStream

    assert generator.tokenizer is not None  # `run` gives it one
    stream = TextStream(generator.tokenizer, request.params)
    printed = 0
    while request.finish is None:
        generator.step()
        new = request.tokens[printed:]
        printed += len(new)
        piece = stream.add(new, ended=request.finish is not None)
        print(for_terminal(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(flush=True)
    return stream.text


def _turns() -> Iterator[str]:
    """Reads the lines of standard input that are not empty; a terminal shows a prompt."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text:
            yield text
