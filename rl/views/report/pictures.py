"""Holds the thumbnails of the chosen completions in the page, each once, within a size.

A picture is a symbol of SVG that samples refer to, so that the completions of a group share it and
the page needs no script to show it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rl.records import thumbnails
from rl.records.messages import describe_item, pictures
from rl.records.schema import MediaEntry
from rl.views.report import samples
from rl.views.report.read import RecordedRun
from rl.views.report.series import esc

MOST_BYTES = 600_000
"""Size of all pictures of a page, as data URIs."""
# Pixels of a picture in a sample: its longest side, and the least of the other.
_SIDE = 128
_LEAST = 6


@dataclass
class Embedded:
    """The pictures of a page. html: their symbols; names: digest -> id of a symbol; total: how many
    samples have."""

    html: str = ""
    names: dict[str, str] = field(default_factory=dict)
    total: int = 0


def embed(runs: Sequence[RecordedRun], chosen: Sequence[samples.Chosen], room: int) -> Embedded:
    """Reads the thumbnails of the chosen completions until their data URIs have `room` bytes, or
    MOST_BYTES."""
    result = Embedded()
    seen = set[str]()
    symbols = list[str]()
    size = 0
    rows = zip_longest(*(each.records for each in chosen))  # runs of one page take turns
    for run, record in (
        (run, record) for row in rows for run, record in zip(runs, row, strict=True) if record
    ):
        for item in pictures(record):
            digest = str(item.get("digest"))
            if digest in seen:
                continue
            seen.add(digest)
            result.total += 1
            sides = _sides(item)
            file = thumbnails.read(run.path, digest)
            if sides is None or file is None:
                continue
            name = f"p{len(symbols)}"
            width, height = sides
            uri = f"data:{file.kind};base64,{base64.b64encode(file.content).decode()}"
            symbol = (
                f'<symbol id="{name}" viewBox="0 0 {width} {height}" preserveAspectRatio="none">'
                f'<image width="{width}" height="{height}" preserveAspectRatio="none" '
                f'href="{uri}"/></symbol>'
            )
            if size + len(symbol) <= min(room, MOST_BYTES) - 100:
                size += len(symbol)
                symbols.append(symbol)
                result.names[digest] = name
    if symbols:
        result.html = f'<svg class="pictures" aria-hidden="true">{"".join(symbols)}</svg>'
    return result


def figure(item: MediaEntry, embedded: Embedded) -> str:
    """Returns a picture or sound of a sample. A click on an embedded picture shows it larger."""
    about = esc(describe_item(item))
    name = embedded.names.get(str(item.get("digest")))
    sides = _sides(item)
    if name is None or sides is None:
        return f'<div class="media">{about}</div>'
    width, height = sides
    scale = _SIDE / max(sides)
    shown = (
        f'width="{max(_LEAST, round(width * scale))}" height="{max(_LEAST, round(height * scale))}"'
    )
    fill = "none" if min(sides) * scale < _LEAST else "xMinYMid meet"
    tiny = ' class="tiny"' if max(sides) <= thumbnails.TINY else ""
    return (
        f'<details class="media"><summary title="larger or smaller"><svg{tiny} role="img" '
        f'aria-label="{about}" {shown} '
        f'viewBox="0 0 {width} {height}" preserveAspectRatio="{fill}"><use '
        f'href="#{name}"/></svg><span>{about}</span>'
        "</summary></details>"
    )


def _sides(item: MediaEntry) -> tuple[int, int] | None:
    """Returns (width, height) of a thumbnail from the entry of its picture; None for an entry of
    another form."""
    width = item.get("width")
    height = item.get("height")
    if not (isinstance(width, int) and isinstance(height, int) and min(width, height) > 0):
        return None
    height, width = thumbnails.fit(height, width)
    return width, height
