"""Writes the report: one HTML file that asks for nothing, of at most 2 MB however long the run was.

The page holds one style and one script, each named by its hash in a Content-Security-Policy that
refuses everything else, but for data URIs of pictures where samples have some. All texts of a run
are escaped: in HTML, and in the JSON of the charts, where `<` is written as \\u003c.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from rl.records.messages import pictures
from rl.views.evaluated import sections as evaluated
from rl.views.report import samples, sections
from rl.views.report.figures import figures
from rl.views.report.listing import listing
from rl.views.report.pictures import embed
from rl.views.report.read import RecordedRun, damage_text
from rl.views.report.series import Axis, esc

MOST_BYTES = 2_000_000
_SAMPLE_BYTES = 700_000


@dataclass
class ReportPage:
    """What a page shows. samples holds the chosen completions of each run."""

    runs: Sequence[RecordedRun]
    axis: Axis
    samples: Sequence[samples.Chosen]
    verdicts: Sequence[Sequence[str]]
    against: RecordedRun | None = None
    created: str = ""

    @property
    def title(self) -> str:
        """Name of the run, or of all runs."""
        *first, last = (run.name for run in self.runs)
        return f"{', '.join(first)} and {last}" if first else last


def page(report: ReportPage) -> str:
    """Returns the HTML of a report, at most MOST_BYTES long in UTF-8."""
    charts = figures(report.runs, report.axis, report.against)
    script = _asset("report.js")
    style = _asset("report.css")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    if any(pictures(record) for chosen in report.samples for record in chosen.records):
        policy += "; img-src data:"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta '
        'http-equiv="Content-Security-Policy" '
        f"content=\"{policy}; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(report.title)} - rl "
        f"report</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
    )
    before = head + _before(report) + charts.html + _evaluations(report) + _curricula(report)
    after = (
        f'{_after(report)}</main>\n<script type="application/json" '
        f'id="data">{charts.numbers}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
    room = MOST_BYTES - len((before + after).encode("utf-8", "replace"))
    embedded = embed(report.runs, report.samples, room // 2)
    room = min(room - len(embedded.html), _SAMPLE_BYTES)
    return before + embedded.html + listing(report.runs, report.samples, embedded, room) + after


def _before(report: ReportPage) -> str:
    """Returns the head of the page: name, state, verdict, damage, headline numbers, stages."""
    runs = report.runs
    one = report.runs[0]
    head = f"<h1>{esc(report.title)}</h1>{sections.pill(one) if len(runs) == 1 else ''}"
    about = "".join(
        f'<p class="about">{esc(run.name) + ": " if len(runs) > 1 else ""}{sections.about(run)}</p>'
        for run in runs
    )
    if report.against is not None:
        other = f"dashed: {esc(report.against.name)}, {sections.about(report.against)}"
        about += f'<p class="about"><span class="dot dash"></span>{other}</p>'
    parts = [f'<header><div class="head">{head}</div>{about}{_nav(report)}</header>']
    for run, lines in zip(runs, report.verdicts, strict=True):
        if lines:
            parts.append(_verdict(run, lines, f": {run.name}" if len(runs) > 1 else ""))
    if damage := [each for run in runs for each in run.damage]:
        parts.append(
            '<section class="card warn"><h2>Damaged: this report leaves out what could not be '
            "read</h2>"
            f'<pre class="mono">{esc(damage_text(damage))}</pre></section>'
        )
    if len(runs) == 1:
        parts.append(sections.tiles(one, report.samples[0].total))
    elif not all(run.evaluation for run in runs):
        parts.append(f'<section class="verdict">{sections.overview(runs)}</section>')
    if tables := sections.stages(runs):
        parts.append(f'<section id="stages"><h2>Stages</h2>{tables}</section>')
    return "".join(parts)


def _verdict(run: RecordedRun, lines: Sequence[str], name: str) -> str:
    """Returns the card of the verdict: the summary without the folder that it starts with, then a
    list."""
    summary, *findings = lines
    items = "".join(f"<li>{esc(line)}</li>" for line in findings)
    body = f"<p>{esc(summary.removeprefix(f'{run.path}: '))}</p>" + (
        f"<ul>{items}</ul>" if items else ""
    )
    return f'<section class="card verdict"><h2>Verdict{esc(name)}</h2>{body}</section>'


def _nav(report: ReportPage) -> str:
    places = [("stages", "Stages"), ("charts", "Charts")]
    names = (name for run in report.runs for name in run.metrics)
    if any(run.evaluation for run in report.runs) or any(
        each.startswith("eval/") for each in names
    ):
        places.append(("evaluation", "Evaluation"))
    if any(chosen.records for chosen in report.samples):
        places.append(("samples", "Samples"))
    places += [
        ("configuration", "Configuration"),
        ("programs", "Programs and memory"),
        ("versions", "Versions"),
    ]
    known = {
        "configuration": any(run.config for run in report.runs),
        "programs": any(run.programs for run in report.runs),
        "versions": any(run.info for run in report.runs),
    }
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in places if known.get(key, True))
    return f"<nav>{links}</nav>"


def _evaluations(report: ReportPage) -> str:
    shown = sections.evaluation_table(report.runs) + evaluated.section(report.runs)
    return f'<section id="evaluation"><h2>Evaluation</h2>{shown}</section>' if shown else ""


def _curricula(report: ReportPage) -> str:
    """Returns the section of the rows that curricula choose from."""
    shown = [(run, each) for run in report.runs if (each := sections.curricula(run))]
    body = "".join(
        (f"<h3>{esc(run.name)}</h3>" if len(report.runs) > 1 else "") + each for run, each in shown
    )
    return f'<section id="curriculum"><h2>Curriculum</h2>{body}</section>' if body else ""


def _after(report: ReportPage) -> str:
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
        body = "".join(
            (f"<h3>{esc(run.name)}</h3>" if len(report.runs) > 1 else "") + each
            for run, each in shown
        )
        parts.append(f'<section id="{key}"><h2>{title}</h2>{body}</section>' if body else "")
    made = f" on {esc(report.created)}" if report.created else ""
    return "".join(parts) + f"<footer>Written by <code>rl report</code>{made}.</footer>"


def _asset(name: str) -> str:
    return resources.files("rl.views.report").joinpath(name).read_text()


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
