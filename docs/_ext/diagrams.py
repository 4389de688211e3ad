"""Draws Mermaid flowcharts as SVG, so that the built pages load no script.

Repository pages draw the same fences themselves. Only lines `a --> b` are known; any other line is
an error.
"""

from __future__ import annotations

import html
import itertools
import re
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

Node = str | tuple[str, str, int]
"""A box, or the bend of an arrow in a layer that it crosses: (start, end, layer)."""
Arrow = tuple[str, str]

_BOX, _GAP_X, _LAYER = 26, 18, 58


def edges(text: str) -> list[Arrow]:
    """Reads the arrows of a flowchart. Raises ValueError on a line that is no arrow."""
    first, *rest = [line.strip() for line in text.strip().splitlines()]
    matches = [re.fullmatch(r"(\w+) --> (\w+)", line) for line in rest]
    if first != "flowchart TD" or not all(matches):
        raise ValueError("a diagram is `flowchart TD` and lines of the form `a --> b`")
    return [(match[1], match[2]) for match in matches if match]


def depths(arrows: list[Arrow]) -> dict[Node, int]:
    """Returns the layer of each node, 0 on top: an arrow always leads to a later layer. Raises
    ValueError on a circle.
    """
    names = list(dict.fromkeys(name for arrow in arrows for name in arrow))
    depth: dict[Node, int] = dict.fromkeys(names, 0)
    for _ in names:
        for start, end in arrows:
            depth[end] = max(depth[end], depth[start] + 1)
    if any(depth[end] <= depth[start] for start, end in arrows) or max(depth.values()) >= len(
        names
    ):
        raise ValueError("the arrows of a diagram make a circle")
    return depth


def paths(arrows: list[Arrow], depth: dict[Node, int]) -> dict[Arrow, list[Node]]:
    """Returns the nodes on the way of each arrow. Adds a bend, (start, end, layer), to every layer
    that it crosses."""
    result = {}
    for start, end in arrows:
        bends: list[Node] = [(start, end, level) for level in range(depth[start] + 1, depth[end])]
        depth.update({bend: bend[2] for bend in bends if isinstance(bend, tuple)})
        result[start, end] = [start, *bends, end]
    return result


def layers(ways: list[list[Node]], depth: dict[Node, int]) -> list[list[Node]]:
    """Sorts the nodes of each layer by the mean position of their neighbours, four times down and
    up."""
    rows = [
        [node for node, level in depth.items() if level == row]
        for row in range(max(depth.values()) + 1)
    ]
    links = [link for way in ways for link in itertools.pairwise(way)]
    for sweep in range(8):
        down = sweep % 2 == 0
        near = {
            node: [s if down else e for s, e in links if (e if down else s) == node]
            for node in depth
        }
        order = rows if down else rows[::-1]
        for fixed, row in itertools.pairwise(order):
            place = {node: (i + 0.5) / len(fixed) for i, node in enumerate(fixed)}
            means = {
                n: sum(place[m] for m in near[n]) / len(near[n]) if near[n] else 0.5 for n in row
            }
            row.sort(key=means.__getitem__)
    return rows


def positions(rows: list[list[Node]]) -> tuple[dict[Node, tuple[float, int]], float]:
    """Returns the top middle of every node, in pixels, and the width of the drawing."""
    widths = [sum(map(size, row)) + _GAP_X * (len(row) - 1) for row in rows]
    width = max(*widths, 200) + 8
    place: dict[Node, tuple[float, int]] = {}
    for level, row in enumerate(rows):
        left = (width - widths[level]) / 2
        for node in row:
            place[node] = left + size(node) / 2, 4 + level * _LAYER
            left += size(node) + _GAP_X
    return place, width


def size(node: Node) -> int:
    """Returns the width of a box in pixels; a bend is narrow."""
    return 8 * len(node) + 20 if isinstance(node, str) else 10


def svg(text: str) -> str:
    """Returns the flowchart as an SVG element."""
    arrows = edges(text)
    depth = depths(arrows)
    ways = paths(arrows, depth)
    rows = layers(list(ways.values()), depth)
    place, width = positions(rows)
    drawn = []
    for (start, _), way in ways.items():
        points = [(place[start][0], place[start][1] + _BOX)]
        for bend in way[1:-1]:
            x, y = place[bend]
            points += [(x, y), (x, y + _BOX)]
        points.append((place[way[-1]][0], place[way[-1]][1] - 2))
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        drawn.append(f'<polyline points="{line}" marker-end="url(#tip)"/>')
    for node, (x, y) in place.items():
        if isinstance(node, str):
            drawn.append(
                f'<rect x="{x - size(node) / 2:.0f}" y="{y}" width="{size(node)}" height="{_BOX}" '
                'rx="5"/>'
            )
            drawn.append(f'<text x="{x:.0f}" y="{y + 17}">{html.escape(node)}</text>')
    label = "; ".join(f"{start} to {end}" for start, end in arrows)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#6b7280"/></marker></defs>'
    )
    height = _LAYER * (len(rows) - 1) + _BOX + 8
    head = (
        f'<svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" '
        f'aria-label="{html.escape(label)}">'
    )
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
