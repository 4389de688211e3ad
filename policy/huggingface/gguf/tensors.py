"""The tensors of a GGUF file under the names of Hugging Face files, dequantised slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf import rope
from policy.huggingface.gguf.architectures import (
    Architecture,
    heads_of,
    is_norm,
    of_file,
    permuted_rows,
)
from policy.huggingface.gguf.metadata import configuration
from policy.huggingface.gguf.names import GgufName, NameMap
from policy.huggingface.gguf.package import gguf

# Tensors that the configuration says.
_DERIVED = (rope.TENSOR,)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was opened. fields: its metadata by key. tensors: by name, as the package
    gguf has them."""

    path: Path
    architecture: Architecture
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, Any]:
        """Returns the metadata of the architecture, by key after "ARCHITECTURE."."""
        prefix = f"{self.architecture.name}."
        return {
            key.removeprefix(prefix): field.contents()
            for key, field in self.fields.items()
            if key.startswith(prefix)
        }

    def configuration(self) -> dict[str, Any]:
        """Returns the keys of config.json that the file says. Raises ModelFileError."""
        try:
            hf = configuration(self.architecture, self.numbers, self.tensors.keys())
            hf.setdefault("vocab_size", int(self.tensors["token_embd.weight"].shape[1]))
            if rope.TENSOR in self.tensors:
                stored = np.asarray(self.tensors[rope.TENSOR].data, np.float32)
                scaled = rope.scaling(stored, hf["rope_theta"], hf["head_dim"])
                hf |= {} if scaled is None else {"rope_scaling": scaled}
        except KeyError as error:
            raise ModelFileError(f"{self.path}: the metadata lacks {error}") from None
        except ModelFileError as error:
            raise ModelFileError(f"{self.path}: {error}") from None
        return hf


class GgufTensor:
    """A tensor of a GGUF file in the form of Hugging Face files. Indexing dequantises the rows that
    are read."""

    def __init__(self, file: GgufFile, name: GgufName, rows: np.ndarray | None):
        tensor = file.tensors[name.tensor]
        self._type = tensor.tensor_type
        self._data = tensor.data if name.expert is None else tensor.data[name.expert]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        self.shape = shape if name.expert is None else shape[1:]
        self._rows = rows
        self._offset = file.architecture.offset if is_norm(name.tensor) else 0.0
        if name.tensor.endswith("ffn_gate_inp_shexp.weight") and len(self.shape) == 1:
            self.shape = (1, *self.shape)
            self._data = self._data[None]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *rest = index
        if len(self.shape) == 1:
            data = self._floats(self._data)
            return (data if self._rows is None else data[self._rows])[first]
        chosen = self._data[first] if self._rows is None else self._data[self._rows[first]]
        return self._floats(chosen)[(slice(None), *rest)]

    def _floats(self, data: np.ndarray) -> np.ndarray:
        package = gguf("a GGUF file")
        numbers = package.dequantize(np.ascontiguousarray(data), self._type)
        return numbers - np.float32(self._offset) if self._offset else numbers


def opened(path: Path) -> GgufFile:
    """Opens a GGUF file. Raises ModelFileError for a damaged file and for an architecture that Duet
    does not read."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    return _opened(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)  # the vocabulary takes seconds
def _opened(path: Path, size: int, time: int) -> GgufFile:
    package = gguf(str(path))
    try:
        reader = package.GGUFReader(path)
        name = reader.fields["general.architecture"].contents()
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path}: not a complete GGUF file: {error}") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GgufFile(path, of_file(name, path), reader.fields, tensors)


def tensors_of(path: Path) -> dict[str, GgufTensor]:
    """Returns the tensors of a file by the names of Hugging Face files. Raises ModelFileError."""
    file = opened(path)
    hf = file.configuration()
    names = NameMap(file.architecture, hf["num_hidden_layers"])
    stored = names.stored_names(int(hf.get("num_experts") or 0))
    result = {}
    for name, place in stored.items():
        if place.tensor in file.tensors:
            heads = heads_of(file.architecture, place.tensor, hf)
            rows = None
            if heads is not None:
                count = int(file.tensors[place.tensor].shape[-1])
                rows = np.argsort(permuted_rows(count, heads))
            result[name] = GgufTensor(file, place, rows)
    read = {place.tensor for place in stored.values()}
    others = sorted(file.tensors.keys() - read - set(_DERIVED))
    if others:
        raise ModelFileError(
            f"{path}: {file.architecture.name} has no place for the tensor {others[0]}"
        )
    return result
