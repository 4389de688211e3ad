"""The export of a model directory: its weights, and copies of its other files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import generation_config, sources
from policy.huggingface.tensorfiles import ModelFileError
from rl.config.run import ExportOptions, RunConfig
from rl.data import models
from rl.data.hub import hub_name
from rl.errors import ModelError
from rl.export.request import Dtype
from rl.stages.export import prompts
from rl.stages.export.card import Origin
from rl.stages.export.exportable import AdapterBase, Exportable

if TYPE_CHECKING:
    from policy.model import Graph, Model
    from policy.runtime import WeightType
    from rollout.text.interface import Tokenizer

_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class BaseFormat:
    """In how many bits the weights under an adapter are stored; None: as floats."""

    bits: WeightType | None = None
    block: int | None = 64


@dataclass
class ExportedDirectory(Exportable):
    """The model of a directory, which may be an adapter over a base. chosen: which forms of an
    adapter are written. name: as a person named the model. run: the folder of the run whose final
    weights these are, with its configuration; None: unknown."""

    directory: Path
    model: Model
    chosen: ExportOptions
    name: str
    run: Path | None = None
    config: RunConfig | None = None

    @property
    def forms(self) -> ExportOptions:
        return self.chosen

    def source(self) -> Path | None:
        return sources.base_of(self.directory)

    @cached_property
    def _texts(self) -> Path:
        return models.text_directory(self.directory)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the directory; None if it has none."""
        from rollout.text.tokenizer import load_tokenizer

        if not any((self._texts / name).is_file() for name in models.TOKENIZER_FILES):
            return None
        try:
            return load_tokenizer(self._texts)
        except (ValueError, OSError) as error:
            raise ModelError(f"{self._texts}: {error}") from None

    def generation(self) -> dict[str, Any]:
        """Returns the keys of the directory's own file, with all stops that the directory names."""
        from rollout.text.tokenizer import stop_ids

        own = next(
            filter(None, map(generation_config.read, (self.directory, self._texts))),
            generation_config.read(sources.base_of(self.directory)),
        )
        if self.tokenizer is None:
            return generation_config.merged(own, generation_config.stop_ids(self.directory), {}, {})
        stops = stop_ids(self.tokenizer, self._texts)
        ids = {
            name: own.get(name, getattr(self.tokenizer, name, None))
            for name in ("bos_token_id", "pad_token_id")
        }
        return generation_config.merged(own, stops, ids, {})

    def write_texts(self, directory: Path, *, with_towers: bool) -> None:
        names = (
            *(*models.TOKENIZER_FILES, *models.VOCABULARY_FILES),
            *(*models.TEMPLATE_FILES, *models.PROCESSOR_FILES),
        )
        models.copy_files(self._texts, names, directory)
        templates = self._texts / _TEMPLATES
        if templates.is_dir():
            shutil.copytree(templates, directory / _TEMPLATES, dirs_exist_ok=True)

    def base(self, directory: Path, write: Callable[[Path], None]) -> AdapterBase:
        base = sources.base_of(self.directory)
        hf = sources.read_object(self.directory / "adapter_config.json")
        name = str(hf.get("base_model_name_or_path") or "")
        is_here = base == self.directory or any(
            place.is_dir() for place in (self.directory / name, Path(name))
        )
        keys = {"base_model_name_or_path": str(base.resolve()) if is_here else name}
        if not is_here and isinstance(hf.get("revision"), str):
            keys["revision"] = hf["revision"]
        return AdapterBase(base, keys, name)

    def prompts(self) -> Sequence[Sequence[int]]:
        if self.run is not None and self.tokenizer is not None:
            return prompts.of_run(self.run, self.model, self.tokenizer)
        return prompts.of_tokenizer(self.model, self.tokenizer)

    def origin(self) -> Origin:
        named = self.name if self.config is None else self.config.model.source
        repository = None if Path(named).exists() else hub_name(named)
        base = None if repository is None else repository.name
        title = self.run.name if self.run is not None else Path(self.name).name
        return Origin(title, base, self.source(), self.run, self.config)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def stored_dtype(directory: Path) -> Dtype:
    """Returns the type in which the weights of a directory are written again: bfloat16 for
    bfloat16, float32 for all others."""
    hf = json.loads((sources.base_of(directory) / "config.json").read_text(encoding="utf-8-sig"))
    text = hf.get("text_config")
    names = [hf.get("dtype"), hf.get("torch_dtype")]
    if isinstance(text, dict):
        names += [text.get("dtype"), text.get("torch_dtype")]
    return "bfloat16" if next(filter(None, names), None) == "bfloat16" else "float32"


def read(directory: Path, dtype: Dtype, base: BaseFormat) -> Model:
    """Reads the model of a directory. An adapter stays one, over its base. Raises ModelError."""
    from policy.mesh.sharding import layout
    from policy.model import Graph, Model
    from policy.runtime import Runtime

    try:
        config = sources.read_config(directory)
        runtime = Runtime(dtype=dtype, param_dtype=dtype)
        adapted = sources.has_adapter(directory)
        if adapted:
            runtime = replace(runtime, base_weights=base.bits, base_block=base.block)
        graph = Graph(config, runtime, layout({"fsdp": -1}))
        from policy.huggingface import model_directory

        weights = sources.base_of(directory)
        params = model_directory.read_weights(weights, graph)[0]
        return _with_adapter(directory, graph, params) if adapted else Model(graph, params)
    except (ModelFileError, UnsupportedModel, ValueError) as error:
        raise ModelError(f"{directory}: {error}") from None


def _with_adapter(directory: Path, graph: Graph, params: dict[str, Any]) -> Model:
    from policy.adapters.learning import Adapters
    from policy.huggingface.peft.reader import read_adapter
    from policy.huggingface.reload import WeightsOnHost
    from policy.mesh import processes
    from policy.model import Model

    adapter = read_adapter(directory, graph, WeightsOnHost(graph, params))
    graph = graph.with_runtime(adapter=adapter.spec)
    adapters = Adapters(graph)
    arrays = {
        path: processes.device_put_global(
            adapter.params[path].astype(adapters.shapes[path].dtype), adapters.shardings[path]
        )
        for path in adapters.sizes
    }
    return Model(graph, {**params, **arrays})
