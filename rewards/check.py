"""Runs a reward on its examples, for `rl reward test file.py:function`.

The module of the function lists the examples:

    EXAMPLES = [
        {"prompt": "2 + 2?", "completion": "4", "answer": "4", "score": 1.0},
        {"prompt": "2 + 2?", "completion": "5", "answer": "4", "score": 0.0},
    ]

`prompt`, `completion` and the expected `score` (None: not applicable) are required. `options` holds
options of the function. Every other key is a column; `image`, `images`, `audio` and `audios` are
read as in rows of data, and relative paths start from the folder of the file. A module with several
rewards has a dict from function name to such a list.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rewards import registry
from rewards.registry import RewardError
from rewards.runner import Runner, RunnerOptions
from rewards.workers.scores import RewardFault, Scores

Convert = Callable[[dict, Path], dict]
"""(example, folder that relative paths start from) -> example."""
_TOLERANCE = 1e-6
_OWN_KEYS = ("prompt", "completion", "score", "options")
_SMOKE = (
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": "What is 2 + 2?", "completion": ""},
)
_HOW_TO = """\
{spec} has no examples, so it was only called on two samples of no meaning. Add to its file:

    EXAMPLES = [
        {{"prompt": "2 + 2?", "completion": "4", {columns}"score": 1.0}},
    ]"""

_ONE_BY_ONE = """\
called with two completions of a group: {}
A run calls it with all completions of a group: return a list
with one number for each completion."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one example.

    expected, got: scores, or None where the reward does not apply.
    fault: the failure of the function, or None.
    """

    example: dict
    expected: float | None
    got: float | None
    fault: RewardFault | None
    passed: bool


@dataclass(frozen=True)
class ExampleReport:
    """The outcomes of all examples of a reward.

    skipped: number of examples that did not run, because one before them hung.
    group_fault: why a call with two completions failed although the same completion alone did not,
    or None. advice: what to do about missing examples, or None.
    """

    spec: str
    outcomes: list[Outcome]
    skipped: int = 0
    advice: str | None = None
    group_fault: str | None = None

    @property
    def passed(self) -> bool:
        """Tells whether there were examples, all of them ran and passed, and a call with two
        completions worked."""
        complete = bool(self.outcomes) and not self.skipped and self.group_fault is None
        return complete and all(outcome.passed for outcome in self.outcomes)


def run_examples(
    spec: str, options: dict | None = None, timeout_s: float = 1.0, convert: Convert | None = None
) -> ExampleReport:
    """Calls the reward on each of its examples in a worker process. Options of an example override
    `options`.

    A run calls a reward with all completions of a group, so the first example without a fault is
    also called twice in one call.
    convert: makes the pictures and sounds of an example what rewards get; a ValueError of it is one
    of the example. Stops at the first example that takes more than `timeout_s` seconds. A reward
    without examples is called on two generic samples if it needs no column. Raises RewardError as
    `registry.check` does, and for malformed examples.
    """
    located = registry.locate(spec)
    examples = _examples(located, convert)
    if examples is not None:
        return _run(spec, examples, options or {}, timeout_s)
    needed = [
        name
        for name in registry.parameters(located.function, spec).required
        if name not in {*registry.GIVEN, *(options or {})}
    ]
    advice = _HOW_TO.format(
        spec=spec, columns="".join(f"{json.dumps(name)}: ..., " for name in needed)
    )
    if needed:
        what = f"it needs the column{'s' * (len(needed) > 1)} {', '.join(needed)}"
        advice = advice.replace("only called on two samples of no meaning", f"not called: {what}")
        return ExampleReport(spec, [], advice=advice)
    report = _run(spec, [dict(sample) for sample in _SMOKE], options or {}, timeout_s)
    return replace(report, advice=advice)


def main(
    spec: str, options: dict | None = None, timeout_s: float = 1.0, convert: Convert | None = None
) -> int:
    """Prints the outcome of every example. Returns 0 if all passed, 1 if not, 2 if the reward
    cannot be called. convert: as for `run_examples`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True)
    log = logging.getLogger("duet.rewards")
    log.addFilter(_drop_record)  # faults are printed below
    try:
        report = run_examples(spec, options, timeout_s, convert)
    except RewardError as error:
        console.print(Text(str(error), style="red"))
        return 2
    finally:
        log.removeFilter(_drop_record)
    table = Table("", "prompt", "completion", "expected", "got")
    for outcome in report.outcomes:
        sign = Text("ok", style="green") if outcome.passed else Text("FAIL", style="red")
        texts = (_cell(outcome.example["prompt"]), _cell(outcome.example["completion"]))
        expected = _cell(outcome.expected) if "score" in outcome.example else "any"
        table.add_row(
            sign,
            *map(
                Text,
                (*texts, expected, outcome.fault.kind if outcome.fault else _cell(outcome.got)),
            ),
        )
    if report.outcomes:
        console.print(table)
    for outcome in report.outcomes:
        if outcome.fault is not None:
            console.print(
                Text(
                    f"{_cell(outcome.fault.completion)}: "
                    f"{outcome.fault.kind}\n{outcome.fault.traceback}"
                )
            )
    if report.group_fault:
        console.print(Text(_ONE_BY_ONE.format(report.group_fault), style="red"))
    if report.advice:
        console.print(Text(report.advice, style="yellow"))
    elif report.skipped:
        waited = f"a call without an answer in {timeout_s:g} s; `--timeout SECONDS` waits longer"
        console.print(Text(f"{report.skipped} more not run after {waited}"))
    passed = sum(outcome.passed for outcome in report.outcomes)
    console.print(
        Text(
            f"{spec}: {passed} of {len(report.outcomes)} passed",
            style="green" if report.passed else "red",
        )
    )
    if report.advice and not report.outcomes:
        return 2
    return 0 if report.passed else 1


