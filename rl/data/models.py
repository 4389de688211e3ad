"""Locates the directory of a model: a local folder, or files of the Hugging Face hub in the local cache."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from policy.huggingface import sources
from rl.errors import ModelError, ResourceError, no_room

PREFIX = "hf://"
CONFIGURATION = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Patterns match across folders. Files in folders are other formats of the same weights, and consolidated.safetensors
# is a copy of them.
IGNORED = ("*/*", "consolidated*")


def is_hub_name(source: str) -> bool:
    """Tells whether `source` names a model on the Hugging Face hub: `org/name`, `org/name@revision`, or either after
    `hf://`.

    Presets and existing directories come first, and `models/qwen` is a misspelt path if there is a folder `models`.
    """
    if Path(source).exists() or source in sources.presets():
        return False
    if source.startswith(PREFIX):
        return _parts(source) is not None
    return _parts(source) is not None and "/" in source and not Path(source).parent.is_dir()


def directory(source: str, *, weights: bool = False) -> Path | None:
    """Returns the directory of a model, or None for a name without files, such as a preset.

    For a model on the hub, downloads configuration and tokenizer to the cache of huggingface_hub, with `weights` also
    safetensors. Other formats of weights are never read, since they are pickles. Raises ModelError for a model that
    the hub or the cache does not have, ResourceError if the cache has no room.
    """
    if Path(source).is_dir():
        return Path(source)
    if not is_hub_name(source):
        return None
    from huggingface_hub import constants

    return _snapshot(source, weights, str(constants.HF_HUB_CACHE))


def _parts(source: str) -> tuple[str, str | None] | None:
    """Returns (name, revision or None) of a name on the hub, or None for any other text."""
    part = r"[A-Za-z0-9](?:[\w-]|\.(?!\.))*"
    match = re.fullmatch(rf"({part}(?:/{part})?)(?:@({part}(?:/{part})*))?", source.removeprefix(PREFIX))
    return (match[1], match[2]) if match else None


@functools.cache
def _snapshot(source: str, weights: bool, cache: str) -> Path:
    """Returns the folder of the hub's files in `cache`."""
    from huggingface_hub import snapshot_download

    parts = _parts(source)
    assert parts is not None  # is_hub_name
    name, revision = parts
    if weights:  # of the same commit as the configuration, which was read before
        commit = _snapshot(source, False, cache).name
        revision = commit if re.fullmatch(r"[0-9a-f]{40}", commit) else revision
    files = [*CONFIGURATION, *(WEIGHTS if weights else ())]
    try:
        snapshot = Path(
            snapshot_download(
                name, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=list(IGNORED)
            )
        )
    except Exception as error:  # errors of huggingface_hub, its network library and the file system
        if no_room(error):
            raise ResourceError(
                f"model {source}: {cache} has no room: {error}. Make room, or set HF_HUB_CACHE to another folder"
            ) from None
        raise ModelError(_unreachable(source, name, cache, error)) from None
    if not (snapshot / "config.json").is_file():
        raise ModelError(f"model {source}: {snapshot} holds no config.json; {_download(name, revision)}")
    if weights and not any(snapshot.glob("*.safetensors")):
        raise ModelError(
            f"model {source}: {snapshot} holds no safetensors, the only weights that are read; "
            f"{_download(name, revision)}, or name a model that has safetensors"
        )
    return snapshot


def _unreachable(source: str, name: str, cache: str, error: Exception) -> str:
    """Returns the message about a model that neither the hub nor the cache gives."""
    from huggingface_hub import constants

    here = f"model {source}: no such directory or preset here, so looked for on the Hugging Face hub"
    revision = (_parts(source) or (name, None))[1]
    if constants.HF_HUB_OFFLINE:
        return (
            f"{here}. This process is offline (HF_HUB_OFFLINE), and the cache {cache} does not hold all its files. "
            f"Either {_download(name, revision)}, or unset HF_HUB_OFFLINE, or set model to a local directory"
        )
    return (
        f"{here}, which did not give it: {type(error).__name__}: {error}. Check the name and the connection, log in "
        "with `hf auth login` if the model is gated, or set model to a local directory"
    )


def _download(name: str, revision: str | None) -> str:
    """Returns the advice to download a model."""
    chosen = f" --revision {revision}" if revision else ""
    return f"run `hf download {name}{chosen}` where there is a connection, with the same HF_HUB_CACHE"
