"""Runs the commands `rl-train` and `rl`. A verb is a file of this folder, named in VERBS.

A verb imports jax and other slow packages only when it needs them: `--help` answers in a fraction of a second, and a
configuration is checked without jax.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rl.commands import train
from rl.commands.exits import run_guarded

# A verb is a module with SUMMARY, add_arguments(parser) and run(arguments); DESCRIPTION and HELP (the epilog) are
# optional.
VERBS = ("train", "plan", "generate", "chat", "reward")


def train_main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `rl-train` and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="rl-train",
        description="Train a language model in the stages of a configuration: SFT, DPO, reward models, GRPO, PPO, ...",
        epilog=train.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_arguments(parser)
    return run_guarded(train.run, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `rl` and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="rl", description="Reinforcement learning and post-training of language models."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        verb = importlib.import_module(f"rl.commands.{name}")
        verb_parser = verbs.add_parser(
            name,
            help=verb.SUMMARY,
            description=getattr(verb, "DESCRIPTION", None),
            epilog=getattr(verb, "HELP", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(verb_parser)
        verb_parser.set_defaults(run=verb.run)
    arguments = parser.parse_args(argv)
    return run_guarded(arguments.run, arguments)


if __name__ == "__main__":
    sys.exit(train_main())
