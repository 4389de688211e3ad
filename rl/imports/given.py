"""Reads the file of another framework: a configuration in YAML or JSON, or a script or command line
that starts a training. Nothing of it runs, and no import is followed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from policy.json_types import JsonValue
from rl.config import yaml_tree
from rl.config.yaml_tree import PlacedValue
from rl.errors import ConfigError
from rl.imports import shell

_MOST_CHARACTERS = 2**20
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_RESOLUTIONS = 20  # interpolations that stand for further ones
_ARGUMENT = "argument"
"""What stands in the place of a file's name for keys of the command line of `rl import`."""


@dataclass(frozen=True)
class GivenValue:
    """The value of a key in a file or on a command line. where: file and line, or number of the
    argument. unresolved: variables of a shell without a value. name: of its key in the file, if it
    is an older name of the key."""

    value: JsonValue
    where: str
    unresolved: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Syntax:
    """How a framework is started, and how its command line names keys.

    program: the pattern of the word that starts a training. The name of the program is what a group
    of the pattern matches, without groups the full match; if the group is empty, the next word is
    the name. form: `dotted` (a.b=1, nested files are the same keys) or `flags` (--a.b 1). nested:
    whether a mapping in a file is a section; else it is a value. files: flags or keys that name
    further files, which are read first, and file: what a word is that names one. shipped: names of
    files with the framework's own defaults, which are not read. helpers: programs of the framework
    that start no training.
    """

    framework: str
    program: re.Pattern[str]
    form: Literal["dotted", "flags"]
    nested: bool = True
    files: tuple[str, ...] = ()
    file: re.Pattern[str] | None = None
    shipped: frozenset[str] = frozenset()
    helpers: frozenset[str] = frozenset()


@dataclass
class Given:
    """What files and command lines say. program: what they start, "" if they do not say it.

    positional: words of the command line that are no keys. launcher: flags before the program, such
    as those of accelerate.
    """

    words: dict[str, GivenValue] = field(default_factory=dict)
    program: str = ""
    positional: list[GivenValue] = field(default_factory=list)
    launcher: dict[str, GivenValue] = field(default_factory=dict)

    def over(self, below: Given) -> Given:
        """Returns these words over those of `below`."""
        launcher = below.launcher | self.launcher
        words = below.words | self.words
        program = self.program or below.program
        return Given(words, program, [*below.positional, *self.positional], launcher)


def read(sources: Sequence[str], syntax: Syntax, environment: Mapping[str, str]) -> Given:
    """Reads files and overrides, each over those before it.

    sources: files, then `key=value`, then flags. environment: variables for scripts of a shell.
    Raises ConfigError: a file that is missing, empty, too large or no text; no command of the
    framework in a script; an argument after the first key that is no key.
    """
    result = Given()
    overrides: list[shell.ShellWord] = []
    for number, source in enumerate(sources, start=1):
        if overrides or source.startswith("-") or ("=" in source and not os.path.exists(source)):
            overrides.append(shell.ShellWord(source, number))
        else:
            result = read_file(Path(source).expanduser(), syntax, environment).over(result)
    if overrides:
        result = _of_arguments(overrides, syntax, environment).over(result)
    result.words = _interpolated(result.words)
    return result


def _of_arguments(
    overrides: Sequence[shell.ShellWord], syntax: Syntax, environment: Mapping[str, str]
) -> Given:
    """Reads the arguments after the files, none of which may be left over."""
    given = _keys(_as_flags(overrides) if syntax.form == "flags" else overrides, syntax, _ARGUMENT)
    for word in given.positional:
        if not _names_file(word, syntax):
            raise ConfigError(
                f"{word.where}: `{word.value}` is no key=value; name files before the first key"
            )
    return _with_files(given, Path(), syntax, environment)


def _as_flags(overrides: Sequence[shell.ShellWord]) -> list[shell.ShellWord]:
    """Returns the arguments with each `key=value` before the first flag as `--key=value`."""
    first = next(
        (at for at, word in enumerate(overrides) if word.text.startswith("-")), len(overrides)
    )
    keys = [
        replace(word, text=f"--{word.text}") if "=" in word.text else word
        for word in overrides[:first]
    ]
    return [*keys, *overrides[first:]]


