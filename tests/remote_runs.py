"""Folders of runs for tests of the mirror: sealed checkpoints with a few small files, without
jax."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

from rl.run.manifest import CHECKPOINT_FOLDER, HOST, seal


def start(run: Path, *, name: str = "first") -> None:
    """Writes what a run has before its first checkpoint."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yml").write_text(f"seed: 1 # {name}\n")
    attempt = {"start": 1.5, "host": name}
    (run / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    (run / "events.jsonl").touch()


def step(run: Path, number: int) -> None:
    """Appends the line of a step, a sample and its tokens."""
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "grpo", "step": number, "metrics": {}}) + "\n")
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "grpo", "step": number, "at": number}) + "\n")
    with (run / "tokens.bin").open("ab") as file:
        file.write(bytes([number % 256]) * 17)


def checkpoint(
    run: Path, number: int, *, needs: int | None = None, keep: int = 2, content: str = ""
) -> Path:
    """Writes a checkpoint as a run does: complete at once. Then removes all but the newest `keep`
    and what these need."""
    folder = run / CHECKPOINT_FOLDER
    temporary = folder / f"{number:010d}.tmp-1"
    name = f"{random.randrange(16**8):08x}"
    (temporary / "arrays" / "d").mkdir(parents=True)
    (temporary / "arrays" / "d" / name).write_text(f"weights after {number} {content}")
    (temporary / "arrays" / "empty").touch()
    host = {"stage": 0, "step": number, "ended": False}
    host |= {} if needs is None else {"best": {"number": needs}}
    (temporary / HOST).write_text(json.dumps(host))
    seal(temporary, {"number": number, "arrays": {}})
    final = folder / f"{number:010d}"
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    kept = sorted(each for each in folder.iterdir())[-keep:]
    needed = {int(each.name) for each in kept} | ({needs} if needs is not None else set())
    for each in folder.iterdir():
        if int(each.name) not in needed:
            shutil.rmtree(each)
    return final


def needed(host: dict) -> list[int]:
    """Returns the checkpoints that one with this host.json needs."""
    return [host["best"]["number"]] if "best" in host else []


def contents(run: Path) -> dict[str, bytes]:
    """Returns all files of a run that are neither hidden nor temporary."""
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(run).parts)
    }


def make_model(run: Path, name: str) -> None:
    """Writes a folder with weights, complete at once."""
    temporary = run / f"{name}.tmp"
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text("{}")
    (temporary / "model.safetensors").write_bytes(os.urandom(64))
    temporary.rename(run / name)
