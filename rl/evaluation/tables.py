"""The results of an evaluation as tables, from what eval.json holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rl.evaluation.files import EstimateEntry, TaskEntry

_MANY = 0.05
"""Share of completions that are cut from which a table says so."""


@dataclass(frozen=True)
class Table:
    """Rows of texts below a head."""

    head: list[str]
    rows: list[list[str]]


def text(results: Mapping[str, TaskEntry]) -> str:
    """Returns the tables of eval.json as lines: all scores, then those with accuracies by column,
    then which tasks had completions cut."""
    parts = [aligned(scores(results)), *map(aligned, by_column(results)), *cut(results)]
    return "\n\n".join(parts)


def scores(results: Mapping[str, TaskEntry]) -> Table:
    """Returns a row for each score of each task."""
    every = [score for task in results.values() for score in task["scores"].values()]
    passes = sorted({int(k) for score in every for k in score["pass"]})
    majorities = sorted({int(k) for score in every for k in score["maj"]})
    columns = [("pass", str(k)) for k in passes] + [("maj", str(k)) for k in majorities]
    unscored = any(score["unscored"] for score in every)
    head = ["task", "score", "accuracy", "95% interval", "n", "samples"]
    head += [f"{kind}@{k}" for kind, k in columns] + ["unscored"] * unscored
    rows = []
    for name, task in results.items():
        for number, (score, values) in enumerate(task["scores"].items()):
            row = ["" if number else name, score, *_cells(values["accuracy"]), str(task["samples"])]
            row += [_value(values[kind].get(k)) for kind, k in columns]
            rows.append(row + [str(values["unscored"])] * unscored)
    return Table(head, rows)


def by_column(results: Mapping[str, TaskEntry]) -> Iterator[Table]:
    """Yields the accuracies of each score by the values of each column."""
    for name, task in results.items():
        for score, values in task["scores"].items():
            for column, accuracies in values["by"].items():
                head = [f"{name} {score} by {column}", "accuracy", "95% interval", "n"]
                yield Table(head, [[value, *_cells(each)] for value, each in accuracies.items()])


def cut(results: Mapping[str, TaskEntry]) -> list[str]:
    """Returns a line for each task of which many completions were cut at their longest."""
    return [
        f"{name}: {task['truncated']:.1%} of the completions were cut at max_new_tokens"
        for name, task in results.items()
        if task["truncated"] >= _MANY
    ]


def aligned(table: Table) -> str:
    """Returns a table as lines of columns."""
    rows = [table.head, *table.rows]
    widths = [max(len(row[number]) for row in rows) for number in range(len(table.head))]
    lines = [table.head, ["-" * width for width in widths], *table.rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def _cells(estimate: EstimateEntry | None) -> list[str]:
    """Returns an accuracy, its interval and the number of its problems."""
    if estimate is None:
        return ["-", "-", "0"]
    low = estimate["low"]
    high = estimate["high"]
    return [_value(estimate), f"{low:.3f} to {high:.3f}", str(estimate["n"])]


def _value(estimate: EstimateEntry | None) -> str:
    return "-" if estimate is None else f"{estimate['value']:.3f}"
