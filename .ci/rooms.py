#!/usr/bin/env python3
"""Reads which room imports which, and draws it: `python .ci/rooms.py` writes the diagrams of
docs/architecture.md.

A room is a folder of a package, or a file that lies directly in the package. ORDER holds the rooms
of each package from the lowest to the highest: a room imports only rooms before it.
tests/unit/test_imports.py fails on any other import, lazy imports and imports under TYPE_CHECKING
included.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = {
    "policy": [
        *(
            "json_types",
            "options",
            "adapter_spec",
            "mesh",
            "specs",
            "runtime",
            "media",
            "config",
            "intermediates",
            "ops",
            "cache",
            "attention",
        ),
        *(
            "experts",
            "recurrent",
            "layers",
            "remat",
            "towers",
            "compatibility",
            "decoder",
            "heads",
            "modes",
            "programs",
        ),
        *("model", "adapters", "execution", "hook", "fields", "families", "huggingface", "public"),
    ],
    "rewards": [
        "suggest",
        "text",
        "answers",
        "files",
        "registry",
        "plugins",
        "foreign",
        "workers",
        "runner",
        "check",
    ],
    "rollout": [
        "text",
        "media",
        "types",
        "adapter_pool",
        "constraints",
        "calls",
        "request",
        "token_scores",
        "logits_processors",
        "engine",
        "generator",
        "collect",
    ],
    "rl": [
        *(
            "errors",
            "listener",
            "remote",
            "statistics",
            "cluster",
            "algorithms",
            "tasks",
            "config",
            "imports",
            "data",
            "accounting",
            "records",
            "training",
            "stages",
        ),
        *("run", "export", "plan", "launch", "evaluation", "views", "serve", "commands"),
    ],
}
_START, _END = "<!-- rooms: {} -->", "<!-- end of rooms: {} -->"


def modules() -> dict[str, Path]:
    """Maps the dotted name of every module to its file."""
    files = (file for package in ORDER for file in sorted((ROOT / package).rglob("*.py")))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def room(module: str) -> tuple[str, str]:
    """Returns (package, room) of a module. The room of a package's own __init__ is ''."""
    package, *rest = module.split(".")
    return package, rest[0] if rest else ""


def imported(source: str, module: str, known: dict[str, Path]) -> set[str]:
    """Lists the modules of ours that `source` imports anywhere in its text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (submodules & known.keys()) or {node.module}
    return {name for name in names if name in known and name != module}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Maps each module to those of ours that it imports."""
    known = modules()
    return {module: imported(file.read_text(), module, known) for module, file in known.items()}


def arrows() -> dict[tuple[str, str], dict[tuple[str, str], set[str]]]:
    """Maps each room to the rooms that it imports, each with the importing modules."""
    result = defaultdict(lambda: defaultdict(set))
    for module, targets in imports().items():
        for target in targets:
            if room(target) != room(module):
                result[room(module)][room(target)].add(module)
    return result


def circles() -> list[list[str]]:
    """Lists the sets of modules that import each other in a circle."""
    known, edges = modules(), imports()
    packages = {module for module, file in known.items() if file.name == "__init__.py"}

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for target in edges[waiting.pop()] - packages:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return seen

    after = {module: reached(module) for module in known.keys() - packages}
    return sorted(
        {
            tuple(sorted(m for m in after[one] if one in after[m]))
            for one in after
            if one in after[one]
        }
    )


def wrong_arrows() -> list[str]:
    """Lists imports of a room that does not come before the importing one in ORDER."""
    wrong = []
    for (package, name), targets in arrows().items():
        for (other, target), importers in targets.items():
            if other != package or not name or not target:
                continue
            order = ORDER[package]
            if name in order and target in order and order.index(target) < order.index(name):
                continue
            if (
                package == "rewards" and name not in order
            ):  # a reward: a file that the registry finds
                continue
            wrong.append(
                f"{package}/{name} imports {other}/{target}: {', '.join(sorted(importers))}"
            )
    return sorted(wrong)


def diagram(package: str) -> str:
    """Draws the rooms of a package as Mermaid: an arrow to each imported room that no other
    imported room reaches."""
    direct = {name: set() for name in ORDER[package]}
    for (home, name), targets in arrows().items():
        if home == package and name in direct:
            direct[name] |= {
                target for other, target in targets if other == package and target in direct
            }
    reach: dict[str, set[str]] = {}
    for name in ORDER[package]:
        reach[name] = direct[name] | {
            deep for target in direct[name] for deep in reach.get(target, ())
        }
    lines = ["```mermaid", "flowchart TD"]
    for name in reversed(ORDER[package]):
        implied = {deep for target in direct[name] for deep in reach[target]}
        lines += [
            f"  {name} --> {target}"
            for target in ORDER[package]
            if target in direct[name] - implied
        ]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """Replaces the diagrams of a document by those of the code as it is."""
    for package in ORDER:
        start, end = _START.format(package), _END.format(package)
        if start in text:
            before, rest = text.split(start)
            text = f"{before}{start}\n{diagram(package)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    document = ROOT / "docs" / "architecture.md"
    document.write_text(drawn(document.read_text()))
    print(*(wrong_arrows() or ["every arrow follows the order"]), *circles(), sep="\n")
    sys.exit(bool(wrong_arrows() or circles()))
