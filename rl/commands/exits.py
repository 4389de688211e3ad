"""Turns errors into messages and exit codes.

0 done, 1 a bug, 130 after Ctrl-C, 141 if the reader of the output is gone, others as in
`rl.errors`.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import sys
import textwrap
from collections.abc import Callable

from rl.errors import ConfigError, DuetError


def run_guarded(
    act: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace
) -> int:
    """Runs a verb and returns its exit code. Prints errors of rl.errors; any other error is a bug
    and propagates."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # half of a surrogate pair, which models write, has no UTF-8
            stream.reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # skips the slow last garbage collection over all objects of jax
    try:
        return act(arguments) or 0
    except DuetError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the pipe is gone (`rl-train ... | head`). Without this, Python reports it
        # again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _print_error(error: DuetError) -> None:
    text = str(error)
    if isinstance(error, ConfigError):
        # A line that starts with white space continues the line before.
        count = sum(not line[:1].isspace() for line in text.splitlines())
        text = text if count == 1 else f"{count} problems\n" + textwrap.indent(text, "  ")
    print(f"{error.heading}: {text}", file=sys.stderr)
