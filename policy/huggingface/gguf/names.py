"""Names of tensors: those of Hugging Face files, by the tables of a family, and those of GGUF."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from policy import families
from policy.fields import names
from policy.huggingface.gguf.architectures import Architecture
from policy.huggingface.gguf.package import gguf

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")


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
        self._map = package.get_tensor_name_map(numbers[architecture.name], layers)
        self._architecture = architecture
        self._layers = layers

    def of(self, name: str) -> GgufName | None:
        """Returns the name of a tensor of a Hugging Face file in GGUF; None if it has none."""
        expert = _EXPERT.search(name)
        plain = _EXPERT.sub(".experts.", name)
        tensor = self._map.get_name(plain, try_suffixes=_SUFFIXES)
        if tensor is None:
            return None
        return GgufName(tensor, None if expert is None else int(expert[1]))

    def stored_names(self, experts: int) -> dict[str, GgufName]:
        """Returns the names of all tensors of Hugging Face files that the architecture may have."""
        result = {}
        for name in self._templates():
            numbered = [name.format(e=e) for e in range(experts)] if "{e}" in name else [name]
            for each in numbered:
                tensor = self.of(each)
                if tensor is not None:
                    result.setdefault(each, tensor)
        return result

    def _templates(self) -> Iterator[str]:
        family = families.find({"model_type": self._architecture.model_type})
        for stored in getattr(family, "TOP", names.TOP).values():
            yield stored.name
        prefix = getattr(family, "LAYER_PREFIX", names.LAYER_PREFIX)
        for number in range(self._layers):
            for stored in family.NAMES.values():
                yield prefix.format(n=number) + stored.name
