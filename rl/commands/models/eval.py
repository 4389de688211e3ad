"""`rl eval`: measures a model on tasks, or on a file of one's own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rewards.text import quoted
from rl.commands import environment, sampled_model
from rl.errors import ConfigError

if TYPE_CHECKING:
    from policy.json_types import JsonObject
    from rl.commands.sampled_model import SampledModel
    from rl.evaluation.flags import EvalFlags
    from rl.evaluation.folder import EvaluationFolder
    from rl.evaluation.prepare import PreparedTask
    from rl.evaluation.task import Task
    from rollout import Generator

SLOTS = 32
SUMMARY = "measure a model on tasks or on your own file"
DESCRIPTION = """Sample completions of the problems of tasks, or of a file of your own, score them,
and print the share that is right with its 95% interval. The folder of the results is read by
rl report, rl view, rl samples and rl compare. The same command continues after an interruption."""
HELP = """examples:
  rl eval runs/a --data test.jsonl --reward numeric_answer
  rl eval Qwen/Qwen3-0.6B --task gsm8k,math500 --limit 100
  rl eval runs/a --task aime25 --samples 32 --maj 8,32
  rl compare evals/before evals/after

exit codes: 0 done, 2 wrong usage, 3 data, 4 model, 5 no room or folder in use, 130 Ctrl-C"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    sampled_model.add_model(parser)
    _add_problems(parser)
    _add_sampling(parser)
    sampled_model.add_seed(parser)
    sampled_model.add_computation(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=os.path.expanduser,
        metavar="DIR",
        help="folder of the results (evals/MODEL-TASKS)",
    )
    parser.add_argument("--json", action="store_true", help="print eval.json in place of the table")
    parser.add_argument(
        "--slots",
        type=_count,
        metavar="N",
        help=f"completions that are decoded at the same time (all, at most {SLOTS})",
    )


def _add_problems(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured."""
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help="tasks of the package, or files of your own (*.yml); --task help lists them",
    )
    parser.add_argument(
        "--data",
        type=os.path.expanduser,
        metavar="FILE",
        help="file, folder or hub dataset with rows of `prompt` and what the reward needs; with "
        "one --task: where its rows are",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME",
        help="scores the rows of --data, as numeric_answer, math or my.py:function; several: each "
        "is reported; with options as '{reward: NAME, options: {...}}'",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN,...",
        help="columns of --data that have other names, as prompt=question,answer=solution",
    )
    parser.add_argument("--split", metavar="NAME", help="split of a folder or hub dataset")
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="the first N problems of each task"
    )
    parser.add_argument(
        "--few-shot",
        type=_count_or_zero,
        metavar="N",
        help="solved problems before each prompt; of --data they are its first N rows",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="prompts through the chat template, or as plain text (tasks: the template of a model "
        "that has one; --data: plain text)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--correct-at",
        type=float,
        metavar="X",
        help="a completion is right from this reward of --reward on (1.0)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds how completions are drawn; what is left out is as the task says."""
    parser.add_argument(
        "--samples", type=_count, metavar="N", help="completions of a problem (task: 1)"
    )
    parser.add_argument(
        "--k", type=_counts, metavar="K,...", help="report pass@k for these k (the samples)"
    )
    parser.add_argument("--maj", type=_counts, metavar="K,...", help="report maj@k for these k")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0: always the most likely token (task: 0 with one sample, else 1)",
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from tokens with this total probability"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        metavar="N",
        help="most tokens of a completion (as the task says; --data: 256)",
    )
    sampled_model.add_stop(parser)


def run(arguments: argparse.Namespace) -> None:
    """Evaluates the model, prints the results and writes them to the folder."""
    from rl.evaluation import task as tasks

    if arguments.task == ["help"]:
        for name in tasks.names():
            each = tasks.read(name)
            print(f"{name:12}{each.rows or '':>6}  {each.about}")
        return
    flags = _flags(arguments)
    chosen = _tasks(arguments, flags)
    environment.choose_platform(arguments.platform)
    environment.use_program_cache(environment.default_program_cache())
    environment.leave_torch_out()
    from rl.data.encoding import ExampleEncoder
    from rl.evaluation.folder import EvaluationFolder
    from rl.evaluation.prepare import prepared
    from rl.run.health import devices

    devices.check(arguments.platform)
    source = _source_model(arguments)
    identity = _identity(arguments, source)
    encoder = ExampleEncoder(source.tokenizer, source.processors)
    ready = [prepared(name, task, flags, encoder, source.params) for name, task in chosen.items()]
    for task in ready:
        chat = "chat template" if task.settings["chat"] else "plain text"
        print(
            f"{task.name}: {len(task.problems):,} problems, samples of each: {task.params.n}, prompts "
            f"as {chat}, shots: {task.settings['shots']}",
            file=sys.stderr,
        )
    with EvaluationFolder(_output(arguments, ready), identity, ready) as folder:
        _evaluate(arguments, source, ready, folder)
        _show(arguments, folder)


def _evaluate(
    arguments: argparse.Namespace,
    source: SampledModel,
    tasks: list[PreparedTask],
    folder: EvaluationFolder,
) -> None:
    """Samples what the folder lacks. On Ctrl-C what is complete stays."""
    from rl.evaluation.measure import measure
    from rl.records.manifest import Manifest

    done = folder.done()
    if any(done.values()):
        count = sum(map(len, done.values()))
        print(f"{folder.path}: {count:,} problems are measured already", file=sys.stderr)
    with Manifest(folder.path):
        generator = None
        for task in tasks:
            if len(done[task.name]) < len(task.problems):
                generator = generator or _generator(arguments, source, tasks)
                try:
                    measure(generator, task, folder, done[task.name], source.processors)
                except KeyboardInterrupt:
                    print(
                        f"interrupted: the problems that are scored are in {folder.path}; the same "
                        f"command with -o {quoted(folder.path)} continues",
                        file=sys.stderr,
                    )
                    raise
            folder.finish(task)


