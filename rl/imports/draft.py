"""The run of Duet while it is made from the words of another framework: values with their origins,
and for each word what became of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from policy.json_types import JsonObject, JsonValue, as_objects
from rewards.suggest import nearest
from rl.config.foreign import FOREIGN
from rl.imports import shell
from rl.imports.given import Given, GivenValue
from rl.imports.rules import (
    Copy,
    Differ,
    Joint,
    Leave,
    Refuse,
    Table,
    Unset,
    is_neutral,
    reason,
    rule_of,
    target,
)

Fate = Literal["mapped", "changed", "refused", "left"]
"""mapped: the same in Duet. changed: in meaning. refused: not supported, and the training depends
on it. left: not supported, and no result depends on it."""
_BESIDES = ("run.", "evaluation.")  # sections on which no training depends
_EVALUATED = ("val_files", "eval.dataset", "eval_data_path")
_HINTS = 20  # unknown keys for which the nearest one is looked for, which takes time
_NULL = ("null", "None")  # texts
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True)
class KeyFate:
    """What became of words. keys: theirs. target: key of Duet, "" if none. text: a note or the
    reason."""

    fate: Fate
    keys: tuple[str, ...]
    target: str = ""
    value: JsonValue = None
    text: str = ""


@dataclass(frozen=True)
class Written:
    """A value of the new file, and the comment that says where it comes from."""

    value: JsonValue
    comment: str


@dataclass(frozen=True)
class Facts:
    """What the person says in addition to the files. rows: of the dataset. processes: of the training.
    trainer: of TRL."""

    rows: int | None = None
    processes: int | None = None
    trainer: str = ""


@dataclass
class Draft:
    """Values by key of Duet, and what became of each word. framework: its name in comments."""

    framework: str
    given: Given
    table: Table
    facts: Facts = field(default_factory=Facts)
    values: dict[str, Written] = field(default_factory=dict)
    entries: list[KeyFate] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    _unknown: int = 0

    def has(self, key: str) -> bool:
        """Tells whether the files have a key with a value."""
        word = self.given.words.get(key)
        return word is not None and word.value not in (None, *_NULL)

    def value(self, key: str) -> JsonValue:
        """Returns the value of a key: of the files, else the framework's default, else None."""
        word = self.given.words.get(key)
        if word is not None and word.unresolved:
            self._refuse_unresolved(key, word)
            return None
        if word is not None:
            return None if word.value in _NULL else word.value
        rule = rule_of(self.table, key)
        default = rule.default if isinstance(rule, Copy | Joint) else None
        return None if isinstance(default, Unset) else default

    def number(self, key: str) -> float | None:
        """Returns a number, or None. Any other value is refused."""
        value = self.value(key)
        if value is None or value == "":
            return None
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return self._not(key, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return self._not(key, "a number")
        return value

    def integer(self, key: str) -> int | None:
        """Returns an integer, or None. Any other value is refused."""
        value = self.number(key)
        if value is None or (math.isfinite(value) and value == int(value)):
            return None if value is None else int(value)
        return self._not(key, "an integer")

    def truth(self, key: str) -> bool:
        """Tells whether a key is true. Words of YAML 1.1 and numbers count too."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        text = str(value).lower()
        if text not in _TRUE | _FALSE:
            self._not(key, "true or false")
        return text in _TRUE

    def text(self, key: str) -> str:
        """Returns a text, "" if there is none."""
        value = self.value(key)
        return "" if value is None else str(value)

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts: of a list, or of one text."""
        value = self.value(key)
        if value is None or value == "":
            return []
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]

    def put(
        self, name: str, value: JsonValue, *keys: str, note: str = "", changed: bool = False
    ) -> None:
        """Writes a value, in the place of one that was written at its key before.

        keys: of the words that it follows from; those that the files have get their fate. note: how
        it follows. changed: whether the meaning differs.
        """
        if value is None and any(self.fate_of(key) in ("refused", "left") for key in keys):
            return
        before = [entry for entry in self.entries if entry.target == name]
        self.entries = [entry for entry in self.entries if entry.target != name]
        keys = (*(key for entry in before for key in entry.keys), *filter(None, keys))
        given = tuple(key for key in dict.fromkeys(keys) if self._is_given(key))
        self._write(name, Written(value, self._comment(given, note, bool(keys))))
        fate: Fate = "changed" if changed else "mapped"
        self.entries.append(KeyFate(fate, given or tuple(keys), name, value, note))

    def _write(self, name: str, written: Written) -> None:
        """Writes a value; keys of a section that is a list are those of each entry."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            section = self.values.get(".".join(parts[:count]))
            if section is not None:
                entries = [
                    _with(entry, parts[count:], written.value) for entry in _items(section.value)
                ]
                self.values[".".join(parts[:count])] = replace(section, value=entries)
                return
        inside = [key for key in self.values if key.startswith(f"{name}.")]
        if isinstance(written.value, list):
            for key in inside:
                path = key.removeprefix(f"{name}.").split(".")
                value = self.values.pop(key).value
                entries = [_with(entry, path, value) for entry in _items(written.value)]
                written = replace(written, value=entries)
        self.values[name] = written

    def written_number(self, name: str) -> float | None:
        """Returns the number that is written at a key of Duet; None without one."""
        written = self.values.get(name)
        value = None if written is None else written.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value

    def written_entries(self, name: str) -> list[JsonObject]:
        """Returns the sections of the list that is written at a key of Duet; none without one."""
        written = self.values.get(name)
        return as_objects(None if written is None else written.value)

    def same(self, *keys: str, note: str = "") -> None:
        """Says that those words that have no fate yet need no key in Duet, because it does the same
        without one."""
        open_keys = [key for key in keys if self.fate_of(key) is None]
        self._note("mapped", open_keys, note or "Duet does the same")

    def change(self, *keys: str, note: str) -> None:
        """Says that words have another meaning in Duet, in addition to the values that are written."""
        self._note("changed", keys, note)

    def refuse(self, *keys: str, why: str) -> None:
        """Says that words are not supported, and that the training depends on them."""
        self._note("refused", keys, why)

    def leave(self, *keys: str, why: str) -> None:
        """Says that words are not supported, and that no result depends on them."""
        self._note("left", keys, why)

    def task(self, text: str) -> None:
        """Adds what the person has to do before the training."""
        if text not in self.tasks:
            self.tasks.append(text)

    def rest(self, skip: Sequence[str] = ()) -> None:
        """Gives each word without a fate that of its rule, and writes defaults. skip: keys without
        a default here."""
        done = {key for entry in self.entries for key in entry.keys}
        for key in self.given.words:
            if key not in done:
                self._by_rule(key)
        for key, rule in self.table.items():
            if isinstance(rule, Copy) and not isinstance(rule.default, Unset) and "*" not in key:
                is_new = target(key, rule) not in self.values
                if key not in self.given.words and key not in skip and is_new and key not in done:
                    self.put(target(key, rule), rule.default, key, note=rule.note)

    def fate_of(self, key: str) -> Fate | None:
        """Returns what became of a word, None if nothing did yet."""
        matches = [entry.fate for entry in self.entries if key in entry.keys]
        order: tuple[Fate, ...] = ("refused", "changed", "mapped", "left")
        return next((fate for fate in order if fate in matches), None)

    @property
    def refused(self) -> bool:
        """Whether something is not supported on which the training depends."""
        return any(entry.fate == "refused" for entry in self.entries)

    def name(self, key: str) -> str:
        """Returns the name of a key as the file has it."""
        word = self.given.words.get(key)
        return word.name or key if word else key

    def place(self, key: str) -> str:
        """Returns where a word stands, or that it is a default."""
        word = self.given.words.get(key) or self.given.launcher.get(key)
        return word.where if word else f"default of {self.framework}"

    def _by_rule(self, key: str) -> None:
        rule = rule_of(self.table, key)
        word = self.given.words[key]
        if rule is None:
            self._unknown += 1
            names = [name for name in self.table if "*" not in name]
            hint = nearest(key, names) if self._unknown <= _HINTS else ""
            self.refuse(key, why=f"{self.framework} has no such key{hint}")
        elif isinstance(rule, Leave):
            self.leave(key, why=reason(key, rule))
        elif word.unresolved:
            self._refuse_unresolved(key, word)
        elif isinstance(rule, Copy):
            self._copy(key, rule)
        elif isinstance(rule, Refuse | Differ) and is_neutral(word.value, rule):
            self.same(key)
        elif isinstance(rule, Refuse):
            self.refuse(key, why=reason(key, rule))
        elif isinstance(rule, Differ):
            self.change(key, note=rule.note)
        elif self.value(key) is None or self.value(key) == rule.default:
            self.same(key)
        else:
            self.refuse(key, why="the import does not read it with the other values")

    def _copy(self, key: str, rule: Copy) -> None:
        value = self._typed(key, rule)
        if self.fate_of(key) is not None:
            return
        if value is None:
            self.same(key, note="no value")
        elif target(key, rule) in self.values:
            self.same(key, note=f"another key sets {target(key, rule)}")
        else:
            self.put(target(key, rule), value, key, note=rule.note, changed=bool(rule.note))

    def _typed(self, key: str, rule: Copy) -> JsonValue:
        """Returns a value in the type of the framework's default."""
        if isinstance(rule.default, bool):
            return self.truth(key) if self.value(key) is not None else None
        return self.number(key) if isinstance(rule.default, int | float) else self.value(key)

    def _not(self, key: str, kind: str) -> None:
        if key in self.given.words:
            self.refuse(key, why=f"it must be {kind}")

    def _refuse_unresolved(self, key: str, word: GivenValue) -> None:
        if self.fate_of(key) in ("refused", "left"):
            return
        why = _unresolved(word)
        rule = rule_of(self.table, key)
        name = rule.to if isinstance(rule, Copy) else ""
        name = name or FOREIGN.get(key.rpartition(".")[2], "")
        if name.startswith(_BESIDES) or key.endswith(_EVALUATED):
            self.leave(key, why=why)
        else:
            self.refuse(key, why=why)

    def _note(self, fate: Fate, keys: Sequence[str], text: str) -> None:
        known = tuple(key for key in dict.fromkeys(keys) if self._is_given(key))
        if known or fate in ("changed", "refused"):
            self.entries.append(KeyFate(fate, known or tuple(keys), text=text))

    def _is_given(self, key: str) -> bool:
        return key in self.given.words or key in self.given.launcher

    def is_default(self, entry: KeyFate) -> bool:
        """Tells whether a value follows from defaults of the framework alone."""
        return bool(entry.keys) and not any(map(self._is_given, entry.keys))

    def _comment(self, given: Sequence[str], note: str, has_keys: bool) -> str:
        origin = ", ".join(f"{self.name(key)} ({self.place(key)})" for key in given)
        if not origin and has_keys:
            origin = f"default of {self.framework}"
        return ": ".join(part for part in (origin, note) if part)


def _unresolved(word: GivenValue) -> str:
    """Returns why a word has no value, and what helps."""
    texts = list(dict.fromkeys(word.unresolved))
    shown = ", ".join(texts)
    names = [shell.name_of(text) for text in texts]
    if not all(names):
        return f"{shown} has no value before the script runs; write the value"
    if any(map(shell.is_secret, names)):
        return f"{shown} may be a secret, which is not read from the environment; write the value"
    return f"{shown} has no value here; export it, or write the value"


def _items(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, list) else []


def _with(entry: JsonValue, path: Sequence[str], value: JsonValue) -> dict[str, JsonValue]:
    """Returns an entry with a value at a path, unless it has one there."""
    result: dict[str, JsonValue] = {"path": entry}
    if isinstance(entry, Mapping):
        result = dict(entry)
    first, *rest = path
    if rest:
        result[first] = _with(result.get(first, {}), rest, value)
    else:
        result.setdefault(first, value)
    return result
