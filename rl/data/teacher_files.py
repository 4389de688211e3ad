"""Files with a teacher's likeliest tokens, which `rl teach` writes and a stage of `distill` reads.
Imports no jax.

A directory holds teacher.json and part-00000.safetensors, part-00001.safetensors, ... Rows have the
order of the dataset, so neither packing nor shuffling moves them. A part of r rows with n tokens, m
of which are trained on, holds

    tokens int32[n]           the ids of the rows, one after the other
    mask uint8[n]             1 where a token is trained on
    starts int64[r + 1]       row i is starts[i] .. starts[i + 1]
    scored int64[r + 1]       the same for the m tokens that are trained on
    top_ids uint32[m, K]      the K likeliest tokens, likeliest first
    top_logp float[m, K]      their log-probabilities
    rest float[m]             the logarithm of the probability of all other tokens
    row_sha256 uint8[r, 32]   hashes of the tokens and the mask of each row
    top_sha256 uint8[r, 32]   hashes of the numbers of each row

Log-probabilities are at temperature 1 over `vocab` tokens. teacher.json appears when all parts are
there; until then partial.json says what they are made from, and a second `rl teach` goes on after
the last part.

N rows, T tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl.data.encoded import Row
from rl.errors import ConfigError, DataError
from rollout.text.interface import Tokenizer

FORMAT = 1
_FIELDS = ("teacher_ids", "teacher_top", "teacher_rest")
DONE = "teacher.json"
PARTIAL = "partial.json"
LEAST_REST = float(np.log(2.0**-23))
"""Least logarithm of the probability of the other tokens: float32 sums of probabilities are known
to this step."""


@dataclass(frozen=True)
class TeacherFacts:
    """What the files are made from and how.

    model_sha256: of config.json and weights. vocabulary_sha256: of the tokenizer's entries. stops:
    ids that end a completion. k: tokens in each place. vocab: tokens of the distribution. dtype: of
    the log-probabilities.
    """

    source: str
    model_sha256: str
    vocabulary_sha256: str
    stops: list[int]
    k: int
    vocab: int
    dtype: str
    rows: int
    rows_per_part: int
    format: int = FORMAT


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Returns a hash of the entries of a tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def model_sha256(directory: Path) -> str:
    """Returns a hash of config.json and of the contents of all weights in a model directory."""
    digest = hashlib.sha256()
    for file in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(file.name.encode() + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while piece := opened.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


def row_sha256(row: Row) -> np.ndarray:
    """Returns the hash of the tokens and the mask of a row, uint8[32]."""
    return _hash(np.asarray(row[0], np.int32), np.asarray(row[1], np.uint8))


def _hash(*arrays: np.ndarray) -> np.ndarray:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


class TeacherWriter:
    """Writes a directory of teacher files part by part. A part appears in one step, so a kill
    leaves only full parts."""

    def __init__(self, directory: Path, facts: TeacherFacts):
        """Raises ConfigError if the directory holds other files of a teacher, or is finished."""
        self._directory = directory
        self.facts = facts
        if (directory / DONE).exists():
            raise ConfigError(
                f"--output {directory} holds the finished files of a teacher; choose another "
                "directory"
            )
        partial = directory / PARTIAL
        text = json.dumps(asdict(facts), indent=1)
        if partial.exists() and partial.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--output {directory} was begun with another teacher, data or options "
                f"({partial}); choose another directory, or remove it to start over"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {directory}: {error}") from None
        _replace(partial, text.encode())

    def missing(self, rows: Sequence[Row]) -> Iterator[tuple[int, Sequence[Row]]]:
        """Yields (number, rows) of each part that is not there. Raises ConfigError for a part of
        other rows."""
        step = self.facts.rows_per_part
        for number in range(-(-len(rows) // step)):
            own = rows[number * step : (number + 1) * step]
            file = self._file(number)
            if not file.exists():
                yield number, own
                continue
            with _opened(file) as part:
                same = np.array_equal(
                    part.get_tensor("row_sha256"), [row_sha256(row) for row in own]
                )
            if not same:
                raise ConfigError(
                    f"{file} holds other rows than the data of this run; remove it, or choose "
                    "another --output"
                )

    def write(
        self,
        number: int,
        rows: Sequence[Row],
        logp: Iterable[np.ndarray],
        ids: Iterable[np.ndarray],
        rest: Iterable[np.ndarray],
    ) -> None:
        """Writes a part. logp, ids: [m, K] and rest: [m] of the tokens of each row that are trained
        on."""
        dtype = np.dtype(self.facts.dtype)
        stored = [
            (np.asarray(i, np.uint32), np.asarray(a, dtype), np.asarray(r, dtype))
            for i, a, r in zip(ids, logp, rest, strict=True)
        ]
        top_ids, top_logp, rests = (np.concatenate(arrays) for arrays in zip(*stored, strict=True))
        part = {
            "tokens": np.concatenate([np.asarray(row[0], np.int32) for row in rows]),
            "mask": np.concatenate([np.asarray(row[1], np.uint8) for row in rows]),
            "starts": _ends([len(row[0]) for row in rows]),
            "scored": _ends([len(each) for each, _, _ in stored]),
            "top_ids": top_ids,
            "top_logp": top_logp,
            "rest": rests,
            "row_sha256": np.stack([row_sha256(row) for row in rows]),
            "top_sha256": np.stack([_hash(*arrays) for arrays in stored]),
        }
        file = self._file(number)
        temporary = file.with_suffix(".tmp")
        save_file(part, temporary)
        _synced(temporary)
        temporary.replace(file)

    def finish(self) -> None:
        """Writes teacher.json, once all parts are there."""
        files = [self._file(n) for n in range(-(-self.facts.rows // self.facts.rows_per_part))]
        listed = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        _replace(
            self._directory / DONE,
            json.dumps(asdict(self.facts) | {"parts": listed}, indent=1).encode(),
        )
        (self._directory / PARTIAL).unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"part-{number:05d}.safetensors"


class StoredTokens(NamedTuple):
    """The likeliest tokens at m places of a row.

    ids: int32[m, k]. logp: float32[m, k], their log-probabilities. rest: float32[m], the logarithm
    of the probability of all others.
    """

    ids: np.ndarray
    logp: np.ndarray
    rest: np.ndarray


class TeacherFiles:
    """Reads a directory of teacher files."""

    def __init__(self, directory: str | Path):
        """Reads teacher.json. Raises ConfigError if the directory holds none, or one of another
        version."""
        self.directory = Path(directory)
        file = self.directory / DONE
        if not file.is_file():
            begun = (self.directory / PARTIAL).is_file()
            advice = (
                "its `rl teach` did not end: run the same command again"
                if begun
                else "`rl teach` writes one"
            )
            raise ConfigError(f"teacher.files: {directory} holds no {DONE}; {advice}")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            names = {field: stored[field] for field in TeacherFacts.__dataclass_fields__}
            self._parts = list(stored["parts"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{file}: damaged, or of another version of Duet; run `rl teach` again"
            ) from None
        self.facts = TeacherFacts(**names)
        if self.facts.format != FORMAT:
            raise ConfigError(
                f"{file}: format {self.facts.format}, this version reads {FORMAT}; run `rl teach` "
                "again"
            )

    def check_rows(self, rows: Mapping[int, Row], total: int) -> None:
        """Raises DataError for rows that the files do not hold under these numbers, with the same
        tokens and mask.

        rows: number in the dataset -> row, of this process. total: rows of the dataset.
        """
        if total > self.facts.rows:
            raise DataError(
                f"the data has {total} rows, {self.directory} holds {self.facts.rows}; run `rl "
                "teach` with this data"
            )
        hashes = [self._part(number).get_tensor("row_sha256") for number in range(len(self._parts))]
        for number, row in rows.items():
            part, place = divmod(number, self.facts.rows_per_part)
            if not np.array_equal(hashes[part][place], row_sha256(row)):
                raise DataError(
                    f"row {number} of the data has other tokens, or other tokens that are trained "
                    f"on, than row {number} of {self.directory}: tokenizer, template, order of "
                    "the data or train_on are not those of `rl teach`; run it again with this "
                    "configuration"
                )

    def take(self, number: int, k: int) -> StoredTokens:
        """Returns the k likeliest tokens of a row.

        Of more than k stored tokens, the least likely ones go to the rest. Raises DataError for a
        damaged row.
        """
        index, place = divmod(number, self.facts.rows_per_part)
        part = self._part(index)
        start, end = (int(n) for n in part.get_slice("scored")[place : place + 2])
        arrays = [part.get_slice(name)[start:end] for name in ("top_ids", "top_logp", "rest")]
        if not np.array_equal(_hash(*arrays), part.get_slice("top_sha256")[place]):
            raise DataError(
                f"{self.directory / self._parts[index]}: row {number} is damaged; run `rl teach` "
                "again"
            )
        ids = arrays[0].astype(np.int32)
        logp = arrays[1].astype(np.float32)
        rest = arrays[2].astype(np.float32)
        others = np.logaddexp.reduce(np.concatenate([logp[:, k:], rest[:, None]], axis=1), axis=1)
        rest = np.maximum(others, LEAST_REST).astype(np.float32)
        return StoredTokens(ids[:, :k], logp[:, :k], rest)

    def arrays(
        self, numbers: Sequence[int], mask_NT: np.ndarray, top_k: int | None
    ) -> dict[str, np.ndarray]:
        """Returns the fields `teacher_*` of a batch, by name: at each token of the mask the numbers
        of its place, else 0.

        numbers: of the rows of the batch. top_k: tokens in each place; None: all that are stored.
        """
        k = top_k or self.facts.k
        N, T = mask_NT.shape
        ids_NTk = np.zeros((N, T, k), np.int32)
        logp_NTk = np.zeros((N, T, k), np.float32)
        rest_NT = np.zeros((N, T), np.float32)
        out = (ids_NTk, logp_NTk, rest_NT)
        for row, number in enumerate(numbers):
            columns = np.flatnonzero(mask_NT[row])
            for array, values in zip(out, self.take(number, k), strict=True):
                array[row, columns] = values
        return dict(zip(_FIELDS, out, strict=True))

    def shapes(self, shape: tuple[int, int], top_k: int | None) -> dict[str, Any]:
        """Returns the fields `teacher_*` of a batch of this shape as shapes, for a plan."""
        import jax

        full = (*shape, top_k or self.facts.k)
        kinds = (full, np.int32), (full, np.float32), (shape, np.float32)
        return {
            name: jax.ShapeDtypeStruct(*kind) for name, kind in zip(_FIELDS, kinds, strict=True)
        }

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the files live as long as the stage
    def _part(self, index: int) -> Any:
        return _opened(self.directory / self._parts[index])


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file}: {error}; run `rl teach` again") from None


def _ends(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _replace(file: Path, content: bytes) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(content)
    _synced(temporary)
    temporary.replace(file)


def _synced(file: Path) -> None:
    """Brings a file to the disk, so that its new name never stands for less of it."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
