"""The base of the adapter of a run: the weights that its stages leave as they are.

They are those of `model.source`, or random ones of the seed. Where stages trained the weights
before the first one that trains the adapter, the run keeps them in its folder `base/`. Checkpoints
of the stages that train the adapter do not hold the base; they name it by a hash, with which a run
that goes on compares the base that it finds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from policy.huggingface import sources
from policy.model import Graph
from rl.cluster.launch import on_first
from rl.config.run import RunConfig
from rl.errors import ModelError
from rl.run.folder import RunFolder
from rl.run.manifest import file_hash
from rl.stages.context import Context
from rl.stages.export.base import FOLDER, directory_of, is_trained
from rl.stages.export.of_run import ExportedRun
from rl.stages.export.policy import write_model

HASHES = "base.json"
"""Of a run: hashes of the files of the base, with the sizes and times that they were of."""
KEY = "base"
"""Of the base in the host.json of a checkpoint."""
_FILES = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
)


@dataclass(frozen=True)
class BaseIdentity:
    """What a checkpoint says of the base.

    source: its directory, or the name of its architecture. sha256: of config.json and the weights,
    for random weights of what they follow from. dtype: of the weights. base_weights: the format in
    which they are stored quantised, if they are. adapter: a hash of rank, scale and adapted
    weights.
    """

    source: str
    sha256: str
    dtype: str
    base_weights: str | None
    adapter: str


def write(context: Context, folder: RunFolder) -> None:
    """Writes the weights of the policy to the folder of the base, if stages have trained them."""
    config = context.config
    if not is_trained(config):
        return
    model = context.model
    size = sum(model.params[path].nbytes for path in model.graph.paths)
    with context.timeline.span("writing the base"):
        folder.write_anew(
            folder.path / FOLDER, partial(write_model, ExportedRun.of(context), model), size
        )


def identity(config: RunConfig, graph: Graph) -> BaseIdentity:
    """Returns what the base of the run is now. All processes call it; the first one reads the
    files. graph: of the policy, with its adapter.

    A file is read again only if its size or time has changed. Raises ModelError for a base that is
    gone.
    """
    adapter = hashlib.sha256(repr(graph.runtime.adapter).encode()).hexdigest()
    base_weights = graph.runtime.base_weights

    def on_one() -> BaseIdentity:
        directory = directory_of(config)
        if directory is None:
            start = f"{graph.config.hf} seed {config.seed}"
            digest = hashlib.sha256(start.encode()).hexdigest()
        else:
            digest = _digest(directory, config.directory / HASHES)
        source = str(directory or config.model.source)
        return BaseIdentity(source, digest, graph.runtime.param_dtype, base_weights, adapter)

    return BaseIdentity(**on_first(lambda: asdict(on_one())))


def check(config: RunConfig, graph: Graph, host: Mapping, *, files_only: bool = False) -> None:
    """Raises ModelError if the base is another one than that of the checkpoint with this
    host.json. files_only: for a graph with another dtype."""
    if KEY not in host:
        return
    saved = BaseIdentity(**host[KEY])
    present = identity(config, graph)
    names = ("sha256",) if files_only else ("sha256", "dtype", "base_weights", "adapter")
    differing = [
        f"{name}: {before} there, {now} here"
        for name in names
        if (before := getattr(saved, name)) != (now := getattr(present, name))
    ]
    if differing:
        raise ModelError(
            f"the base of the adapter, {present.source}, is another one than the checkpoints of "
            f"{config.directory} were trained over ({saved.source}): {'; '.join(differing)}. "
            "Restore its files (config.json, *.safetensors), or start a new run in another run.dir"
        )


def _digest(directory: Path, cache: Path) -> str:
    """Returns the SHA-256 of names and hashes of the files of a model. cache: the file that keeps
    the hashes."""
    folders = dict.fromkeys((directory, sources.base_of(directory)))
    files = [each for folder in folders for name in _FILES for each in sorted(folder.glob(name))]
    known = _known(cache)
    hashes = {}
    try:
        for file in files:
            status = file.stat()
            stamp = [status.st_size, status.st_mtime_ns]
            entry = known.get(str(file))
            is_known = entry is not None and entry[:-1] == stamp
            hashes[str(file)] = entry if is_known else [*stamp, file_hash(file, sync=True)]
    except OSError as error:
        raise ModelError(f"{directory}: {error}") from None
    if hashes != known:
        with contextlib.suppress(OSError):  # it saves time alone
            temporary = cache.with_suffix(".tmp")
            temporary.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
            temporary.replace(cache)
    lines = [f"{Path(name).name} {entry[-1]}" for name, entry in hashes.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _known(cache: Path) -> dict[str, list]:
    try:
        return json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
