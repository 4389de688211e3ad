"""Lets the files of several folders import their neighbours by the same name: each gets the modules
of its own folder.

One folder is active at a time. Its modules and packages come after the standard library and
installed packages, and before all else on `sys.path`. Those of the other folders cannot be imported
then and are not in `sys.modules`, but they stay what they are for the files that have imported
them.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_OURS = ("configs", "policy", "rewards", "rl", "rollout")
_modules: dict[str, dict[str, types.ModuleType]] = {}  # of each folder that was active, by name
_hidden: dict[str, types.ModuleType] = {}  # others of the same names, while the folder is active
_active: _Neighbours | None = None


class _Neighbours:
    """Finds the modules of a folder. `names`: those of its files, and of its folders with files,
    that nothing installed has."""

    def __init__(self, folder: str):
        self.folder = folder
        self.appended = folder not in sys.path
        installed = [
            sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
        ]
        own = {file.stem for file in Path(folder).glob("*.py")}
        own |= {file.parent.name for file in Path(folder).glob("*/*.py")}
        own -= {*sys.stdlib_module_names, *_OURS}
        self.names = {name for name in own if PathFinder.find_spec(name, installed) is None}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a module of the folder, for `sys.meta_path`."""
        return PathFinder.find_spec(name, [self.folder]) if name in self.names else None

    def take_modules(self) -> dict[str, types.ModuleType]:
        """Removes the modules with a name of the folder from `sys.modules`, and returns them."""
        names = [name for name in sys.modules if name.partition(".")[0] in self.names]
        return {name: sys.modules.pop(name) for name in names}


def active() -> str | None:
    """Returns the folder that is active."""
    return None if _active is None else _active.folder


def activate(folder: str) -> None:
    """Makes a folder the active one, until another is."""
    global _active
    if active() == folder:
        return
    if _active is not None:
        _modules[_active.folder] = _active.take_modules()
        with suppress(ValueError):  # the code of a file may have removed it
            sys.meta_path.remove(_active)
        if _active.appended and _active.folder in sys.path:
            sys.path.remove(_active.folder)
    sys.modules.update(_hidden)
    _hidden.clear()
    _active = _Neighbours(folder)
    _hidden.update(_active.take_modules())
    sys.modules.update(_modules.get(folder, {}))
    sys.meta_path.insert(0, _active)
    if _active.appended:
        sys.path.append(folder)
