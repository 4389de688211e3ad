"""programs.json of a run: the memory that the programs take which it really runs, in the words of a plan (docs/plan.md)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from policy.execution.compiled_cache import CompiledCache
from rollout import Generator

FILE = "programs.json"
GENERATOR = {"decode": "decode a token", "extend": "prefill, further chunk"}
"""What a plan calls programs of the generator that have another name there."""
RESHARD = "reshard"


class ProgramMemoryLog:
    """Writes the file whenever a program has been compiled that it does not hold. A run that goes on adds to what it finds."""

    def __init__(self, directory: Path):
        self._file, self._entries = directory / FILE, {}
        if self._file.exists():
            self._entries = {_key(each): each for each in json.loads(self._file.read_text())["programs"]}

    def look(self, stage: str, programs: Mapping[str, CompiledCache], generator: Generator) -> dict | None:
        """At what has been compiled by now, of the stage and of the generator. The largest of those that are new to the file; None:
        there is none."""
        checks = generator.verifier.executables if generator.verifier else {}
        named = [(stage, *each) for each in programs.items()] + [("generator", *each) for each in checks.items()]
        found = [(f"{whose}: {name}", item) for whose, name, each in named for item in each.memory.items()]
        made = generator.engine.runner.memory.items()
        found += [(f"generator: {GENERATOR.get(key[0], key[0])}", (key[1:], memory)) for key, memory in made]
        if generator.weights:
            found.append((f"generator: {RESHARD}", ((len(generator.weights.paths),), generator.weights.memory)))
        entries = [{"name": name, "shape": list(shape), **asdict(memory)} for name, (shape, memory) in found if memory]
        new = [each for each in entries if self._entries.get(_key(each)) != each]
        if not new:
            return None
        self._entries |= {_key(each): each for each in new}
        beside = self._file.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"programs": list(self._entries.values())}, indent=1) + "\n")
            os.replace(beside, self._file)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        return max(new, key=lambda each: each["peak"])


def _key(entry: dict) -> tuple:
    return entry["name"], tuple(entry["shape"])
