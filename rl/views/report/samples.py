"""Chooses completions that are worth reading: best, worst, longest, cut off, faulted, random, and
those on which generator and trainer differ most.

Choosing needs a few numbers of every completion. Lines of small files are parsed. In large files
the numbers are cut out of the bytes, and only the chosen lines are parsed: inside a JSON text a
quotation mark is escaped, so `"reward":` is a key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from rl.records.run_files import Damage, sample_files, tokens_file
from rl.records.samples import LOGP_DIFF, TOKEN, largest_logp_diffs
from rl.records.schema import RawLine
from rl.views.report.read import ReportPart

KINDS = ("best", "worst", LOGP_DIFF, "longest", "cut off", "faulted", "random")
"""Reasons to show a completion, in the order of the page."""

_PARSED = 64 * 2**20  # bytes of samples up to which every line is parsed
_READ = 1024 * 2**20  # bytes of samples that are read; of more, evenly spread files or blocks
_BLOCKS = 64


class ChosenSample(TypedDict):
    """What choosing adds to a line: the reasons, and `largest_logp_diffs` if it is known. The other
    keys are those of the line as it was read."""

    why: list[str]
    gap: NotRequired[float]


@dataclass
class Chosen:
    """records: the chosen completions, the newest first.

    total: completions of which they were chosen; partial: whether there were too many to look at
    all.
    """

    records: list[ChosenSample] = field(default_factory=list)
    total: int = 0
    partial: bool = False


@dataclass
class _Index:
    """Numbers of every completion, one entry each; a reward is NaN where there is none."""

    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    line: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    faulted: list[bool] = field(default_factory=list)
    at: list[int] = field(default_factory=list)


def choose(
    directory: Path, count: int, part: ReportPart, damage: list[Damage], seed: int = 0
) -> Chosen:
    """Chooses at most `count` completions of a run. Equal files give equal choices.

    Appends damaged lines to `damage`.
    """
    files = sample_files(directory)
    sizes = [file.stat().st_size for file in files]
    if count <= 0 or not sum(sizes):
        return Chosen()
    index = _Index()
    extract = _parsed if sum(sizes) <= _PARSED else _cut_out
    blocks = _blocks(sizes)
    for block in blocks:
        _scan(index, files[block.file], block, extract, part, damage)
    partial = sum(block.last - block.first for block in blocks) < sum(sizes)
    result = Chosen(total=len(index.file), partial=partial)
    logp_diffs = _logp_diffs(index, files)
    chosen = pick(index.reward, index.length, index.cut, index.faulted, logp_diffs, count, seed)
    for row, why in sorted(chosen.items(), reverse=True):
        with files[index.file[row]].open("rb") as file:
            file.seek(index.offset[row])
            line = file.read(index.size[row])
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            damage.append(Damage(files[index.file[row]], index.line[row], "damaged line"))
            continue
        record |= {"why": [kind for kind in KINDS if kind in why]}
        if math.isfinite(logp_diffs[row]):
            record[LOGP_DIFF] = float(logp_diffs[row])
        result.records.append(record)
    return result


def pick(
    reward: Sequence[float],
    length: Sequence[int],
    cut: Sequence[bool],
    faulted: Sequence[bool],
    logp_diff: np.ndarray,
    count: int,
    seed: int = 0,
) -> dict[int, set[str]]:
    """Returns the chosen rows, each with its reasons. Each kind has an equal share of `count`,
    random ones the rest.

    Equal values are in an order drawn from `seed`. A completion is chosen once, for all the reasons
    it has.
    """
    total = len(reward)
    rewards = np.asarray(reward, float)
    lengths = np.asarray(length, float)
    order = np.random.default_rng(seed).permutation(total)
    ranked = {
        "best": _top(rewards, order),
        "worst": _top(-rewards, order),
        LOGP_DIFF: _top(np.where(logp_diff > 0, logp_diff, np.nan), order),
        "longest": _top(lengths, order),
        "cut off": order[np.asarray(cut, bool)[order]],
        "faulted": order[np.asarray(faulted, bool)[order]],
    }
    quota = max(1, count // len(KINDS))
    result: dict[int, set[str]] = {}
    for kind in sorted(ranked, key=lambda each: KINDS.index(each) if each != "faulted" else -1):
        fresh = quota
        for row in ranked[kind].tolist():
            if row in result:
                result[row].add(kind)
            elif len(result) < count:
                result[row] = {kind}
            else:
                break
            fresh -= 1
            if not fresh:
                break
    for row in order.tolist():
        if len(result) >= min(count, total):
            break
        if row not in result:
            result[row] = {"random"}
    return result


def _top(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the rows with a value, largest first, equal ones in `order`."""
    known = order[np.isfinite(values[order])]
    return known[np.argsort(-values[known], kind="stable")]


@dataclass(frozen=True)
class _Block:
    """A part of a file that is read. file: its number; first, last: first byte, and the one behind
    the block."""

    file: int
    first: int
    last: int


def _blocks(sizes: Sequence[int]) -> list[_Block]:
    """Returns the parts that are read: all, or blocks spread evenly over the files."""
    if sum(sizes) <= _READ:
        return [_Block(number, 0, size) for number, size in enumerate(sizes)]
    bounds = np.r_[0, np.cumsum(sizes)]
    block = _READ // _BLOCKS
    result = []
    for start in np.linspace(0, bounds[-1] - block, _BLOCKS).astype(np.int64).tolist():
        number = int(np.searchsorted(bounds, start, side="right")) - 1
        first = start - int(bounds[number])
        result.append(_Block(number, first, min(first + block, sizes[number])))
    return result


