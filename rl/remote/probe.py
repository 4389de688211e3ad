"""Looks whether a remote folder can be written to: writes, reads and removes an object of its own."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from rl.errors import DuetError
from rl.remote.faults import Retries
from rl.remote.store import Store

_TRIES = 2


@dataclass(frozen=True)
class Writable:
    """Whether a remote folder can be written to. problem: what fails; "": nothing."""

    url: str
    problem: str = ""
    compares_generations: bool = False


def writable(url: str, retries: Retries = Retries(tries=_TRIES)) -> Writable:
    """Writes an object next to the files of the folder, reads it and removes it. Leaves nothing."""
    name = f".duet-probe-{uuid.uuid4().hex[:8]}"
    try:
        store = Store(url, retries)
        if not store.replace(name, name.encode(), None):
            return Writable(url, "an object that does not exist cannot be created")
        if store.read(name) != name.encode():
            return Writable(url, "an object that was written reads as something else")
        if name not in store.list():
            return Writable(url, "an object that was written is not listed")
        store.delete(name)
    except FileNotFoundError as error:
        return Writable(url, f"no such bucket or folder: {error}")
    except DuetError as error:
        return Writable(url, str(error))
    return Writable(url, compares_generations=store.has_generations)
