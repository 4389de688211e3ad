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
    from rl.data import prompts
    from rl.data.encoding import ExampleEncoder
    from rollout import Generator

    read = prompts.read_prompts(arguments.prompts)
    model, tokenizer, params = sampled_model.load(arguments, n=arguments.samples)
    problems = prompts.problems(read, ExampleEncoder(tokenizer), Path(arguments.prompts).parent)
    ids = [problem.ids for problem in problems]
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
                for line in _lines(problems[written].example.prompt, done[written]):
                    print(line, file=out)
                out.flush()
                written += 1


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
