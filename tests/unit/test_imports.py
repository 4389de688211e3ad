"""Who may import whom, read from the source; and what must start without the heavy libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

import rooms  # noqa: E402

FOLDERS = sorted(
    {file.parent for package in rooms.ORDER for file in (ROOT / package).rglob("*.py")}
)
# A package -> the others of ours that it may import. policy and rewards are leaves and never see
# each other.
ALLOWED = {
    "policy": set(),
    "rewards": set(),
    "rollout": {"policy", "rewards"},
    "rl": {"policy", "rollout", "rewards"},
}
# configs/ is package data without code: anyone may read it as a resource, nobody imports it.
OURS = {*ALLOWED, "tests", "benchmarks", "configs"}


def imported(source: str) -> set[str]:
    """First names of all absolute imports, wherever in the source they are, those under
    TYPE_CHECKING and importlib.import_module("...") of a literal included."""
    result = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            result.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            text = node.args[0] if node.args else None
            if isinstance(text, ast.JoinedStr):
                text = text.values[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                result.add(text.value.split(".")[0])
    return result


def wrong_arrows(package: str, source: str) -> set[str]:
    forbidden = OURS - ALLOWED[package] - {package}
    if package == "rewards":
        forbidden |= {"jax", "jaxlib", "flax", "optax", "orbax"}
    return imported(source) & forbidden


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_arrows(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no source in {package}/"
    wrong = {
        str(f.relative_to(ROOT)): result
        for f in files
        if (result := wrong_arrows(package, f.read_text()))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        ("policy", "import rewards", {"rewards"}),
        ("policy", "def f():\n    from rollout.engine.engine import Generator", {"rollout"}),
        ("policy", "from policy.huggingface import model_directory\nimport jax", set()),
        ("rewards", "import jax.numpy as jnp", {"jax"}),
        (
            "rewards",
            "from importlib import "
            "import_module\nimport_module('policy.huggingface.model_directory')",
            {"policy"},
        ),
        ("rollout", "from rewards import reward\nimport policy\nimport rl.run.loop", {"rl"}),
        ("rl", "import policy, rollout, rewards, tests", {"tests"}),
    ],
)
def test_a_wrong_arrow_is_seen(package, source, wrong):
    assert wrong_arrows(package, source) == wrong


def test_rooms_import_only_lower_rooms_and_no_module_imports_itself_in_a_circle():
    """Lazy imports and those under TYPE_CHECKING count."""
    assert rooms.wrong_arrows() == []
    assert rooms.circles() == []


def test_a_wrong_arrow_between_rooms_is_seen(monkeypatch):
    monkeypatch.setitem(rooms.ORDER, "rl", list(reversed(rooms.ORDER["rl"])))
    assert any(line.startswith("rl/commands imports rl/plan") for line in rooms.wrong_arrows())


def test_the_diagrams_of_the_architecture_are_drawn_from_the_imports():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert rooms.drawn(text) == text, "run `python .ci/rooms.py`"


@pytest.mark.parametrize(
    "folder",
    [folder for folder in FOLDERS if folder.name not in ("families", "algorithms")],
    ids=str,
)
def test_a_folder_has_at_most_14_modules(folder):
    assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 14


def test_every_package_with_code_is_known():
    result = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert result - {"configs", "tests", "benchmarks"} == set(ALLOWED)


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc"])
def test_no_module_is_named_for_nothing(name):
    assert not [path for package in ALLOWED for path in (ROOT / package).rglob(f"{name}*")]


HEAVY = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "transformers",
    "datasets",
    "tokamax",
    "wandb",
    "orbax",
    "optax",
)


@pytest.mark.parametrize(
    "modules",
    [
        "policy, policy.families, policy.fields.config_fields, policy.config",
        "rl.config.run",
        "rewards",
        "rl.algorithms",
        "rollout",
    ],
)
def test_light_modules_import_no_heavy_library(modules):
    code = f"import {modules}; import sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == []


def test_a_configuration_is_read_without_jax():
    code = """
import sys
from policy import families
hf = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
      "num_attention_heads": 2}
assert families.read(hf).layers[0].mixer.head_dim == 4
assert "jax" not in sys.modules and "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