def read_file(path: Path, syntax: Syntax, environment: Mapping[str, str]) -> Given:
    """Reads one file, and the files that its command line names. Raises as `read`."""
    if path.suffix.lower() in (".py", ".ipynb"):
        raise ConfigError(
            f"{path}: code of Python is not read; write its arguments to a YAML file, or after the "
            f"program in a script of a shell: KEY=VALUE or --KEY VALUE of {syntax.framework}"
        )
    text = _text(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json") or _is_mapping(text, path):
        return Given(_configuration(text, path, syntax))
    given = _command(text, path, syntax, environment)
    return _with_files(given, path.parent, syntax, environment)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_CHARACTERS:
        raise ConfigError(f"{path}: has more than {_MOST_CHARACTERS:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty")
    return text


def _is_mapping(text: str, path: Path) -> bool:
    if path.suffix:
        return False
    try:
        return isinstance(yaml_tree.parse(text, str).value, dict)
    except ConfigError:
        return False


def _configuration(text: str, path: Path, syntax: Syntax) -> dict[str, GivenValue]:
    try:
        tree = yaml_tree.parse(text, lambda line: f"{path.name}:{line}")
    except ConfigError:
        if path.suffix.lower() != ".json":
            raise
        tree = _located(_json(text, path), path.name)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path}: has no keys at its top level")
    words = _flat(_merged(tree), "", syntax.nested)
    if not words:
        raise ConfigError(f"{path}: has no keys")
    return words


def _json(text: str, path: Path) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _located(value: JsonValue, where: str) -> PlacedValue:
    located: object = value
    if isinstance(value, dict):
        located = {str(key): _located(child, where) for key, child in value.items()}
    elif isinstance(value, list):
        located = [_located(child, where) for child in value]
    return PlacedValue(located, where, where)


def _merged(tree: PlacedValue) -> PlacedValue:
    """Puts the keys of `<<` into the mapping that has it, below its own."""
    if not isinstance(tree.value, dict):
        return tree
    children = {key: _merged(child) for key, child in tree.value.items()}
    below = children.pop("<<", None)
    if below is not None and isinstance(below.value, dict):
        children = below.value | children
    return PlacedValue(children, tree.where, tree.key_where)


def _flat(tree: PlacedValue, path: str, nested: bool) -> dict[str, GivenValue]:
    words: dict[str, GivenValue] = {}
    for key, child in tree.value.items():
        name = f"{path}{key}"
        if nested and isinstance(child.value, dict) and child.value:
            words |= _flat(child, f"{name}.", nested)
        else:
            words[name] = GivenValue(yaml_tree.plain(child), child.place)
    return words


def _command(text: str, path: Path, syntax: Syntax, environment: Mapping[str, str]) -> Given:
    starts = [
        (words, place)
        for words in shell.commands(text, path.name, environment)
        for place in [_program_at(words, syntax)]
        if place is not None and _program(words, place, syntax) not in syntax.helpers
    ]
    if not starts:
        raise ConfigError(
            f"{path}: no command of {syntax.framework} in it; name a YAML or JSON file, or a "
            "script with the command that starts the training"
        )
    if len(starts) > 1:
        lines = ", ".join(str(words[place].line) for words, place in starts)
        raise ConfigError(
            f"{path}: it starts {len(starts)} trainings (lines {lines}); keep one of them"
        )
    words, place = starts[0]
    given = _keys(words[place + 1 :], syntax, path.name)
    given.program = _program(words, place, syntax)
    if given.positional and given.positional[0].value == given.program:
        given.positional.pop(0)
    given.launcher = _keys(words[:place], replace(syntax, form="flags"), path.name).words
    return given


def _program(words: Sequence[shell.ShellWord], place: int, syntax: Syntax) -> str:
    """Returns the name of the program that a command starts with its word at `place`."""
    match = syntax.program.search(words[place].text)
    assert match is not None
    if "" in match.groups() and place + 1 < len(words):  # `trl grpo`: it is the next word
        return words[place + 1].text
    return next(filter(None, match.groups()), "") if match.groups() else match[0]


def _program_at(words: Sequence[shell.ShellWord], syntax: Syntax) -> int | None:
    return next((at for at, word in enumerate(words) if syntax.program.search(word.text)), None)


