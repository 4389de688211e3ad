"""Says which family is nearest to a model that no family reads, and what differs. Free of jax."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from types import ModuleType

SHOWN = 6
# Keys of configuration files that classes of transformers take under another name, or that describe
# the file.
_COMMON_KEYS = {
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "head_dim",
        "layer_types",
    ),
    *(
        "torch_dtype",
        "auto_map",
        "quantization_config",
        "_name_or_path",
        "num_local_experts",
        "duet",
    ),
    *("compress_ratios", "num_hash_layers", "qk_rope_head_dim"),
}
# A tensor of a numbered layer, under the names that models use.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.(.+)")


def describe(hf: dict, families: Iterable[ModuleType], names: Iterable[str] = ()) -> str:
    """Returns what to say of a configuration that none of `families` has: the nearest model type,
    the tensors of its layers that the nearest family does not have, if `names` of stored tensors
    are given, and the keys that the class of transformers does not have."""
    tensors = {local for name in names if (local := _in_layer(name)) is not None}
    asked = str(hf.get("model_type") or (hf.get("architectures") or [""])[0])
    family, kind = _nearest(hf, families, tensors, asked)
    differences = []
    if tensors:
        own = _tensors_of(family)
        others = sorted(tensors - own)
        # Biases and norms are parts that many models of a family lack.
        lacking = sorted(
            name for name in own - tensors if name.endswith(".weight") and "norm" not in name
        )
        if others:
            differences.append(
                f"its layers have the tensors {_listed(others)}, which {kind} does not have"
            )
        if lacking and len(lacking) <= SHOWN:
            differences.append(f"its layers lack {_listed(lacking)}")
        if not others:
            differences.append(
                f"its other tensors are those of {kind}, which may use them otherwise"
            )
    if keys := _other_keys(hf, kind):
        differences.append(
            f"its configuration has the keys {_listed(keys)}, which {kind} does not have"
        )
    what = "".join(f"; {difference}" for difference in differences)
    return (
        f"no family for architectures={hf.get('architectures')}, "
        f"model_type={hf.get('model_type')!r}. "
        f"The nearest is {kind}{what}. docs/families.md lists the models of each family"
    )


def _nearest(
    hf: dict, families: Iterable[ModuleType], tensors: set[str], asked: str
) -> tuple[ModuleType, str]:
    """Returns the nearest (family, model type): by the tensors of a layer, then by the keys of the
    configuration, then by the spelling of the model type `asked` for."""
    candidates = [(family, kind) for family in families for kind in _types_of_transformers(family)]
    if tensors:

        def distance(candidate: tuple[ModuleType, str]) -> float:
            own = _tensors_of(candidate[0])
            # A family has tensors that many of its models lack, so that these count less.
            return len(tensors - own) + len(own - tensors) / 4

        least = min(map(distance, candidates))
        candidates = [each for each in candidates if distance(each) == least]
        keys = {kind: len(_other_keys(hf, kind)) for _, kind in candidates}
        candidates = [each for each in candidates if keys[each[1]] == min(keys.values())]

    def likeness(candidate: tuple[ModuleType, str]) -> tuple[float, bool]:
        """Of spelling, where there is any; otherwise the plainest layer, llama's, comes first."""
        ratio = SequenceMatcher(None, asked, candidate[1]).ratio()
        return ratio if ratio > 0.6 else 0.0, candidate[1] == "llama"

    return max(candidates, key=likeness)


def _types_of_transformers(family: ModuleType) -> list[str]:
    """Returns the model types of the text classes that a family has from transformers, none for a
    decoder of Duet's own. Classes and model types have one order."""
    endings = ("ForCausalLM", "LMHeadModel")
    pairs = zip(family.ARCHITECTURES, family.MODEL_TYPES, strict=False)
    return [kind for architecture, kind in pairs if architecture.endswith(endings)]


def _in_layer(name: str) -> str | None:
    """Returns the name of a tensor inside its layer, with {e} for the number of an expert and {s}
    for that of a shard; None: it is in no layer."""
    match = _LAYER.search(name)
    if match is None:
        return None
    local = re.sub(r"\.\d+\.", ".{e}.", match[1])
    return re.sub(r"\.shard_\d+\.", ".shard_{s}.", local)


def _tensors_of(family: ModuleType) -> set[str]:
    stored = [place for entry in family.NAMES.values() for place in (entry, *entry.also)]
    return {place.name for place in stored}


def _other_keys(hf: dict, model_type: str) -> list[str]:
    """Returns the keys with a value that the configuration class of `model_type` does not have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return []
    known = set(CONFIG_MAPPING[model_type]().to_dict()) | _COMMON_KEYS
    return sorted(key for key, value in hf.items() if key not in known and value is not None)


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
