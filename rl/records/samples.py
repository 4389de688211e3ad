"""Records completions: a JSON line each in samples.jsonl, and the numbers of their tokens in
tokens.bin.

Both files move to the folder samples/ once samples.jsonl has SEGMENT_BYTES:
`000003-grpo-01200.jsonl` and `.bin`, by number, stage and first step. So a run that continues reads
the newest file only. Columns of the data and texts of reward functions are kept in the line; `at`
is the index of its first token in the .bin file of the same name.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np

from rl.records.append_file import AppendFile
from rl.records.json_lines import complete_end, line, number_of_line, parse
from rl.records.run_files import SAMPLES, SEGMENTS, TOKENS, sample_files, tokens_file
from rl.records.schema import RecordedLine, SampleRecord

SEGMENT_BYTES = 64 * 2**20
LOGP_DIFF: Final = "gap"
"""What tokens.bin, filters of samples and their JSON call `logp_diff`, the trainer's
log-probability of a token minus the generator's. Files of earlier runs have this name."""
TOKEN = np.dtype(
    [
        ("id", "<u4"),
        # log-probability that the generator gave; NaN for a token that the policy did not write
        ("logp", "<f4"),
        # The difference of sampler/logp_diff_mean, under the same weights; NaN where no such
        # number was computed.
        (LOGP_DIFF, "<f2"),
        # of the distribution at the token under the weights of the update; NaN without an update
        ("entropy", "<f2"),
        ("advantage", "<f2"),  # NaN in an evaluation
        ("flags", "u1"),
        # 0: before the first turn of a segment; k: from the first token of the k-th turn of the
        # policy up to the next turn, so that the answer of an environment has the number of the
        # turn before it
        ("turn", "u1"),
    ]
)
"""One token of tokens.bin, little-endian."""
LAST_TURN = 255
"""The number of this turn and of all later ones."""
TRAINED = 1
STOP = 2
CLIPPED_LOW = 4
CLIPPED_HIGH = 8
DROPPED = 16
"""Flags of a token: in the mask of the loss; the stop of its turn; its gradient is cut off
because its ratio is too low or too high; the correction for the sampler's log-probability drops it.
"""


class SampleLog:
    """Appends completions to the files of a run's directory.

    limit: bytes of samples.jsonl from which `rotate` starts new files. max_bytes: largest total
    size of the segments; beyond it the oldest are deleted.
    """

    def __init__(
        self, directory: Path, limit: int = SEGMENT_BYTES, max_bytes: float = float("inf")
    ):
        """Opens the files, and completes a rotation that was cut off. Raises OSError."""
        self._directory = directory
        self._limit = limit
        self._max_bytes = max_bytes
        newest = max((directory / SEGMENTS).glob("*.bin"), default=None)
        cut_off = newest is not None and not newest.with_suffix(".jsonl").exists()
        if newest is not None and cut_off and not (directory / TOKENS).exists():
            os.replace(directory / SAMPLES, newest.with_suffix(".jsonl"))
        self._lines = AppendFile(directory / SAMPLES)
        self._tokens = AppendFile(directory / TOKENS)

    @property
    def waiting(self) -> int:
        """Bytes that wait in memory for room on the disk."""
        return self._lines.waiting + self._tokens.waiting

    def write(self, records: Sequence[SampleRecord], tokens: Sequence[np.ndarray]) -> None:
        """Writes one line per completion, with its place `at` in tokens.bin. tokens: TOKEN[n] of
        each. While tokens wait for room, lines do too: a reader finds the tokens of every line."""
        first = self._tokens.size // TOKEN.itemsize
        text = ""
        for record, own in zip(records, tokens, strict=True):
            text += line({**record, "at": first})
            first += len(own)
        self._tokens.append(b"".join(own.astype(TOKEN, copy=False).tobytes() for own in tokens))
        if self._tokens.waiting:
            self._lines.hold(text.encode())
        else:
            self._lines.append(text.encode())

    def truncate_after(self, keep: Callable[[RecordedLine], bool]) -> None:
        """Removes all lines after the last one that `keep` accepts, their tokens, and a torn last
        line.

        Reads the files from the end to the last line that `keep` accepts. Raises OSError, and
        ValueError for a damaged line on the way.
        """
        for path in reversed(sample_files(self._directory)):
            end, tokens = _kept_bytes(path, keep)
            if path.parent == self._directory:
                self._tokens.cut(tokens)
                self._lines.cut(end)
            elif end:
                if tokens_file(path).exists():
                    os.truncate(tokens_file(path), tokens)
                os.truncate(path, end)
            else:
                _remove(path)
            if end:
                return

    def rotate(self) -> None:
        """Moves full files to the folder of segments, and removes the oldest segments beyond
        `max_bytes`. Raises OSError.

        Call this after a checkpoint, so that a run that continues finds the cut in its newest
        files.
        """
        if self._lines.size < self._limit:
            return
        folder = self._directory / SEGMENTS
        folder.mkdir(exist_ok=True)
        segments = sample_files(self._directory)[:-1]
        number = int(segments[-1].name.partition("-")[0]) + 1 if segments else 0
        with (self._directory / SAMPLES).open("rb") as file:
            first = parse(file.readline(), f"{self._directory / SAMPLES}:1")
        name = folder / f"{number:06d}-{first['stage']}-{first['step']:05d}"
        os.replace(self._directory / TOKENS, name.with_suffix(".bin"))
        os.replace(self._directory / SAMPLES, name.with_suffix(".jsonl"))
        self._tokens.reopen()
        self._lines.reopen()
        self._remove_oldest()

    def sync(self) -> None:
        """Writes everything to the disk and waits for it. Raises OSError."""
        self._tokens.sync()
        self._lines.sync()

    def close(self) -> None:
        """Writes what waits in memory, if there is room."""
        self._tokens.close()
        self._lines.close()

    def _remove_oldest(self) -> None:
        segments = sample_files(self._directory)[:-1]
        sizes = [
            sum(each.stat().st_size for each in (path, tokens_file(path)) if each.exists())
            for path in segments
        ]
        while segments and sum(sizes) > self._max_bytes:
            sizes.pop(0)
            _remove(segments.pop(0))


