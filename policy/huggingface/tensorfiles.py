"""Reads slices of the tensors in a directory of safetensors files, by name.

The files are mapped, so that a slice is a view and only the pages under it are read. The numpy API
of safetensors copies slices and has no 8-bit floats, so it only checks the files here; their format
is a length, a JSON header and the bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf.tensors import GgufTensor, tensors_of
from policy.huggingface.quantized import QuantizationError, Quantized, Scheme

# A file of a save in several files.
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_LFS = b"version https://git-lfs.github.com/spec/"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
INTEGERS = {"I32": np.int32, "I64": np.int64}
CODES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": np.uint8}
# Dtypes of tensors that are only copied.
OTHERS = {"F8_E5M2": ml_dtypes.float8_e5m2, "BOOL": np.bool_, "I8": np.int8, "I16": np.int16}
OTHERS |= {"U16": np.uint16, "U32": np.uint32, "U64": np.uint64}


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header of `file` describes it; `name` is its name there. gguf: of a GGUF file,
    what reads it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    gguf: GgufTensor | None = None


class TensorFiles:
    """The tensors of `directory`, under the names that `rename` returns.

    The files are model.safetensors, else the files that the index lists, else those of one save,
    without the adapter of PEFT that may lie with them, else one GGUF file; and `extra_files`.
    `only`: the one file to read instead. `unread` holds the names of the tensors that were not read
    yet. Raises ModelFileError for files that are missing, damaged or of several saves.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        rename: Callable[[str], str] = str,
        scheme: Scheme | None = None,
        extra_files: Sequence[str] = (),
        only: str | None = None,
    ):
        self.directory = Path(directory)
        self._only = only
        self._scheme = scheme
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.memmap] = {}
        file_of = self._files_by_index()
        for path in dict.fromkeys(
            [*self._paths(file_of), *(self.directory / name for name in extra_files)]
        ):
            for entry in _header(path):
                if file_of.get(entry.name, path.name) != path.name:
                    continue  # the index takes it from another file
                name = rename(entry.name)
                if other := self._entries.get(name):
                    raise ModelFileError(f"{self.directory}: {_twice(name, other, entry)}")
                self._entries[name] = entry
        self.unread = set(self._entries)

    def _files_by_index(self) -> dict[str, str]:
        """Returns the file of each tensor by the index; none if there is no index, or one file that
        holds all."""
        index = self.directory / INDEX
        if self._only or (self.directory / SINGLE).exists() or not index.exists():
            return {}
        refuse_lfs_pointer(index)
        try:
            file_of = json.loads(index.read_text())["weight_map"]
            return {str(name): os.fspath(file) for name, file in file_of.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{index}: not an index with a weight_map: {error}") from None

    def _paths(self, file_of: dict[str, str]) -> list[Path]:
        if self._only is not None:
            return [self.directory / self._only]
        if (single := self.directory / SINGLE).exists():
            return [single]
        if file_of:
            return [self.directory / name for name in sorted(set(file_of.values()))]
        files = sorted(self.directory.glob("*.safetensors"))
        paths = [file for file in files if file.name != ADAPTER]
        if not paths:
            files = sorted(self.directory.glob("*.gguf"))
            if len(files) == 1:
                return files
            raise ModelFileError(
                f"{self.directory}: no *.safetensors file{_other_weights(self.directory)}"
            )
        _refuse_several_saves(self.directory, [path.name for path in paths])
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._entries or (
            self._scheme is not None and name + self._scheme.values in self._entries
        )

    def own_name(self, name: str) -> str:
        """Returns the name of the tensor in its file; `name` if no file has it."""
        if name in self._entries:
            return self._entries[name].name
        values = self._scheme.values if self._scheme else ""
        return self._entries[name + values].name.removesuffix(values) if name in self else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the tensor as it is stored; None if no tensor has exactly this
        name."""
        return self._entries[name].shape if name in self._entries else None

    def empty(self, name: str) -> bool:
        """Returns whether the tensor has no elements."""
        return 0 in self._entries[name].shape

    def read(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], integers: bool = False
    ) -> np.ndarray:
        """Reads `index` of the tensor, which must have this shape: a view of the file, or new
        numbers if it is quantised. Raises ModelFileError as `checked`."""
        return self.checked(name, shape, integers)[index]

    def checked(
        self, name: str, shape: tuple[int, ...], integers: bool = False
    ) -> Quantized | GgufTensor | np.ndarray:
        """Returns a tensor that must have this shape; its numbers are not read yet. `integers`: it
        holds integers instead of floats. Raises ModelFileError if it is missing or different."""
        if name not in self:
            tied = "; if the embedding is the head, set tie_word_embeddings: true in config.json"
            hint = tied if name.endswith("head.weight") else ""
            raise ModelFileError(
                f"{self.directory}: missing tensor {name}, expected with shape {list(shape)}{hint}"
            )
        if (tensor := self._quantized(name)) is None:
            entry = self._entries[name]
            if entry.dtype not in (INTEGERS if integers else FLOATS):
                floats = "neither a float nor quantised as a supported quantization_config says"
                problem = "not integers" if integers else floats
                raise ModelFileError(
                    f"{entry.file}: tensor {self.own_name(name)} is {entry.dtype}: {problem}"
                )
            tensor = self._view(name)
        assert tensor is not None  # `name` is in the files, in a known dtype
        if tuple(tensor.shape) != tuple(shape):
            raise ModelFileError(
                f"{self._file(name)}: tensor {self.own_name(name)} has shape "
                f"{list(tensor.shape)}, expected {list(shape)} by config.json"
            )
        return tensor

    def _file(self, name: str) -> Path:
        """Returns the file of a tensor that is there."""
        values = self._scheme.values if self._scheme else ""
        return self._entries[name if name in self._entries else name + values].file

    def tensor(self, name: str) -> Quantized | GgufTensor | np.ndarray:
        """Returns a tensor of the files, whose numbers are not read yet. Raises ModelFileError for
        quantised numbers without scales and an unknown dtype."""
        tensor = self._quantized(name)
        tensor = self._view(name) if tensor is None else tensor
        if tensor is None:
            raise ModelFileError(
                f"{self.directory}: tensor {self.own_name(name)} is {self._entries[name].dtype}"
            )
        return tensor

    def _quantized(self, name: str) -> Quantized | GgufTensor | None:
        """Returns the tensor if it is quantised, or in a GGUF file, else None."""
        if name in self._entries and (tensor := self._entries[name].gguf) is not None:
            self.unread.discard(name)
            return tensor
        try:
            return self._scheme.find(name, self._view) if self._scheme else None
        except QuantizationError as error:
            raise ModelFileError(f"{self.directory}: {error}") from None

    def _view(self, name: str) -> np.ndarray | None:
        """Maps the full tensor; None if there is none of a known dtype."""
        if (entry := self._entries.get(name)) is None:
            return None
        dtype = (FLOATS | INTEGERS | CODES | OTHERS).get(entry.dtype)
        if dtype is None:
            return None
        self.unread.discard(name)
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "r")
        # A plain array, since slices of a memmap cost ten times as much, which adds up for
        # thousands of experts.
        return (
            np.asarray(self._maps[entry.file])[entry.start : entry.stop]
            .view(dtype)
            .reshape(entry.shape)
        )


def refuse_lfs_pointer(path: Path) -> None:
    """Raises ModelFileError for the text that stands for a file in a clone made without git-lfs."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ModelFileError(
                f"{path}: a pointer of git-lfs, not the file itself; run `git lfs pull` in the "
                "clone, or download the file"
            )


