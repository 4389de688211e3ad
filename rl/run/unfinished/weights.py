"""The policy of a run at one of its checkpoints, for `rl chat` and `rl generate`. Reads no other
arrays: neither moments, nor a reference, nor a critic. The run may go on meanwhile."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from policy.adapters.learning import Adapters
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface.tensorfiles import ModelFileError
from policy.media import is_tower
from policy.mesh.sharding import layout
from policy.model import Graph, Model
from policy.runtime import Runtime
from rewards.text import quoted
from rl.data import models
from rl.data.media import read_processors
from rl.data.tokenizer import read_tokenizer
from rl.errors import ModelError
from rl.run import build, load
from rl.run.arrays import ArrayDescription, ArrayStore
from rl.run.checkpoint import ARRAYS, CheckpointError, damaged, none_undamaged
from rl.run.manifest import HOST, examine
from rl.run.resume.adapters import trains_adapter, with_adapter
from rl.run.resume.base import check
from rl.run.unfinished.checkpoints import StoredCheckpoint, chosen
from rl.run.unfinished.stop import in_use
from rl.stages import kind_of
from rl.stages.export import generation
from rl.stages.export.base import directory_of
from rollout.media.processors import Processors

if TYPE_CHECKING:
    from rollout.text.interface import Tokenizer

_PREFIX = "policy/params/"  # of the policy's weights in the checkpoints of every stage
_TRIES = 10
_log = logging.getLogger("duet.checkpoint")


class CheckpointWeights:
    """The weights of a run after a step, or of its newest checkpoint.

    Raises ConfigError for a configuration that cannot be read and for a step without a checkpoint,
    ModelError for a run without checkpoints and for a model or tokenizer that cannot be read.
    """

    def __init__(self, directory: Path, step: str | None = None):
        self.directory = directory
        self.config = load.saved(directory)
        self._step = step
        self._warned: set[Path] = set()
        self.checkpoint: StoredCheckpoint | None = None  # the one that was read
        chosen(directory, self.config, step)  # refuses a step before prompts are read

    @property
    def place(self) -> str:
        """Returns the checkpoint that `load` reads, if it is not damaged, as --step takes it:
        STAGE:N."""
        first = chosen(self.directory, self.config, self._step)[0]
        return f"{self.config.stage_names[first.stage]}:{first.step}"

    @cached_property
    def _tokenizer(self) -> tuple[Tokenizer, tuple[int, ...]]:
        return read_tokenizer(self.config)

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the run."""
        return self._tokenizer[0]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the token ids that end a completion, those that an export would name."""
        return generation.last_params(self.config, self._tokenizer[1]).stop_token_ids

    @property
    def default_stops(self) -> tuple[int, ...]:
        """Returns the token ids that end a completion where a stage names none."""
        return self._tokenizer[1]

    @property
    def has_towers(self) -> bool:
        """Whether the checkpoint holds towers of pictures or sounds."""
        newest = chosen(self.directory, self.config, self._step)[0]
        manifest, _ = examine(newest.path, hashes=False)
        names = manifest["arrays"] if manifest is not None else ()
        return any(is_tower(name.removeprefix(_PREFIX)) for name in names)

    @property
    def positions(self) -> models.Positions | None:
        """Returns the positions that the model was made for."""
        return models.positions(self.config.model)

    def processors(self, tokenizer: Tokenizer) -> Processors | None:
        """Returns what reads pictures and sounds; None if the model has no towers."""
        return read_processors(self.config, tokenizer)

    def load(self, dtype: Literal["float32", "bfloat16"], *, media: bool = False) -> Model:
        """Reads the newest checkpoint that is not damaged, or that of the step, and says on
        standard error which it is. `media`: with the towers of pictures and sounds.

        Raises ModelError for damaged files, and for towers that the checkpoint does not hold.
        """
        graph = self._graph(dtype, media)
        for _ in range(_TRIES):  # the run removes old checkpoints while it goes on
            model = self._newest(graph)
            if model is not None:
                return model
        raise ModelError(
            f"{self.directory}: each checkpoint was removed before it was read. Raise "
            "run.keep_checkpoints or run.checkpoint_every"
        )

    def _graph(self, dtype: Literal["float32", "bfloat16"], media: bool) -> Graph:
        try:
            decoder = build.decoder_of(self.config.model, self.tokenizer, media)[0]
            options = self.config.model
            runtime = Runtime(
                dtype=dtype,
                param_dtype=dtype,
                base_weights=options.base_weights,
                base_block=options.base_block,
            )
            return Graph(decoder, runtime, layout({"fsdp": -1}))
        except (ModelFileError, UnsupportedModel, ValueError) as error:
            raise ModelError(f"model {self.config.model.source}: {error}") from None

    def _newest(self, graph: Graph) -> Model | None:
        """Reads the first good one of the chosen checkpoints. Returns None if the run removed it
        meanwhile."""
        problems = []
        for each in chosen(self.directory, self.config, self._step):
            manifest, wrong = examine(each.path)
            if not each.path.is_dir():
                return None
            if manifest is not None and not wrong:
                return self._read(each, manifest["arrays"], graph)
            problems.append(damaged(each.number, each.path, wrong))
            if self._step is None and each.path not in self._warned:
                self._warned.add(each.path)
                _log.warning("%s. An earlier checkpoint is looked for.", problems[-1])
        raise none_undamaged(problems, "Name another one with --step, or another model.")

    def _read(
        self, checkpoint: StoredCheckpoint, arrays: Mapping[str, ArrayDescription], graph: Graph
    ) -> Model | None:
        base = {}
        shapes = graph.shapes
        shardings = {path: graph.sharding(path) for path in shapes}
        if trains_adapter(self.config, checkpoint.stage):
            graph = with_adapter(graph, self.config.model)
            base = self._base(checkpoint, graph)
            adapters = Adapters(graph)
            shapes = adapters.shapes
            shardings = adapters.shardings
        template = {
            f"{_PREFIX}{path}": jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=shardings[path]
            )
            for path, shape in shapes.items()
        }
        _check(checkpoint.path, arrays, template)
        self.checkpoint = checkpoint
        print(self._line(checkpoint), file=sys.stderr, flush=True)
        store = ArrayStore()
        try:
            read = store.read(checkpoint.path / ARRAYS, template, partial=True)
        except Exception:
            if checkpoint.path.is_dir():
                raise
            return None
        finally:
            store.close()
        own = {name.removeprefix(_PREFIX): array for name, array in read.items()}
        return Model(graph, {**base, **own})

    def _base(self, checkpoint: StoredCheckpoint, graph: Graph) -> dict[str, Any]:
        """Returns the weights under the adapter of a checkpoint. Raises ModelError if they are
        other ones than it was trained over."""
        host = json.loads((checkpoint.path / HOST).read_text(encoding="utf-8"))
        check(self.config, graph, host, files_only=True)
        directory = directory_of(self.config)
        return build.read_model(self.config, graph, self.tokenizer, directory).params

    def _line(self, checkpoint: StoredCheckpoint) -> str:
        stage = self.config.stages[checkpoint.stage]
        name = self.config.stage_names[checkpoint.stage]
        text = (
            f"{self.directory}: the weights after step {checkpoint.step} of {checkpoint.steps} "
            f"of {name}"
        )
        if not kind_of(stage).trains_policy:
            text += ", which trains a reward model: the policy is as it was before"
        if in_use(self.directory):
            return f"{text}. The run goes on"
        ended = (self.directory / "export").is_dir()
        return (
            text
            if ended
            else f"{text}. The run is not finished: `rl-train {quoted(self.directory)}` continues "
            "it"
        )


def _check(
    path: Path,
    stored: Mapping[str, ArrayDescription],
    requested: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raises ModelError for towers that a checkpoint lacks, CheckpointError for other weights, or
    of other shapes."""
    for name, array in requested.items():
        if name not in stored and is_tower(name.removeprefix(_PREFIX)):
            raise ModelError(
                f"{path}: the run reads text only, so its checkpoints hold no towers of pictures "
                "and sounds; its export will have them"
            )
        if name not in stored or tuple(stored[name]["shape"]) != array.shape:
            here = stored[name]["shape"] if name in stored else "missing"
            raise CheckpointError(
                f"{path}: {name.removeprefix(_PREFIX)}: {here}, and {list(array.shape)} by the "
                "run's config.yml and model"
            )