def _examples(located: registry.Located, convert: Convert | None) -> list[dict] | None:
    module = sys.modules.get(located.function.__module__)
    examples = getattr(module, "EXAMPLES", None)
    if isinstance(examples, dict):
        examples = examples.get(located.name)
    if not examples:
        return None
    for number, example in enumerate(examples):
        missing = [key for key in ("prompt", "completion", "score") if key not in example]
        if missing:
            raise RewardError(
                f"EXAMPLES[{number}] of {located.address} lacks {', '.join(map(repr, missing))}"
            )
    if convert is None:
        return examples
    folder = Path(getattr(module, "__file__", None) or "").parent
    converted = []
    for number, example in enumerate(examples):
        try:
            converted.append(convert(example, folder))
        except ValueError as error:
            raise RewardError(f"EXAMPLES[{number}] of {located.address}: {error}") from None
    return converted


def _run(spec: str, examples: list[dict], options: dict, timeout_s: float) -> ExampleReport:
    """Runs the examples. Examples with equal options share a worker."""
    runners: dict[str, Runner] = {}
    outcomes = []
    called_twice = False
    group_fault = None
    try:
        for number, example in enumerate(examples):
            chosen = {**options, **example.get("options", {})}
            key = repr(sorted(chosen.items()))
            if key not in runners:
                runners[key] = Runner(
                    RunnerOptions(
                        ((spec, 1.0, chosen),),
                        workers=1,
                        timeout_s=timeout_s,
                        timeout_key="--timeout",
                    )
                )
            outcomes.append(_outcome(runners[key], example))
            if outcomes[-1].fault is not None and outcomes[-1].fault.kind == "timeout":
                return ExampleReport(spec, outcomes, skipped=len(examples) - number - 1)
            if outcomes[-1].fault is None and not called_twice:
                called_twice = True
                causes = _score(runners[key], example, 2).causes
                group_fault = next(iter(causes.values()), None)
    finally:
        for runner in runners.values():
            runner.close()
    return ExampleReport(spec, outcomes, group_fault=group_fault)


def _score(runner: Runner, example: dict, times: int) -> Scores:
    """Scores the completion of an example `times` times, in one call."""
    given = {"completion_lengths": len(str(example["completion"]).split()), "truncated": False}
    given.update({key: value for key, value in example.items() if key not in _OWN_KEYS})
    columns = {
        key: value if key == "max_new_tokens" else [value] * times for key, value in given.items()
    }
    return runner.score(
        [example["prompt"]] * times, [example["completion"]] * times, columns, groups=[0] * times
    )


def _outcome(runner: Runner, example: dict) -> Outcome:
    scores = _score(runner, example, 1)
    fault = scores.faults[0] if scores.faults else None
    got = None if math.isnan(scores.rewards[0, 0]) else float(scores.rewards[0, 0])
    expected = example.get("score")
    if fault is not None:
        passed = False
    elif "score" not in example:
        passed = True
    elif got is None or expected is None:
        passed = got is expected
    else:
        passed = math.isclose(got, expected, abs_tol=_TOLERANCE)
    return Outcome(example, expected, got, fault, passed)


def _drop_record(record: logging.LogRecord) -> bool:
    return False


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
