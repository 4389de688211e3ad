"""Writes the chosen completions, folded, within a size: long texts lose their middle."""

from __future__ import annotations

from collections.abc import Sequence

from rl.records.messages import Piece, messages, start
from rl.records.schema import RawLine
from rl.views.report import samples
from rl.views.report.pictures import Embedded, figure
from rl.views.report.read import RecordedRun
from rl.views.report.series import esc, text

_PEEK = 140  # characters of a completion that its line shows
_CAPS = (
    60_000,
    20_000,
    8_000,
    4_000,
    2_000,
    1_000,
    500,
    200,
    60,
)  # bytes of a text, tried in this order
_EXPLAINED = (
    "best and worst reward, largest gap between generator and trainer, longest, cut off, faulted, "
    "and random"
)


def listing(
    runs: Sequence[RecordedRun], chosen: Sequence[samples.Chosen], embedded: Embedded, room: int
) -> str:
    """Returns the section of samples in at most `room` bytes. chosen: for each run. embedded:
    pictures of the page."""
    every = [
        (run, record) for run, each in zip(runs, chosen, strict=True) for record in each.records
    ]
    if not every or room < 2000:
        return ""
    items = []
    size = 0
    sizes = [len(content) for _, record in every for content in _texts(record)]

    def write(run: RecordedRun, record: samples.ChosenSample, cap: int) -> str:
        return _sample(run if len(runs) > 1 else None, record, embedded, cap)

    for cap in _CAPS:
        if sum(min(each, cap) for each in sizes) > room:
            continue
        items = [write(run, record, cap) for run, record in every]
        size = sum(len(item.encode("utf-8", "replace")) for item in items)
        if size <= room - 2000:
            break
    if size > room - 2000 or not items:
        items = [write(run, record, _CAPS[-1]) for run, record in every]
        size = sum(len(item.encode("utf-8", "replace")) for item in items)
        items = items[: len(items) * (room - 2000) // max(size, room - 2000)]
    counts = {kind: sum(kind in record["why"] for _, record in every) for kind in samples.KINDS}
    buttons = "".join(
        f'<button data-kind="{kind}" aria-pressed="false">{kind} {count}</button>'
        for kind, count in counts.items()
        if count
    )
    partial = (
        " of the part of the files that was read" if any(each.partial for each in chosen) else ""
    )
    total = sum(each.total for each in chosen)
    shown = (
        f" {len(embedded.names)} of their {embedded.total} pictures are in the page."
        if embedded.total
        else ""
    )
    return (
        f'<section id="samples"><h2>Samples</h2><p class="about">{len(items)} of {total:,} '
        "recorded completions"
        f'{partial}: {_EXPLAINED}.{shown}</p><div class="tools" hidden><button data-kind="" '
        'aria-pressed="true">all '
        f"{len(items)}</button>"
        f'{buttons}<input type="search" id="words" placeholder="text in a sample" '
        'aria-label="text in a sample"></div>'
        f'<div class="samples">{"".join(items)}</div></section>'
    )


def _sample(
    run: RecordedRun | None, record: samples.ChosenSample, embedded: Embedded, cap: int
) -> str:
    """Returns one completion, folded. cap: bytes of each text."""
    where = f"{record.get('stage', '')} {record.get('step', '')}" + (
        f" · {run.name}" if run else ""
    )
    reward = record.get("reward")
    score = (
        f"reward {text(reward)}"
        if isinstance(reward, (int, float))
        else "unscored"
        if "reward" in record
        else ""
    )
    tags = "".join(f'<span class="tag {kind.split()[0]}">{kind}</span>' for kind in record["why"])
    tags += '<span class="tag">evaluation</span>' if record.get("eval") is True else ""
    peek = (
        f"<i>{esc(start(record, 'prompt', _PEEK // 2))} → "
        f"</i>{esc(start(record, 'completion', _PEEK))}"
    )
    facts = _facts(record)
    body = "".join(
        f"<h3>{esc(name + (': ' + role if role else ''))}</h3>{_message(pieces, embedded, cap)}"
        for name in ("prompt", "completion")
        for role, pieces in messages(record, name)
    )
    notes = record.get("reward_log")
    for name, note in notes.items() if isinstance(notes, dict) else ():
        body += f"<h3>{esc(f'what {name} said')}</h3><pre>{_cut(str(note), cap // 2)}</pre>"
    columns = record.get("columns")
    if isinstance(columns, dict) and columns:
        lines = "\n".join(f"{key}: {value}" for key, value in columns.items())
        body += f"<h3>columns of the row</h3><pre>{_cut(lines, cap // 2)}</pre>"
    return (
        f'<details class="sample" data-why="{"|".join(record["why"])}"><summary>'
        f'<span class="where">{esc(where)}</span><span class="score">{esc(score)}</span>'
        f'<span class="peek mono">{peek}</span><span class="tags">{tags}</span></summary>'
        f'<div class="body"><div class="facts">{facts}</div>{body}</div></details>'
    )


def _message(pieces: Sequence[Piece], embedded: Embedded, cap: int) -> str:
    """Returns the texts of a message, and its pictures and sounds in their places."""
    texts = [piece for piece in pieces if not isinstance(piece, str) or piece.strip()] or [""]
    return "".join(
        f"<pre>{_cut(piece, cap)}</pre>" if isinstance(piece, str) else figure(piece, embedded)
        for piece in texts
    )


def _facts(record: RawLine) -> str:
    values: list[tuple[str, str]] = []
    rewards = record.get("rewards")
    for key, value in rewards.items() if isinstance(rewards, dict) else ():
        values.append((str(key), text(value) if isinstance(value, (int, float)) else "no score"))
    for key in ("advantage", "gap"):
        if isinstance(value := record.get(key), (int, float)):
            values.append((key, text(value)))
    values.append(("tokens", f"{samples.sample_length(record):,}"))
    for key in ("finish", "prompt_id", "sample", "version"):
        # The version is a list of pairs where it changes within a sample.
        if isinstance(value := record.get(key), (int, str, list)):
            values.append((key, str(value)))
    faults = record.get("faults")
    for key, value in faults.items() if isinstance(faults, dict) else ():
        values.append((f"fault of {key}", str(value)))
    return "".join(f"<div><span>{esc(key)}</span> {esc(value)}</div>" for key, value in values)


def _texts(record: RawLine) -> list[str]:
    every = [pieces for name in ("prompt", "completion") for _, pieces in messages(record, name)]
    return [piece for pieces in every for piece in pieces if isinstance(piece, str)]


def _cut(content: str, cap: int) -> str:
    """Escapes a text and cuts its middle out if it has more than `cap` bytes."""
    keep = size = len(content)
    if size <= cap:
        shown = esc(content)
        size = len(shown.encode())
    while size > cap:
        keep = max(1, int(keep * cap / size * 0.95)) if keep > 40 else 0
        left_out = len(content) - keep
        head = keep * 2 // 3
        shown = (
            esc(content[:head])
            + f"\n[... {left_out:,} characters are left out ...]\n"
            + esc(content[len(content) - keep + head :])
        )
        size = len(shown.encode()) - 60
        if not keep:
            break
    return shown