def _other_weights(directory: Path) -> str:
    """Returns what to say of weights in another format, as the end of a sentence."""
    if pickled := sorted(
        name for end in ("*.bin", "*.pt", "*.pth") for name in directory.glob(end)
    ):
        convert = (
            "from transformers import AutoModelForCausalLM as M; "
            "M.from_pretrained('IN').save_pretrained('OUT')"
        )
        return (
            f"; {pickled[0].name} is a pickle, which Duet never reads, since it may run code. If "
            "you trust it, convert "
            f'it: python -c "{convert}"'
        )
    if files := sorted(directory.glob("*.gguf")):
        return f"; there are {len(files)} GGUF files: name one of them, {files[0]}"
    return ""


def _refuse_several_saves(directory: Path, names: list[str]) -> None:
    """Raises ModelFileError unless these files, of which there is no index, are one file or all of
    one save."""
    parts = [_SHARD.fullmatch(name) for name in names]
    saves = {
        (part[1], part[3]) if part else (name, None)
        for name, part in zip(names, parts, strict=True)
    }
    if len(saves) > 1:
        raise ModelFileError(
            f"{directory}: files of {len(saves)} saves and no {INDEX}: {', '.join(names[:4])}"
            f"{' ...' * (len(names) > 4)}; keep the files of one save"
        )
    if (part := parts[0]) and len(names) != int(part[3]):
        raise ModelFileError(
            f"{directory}: {len(names)} of {int(part[3])} files "
            f"{part[1]}-*-of-{part[3]}.safetensors"
        )


def _twice(name: str, first: _Entry, second: _Entry) -> str:
    if first.name == second.name:
        return f"tensor {first.name} is in {first.file.name} and in {second.file.name}"
    return f"tensors {first.name} and {second.name} are both {name}"


def _header(path: Path) -> list[_Entry]:
    """Reads the header of a file, after safetensors has checked it."""
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".gguf":
        return [
            _Entry(name, path, "GGUF", tensor.shape, 0, 0, tensor)
            for name, tensor in tensors_of(path).items()
        ]
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file, but {INDEX} lists it") from None
    except SafetensorError as error:
        refuse_lfs_pointer(path)
        raise ModelFileError(f"{path}: not a complete safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return [
        _Entry(
            name,
            path,
            info["dtype"],
            tuple(info["shape"]),
            *(8 + length + offset for offset in info["data_offsets"]),
        )
        for name, info in header.items()
    ]
