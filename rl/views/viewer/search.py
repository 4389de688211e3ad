"""Finds the samples that meet a filter: numbers in the index, texts in the mapped files."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path

import numpy as np

from policy.json_types import JsonValue
from rewards.suggest import nearest
from rl.records.samples import LOGP_DIFF, TOKEN, read_tokens
from rl.records.schema import SampleRecord
from rl.views.viewer import query
from rl.views.viewer.index import Index, IndexedSample, SampleSegment, SqlValue, storable
from rl.views.viewer.query import FilterError, Flag, NumberTerm, Regex, Term, Text, Word

SORTS = {"reward": "reward", LOGP_DIFF: "logp_diff", "len": "len"}
"""Word of an order -> column of the index."""
_OF_SINGLE_PRECISION = ("advantage", "logp_diff")
_CHUNK = 8 << 20


@dataclass(frozen=True)
class SamplePlace:
    """One sample: its numbers, which say where its line lies."""

    numbers: IndexedSample

    @property
    def id(self) -> str:
        """A name that stays the same when the file is renamed or grows."""
        return self.numbers.segment.name_of(self.numbers.id)

    @property
    def path(self) -> Path:
        """The file of samples.jsonl that has the line."""
        return self.numbers.segment.path

    def record(self) -> SampleRecord:
        """Reads the line. Raises ValueError if the run has changed it since, OSError if it is
        gone."""
        with self.path.open("rb") as file:
            file.seek(self.numbers.offset)
            record = json.loads(file.read(self.numbers.size))
        if not self.numbers.describes(record):
            raise ValueError(f"{self.path}: another sample has the place of {self.id}")
        return record

    def tokens(self, record: SampleRecord) -> np.ndarray:
        """Returns TOKEN[n_prompt + n]; fewer or none if they were not recorded. Raises OSError."""
        try:
            return read_tokens(self.path, record)
        except FileNotFoundError:
            return np.zeros(0, TOKEN)


@dataclass(frozen=True)
class Condition:
    """A condition of SQL, and the values of its question marks."""

    text: str
    values: tuple[SqlValue, ...] = ()


def matching(index: Index, terms: Sequence[Term], sort: str | None = None) -> np.ndarray:
    """Returns the ids of the samples that meet all terms, int64[n].

    The newest come first; with sort, one of SORTS, those with the largest value, and those without
    a value last. Raises FilterError for a reward function that the run does not have.
    """
    conditions = []
    values: list[SqlValue] = []
    for term in terms:
        if not isinstance(term, (Text, Regex)):
            condition = _condition(index, term)
            conditions.append(f"({condition.text}) IS {'NOT ' if term.negated else ''}TRUE")
            values += condition.values
    order = "id DESC"
    if sort is not None:
        order = f"CASE WHEN {_is_finite(SORTS[sort])} THEN {SORTS[sort]} END DESC, id DESC"
    where = " AND ".join(conditions) or "TRUE"
    ids = index.ids(f"SELECT id FROM sample WHERE {where} ORDER BY {order}", values)
    for term in terms:
        if isinstance(term, (Text, Regex)) and len(ids):
            ids = ids[_with_text(index, term, ids) ^ term.negated]
    return ids


def places(index: Index, ids: Iterable[int] | np.ndarray) -> list[SamplePlace]:
    """Returns the places of samples by their ids. Raises LookupError for one that is gone."""
    return [SamplePlace(index.sample(int(each))) for each in ids]


def place(index: Index, name: str) -> SamplePlace | None:
    """Returns the sample with this id, or None."""
    key, _, offset = name.partition("-")
    for segment in index.segments:
        if segment.key == key and offset.isdecimal():
            with contextlib.suppress(LookupError):
                return SamplePlace(index.sample(segment.id_at(int(offset))))
    return None


def _condition(index: Index, term: Term) -> Condition:
    """Returns which samples meet a term about numbers or names, without its negation. NULL: not
    met."""
    if isinstance(term, NumberTerm):
        return _compared(index, term)
    if isinstance(term, Word):
        return _named(index, term)
    assert isinstance(term, Flag)
    conditions = {
        "eval": "eval",
        "fault": "EXISTS (SELECT * FROM fault WHERE fault.sample = sample.id)",
        "unscored": "reward IS NULL",
        "signal": f"advantage <> 0 AND {_is_finite('advantage')}",
    }
    return Condition(conditions[term.name])


def _is_finite(column: str) -> str:
    return f"abs({column}) < 9e999"  # SQLite reads it as infinity


def _compared(index: Index, term: NumberTerm) -> Condition:
    function = term.column.partition(".")[2]
    column = "value" if function else term.column
    low = f"{column} {'>' if term.open_low else '>='} ?"
    high = f"{column} {'<' if term.open_high else '<='} ?"
    within = f"NOT ({low} AND {high})" if term.outside else f"{low} AND {high}"
    bounds = (term.low, term.high)
    if function or column in _OF_SINGLE_PRECISION:  # compared as float32, as the index has them
        with np.errstate(over="ignore"):
            bounds = (float(np.float32(term.low)), float(np.float32(term.high)))
    if not function:
        return Condition(within, bounds)
    names = index.names["function"]
    if storable(function) not in names:
        if not names:
            return Condition("FALSE")
        raise FilterError(
            f"filter: {term.column}: no such reward function{nearest(function, index.functions)}"
        )
    score = f"SELECT * FROM score WHERE score.sample = sample.id AND function = ? AND {within}"
    return Condition(f"EXISTS ({score})", (names.index(storable(function)), *bounds))


def _named(index: Index, term: Word) -> Condition:
    names = index.names[term.column]
    value = storable(term.value)
    if value not in names:
        if term.column == "stage" and names:
            raise FilterError(
                f"filter: stage:{term.value}: no such stage{nearest(term.value, names)}"
            )
        return Condition("FALSE")
    number = names.index(value)
    if term.column == "fault":
        fault = "SELECT * FROM fault WHERE fault.sample = sample.id AND kind = ?"
        return Condition(f"EXISTS ({fault})", (number,))
    return Condition(f"{term.column} = ?", (number,))


def _with_text(index: Index, term: Text | Regex, ids: np.ndarray) -> np.ndarray:
    """Returns for each sample whether its text matches, bool[n], without the negation."""
    result = np.zeros(len(ids), bool)
    for segment in index.segments:
        first, last = segment.ids
        own = np.flatnonzero((ids >= first) & (ids <= last))
        if len(own):
            lines = index.lines(segment)
            rows = np.searchsorted(lines[:, 0], ids[own] - first)
            candidates = np.zeros(len(lines), bool)
            candidates[rows] = True
            result[own] = _texts(segment, lines, term, candidates)[rows]
    return result


def _texts(
    segment: SampleSegment, lines: np.ndarray, term: Text | Regex, candidates: np.ndarray
) -> np.ndarray:
    """Returns for each line of a file whether its text matches. Lines that are no candidates may be
    left out."""
    result = np.zeros(len(candidates), bool)
    with contextlib.suppress(OSError, ValueError), segment.path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return result
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if isinstance(term, Text):
                for row in _word_rows(lines, data, term.words):
                    result[row] = True
                return result
            spans = (lines[:, 2:6] + lines[:, :1]).tolist()
            for row in np.flatnonzero(candidates).tolist():
                prompt, prompt_end, completion, completion_end = spans[row]
                values = (data[prompt:prompt_end], data[completion:completion_end])
                result[row] = any(
                    term.pattern.search(text) for value in values for text in _strings(value)
                )
    return result


def _word_rows(lines: np.ndarray, data: mmap.mmap, words: str) -> Iterator[int]:
    """Yields the lines in whose prompt, completion, columns or reward logs the words are."""
    needle = _escaped(words)
    offsets = np.ascontiguousarray(lines[:, 0])
    first = 0
    while first < len(lines):
        start = int(offsets[first])
        until = int(np.searchsorted(offsets, start + _CHUNK, side="right"))
        last = max(first + 1, until)
        end = int(offsets[last - 1] + lines[last - 1, 1])
        chunk = data[start:end].lower()
        begin = (offsets[first:last] - start).tolist()
        spans = lines[first:last, 2:].reshape(-1, 3, 2).tolist()
        row = 0
        place = chunk.find(needle)
        while place >= 0:
            row = _row_of(begin, place, row)
            inside = place - begin[row]
            span = next((each for each in spans[row] if each[0] <= inside < each[1]), None)
            if span is None:
                place = chunk.find(needle, place + 1)
            elif span in spans[row][:2] and not _in_texts(
                chunk[begin[row] + span[0] : begin[row] + span[1]], needle
            ):
                place = chunk.find(needle, begin[row] + span[1])
            else:
                yield first + row
                if row + 1 == len(begin):
                    break
                place = chunk.find(needle, begin[row + 1])
        first = last


def _in_texts(value: bytes, needle: bytes) -> bool:
    """Tells whether words that are in a prompt or completion are in its texts, not in a key, a role
    or a type."""
    if value.lstrip().startswith(b'"'):
        return True
    return any(needle in _escaped(text) for text in _strings(value))


def _escaped(text: str) -> bytes:
    """Returns a text as a line holds it, in lower case as far as it is ASCII."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass").lower()


def _row_of(begin: list[int], place: int, low: int) -> int:
    """Returns the last row that begins at or before `place`, from row `low` on."""
    high = len(begin)
    while high - low > 1:
        middle = (low + high) // 2
        if begin[middle] <= place:
            low = middle
        else:
            high = middle
    return low


def _strings(value: bytes) -> Iterator[str]:
    """Yields the texts of a prompt or completion: a JSON text, or messages."""
    text = value.strip(b" ,\r\n").decode("utf-8", "replace")
    try:
        if text.startswith('"'):
            yield scanstring(text, 1, True)[0]
        else:
            yield from _contents(json.loads(text) if text else None)
    except ValueError:
        yield text


def _contents(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _contents(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in ("role", "type"):
                yield from _contents(each)


def search(index: Index, text: str, sort: str | None = None) -> np.ndarray:
    """Returns the numbers of the samples that meet a filter, as `matching` does. Raises
    FilterError."""
    return matching(index, query.parse(text), sort)
