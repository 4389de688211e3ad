"""Which tests share a process under `-n`, and which share a part of those that `pytest` leaves out.

pytest-xdist knows the groups of its `--dist loadgroup` by a suffix of the names of tests, which
pytest 9.2 does not let it add. The workers write their groups to a file instead, and the scheduler
reads it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

FILE = "DUET_TEST_GROUPS"  # variable with the path of the file, set for the workers
LEFT_OUT = ("slow", "every_family")


def subject(item) -> str | None:
    """What a test shares with others whatever file they are in: a group that its file names, a full
    run, a kind of decoder."""
    if own := item.get_closest_marker("xdist_group"):
        return own.args[0]
    if "uninterrupted" in item.fixturenames:
        return "uninterrupted"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    model = next(
        (parameters[name] for name in ("name", "kind") if isinstance(parameters.get(name), str)),
        None,
    )
    place = (
        item.path.parent if item.path.parent.name == "parity" else item.path
    )  # there they share the models
    return f"{place.name}-{model}" if model else None


def group(item) -> str:
    """Tests of one group run in one process, which keeps what it made: models, trainers, compiled
    programs."""
    name = item.nodeid.split("::")[0]
    return subject(item) or (name if item.path.parent.name in ("unit", "parity") else item.nodeid)


def part(item, parts: int) -> int | None:
    """Which of so many parts a test is in that is marked `slow` or `every_family`; None: it runs
    always."""
    if not any(item.get_closest_marker(name) for name in LEFT_OUT):
        return None
    name = subject(item) or item.nodeid
    return int.from_bytes(hashlib.blake2b(name.encode()).digest()) % parts


def in_order(items) -> list:
    """The tests as workers take them: full runs and meshes first, which are few and long, then the
    largest groups, so that the workers end together."""
    sizes = Counter(map(group, items))

    def place(item):
        return item.path.parent.name != "end_to_end" and "mesh" not in item.path.name, -sizes[
            group(item)
        ]

    return sorted(items, key=place)


def prepare() -> None:
    """Before the workers start: chooses the file for their groups."""
    handle, os.environ[FILE] = tempfile.mkstemp(prefix="test-groups-")
    os.close(handle)
    atexit.register(Path(os.environ[FILE]).unlink, missing_ok=True)


def write(items) -> None:
    """Of a worker that has collected its tests."""
    written = Path(f"{os.environ[FILE]}-{os.environ['PYTEST_XDIST_WORKER']}")
    written.write_text(json.dumps({item.nodeid: group(item) for item in items}))
    written.replace(os.environ[FILE])


def scheduler(config, log):
    """That of xdist for groups, which are those of the file, in the order of their first tests."""
    from xdist.scheduler import LoadScopeScheduling

    groups: dict[str, str] = {}

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not groups:
                groups.update(json.loads(Path(os.environ[FILE]).read_text()))
            return groups[nodeid]

    config.option.loadscopereorder = False
    return Groups(config, log)
