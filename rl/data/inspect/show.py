"""Shows the rows of a stage token by token, on a terminal, in a pipe, or as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rewards.text import for_terminal
from rl.data.inspect import listing
from rl.data.inspect.pieces import RowPiece, counts, pieces, statistics, text_of
from rl.data.inspect.source import Inspection
from rl.data.inspect.stage_rows import Encoded, Kind, StageRows
from rl.errors import Fault

MARKS: dict[Kind, str] = {"prompt": ".", "trained": "+", "ignored": "-", "stop": "!"}
"""Mark of a token in plain text."""
_COLORS: dict[Kind, str] = {"prompt": "2", "trained": "32", "ignored": "33", "stop": "1;35"}
_CSS = {"prompt": "#777", "trained": "#0a7d33", "ignored": "#b36b00", "stop": "#a0209f"}
LEGEND = ". prompt   + trained on   - ignored   ! stop, trained on"
_WIDTH = 118


def lines(inspection: Inspection, rows: int, color: bool) -> Iterator[str]:
    """Yields the text of an inspection: the first rows of each stage, then the faults.

    rows: rows shown per stage and source. color: use the colors of a terminal in place of marks.
    """
    for stage in inspection.stages:
        yield f"== {stage.name}: {stage.total} rows, {_stops(stage)}{statistics(stage.rows)}"
        for row in stage.first_rows(rows):
            yield from _row(stage, row, color)
    if rows and inspection.stages:
        yield _legend(color)
    yield f"== {_count(inspection.faults)}"
    yield from (for_terminal(listing.line(each)) for each in inspection.faults)


def to_json(inspection: Inspection, rows: int) -> dict[str, Any]:
    """Returns rows and faults as values that JSON can hold."""
    stages = [
        {
            "stage": stage.name,
            "rows": stage.total,
            "stops": list(stage.stops),
            "shown": [_plain(stage, r) for r in stage.first_rows(rows)],
        }
        for stage in inspection.stages
    ]
    return {"stages": stages, "findings": [listing.to_json(each) for each in inspection.faults]}


def page(inspection: Inspection, rows: int) -> str:
    """Returns the inspection as one HTML page that loads nothing."""
    parts = [f"<p>{_spans(LEGEND)}</p>", "<h2>Findings</h2>", "<ul>"]
    parts += [f"<li>{html.escape(listing.line(each))}</li>" for each in inspection.faults]
    parts.append("</ul>")
    for stage in inspection.stages:
        parts.append(
            f"<h2>{html.escape(stage.name)}: {stage.total} rows, {html.escape(_stops(stage))}</h2>"
        )
        for row in stage.first_rows(rows):
            tokens = "".join(map(_span, pieces(stage, row)))
            parts.append(f"<h3>{html.escape(row.example.where)}</h3><pre>{tokens}</pre>")
    css = "".join(f".{kind}{{color:{color}}}" for kind, color in _CSS.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>rl inspect</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        f"<style>body{{font-family:sans-serif;max-width:70rem;margin:2rem "
        f"auto}}pre{{white-space:pre-wrap;line-height:1.6}}"
        f"pre span{{border-right:1px solid "
        f"#ddd}}{css}</style><body>{''.join(parts)}</body></html>\n"
    )


def _span(piece: RowPiece) -> str:
    title = f"{piece.place}: {piece.token} {piece.kind}"
    return f'<span class="{piece.kind}" title="{title}">{html.escape(piece.text)}</span>'


def _row(stage: StageRows, row: Encoded, color: bool) -> Iterator[str]:
    yield (
        f"-- {row.example.where}: {len(row.ids)} tokens, {sum(row.mask)} trained "
        f"on{counts(row.expanded)}"
    )
    yield textwrap.indent(for_terminal(text_of(stage, row)), "   | ", lambda _: True)
    line = "  "
    width = 2
    for each in pieces(stage, row):
        item = for_terminal(each.text) if each.count > 1 else f"{each.token}:{each.text!r}"
        kind = each.kind
        size = len(item) + 2
        if width + size > _WIDTH:
            yield line
            line = "  "
            width = 2
        line += f" \x1b[{_COLORS[kind]}m{item}\x1b[0m" if color else f" {MARKS[kind]}{item}"
        width += size
    yield line


def _plain(stage: StageRows, row: Encoded) -> dict[str, Any]:
    """Returns a row for JSON. The tokens of a picture or sound are one entry with their `count`."""
    tokens = [
        {"id": each.token, "kind": each.kind, "text": each.text}
        | ({"count": each.count} if each.count > 1 else {})
        for each in pieces(stage, row)
    ]
    return {"where": row.example.where, "text": text_of(stage, row), "tokens": tokens}


def _stops(stage: StageRows) -> str:
    names = [f"{stage.tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stage.stops]
    return f"stops: {', '.join(names)}"


def _legend(color: bool) -> str:
    if not color:
        return LEGEND
    names = {
        "prompt": "prompt",
        "trained": "trained on",
        "ignored": "ignored",
        "stop": "stop, trained on",
    }
    return "   ".join(f"\x1b[{_COLORS[kind]}m{names[kind]}\x1b[0m" for kind in MARKS)


def _spans(legend: str) -> str:
    return " &nbsp; ".join(
        f'<span class="{kind}">{html.escape(part.strip()[2:])}</span>'
        for kind, part in zip(MARKS, legend.split("   "), strict=True)
    )


def _count(faults: Sequence[Fault]) -> str:
    counts = [(sum(each.level == level for each in faults), name) for level, name in _LEVELS]
    return ", ".join(f"{count} {name if count == 1 else name + 's'}" for count, name in counts)


_LEVELS = (("refuse", "refusal"), ("warn", "warning"), ("note", "note"))
