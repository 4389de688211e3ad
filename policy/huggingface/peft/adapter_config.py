"""Reads `adapter_config.json` of PEFT 0.17 to 0.21, and refuses by name what the files of an
adapter cannot say, or Duet does not compute. Absent keys have PEFT's values."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.huggingface import tensorfiles
from policy.huggingface.sources import read_object
from policy.huggingface.tensorfiles import ModelFileError

CONFIG = "adapter_config.json"
TENSORS = tensorfiles.ADAPTER
PICKLE = "adapter_model.bin"
# PEFT's values of absent keys.
RANK = 8
ALPHA = 8
# Initialisations that changed the base model when the adapter was made.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of variants whose result is not W + scale B A, and the value that leaves them out.
_VARIANTS = {
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "lora_bias": "a bias of B (lora_bias)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trainable tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
}
# The first version that takes experts in one tensor [X, out, in] for what they are.
_UNSWAPPED_SINCE = (0, 19)


@dataclass(frozen=True)
class AdapterConfig:
    """What a configuration says of an adapter. Ranks and alphas of single modules are regular
    expressions over module names; the first that matches counts."""

    path: Path
    base: str
    rank: int
    alpha: float
    rank_stabilised: bool
    dora: bool
    target_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    tied_embedding: bool
    version: tuple[int, ...] | None

    def rank_of(self, module: str) -> int:
        """Returns the rank of the adapter of a module."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B A of a module."""
        return self.scale(_by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module))

    def scale(self, alpha: float, rank: int) -> float:
        """Returns alpha / rank, or alpha / sqrt(rank)."""
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    @property
    def is_old(self) -> bool | None:
        """Whether a version before 0.19 wrote the files, which takes experts [X, out, in] for
        [X, in, out]; None: it is not known."""
        return None if self.version is None else self.version < _UNSWAPPED_SINCE


def read_adapter_config(directory: str | os.PathLike) -> AdapterConfig:
    """Reads the configuration of an adapter. Raises ModelFileError for a file that is missing or
    damaged, and for adapters that Duet does not compute."""
    path = Path(directory) / CONFIG
    if not path.exists():
        raise ModelFileError(
            f"{path}: no such file; the directory of an adapter holds {CONFIG} and {TENSORS}"
        )
    hf = read_object(path)
    _refuse(path, hf)
    try:
        return AdapterConfig(
            path=path,
            base=str(hf.get("base_model_name_or_path") or ""),
            rank=int(hf.get("r", RANK)),
            alpha=float(hf.get("lora_alpha", ALPHA)),
            rank_stabilised=bool(hf.get("use_rslora")),
            dora=bool(hf.get("use_dora")),
            target_modules=_patterns(hf, "target_modules"),
            target_parameters=tuple(hf.get("target_parameters") or ()),
            exclude_modules=_patterns(hf, "exclude_modules"),
            layers=_layers(hf.get("layers_to_transform")),
            rank_pattern={str(key): int(rank) for key, rank in _pattern(hf, "rank_pattern")},
            alpha_pattern={str(key): float(alpha) for key, alpha in _pattern(hf, "alpha_pattern")},
            tied_embedding=bool(hf.get("ensure_weight_tying")),
            version=_version(hf.get("peft_version")),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{path}: {error}") from None


def _refuse(path: Path, hf: dict[str, Any]) -> None:
    kind = hf.get("peft_type")
    if kind != "LORA":
        raise ModelFileError(
            f"{path}: peft_type is {kind!r}; Duet reads LORA (LoRA, rsLoRA, DoRA). Merge the "
            "adapter into its model with peft, merge_and_unload(), and name that model"
        )
    for key, variant in _VARIANTS.items():
        if hf.get(key):
            raise ModelFileError(
                f"{path}: {key}: Duet does not compute {variant}. Merge the adapter into its model "
                "with peft, merge_and_unload(), and name that model"
            )
    start = hf.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ModelFileError(
            f"{path}: init_lora_weights is {start!r}, which changed the base model when the "
            "adapter was made. Save the adapter with peft, "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), which writes one "
            "for the unchanged base"
        )


def _by_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the full name or its end after a dot."""
    for pattern, number in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return number
    return default


def _patterns(hf: dict[str, Any], key: str) -> tuple[str, ...] | str:
    modules = hf.get(key) or ()
    return modules if isinstance(modules, str) else tuple(map(str, modules))


def _pattern(hf: dict[str, Any], key: str) -> Any:
    patterns = hf.get(key) or {}
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from None
    return patterns.items()


def _layers(numbers: Any) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    return (numbers,) if isinstance(numbers, int) else tuple(map(int, numbers))


def _version(text: Any) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", str(text or ""))
    return None if match is None else (int(match[1]), int(match[2]))