def _keys(words: Sequence[shell.ShellWord], syntax: Syntax, name: str) -> Given:
    """Reads the words behind a program. name: of the script, or _ARGUMENT."""
    given = Given()
    at = 0
    while at < len(words):
        word = words[at]
        where = f"{name} {word.line}" if name == _ARGUMENT else f"{name}:{word.line}"
        at += 1
        key, equals, value = word.text.partition("=")
        if key.startswith("--") and len(key) > 2:
            values = [replace(word, text=value)] if equals else []
            while not equals and at < len(words) and not _is_flag(words[at].text):
                if syntax.form == "dotted" and values:
                    break
                values.append(words[at])
                at += 1
            flag = key[2:].replace("-", "_")
            given.words[flag] = _word_of(values, where)
        elif syntax.form == "dotted" and re.fullmatch(r"~[\w.]+", key):  # Hydra deletes the key
            given.words[key[1:]] = GivenValue(None, where)
        elif equals and syntax.form == "dotted":
            name_of_key = key.lstrip("+")
            typed = _typed(value)
            at_key = GivenValue(typed, where, word.unresolved)
            if isinstance(typed, dict) and typed and syntax.nested:
                tree = _located(typed, where)
                given.words |= _flat(tree, f"{name_of_key}.", True)
            else:
                given.words[name_of_key] = at_key
        elif word.text and word.text != "--":
            given.positional.append(GivenValue(word.text, where, word.unresolved))
    return given


def _is_flag(text: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", text)) or text == "--"


def _word_of(values: Sequence[shell.ShellWord], where: str) -> GivenValue:
    unresolved = tuple(name for value in values for name in value.unresolved)
    typed = [_typed(value.text) for value in values]
    if not typed:
        return GivenValue(True, where)
    return GivenValue(typed[0] if len(typed) == 1 else typed, where, unresolved)


def _typed(text: str) -> JsonValue:
    try:
        return yaml_tree.plain(yaml_tree.typed_value(text, "")) if text else ""
    except ConfigError:
        return text


def _with_files(
    given: Given, folder: Path, syntax: Syntax, environment: Mapping[str, str]
) -> Given:
    """Reads the files that a command line names, and puts its own keys over theirs."""
    words = [word for word in given.positional if _names_file(word, syntax)]
    named = (given.words.pop(key, None) for key in syntax.files)
    words += [word for word in named if word is not None]
    result = Given()
    for word in words:
        if Path(str(word.value)).name not in syntax.shipped:
            result = read_file(_next_to(word, folder), syntax, environment).over(result)
    return given.over(result)


def _names_file(word: GivenValue, syntax: Syntax) -> bool:
    return syntax.file is not None and bool(syntax.file.search(str(word.value)))


def _next_to(word: GivenValue, folder: Path) -> Path:
    """Returns the file that a command names: from the working directory, or next to the script."""
    path = Path(str(word.value)).expanduser()
    for candidate in (path, folder / path, folder / path.name):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"{word.where}: no file {path}, nor one of this name next to the script; name it before the "
        "script: `rl import FRAMEWORK FILE SCRIPT`"
    )


def _interpolated(words: dict[str, GivenValue]) -> dict[str, GivenValue]:
    """Replaces `${a.b}` and `${oc.select:a.b,default}` of OmegaConf in texts. What has no value
    stays."""
    result = dict(words)
    for key, word in words.items():
        for _ in range(_RESOLUTIONS):
            new = _resolved(word, key, words)
            if new == word:
                break
            word = new
        result[key] = word
    return result


def _resolved(word: GivenValue, key: str, words: Mapping[str, GivenValue]) -> GivenValue:
    """Replaces the interpolations of a text once; it lacks the values that its sources lack."""
    text = word.value
    if not isinstance(text, str):
        return word
    matches = list(_INTERPOLATION.finditer(text))
    sources = [_interpolation(match[1], key, words) for match in matches]
    lacking = [name for source in sources if source for name in source.unresolved]
    unresolved = tuple(dict.fromkeys([*word.unresolved, *lacking]))
    if len(matches) == 1 and matches[0][0] == text:
        value = sources[0].value if sources[0] else text
        return replace(word, value=value, unresolved=unresolved)
    for match, source in zip(matches, sources, strict=True):
        if source and isinstance(source.value, str | int | float):
            text = text.replace(match[0], str(source.value))
    return replace(word, value=text, unresolved=unresolved)


def _interpolation(inner: str, key: str, words: Mapping[str, GivenValue]) -> GivenValue | None:
    """Returns what an interpolation stands for, None if it has no value."""
    resolver, colon, arguments = inner.partition(":")
    default: GivenValue | None = None
    name = inner
    if colon and resolver == "oc.select":
        name, comma, text = arguments.partition(",")
        default = GivenValue(_typed(text.strip()), "") if comma else None
    elif colon:
        return None
    name = name.strip()
    while name.startswith("."):
        key = key.rpartition(".")[0]
        name = name[1:]
        if not name.startswith("."):
            name = f"{key}.{name}" if key else name
    return words.get(name, default)
