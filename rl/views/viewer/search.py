"""Finds the samples that meet a filter: numbers in the index, texts in the mapped files."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import numpy as np

from rewards.suggest import nearest
from rl.records.samples import read_tokens
from rl.views.viewer import query
from rl.views.viewer.index import Index, Segment, columns
from rl.views.viewer.query import FilterError, Flag, NumberTerm, Regex, Term, Text, Word

SORTS = {"reward": "reward", "gap": "gap", "len": "len"}
_CHUNK = 8 << 20


@dataclass(frozen=True)
class SamplePlace:
    """One sample: its segment and its row there."""

    segment: Segment
    row: int

    @property
    def id(self) -> str:
        """A name that stays the same when the file is renamed or grows."""
        return f"{self.segment.key}-{self.segment.rows['offset'][self.row]}"

    def record(self) -> dict[str, Any]:
        """Reads the line. Raises ValueError if the run has changed it since, OSError if it is
        gone."""
        own = self.segment.rows[self.row]
        with self.segment.path.open("rb") as file:
            file.seek(int(own["offset"]))
            return json.loads(file.read(int(own["size"])))

    def tokens(self, record: dict[str, Any]) -> np.ndarray:
        """Returns TOKEN[n_prompt + n]; fewer or none if they were not recorded. Raises OSError."""
        try:
            return read_tokens(self.segment.path, record)
        except FileNotFoundError:
            return read_tokens(self.segment.path, {})


def matching(index: Index, terms: Sequence[Term], sort: str | None = None) -> np.ndarray:
    """Returns the numbers of the samples that meet all terms, int64[n].

    The newest come first; with sort, the largest reward, gap or length, and those without a value
    last. Raises FilterError for a reward function that the run does not have.
    """
    segments = list(index.segments)
    counts = [len(each.rows) for each in segments]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    mask = np.ones(int(starts[-1]), bool)
    for term in terms:
        if not isinstance(term, (Text, Regex)):
            mask &= _numbers(index, segments, term) ^ term.negated
    for term in terms:
        if isinstance(term, (Text, Regex)):
            for segment, start, count in zip(segments, starts, counts, strict=False):
                part = mask[start : start + count]
                if part.any():
                    part &= _texts(segment, term, part) ^ term.negated
    rows = np.flatnonzero(mask)[::-1]
    if sort is not None:
        values = columns(segments, SORTS[sort])[rows].astype(np.float64)
        rows = rows[np.argsort(np.where(np.isfinite(values), -values, np.inf), kind="stable")]
    return rows


def places(index: Index, rows: Sequence[int] | np.ndarray) -> list[SamplePlace]:
    """Returns the places of samples by their numbers."""
    starts = np.concatenate([[0], np.cumsum([len(each.rows) for each in index.segments])]).astype(
        np.int64
    )
    result = []
    for row in rows:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        result.append(SamplePlace(index.segments[number], int(row - starts[number])))
    return result


def place(index: Index, name: str) -> SamplePlace | None:
    """Returns the sample with this id, or None."""
    key, _, offset = name.partition("-")
    for segment in index.segments:
        if segment.key == key and offset.isdecimal():
            row = int(np.searchsorted(segment.rows["offset"], int(offset)))
            if row < len(segment.rows) and segment.rows["offset"][row] == int(offset):
                return SamplePlace(segment, row)
    return None


def number_of(index: Index, place: SamplePlace) -> int:
    """Returns the number of a sample, as `matching` counts."""
    before = 0
    for segment in index.segments:
        if segment is place.segment:
            break
        before += len(segment.rows)
    return before + place.row


def _numbers(index: Index, segments: list[Segment], term: Term) -> np.ndarray:
    """Returns for each sample whether it meets a term about numbers or names, without its
    negation."""
    if isinstance(term, NumberTerm):
        function = term.column.partition(".")[2]
        if function and index.functions and function not in index.functions:
            raise FilterError(
                f"filter: {term.column}: no such reward "
                f"function{nearest(function, index.functions)}"
            )
        values = columns(segments, term.column)
        above = values > term.low if term.open_low else values >= term.low
        within = above & (values < term.high if term.open_high else values <= term.high)
        return ~within & ~np.isnan(values) if term.outside else within
    if isinstance(term, Word):
        return _named(index, segments, term)
    assert isinstance(term, Flag)
    if term.name == "eval":
        return columns(segments, "eval").astype(bool)
    if term.name == "fault":
        return columns(segments, "fault") > 0
    if term.name == "unscored":
        return np.isnan(columns(segments, "reward"))
    advantage = columns(segments, "advantage")
    return np.isfinite(advantage) & (advantage != 0)


def _named(index: Index, segments: list[Segment], term: Word) -> np.ndarray:
    names = index.names[term.column]
    values = columns(segments, term.column)
    if term.value not in names:
        if term.column == "stage" and names:
            raise FilterError(
                f"filter: stage:{term.value}: no such stage{nearest(term.value, names)}"
            )
        return np.zeros(len(values), bool)
    number = names.index(term.value)
    if term.column == "fault":
        return (values & np.uint32(1 << min(number, 31))) > 0
    return values == number


def _texts(segment: Segment, term: Text | Regex, candidates: np.ndarray) -> np.ndarray:
    """Returns for each row of a file whether its text matches. Rows that are no candidates may be
    left out."""
    result = np.zeros(len(candidates), bool)
    with contextlib.suppress(OSError, ValueError), segment.path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return result
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if isinstance(term, Text):
                for row in _word_rows(segment.rows, data, term.words):
                    result[row] = True
                return result
            spans = (segment.rows["spans"] + segment.rows["offset"][:, None, None]).tolist()
            for row in np.flatnonzero(candidates).tolist():
                values = (data[first:last] for first, last in spans[row][:2])
                result[row] = any(
                    term.pattern.search(text) for value in values for text in _strings(value)
                )
    return result


def _word_rows(rows: np.ndarray, data: mmap.mmap, words: str) -> Iterator[int]:
    """Yields the rows in whose prompt, completion, columns or reward logs the words are."""
    needle = _escaped(words)
    offsets = rows["offset"]
    first = 0
    while first < len(rows):
        start = int(offsets[first])
        until = int(np.searchsorted(offsets, start + _CHUNK, side="right"))
        last = max(first + 1, until)
        end = int(offsets[last - 1] + rows["size"][last - 1])
        chunk = data[start:end].lower()
        begin = (offsets[first:last] - start).tolist()
        spans = rows["spans"][first:last].tolist()
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


def _contents(value: Any) -> Iterator[str]:
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
