"""Makes links to files of the repository work in the built pages, and builds the tables of
contents.

On a repository page a link such as `../rl/run/loop.py` opens the file. In the built pages it opens
a page with the highlighted source (a folder: the list of its files). README.md and the other
Markdown files of the repository root become documents: copies in docs/_root/, which git ignores.
Documents need no markup of Sphinx: each section of index.md becomes a part of the contents.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
COPIES = "_root"
LANGUAGES = {
    ".py": "python",
    ".yml": "yaml",
    ".json": "json",
    ".jsonl": "json",
    ".toml": "toml",
    ".md": "markdown",
}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def outside_fences(text: str, change: Any) -> str:
    """Returns `text` with `change(part)` in place of every part that is no fenced code."""
    result, position = [], 0
    for fence in _FENCE.finditer(text):
        result += [change(text[position : fence.start()]), fence.group()]
        position = fence.end()
    return "".join([*result, change(text[position:])])


def copy_root_pages(app: Sphinx, _: Any = None) -> None:
    """Copies the Markdown files of the repository root into docs/_root/, where Sphinx finds
    them."""
    folder = DOCS / COPIES
    folder.mkdir(exist_ok=True)
    for name in ROOT_PAGES:
        text, copy = (ROOT / name).read_text(), folder / name
        if not copy.exists() or copy.read_text() != text:
            partial = copy.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(text)
            partial.replace(copy)


def rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    """Points every relative link of a document at its page in the build. Leaves dead links, which
    Sphinx reports."""
    folder = Path(docname).parent
    base = ROOT if folder.name == COPIES else DOCS / folder
    linked = app.env.__dict__.setdefault("duet_linked", set())

    def target(match: re.Match[str]) -> str:
        path, anchor = (base / match[1]).resolve(), match[2] or ""
        if not path.exists() or not path.is_relative_to(ROOT):
            return match.group()
        if path.parent == ROOT and path.name in ROOT_PAGES:
            return os.path.relpath(DOCS / COPIES / path.name, DOCS / folder) + anchor
        if path.is_relative_to(DOCS) and path.is_file():
            return os.path.relpath(path, DOCS / folder) + anchor
        name = str(path.relative_to(ROOT))
        linked.add(name)
        return "source:" + os.path.relpath(DOCS / "source" / f"{name}.html", DOCS / folder)

    text = source[0]
    if docname == app.config.root_doc:
        text += contents(text)
    source[0] = outside_fences(text, lambda part: _LINK.sub(target, part))


def contents(index: str) -> str:
    """Returns one hidden table of contents for each section of index.md: the documents that it
    links first."""
    listed: set[str] = set()
    result = []
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        names = [
            name
            for name in dict.fromkeys(re.findall(r"\]\(([\w./]+\.md)\)", body))
            if name not in listed
        ]
        listed |= set(names)
        entries = "\n".join(
            f"{COPIES}/{Path(name).name}" if name.startswith("../") else name for name in names
        )
        result.append(
            f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n" if names else ""
        )
    return "".join(result)


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for every linked file and folder, and for the files of linked folders."""
    waiting, done = sorted(app.env.__dict__.get("duet_linked", ())), set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        path = ROOT / name
        if path.is_dir():
            entries = [e for e in sorted(path.iterdir()) if e.is_dir() or e.suffix in LANGUAGES]
            entries = [e for e in entries if e.name != "__pycache__"]
            waiting += [f"{name}/{entry.name}" for entry in entries]
            rows = (
                f'<li><a href="{path.name}/{e.name}.html">{e.name}{"/" * e.is_dir()}</a></li>'
                for e in entries
            )
            body = f"<ul>{''.join(rows)}</ul>"
        else:
            language = LANGUAGES.get(path.suffix, "bash")
            body = app.builder.highlighter.highlight_block(path.read_text(), language, force=True)  # pyright: ignore
        title = html.escape(name)
        yield f"source/{name}", {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.connect("config-inited", copy_root_pages)
    app.connect("source-read", rewrite)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": False}
