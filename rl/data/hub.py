"""Reads names of repositories on the Hugging Face hub, and fetches their files to the local
cache."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PREFIX = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Patterns match across folders. Files in folders are other formats of the same weights, and
# consolidated.safetensors is a copy of them.
IGNORED = ("*/*", "consolidated*")
ANSWER_S = 10.0
"""Seconds in which the hub has to answer the first request; huggingface_hub itself sets no limit to
it."""

_PART = r"\w(?:[\w-]|\.(?!\.))*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?:@({_PART}(?:/{_PART})*))?", re.ASCII)
_FILE_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst", ".arrow")


class HubName(NamedTuple):
    """A repository and the branch, tag or commit of it; None: its main branch."""

    name: str
    revision: str | None


def hub_name(text: str, *, alone: bool = False) -> HubName | None:
    """Returns what `text` names on the hub: `org/name` or `org/name@revision`, also after `hf://`;
    None for other text.

    Without `hf://` a path that exists comes first, and `data/trian` is a misspelt path if there is
    a folder `data`. alone: a name without organisation counts too. Datasets have such names; a
    model's would be a preset.
    """
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        return None
    if not text.startswith(PREFIX):
        misspelt = Path(text).parent.is_dir() if "/" in text else not alone
        if misspelt or Path(text).exists() or text.endswith(_FILE_ENDINGS):
            return None
    return HubName(match[1], match[2])


def fetch(repository: HubName, files: Sequence[str], cache: str) -> Path:
    """Returns the snapshot in `cache` with the files of these patterns, after downloading what it
    lacks.

    Downloads nothing for a commit that the cache holds, and under HF_HUB_OFFLINE. If the hub does
    not answer within ANSWER_S, takes the newest snapshot of the branch or tag in the cache. Raises
    what huggingface_hub and its network library raise if there is none.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    name, revision = repository
    how = {
        "revision": revision,
        "cache_dir": cache,
        "allow_patterns": [*files],
        "ignore_patterns": [*IGNORED],
    }

    def cached() -> Path:
        return Path(snapshot_download(name, local_files_only=True, **how))

    if constants.HF_HUB_OFFLINE:
        return cached()
    if revision is not None and COMMIT.fullmatch(revision):
        try:
            if has_weights(snapshot := cached()) or not any(
                "safetensors" in pattern for pattern in files
            ):
                return snapshot
        except Exception:  # not in the cache, or a part of it: the hub has it
            pass
    try:
        # One request that is not repeated: without a network `snapshot_download` repeats its
        # requests for half a minute.
        HfApi().repo_info(name, revision=revision, timeout=ANSWER_S)
    except Exception:
        try:
            return cached()
        except Exception:  # the first error says why
            pass
        raise
    return Path(snapshot_download(name, **how))


def cached_snapshots(repository: HubName) -> list[Path]:
    """Returns the snapshots of a model repository in the local cache: the one of its commit, else
    all of them."""
    from huggingface_hub import constants

    folder = (
        Path(constants.HF_HUB_CACHE) / f"models--{repository.name.replace('/', '--')}" / "snapshots"
    )
    revision = repository.revision or ""
    return sorted(folder.glob(revision if COMMIT.fullmatch(revision) else "*"))


def has_weights(directory: Path) -> bool:
    """Tells whether a directory holds safetensors, all of those that its index lists."""
    indices = list(directory.glob("*.safetensors.index.json"))
    try:
        named = {
            file
            for index in indices
            for file in json.loads(index.read_text())["weight_map"].values()
        }
    except (ValueError, KeyError, AttributeError):
        return False
    return all((directory / file).is_file() for file in named) and any(
        directory.glob("*.safetensors")
    )
