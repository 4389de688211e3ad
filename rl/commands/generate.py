"""`rl generate` and `rl chat`: what a model writes, made by the generator that training uses.

Only the standard library is imported before a command has work to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rl.errors import ConfigError, DataError, ModelError

CHAT_HELP = (
    "A line is a turn of yours. /reset begins a new conversation; the end of the input (Ctrl-D) ends the program."
)


class Loaded(NamedTuple):
    """A model with its tokenizer, and what to draw, with the ends of a completion that the model names."""

    model: Any
    tokenizer: Any
    params: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that both verbs have."""
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face directory with a tokenizer, or the directory of a finished run"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of a completion (256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="0: always the most likely token (1.0)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest tokens that have this probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="draw from tokens this share as likely as the likeliest"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a completion; may be given several times"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draw; equal seeds give equal completions (0)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and products (float32)"
    )
    parser.add_argument(
        "--platform", choices=("auto", "cpu", "tpu", "gpu"), default="auto", help="where to compute (auto)"
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="*.jsonl: an object with `prompt`, a text or a list of messages, on each line; any other file, and - for standard "
        "input: a prompt on each line",
    )
    parser.add_argument("--output", metavar="FILE", help="JSON lines, one for each completion (standard output)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions of each prompt (1)")
    parser.add_argument(
        "--slots", type=int, default=16, metavar="N", help="completions that are made at the same time (16)"
    )


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="message that stands before the conversation")
    parser.add_argument(
        "--max-length", type=int, default=4096, metavar="N", help="tokens of the longest conversation (4096)"
    )


def generate(arguments: argparse.Namespace) -> None:
    """Writes `samples` completions of each prompt, as JSON lines with `prompt`, `sample`, `completion`, `tokens`, `logprobs` and
    `finish`, in the order of the prompts, each as soon as it and those before it are done."""
    from rollout import Generator
    from rollout.text.chat import ChatError, render_prompt

    prompts = list(_prompts(arguments.prompts))
    if not prompts:
        raise DataError(f"{arguments.prompts}: no prompts")
    model, tokenizer, params = _load(arguments, n=arguments.samples)
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
        made = generator.stream(ids, params)
    except ValueError as error:
        raise DataError(f"{arguments.prompts}: {error}") from None
    done, written = [[None] * params.n for _ in ids], 0
    with _output(arguments.output) as out:
        for prompt, sample, completion in made:
            done[prompt][sample] = completion
            while written < len(ids) and None not in done[written]:
                for line in _lines(prompts[written], done[written]):
                    print(line, file=out)
                out.flush()
                written += 1


def chat(arguments: argparse.Namespace) -> None:
    """Answers the lines of standard input, each as the next turn of one conversation."""
    from rollout import Generator
    from rollout.text.chat import render_prompt

    model, tokenizer, params = _load(arguments)
    if tokenizer.chat_template is None:
        raise ModelError(f"{arguments.model}: the tokenizer has no chat template; use `rl generate`")
    try:
        generator = Generator(model, max_length=arguments.max_length, slots=1, seed=arguments.seed, tokenizer=tokenizer)
    except ValueError as error:
        raise ConfigError(f"--max-length: {error}") from None
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(first)
    print(CHAT_HELP, file=sys.stderr)
    for turn, said in enumerate(_turns()):
        if said == "/reset":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": said})
        try:
            [[completion]] = generator.generate([render_prompt(tokenizer, messages)], params, ids=[turn])
        except ValueError as error:
            messages.pop()
            print(f"{error}; /reset begins a new conversation", file=sys.stderr)
            continue
        print(completion.text, flush=True)
        messages.append({"role": "assistant", "content": completion.text})


def _turns() -> Iterator[str]:
    """The lines of standard input that are not empty; a prompt is shown to a person."""
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if said:
            yield said


def _load(arguments: argparse.Namespace, **changes) -> Loaded:
    """Raises ModelError for a directory from which no model or tokenizer can be read, ConfigError for what cannot be drawn."""
    directory = Path(arguments.model)
    if (directory / "export" / "config.json").is_file():
        directory = directory / "export"
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{arguments.model}: no config.json there; give a Hugging Face directory, or that of a finished run"
        )

    import policy
    from policy.huggingface.hf import UnsupportedModel
    from policy.huggingface.tensorfiles import ModelFileError
    from policy.mesh.sharding import layout
    from rollout import SamplingParams
    from rollout.text.tokenizer import load_tokenizer, stop_ids

    drawn = {
        name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
    }
    try:
        params = SamplingParams(**drawn | changes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        tokenizer = load_tokenizer(directory)
        model = policy.load(directory, dtype=arguments.dtype, mesh=layout({"fsdp": -1}))
    except (ModelFileError, UnsupportedModel, ValueError) as error:
        raise ModelError(f"{directory}: {error}") from None
    return Loaded(model, tokenizer, replace(params, stop_token_ids=stop_ids(tokenizer, directory)))


def _prompts(file: str) -> Iterator[str | list[dict]]:
    """Raises DataError, with the number of the line, for a file that cannot be read as prompts."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {file}: {error}") from None
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


def _output(file: str | None):
    if file is None:
        return nullcontext(sys.stdout)
    try:
        return open(file, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file}: {error}") from None


def _lines(prompt, completions) -> Iterator[str]:
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
