"""An index of the samples of a run: the numbers of every completion, and where its line lies.

It is built once, kept as samples/index.npz, and grows with the run. A file is recognised by its
first line, since it is renamed when it is full, and by the bytes before the indexed end, since a
run that continues truncates it: what no longer matches is read again. Without a place to write, the
index stays in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rl.records.messages import identity
from rl.records.run_files import SEGMENTS, sample_files, tokens_file
from rl.records.samples import TOKEN, TRAINED, first_version
from rl.views.report.samples import sample_length

INDEX = "index.npz"
ROW = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<i4"),  # bytes of the line
        (
            "spans",
            "<i4",
            (3, 2),
        ),  # first and last byte within the line: of prompt, completion, columns and reward logs
        ("same", "<u8"),  # hash of the prompt: equal for the same row of the data
        ("at", "<i8"),  # place in tokens.bin, or -1
        ("prompt", "<i8"),
        ("step", "<i4"),
        ("sample", "<i4"),
        ("version", "<i4"),
        ("n_prompt", "<i4"),
        ("len", "<i4"),
        ("stage", "<i2"),  # number of a name, as finish and faults
        ("finish", "<i2"),
        ("fault", "<u4"),  # bit k: the kind of fault number k
        ("eval", "?"),
        ("reward", "<f8"),
        ("advantage", "<f4"),
        ("gap", "<f4"),  # largest |trainer - generator| of a trained token; NaN if unknown
    ]
)
"""The numbers of one completion."""
_VERSION = 1
_TAIL = 1 << 16
_CHUNK = 8 << 20  # bytes of lines that are indexed before others may look


@dataclass
class Segment:
    """The index of one file. rows: ROW[n]; scores: function -> float32[n], NaN where there is none;
    end: indexed bytes.
    """

    path: Path
    key: str
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    end: int = 0
    tail: int = 0
    damaged: int = 0


class Index:
    """The segments of a run, the oldest first, and the names that their rows number."""

    def __init__(self, directory: Path):
        """Reads samples/index.npz if it is there."""
        self.directory = directory
        self.names: dict[str, list[str]] = {"stage": [], "finish": [], "fault": []}
        self.segments: list[Segment] = []
        self.generation = 0  # grows with every change
        self.pending = 0  # bytes that are not indexed yet
        self._known: dict[str, Segment] = {}
        self._seen: dict[tuple[int, int, int], Segment] = {}
        self._load()

    @property
    def total(self) -> int:
        """The number of samples in all segments that the index has read so far."""
        return sum(len(segment.rows) for segment in self.segments)

    @property
    def damaged(self) -> int:
        """The number of lines that are no sample."""
        return sum(segment.damaged for segment in self.segments)

    @property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        return sorted({name for segment in self.segments for name in segment.scores})

    def refresh(self, seconds: float = math.inf) -> bool:
        """Indexes what the run has written, the newest file first. Returns whether all of it is
        indexed.

        Stops after `seconds`, and continues at the next call.
        """
        deadline = time.monotonic() + seconds
        segments = []
        for path in sample_files(self.directory):
            with contextlib.suppress(
                OSError
            ):  # the run has moved or removed it; the next call sees the new name
                if (segment := self._opened(path)) is not None:
                    segments.append(segment)
        if [each.key for each in segments] != [each.key for each in self.segments]:
            self.generation += 1
        self.segments = segments
        self._known = {each.key: each for each in segments}
        self._seen = {
            state: each for state, each in self._seen.items() if self._known.get(each.key) is each
        }
        complete = True
        for segment in reversed(segments):
            while True:
                with contextlib.suppress(OSError):
                    more = self._grow(segment)
                    if more and time.monotonic() < deadline:
                        continue
                    complete = complete and not more
                break
        self.pending = sum(_size(each.path) - each.end for each in segments) if not complete else 0
        return complete

    def save(self) -> None:
        """Writes samples/index.npz in one step. Does nothing where it cannot be written."""
        folder = self.directory / SEGMENTS
        arrays: dict[str, np.ndarray] = {}
        about: list[dict[str, Any]] = []
        for number, each in enumerate(self.segments):
            arrays[f"rows{number}"] = each.rows
            for place, name in enumerate(each.scores):
                arrays[f"scores{number}.{place}"] = each.scores[name]
            about.append(
                {"key": each.key, "end": each.end, "tail": each.tail, "damaged": each.damaged}
            )
            about[-1]["scores"] = list(each.scores)
        header = {
            "version": _VERSION,
            "row": str(ROW.descr),
            "names": self.names,
            "segments": about,
        }
        temporary = folder / f".{INDEX}.{os.getpid()}.npz"
        try:
            folder.mkdir(exist_ok=True)
            arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
            np.savez(temporary, allow_pickle=False, **arrays)
            temporary.replace(folder / INDEX)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _load(self) -> None:
        file = self.directory / SEGMENTS / INDEX
        try:
            with np.load(file, allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                if header["version"] != _VERSION or header["row"] != str(ROW.descr):
                    return
                for number, each in enumerate(header["segments"]):
                    scores = {
                        name: arrays[f"scores{number}.{place}"]
                        for place, name in enumerate(each["scores"])
                    }
                    rows = arrays[f"rows{number}"]
                    self._known[each["key"]] = Segment(
                        Path(),
                        each["key"],
                        rows,
                        scores,
                        each["end"],
                        each["tail"],
                        each["damaged"],
                    )
                self.names = {name: list(values) for name, values in header["names"].items()}
        except Exception:  # missing, torn or of another version: it is built again
            self._known = {}

    def _opened(self, path: Path) -> Segment | None:
        """Returns the segment of a file: a known one if the file still begins and goes on as it
        did."""
        about = path.stat()
        state = (about.st_ino, about.st_size, about.st_mtime_ns)
        if (known := self._seen.get(state)) is not None and self._known.get(known.key) is known:
            known.path = path
            return known
        segment = self._checked(path)
        if segment is not None:
            self._seen[state] = segment
        return segment

    def _checked(self, path: Path) -> Segment | None:
        with path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return None
            key = blake2b(first, digest_size=6).hexdigest()
            known = self._known.get(key)
            if known is None:
                return Segment(path, key)
            known.path = path
            start = max(0, known.end - _TAIL)
            file.seek(start)
            if zlib.crc32(file.read(known.end - start)) != known.tail:
                self.generation += 1
                return Segment(path, key)
        return known

    def _grow(self, segment: Segment) -> bool:
        """Indexes the next lines of a file. Returns whether there may be more."""
        with segment.path.open("rb") as file:
            file.seek(segment.end)
            data = file.read(_CHUNK)
            more = len(data) == _CHUNK
            end = data.rfind(b"\n") + 1
            if more and not end:
                data += file.readline()  # a line longer than a chunk
                end = data.rfind(b"\n") + 1
            if not end:
                return False
            self._append(segment, data[:end])
            start = max(0, segment.end - _TAIL)
            file.seek(start)
            segment.tail = zlib.crc32(file.read(segment.end - start))
        self.generation += 1
        return more

    def _append(self, segment: Segment, data: bytes) -> None:
        lines = (
            data.splitlines(keepends=True)
            if b"\r" not in data
            else data.replace(b"\r", b" ").splitlines(True)
        )
        rows: list[tuple] = []
        scores: dict[str, list[float]] = {}
        offset = segment.end
        for line in lines:
            try:
                record = json.loads(line)
                rows.append(self._row(record, line, offset))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                segment.damaged += bool(line.strip())
            else:
                own = record.get("rewards")
                for name, score in own.items() if isinstance(own, dict) else ():
                    column = scores.setdefault(str(name), [])
                    column.extend([math.nan] * (len(rows) - 1 - len(column)))
                    column.append(_number(score))
            offset += len(line)
        fresh = np.array(rows, ROW)
        self._set_gaps(segment, fresh)
        old = len(segment.rows)
        merged = {}
        for name in {**segment.scores, **scores}:
            new = np.full(len(fresh), np.nan, np.float32)
            column = scores.get(name, [])
            new[: len(column)] = column
            merged[name] = np.concatenate(
                [segment.scores.get(name, np.full(old, np.nan, np.float32)), new]
            )
        segment.rows = np.concatenate([segment.rows, fresh])
        segment.scores = merged
        segment.end = offset

    def _row(self, record: dict[str, Any], line: bytes, offset: int) -> tuple:
        faults = record.get("faults")
        bits = 0
        for kind in faults.values() if isinstance(faults, dict) else ():
            bits |= 1 << min(self._name("fault", str(kind)), 31)
        prompt = identity(record).encode("utf-8", "surrogatepass")
        return (
            offset,
            len(line),
            _spans(line),
            int.from_bytes(blake2b(prompt, digest_size=8).digest(), "little"),
            int(record.get("at", -1)),
            int(record.get("prompt_id", -1)),
            int(record["step"]),
            int(record.get("sample", 0)),
            first_version(record),
            int(record.get("n_prompt", 0)),
            sample_length(record),
            self._name("stage", str(record["stage"])),
            self._name("finish", str(record.get("finish"))),
            bits,
            record.get("eval") is True,
            _number(record.get("reward")),
            _number(record.get("advantage")),
            math.nan,
        )

    def _name(self, column: str, name: str) -> int:
        names = self.names[column]
        if name not in names:
            names.append(name)
        return names.index(name)

    def _set_gaps(self, segment: Segment, rows: np.ndarray) -> None:
        """Reads the tokens of the rows, and sets their gaps."""
        binary = tokens_file(segment.path)
        known = np.flatnonzero(rows["at"] >= 0)
        if not len(known) or not binary.is_file():
            return
        at = rows["at"][known]
        low = int(at.min())
        high = int((at + rows["n_prompt"][known] + rows["len"][known]).max())
        tokens = np.fromfile(binary, TOKEN, high - low, offset=low * TOKEN.itemsize)
        size = np.abs(tokens["gap"].astype(np.float32))
        size[(tokens["flags"] & TRAINED == 0) | ~np.isfinite(size)] = np.nan
        known = known[at - low < len(tokens)]
        known = known[np.argsort(rows["at"][known], kind="stable")]
        places, first = np.unique(rows["at"][known] - low, return_index=True)
        if len(places):
            rows["gap"][known[first]] = np.fmax.reduceat(size, places)


def columns(segments: Iterable[Segment], name: str) -> np.ndarray:
    """Returns a column of all rows, the oldest first; `reward.NAME`: the scores of a function."""
    function = name.partition(".")[2]
    if function:
        parts = [
            each.scores.get(function, np.full(len(each.rows), np.nan, np.float32))
            for each in segments
        ]
    else:
        parts = [each.rows[name] for each in segments]
    return np.concatenate(parts) if parts else np.zeros(0)


def _spans(line: bytes) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Returns where a line has its texts. Inside a JSON text a quotation mark is escaped, so
    `"tokens":` is a key."""
    prompt = line.find(b'"prompt":')
    tokens = line.find(b'"tokens":')
    end = tokens if tokens >= 0 else line.rfind(b"}")
    completion = line.find(b'"completion":', prompt, end)
    if prompt < 0 or completion < 0:
        return (0, end), (end, end), (end, end)
    more = [
        place for key in (b'"columns":', b'"reward_log":') if (place := line.find(key, end)) >= 0
    ]
    until = line.find(b'"n_prompt":', min(more)) if more else -1
    rest = (min(more) + 10, until) if until >= 0 else (end, end)
    return (prompt + 9, completion), (completion + 13, end), rest


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
