"""Files and overrides on the command line. Turns options that are keys of the configuration
(`--steps 3`) into the overrides to write (`stages.0.steps=3`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds the files of a configuration and its overrides, as `config`."""
    parser.add_argument(
        "config",
        nargs="+",
        type=os.path.expanduser,
        metavar="CONFIG | key=value",
        help="files first, then overrides",
    )


def overrides_of(argv: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Returns an override for each unknown option that names a key of the configuration.

    argv: the full command line, where the value of an option may follow it.
    """
    options = [text for text in unknown if text.startswith("--") and len(text) > 2]
    return [override for text in options if (override := _override(text, argv))]


def _override(option: str, argv: Sequence[str]) -> str | None:
    from rl.config.keys import key_for

    name, equals, value = option.removeprefix("--").partition("=")
    key = key_for(name.replace("-", "_"))
    if key is None:
        return None
    if not equals:
        following = argv[argv.index(option) + 1 :][:1]
        value = following[0] if following and not following[0].startswith("--") else "VALUE"
    return f"{key}={value}"
