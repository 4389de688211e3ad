"""An index of the samples of a run: the numbers of every completion, and where its line lies.

It is an SQLite database in memory. It grows with the run, and samples/index.sqlite keeps a copy of
it, which is written under another name and then renamed, and is only read as one piece. So nothing
is locked, a folder that another machine mounts needs no locks, several processes may index a run,
and without a place to write the index stays in memory.

A file is recognised by its first line, since it is renamed when it is full, and by the bytes before
the indexed end, since a run that continues truncates it: what no longer matches is read again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sqlite3
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl.records.messages import identity
from rl.records.run_files import SEGMENTS, sample_files, tokens_file
from rl.records.samples import TOKEN, largest_logp_diffs
from rl.records.schema import RawLine
from rl.views.report.samples import sample_length

INDEX = "index.sqlite"
SqlValue = int | float | str | None
"""What a column of the database holds."""
_VERSION = 2
_SCHEMA = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE segment (
    number INTEGER PRIMARY KEY,  -- grows with the age of the file: the newest has the largest
    key TEXT,
    end INTEGER,
    tail INTEGER,
    damaged INTEGER
);
CREATE TABLE name (kind TEXT, number INTEGER, value TEXT);
CREATE TABLE sample (
    id INTEGER PRIMARY KEY,  -- number of the segment * 2^40 + first byte of the line
    size INTEGER,            -- bytes of the line
    prompt_first INTEGER,    -- first byte of the prompt within the line, and the one behind it
    prompt_end INTEGER,
    completion_first INTEGER,
    completion_end INTEGER,
    rest_first INTEGER,      -- of the columns and reward logs
    rest_end INTEGER,
    same INTEGER,            -- hash of the prompt: equal for the same row of the data
    prompt INTEGER,
    step INTEGER,
    sample INTEGER,
    version INTEGER,
    n_prompt INTEGER,
    len INTEGER,
    stage INTEGER,           -- number of a name, as finish
    finish INTEGER,
    eval INTEGER,
    reward REAL,             -- NULL if there is none, as advantage and logp_diff
    advantage REAL,
    logp_diff REAL           -- largest |trainer - generator| of a trained token
);
CREATE INDEX of_group ON sample (prompt, step);
CREATE INDEX of_row ON sample (same);
CREATE TABLE score (sample INTEGER, function INTEGER, value REAL, PRIMARY KEY (sample, function))
WITHOUT ROWID;
CREATE TABLE fault (sample INTEGER, kind INTEGER, PRIMARY KEY (sample, kind)) WITHOUT ROWID;
"""
_SAMPLE_COLUMNS = 21
_SELECTED = """
SELECT size, same, prompt, step, sample, version, n_prompt, len, stage, finish, eval, reward,
advantage, logp_diff FROM sample WHERE id = ?
"""
_OFFSET_BITS = 40
_OFFSET = (1 << _OFFSET_BITS) - 1
_TAIL = 1 << 16
_CHUNK = 8 << 20  # bytes of lines that are indexed before others may look


@dataclass(eq=False)
class SampleSegment:
    """One file. number: its place in the order of the files, 0: none yet; end: indexed bytes; tail:
    checksum of the bytes before; damaged: lines that are no sample.
    """

    path: Path
    key: str
    number: int = 0
    end: int = 0
    tail: int = 0
    damaged: int = 0

    @property
    def ids(self) -> tuple[int, int]:
        """Returns the first id that a sample of this file may have, and the last one."""
        return self.id_at(0), self.id_at(_OFFSET)

    def id_at(self, offset: int) -> int:
        """Returns the id of the sample whose line begins at a byte."""
        return self.number << _OFFSET_BITS | min(offset, _OFFSET)

    def name_of(self, number: int) -> str:
        """Returns a name of the sample with an id, which stays the same when the file is renamed or
        grows."""
        return f"{self.key}-{number & _OFFSET}"


class TextSpans(NamedTuple):
    """First byte within a line, and the one behind it, of the prompt, the completion, and the
    columns with the reward logs."""

    prompt_first: int
    prompt_end: int
    completion_first: int
    completion_end: int
    rest_first: int
    rest_end: int


class TokenSpan(NamedTuple):
    """Where the tokens of a sample lie: place in tokens.bin or -1, tokens of the prompt and of the
    completion."""

    at: int
    n_prompt: int
    length: int


class SampleKey(NamedTuple):
    """The numbers that tell a completion from the others of a run."""

    prompt: int
    step: int
    sample: int


