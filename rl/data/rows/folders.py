"""The data files of a folder, and the split of each by its name, as the package `datasets` assigns
them."""

from __future__ import annotations

import re
from pathlib import Path

from rl.data.rows.files import READERS, Rows, read_file
from rl.errors import DataError

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the name of a file or of its folder, and the split that they stand for."""

_SHARD = re.compile(r"(?P<split>\w+(?:[.-]\w+)*)-\d{5}-of-\d{5}")
"""The name of a file that `datasets` writes to the folder `data` of a repository of the hub."""

_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
"""JSON files that describe a dataset."""

_PACKED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".arrow")
"""Suffixes of data files that only the package `datasets` reads."""


def has_own_files(directory: Path) -> bool:
    """Returns whether a folder consists of files that read_file reads.

    The package `datasets` reads others: a card (README.md) that names the files of each
    configuration, a folder of pictures or sounds with `metadata.jsonl`, and packed files. Raises
    DataError for a folder with files of both kinds, of which `datasets` would read those that are
    more.
    """
    files = _files(directory)
    own = [file for file in files if file.suffix.lower() in READERS]
    packed = [file for file in files if file.suffix.lower() in _PACKED]
    if own and packed:
        raise DataError(
            f"{directory}: holds {own[0].relative_to(directory)} and "
            f"{packed[0].relative_to(directory)}; unpack the "
            "files, or put those of one kind into a folder of their own"
        )
    described = any(file.stem == "metadata" for file in own) or _has_card(directory)
    return bool(own) and not described


def read_folder(directory: Path, split: str) -> Rows:
    """Reads all files of a split, in the order of their names, each in its own form.

    split: its name, or any of SPLITS. Raises DataError for a folder without it, and for a file that
    belongs to no split where others do.
    """
    files = files_of_splits(directory)
    requested = split if split in files else SPLITS.get(split, split)
    if requested not in files:
        raise DataError(
            f"{directory}: no split {split!r}, there are {', '.join(files)}; set data.split"
        )
    for file in files[requested]:
        yield from read_file(file)


def files_of_splits(directory: Path) -> dict[str, list[Path]]:
    """Returns the files of each split. Files of which none names a split are those of `train`."""
    own = [file for file in _files(directory) if file.suffix.lower() in READERS]
    named: dict[str, list[Path]] = {}
    unnamed = []
    for file in own:
        split = _split_of(file.relative_to(directory))
        if split is None:
            unnamed.append(file)
        else:
            named.setdefault(split, []).append(file)
    if named and unnamed:
        raise DataError(
            f"{directory}: {unnamed[0].relative_to(directory)} belongs to no split, because its "
            f"name has none of the words {', '.join(SPLITS)}, and other names do. Rename it, move "
            "it away, or name one file in data.path"
        )
    return named or {"train": unnamed}


def _split_of(file: Path) -> str | None:
    """Returns the split that the path of a file names, the last one if there are several."""
    shard = _SHARD.fullmatch(file.stem)
    if shard and file.parent.name == "data":
        return SPLITS.get(shard["split"], shard["split"])
    words = re.split(r"[^a-z]+", file.as_posix().lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), None)


def _files(directory: Path) -> list[Path]:
    """Returns the files in a folder and the folders in it, without hidden ones and descriptions."""

    def is_hidden(file: Path) -> bool:
        return any(part.startswith((".", "__")) for part in file.relative_to(directory).parts)

    paths = (
        file for file in directory.rglob("*") if file.is_file() and file.name not in _DESCRIPTIONS
    )
    return sorted(file for file in paths if not is_hidden(file))


def _has_card(directory: Path) -> bool:
    """Returns whether README.md names the files of a dataset in its YAML head."""
    card = directory / "README.md"
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    head = text.split("---")[1] if text.startswith("---") else ""
    return "data_files:" in head
