"""Writes the trained policy as a Hugging Face directory, and reads it back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl.stages.export import proof
from rl.stages.export.card import Listing
from rl.stages.export.exportable import Exportable

if TYPE_CHECKING:
    from policy.huggingface.reload import Proof
    from policy.model import Model

MERGED = "merged"
"""Of an export with an adapter: the folder of the merged model."""


def write_policy(exported: Exportable, directory: Path) -> list[Proof]:
    """Writes a policy with its tokenizer, and with all parts of the model that training started
    from. Of a policy with an adapter it writes the chosen forms.

    Each directory is read back, and its log-probabilities are compared: returns what was measured,
    for each that the devices had room for. Raises ModelError if they differ.
    """
    from policy.adapters.learning import has_adapter
    from rl.stages.export import adapter

    if not has_adapter(exported.model.params):
        write_model(exported, exported.model, directory)
        write_card(exported, directory, _plain(exported), Listing("transformers"))
        return proof.check_model(exported, exported.model, directory)
    write_base = partial(write_model, exported, exported.model)
    base = exported.base(directory, write_base)
    proofs: list[Proof] = []
    if exported.forms.adapter:
        adapter.write_adapter(exported, directory, base)
        write_texts(exported, directory)
        sentence = adapter.describe(exported, base.label, "adapter")
        write_card(exported, directory, sentence, Listing("peft"))
        proofs += proof.check_adapter(exported, directory)
    if exported.forms.merged:
        merged = directory / MERGED if exported.forms.adapter else directory
        model = adapter.merged_model(exported)
        write_model(exported, model, merged)
        sentence = adapter.describe(exported, base.label, "merged")
        write_card(exported, merged, sentence, Listing("transformers"))
        proofs += proof.check_model(exported, model, merged)
    return proofs


def write_card(exported: Exportable, directory: Path, sentence: str, listing: Listing) -> None:
    """Writes the model card and copies the licence of the base."""
    from policy.mesh import processes
    from rl.stages.export import card

    if processes.first():
        card.write(directory, exported.origin(), sentence, listing)


def _plain(exported: Exportable) -> str:
    """Returns a sentence that says what a directory without an adapter holds."""
    origin = exported.origin()
    how = "trained by" if origin.config is not None else "as exported by"
    dtype = exported.model.graph.runtime.param_dtype
    source = origin.title if origin.config is None else origin.config.model.source
    name = origin.base or Path(source).name
    return f"The weights of {name}, {how} Duet, in {dtype}."


def write_model(exported: Exportable, model: Model, directory: Path) -> None:
    """Writes a model as `write_policy` does the policy, without reading it back. Arrays of an
    adapter are left out."""
    import policy
    from policy.huggingface.tensorfiles import ModelFileError
    from policy.mesh import processes

    written = exported.generation()
    source = exported.source()
    try:
        policy.save(model, directory, generation=written, source=source)
    except ModelFileError as error:  # the files of the source have changed since they were read
        exported.note(
            f"export: {error}. Parts of the model that this run did not load are left out"
        )
        policy.save(policy.Model(model.graph, model.params), directory, generation=written)
    if processes.first():
        exported.write_texts(directory, with_towers=True)


def write_texts(exported: Exportable, directory: Path) -> None:
    """Writes the tokenizer, the processor and generation_config.json."""
    from policy.huggingface import generation_config
    from policy.mesh import processes

    if processes.first():
        generation_config.write(directory, exported.generation())
        exported.write_texts(directory, with_towers=False)