def _generator(
    arguments: argparse.Namespace, source: SampledModel, tasks: list[PreparedTask]
) -> Generator:
    """Reads the weights and makes the generator that all tasks share."""
    from rollout import Generator, GeneratorOptions

    problems = [(task, problem) for task in tasks for problem in task.problems]
    longest = max(len(problem.ids) + task.params.max_new_tokens for task, problem in problems)
    source.check_length(
        longest, "the longest prompt and --max-new-tokens", "Lower --max-new-tokens"
    )
    model = source.load(media=any(problem.expanded for _, problem in problems))
    count = sum(len(task.problems) * task.params.n for task in tasks)
    slots = arguments.slots or min(SLOTS, count)
    options = GeneratorOptions(batch_sizes=(max(1, slots // 4),))
    try:
        generator = Generator(
            model,
            max_length=longest,
            slots=slots,
            seed=arguments.seed,
            tokenizer=source.tokenizer,
            options=options,
        )
        for task in tasks:
            generator.engine.check_params(task.params)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return generator


def _show(arguments: argparse.Namespace, folder: EvaluationFolder) -> None:
    from rl.evaluation.tables import text

    if arguments.json:
        print(json.dumps(folder.content, indent=1, ensure_ascii=False))
        return
    print(text(folder.results))
    word = quoted(folder.path)
    print(
        f"\n{folder.path}/eval.json has all numbers. See the completions: rl view {word}, rl "
        f"samples {word}; compare with another model: rl compare {word} DIR",
        file=sys.stderr,
    )


def _flags(arguments: argparse.Namespace) -> EvalFlags:
    """Returns what the command line says. Raises ConfigError for what does not go together."""
    from rl.evaluation.flags import EvalFlags

    if not arguments.task and not arguments.data:
        raise ConfigError(
            "name what to measure: --task gsm8k (rl eval MODEL --task help lists the tasks), or "
            "--data FILE --reward NAME"
        )
    if arguments.data and not arguments.task and not arguments.reward:
        raise ConfigError(
            "--data: say what scores the completions, as --reward numeric_answer, math, "
            "exact_answer or my.py:function"
        )
    if arguments.task and arguments.reward:
        raise ConfigError("--reward: a task has its own; leave --task or --reward out")
    if arguments.task and arguments.correct_at is not None:
        raise ConfigError(
            "--correct-at: the file of a task says from which reward on a completion is right "
            "(`correct_at` of a score); leave --task or --correct-at out"
        )
    columns = []
    for pair in (arguments.columns or "").split(",") if arguments.columns else ():
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise ConfigError(f"--columns {pair}: write NAME=COLUMN, as prompt=question")
        columns.append((name, column))
    if columns and arguments.task:
        raise ConfigError("--columns: the file of a task names its columns (`columns`)")
    return EvalFlags(
        columns=tuple(columns),
        rewards=tuple(arguments.reward),
        stop=tuple(arguments.stop),
        **{
            name: getattr(arguments, name)
            for name in (
                *("seed", "data", "split", "samples", "k", "maj", "temperature", "top_p"),
                *("max_new_tokens", "limit", "few_shot", "chat", "system", "correct_at"),
            )
        },
    )


def _tasks(arguments: argparse.Namespace, flags: EvalFlags) -> dict[str, Task]:
    """Returns the tasks by name. Raises ConfigError."""
    from rl.evaluation import task as tasks
    from rl.evaluation.flags import with_flags
    from rl.evaluation.own_file import own_task, task_name

    if not arguments.task:
        return {task_name(flags): with_flags(own_task(arguments.data, flags), flags)}
    names = [name for text in arguments.task for name in text.split(",") if name]
    if arguments.data and len(names) > 1:
        raise ConfigError("--data: names the rows of one task; evaluate the tasks one by one")
    result: dict[str, Task] = {}
    for name in names:
        short = Path(name).stem if name.endswith((".yml", ".yaml")) else name
        if short in result:
            raise ConfigError(f"--task {name}: named twice")
        result[short] = with_flags(tasks.read(name), flags)
    return result


def _source_model(arguments: argparse.Namespace) -> SampledModel:
    """Returns the model. For a run that goes on, --step becomes its newest checkpoint, so that a
    later one does not change the evaluation."""
    changes = {"temperature": 0.0, "max_new_tokens": 1, "top_p": 1.0, "stop": ()}
    source = sampled_model.find(arguments, **changes)
    if arguments.step is None and not isinstance(source.source, sampled_model.ModelFiles):
        arguments.step = source.source.place
        source = sampled_model.find(arguments, **changes)
    return source


def _identity(arguments: argparse.Namespace, source: SampledModel) -> JsonObject:
    """Returns what identifies the weights in eval.json."""
    from rl.evaluation.model import identity

    own = source.source
    checkpoint = None if isinstance(own, sampled_model.ModelFiles) else own.place
    return identity(arguments.model, own.directory, checkpoint, arguments.dtype)


def _output(arguments: argparse.Namespace, tasks: list[PreparedTask]) -> Path:
    if arguments.output:
        return Path(arguments.output)
    from rl.config.data import source_name

    path = Path(arguments.model)
    model = path.resolve().name if path.exists() else arguments.model.replace("/", "-")
    step = f"-{arguments.step}" if arguments.step else ""
    names = "-".join(task.name for task in tasks)
    return Path("evals") / source_name(f"{model}{step}-{names}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 1 or more")
    return int(text)


def _count_or_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 0 or more")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))
