"""The commands `rl-train` and `rl`.

Nothing heavy is imported before it is needed: `--help` answers in a fraction of a second, and a configuration is
checked without jax. Exit codes: 0 done, 1 a bug, and those of `rl.errors`; 130 after Ctrl-C when there is nothing to
continue.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

from rl import plan
from rl.commands.generate import CHAT_HELP, add_chat_arguments, add_generate_arguments, chat, generate
from rl.errors import ConfigError, DuetError

_PROGRAM_CACHE_BYTES = 4_000_000_000  # the least used go first
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu,cpu", "gpu": "cuda,cpu"}

_TRAIN_HELP = """\
CONFIG is a YAML file, the name of a packaged one (quickstart, tiny), or the directory of a run, which is continued.
Several are laid over each other from left to right; key=value overrides come last:

  rl-train configs/quickstart.yml
  rl-train configs/grpo_deepseek.yml tiny.yml stages.0.steps=3 run.dir=runs/try
  rl-train runs/try                (the same: rl-train resume=runs/try)
"""


def train_main(argv: Sequence[str] | None = None) -> int:
    """The command `rl-train`; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="rl-train",
        description="Train a language model as the configuration says: stages of SFT, GRPO and PPO.",
        epilog=_TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_train_arguments(parser)
    return _guarded(_train, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """The command `rl`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="rl", description="Reinforcement learning of language models.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    train = verbs.add_parser(
        "train",
        help="train as a configuration says (the same as rl-train)",
        epilog=_TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_train_arguments(train)
    train.set_defaults(act=_train)
    planner = verbs.add_parser(
        "plan",
        help="what a run needs on a slice, without the slice",
        description=plan.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_arguments(planner)
    planner.set_defaults(act=_plan)
    writer = verbs.add_parser("generate", help="complete prompts with a model, as JSON lines")
    add_generate_arguments(writer)
    writer.set_defaults(act=_generate)
    talker = verbs.add_parser("chat", help="talk with a model", epilog=CHAT_HELP)
    add_chat_arguments(talker)
    talker.set_defaults(act=_chat)
    reward = verbs.add_parser("reward", help="work on reward functions")
    actions = reward.add_subparsers(dest="action", metavar="ACTION", required=True)
    test = actions.add_parser("test", help="run a reward function on its examples and show the scores")
    test.add_argument("reward", help="registered name, package.module:function, or file.py:function")
    test.set_defaults(act=_reward_test)
    arguments = parser.parse_args(argv)
    return _guarded(arguments.act, arguments)


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="files first, then overrides")
    parser.add_argument("--check", action="store_true", help="check the configuration, print it, and stop")
    group = parser.add_argument_group(
        "several processes (docs/processes.md)", "by default what the cluster says, if there is one"
    )
    group.add_argument(
        "--processes", type=int, metavar="N", help="how many compute the run together; 1: do not ask the cluster"
    )
    group.add_argument("--process", type=int, metavar="I", help="the number of this one, from 0")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="machine of process 0, and a port that is free there")


def _guarded(act, arguments: argparse.Namespace) -> int:
    """Runs a verb; errors of a known kind become text and an exit code."""
    atexit.register(gc.freeze)  # else the interpreter goes through all objects of jax once more before it ends: 0.7 s
    try:
        return act(arguments) or 0
    except DuetError as error:
        _say_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`rl-train ... | head`); a second complaint at exit would hide that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _say_error(error: DuetError) -> None:
    text = str(error)
    if isinstance(error, ConfigError):
        # Lines that start with white space go on from the line before.
        count = sum(not line[:1].isspace() for line in text.splitlines())
        text = text if count == 1 else f"{count} problems\n" + textwrap.indent(text, "  ")
    print(f"{error.heading}: {text}", file=sys.stderr)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Configuration files and overrides: an argument `key.path=value` that names no file is an override."""
    overrides = [text for text in arguments if re.match(r"[\w.\s-]*=", text) and not os.path.exists(text)]
    return [text for text in arguments if text not in overrides], overrides


def _train(arguments: argparse.Namespace) -> int:
    from rl.cluster import launch
    from rl.config import files
    from rl.config.load import load

    config = load(*split_arguments(arguments.config))
    together = None if arguments.check else launch.launch(arguments.processes, arguments.process, arguments.coordinator)
    if together is None or together.index == 0:
        _show(files.changed_yaml(config))
    if arguments.check:
        print("the configuration is good")
        return 0
    _choose_platform(config.platform)
    _keep_programs(config.run.program_cache)
    return _run(config) if together is None else _run_together(config, launch.start(together))


def _run(config) -> int:
    from rl.run.loop import run

    return run(config)


def _run_together(config, watch) -> int:
    """One of several processes. Where it ends by an error it tells the others, and comes back from here no more."""

    def attempt(_) -> int:
        with watch:
            return _run(config)

    try:
        code = _guarded(attempt, None)
    except Exception:
        traceback.print_exc()
        code = 1
    watch.leave(code)
    return code


def _plan(arguments: argparse.Namespace) -> int:
    from rl.config.load import load
    from rl.plan import command

    config = load(*split_arguments(arguments.config))
    options = command.Options(arguments.topology, arguments.memory, arguments.candidates, arguments.json)
    return (command.plan_search if arguments.search else command.plan)(config, options)


def _show(text: str) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, flush=True)


def _choose_platform(platform: str) -> None:
    """jax reads JAX_PLATFORMS when it is imported; `auto` leaves the choice to jax or to the caller's environment."""
    # Tokenizers are all that is used of transformers here; its notice that there is no PyTorch would only worry.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Devices that are forced on the CPU wait for each other on threads, of which there are by default as many as devices. A program
    # may run two collectives at once, and hangs where some devices wait in one and the rest in the other.
    if forced := re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault("PJRT_NPROC", str(8 * int(forced[1])))
    if platform not in _PLATFORMS:
        return
    os.environ["JAX_PLATFORMS"] = _PLATFORMS[platform]
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", _PLATFORMS[platform])


def _keep_programs(directory: str | None) -> None:
    """jax reads these variables when it is imported. Programs that compile in less time are not worth a file. A folder that the
    environment names may be shared with programs that set no limit, so it gets none here either."""
    if directory is None or "jax" in sys.modules:
        return
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(directory).expanduser()
        _mend(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_PROGRAM_CACHE_BYTES))


def _mend(folder: Path) -> None:
    """Gives every program a time of its last use. Under a limit jax writes it after the program, and where one is missing, as after
    a kill between the two, it never keeps a program again."""
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            with contextlib.suppress(OSError):
                used.write_bytes(bytes(8))


def _default_program_cache() -> str | None:
    from rl.config.run import RunOptions

    return RunOptions().program_cache


def _generate(arguments: argparse.Namespace) -> None:
    _choose_platform(arguments.platform)
    _keep_programs(_default_program_cache())
    generate(arguments)


def _chat(arguments: argparse.Namespace) -> None:
    _choose_platform(arguments.platform)
    _keep_programs(_default_program_cache())
    chat(arguments)


def _reward_test(arguments: argparse.Namespace) -> int:
    from rewards.check import main as check

    return check(arguments.reward)


if __name__ == "__main__":
    sys.exit(train_main())
