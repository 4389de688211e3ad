"""For every test: jax on the CPU, no network, and one compilation cache for the session and the processes that it
starts."""

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clean checkout runs without being installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-cache-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


_finished = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="of the tests marked slow run the K-th of N parts only, K from 0")


def pytest_collection_modifyitems(config, items):
    """With `-n` and `--dist loadgroup` all tests of a file about one model run in one process, which keeps what it compiled, and
    are in the same part."""
    part = config.getoption("--part")
    number, parts = map(int, part.split("/")) if part else (0, 1)
    if number not in range(parts):
        raise pytest.UsageError(f"--part {part}: the parts are 0/{parts} to {parts - 1}/{parts}")
    others = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        group = item.nodeid
        if model := next(
            (parameters[name] for name in ("name", "kind") if isinstance(parameters.get(name), str)), None
        ):
            group = f"{item.path.name}-{model}"
            item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("slow") and zlib.crc32(group.encode()) % parts != number:
            others.append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture(autouse=True)
def few_programs():
    """Linux lets a process map 65,530 pieces of memory; every compiled program takes some, and past the limit XLA crashes. A few
    hundred tests in one process get there, so programs are forgotten now and then."""
    yield
    if "jax" in sys.modules and next(_finished) % 20 == 0 and (maps := Path("/proc/self/maps")).exists():
        with maps.open() as file:
            if sum(1 for _ in file) > 30_000:
                sys.modules["jax"].clear_caches()
                gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests that are not about speed or about bits between programs: without most passes XLA takes about half the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
