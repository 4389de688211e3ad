"""Shows samples on a terminal: a list, one in full with its tokens, and what changed rewards
change."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rewards import RunnerOptions
from rewards.text import for_terminal
from rl.errors import ConfigError, DataError
from rl.records.messages import flat, messages, start
from rl.records.run_files import check_run, sample_files
from rl.records.schema import SampleRecord
from rl.views.viewer import query, records, rescore, search
from rl.views.viewer.index import Index
from rl.views.viewer.tokens import TokenTexts, flag_text, numbers

_SLOW = 1.0  # seconds after which building the index says how far it is
_NO_EDGE = 10**7  # columns of an output that is no terminal: nothing is cut or wrapped


@dataclass(frozen=True)
class SamplesFlags:
    """What `rl samples` shows: which samples (filter), in which order (sort), how many (limit),
    with their tokens or as JSON."""

    filter: str = ""
    sort: str | None = None
    limit: int = 20
    tokens: bool = False
    json: bool = False


def opened(directory: str) -> Index:
    """Returns the complete index of a run. Raises ConfigError if there is no run, or it recorded no
    samples."""
    path = Path(directory)
    check(path)
    index = Index(path)
    told = False
    while not index.refresh(_SLOW):
        told = True
        print(
            f"\rindexing samples: {index.pending / 1e6:,.0f} MB to go ",
            end="",
            file=sys.stderr,
            flush=True,
        )
    if told:
        print("\r" + " " * 50, end="\r", file=sys.stderr)
    index.save()
    if not index.total:
        raise ConfigError(
            f"{path}: it has no samples; `rl-train` writes them after its first evaluation or step"
        )
    return index


def check(path: Path) -> None:
    """Raises ConfigError if a folder is no run."""
    if not sample_files(path):
        check_run(path)


def show(directory: str, options: SamplesFlags) -> int:
    """Prints the samples that meet the filter. Returns the exit code."""
    terms = query.parse(options.filter)
    index = opened(directory)
    rows = search.matching(index, terms, options.sort)
    chosen = search.places(index, rows[: options.limit])
    if options.json:
        for place in chosen:
            own = record_of(place)
            line: dict[str, object] = {
                **own,
                "id": place.id,
                "gap": records.short(index, place)["gap"],
            }
            if options.tokens:
                line["tokens"] = numbers(place.tokens(own))
            print(json.dumps(line, ensure_ascii=False))
        return 0
    console = _console()
    if options.tokens or len(rows) == 1:
        texts = TokenTexts(index.directory)
        for place in chosen:
            _print_full(console, index, place, texts if options.tokens else None)
    elif len(chosen):
        _print_table(console, _table(index, chosen, console))
    console.print(Text(_count(len(rows), len(chosen), index), style="dim"))
    return 0


def show_rescored(
    directory: str,
    options: SamplesFlags,
    options_of: Callable[[str], RunnerOptions],
    limits: dict[str, int],
) -> int:
    """Scores the samples that meet the filter with other rewards, and prints what changed. Returns
    the exit code."""
    terms = query.parse(options.filter)
    index = opened(directory)
    rows = search.matching(index, terms, options.sort)
    every = list(rescore.rescore(index, rows, options_of, limits))
    summary = rescore.summary(every)
    changed = sorted((each for each in every if each.changed), key=_change, reverse=True)[
        : options.limit
    ]
    if options.json:
        print(
            json.dumps(
                {**summary, "changes": [_rescored_json(each) for each in changed]},
                ensure_ascii=False,
            )
        )
        return 0
    console = _console()
    _print_summary(console, summary)
    if changed:
        _print_table(console, _changes(index, changed, console))
    return 0


def record_of(place: search.SamplePlace) -> SampleRecord:
    """Reads a sample. Raises DataError if the run has changed it since."""
    try:
        return place.record()
    except (OSError, ValueError):
        raise DataError(
            f"{place.path}: the run has changed its samples in the meantime; try again"
        ) from None


def _count(total: int, listed: int, index: Index) -> str:
    text = f"{total:,} of {index.total:,} samples"
    text += f", {listed:,} shown (--limit N shows more)" if listed < total else ""
    return text + (f"; {index.damaged:,} damaged lines are left out" if index.damaged else "")


def _console() -> Console:
    """Returns a console as wide as its terminal, also where $TERM is `dumb`."""
    if not sys.stdout.isatty():
        return Console(width=_NO_EDGE, height=25, highlight=False)
    columns, lines = shutil.get_terminal_size()
    return Console(width=columns, height=lines, highlight=False)


def _has_edge(console: Console) -> bool:
    return console.width < _NO_EDGE


def _print_table(console: Console, table: Table) -> None:
    """Prints a table whose last column ends at the edge of the terminal, or holds full texts
    without a terminal."""
    if _has_edge(console):
        console.print(table)
        return
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())


def _table(index: Index, chosen: Sequence[search.SamplePlace], console: Console) -> Table:
    width = console.width
    table = Table(box=None, pad_edge=False, header_style="dim", expand=_has_edge(console))
    for name in ("stage", "step", "prompt", "reward", "adv", "gap", "len"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    table.add_column("prompt → completion", ratio=1, no_wrap=True, overflow="ellipsis")
    for place in chosen:
        own = records.short(index, place)
        record = record_of(place)
        marks = [
            *(["cut off"] if own["finish"] == "length" else []),
            *own["faults"],
            *(["eval"] if own["eval"] else []),
        ]
        peek = Text("".join(f"[{for_terminal(mark)}] " for mark in marks), style="yellow")
        peek.append(
            for_terminal(start(record, "prompt", max(20, width // 4))) + " → ", style="default dim"
        )
        peek.append(for_terminal(start(record, "completion", width)), style="default")
        cells = (
            own["stage"],
            own["step"],
            f"{own['prompt_id']}/{own['sample']}",
            _real(own["reward"]),
        )
        cells += (_real(own["advantage"]), _real(own["gap"]), own["len"])
        table.add_row(*(Text(for_terminal(cell)) for cell in cells), peek)
    return table


def _print_full(
    console: Console, index: Index, place: search.SamplePlace, texts: TokenTexts | None
) -> None:
    own = records.short(index, place)
    record = record_of(place)
    about = (
        f"{own['stage']} step {own['step']}  prompt {own['prompt_id']}/{own['sample']}  "
        f"reward {_real(own['reward'])}"
    )
    about += (
        f"  advantage {_real(own['advantage'])}  gap {_real(own['gap'])}  {own['len']} "
        f"tokens, {own['finish']}"
    )
    console.print(Text(for_terminal(about) + ("  eval" if own["eval"] else ""), style="bold"))
    for name in ("prompt", "completion"):
        for role, pieces in messages(record, name):
            console.print(Text(for_terminal(f"{name}{': ' + role if role else ''}"), style="dim"))
            console.print(Text(for_terminal(flat(pieces))))
    for title, key in (
        ("rewards", "rewards"),
        ("faults", "faults"),
        ("columns", "columns"),
        ("reward log", "reward_log"),
    ):
        values = record.get(key)
        for name, value in values.items() if isinstance(values, dict) else ():
            console.print(
                Text.assemble((for_terminal(f"{title}: {name}: "), "dim"), for_terminal(value))
            )
    if texts is not None:
        console.print(_token_table(place.tokens(record), texts))
    console.print()


def _token_table(tokens: np.ndarray, texts: TokenTexts) -> Table | Text:
    if not len(tokens):
        return Text("no tokens were recorded", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "id", "token", "logp", "gap", "entropy", "advantage", "flags"):
        table.add_column(name, justify="left" if name in ("token", "flags") else "right")
    pieces = texts.texts(tokens["id"].tolist())
    values = numbers(tokens)
    for place in range(len(tokens)):
        style = (
            "dim"
            if values["turn"][place] == 0 or values["logp"][place] is None
            else "red"
            if abs(values["gap"][place] or 0) > 0.1
            else ""
        )
        piece = json.dumps(pieces[place], ensure_ascii=False)[1:-1] if pieces is not None else ""
        cells = [str(place), str(values["id"][place]), for_terminal(piece)]
        cells += [_real(values[name][place]) for name in ("logp", "gap", "entropy", "advantage")]
        table.add_row(*map(Text, (*cells, flag_text(values["flags"][place]))), style=style)
    return table


def _print_summary(console: Console, summary: rescore.Summary) -> None:
    console.print(
        Text(
            f"{summary['samples']:,} samples scored again: {summary['changed']:,} changed "
            f"({summary['up']:,} up, {summary['down']:,} down)",
            style="bold",
        )
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "before", "after", "faults"):
        table.add_column(name, justify="left" if not name else "right")
    faults = sum(summary["faults"].values())
    table.add_row(
        "reward, mean",
        *(_real(summary["reward"][when]) for when in ("before", "after")),
        str(faults),
    )
    for name, each in summary["functions"].items():
        table.add_row(
            Text(for_terminal(f"  {name}")),
            _real(each["before"]),
            _real(each["after"]),
            str(each["faults"]),
        )
    for title, key in (
        ("unscored", "unscored"),
        (f"groups with signal, of {summary['groups']:,}", "groups_with_signal"),
    ):
        table.add_row(title, f"{summary[key]['before']:,}", f"{summary[key]['after']:,}", "")
    console.print(table)


def _changes(index: Index, changed: Sequence[rescore.Rescored], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=_has_edge(console))
    for name in ("step", "prompt", "before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("completion", ratio=1, no_wrap=True, overflow="ellipsis")
    for each in changed:
        own = records.short(index, each.place)
        peek = Text(for_terminal(start(each.record, "completion", console.width)))
        why = [*(f"{name}: {kind}" for name, kind in each.faults.items()), *each.log.values()]
        peek.append("".join(f" [{for_terminal(one)}]" for one in why), style="yellow")
        cells = (
            own["step"],
            f"{own['prompt_id']}/{own['sample']}",
            _real(each.before),
            _real(each.reward),
        )
        table.add_row(*(Text(for_terminal(cell)) for cell in cells), peek)
    return table


def _rescored_json(each: rescore.Rescored) -> dict[str, object]:
    names = ("stage", "step", "prompt_id", "sample", "prompt", "completion")
    return {name: each.record.get(name) for name in names} | {
        "id": each.place.id,
        "before": records.number(each.before),
        "after": records.number(each.reward),
        "rewards": {name: records.number(score) for name, score in each.scores.items()},
        "faults": each.faults,
        "reward_log": each.log,
    }


def _change(each: rescore.Rescored) -> float:
    difference = abs(each.before - each.reward)
    return difference if math.isfinite(difference) else math.inf


def _real(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
