"""What a person asks of `rl export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.export.hub import HubRepository

Dtype = Literal["float32", "bfloat16"]
Form = Literal["adapter", "merged"]
GgufType = Literal["f16", "q8_0"]


@dataclass(frozen=True)
class ExportRequest:
    """An export to write.

    source: the folder of a run, the directory of a model, or a model on the hub. step: of a run,
    the checkpoint `[STAGE:]N`; None: its final weights, or the newest checkpoint of a run that has
    not ended. dtype: None: that of the source. form: of a model with an adapter; None: as the run's
    `export` says, else the adapter. gguf: a GGUF file is written, with matrices in this type, and
    an adapter is merged into the weights. force: an export in `directory` is replaced. push:
    the repository that gets the files.
    """

    source: str
    directory: Path
    step: str | None = None
    dtype: Dtype | None = None
    form: Form | None = None
    gguf: GgufType | None = None
    force: bool = False
    push: HubRepository | None = None
