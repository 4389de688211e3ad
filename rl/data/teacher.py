"""Locates the teacher of a stage and checks it against the run. Imports no jax."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policy.config import DecoderConfig
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from rewards.suggest import nearest_path
from rl.config.model import TeacherOptions
from rl.data import models
from rl.errors import ConfigError, Fault, Key, ModelError
from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import load_tokenizer, stop_ids

# What `identity` reads of a file, in bytes: its start, and pieces.
_HEAD = 1 << 20
_PIECE = 1 << 12
_PIECES = 64


def directory_of(options: TeacherOptions, *, weights: bool = False) -> Path | None:
    """Returns the directory of a teacher's model, or None for a preset, whose weights are random.

    The directory of a finished run stands for its final weights. With `weights`, files of the hub
    are downloaded. Raises ModelError if there is no such model.
    """
    assert options.source is not None  # of a teacher without files
    if options.source in sources.presets():
        return None
    directory = Path(options.source)
    if sources.is_model(directory / "export"):
        return directory / "export"
    result = models.directory(options.source, weights=weights)
    if result is None or not sources.is_model(result):
        raise ModelError(
            f"teacher {options.source}: no directory with a config.json, no finished run and no "
            f"file of that name in configs/models/{nearest_path(options.source)}; train the "
            "teacher first, or set `teacher.source` to a model"
        )
    return result


def identity(options: TeacherOptions) -> str:
    """Returns what names the teacher, which a resumed run compares.

    Of a model it is a hash of its configuration, and of names, sizes, headers and samples of its
    weights; of files of `rl teach` a hash of these. The samples are the first MiB of a file and 64
    pieces of 4 KiB at equal distances, so that a model of many shards takes a second. Of a preset,
    whose weights are random, and of the policy or the reference itself it is a sentence.

    Raises ModelError if there is no such model, ConfigError if there are no such files.
    """
    if options.is_own:
        return f"the {options.source} itself"
    if options.sources is not None:
        return hashlib.sha256(" ".join(map(identity, options.models)).encode()).hexdigest()
    if options.files is not None:
        directory = Path(options.files)
        pattern = "*"
    elif (model := directory_of(options, weights=True)) is not None:
        directory = model
        pattern = "*.safetensors*"
    else:  # random weights, which the configuration determines
        return f"preset {options.source}"
    digest = hashlib.sha256()
    try:
        patterns = ("config.json", "*.gguf", pattern)
        for file in sorted({each for name in patterns for each in directory.glob(name)}):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_HEAD))
                for n in range(1, _PIECES + 1):
                    opened.seek(max(0, size * n // _PIECES - _PIECE))
                    digest.update(opened.read(_PIECE))
    except OSError as error:
        raise ModelError(f"teacher {options.source or options.files}: {error}") from None
    return digest.hexdigest()


def decoder_of(options: TeacherOptions) -> DecoderConfig:
    """Returns the decoder of a teacher. Raises ModelError if it cannot be read."""
    try:
        if (directory := directory_of(options)) is not None:
            return sources.read_config(directory)
        assert options.source is not None  # of a teacher without a directory
        return sources.preset(options.source, options.overrides)
    except (ModelFileError, UnsupportedModel) as error:
        raise ModelError(f"teacher {options.source}: {error}") from None


def decoders_of(options: TeacherOptions | None) -> list[DecoderConfig]:
    """Returns the decoders of the teachers that a stage runs; [] without options and for files.
    Raises as `decoder_of`."""
    return [] if options is None else [decoder_of(each) for each in options.models]


def faults(
    path: Key,
    options: TeacherOptions,
    algorithm: Any,
    student: DecoderConfig | None,
    max_length: int,
) -> Iterator[Fault]:
    """Yields the faults that the files of both models show.

    path: the key of the teacher. student: the decoder of the policy, if it can be read. A teacher
    that is not there yet has no fault: `check_teacher` and the start of the stage refuse it.
    """
    yield from _form_faults(path, options, algorithm)
    if options.files is not None:
        for key in ("overrides", "dtype", "weights", "host_memory"):
            if getattr(options, key):
                yield Fault(
                    "files hold the numbers of a teacher, which is not loaded; leave this out",
                    key=(*path, key),
                )
        if algorithm.has_features:
            yield Fault(
                "files hold no outputs of layers; set features_coef: 0, or give `source`",
                key=(*path, "files"),
            )
        if algorithm.tail != "renormalise" and {
            algorithm.temperature,
            algorithm.temperature_end,
        } - {1.0, None}:
            text = (
                f"files hold probabilities at temperature 1, which tail: {algorithm.tail} "
                "takes as they are"
            )
            yield Fault(f"{text}; set temperature: 1.0, or tail: renormalise", key=(*path, "files"))
        return
    for each in options.models:
        yield from _model_faults(path, each, algorithm, student, max_length)


def _form_faults(path: Key, options: TeacherOptions, algorithm: Any) -> Iterator[Fault]:
    """Yields what an algorithm cannot take as a teacher, whatever the models."""
    compared = "teacher" in algorithm.inputs
    forms = {"sources": options.sources, "prompt": options.prompt, "source": options.is_own}
    for key, value in forms.items():
        if value and compared:
            yield Fault(
                f"the updates of {algorithm.name} contain one other model, which reads what the "
                "policy reads; leave it out, or use opd",
                key=(*path, key),
            )
    if not options.is_own:
        return
    for key in ("overrides", "dtype", "weights", "host_memory"):
        if getattr(options, key):
            yield Fault(
                f"the teacher is the {options.source}, whose weights the run has; leave this out",
                key=(*path, key),
            )
    if options.source == "policy" and options.prompt is None and not compared:
        yield Fault(
            "the policy teaches itself nothing after its own prompt; give `prompt`",
            key=(*path, "source"),
        )


def _model_faults(
    path: Key,
    options: TeacherOptions,
    algorithm: Any,
    student: DecoderConfig | None,
    max_length: int,
) -> Iterator[Fault]:
    """Yields the faults of one model."""
    if options.overrides and options.source not in sources.presets():
        yield Fault(
            f"{options.source} is no file in configs/models/; only random weights take overrides",
            key=(*path, "overrides"),
        )
    try:
        teacher = decoder_of(options)
    except ModelError:
        return
    if teacher.max_positions is not None and max_length > teacher.max_positions:
        yield Fault(
            f"max_length {max_length} is more than the {teacher.max_positions} positions of this "
            "teacher",
            key=(*path, "source"),
        )
    if getattr(algorithm, "has_features", False) and student is not None:
        yield from (
            Fault(text, key=(*path, "source"))
            for text in _feature_faults(algorithm.features_layers, student, teacher)
        )


def _feature_faults(
    pairs: list[list[int]] | None, student: DecoderConfig, teacher: DecoderConfig
) -> Iterator[str]:
    mine = student.mixer_layers
    theirs = teacher.mixer_layers
    if pairs is None and mine != theirs:
        yield (
            f"features_coef compares layer by layer, but the policy has {len(mine)} and this "
            f"teacher {len(theirs)} layers; name pairs of layers in features_layers"
        )
    if repeated := [pair for n, pair in enumerate(pairs or ()) if pair in (pairs or ())[:n]]:
        yield f"features_layers names the pair {repeated[0]} twice; leave one out"
    for who, have, at in (("policy", mine, 0), ("teacher", theirs, 1)):
        if missing := sorted({pair[at] for pair in pairs or ()}.difference(have)):
            yield (
                f"features_layers: the {who} has no layer {missing[0]} with a mixer; its last "
                f"is {max(have)}"
            )


def check_teacher(
    options: TeacherOptions, tokenizer: Tokenizer, stops: tuple[int, ...], used: int
) -> None:
    """Raises ConfigError for a teacher that reads other ids than the run or ends texts elsewhere,
    ModelError for one that is not there.

    tokenizer: of the run. stops: ids that end a completion of the run. used: token ids that the run
    may have.
    """
    decoder = decoder_of(options)
    directory = directory_of(options)
    where = f"teacher {options.source}"
    if used > decoder.vocab_size:
        raise ConfigError(
            f"{where} has a vocabulary of {decoder.vocab_size}, the run uses {used} tokens; they "
            "must be the same"
        )
    if directory is None:
        return  # random weights
    try:
        theirs = load_tokenizer(directory)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{where}: its tokenizer cannot be read, so nothing shows that it reads the ids of "
            f"the run; save the tokenizer in {directory}. {error}"
        ) from None
    try:
        their_stops = stop_ids(theirs, directory)
    except ModelFileError as error:
        raise ModelError(f"{where}: {error}") from None
    check_vocabulary(where, theirs.get_vocab(), their_stops, tokenizer, stops)


def check_vocabulary(
    where: str,
    vocabulary: dict[str, int],
    their_stops: tuple[int, ...],
    tokenizer: Tokenizer,
    stops: tuple[int, ...],
) -> None:
    """Raises ConfigError if a teacher has another vocabulary, or ends a completion with other
    ids."""
    own = tokenizer.get_vocab()
    if different := sorted(vocabulary.items() ^ own.items()):
        shared = len(vocabulary.items() & own.items())
        raise ConfigError(
            f"{where} was trained with another tokenizer ({len(different)} entries differ, e.g. "
            f"{different[0][0]!r}; {shared} of {len(own)} are the same); a student learns the "
            "distribution over its own ids, so both must have the same"
        )
    check_stops(where, their_stops, tokenizer, stops)


def check_stops(
    where: str, their_stops: tuple[int, ...], tokenizer: Tokenizer, stops: tuple[int, ...]
) -> None:
    """Raises ConfigError if a teacher ends a completion with other ids than the run."""
    if set(their_stops) != set(stops):
        raise ConfigError(
            f"{where} ends a completion with {_named(their_stops, tokenizer)}, the run with "
            f"{_named(stops, tokenizer)}: the student would not learn to stop. Give the same chat "
            "template and eos_token_id to both (tokenizer, generation_config.json), or name the "
            "further ids in stages.N.sampling.stop_token_ids"
        )


def _named(ids: tuple[int, ...], tokenizer: Tokenizer) -> str:
    return ", ".join(
        f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in sorted(ids)
    )