@dataclass(frozen=True)
class IndexedSample:
    """The numbers of one completion. stage, finish: as the run named them; faults: kinds;
    reward, advantage, scores of functions: None if there is none. logp_diff: the largest of its
    tokens that are trained on, without the sign; None: unknown."""

    id: int
    segment: SampleSegment
    size: int
    same: int
    prompt: int
    step: int
    sample: int
    version: int
    n_prompt: int
    len: int
    stage: str
    finish: str
    eval: bool
    reward: float | None
    advantage: float | None
    logp_diff: float | None
    scores: dict[str, float | None]
    faults: list[str]

    @property
    def offset(self) -> int:
        """The first byte of the line."""
        return self.id & _OFFSET

    def describes(self, record: RawLine) -> bool:
        """Returns whether a line is that of this completion."""
        own = SampleKey(self.prompt, self.step, self.sample)
        try:
            return _sample_numbers(record) == own
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return False


class Index:
    """The segments of a run, the oldest first, and the samples in them."""

    def __init__(self, directory: Path):
        """Reads samples/index.sqlite if it is there."""
        self.directory = directory
        self.names: dict[str, list[str]] = {}
        self.segments: list[SampleSegment] = []
        self.generation = 0  # grows with every change
        self.pending = 0  # bytes that are not indexed yet
        self._known: dict[str, SampleSegment] = {}
        self._seen: dict[tuple[int, int, int], SampleSegment] = {}
        self._lines: dict[SampleSegment, np.ndarray] = {}
        self._database = _empty()
        self._clear()
        self._load()

    @property
    def total(self) -> int:
        """The number of samples in all segments that the index has read so far."""
        [[count]] = self.query("SELECT count(*) FROM sample")
        return count

    @property
    def damaged(self) -> int:
        """The number of lines that are no sample."""
        return sum(segment.damaged for segment in self.segments)

    @property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        return sorted(self.names["function"])

    def query(self, text: str, values: Iterable[SqlValue] = ()) -> Iterator[tuple[Any, ...]]:
        """Yields the rows that a statement selects."""
        return self._database.execute(text, tuple(values))

    def ids(self, text: str, values: Iterable[SqlValue] = ()) -> np.ndarray:
        """Returns the integers that a statement selects, row by row, int64[n]."""
        return np.fromiter(itertools.chain.from_iterable(self.query(text, values)), np.int64)

    def sample(self, number: int) -> IndexedSample:
        """Returns the sample with an id. Raises LookupError if there is none."""
        selected = self.query(_SELECTED, (number,))
        for own in selected:
            size, same, prompt, step, sample, version, n_prompt, length, *rest = own
            stage, finish, evaluation, reward, advantage, logp_diff = rest
            return IndexedSample(
                id=number,
                segment=self.segment_of(number),
                size=size,
                same=same,
                prompt=prompt,
                step=step,
                sample=sample,
                version=version,
                n_prompt=n_prompt,
                len=length,
                stage=self.names["stage"][stage],
                finish=self.names["finish"][finish],
                eval=bool(evaluation),
                reward=reward,
                advantage=advantage,
                logp_diff=logp_diff,
                scores=self._scores(number),
                faults=self._faults(number),
            )
        raise LookupError(number)

    def segment_of(self, number: int) -> SampleSegment:
        """Returns the file of the sample with an id. Raises LookupError if it is gone."""
        for segment in self.segments:
            if segment.number == number >> _OFFSET_BITS:
                return segment
        raise LookupError(number)

    def _scores(self, number: int) -> dict[str, float | None]:
        names = self.names["function"]
        selected = self.query("SELECT function, value FROM score WHERE sample = ?", (number,))
        return {names[function]: value for function, value in selected}

    def _faults(self, number: int) -> list[str]:
        selected = self.query("SELECT kind FROM fault WHERE sample = ?", (number,))
        return [self.names["fault"][kind] for (kind,) in selected]

    def lines(self, segment: SampleSegment) -> np.ndarray:
        """Returns where the lines of a file and their texts lie, int64[n, 8]: first byte, bytes,
        and first byte and end of prompt, completion and the rest within the line."""
        if segment not in self._lines:
            numbers = self.ids(
                "SELECT id, size, prompt_first, prompt_end, completion_first, completion_end, "
                "rest_first, rest_end FROM sample WHERE id BETWEEN ? AND ? ORDER BY id",
                segment.ids,
            ).reshape(-1, 8)
            numbers[:, 0] &= _OFFSET
            self._lines[segment] = numbers
        return self._lines[segment]

    def refresh(self, seconds: float = math.inf) -> bool:
        """Indexes what the run has written, the newest file first. Returns whether all of it is
        indexed.

        Stops after `seconds`, and continues at the next call. Each call makes some progress.
        """
        segments = self._listed(kept=[])
        if any(each not in segments for each in self._known.values()):
            # The run removed a file, or moved it after it was listed.
            segments = self._listed(kept=self.segments)
        self._set_segments(segments)
        deadline = time.monotonic() + seconds
        complete = True
        worked = False
        for segment in reversed(segments):
            waits = _size(segment.path) > segment.end
            if waits and worked and time.monotonic() >= deadline:
                complete = False
                continue
            worked = worked or waits
            while True:
                try:
                    more = self._grow(segment)
                except _MovedError:
                    complete = False  # the next call sees the new name
                except OSError:
                    pass
                else:
                    if more and time.monotonic() < deadline:
                        continue
                    complete = complete and not more
                break
        self.pending = sum(_size(each.path) - each.end for each in segments) if not complete else 0
        return complete

    def _listed(self, kept: list[SampleSegment]) -> list[SampleSegment]:
        """Returns the files of the run, the oldest first, but those without a complete line.

        kept: files that are returned even if they cannot be opened, while a listing shows them.
        """
        by_path = {each.path: each for each in kept}
        segments: list[SampleSegment] = []
        for path in sample_files(self.directory):
            try:
                segment = self._opened(path)
            except OSError:
                segment = by_path.get(path)
            if segment is not None and segment not in segments:
                segments.append(segment)
        return segments

    def save(self) -> None:
        """Writes samples/index.sqlite. Does nothing where it cannot be written."""
        self.write(self.image())

    def image(self) -> bytes:
        """Returns the database as the content of a file."""
        states = [
            (each.number, each.key, each.end, each.tail, each.damaged)
            for each in self._known.values()
        ]
        names = [
            (kind, number, value)
            for kind, values in self.names.items()
            for number, value in enumerate(values)
        ]
        with self._database:
            self._database.execute("DELETE FROM segment")
            self._database.executemany("INSERT INTO segment VALUES (?, ?, ?, ?, ?)", states)
            self._database.execute("DELETE FROM name")
            self._database.executemany("INSERT INTO name VALUES (?, ?, ?)", names)
        return self._database.serialize()

    def write(self, image: bytes) -> None:
        """Replaces samples/index.sqlite in one step. Does nothing where it cannot be written."""
        folder = self.directory / SEGMENTS
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            # A file of `tempfile` could be read by its owner alone, one in such a folder by others.
            with tempfile.TemporaryDirectory(prefix=f".{INDEX}.", dir=folder) as own:
                temporary = Path(own) / INDEX
                temporary.write_bytes(image)
                temporary.replace(folder / INDEX)

    def _clear(self) -> None:
        self._database = _empty()
        self.names = {"stage": [], "finish": [], "fault": [], "function": []}
        self._known = {}

    def _load(self) -> None:
        """Reads the copy in the folder of the run. One of another version is left alone, a damaged
        one is reported; the index is then built again."""
        file = self.directory / SEGMENTS / INDEX
        try:
            with contextlib.closing(_opened_copy(file.read_bytes())) as copy:
                [[version]] = copy.execute("PRAGMA user_version")
                if version != _VERSION:
                    return
                [[state]] = copy.execute("PRAGMA quick_check(1)")
                if state != "ok":
                    raise sqlite3.DatabaseError(state)
                copy.backup(self._database)
            for number, key, *state in self.query("SELECT * FROM segment"):
                self._known[key] = SampleSegment(Path(), key, number, *state)
            for kind, _, value in self.query("SELECT * FROM name ORDER BY number"):
                self.names[kind].append(value)
        except FileNotFoundError:
            return
        except (OSError, sqlite3.Error, ValueError, KeyError, TypeError) as error:
            print(f"{file}: cannot be read: {error}; the index is built again", file=sys.stderr)
            self._clear()

    def _set_segments(self, segments: list[SampleSegment]) -> None:
        """Takes over the files of the run, the oldest first: numbers new ones, and removes the
        samples of those that are gone."""
        if [each.key for each in segments] != [each.key for each in self.segments]:
            self.generation += 1
        for gone in self._known.values():
            if gone not in segments:
                self._remove(gone)
        last = 0
        for segment in segments:
            if segment.number <= last:  # new, or behind a file that is new
                self._remove(segment)
                segment.number = 1 + max(each.number for each in (*segments, *self.segments))
            last = segment.number
        self.segments = segments
        self._known = {each.key: each for each in segments}
        self._seen = {
            state: each for state, each in self._seen.items() if self._known.get(each.key) is each
        }

    def _remove(self, segment: SampleSegment) -> None:
        """Removes the samples of a file, which is then read from its beginning."""
        self._lines.pop(segment, None)
        with self._database:
            for table, column in (("sample", "id"), ("score", "sample"), ("fault", "sample")):
                self._database.execute(
                    f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?", segment.ids
                )
        segment.end = segment.tail = segment.damaged = 0

    def _opened(self, path: Path) -> SampleSegment | None:
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

    def _checked(self, path: Path) -> SampleSegment | None:
        with path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return None
            key = blake2b(first, digest_size=6).hexdigest()
            known = self._known.get(key)
            if known is None:
                return SampleSegment(path, key)
            known.path = path
            start = max(0, known.end - _TAIL)
            file.seek(start)
            if zlib.crc32(file.read(known.end - start)) != known.tail:
                self.generation += 1
                self._remove(known)
        return known

    def _grow(self, segment: SampleSegment) -> bool:
        """Indexes the next lines of a file. Returns whether there may be more."""
        with segment.path.open("rb") as file:
            opened = os.fstat(file.fileno())
            file.seek(segment.end)
            data = file.read(_CHUNK)
            more = len(data) == _CHUNK
            end = data.rfind(b"\n") + 1
            if more and not end:
                data += file.readline()  # a line longer than a chunk
                end = data.rfind(b"\n") + 1
            if not end:
                return False
            self._append(segment, data[:end], opened)
            start = max(0, segment.end - _TAIL)
            file.seek(start)
            segment.tail = zlib.crc32(file.read(segment.end - start))
        self.generation += 1
        return more

    @np.errstate(over="ignore")  # a number that is too large for float32 is infinite
    def _append(self, segment: SampleSegment, data: bytes, opened: os.stat_result) -> None:
        """Indexes lines. opened: the file that they were read from. Raises _MovedError if its path
        does not name it any more: the tokens may then be those of another file."""
        lines = (
            data.splitlines(keepends=True)
            if b"\r" not in data
            else data.replace(b"\r", b" ").splitlines(True)
        )
        rows: list[list[SqlValue]] = []
        spans: list[TokenSpan] = []
        scores: list[tuple[int, int, float | None]] = []
        faults: list[tuple[int, int]] = []
        damaged = 0
        first, _ = segment.ids
        offset = segment.end
        for line in lines:
            try:
                record = json.loads(line)
                number = first + offset
                span = _token_span(record)
                row = self._row(record, number, line, span)
                own_scores = self._scores_of(record, number)
                own_faults = self._faults_of(record, number)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                damaged += bool(line.strip())
            else:
                rows.append(row)
                spans.append(span)
                scores += own_scores
                faults += own_faults
            offset += len(line)
        logp_diffs = _logp_diffs(segment.path, spans)
        if not _names(segment.path, opened):
            raise _MovedError(segment.path)
        for row, logp_diff in zip(rows, logp_diffs, strict=True):
            row.append(logp_diff)
        marks = ", ".join("?" * _SAMPLE_COLUMNS)
        with self._database:
            self._database.executemany(f"INSERT INTO sample VALUES ({marks})", rows)
            self._database.executemany("INSERT OR REPLACE INTO score VALUES (?, ?, ?)", scores)
            self._database.executemany("INSERT INTO fault VALUES (?, ?)", faults)
        segment.end = offset
        segment.damaged += damaged
        self._lines.pop(segment, None)

    def _row(self, record: RawLine, number: int, line: bytes, span: TokenSpan) -> list[SqlValue]:
        """Returns the columns of a sample in the order of the table, but the last, `logp_diff`."""
        prompt = identity(record).encode("utf-8", "surrogatepass")
        same = int.from_bytes(blake2b(prompt, digest_size=8).digest(), "little", signed=True)
        return [
            number,
            len(line),
            *_text_spans(line),
            same,
            *_sample_numbers(record),
            _integer(_version(record)),
            span.n_prompt,
            span.length,
            self._name("stage", record["stage"]),
            self._name("finish", record.get("finish")),
            record.get("eval") is True,
            _number(record.get("reward")),
            _single(record.get("advantage")),
        ]

    def _scores_of(self, record: RawLine, number: int) -> list[tuple[int, int, float | None]]:
        own = record.get("rewards")
        scores = own.items() if isinstance(own, dict) else ()
        return [(number, self._name("function", name), _single(score)) for name, score in scores]

    def _faults_of(self, record: RawLine, number: int) -> list[tuple[int, int]]:
        own = record.get("faults")
        kinds = set(own.values()) if isinstance(own, dict) else ()
        return [(number, kind) for kind in {self._name("fault", kind) for kind in kinds}]

    def _name(self, kind: str, value: object) -> int:
        """Returns the number of a name, a new one if it is new."""
        names = self.names[kind]
        name = str(value)
        if name not in names:
            name = storable(name)
        if name not in names:
            names.append(name)
        return names.index(name)


