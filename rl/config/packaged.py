"""Finds the configuration files that are installed with the package: runs, model presets and algorithm presets."""

from __future__ import annotations

from pathlib import Path

# configs/ lies beside this package in a checkout and in an installation alike. importlib.resources does not find it after
# `pip install -e` on Python 3.11: a folder without Python files is a namespace package, and `files` raises
# NotADirectoryError on the finder's placeholder.
PACKAGED = Path(__file__).resolve().parents[2] / "configs"


def packaged(name: str | Path) -> Path | None:
    """The packaged configuration that `tiny`, `tiny.yml` or `configs/tiny.yml` names, or None."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return None
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (PACKAGED / inside, PACKAGED / f"{inside}.yml"):
        if candidate.is_file():
            return candidate
    return None


def run_names() -> list[str]:
    """Lists the file names of the packaged runs."""
    return [path.name for path in PACKAGED.glob("*.yml")]


def model_presets() -> dict[str, Path]:
    """Name -> file of the architectures in configs/models/."""
    return {path.stem: path for path in sorted((PACKAGED / "models").glob("*.yml"))}


def presets() -> dict[str, Path]:
    """Name -> file of the settings in configs/presets/: an algorithm with a paper's options, and keys of its stage."""
    return {path.stem: path for path in sorted((PACKAGED / "presets").glob("*.yml"))}
