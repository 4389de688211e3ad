"""Reads and writes generation_config.json, which tells transformers and servers how a model
generates and where it stops. Free of jax."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy import families
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from policy.json_types import DecodedKeys, JsonObject

CONFIG = "config.json"
FILE = "generation_config.json"
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
"""Keys that determine how a token is drawn."""


def read(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the keys of a directory's generation_config.json, none if it has no such file.

    Raises ModelFileError for a file that holds no JSON object.
    """
    file = Path(directory) / FILE
    return sources.read_object(file) if file.is_file() else {}


def stop_ids(directory: str | os.PathLike) -> tuple[int, ...]:
    """Returns the token ids that end a completion of the model of a directory: those of
    generation_config.json; where it names none, those of config.json.

    So it is in transformers, except that version 5.24 does not stop at all where
    generation_config.json is there and names none. Raises as `declared_stops`.
    """
    declared = declared_stops(directory)
    return declared.get(FILE) or declared.get(CONFIG) or ()


def declared_stops(directory: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """Returns the ends of sequence that the files of a directory name, by file; a file without any
    is left out.

    A multimodal config.json without ends of its own has those of its text model. Raises
    ModelFileError for a file that holds no JSON object and for `eos_token_id` that is no token id
    and no list of them.
    """
    declared: dict[str, tuple[int, ...]] = {}
    file = Path(directory) / CONFIG
    if file.is_file():
        outer = sources.read_object(file)
        model = families.single_model(outer)
        inner = model.get("text_config")
        each = (_ids(file, keys) for keys in (outer, model, inner) if isinstance(keys, dict))
        declared[CONFIG] = next(filter(None, each), ())
    declared[FILE] = _ids(Path(directory) / FILE, read(directory))
    return {name: ids for name, ids in declared.items() if ids}


def _ids(file: Path, keys: DecodedKeys) -> tuple[int, ...]:
    """Returns the ids under `eos_token_id`, which is null, an id or a list of ids. Negative ones
    stand for no token."""
    value = keys.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if type(each) is not int or each >= 2**31:
            raise ModelFileError(
                f"{file}: eos_token_id: {json.dumps(value)} is no token id and no list of token ids"
            )
    return tuple(each for each in ids if each >= 0)


def write(directory: str | os.PathLike, keys: JsonObject) -> None:
    """Writes the generation_config.json of a directory, keys in alphabetical order."""
    text = json.dumps(dict(keys), indent=2, sort_keys=True, ensure_ascii=False)
    (Path(directory) / FILE).write_text(text + "\n", encoding="utf-8")


def merged(
    source: JsonObject,
    stops: tuple[int, ...],
    ids: Mapping[str, int | None],
    sampling: Mapping[str, int | float],
) -> dict[str, Any]:
    """Returns the keys of a trained model: those of its source, with these in their place.

    Args:
        source: keys of the generation_config.json that training started from.
        stops: all token ids that end a completion.
        ids: `bos_token_id` and `pad_token_id`; None: unknown, the source's is kept.
        sampling: `temperature`, `top_k`, `top_p` and `min_p`, which replace all keys of SAMPLING;
        empty: they stay.
    """
    # transformers replaces a file with `_from_model_config` by what config.json says, which knows
    # one stop only.
    dropped = {"_from_model_config", *(SAMPLING if sampling else ())}
    keys = {key: value for key, value in source.items() if key not in dropped}
    keys |= {key: value for key, value in ids.items() if value is not None}
    if stops:
        keys["eos_token_id"] = stops[0] if len(stops) == 1 else list(stops)
    return keys | _drawn(sampling)


def _drawn(sampling: Mapping[str, int | float]) -> dict[str, Any]:
    """Returns sampling parameters as transformers names them. It warns about filters of greedy
    decoding."""
    if not sampling:
        return {}
    if not sampling["temperature"]:
        return {"do_sample": False}
    # Without the key, transformers keeps the 50 most likely tokens; 0 keeps all.
    drawn = {"do_sample": True, **{key: sampling[key] for key in ("temperature", "top_k", "top_p")}}
    return drawn | ({"min_p": sampling["min_p"]} if sampling["min_p"] else {})
