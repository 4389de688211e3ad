"""Writes the trained policy as a Hugging Face directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl.data import models, towers
from rl.data.tokenizer import write_tokenizer
from rl.errors import ModelError
from rl.stages.export import generation

MERGED = "merged"
"""Of an export with an adapter: the folder of the merged model."""

if TYPE_CHECKING:
    from policy.model import Model
    from rl.stages.context import Context


def write_policy(context: Context, directory: Path) -> None:
    """Writes the policy of a run with its tokenizer, and with all parts of the model that training
    started from. Of a policy with an adapter it writes what `export` says."""
    from rl.stages.export import adapter

    if not adapter.has_adapter(context.model):
        write_model(context, context.model, directory)
        return
    options = context.config.export
    if options.adapter:
        write_base = partial(write_model, context, context.model)
        adapter.write_adapter(context, directory, write_base)
        write_texts(context, directory)
    if options.merged:
        merged = directory / MERGED if options.adapter else directory
        write_model(context, adapter.merged_model(context), merged)
        adapter.write_readme(context, merged, "merged")


def write_model(context: Context, model: Model, directory: Path) -> None:
    """Writes a model of a run as `write_policy` does the policy. Arrays of an adapter are left
    out."""
    import policy
    from policy.huggingface.tensorfiles import ModelFileError
    from policy.mesh import processes

    written = generation.keys(context)
    source = _source(context)
    try:
        policy.save(model, directory, generation=written, source=source)
    except ModelFileError as error:  # the files of the source have changed since they were read
        _note_parts(context, error)
        policy.save(policy.Model(model.graph, model.params), directory, generation=written)
    if not processes.first():
        return
    _write_texts(context, source, directory)
    if context.tables is not None:
        towers.write_files(context.config.model, context.tokenizer, directory)


def write_texts(context: Context, directory: Path) -> None:
    """Writes the tokenizer, the processor and generation_config.json of a run."""
    from policy.huggingface import generation_config
    from policy.mesh import processes

    if processes.first():
        generation_config.write(directory, generation.keys(context))
        _write_texts(context, _source(context), directory)


def _write_texts(context: Context, source: Path | None, directory: Path) -> None:
    write_tokenizer(context.config, context.tokenizer, directory)
    if source is not None:
        models.copy_files(models.text_directory(source), models.PROCESSOR_FILES, directory)


def _source(context: Context) -> Path | None:
    """Returns the directory of the model that training started from; None if it is gone by now, and
    for random weights."""
    try:
        return models.directory(context.config.model.source, weights=True)
    except ModelError as error:
        _note_parts(context, error)
        return None


def _note_parts(context: Context, error: Exception) -> None:
    context.events.note(
        f"export: {error}. Parts of the model that this run did not load are left out"
    )
