"""Locates the directory of a model or a tokenizer: a local folder, or files of the Hugging Face hub
in the local cache.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rewards.suggest import nearest_path
from rl.data.hub import COMMIT, PREFIX, HubName, fetch, hub_name
from rl.errors import DuetError, ModelError, ResourceError, no_room
from rl.remote.cache import fetched
from rl.remote.faults import RemoteError
from rl.remote.urls import is_remote

if TYPE_CHECKING:
    from policy.config import DecoderConfig
    from rl.config.model import ModelOptions
    from rollout.text.interface import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
VOCABULARY_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CONFIGURATION = (
    *("config.json", "adapter_config.json", "generation_config.json", *TOKENIZER_FILES),
    *(*VOCABULARY_FILES, *TEMPLATE_FILES, *PROCESSOR_FILES),
    *("LICENSE*", "NOTICE*"),
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

_FAILURE_S = 60.0
"""Seconds for which a repository that cannot be read is not asked for again: checks of a
configuration ask several times.
"""
_failures: dict[tuple[HubName, bool, str], tuple[float, Exception]] = {}

Part = Literal["model", "reward model", "tokenizer"]
"""Part of a run that a name stands for. Messages begin with it."""


def directory(source: str, *, weights: bool = False, part: Part = "model") -> Path | None:
    """Returns the directory of a model or tokenizer, or None for a name without files, such as a
    preset. That of an adapter stands for the adapter over its base. A GGUF file has one in the
    cache.

    For a URL, fetches these files to the cache of rl/remote/cache.py. For a repository on the hub,
    downloads configuration and tokenizer to the cache of
    huggingface_hub, with `weights` also safetensors. Other formats of weights are never read, since
    they are pickles. Raises ModelError for a repository that the hub or the cache does not have,
    ResourceError if the cache has no room.
    """
    if source.endswith(".gguf") and Path(source).is_file():
        return _of_gguf(source, part)
    if Path(source).is_dir():
        result = Path(source)
    elif is_remote(source):
        result = _of_url(source, weights, part)
    else:
        result = _on_hub(source, weights, part)
    if result is not None and part != "tokenizer":
        _fetch_base(result, weights, part)
    return result


def missing(name: str) -> ModelError:
    """Returns what to say of a name that a command takes for a model or a run, and that is
    neither."""
    return ModelError(
        f"{name}: no config.json there{nearest_path(name)}; name the folder of a run, a Hugging Face "
        "directory, a GGUF file, or a model on the Hugging Face hub as org/name"
    )


def _of_gguf(source: str, part: Part) -> Path:
    """Returns the directory of a GGUF file, in the cache. Raises ModelError."""
    from policy.huggingface import sources

    try:
        return sources.base_of(source)
    except ValueError as error:
        raise ModelError(f"{part} {error}") from None


def _fetch_base(adapter: Path, weights: bool, part: Part) -> None:
    """Downloads what is not here of the base of an adapter, if it is a model of the hub."""
    from policy.huggingface import sources

    try:
        name = sources.base_name(adapter)
    except ValueError as error:
        raise ModelError(f"{part} {adapter}: {error}") from None
    if name and not any(place.is_dir() for place in (adapter / name, Path(name))):
        try:
            _on_hub(name, weights, part)
        except ModelError as error:
            raise ModelError(f"{part} {adapter}: the base of the adapter: {error}") from None


def text_directory(model: Path) -> Path:
    """Returns the directory of the tokenizer of a model: of an adapter without one, its base.
    Raises ModelError for an adapter without a base."""
    from policy.huggingface import sources

    if any((model / name).is_file() for name in TOKENIZER_FILES):
        return model
    try:
        return sources.base_of(model)
    except ValueError as error:
        raise ModelError(f"model {model}: {error}") from None


def _of_url(source: str, weights: bool, part: Part) -> Path:
    """Returns the local copy of a model at a URL. Raises as `directory`, ConfigError for a URL that
    cannot be used."""
    from policy.huggingface import sources

    patterns = (*CONFIGURATION, *(WEIGHTS if weights else ()))
    try:
        if source.endswith(".gguf"):
            return _of_gguf(str(fetched(source)), part)
        copy = fetched(source, patterns)
    except RemoteError as error:
        raise ModelError(f"{part} {source}: {error}") from None
    if part != "tokenizer" and not sources.is_model(copy):
        raise ModelError(
            f"{part} {source}: there is no config.json below this URL; of a run, name its export: "
            f"{source.rstrip('/')}/export"
        )
    if weights and not any(copy.glob("*.safetensors")):
        raise ModelError(
            f"{part} {source}: there are no safetensors below this URL, the only weights that are "
            "read"
        )
    return copy


def _on_hub(source: str, weights: bool, part: Part) -> Path | None:
    """Returns the directory of a repository on the hub as `directory`; None for other names."""
    from policy.huggingface import sources

    repository = hub_name(source)
    if repository is None:
        return None
    from huggingface_hub import constants

    cache = str(constants.HF_HUB_CACHE)
    try:
        snapshot = _snapshot(repository, weights, cache)
    except Exception as error:  # errors of huggingface_hub, its network library and the file system
        if no_room(error):
            raise ResourceError(
                f"{part} {source}: {cache} has no room: {error}. Make room, or set HF_HUB_CACHE "
                "to another folder"
            ) from None
        raise ModelError(f"{part} {source}: {_unreachable(repository, cache, error)}") from None
    if part != "tokenizer" and not sources.is_model(snapshot):
        raise ModelError(
            f"{part} {source}: {snapshot} holds no config.json; {_download(repository)}"
        )
    if weights and not any(snapshot.glob("*.safetensors")):
        raise ModelError(
            f"{part} {source}: {snapshot} holds no safetensors, the only weights that are read; "
            f"{_download(repository)}, or name a model that has safetensors"
        )
    return snapshot


def copy_files(source: Path, names: Iterable[str], directory: Path) -> None:
    """Copies those of the named files that `source` has, byte for byte. Only `auto_map` is left out
    of configurations: it names Python files, which are never copied."""
    for name in names:
        if not (source / name).is_file():
            continue
        shutil.copyfile(source / name, directory / name)
        if name.endswith("_config.json"):
            keys = json.loads((directory / name).read_text(encoding="utf-8-sig"))
            if keys.pop("auto_map", None) is not None:
                write_keys(directory / name, keys)


def write_keys(file: Path, keys: Mapping[str, object]) -> None:
    """Writes a JSON file as transformers writes configurations."""
    file.write_text(json.dumps(keys, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_files(source: str, sections: dict | None = None) -> None:
    """Checks that a model's directory on this machine has a configuration that can be read, and
    complete weight files: reads config.json and the headers of the weights. A repository of the hub
    whose weights are not here passes. Raises ModelError."""
    from policy.huggingface import sources
    from policy.huggingface.tensorfiles import TensorFiles

    local = directory(source)
    if local is None:
        return
    try:
        sources.read_config(local, sections)
        if Path(source).is_dir():
            TensorFiles(sources.base_of(local))
    except ValueError as error:
        raise ModelError(f"model {source}: {error}") from None


def vocabulary_size(model: ModelOptions) -> int | None:
    """Returns the number of tokens of the model, or None if its configuration cannot be read."""
    config = _decoder(model)
    return None if config is None else config.vocab_size


def compressed_window(model: ModelOptions) -> int | None:
    """Returns the window, in tokens, of layers with compressed attention; None: the model has none,
    or its configuration cannot be read."""
    from policy.config import CompressedAttention

    config = _decoder(model)
    layers = () if config is None else config.layers
    return next(
        (spec.mixer.window for spec in layers if isinstance(spec.mixer, CompressedAttention)), None
    )


def _decoder(model: ModelOptions) -> DecoderConfig | None:
    """Returns the decoder of the model, or None if its configuration cannot be read."""
    from policy.huggingface import sources

    try:
        if (local := directory(model.source)) is not None:
            return sources.read_config(local, model.sections)
        return sources.preset(model.source, model.changes)
    except (ValueError, DuetError):
        return None


@dataclass(frozen=True)
class Positions:
    """How many positions a model was made for. learned: each has a trained vector, and there are no
    others."""

    number: int
    learned: bool

    def exceeded_by(self, tokens: int) -> str | None:
        """Returns what to say of so many tokens, or None if there is a position for each."""
        return (
            f"{tokens} is more than the {self.number} positions of this model"
            if tokens > self.number
            else None
        )


def positions(model: ModelOptions) -> Positions | None:
    """Returns the positions of a model; None if its configuration cannot be read or does not
    say."""
    config = _decoder(model)
    return None if config is None else positions_of(config)


def positions_of(config: DecoderConfig) -> Positions | None:
    """Returns the positions of a decoder; None if its configuration does not say."""
    if config.max_positions is not None:
        return Positions(config.max_positions, learned=True)
    hf = json.loads(config.hf)
    hf = hf.get("text_config", hf)
    number = hf.get("max_position_embeddings")
    if type(number) is not int:
        return None
    # The length of a context that was extended later: its rescaled rotary form says from which
    # length, and how far.
    ropes = [hf.get("rope_scaling"), hf.get("rope_parameters")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]
    for rope in ropes:
        if isinstance(rope, dict) and isinstance(factor := rope.get("factor"), int | float):
            number = max(
                number, int(factor * (rope.get("original_max_position_embeddings") or number))
            )
    return Positions(number, learned=False)


def ids_in_use(tokenizer: Tokenizer, model: ModelOptions) -> int:
    """Returns how many token ids a run may have: those of its tokenizer for which the model has an
    embedding. A tokenizer may be longer by tokens that no row uses."""
    size = vocabulary_size(model)
    return len(tokenizer) if size is None else min(len(tokenizer), size)


def pinned(source: str, part: Part = "model") -> str:
    """Returns a name on the hub with the commit that it stands for now, `hf://org/name@COMMIT`; any
    other source as it is.

    Raises as `directory`.
    """
    if is_remote(source):
        directory(source, part=part)
        return source
    repository = hub_name(source)
    if repository is None or (snapshot := directory(source, part=part)) is None:
        return source
    return (
        f"{PREFIX}{repository.name}@{snapshot.name}" if COMMIT.fullmatch(snapshot.name) else source
    )


def _snapshot(repository: HubName, weights: bool, cache: str) -> Path:
    """Returns the folder of the repository's files in `cache`. A process asks for it once."""
    key = (repository, weights, cache)
    if key in _failures and time.monotonic() - _failures[key][0] < _FAILURE_S:
        raise _failures[key][1]
    try:
        return _fetched(*key)
    except Exception as error:
        _failures[key] = (time.monotonic(), error)
        raise


