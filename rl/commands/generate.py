"""`rl generate`: completes prompts with the generator that training uses, and writes JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rl.commands import environment, sampled_model
from rl.errors import ConfigError

if TYPE_CHECKING:
    from rollout import Completion

# Completions that are decoded at the same time, unless the command says otherwise.
SLOTS = 32
SUMMARY = "complete prompts with a model, as JSON lines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    sampled_model.add_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=os.path.expanduser,
        required=True,
        metavar="FILE",
        help="*.jsonl: on each line an object with `prompt`, a text or a list of messages; "
        "*.json, *.csv, *.tsv and *.parquet: rows with `prompt`; any other file, or - for "
        "standard input: a prompt on each line",
    )
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="FILE",
        help="file for the JSON lines, one per completion (standard output)",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="completions per prompt (1)"
    )
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help=f"completions that are decoded at the same time (all, at most {SLOTS})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Writes `samples` completions of each prompt as JSON lines.

    A line holds `prompt`, `sample`, `completion`, `tokens`, `logprobs` and `finish`. The lines of a
    prompt are written as soon as it and all prompts before it are complete.
    """
    environment.choose_platform(arguments.platform)
    environment.use_program_cache(environment.default_program_cache())
    environment.leave_torch_out()
    from rl.data import prompts
    from rl.data.encoding import ExampleEncoder
    from rl.run.health import devices
    from rl.stages.sampling.completing import completions
    from rollout import Generator, GeneratorOptions

    devices.check(arguments.platform)
    read = prompts.read_prompts(arguments.prompts)
    source = sampled_model.find(arguments, n=arguments.samples)
    processors = source.processors
    problems = prompts.problems(
        read, ExampleEncoder(source.tokenizer, processors), Path(arguments.prompts).parent
    )
    longest = max(len(problem.ids) for problem in problems) + source.params.max_new_tokens
    source.check_length(
        longest,
        "the longest prompt and --max-new-tokens",
        "Lower --max-new-tokens or shorten the prompt",
    )
    model = source.load(media=any(problem.expanded for problem in problems))
    slots = (
        min(SLOTS, len(problems) * source.params.n) if arguments.slots is None else arguments.slots
    )
    # Two sizes of a decode: another would take longer to compile than it saves.
    options = GeneratorOptions(batch_sizes=(max(1, slots // 4),))
    sizes = {"max_length": longest, "slots": slots}
    try:
        generator = Generator(
            model, **sizes, seed=arguments.seed, tokenizer=source.tokenizer, options=options
        )
        generator.engine.check_params(source.params)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    done: list[list[Completion | None]] = [[None] * arguments.samples for _ in problems]
    written = 0
    with _output(arguments.output) as out:
        for prompt, sample, completion in completions(
            generator, problems, source.params, processors
        ):
            done[prompt][sample] = completion
            while written < len(done):
                ready = [each for each in done[written] if each is not None]
                if len(ready) < arguments.samples:
                    break
                for line in _lines(problems[written].example.prompt, ready):
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


def _lines(prompt: str | list[dict], completions: Sequence[Completion]) -> Iterator[str]:
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
