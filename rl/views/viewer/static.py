"""Writes the page of `rl view` as a folder that any file server shows: lists and samples as JSON
files of a size to load.

The page asks for complete files only, so the server needs no byte ranges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TypeVar

from rewards.text import quoted
from rl.errors import ConfigError, DataError, ResourceError
from rl.records import thumbnails
from rl.records.run_files import MEDIA
from rl.views.viewer import query, records, search, terminal
from rl.views.viewer.tokens import TokenTexts

RELATIVES = 64  # listed completions of the same prompt, and of the same row at other steps
PER_CHUNK = 50  # samples of one file; viewer.js has the same number
_Sample = TypeVar("_Sample", bound=records.ShortSample)
_MODE = '<meta name="duet-mode" content="{}">'
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; img-src 'self' data:\">"
)


def write(directory: str, target: str, text: str = "") -> int:
    """Writes the samples that meet a filter. Returns the exit code.

    Raises ConfigError if there is no run or the folder has other files, ResourceError if it cannot
    be written.
    """
    terms = query.parse(text)
    folder = Path(target)
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / "data/run.json").is_file())
    ):
        raise ConfigError(
            f"--static {folder}: it exists and is no folder of `rl view`; name a new one"
        )
    index = terminal.opened(directory)
    every = search.matching(index, terms)
    names = (index.segment_of(each).name_of(each) for each in every.tolist())
    numbers = {name: str(number) for number, name in enumerate(names)}
    texts = TokenTexts(index.directory)
    pages = -(-len(every) // PER_CHUNK)
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for page in range(pages):
            chunk = search.places(index, every[page * PER_CHUNK : (page + 1) * PER_CHUNK])
            lists = [records.listed(index, place) for place in chunk]
            samples = [
                records.with_texts(records.full(index, place, RELATIVES), texts) for place in chunk
            ]
            for sample in samples:
                sample["group"] = [
                    _numbered(each, numbers) for each in sample["group"] if each["id"] in numbers
                ]
                sample["others"] = [
                    _numbered(each, numbers) for each in sample["others"] if each["id"] in numbers
                ]
                _write_thumbnails(folder, index.directory, sample)
            _write(folder / f"data/list-{page}.json", [_numbered(each, numbers) for each in lists])
            _write(
                folder / f"data/samples-{page}.json", [_numbered(each, numbers) for each in samples]
            )
            if page % 100 == 99:
                print(f"\r{page + 1:,} of {pages:,} pages ", end="", file=sys.stderr, flush=True)
        _write(
            folder / "data/run.json",
            {"name": index.directory.resolve().name, "total": len(every), "pages": pages},
        )
        for name in ("viewer.js", "viewer.css"):
            (folder / name).write_bytes(_file(name))
        page = (
            _file("viewer.html")
            .decode()
            .replace(_MODE.format("server"), _MODE.format("static") + "\n" + _POLICY)
        )
        (folder / "index.html").write_text(page, encoding="utf-8")
    except ValueError:
        raise DataError(
            f"{directory}: the run has changed its samples in the meantime; try again"
        ) from None
    except OSError as error:
        raise ResourceError(f"--static {folder}: cannot be written: {error.strerror}") from None
    print(
        f"{folder}/index.html: {len(every):,} samples; for example: python -m http.server -d "
        f"{quoted(folder)}",
        file=sys.stderr,
    )
    return 0


def _write_thumbnails(folder: Path, run: Path, sample: records.FullSample) -> None:
    """Writes the thumbnails that a sample of `records.full` names, each once."""
    pieces = [
        piece for message in sample["messages"].values() for _, own in message for piece in own
    ]
    for piece in pieces:
        if isinstance(piece, str) or not piece["thumbnail"]:
            continue
        path = folder / MEDIA / piece["thumbnail"]
        thumbnail = thumbnails.read(run, str(piece.get("digest")))
        if thumbnail is not None and not path.exists():
            thumbnails.write(path, thumbnail.content)


def _numbered(item: _Sample, numbers: dict[str, str]) -> _Sample:
    numbered = item.copy()
    numbered["id"] = numbers[item["id"]]
    return numbered


def _write(path: Path, value: object) -> None:
    path.write_text(
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        encoding="utf-8",
        errors="replace",
    )


def _file(name: str) -> bytes:
    from importlib import resources

    return resources.files("rl.views.viewer").joinpath(name).read_bytes()
