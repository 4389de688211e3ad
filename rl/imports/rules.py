"""What becomes of a key of another framework, as data: each framework has a table of rules.

`rl.config.foreign` has what holds for a word in any framework: the key of Duet, and why there is
none. A rule says it only where the framework, or the full path of the key, makes a difference.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from policy.json_types import JsonValue
from rl.config.foreign import ABSENT, FOREIGN


class Unset:
    """Stands for a default that a rule does not have."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


@dataclass(frozen=True)
class Copy:
    """The value is that of a key of Duet.

    to: this key; "" is what `rl.config.foreign` says of the last part of the name. default: of the
    framework, written where the file does not have the key. note: how the meaning differs.
    """

    to: str = ""
    default: JsonValue | Unset = UNSET
    note: str = ""


@dataclass(frozen=True)
class Leave:
    """No key of Duet, and no result of the training depends on it. reason: ""
    is that of `rl.config.foreign`."""

    reason: str = ""


@dataclass(frozen=True)
class Refuse:
    """No key of Duet, but the training depends on it, unless its value is one of `neutral`."""

    reason: str = ""
    neutral: tuple[JsonValue, ...] = ()


@dataclass(frozen=True)
class Differ:
    """No key of Duet, which does something else: `note` says what. `neutral`: values with which it
    does the same."""

    note: str
    neutral: tuple[JsonValue, ...] = ()


@dataclass(frozen=True)
class Joint:
    """The code of the framework reads it, together with others. default: of the framework."""

    default: JsonValue | Unset = UNSET


Rule = Copy | Leave | Refuse | Differ | Joint
Table = Mapping[str, Rule]
"""Name -> rule. `*` in a name stands for any text; names without it are looked up first."""

SPEED = Leave("it changes speed and memory, and no result")
LOGS = Leave("it changes what is logged, and no result")
CHECKPOINTS = Leave("Duet keeps checkpoints of weights, optimizer and progress in run.dir")
SHUFFLED = Differ("Duet takes all rows in shuffled order", (True, None))
OFF: tuple[JsonValue, ...] = (None, False, 0, "", "none", "None")
"""Values that switch something off."""


def rule_of(table: Table, key: str) -> Rule | None:
    """Returns the rule of a key, or None if the framework has no such key."""
    if key in table:
        return table[key]
    return next(
        (rule for name, rule in table.items() if "*" in name and fnmatch.fnmatchcase(key, name)),
        None,
    )


def target(key: str, rule: Copy) -> str:
    """Returns the key of Duet that a rule names, for the first stage."""
    return (rule.to or FOREIGN[key.rpartition(".")[2]]).replace(".N", ".0")


def reason(key: str, rule: Leave | Refuse) -> str:
    """Returns why a key has no counterpart."""
    return rule.reason or ABSENT[key.rpartition(".")[2]]


def is_neutral(value: JsonValue, rule: Refuse | Differ) -> bool:
    """Tells whether a value changes nothing, so that leaving it out is right."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in rule.neutral
    )