class _MovedError(OSError):
    """The run has moved a file that is being read."""


def storable(text: str) -> str:
    """Returns a text as the database holds it: without halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()


def _empty() -> sqlite3.Connection:
    """Returns an index without samples, in memory."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.executescript(_SCHEMA)
    return database


def _opened_copy(image: bytes) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.deserialize(image)
    return database


def _sample_numbers(record: RawLine) -> SampleKey:
    return SampleKey(
        prompt=_integer(record.get("prompt_id", -1)),
        step=_integer(record["step"]),
        sample=_integer(record.get("sample", 0)),
    )


def _token_span(record: RawLine) -> TokenSpan:
    """Reads where the tokens lie. Raises OverflowError for a place that no file has, ValueError for
    negative numbers of tokens."""
    span = TokenSpan(
        at=_integer(record.get("at", -1)),
        n_prompt=_integer(record.get("n_prompt", 0)),
        length=_integer(sample_length(record)),
    )
    if span.n_prompt < 0 or span.length < 0:
        raise ValueError(f"{span}: negative numbers of tokens")
    _integer(sum(span) * TOKEN.itemsize)
    return span


def _logp_diffs(path: Path, spans: list[TokenSpan]) -> list[float | None]:
    """Reads the tokens of samples of a file. Returns `IndexedSample.logp_diff` of each."""
    result: list[float | None] = [None] * len(spans)
    binary = tokens_file(path)
    at, n_prompt, length = np.array(spans, np.int64).reshape(-1, 3).T
    known = np.flatnonzero(at >= 0)
    if not len(known) or not binary.is_file():
        return result
    low = int(at[known].min())
    end = binary.stat().st_size // TOKEN.itemsize
    high = min(end, int((at + n_prompt + length)[known].max()))
    if low >= high:
        return result
    tokens = np.fromfile(binary, TOKEN, high - low, offset=low * TOKEN.itemsize)
    known = known[at[known] - low < len(tokens)]
    known = known[np.argsort(at[known], kind="stable")]
    starts, first = np.unique(at[known] - low, return_index=True)
    largest = largest_logp_diffs(tokens, starts)
    for row, logp_diff in zip(known[first].tolist(), largest.tolist(), strict=True):
        result[row] = _number(logp_diff)
    return result