def _remove(segment: Path) -> None:
    """Removes a segment, its tokens first: tokens without lines would look like a rotation that was
    cut off."""
    tokens_file(segment).unlink(missing_ok=True)
    segment.unlink()


def read(directory: str | Path) -> Iterator[SampleRecord]:
    """Yields the samples of a run, the oldest first, without a torn last line. Raises ValueError
    for a damaged line."""
    for path in sample_files(Path(directory)):
        with path.open("rb") as file:
            for number, each in enumerate(file, 1):
                if not each.endswith(b"\n"):
                    break
                yield cast(SampleRecord, parse(each, f"{path}:{number}"))


def read_tokens(path: Path, sample: SampleRecord) -> np.ndarray:
    """Returns TOKEN[n_prompt + n] of a sample in the file `path`; fewer or none if they were not
    recorded."""
    if "at" not in sample or not tokens_file(path).exists():
        return np.zeros(0, TOKEN)
    # numpy allocates what it is asked for before it reads, also beyond the end of the file.
    recorded = tokens_file(path).stat().st_size // TOKEN.itemsize - sample["at"]
    count = min(sample["n_prompt"] + sample["n"], recorded)
    if count <= 0:
        return np.zeros(0, TOKEN)
    start = sample["at"] * TOKEN.itemsize
    return np.fromfile(tokens_file(path), TOKEN, count, offset=start)


def largest_logp_diffs(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns float32[n]: the largest `logp_diff` of the tokens of each completion that are trained
    on, without the sign; NaN where none has one.

    tokens: TOKEN[N]. starts: int[n], ascending, where the completions begin; each extends to the
    start of the next one, the last one to the end.
    """
    if not len(starts):
        return np.zeros(0, np.float32)
    size = np.abs(tokens[LOGP_DIFF].astype(np.float32))
    size[(tokens["flags"] & TRAINED == 0) | ~np.isfinite(size)] = np.nan
    return np.fmax.reduceat(size, starts)


def _kept_bytes(path: Path, keep: Callable[[RecordedLine], bool]) -> tuple[int, int]:
    """Returns the bytes up to the last line that `keep` accepts, and the bytes of tokens up to the
    same completion."""
    if not path.stat().st_size:
        return 0, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = complete_end(data)
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            place = f"{path}:{number_of_line(data, start)}"
            row = cast(SampleRecord, parse(data[start:end], place))
            if keep(row):
                break
            end = start
        else:
            return 0, 0
    return end, (row["at"] + row["n_prompt"] + row["n"]) * TOKEN.itemsize if "at" in row else 0