def _scan(
    index: _Index,
    path: Path,
    block: _Block,
    extract: Callable[[bytes], SampleNumbers | None],
    part: ReportPart,
    damage: list[Damage],
) -> None:
    every = part == ReportPart()
    with path.open("rb") as file:
        file.seek(block.first)
        if block.first:
            file.readline()  # the end of a line that begins before
        offset = file.tell()
        for line_number, line in enumerate(file, 1):
            start = offset
            offset = offset + len(line)
            if start >= block.last:
                return
            if not line.endswith(b"\n"):
                return  # torn: a process is writing it, or was killed while it did
            sample = extract(line)
            if sample is None:
                if line.strip():
                    where = line_number if not block.first else 0
                    damage.append(
                        Damage(path, where, "damaged line; delete it, or restore it from a backup")
                    )
                continue
            if not every and not part.holds(sample.stage, sample.step):
                continue
            index.file.append(block.file)
            index.offset.append(start)
            index.size.append(len(line))
            index.line.append(line_number)
            index.reward.append(sample.reward)
            index.length.append(sample.length)
            index.cut.append(sample.cut)
            index.faulted.append(sample.faulted)
            index.at.append(sample.at)


class SampleNumbers(NamedTuple):
    """What the report reads of a line of samples.jsonl.

    reward: NaN without a score. length: tokens of the completion. cut: whether it ended at the
    limit of tokens. faulted: whether a reward function failed on it. at: its place in the .bin
    file, -1 without one.
    """

    stage: str
    step: int
    reward: float
    length: int
    cut: bool
    faulted: bool
    at: int


def _parsed(line: bytes) -> SampleNumbers | None:
    """Parses a line; None: it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("stage"), str)
        or not isinstance(row.get("step"), int)
    ):
        return None
    reward = row.get("reward")
    faults = row.get("faults")
    at = row.get("at")
    scored = isinstance(reward, (int, float))
    return SampleNumbers(
        stage=row["stage"],
        step=row["step"],
        reward=float(reward) if scored else math.nan,
        length=sample_length(row),
        cut=row.get("finish") == "length",
        faulted=bool(faults) or ("reward" in row and not scored),
        at=at if isinstance(at, int) else -1,
    )


def sample_length(row: RawLine) -> int:
    """Returns the tokens of a completion: their recorded number, or the length of their list."""
    count = row.get("n")
    tokens = row.get("tokens")
    if isinstance(count, int):
        return count
    return len(tokens) if isinstance(tokens, list) else len(str(row.get("completion") or ""))


def _cut_out(line: bytes) -> SampleNumbers | None:
    """Returns what `_parsed` does, without parsing the line."""
    if not line.startswith(b"{") or not line.endswith((b"}\n", b"}\r\n")):
        return None
    tokens = line.find(b'"tokens":')
    behind = (
        line.find(b"]", tokens) if tokens >= 0 else 0
    )  # the numbers of a completion follow its token ids
    try:
        stage = _value(line, line.find(b'"stage":'))
        step = int(_value(line, line.find(b'"step":')))
        value = _value(line, _last(line, b'"reward":', behind))
        reward = math.nan if value in (b"", b"null") else float(value)
        if tokens >= 0:
            length = line.count(b",", tokens, behind) + (line[tokens + 9 : behind].strip() != b"[")
        else:
            length = int(_value(line, line.rfind(b'"n":')) or len(line))
        at = int(_value(line, line.rfind(b'"at":', behind)) or -1)
    except ValueError:
        return None
    faults = line.rfind(b'"faults":', behind)
    faulted = faults >= 0 and line[faults + 9 : faults + 24].lstrip()[:2] not in (b"{}", b"nu")
    cut = _value(line, _last(line, b'"finish":', behind)) == b'"length"'
    return SampleNumbers(
        stage=stage.strip(b'"').decode(errors="replace"),
        step=step,
        reward=reward,
        length=length,
        cut=cut,
        faulted=faulted or value == b"null",
        at=at,
    )


def _last(line: bytes, key: bytes, behind: int) -> int:
    """Returns the place of the last key after `behind`, or else in the line; -1 without one."""
    place = line.rfind(key, behind)
    return place if place >= 0 else line.rfind(key)


def _value(line: bytes, start: int) -> bytes:
    """Returns the bytes of the short value of the key at `start`; b"" if it is -1."""
    if start < 0:
        return b""
    start = line.find(b":", start) + 1
    end = line.find(b",", start, start + 120)
    if end < 0:
        end = min(len(line), start + 120)
    return line[start:end].rstrip(b"}\r\n").strip()


def _logp_diffs(index: _Index, files: Sequence[Path]) -> np.ndarray:
    """Returns `largest_logp_diffs` of each completion, from the .bin files; NaN where it is
    unknown."""
    result = np.full(len(index.file), np.nan)
    of_file = np.asarray(index.file, np.int64)
    at = np.asarray(index.at, np.int64)
    for number, file in enumerate(files):
        binary = tokens_file(file)
        rows = np.flatnonzero((of_file == number) & (at >= 0))
        if not len(rows) or not binary.is_file() or binary.stat().st_size < TOKEN.itemsize:
            continue
        tokens = np.memmap(binary, TOKEN, "r", shape=(binary.stat().st_size // TOKEN.itemsize,))
        rows = rows[at[rows] < len(tokens)]
        rows = rows[np.argsort(at[rows], kind="stable")]
        starts, first = np.unique(at[rows], return_index=True)
        result[rows[first]] = largest_logp_diffs(tokens, starts)
    return result
