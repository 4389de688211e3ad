"""Shows that an export is what was trained: reads it back before it appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


_COPIES = 2.5  # of the weights in the memory of the host, with room for activations


def check_model(exported: Exportable, model: Model, directory: Path) -> list[Proof]:
    """Reads the model in a directory and compares its log-probabilities with those of the model
    that was written there. Raises ModelError."""
    from policy.huggingface import reload

    def check(written: Model) -> Proof:
        return reload.check_model(written, directory, exported.prompts())

    return _run(exported, directory, _on_either(exported, model, check))


def check_adapter(exported: Exportable, directory: Path) -> list[Proof]:
    """Reads the adapter in a directory as `check_model` does a model. Raises ModelError."""
    from policy.huggingface import reload

    def check() -> Proof:
        return reload.check_adapter(exported.model, directory, exported.prompts())

    return _run(exported, directory, [check])


def check_gguf(exported: Exportable, model: Model, file: Path, kind: GgufType) -> list[Proof]:
    """Reads a GGUF file and compares its tensors with those of the model that was written to it.
    Raises ModelError."""
    from policy.huggingface import reload

    def check(written: Model) -> Proof:
        return reload.check_gguf(written, file, kind, exported.prompts())

    return _run(exported, file.parent, _on_either(exported, model, check))


def check_classifier(exported: Exportable, written: Classifier, directory: Path) -> list[Proof]:
    """Reads the reward model in a directory and compares its scores with those of the one that was
    written there. Raises ModelError."""
    from policy.huggingface import reload
    from policy.huggingface.classification import Classifier
    from policy.model import Model

    def check(trunk: Model) -> Proof:
        classifier = Classifier(trunk.graph, trunk.params, written.score)
        return reload.check_classifier(classifier, directory, exported.prompts())

    model = Model(written.graph, written.params)
    return _run(exported, directory, _on_either(exported, model, check))


def _on_either(
    exported: Exportable, model: Model, check: Callable[[Model], Proof]
) -> list[Callable[[], Proof]]:
    """Returns a check on the devices of a model, and one on the CPU if the host has room for two
    copies of the weights."""

    def on_cpu() -> Proof:
        from policy.huggingface.host_copy import host_copy

        exported.note(
            "export: the devices have no room for a second copy of the weights; the files are read "
            "back on the CPU"
        )
        return check(host_copy(model))

    on_devices = partial(check, model)
    return [on_devices, on_cpu] if _host_has_room(model) else [on_devices]


def _host_has_room(model: Model) -> bool:
    """Whether one host holds the weights, and has memory for them twice and for activations."""
    import jax

    from policy.mesh.device_memory import host_memory
    from rl.accounting import memory

    total = host_memory()
    used = memory.host().get("perf/host_memory_share")
    if total is None or used is None or jax.process_count() > 1:
        return False
    size = sum(array.nbytes for array in jax.tree.leaves(model.params))
    return _COPIES * size <= (1 - used) * total


def _run(
    exported: Exportable, directory: Path, checks: Sequence[Callable[[], Proof]]
) -> list[Proof]:
    """Makes the first of the checks that there is memory for. Raises ModelError if it fails."""
    import jax

    from policy.fields.config_fields import UnsupportedModel
    from policy.huggingface.reload import NotReloaded
    from policy.huggingface.tensorfiles import ModelFileError

    exported.share(directory)
    for check in checks:
        try:
            return [check()]
        except (NotReloaded, ModelFileError, UnsupportedModel) as error:
            raise ModelError(_REFUSED.format(f"export: {error}")) from None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
    exported.note(
        "export: there is no room for a second copy of the weights, on the devices and on the host, "
        "so the files were not read back; `rl export` on a machine with more memory does so"
    )
    return []
