"""Writes a GGUF file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from policy import families
from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf import rope
from policy.huggingface.gguf.architectures import of_model_type
from policy.huggingface.gguf.forms import form_of
from policy.huggingface.gguf.metadata import metadata, rope_factors, with_defaults
from policy.huggingface.gguf.names import NameMap
from policy.huggingface.gguf.package import gguf
from policy.huggingface.gguf.vocabulary import Vocabulary
from policy.huggingface.model_directory import MTP, stored_tensors
from policy.model import Model

GgufType = Literal["f16", "q8_0"]
BLOCK = 32
"""Numbers of a row that share a scale in q8_0."""
# Routers, convolutions and learned positions, which llama.cpp has in float32.
_SMALL = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "position_embd")
_GATE_AND_UP = "ffn_gate_up_exps"
_LARGEST = 65504.0  # of float16


def write(path: Path, model: Model, kind: GgufType, vocabulary: Vocabulary, name: str) -> None:
    """Writes weights, configuration and tokenizer of a model to one file.

    kind: the type of matrices; norms, biases and routers are float32, and matrices whose rows
    cannot be cut into blocks of q8_0 are float16. name: what programs show. Raises ModelFileError
    for models that GGUF, or transformers' reader of it, does not know, and for weights that float16
    cannot hold.
    """
    config = model.config
    hf = families.text_model(json.loads(config.hf))
    architecture = of_model_type(hf["model_type"])
    numbers = metadata(config)
    package = gguf("--gguf")
    writer = package.GGUFWriter(path, architecture.name, use_temp_file=True)
    writer.add_type("model")
    writer.add_name(name)
    file_types = package.LlamaFileType
    writer.add_file_type(file_types.MOSTLY_F16 if kind == "f16" else file_types.MOSTLY_Q8_0)
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    for key, value in numbers.items():
        adds = {float: writer.add_float32, list: writer.add_array}
        adds.get(type(value), writer.add_uint32)(f"{architecture.name}.{key}", value)
    vocabulary.add_to(writer, config.vocab_size)
    for tensor, array in gguf_tensors(model):
        stored = _stored(package, tensor, array, kind)
        writer.add_tensor(tensor, stored.data, raw_dtype=stored.kind)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor(rope.TENSOR, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(model: Model) -> None:
    """Raises ModelFileError for a model that `write` does not write."""
    gguf("--gguf")
    metadata(model.config)


def rounded(name: str, array: np.ndarray, kind: GgufType) -> np.ndarray:
    """Returns what a file of this type holds of a tensor of GGUF, as float32."""
    package = gguf("--gguf")
    stored = _stored(package, name, array, kind)
    return package.dequantize(stored.data, stored.kind)


def gguf_tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file by name, in float32. Experts are one tensor [experts, O, I]."""
    hf = with_defaults(families.text_model(json.loads(model.config.hf)))
    architecture = of_model_type(hf["model_type"])
    numbers = metadata(model.config)
    names = NameMap(architecture, numbers["block_count"])
    count = numbers.get("expert_count", 0)
    experts: dict[str, list[np.ndarray]] = defaultdict(list)
    graph = model.graph
    text = {path: array for path, array in model.params.items() if not path.startswith(MTP)}
    for name, array in stored_tensors(graph, text):
        place = names.of(name)
        if place is None:
            raise ModelFileError(f"GGUF of {architecture.name} has no name for the tensor {name}")
        floats = np.asarray(array, np.float32)
        if place.expert is not None:
            together = experts[place.tensor]
            together.append(floats)
            if len(together) < count:
                continue
            floats = np.stack(experts.pop(place.tensor))
        for tensor, part in _apart(place.tensor, floats):
            yield tensor, form_of(architecture, tensor, hf, len(part)).stored(part)


def _apart(tensor: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of GGUF for one whose numbers may be those of two: the gates and the
    products of experts."""
    if _GATE_AND_UP not in tensor:
        yield tensor, array
        return
    for name, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
        yield tensor.replace(_GATE_AND_UP, f"ffn_{name}_exps"), half


@dataclass(frozen=True)
class _Stored:
    """The bytes of a tensor, and their type (GGMLQuantizationType)."""

    data: np.ndarray
    kind: Any


def _stored(package: Any, name: str, array: np.ndarray, kind: GgufType) -> _Stored:
    """Returns a tensor in the type of the file, or in the one that it needs instead. Raises
    ModelFileError for a number that float16 cannot hold."""
    types = package.GGMLQuantizationType
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim < 2 or any(part in name for part in _SMALL):
        return _Stored(array, types.F32)
    if kind == "q8_0" and array.shape[-1] % BLOCK == 0:
        return _Stored(package.quantize(array, types.Q8_0), types.Q8_0)
    if np.abs(array).max(initial=0) > _LARGEST:
        raise ModelFileError(
            f"{name}: a weight is larger than {_LARGEST:g}, the largest number of float16"
        )
    return _Stored(array.astype(np.float16), types.F16)
