"""`rl import`: writes the configuration of a run of TRL, verl, Tunix or OpenRLHF for Duet."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

SUMMARY = "write the configuration of TRL, verl, Tunix or OpenRLHF for Duet"
DESCRIPTION = """\
Reads a configuration of another framework and writes the same run for Duet, with a comment at each
value that says where it comes from. Nothing of the file runs.
"""
HELP = """\
FILE is YAML, JSON, or a script of a shell with the command that starts the training. Several are
merged from left to right, then keys of the framework:

  rl import trl grpo.yaml -o run.yml
  rl import verl run_qwen3_8b_fsdp.sh data.train_batch_size=256 -o run.yml
  rl import openrlhf train.sh --rows 40000 -o run.yml

Prints what is mapped, what is changed in meaning, and what is not supported. Exit code 2 if the
training depends on something that is not supported; the file is written, and names it at its top.
"""
FRAMEWORKS = ("trl", "verl", "tunix", "openrlhf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument(
        "sources", nargs="+", metavar="FILE | key=value", help="files first, then keys"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="file to write (default: print it)"
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="rows of the dataset, for a warm-up as a share"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="trl: processes (GPUs) of the training"
    )
    parser.add_argument("--trainer", default="", help="trl: sft, dpo, grpo, ... of a YAML file")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: the report, and without -o the file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, prints the report, and returns the exit code."""
    from rl.errors import ConfigError
    from rl.imports import convert, writing

    for name in ("rows", "processes"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: must be at least 1")
    if (output := arguments.output) is not None:
        output = output.expanduser()
        _check_output(output)
    facts = convert.Facts(arguments.rows, arguments.processes, arguments.trainer)
    draft = convert.converted(arguments.framework, arguments.sources, facts, os.environ)
    text = writing.configuration(draft, arguments.sources)
    faults = writing.faults(text)
    if output is not None:
        _write(output, text)
    if arguments.json:
        report = writing.as_json(draft) | {"faults": faults}
        report |= {"configuration": text} if output is None else {}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    elif output is None:
        print(text, end="")
        print(writing.report(draft), file=sys.stderr)
    else:
        print(writing.report(draft))
    if faults:
        raise ConfigError("\n".join(faults))
    return ConfigError.exit_code if draft.refused else 0


def _check_output(path: Path) -> None:
    """Raises ConfigError for a file that this verb did not write, and without a folder for it."""
    from rl.errors import ConfigError
    from rl.imports.writing import WRITTEN_BY

    if not path.parent.is_dir():
        raise ConfigError(f"-o {path}: there is no folder {path.parent}; make it first")
    try:
        start = path.read_text(encoding="utf-8", errors="replace")[: len(WRITTEN_BY)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"-o {path}: cannot be written: {error.strerror}") from None
    if start and start != WRITTEN_BY:
        raise ConfigError(f"-o {path}: `rl import` did not write this file; name another")


def _write(path: Path, text: str) -> None:
    from rl.errors import ResourceError

    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResourceError(f"-o {path}: cannot be written: {error.strerror}") from None
