"""The export of a directory with a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from rl.errors import ModelError
from rl.export.of_directory import ExportedDirectory
from rl.export.request import Dtype
from rl.stages.export import proof
from rl.stages.export.card import Listing
from rl.stages.export.policy import write_card

if TYPE_CHECKING:
    from policy.huggingface.classification import Classifier
    from policy.huggingface.reload import Proof


@dataclass
class ExportedRewardModel(ExportedDirectory):
    """The reward model of a directory. Its trunk is `model`."""

    compared = "scores after"
    classifier: Classifier = field(kw_only=True)


def is_reward_model(directory: Path) -> bool:
    """Whether a directory holds a sequence classification model."""
    file = directory / "config.json"
    names = sources.read_object(file).get("architectures") if file.is_file() else None
    return bool(names) and str(names[0]).endswith("ForSequenceClassification")


def read(directory: Path, dtype: Dtype) -> Classifier:
    """Reads a reward model. Raises ModelError."""
    from policy.huggingface import classification
    from policy.mesh.sharding import layout
    from policy.runtime import Runtime

    try:
        runtime = Runtime(dtype=dtype, param_dtype=dtype)
        return classification.read(directory, runtime, layout({"fsdp": -1}))
    except (ModelFileError, UnsupportedModel, ValueError) as error:
        raise ModelError(f"{directory}: {error}") from None


def write(exported: ExportedRewardModel, directory: Path) -> list[Proof]:
    """Writes a reward model with its tokenizer, reads it back and compares its scores. Raises
    ModelError if they differ."""
    from policy.huggingface import classification

    written = exported.classifier
    pad_id = getattr(exported.tokenizer, "pad_token_id", None)
    classification.write(directory, written.graph, written.params, written.score, pad_id)
    exported.write_texts(directory, with_towers=False)
    dtype = written.graph.runtime.param_dtype
    name = Path(exported.name).name
    sentence = (
        f"The reward model {name}, as exported by Duet, in {dtype}. It has one label, the score."
    )
    write_card(exported, directory, sentence, Listing("transformers", "text-classification"))
    return proof.check_classifier(exported, written, directory)
