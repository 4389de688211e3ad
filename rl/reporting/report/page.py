"""Writes the report: one HTML file that asks for nothing, of at most 2 MB however long the run was.

The page holds one style and one script, each named by its hash in a Content-Security-Policy that refuses everything
else. All texts of a run are escaped: in HTML, and in the JSON of the charts, where `<` is written as \\u003c.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rl.reporting.report import samples, sections, svg
from rl.reporting.report.charts import Chart, Charts, choose
from rl.reporting.report.read import Run, damage_text
from rl.reporting.report.sections import esc
from rl.reporting.report.series import BUCKETS, Axis, text

MOST_BYTES = 2_000_000
_CHART_BYTES = 1_150_000
_SAMPLE_BYTES = 700_000
_MOST_SMALL = 240  # charts of metrics beyond the headline charts; more are named only
_LONGEST_PEEK = 140


@dataclass
class Report:
    """What a page shows. samples holds the chosen completions of each run."""

    runs: Sequence[Run]
    axis: Axis
    samples: Sequence[samples.Chosen]
    verdicts: Sequence[Sequence[str]]
    against: Run | None = None
    created: str = ""

    @property
    def title(self) -> str:
        """Name of the run, or of all runs."""
        return " against ".join(run.name for run in self.runs)


def page(report: Report) -> str:
    """Returns the HTML of a report, at most MOST_BYTES long in UTF-8."""
    data = svg.Data()
    shown, charts = _charts(report, data)
    before, after = _before(report), _after(report)
    script, style = _asset("report.js"), _asset("report.css")
    numbers = _json(
        {
            "stages": [{"n": s.name, "first": s.first, "last": s.last, "start": s.start} for s in report.axis.stages],
            "restarts": _restarts(report),
            "xs": data.xs,
            "charts": data.charts,
        }
    )
    fixed = [before, charts, after, numbers, script, style]
    room = min(_SAMPLE_BYTES, MOST_BYTES - 60_000 - sum(len(each.encode("utf-8", "replace")) for each in fixed))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    listed = _samples(report, max(room, 0))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(report.title)} - rl report</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{before}{charts if shown else ''}{_evaluations(report)}{listed}{after}</main>\n"
        f'<script type="application/json" id="data">{numbers}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _before(report: Report) -> str:
    """Returns the head of the page: name, state, verdict, damage, headline numbers, stages."""
    runs, one = report.runs, report.runs[0]
    head = f"<h1>{esc(report.title)}</h1>{sections.pill(one) if len(runs) == 1 else ''}"
    about = "".join(f'<p class="about">{esc(run.name) + ": " if len(runs) > 1 else ""}{sections.about(run)}</p>' for run in runs)
    if report.against is not None:
        about += f'<p class="about"><span class="dot dash"></span>dashed: {esc(report.against.name)}, {sections.about(report.against)}</p>'
    parts = [f"<header><div class=\"head\">{head}</div>{about}{_nav(report)}</header>"]
    for run, lines in zip(runs, report.verdicts, strict=True):
        if lines:
            items = "".join(f"<li>{esc(line)}</li>" for line in lines)
            name = f": {esc(run.name)}" if len(runs) > 1 else ""
            parts.append(f'<section class="card verdict"><h2>Verdict{name}</h2><ul>{items}</ul></section>')
    if damage := [each for run in runs for each in run.damage]:
        parts.append(
            f'<section class="card warn"><h2>Damaged: this report leaves out what could not be read</h2>'
            f'<pre class="mono">{esc(damage_text(damage))}</pre></section>'
        )
    if len(runs) == 1:
        parts.append(sections.tiles(one, report.samples[0].total))
    else:
        parts.append(f'<section class="verdict">{sections.overview(runs)}</section>')
    tables = "".join((f"<h3>{esc(run.name)}</h3>" if len(runs) > 1 else "") + sections.stages(run) for run in runs)
    if tables:
        parts.append(f'<section id="stages"><h2>Stages</h2>{tables}</section>')
    return "".join(parts)


def _nav(report: Report) -> str:
    places = [("stages", "Stages"), ("charts", "Charts")]
    if any(name.startswith("eval/") for run in report.runs for name in run.metrics):
        places.append(("evaluation", "Evaluation"))
    if any(chosen.records for chosen in report.samples):
        places.append(("samples", "Samples"))
    places += [("configuration", "Configuration"), ("programs", "Programs and memory"), ("versions", "Versions")]
    known = {
        "configuration": any(run.config for run in report.runs),
        "programs": any(run.programs for run in report.runs),
        "versions": any(run.info for run in report.runs),
    }
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in places if known.get(key, True))
    return f"<nav>{links}</nav>"


def _restarts(report: Report) -> list[int]:
    """Returns the positions at which a later attempt went on, of a page with one run."""
    run = report.runs[0]
    return [report.axis.position(*place) for place in run.restarts] if len(report.runs) == 1 else []


def _charts(report: Report, data: svg.Data) -> tuple[Charts, str]:
    """Returns the charts and their HTML. The more metrics there are, the fewer buckets have those beyond the headlines."""
    for buckets in (BUCKETS, 200, 100, 50):
        data.__init__()
        charts = choose(report.runs, report.axis, report.against, buckets)
        restarts = _restarts(report)
        large = [_figure(chart, report, data, restarts) for chart in charts.headline]
        small = [(chart, _figure(chart, report, data, restarts)) for chart in charts.other[:_MOST_SMALL]]
        size = sum(map(len, large)) + sum(len(each) for _, each in small) + len(_json(data.charts)) + len(_json(data.xs))
        if size <= _CHART_BYTES:
            break
    if not large and not small:
        return charts, ""
    tools = (
        '<div class="tools" hidden><label>smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>'
        '<label>scale <select id="scale"><option value="auto">automatic</option><option value="log">logarithmic</option>'
        '<option value="linear">linear</option></select></label><span>drag over a chart to zoom</span>'
        '<button id="reset" hidden>show all steps</button></div>'
    )
    quiet = f'<p class="quiet">0 at every step, not drawn: {esc(", ".join(charts.zero))}.</p>' if charts.zero else ""
    return charts, (
        f'<section id="charts"><h2>Charts</h2>{tools}<div class="charts">{"".join(large)}</div>{quiet}'
        f"{_other(small, charts.other[_MOST_SMALL:])}</section>"
    )


def _other(small: Sequence[tuple[Chart, str]], rest: Sequence[Chart]) -> str:
    """Returns the folded charts of all other metrics, grouped by the first part of their names."""
    if not small:
        return ""
    groups: dict[str, list[str]] = {}
    for chart, figure in small:
        groups.setdefault(chart.key.partition("/")[0] if "/" in chart.key else "", []).append(figure)
    body = "".join(
        f'{f"<h4>{esc(name)}</h4>" if name else ""}<div class="charts many">{"".join(figures)}</div>'
        for name, figures in groups.items()
    )
    more = f'<p class="quiet">Not drawn: {esc(", ".join(each.key for each in rest[:2000]))}</p>' if rest else ""
    count = len(small) + len(rest)
    return f'<details class="fold"><summary>All other metrics ({count})</summary><div class="body">{body}{more}</div></details>'


def _figure(chart: Chart, report: Report, data: svg.Data, restarts: Sequence[float]) -> str:
    """Returns a chart with its title, last value and legend."""
    ink = svg.draw(chart, report.axis, data.add(chart), restarts)
    main = next((line for line in chart.lines if not line.reference and len(line.curve.x)), None)
    unit = f" {chart.unit}" if chart.unit else ""
    last = chart.lines and main is not None and not chart.stacked and len(report.runs) == 1
    now = f'<span class="now">{text(main.curve.mean[-1])}{unit}</span>' if last and main else f'<span class="now">{unit}</span>'
    note = f'<span class="note">{esc(chart.note)}</span>' if chart.note else ""
    title = f'<span class="title{" mono" if chart.small else ""}">{esc(chart.title)}</span>'
    legend = "" if chart.small and len(chart.lines) == 1 else _legend(chart)
    return (
        f'<figure class="card" id="{esc("chart-" + chart.key)}"><figcaption>{title}{now}{note}</figcaption>'
        f'<div class="frame">{ink}</div>{legend}</figure>'
    )


def _legend(chart: Chart) -> str:
    entries = []
    if len(chart.lines) > 1:
        for line in chart.lines:
            dot = "dash" if line.reference else f"t{line.tone % svg.TONES}"
            last = f" <b>{text(line.curve.mean[-1])}</b>" if len(line.curve.x) and not chart.small else ""
            entries.append(f'<span><span class="dot {dot}"></span>{esc(line.label)}{last}</span>')
    entries += [
        f'<span><span class="dot dash lim"></span>{text(value)}: {esc(label)}</span>' for value, label in chart.limits
    ]
    if chart.stacked and (scale := svg.scale_of(chart)).clipped:
        top = max(sum(each) for each in zip(*(line.curve.mean for line in chart.lines if not line.reference), strict=True))
        entries.append(f"<span>marks at the top: above {text(scale.high)}, at most {text(top)} s (compilation)</span>")
    if any(line.curve.bucketed for line in chart.lines) and not chart.small and not chart.stacked:
        entries.append("<span>dark band: lowest to highest of the steps of a point</span>")
    if any(len(line.curve.lost) for line in chart.lines):
        count = sum(len(line.curve.lost) for line in chart.lines)
        entries.append(f"<span>red marks: {count} values that are not finite</span>")
    return f'<div class="legend">{"".join(entries)}</div>' if entries else ""


def _evaluations(report: Report) -> str:
    shown = sections.evaluation_table(report.runs)
    return f'<section id="evaluation"><h2>Evaluation</h2>{shown}</section>' if shown else ""


def _samples(report: Report, room: int) -> str:
    """Returns the chosen completions. Long texts lose their middle until all fit in `room` bytes."""
    chosen = [(run, record) for run, each in zip(report.runs, report.samples, strict=True) for record in each.records]
    if not chosen:
        return ""
    for cap in (60_000, 20_000, 8_000, 4_000, 2_000, 1_000, 500, 200, 60):
        items = [_sample(run if len(report.runs) > 1 else None, record, cap) for run, record in chosen]
        if sum(len(item.encode("utf-8", "replace")) for item in items) <= room:
            break
    else:
        items = items[: max(1, len(items) * room // (1 + sum(len(item.encode()) for item in items)))]
    counts = {kind: sum(kind in record["why"] for _, record in chosen) for kind in samples.KINDS}
    buttons = "".join(
        f'<button data-kind="{kind}" aria-pressed="false">{kind} {count}</button>' for kind, count in counts.items() if count
    )
    total = sum(each.total for each in report.samples)
    partial = " of the part of the files that was read" if any(each.partial for each in report.samples) else ""
    return (
        f'<section id="samples"><h2>Samples</h2><p class="about">{len(items)} of {total:,} recorded completions{partial}: best '
        "and worst reward, largest gap between generator and trainer, longest, cut off, faulted, and random.</p>"
        f'<div class="tools" hidden><button data-kind="" aria-pressed="true">all {len(items)}</button>{buttons}'
        '<input type="search" id="words" placeholder="text in a sample" aria-label="text in a sample"></div>'
        f'<div class="samples">{"".join(items)}</div></section>'
    )


def _sample(run: Run | None, record: Mapping[str, Any], cap: int) -> str:
    """Returns one completion, folded. cap: bytes of each text."""
    where = f"{record.get('stage', '')} {record.get('step', '')}" + (f" · {run.name}" if run else "")
    reward = record.get("reward")
    score = f"reward {text(reward)}" if isinstance(reward, (int, float)) else "unscored" if "reward" in record else ""
    tags = "".join(f'<span class="tag {kind.split()[0]}">{kind}</span>' for kind in record["why"])
    tags += '<span class="tag">evaluation</span>' if record.get("eval") is True else ""
    peek = " ".join(_plain(record.get("completion")).split())[:_LONGEST_PEEK]
    facts = _facts(record)
    body = "".join(
        f"<h3>{esc(name + (': ' + role if role else ''))}</h3><pre>{_cut(content, cap)}</pre>"
        for name in ("prompt", "completion")
        for role, content in samples.messages(record.get(name))
    )
    notes = record.get("reward_log")
    for name, note in notes.items() if isinstance(notes, dict) else ():
        body += f"<h3>{esc(f'what {name} said')}</h3><pre>{_cut(str(note), cap // 2)}</pre>"
    columns = record.get("columns")
    if isinstance(columns, dict) and columns:
        lines = "\n".join(f"{key}: {value}" for key, value in columns.items())
        body += f"<h3>columns of the row</h3><pre>{_cut(lines, cap // 2)}</pre>"
    return (
        f'<details class="sample" data-why="{esc("|".join(record["why"]))}"><summary><span class="where">{esc(where)}</span>'
        f'<span class="score">{esc(score)}</span><span class="peek mono">{esc(peek)}</span><span class="tags">{tags}</span></summary>'
        f'<div class="body"><div class="facts">{facts}</div>{body}</div></details>'
    )


def _facts(record: Mapping[str, Any]) -> str:
    values: list[tuple[str, str]] = []
    for key, value in record["rewards"].items() if isinstance(record.get("rewards"), dict) else ():
        values.append((str(key), text(value) if isinstance(value, (int, float)) else "no score"))
    for key in ("advantage", "gap"):
        if isinstance(value := record.get(key), (int, float)):
            values.append((key, text(value)))
    values.append(("tokens", f"{samples.sample_length(dict(record)):,}"))
    for key in ("finish", "prompt_id", "sample", "version"):
        if isinstance(value := record.get(key), (int, str)):
            values.append((key, str(value)))
    for key, value in record["faults"].items() if isinstance(record.get("faults"), dict) else ():
        values.append((f"fault of {key}", str(value)))
    return "".join(f"<div><span>{esc(key)}</span> {esc(value)}</div>" for key, value in values)


def _plain(value: Any) -> str:
    return "\n".join(content for _, content in samples.messages(value))


def _cut(content: str, cap: int) -> str:
    """Escapes a text and cuts its middle out if it has more than `cap` bytes."""
    shown = esc(content)
    keep, size = len(content), len(shown.encode())
    while size > cap:
        keep = max(1, int(keep * cap / size * 0.95)) if keep > 40 else 0
        left_out = len(content) - keep
        head = keep * 2 // 3
        shown = esc(content[:head]) + f"\n[... {left_out:,} characters are left out ...]\n" + esc(content[len(content) - keep + head :])
        size = len(shown.encode()) - 60
        if not keep:
            break
    return shown


def _after(report: Report) -> str:
    """Returns what follows the samples: configuration, programs, versions."""
    parts = []
    every = [*report.runs, *([report.against] if report.against else [])]
    if shown := sections.configuration(every):
        parts.append(f'<section id="configuration"><h2>Configuration</h2>{shown}</section>')
    for key, title, write in (
        ("programs", "Programs and memory", sections.programs),
        ("versions", "Versions", sections.versions),
    ):
        shown = [(run, each) for run in report.runs if (each := write(run))]
        body = "".join((f"<h3>{esc(run.name)}</h3>" if len(report.runs) > 1 else "") + each for run, each in shown)
        parts.append(f'<section id="{key}"><h2>{title}</h2>{body}</section>' if body else "")
    made = f" on {esc(report.created)}" if report.created else ""
    return "".join(parts) + f"<footer>Written by <code>rl report</code>{made}.</footer>"


def _json(value: Any) -> str:
    """Returns JSON that cannot end the script element that holds it."""
    shown = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    shown = shown.encode("utf-8", "replace").decode()
    return shown.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return resources.files("rl.reporting.report").joinpath(name).read_text()


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
