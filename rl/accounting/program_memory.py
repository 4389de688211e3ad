"""Writes programs.json of a run: the memory of its compiled programs, under the names of a plan
(docs/plan.md)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from policy.programs.compiled_cache import CompiledCache
from rl.accounting.program_names import GENERATOR, ProgramName
from rollout import Generator

FILE = "programs.json"


class ProgramMemoryLog:
    """Writes the file when new programs have been compiled. A continued run adds to the existing
    file."""

    def __init__(self, directory: Path):
        self._file = directory / FILE
        self._entries: dict[tuple[str, tuple[int, ...]], dict] = {}
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # a damaged file is written again
            self._entries = {
                _key(each): each for each in json.loads(self._file.read_text())["programs"]
            }

    def look(
        self, stage: str, programs: Mapping[str, CompiledCache], generator: Generator
    ) -> dict | None:
        """Records the memory analysis of the programs that were compiled since the last call.

        Returns the entry of the largest new program, or None if there is none.
        """
        checks = generator.verifier.executables if generator.verifier else {}
        named = [(stage, *each) for each in programs.items()] + [
            ("generator", *each) for each in checks.items()
        ]
        analyses = [
            (f"{owner}: {name}", item)
            for owner, name, each in named
            for item in each.memory.items()
        ]
        rollout = generator.engine.runner.memory.items()
        analyses += [
            (f"generator: {GENERATOR.get(key[0], key[0])}", (key[1:], memory))
            for key, memory in rollout
        ]
        if generator.weights:
            analyses.append(
                (
                    f"generator: {ProgramName.RESHARD}",
                    ((len(generator.weights.paths),), generator.weights.memory),
                )
            )
        entries = [
            {"name": name, "shape": list(shape), **asdict(memory)}
            for name, (shape, memory) in analyses
            if memory
        ]
        new = [each for each in entries if self._entries.get(_key(each)) != each]
        if not new:
            return None
        self._entries |= {_key(each): each for each in new}
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_text(
                json.dumps({"programs": list(self._entries.values())}, indent=1) + "\n"
            )
            os.replace(temporary, self._file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return max(new, key=lambda each: each["peak"])


def _key(entry: dict) -> tuple[str, tuple[int, ...]]:
    return entry["name"], tuple(entry["shape"])
