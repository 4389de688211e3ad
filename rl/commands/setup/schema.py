"""`rl schema`: prints the JSON Schema by which editors check a configuration and explain its
keys."""

from __future__ import annotations

import argparse

SUMMARY = "JSON Schema of a configuration, for editors"
DESCRIPTION = """\
Prints the JSON Schema of a configuration, with the rewards that installed packages bring. Point an
editor to it by the first line of a YAML file (docs/editors.md):

  rl schema > duet.schema.json
  # yaml-language-server: $schema=duet.schema.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of a schema."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--partial",
        action="store_true",
        help="of a file that is merged over others, such as tiny.yml: no key required",
    )
    kind.add_argument("--preset", action="store_true", help="of a file of configs/presets/")
    kind.add_argument("--model", action="store_true", help="of a file of configs/models/")


def run(arguments: argparse.Namespace) -> int:
    """Prints the schema and returns the exit code."""
    from rewards import registry
    from rl.config.editors import files

    kinds = {
        files.PARTIAL: arguments.partial,
        files.PRESET: arguments.preset,
        files.MODEL: arguments.model,
    }
    name = next((name for name, chosen in kinds.items() if chosen), files.RUN)
    print(files.text_of(files.with_rewards(files.read(name), registry.known())), end="")
    return 0
