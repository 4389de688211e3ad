"""What an export is written from: a run, or the directory of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl.config.run import ExportOptions
from rl.stages.export.card import Origin

if TYPE_CHECKING:
    from policy.model import Model


@dataclass(frozen=True)
class AdapterBase:
    """The weights under an adapter: their directory, the keys of adapter_config.json that name
    them, and what a sentence calls them."""

    directory: Path
    keys: Mapping[str, str]
    label: str


class Exportable(ABC):
    """A model to export, with its texts: the files of its directory that hold no weights.

    model: may have an adapter. forms: which directories an adapter is written to. compared: what
    numbers are compared when it is read back, with the preposition for so many tokens.
    """

    model: Model
    forms: ExportOptions
    compared: ClassVar[str] = "log-probabilities of"

    @abstractmethod
    def source(self) -> Path | None:
        """Returns the directory that the parts of the model are copied from that were not loaded;
        None if there is none."""

    @abstractmethod
    def generation(self) -> dict[str, Any]:
        """Returns the keys of generation_config.json."""

    @abstractmethod
    def write_texts(self, directory: Path, *, with_towers: bool) -> None:
        """Writes the tokenizer and the processor. with_towers: of a model whose config.json, which
        is there, may have towers."""

    @abstractmethod
    def base(self, directory: Path, write: Callable[[Path], None]) -> AdapterBase:
        """Returns the base of the adapter, for an export to `directory`. write: writes the weights
        under the adapter to a directory, where no directory has them."""

    @abstractmethod
    def prompts(self) -> Sequence[Sequence[int]]:
        """Returns the token ids of the sequences whose log-probabilities are compared."""

    @abstractmethod
    def origin(self) -> Origin:
        """Returns where the weights come from, for the model card."""

    def share(self, directory: Path) -> None:
        """Returns in all processes when they see this directory, which the first one has
        written."""
        from policy.mesh import processes

        processes.broadcast(None)

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows what a person should know of the export."""
