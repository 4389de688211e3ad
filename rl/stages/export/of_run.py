"""The export of a run: its policy, and the files of its tokenizer and model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.huggingface import sources
from policy.mesh import processes
from rl.cluster.folders import copy_to_all
from rl.cluster.launch import on_first
from rl.config.run import ExportOptions, RunConfig
from rl.data import models, towers
from rl.data.hub import hub_name
from rl.data.tokenizer import write_tokenizer
from rl.errors import ModelError
from rl.stages.export import generation, prompts
from rl.stages.export.base import FOLDER, directory_of, is_trained
from rl.stages.export.card import Origin, StageStep
from rl.stages.export.exportable import AdapterBase, Exportable

if TYPE_CHECKING:
    from policy.model import Model
    from rl.stages.context import Context
    from rollout.text.interface import Tokenizer


@dataclass
class ExportedRun(Exportable):
    """The policy of a run after some step.

    stop_ids: token ids that end a completion, where the configuration names none. show: prints a
    note. media: whether rows of the run have pictures or sounds. chosen: which forms of an adapter
    are written; None: those of the configuration. place: of the checkpoint with these weights;
    None: the run is at its end. common_folder: as of `Context`.
    """

    config: RunConfig
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    model: Model
    show: Callable[[str], None]
    media: bool
    chosen: ExportOptions | None = None
    place: StageStep | None = None
    common_folder: bool = True

    @classmethod
    def of(cls, context: Context) -> ExportedRun:
        """Returns the export of a run that goes on."""
        return cls(
            context.config,
            context.tokenizer,
            context.stop_ids,
            context.model,
            context.events.note,
            context.tables is not None,
            common_folder=context.common_folder,
        )

    @property
    def forms(self) -> ExportOptions:
        return self.chosen or self.config.export

    def source(self) -> Path | None:
        """Returns the directory of the model that training started from; None if it is gone by
        now, and for random weights."""
        return self._source

    @cached_property
    def _source(self) -> Path | None:
        try:
            return models.directory(self.config.model.source, weights=True)
        except ModelError as error:
            self.note(
                f"export: {error}. Parts of the model that this run did not load are left out"
            )
            return None

    def generation(self) -> dict[str, Any]:
        return generation.keys(self)

    def write_texts(self, directory: Path, *, with_towers: bool) -> None:
        write_tokenizer(self.config, self.tokenizer, directory)
        source = self.source()
        if source is not None:
            models.copy_files(models.text_directory(source), models.PROCESSOR_FILES, directory)
        if with_towers and self.media:
            towers.write_files(self.config.model, self.tokenizer, directory)

    def share(self, directory: Path) -> None:
        if self.common_folder:
            super().share(directory)
        else:
            copy_to_all(directory)

    def prompts(self) -> Sequence[Sequence[int]]:
        return on_first(lambda: prompts.of_run(self.config.directory, self.model, self.tokenizer))

    def origin(self) -> Origin:
        config = self.config
        is_here = Path(config.model.source).exists()
        repository = None if is_here else hub_name(config.model.source)
        base = None if repository is None else repository.name
        return Origin(
            config.directory.name, base, self.source(), config.directory, config, self.place
        )

    def note(self, text: str) -> None:
        self.show(text)

    def base(self, directory: Path, write: Callable[[Path], None]) -> AdapterBase:
        config = self.config
        directory_of_base = directory_of(config)
        if directory_of_base is None or sources.has_adapter(directory_of_base):
            directory_of_base = config.directory / FOLDER
            _write_once(directory_of_base, write)
        label = f"{FOLDER}/ of the run" if is_trained(config) else str(config.model.source)
        return AdapterBase(directory_of_base, self._base_keys(directory_of_base, directory), label)

    def _base_keys(self, base: Path, directory: Path) -> dict[str, str]:
        """Returns the keys of adapter_config.json that name the base: relative to an export in the
        folder of the run for a folder of the run, so that the run can be moved; on the hub its name
        and revision."""
        config = self.config
        if base == config.directory / FOLDER and directory.parent == config.directory:
            return {"base_model_name_or_path": f"../{FOLDER}"}
        source = config.model.source
        repository = None
        if base != config.directory / FOLDER and not Path(source).is_dir():
            repository = hub_name(models.pinned(source))
        if repository is None:
            return {"base_model_name_or_path": str(base.absolute())}
        revision = {"revision": repository.revision} if repository.revision else {}
        return {"base_model_name_or_path": repository.name, **revision}


def _write_once(directory: Path, write: Callable[[Path], None]) -> None:
    """Writes the directory of a base, unless it is there."""
    if (directory / "config.json").is_file():
        return
    unfinished = directory.with_name(f"{directory.name}.tmp")
    if processes.first():
        shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished)
    if processes.first():
        unfinished.rename(directory)
    processes.broadcast(None)