@functools.cache
def _fetched(repository: HubName, weights: bool, cache: str) -> Path:
    if weights:  # of the same commit as the configuration, which was read before
        commit = _snapshot(repository, False, cache).name
        repository = repository._replace(
            revision=commit if COMMIT.fullmatch(commit) else repository.revision
        )
    return fetch(repository, [*CONFIGURATION, *(WEIGHTS if weights else ())], cache)


def _unreachable(repository: HubName, cache: str, error: Exception) -> str:
    """Returns the message about a repository that neither the hub nor the cache gives."""
    from huggingface_hub import constants

    near = nearest_path(repository.name)
    here = f"no such directory or preset here, so looked for on the Hugging Face hub{near}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{here}. This process is offline (HF_HUB_OFFLINE), and the cache {cache} does not "
            "hold all its files. "
            f"Either {_download(repository)}, or unset HF_HUB_OFFLINE, or name a local directory"
        )
    return (
        f"{here}, which did not give it: {type(error).__name__}: {str(error).strip()}. The cache "
        f"{cache} does not hold it either. Check the name and the connection, log in with `hf "
        f"auth login` if it is gated or private, {_download(repository)}, or name a local "
        "directory"
    )


def _download(repository: HubName) -> str:
    """Returns the advice to download a repository."""
    chosen = f" --revision {repository.revision}" if repository.revision else ""
    return (
        f"run `hf download {repository.name}{chosen}` where there is a connection, with the "
        "same HF_HUB_CACHE"
    )
