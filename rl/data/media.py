"""Pictures and sounds of rows of data: the processors of the run's model, and examples with
references."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policy import compatibility
from policy.config import DecoderConfig
from policy.huggingface import sources
from policy.media import Tower
from rewards.text import text_of
from rewards.workers.media import Content, Picture, Sound
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.data.encoded import Example, Messages
from rl.data.rows.files import DataRow
from rl.errors import DataError
from rollout.media import processors, rows
from rollout.media.processor import KINDS, NOUNS, Kind, MediaError, Processor
from rollout.media.processors import Processors
from rollout.media.reference import Reference
from rollout.text.interface import Tokenizer

COLUMNS: dict[Kind, tuple[str, str]] = rows.COLUMNS
_LISTS: dict[Kind, str] = {kind: names[1] for kind, names in COLUMNS.items()}
"""Columns that rewards get."""
_DECODED = 4
"""Contents of a dataset that are decoded before a model is built."""
_DECODER = "rollout.media.reference:decode"
_UNREAD = (
    "but the model reads no {}s: its directory describes no tower for them, or model.media is never"
)


def read_processors(config: RunConfig, tokenizer: Tokenizer) -> Processors | None:
    """Returns the processors of the run's model; None: it has no towers, or `model.media` is
    `never`.

    Raises what `models.directory` raises, and for a preset MediaError as `towers.read_processors`.
    """
    if config.model.media == "never":
        return None
    if (directory := models.directory(config.model.source)) is None:
        return towers.read_processors(config.model, tokenizer)
    return processors_of(directory, tokenizer, config.model.sections)


def processors_of(
    directory: Path, tokenizer: Tokenizer, sections: dict | None = None
) -> Processors | None:
    """Returns the processors of a model's directory; None: it has no towers.

    If a model has towers but no processor that can be read, they are `Processors(None, None,
    problem)`: rows of text work, and the first row with a picture or a sound is refused with the
    problem. sections: as for `sources.read_config`.
    """
    try:
        decoder = sources.read_config(directory, sections, media=True)
    except ValueError as error:
        return _unreadable_towers(directory, str(error))
    if decoder.image is None and decoder.audio is None:
        return None
    try:
        read = processors.read(directory, tokenizer)
    except MediaError as error:
        return Processors(None, None, str(error))
    image = None if decoder.image is None else read.image
    if (
        decoder.image is not None
        and image is not None
        and (problem := _other_sizes(image, decoder.image))
    ):
        return Processors(None, None, f"{directory}: {problem}")
    return Processors(image, None if decoder.audio is None else read.audio)


# Fields of towers and processors -> keys of vision_config and of the configuration of a processor.
_SIZES = {
    "patch": ("patch_size", "patch_size"),
    "merge": ("spatial_merge_size", "merge_size"),
    "frames": ("temporal_patch_size", "temporal_patch_size"),
    "pool": ("pooling_kernel_size", "pooling_kernel_size"),
}


def _other_sizes(processor: Processor, tower: Tower) -> str | None:
    """Returns which sizes a processor of pictures does not have in common with the tower, or
    None."""
    for field, (key, own_key) in _SIZES.items():
        theirs = getattr(tower, field, None)
        ours = getattr(processor, field, None)
        if None not in (theirs, ours) and theirs != ours:
            return (
                f"vision_config has {key} {theirs}, the processor {own_key} {ours}; make them "
                "the same"
            )
    shape = processor.shapes((1024, 768))[0]
    if (theirs := tower.rows_of(shape)) != (ours := processor.rows(shape)):
        return (
            f"a picture has {theirs} rows by vision_config and {ours} by its processor; make "
            "them the same"
        )
    return None


def _unreadable_towers(directory: Path, problem: str) -> Processors | None:
    """Returns the processors of a directory with towers that cannot be read, which hold the
    problem; None: it has no towers, and the build of the model reports the problem."""
    try:
        stored = sources.read_hf(directory)
    except ValueError:
        return None
    has_towers = any(
        isinstance(stored.get(f"{name}_config"), dict) for name in ("vision", "audio", "thinker")
    )
    return Processors(None, None, problem) if has_towers else None


def with_references(example: Example, row: DataRow, base: Path, read: Processors) -> Example:
    """Returns an example in the form of `rollout.media.rows.normalise`, with the references of its
    row.

    base: folder that relative paths start from. read: the processors of the model. Raises
    MediaError as `normalise`, for a picture or sound in an answer of a pair, and for one that the
    model cannot represent.
    """
    conversation = example.prompt if example.messages is None else example.messages
    normal, references = rows.normalise(conversation, row, example.where, base)
    for reference in references:
        try:
            read.of(reference.kind).shapes(reference.size)
        except MediaError as error:
            raise MediaError(
                f"{reference.where.removeprefix(f'{example.where}: ')}: {error}"
            ) from None
    pair = example.pair and (_answer(example.pair[0], base), _answer(example.pair[1], base))
    if isinstance(normal, str):
        return replace(example, pair=pair)
    if example.messages is None:
        return replace(example, prompt=normal, pair=pair, references=references)
    return replace(
        example, prompt=normal[: len(example.prompt)], messages=normal, references=references
    )


def conflicts(config: RunConfig, decoder: DecoderConfig) -> Iterator[str]:
    """Yields why a run with pictures or sounds cannot have its configuration. decoder: the model
    with its towers."""
    explicit = config.mesh.shard_mode == "explicit"
    for name, stage in zip(config.stage_names, config.stages, strict=True):
        runtime = replace(config.model.runtime, **stage.runtime)
        for text in compatibility.conflicts(decoder, runtime, explicit=explicit, media=True):
            yield f"{name}: {text}"
    if config.generator.speculative:
        yield (
            "generator.speculative does not go with pictures or sounds: a prediction module "
            "embeds the next token, which may stand for a part of a picture; leave it out"
        )


def decode_first(examples: Iterable[Example], read: Processors) -> None:
    """Decodes and prepares the first contents of a dataset. Of the others only the header is read
    before a step.

    Raises DataError, with file and row, for one that is broken.
    """
    references = (reference for example in examples for reference in example.references)
    try:
        for reference in itertools.islice(references, _DECODED):
            reference.inputs(read.of(reference.kind))
    except MediaError as error:
        raise DataError(str(error)) from None


def _answer(answer: str | Messages, base: Path) -> str | Messages:
    normal, references = rows.normalise(answer, {}, "", base)
    if references:
        raise MediaError(
            f"an answer of the pair has a {NOUNS[references[0].kind]}; only the prompt may have "
            "them"
        )
    return normal


def refuse(example: Example, row: DataRow, base: Path) -> Example:
    """Returns the example of a model that reads texts only. Raises ValueError as `refuse_media`,
    and for contents of messages that are no texts."""
    for conversation in _conversations(example):
        for number, message in enumerate(conversation):
            if not isinstance(message["content"], str):
                _refuse_parts(example)
                raise ValueError(f"the content of message {number} must be a text")
    _refuse_tags(example, row)
    _refuse_columns(row, base)
    return example


def refuse_media(example: Example, row: DataRow, base: Path) -> None:
    """Raises ValueError for an example with pictures or sounds: as parts of messages, as contents
    or files in a column for them, or as a column with as many tags in the texts. base: folder that
    relative paths start from."""
    _refuse_parts(example)
    _refuse_tags(example, row)
    _refuse_columns(row, base)


def _refuse_parts(example: Example) -> None:
    for conversation in _conversations(example):
        for number, message in enumerate(conversation):
            if (kind := rows.first_kind(message["content"])) is not None:
                raise ValueError(
                    f"message {number} has a {NOUNS[kind]}, {_UNREAD.format(NOUNS[kind])}"
                )


def _refuse_columns(row: DataRow, base: Path) -> None:
    for kind, names in COLUMNS.items():
        for name in names:
            if _holds_content(row.get(name), base):
                raise ValueError(
                    f"the row has a {NOUNS[kind]} in column {name!r}, "
                    f"{_UNREAD.format(NOUNS[kind])}. Set `model` to one that reads them "
                    "(docs/pictures.md), or give the column another name to use the text alone"
                )


def _holds_content(value: object, base: Path) -> bool:
    """Returns whether a value of a column is a picture or a sound: bytes, numbers, an object, or
    the name of a file."""
    match value:
        case None | bool() | int() | float():
            return False
        case str():
            return value.startswith("data:") or _is_file(base / value)
        case list() | tuple():
            return any(_holds_content(each, base) for each in value)
        case Mapping():
            return any(value.get(key) is not None for key in ("bytes", "path", "array"))
    return True


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text that is no name of a file
        return False


def _refuse_tags(example: Example, row: DataRow) -> None:
    for kind, name in _LISTS.items():
        if name in row and isinstance(values := row.get(name), (list, tuple)) and values:
            conversation = example.prompt if example.messages is None else example.messages
            if (tags := text_of(_as_prompt(conversation)).count(f"<{kind}>")) == len(values):
                text = (
                    f"the row has {tags} {NOUNS[kind]}s in column {name!r} and as many "
                    f"<{kind}> in its texts"
                )
                raise ValueError(f"{text}, {_UNREAD.format(NOUNS[kind])}")


def _conversations(example: Example) -> list[Messages]:
    parts = (example.prompt, example.messages, *(example.pair or ()))
    return [part for part in parts if part is not None and not isinstance(part, str)]


def _as_prompt(conversation: str | Messages) -> str | Messages:
    """Returns a conversation with all roles `user`: `text_of` takes the messages of the assistant
    alone if there are any."""
    return (
        conversation
        if isinstance(conversation, str)
        else [m | {"role": "user"} for m in conversation]
    )


def kinds_of(examples: Iterable[Example]) -> list[Kind]:
    """Returns the kinds of contents that rows of a dataset have."""
    present = {each.kind for example in examples for each in example.references}
    return [kind for kind in KINDS if kind in present]


def with_lists(examples: Sequence[Example], kinds: Collection[Kind]) -> list[Example]:
    """Returns the examples of a dataset with its pictures and sounds as columns for rewards.

    If any row has a picture, all rows have the column `images`, lists of
    rewards.workers.media.Picture, and no column `image`; so with sounds and `audios`. A dataset of
    text stays as it is. kinds: those of the dataset on all processes.
    """
    if not kinds:
        return list(examples)
    replaced = {name for kind in kinds for name in COLUMNS[kind]}

    def columns(example: Example) -> dict[str, Any]:
        kept = {name: value for name, value in example.columns.items() if name not in replaced}
        return kept | {_LISTS[kind]: contents(example.references, kind) for kind in kinds}

    return [replace(example, columns=columns(example)) for example in examples]


def contents(references: Sequence[Reference], kind: Kind) -> list[Content]:
    """Returns the references of a kind as rewards get them."""
    make = Picture if kind == "image" else Sound
    return [
        make(each.digest, each.size, each.source, _DECODER)
        for each in references
        if each.kind == kind
    ]


def with_example_lists(example: dict[str, object], base: Path) -> dict[str, object]:
    """Returns an example of a reward (`rl reward test`) whose columns `image`, `images`, `audio`
    and `audios` are lists `images` and `audios` as rewards get them. base: as in `with_references`.
    Raises MediaError."""
    _, references = rows.normalise("", example, "", base)
    if not references:
        return example
    rest = {
        name: value
        for name, value in example.items()
        if not any(name in names for names in COLUMNS.values())
    }
    kinds: set[Kind] = {reference.kind for reference in references}
    return rest | {_LISTS[kind]: contents(references, kind) for kind in kinds}
