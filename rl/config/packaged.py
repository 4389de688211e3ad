"""Locates the configuration files of the package: runs, model presets and algorithm presets."""

from __future__ import annotations

from pathlib import Path

# configs/ is next to the package `rl`, in a checkout and in an installation. importlib.resources
# cannot open it after `pip install -e` on Python 3.11: a folder without Python files is a namespace
# package, and `files` raises NotADirectoryError.
PACKAGED = Path(__file__).resolve().parents[2] / "configs"


def packaged(name: str | Path) -> Path | None:
    """Returns the packaged configuration that `tiny`, `tiny.yml` or `configs/tiny.yml` names, or
    None."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return None
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (PACKAGED / inside, PACKAGED / f"{inside}.yml"):
        if candidate.is_file():
            return candidate
    return None


def run_names() -> list[str]:
    """Returns the file names of the packaged runs."""
    return [path.name for path in PACKAGED.glob("*.yml")]


def model_presets() -> dict[str, Path]:
    """Returns name -> file of the architectures in configs/models/."""
    return {path.stem: path for path in sorted((PACKAGED / "models").glob("*.yml"))}


def presets() -> dict[str, Path]:
    """Returns name -> file of configs/presets/: an algorithm with the options of a paper, and keys
    of its stage."""
    return {path.stem: path for path in sorted((PACKAGED / "presets").glob("*.yml"))}