def _text_spans(line: bytes) -> TextSpans:
    """Finds the texts of a line. Inside a JSON text a quotation mark is escaped, so `"tokens":` is
    a key."""
    prompt = line.find(b'"prompt":')
    tokens = line.find(b'"tokens":')
    end = tokens if tokens >= 0 else line.rfind(b"}")
    completion = line.find(b'"completion":', prompt, end)
    if prompt < 0 or completion < 0:
        return TextSpans(0, end, end, end, end, end)
    more = [
        place for key in (b'"columns":', b'"reward_log":') if (place := line.find(key, end)) >= 0
    ]
    until = line.find(b'"n_prompt":', min(more)) if more else -1
    rest = (min(more) + 10, until) if until >= 0 else (end, end)
    return TextSpans(prompt + 9, completion, completion + 13, end, *rest)


def _version(record: RawLine) -> object:
    """Returns the version of the weights that drew a sample, of its last tokens where it changes
    (`Trajectory.versions`)."""
    versions = record.get("version", -1)
    return versions[-1][1] if isinstance(versions, list) else versions


def _integer(value: object) -> int:
    """Returns an integer. Raises OverflowError for one that the database cannot hold."""
    if not isinstance(value, (int, float, str)):
        raise TypeError(f"{value!r} is no number")
    number = int(value)
    if number.bit_length() > 63:
        raise OverflowError(number)
    return number


def _number(value: object) -> float | None:
    """Returns a number, None if it is none."""
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def _single(value: object) -> float | None:
    """Returns a number as float32 holds it, which the run computes with, None if it is none."""
    number = _number(value)
    return None if number is None else float(np.float32(number))


def _names(path: Path, opened: os.stat_result) -> bool:
    """Returns whether a path still names a file that was opened by it."""
    try:
        return os.path.samestat(opened, path.stat())
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
