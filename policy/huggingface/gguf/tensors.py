"""The tensors of a GGUF file under the names of Hugging Face files, dequantised slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf import rope
from policy.huggingface.gguf.architectures import Architecture, of_file
from policy.huggingface.gguf.forms import Form, form_of
from policy.huggingface.gguf.metadata import configuration
from policy.huggingface.gguf.names import NameMap
from policy.huggingface.gguf.package import gguf

# Tensors that the configuration says.
_DERIVED = (rope.TENSOR, rope.LONG, rope.SHORT)


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
            key.removeprefix(prefix): _shortest(field.contents())
            for key, field in self.fields.items()
            if key.startswith(prefix)
        }

    def configuration(self) -> dict[str, Any]:
        """Returns the keys of config.json that the file says. Raises ModelFileError."""
        try:
            hf = configuration(self.architecture, self.numbers, self.tensors.keys())
            hf.setdefault("vocab_size", int(self.tensors["token_embd.weight"].shape[1]))
            scaled = rope.of_file(self.numbers, self.tensors, hf)
            hf |= {} if scaled is None else {"rope_scaling": scaled}
        except KeyError as error:
            raise ModelFileError(f"{self.path}: the metadata lacks {error}") from None
        except ModelFileError as error:
            raise ModelFileError(f"{self.path}: {error}") from None
        return hf


def _shortest(value: Any) -> Any:
    """Returns the shortest number that is the same float32, such as 1e-6; other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class GgufTensor:
    """A tensor of a GGUF file in the form of Hugging Face files. Indexing dequantises the rows that
    are read."""

    def __init__(self, tensor: Any, form: Form, expert: int | None):
        self._type = tensor.tensor_type
        self._data = tensor.data if expert is None else tensor.data[expert]
        stored = tuple(int(size) for size in reversed(tensor.shape))
        self._stored = stored if expert is None else stored[1:]
        self._form = form
        self._rows = None if form.rows is None else np.argsort(form.rows)
        self.shape = form.shape(self._stored)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if len(self._stored) == 1:
            numbers = self._floats(self._data)
            in_order = numbers if self._rows is None else numbers[self._rows]
            return self._form.read(in_order)[index]
        first, *rest = index
        if self._form.transposed:
            return self._floats(self._data[rest[0]]).T[first]
        chosen = self._data[first if self._rows is None else self._rows[first]]
        return self._form.read(self._floats(chosen))[(slice(None), *rest)]

    def _floats(self, data: np.ndarray) -> np.ndarray:
        package = gguf("a GGUF file")
        try:
            return package.dequantize(np.ascontiguousarray(data), self._type)
        except NotImplementedError:
            raise ModelFileError(
                f"a tensor of the type {self._type.name}, which the package gguf does not dequantise"
            ) from None


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
    experts = int(hf.get("num_experts") or hf.get("num_local_experts") or 0)
    stored = names.stored_names(experts, file.tensors.keys())
    result = {}
    for name, place in stored.items():
        tensor = file.tensors[place.tensor]
        form = form_of(file.architecture, place.tensor, hf, int(tensor.shape[-1]))
        result[name] = GgufTensor(tensor, form, place.expert)
    read = {place.tensor for place in stored.values()}
    others = sorted(file.tensors.keys() - read - set(_DERIVED) - set(_beyond(file, hf)))
    if others:
        raise ModelFileError(
            f"{path}: {file.architecture.name} has no place for the tensor {others[0]}"
        )
    return result


def _beyond(file: GgufFile, hf: Mapping[str, Any]) -> Iterator[str]:
    """Yields the tensors of the blocks after the last layer, which predict further tokens."""
    for number in range(hf["num_hidden_layers"], file.numbers["block_count"]):
        yield from (name for name in file.tensors if name.startswith(f"blk.{number}."))
