"""Reads slices of the tensors in a directory of safetensors files, by name.

The files are mapped, so that a slice is a view and only the pages under it are read. The numpy API of safetensors
copies slices and has no 8-bit floats, so it only checks the files here; their format is a length, a JSON header and the
bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from policy.huggingface.quantized import QuantizationError, Scheme

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
INTEGERS = {"I32": np.int32, "I64": np.int64}
CODES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": np.uint8}


class ModelFileError(ValueError):
    """Raised for a model directory that cannot be read; names the file or tensor that is missing, extra or wrong."""


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header of `file` describes it; `name` is its name there."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFiles:
    """The tensors of `directory`, under the names that `rename` returns.

    The files are model.safetensors, else the files that the index lists, else all; and `extra_files`. `unread` holds
    the names of the tensors that were not read yet. Raises ModelFileError for files that are missing or damaged.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        rename: Callable[[str], str] = str,
        scheme: Scheme | None = None,
        extra_files: Sequence[str] = (),
    ):
        self.directory = Path(directory)
        self._scheme = scheme
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.memmap] = {}
        for path in dict.fromkeys([*self._paths(), *(self.directory / name for name in extra_files)]):
            for entry in _header(path):
                name = rename(entry.name)
                if (other := self._entries.get(name)) and other.name != entry.name:
                    raise ModelFileError(f"{self.directory}: tensors {other.name} and {entry.name} are both {name}")
                self._entries[name] = entry
        self.unread = set(self._entries)

    def _paths(self) -> list[Path]:
        if (single := self.directory / SINGLE).exists():
            return [single]
        if (index := self.directory / INDEX).exists():
            try:
                return [
                    self.directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
                ]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelFileError(f"{index}: not an index with a weight_map: {error}") from None
        if paths := sorted(self.directory.glob("*.safetensors")):
            return paths
        raise ModelFileError(f"{self.directory}: no *.safetensors file")

    def __contains__(self, name: str) -> bool:
        return name in self._entries or (self._scheme is not None and name + self._scheme.values in self._entries)

    def own_name(self, name: str) -> str:
        """Returns the name of the tensor in its file."""
        return self._entries[name].name if name in self._entries else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the tensor as it is stored; None if no tensor has exactly this name."""
        return self._entries[name].shape if name in self._entries else None

    def empty(self, name: str) -> bool:
        """Returns whether the tensor has no elements."""
        return 0 in self._entries[name].shape

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], integers: bool = False) -> np.ndarray:
        """Reads `index` of the tensor, which must have this shape: a view of the file, or new numbers if it is
        quantised. `integers`: the tensor holds integers instead of floats. Raises ModelFileError if it is missing or
        different."""
        if name not in self:
            raise ModelFileError(f"{self.directory}: missing tensor {name}, expected with shape {list(shape)}")
        try:
            tensor = self._scheme and self._scheme.find(name, self._view)
        except QuantizationError as error:
            raise ModelFileError(f"{self.directory}: {error}") from None
        if tensor is None:
            if (dtype := self._entries[name].dtype) not in (INTEGERS if integers else FLOATS):
                floats = "neither a float nor quantised as a supported quantization_config says"
                problem = "not integers" if integers else floats
                raise ModelFileError(f"{self.directory}: tensor {self.own_name(name)} is {dtype}: {problem}")
            tensor = self._view(name)
        assert tensor is not None  # `name` is in the files, in a known dtype
        if tuple(tensor.shape) != tuple(shape):
            raise ModelFileError(
                f"{self.directory}: tensor {self.own_name(name)} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor[index]

    def _view(self, name: str) -> np.ndarray | None:
        """Maps the full tensor; None if there is none of a known dtype."""
        if (entry := self._entries.get(name)) is None:
            return None
        dtype = (FLOATS | INTEGERS | CODES).get(entry.dtype)
        if dtype is None:
            return None
        self.unread.discard(name)
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "r")
        # A plain array, since slices of a memmap cost ten times as much, which adds up for thousands of experts.
        return np.asarray(self._maps[entry.file])[entry.start : entry.stop].view(dtype).reshape(entry.shape)


def _header(path: Path) -> list[_Entry]:
    """Reads the header of a file, after safetensors has checked it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file, but {INDEX} lists it") from None
    except SafetensorError as error:
        raise ModelFileError(f"{path}: not a complete safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return [
        _Entry(
            name, path, info["dtype"], tuple(info["shape"]), *(8 + length + offset for offset in info["data_offsets"])
        )
        for name, info in header.items()
    ]
