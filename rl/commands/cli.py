"""Runs the commands `rl-train` and `rl`. A verb is a file of this folder or of one in it, named in
VERBS.

runs/ has the verbs that read the folder of a run, setup/ those that come before one, models/ those
that use the model that came of one.

A verb imports jax and other slow packages only when it needs them: `--help` answers in a fraction
of a second, and a configuration is checked without jax.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from rewards.text import quoted
from rl.commands import train
from rl.commands.exits import run_guarded
from rl.commands.overrides import overrides_of

COMPLETE = "_complete"  # what the scripts of `rl completion` call; no verb of the help
_NAMES = {"setup.import_config": "import"}  # verbs that are words of Python
# A verb is a module with SUMMARY, add_arguments(parser) and run(arguments); DESCRIPTION and HELP
# (the epilog) are optional.
VERBS = {
    _NAMES.get(path, path.rpartition(".")[2]): f"rl.commands.{path}"
    for path in (
        *(
            "train",
            "runs.stop",
            "plan",
            "setup.launch",
            "setup.inspect",
            "runs.explain",
            "setup.import_config",
            "runs.report",
            "runs.compare",
            "runs.view",
            "runs.fetch",
        ),
        *(
            "runs.samples",
            "rollout",
            "models.eval",
            "generate",
            "chat",
            "models.serve",
            "models.export",
            "teach",
            "reward",
            "setup.doctor",
            "setup.schema",
            "setup.completion",
        ),
    )
}
"""Verb -> its module, in the order of the help."""


def train_main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `rl-train` and returns its exit code."""
    return run_guarded(train.run, _parsed(train_parser(), argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `rl` and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [COMPLETE]:
        from rl.config.editors import complete

        return complete.main(argv[1:])
    root = parser()
    arguments = _parsed(root, argv)
    if arguments.verb is None:
        root.print_help()
        return 0
    return run_guarded(arguments.run, arguments)


def train_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `rl-train`."""
    parser = argparse.ArgumentParser(
        prog="rl-train",
        description="Train a language model in the stages of a configuration: SFT, DPO, reward "
        "models, GRPO, PPO, ...",
        epilog=train.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_version(parser)
    train.add_arguments(parser)
    return parser


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `rl`, with all verbs."""
    parser = argparse.ArgumentParser(
        prog="rl", description="Reinforcement learning and post-training of language models."
    )
    _add_version(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, module in VERBS.items():
        verb = importlib.import_module(module)
        verb_parser = verbs.add_parser(
            name,
            help=verb.SUMMARY,
            description=getattr(verb, "DESCRIPTION", None),
            epilog=getattr(verb, "HELP", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(verb_parser)
        verb_parser.set_defaults(run=verb.run)
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version of duet-rl and exit"
    )


class _Version(argparse.Action):
    """Prints the version of the installed package. Reads it only when asked, to keep `--help`
    quick."""

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"duet-rl {version('duet-rl')}")
        except PackageNotFoundError:
            parser.exit(1, "duet-rl is not installed: run `pip install -e .` in the checkout\n")
        parser.exit()


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line. Exits with 2 if an argument is unknown, with the override if it is a
    configuration key."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments, unknown = parser.parse_known_args(argv)
    if hasattr(arguments, "filter") and not any(re.match("--.", word) for word in unknown):
        # argparse fills FILTER before the first option only, and takes a term `-eval` for an
        # option.
        arguments.filter = [*arguments.filter, *(word for word in unknown if word != "--")]
        unknown = []
    for name in ("config", "sources"):
        words = getattr(arguments, name, None)
        if isinstance(words, list) and not any(word.startswith("-") for word in unknown):
            # `rl-train FILE --check key=value`, `rl import trl FILE -o run.yml key=value`
            setattr(arguments, name, [*words, *unknown])
            unknown = []
    if unknown:
        overrides = overrides_of(argv, unknown) if hasattr(arguments, "config") else []
        hint = f"; write {' '.join(map(quoted, overrides))}" if overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


if __name__ == "__main__":
    sys.exit(train_main())
