"""Uploads an export to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.text import quoted
from rl.errors import ConfigError, ResourceError
from rl.export.folder import MARKER

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_OWN = {".gitattributes"}  # what the hub puts into a new repository


@dataclass(frozen=True)
class HubRepository:
    """A repository of the hub, `org/name`. private: a new one is seen by its owners alone. force:
    one that has files gets a commit with those of the export."""

    name: str
    private: bool = False
    force: bool = False


def check(target: HubRepository) -> None:
    """Raises ConfigError for a name that is none, without a login, and for a repository that has
    files."""
    import huggingface_hub
    from huggingface_hub import constants

    option = f"--push {target.name}"
    if _NAME.fullmatch(target.name) is None:
        raise ConfigError(f"{option}: write the name of a repository as org/name")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{option}: this process is offline; unset HF_HUB_OFFLINE")
    if huggingface_hub.get_token() is None:
        raise ConfigError(f"{option}: no login; set HF_TOKEN, or type: hf auth login")
    api = huggingface_hub.HfApi()
    try:
        api.whoami()
        exists = api.repo_exists(target.name)
        files = set(api.list_repo_files(target.name)) - _OWN if exists else set()
    except Exception as error:  # of huggingface_hub and its network library
        raise ConfigError(f"{option}: {_reason(error)}") from None
    if files and not target.force:
        raise ConfigError(
            f"{option}: the repository has files ({min(files)}); name a new one, or add a commit to "
            "it with --force"
        )


def push(target: HubRepository, directory: Path) -> str:
    """Uploads the files of a directory in one commit and returns the address of the repository.
    Raises ResourceError if the hub does not take them; the directory stays."""
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        api.create_repo(target.name, private=target.private, exist_ok=True)
        api.upload_folder(
            repo_id=target.name,
            folder_path=str(directory),
            commit_message="Export of duet-rl",
            ignore_patterns=[MARKER],
        )
    except Exception as error:  # of huggingface_hub and its network library
        raise ResourceError(
            f"--push {target.name}: {_reason(error)}. The export is in {directory}; upload it with "
            f"`hf upload {target.name} {quoted(directory)} --exclude {MARKER}`"
        ) from None
    return f"{api.endpoint}/{target.name}"


def _reason(error: Exception) -> str:
    """Returns what an error says, without what looks like a token."""
    text = re.sub(r"hf_\w+", "***", str(error).strip())
    return f"{type(error).__name__}: {text}"
