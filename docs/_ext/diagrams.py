"""Draws Mermaid flowcharts as SVG, so that the built pages load no script.

Repository pages draw the same fences themselves. Only lines `a --> b` are known; any other line is an error.
"""

from __future__ import annotations

import html
import re
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

_BOX, _GAP_X, _LAYER = 26, 18, 58


def edges(text: str) -> list[tuple[str, str]]:
    """Reads the arrows of a flowchart. Raises ValueError on a line that is no arrow."""
    first, *rest = [line.strip() for line in text.strip().splitlines()]
    matches = [re.fullmatch(r"(\w+) --> (\w+)", line) for line in rest]
    if first != "flowchart TD" or not all(matches):
        raise ValueError("a diagram is `flowchart TD` and lines of the form `a --> b`")
    return [(match[1], match[2]) for match in matches if match]


def layers(arrows: list[tuple[str, str]]) -> list[list[str]]:
    """Sorts the nodes into layers, top first: an arrow always leads to a later layer. Raises ValueError on a circle."""
    names = list(dict.fromkeys(name for arrow in arrows for name in arrow))
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for start, end in arrows:
            depth[end] = max(depth[end], depth[start] + 1)
    if any(depth[end] <= depth[start] for start, end in arrows) or max(depth.values()) >= len(names):
        raise ValueError("the arrows of a diagram make a circle")
    result: list[list[str]] = [[n for n in names if depth[n] == level] for level in range(max(depth.values()) + 1)]
    for level in range(1, len(result)):  # near the nodes above that point here
        above = {n: i / len(result[level - 1]) for i, n in enumerate(result[level - 1])}
        parents = {n: [above[s] for s, e in arrows if e == n and s in above] or [0.5] for n in result[level]}
        result[level].sort(key=lambda n: sum(parents[n]) / len(parents[n]))
    return result


def svg(text: str) -> str:
    """Returns the flowchart as an SVG element."""
    arrows = edges(text)
    rows = layers(arrows)
    size = {name: 8 * len(name) + 20 for row in rows for name in row}
    widths = [sum(size[n] for n in row) + _GAP_X * (len(row) - 1) for row in rows]
    width, height = max(*widths, 200) + 8, _LAYER * (len(rows) - 1) + _BOX + 8
    place: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        # A layer of one box stands a little to a side, so that arrows past it stay visible.
        left = (width - widths[level]) / 2 + (24 * (-1) ** level if widths[level] + 56 < width else 0)
        for name in row:
            place[name] = (left + size[name] / 2, 4 + level * _LAYER)
            left += size[name] + _GAP_X
    drawn = []
    for start, end in arrows:
        (x1, y1), (x2, y2) = place[start], place[end]
        drawn.append(
            f'<line x1="{x1:.0f}" y1="{y1 + _BOX:.0f}" x2="{x2:.0f}" y2="{y2 - 2:.0f}" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in place.items():
        drawn.append(f'<rect x="{x - size[name] / 2:.0f}" y="{y:.0f}" width="{size[name]}" height="{_BOX}" rx="5"/>')
        drawn.append(f'<text x="{x:.0f}" y="{y + 17:.0f}">{html.escape(name)}</text>')
    label = "; ".join(f"{start} imports {end}" for start, end in arrows)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#6b7280"/></marker></defs>'
    )
    head = f'<svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" aria-label="{html.escape(label)}">'
    return f'<figure class="diagram">{head}{tip}{"".join(drawn)}</svg></figure>'


class Mermaid(Directive):
    """The directive `mermaid`, which MyST makes of a fence with this language."""

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Returns the diagram as raw HTML."""
        try:
            return [nodes.raw("", svg("\n".join(self.content)), format="html")]
        except ValueError as error:
            raise self.error(str(error)) from error


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("mermaid", Mermaid)
    return {"version": "1", "parallel_read_safe": True}
