"""`rl inspect`: shows the rows of a run token by token, and checks tokenizer, template, data and
rewards."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rl.commands.overrides import add_files
from rl.commands.train import split_arguments

SUMMARY = "show the rows of a run token by token, and check template, data and rewards"
DESCRIPTION = (
    "Reads tokenizer and data of a configuration, or of a run's folder, and no weights. Shows the "
    "first rows of each stage and the findings of 18 checks (docs/diagnose.md). Exit code 3 if a "
    "run would be refused, with --strict also for warnings."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add_files(parser)
    parser.add_argument("--stage", metavar="NAME", help="only this stage, e.g. sft or grpo-2")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="rows shown per stage (3)")
    parser.add_argument(
        "--html",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="also write the rows and findings as a page",
    )
    parser.add_argument("--json", action="store_true", help="print rows and findings as JSON")
    parser.add_argument("--strict", action="store_true", help="exit code 3 for warnings too")
    parser.add_argument(
        "--probe",
        type=int,
        default=0,
        metavar="N",
        help="also load the model and sample N prompts with the settings of the first stage that "
        "samples",
    )
    parser.add_argument(
        "--no-rewards", action="store_true", help="do not score the demonstrations with the rewards"
    )


def run(arguments: argparse.Namespace) -> int:
    """Inspects, and returns the exit code."""
    from rl.data.inspect import inspect, show
    from rl.errors import ConfigError, ResourceError
    from rl.run.load import load

    config = load(*split_arguments(arguments.config))
    if arguments.stage not in (None, *config.stage_names):
        raise ConfigError(
            f"--stage {arguments.stage}: the stages are {', '.join(config.stage_names)}"
        )
    inspection = inspect(config, arguments.stage, rewards=not arguments.no_rewards)
    probed = None
    if arguments.probe and not inspection.refused:
        from rl.commands.environment import choose_platform, use_program_cache

        choose_platform(config.platform)
        use_program_cache(config.run.program_cache)
        from rl.run.health.probe import inspect_probe

        probed = inspect_probe(config, arguments.probe, arguments.stage)
    notes = []
    if not inspection.refused and any(
        stage.epochs or stage.held_out or stage.curriculum for stage in config.stages
    ):
        from rl.run.prepare import read_held_out, with_steps  # imports jax

        notes = [*with_steps(config)[1], *read_held_out(config)]
    if arguments.json:
        values = show.to_json(inspection, arguments.rows) | (
            {"probe": probed.to_json()} if probed else {}
        )
        values |= {"notes": notes} if notes else {}
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        for line in show.lines(inspection, arguments.rows, sys.stdout.isatty()):
            print(line)
        for line in notes:
            print(line)
        if probed:
            print(
                *probed.lines(),
                *(f"{each.level}: {each.text}" for each in probed.check()),
                sep="\n",
            )
    if arguments.html:
        try:
            arguments.html.write_text(
                show.page(inspection, arguments.rows), encoding="utf-8", errors="replace"
            )
        except OSError as error:
            raise ResourceError(
                f"--html {arguments.html}: cannot be written: {error.strerror}"
            ) from None
    return (
        3
        if inspection.refused
        or (probed and probed.check())
        or (arguments.strict and inspection.warned)
        else 0
    )
