"""Names of tensors: those of Hugging Face files, by the tables of a family, and those of GGUF."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from policy import families
from policy.fields import names
from policy.fields.names import Stored
from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf.architectures import Architecture
from policy.huggingface.gguf.package import gguf

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")
# Ends of names of Hugging Face -> their spelling in the tables of the package gguf.
_RESPELLED = {
    ".dt_bias": ".dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
}


@dataclass(frozen=True)
class GgufName:
    """The tensor of GGUF that holds one of Hugging Face, and of it the number of the expert."""

    tensor: str
    expert: int | None = None


class NameMap:
    """The names of the tensors of an architecture with so many layers."""

    def __init__(self, architecture: Architecture, layers: int):
        package = gguf(f"GGUF of {architecture.name}")
        numbers = {name: number for number, name in package.MODEL_ARCH_NAMES.items()}
        if architecture.name not in numbers:
            raise ModelFileError(
                f"the package gguf does not know the architecture {architecture.name}; type: pip "
                "install --upgrade gguf"
            )
        self._map = package.get_tensor_name_map(numbers[architecture.name], layers)
        self._architecture = architecture
        self._layers = layers

    def of(self, name: str) -> GgufName | None:
        """Returns the name of a tensor of a Hugging Face file in GGUF; None if it has none."""
        expert = _EXPERT.search(name)
        plain = _EXPERT.sub(".experts.", name)
        for end, spelling in _RESPELLED.items():
            if plain.endswith(end):
                plain = plain.removesuffix(end) + spelling
        tensor = self._map.get_name(plain, try_suffixes=_SUFFIXES)
        if tensor is None:
            return None
        return GgufName(tensor, None if expert is None else int(expert[1]))

    def stored_names(self, experts: int, tensors: Collection[str]) -> dict[str, GgufName]:
        """Returns the names of Hugging Face files for the tensors of a file with so many experts a
        layer, each in the first spelling that the file has tensors for."""
        result: dict[str, GgufName] = {}
        for stored, prefix in self._templates():
            for spelling in (stored, *stored.also):
                places = self._places(prefix + spelling.name, experts, tensors)
                if places:
                    result |= places
                    break
        return result

    def _places(self, name: str, experts: int, tensors: Collection[str]) -> dict[str, GgufName]:
        numbered = [name.format(e=e) for e in range(experts)] if "{e}" in name else [name]
        places = {each: self.of(each) for each in numbered}
        return {each: place for each, place in places.items() if place and place.tensor in tensors}

    def _templates(self) -> Iterator[tuple[Stored, str]]:
        """Yields the tensors of the family, with what stands before their names."""
        family = families.find({"model_type": self._architecture.model_type})
        for stored in getattr(family, "TOP", names.TOP).values():
            yield stored, ""
        prefix = getattr(family, "LAYER_PREFIX", names.LAYER_PREFIX)
        for number in range(self._layers):
            for stored in family.NAMES.values():
                yield stored, prefix.format(n=number)
