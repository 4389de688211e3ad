"""`rl generate`: completes prompts with the generator that training uses, and writes JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rl.commands import sampled_model
from rl.commands.environment import choose_platform, default_program_cache, use_program_cache
from rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rollout import Completion

SUMMARY = "complete prompts with a model, as JSON lines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    sampled_model.add_arguments(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="*.jsonl: on each line an object with `prompt`, a text or a list of messages; any other file, or - for "
        "standard input: a prompt on each line",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="file for the JSON lines, one per completion (standard output)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions per prompt (1)")
    parser.add_argument(
        "--slots", type=int, default=16, metavar="N", help="completions that are decoded at the same time (16)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Writes `samples` completions of each prompt as JSON lines.

    A line holds `prompt`, `sample`, `completion`, `tokens`, `logprobs` and `finish`. The lines of a prompt are written
    as soon as it and all prompts before it are complete.
    """
    choose_platform(arguments.platform)
    use_program_cache(default_program_cache())
    from rollout import Generator
    from rollout.text.chat import ChatError, render_prompt

    prompts = list(_prompts(arguments.prompts))
    if not prompts:
        raise DataError(f"{arguments.prompts}: no prompts")
    model, tokenizer, params = sampled_model.load(arguments, n=arguments.samples)
    try:
        ids = [render_prompt(tokenizer, prompt) for prompt in prompts]
    except ChatError as error:
        raise DataError(f"{arguments.prompts}: {error}") from None
    longest = max(map(len, ids)) + params.max_new_tokens
    try:
        generator = Generator(
            model, max_length=longest, slots=arguments.slots, seed=arguments.seed, tokenizer=tokenizer
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        completions = generator.stream(ids, params)
    except ValueError as error:
        raise DataError(f"{arguments.prompts}: {error}") from None
    done: list[list[Completion | None]] = [[None] * params.n for _ in ids]
    written = 0
    with _output(arguments.output) as out:
        for prompt, sample, completion in completions:
            done[prompt][sample] = completion
            while written < len(ids) and None not in done[written]:
                for line in _lines(prompts[written], done[written]):
                    print(line, file=out)
                out.flush()
                written += 1


def _prompts(file: str) -> Iterator[str | list[dict]]:
    """Yields the prompts of a file. Raises DataError with file and line for a prompt that cannot be read."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--prompts {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {file}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not file.endswith(".jsonl"):
            yield line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise DataError(f"{file}:{number}: not an object with `prompt`") from None
        messages = isinstance(prompt, list) and all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
        )
        if not prompt or not (messages or isinstance(prompt, str)):
            raise DataError(f"{file}:{number}: `prompt` is neither a text nor a list of messages with role and content")
        yield prompt


def _output(file: str | None) -> contextlib.AbstractContextManager[TextIO]:
    if file is None:
        return contextlib.nullcontext(sys.stdout)
    try:
        return open(file, "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--output {file}: {error}") from None


def _lines(prompt: str | list[dict], completions: Sequence[Any]) -> Iterator[str]:
    for sample, completion in enumerate(completions):
        yield json.dumps(
            {
                "prompt": prompt,
                "sample": sample,
                "completion": completion.text,
                "tokens": completion.tokens,
                "logprobs": completion.logprobs,
                "finish": completion.finish,
            },
            ensure_ascii=False,
        )
