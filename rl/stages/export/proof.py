"""Shows that an export is what was trained: reads it back before it appears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl.errors import ModelError
from rl.stages.export.exportable import Exportable

if TYPE_CHECKING:
    from policy.huggingface.classification import Classifier
    from policy.huggingface.gguf.writer import GgufType
    from policy.huggingface.reload import Proof
    from policy.model import Model

_REFUSED = (
    "{0}. Nothing is exported; the checkpoints of a run stay as they are. Files that change while "
    "they are written, or a damaged disk, can be the cause; otherwise please report it"
)


def check_model(exported: Exportable, model: Model, directory: Path) -> list[Proof]:
    """Reads the model in a directory and compares its log-probabilities with those of the model
    that was written there. Raises ModelError."""
    from policy.huggingface import reload

    return _run(exported, lambda: reload.check_model(model, directory, exported.prompts()))


def check_adapter(exported: Exportable, directory: Path) -> list[Proof]:
    """Reads the adapter in a directory as `check_model` does a model. Raises ModelError."""
    from policy.huggingface import reload

    return _run(
        exported, lambda: reload.check_adapter(exported.model, directory, exported.prompts())
    )


def check_gguf(exported: Exportable, model: Model, file: Path, kind: GgufType) -> list[Proof]:
    """Reads a GGUF file and compares its tensors with those of the model that was written to it.
    Raises ModelError."""
    from policy.huggingface import reload

    return _run(exported, lambda: reload.check_gguf(model, file, kind, exported.prompts()))


def check_classifier(exported: Exportable, written: Classifier, directory: Path) -> list[Proof]:
    """Reads the reward model in a directory and compares its scores with those of the one that was
    written there. Raises ModelError."""
    from policy.huggingface import reload

    return _run(exported, lambda: reload.check_classifier(written, directory, exported.prompts()))


def _run(exported: Exportable, check: Callable[[], Proof]) -> list[Proof]:
    import jax

    from policy.fields.config_fields import UnsupportedModel
    from policy.huggingface.reload import NotReloaded
    from policy.huggingface.tensorfiles import ModelFileError
    from policy.mesh import processes

    processes.broadcast(None)  # the first process has written all files
    try:
        return [check()]
    except (NotReloaded, ModelFileError, UnsupportedModel) as error:
        raise ModelError(_REFUSED.format(f"export: {error}")) from None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        exported.note(
            "export: the devices have no room for a second copy of the weights, so the files were "
            "not read back; `rl export` on a machine with more memory does so"
        )
        return []
