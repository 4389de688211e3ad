"""The main module of processes that a reward starts with the method `spawn` or `forkserver` of
multiprocessing.

They import the functions that they are to call by the name of their module. Reward files have names
that only the worker knows, and their neighbours lie in the active folder: the environment has both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec

from rewards.files import neighbours

VARIABLE = "DUET_REWARD_FILES"


class _RewardFiles:
    """Finds reward files by the names that their modules have in the worker."""

    def __init__(self, files: dict[str, str]):
        self._files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(name, self._files[name])
            if name in self._files
            else None
        )


def announce(files: dict[str, str]) -> None:
    """Tells processes that this one will start which reward files it has loaded, by the name of
    their module."""
    os.environ[VARIABLE] = json.dumps({"files": files, "folder": neighbours.active()})


def _prepare() -> None:
    told = json.loads(os.environ.get(VARIABLE, "{}"))
    if folder := told.get("folder"):
        neighbours.activate(folder)
    sys.meta_path.insert(0, _RewardFiles(told.get("files", {})))


if __name__ == "__mp_main__":
    _prepare()
