"""For every test: jax on the CPU, no network, and one cache of compiled programs, kept between
sessions and shared with the processes that tests start; and which tests run where.

`pytest` leaves out what is marked `slow` or `every_family`. `pytest --part K/N` runs the K-th of N
parts of those. `pytest --where` prints which test is in which.
"""

import atexit
import collections
import gc
import itertools
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import grouping
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Compiled Python is kept even where the environment says otherwise: tests start many processes that
# import all of Duet.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.path.insert(0, str(ROOT))  # a clean checkout runs without being installed
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
)

CACHE_BYTES = 4 * 2**30  # of compiled programs, kept between sessions


def compilation_cache() -> str:
    """Folder of compiled programs in the user's cache, one for each version of jax; a temporary one
    where that cannot be written. Removes the oldest programs beyond CACHE_BYTES."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = user / "duet-rl" / f"tests-jax-{metadata.version('jax')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        total = 0
        for entry in sorted(
            os.scandir(folder), key=lambda entry: entry.stat().st_mtime, reverse=True
        ):
            total += entry.stat().st_size
            if total > CACHE_BYTES:
                Path(entry).unlink(missing_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="jax-cache-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def has_older_emitters() -> bool:
    """Whether XLA of the installed jaxlib still has its older code generator for CPUs. An unknown
    flag would end the process.
    """
    return tuple(int(part) for part in metadata.version("jaxlib").split(".")[:2]) < (0, 11)


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compilation_cache()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Without most passes XLA takes a third of the time. Processes that tests start inherit it; tests
# that ask for `all_optimizations` do not.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The older of XLA's two code generators takes 0.4 of the time to compile without optimisation.
if "XLA_FLAGS" not in os.environ and has_older_emitters():
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

gc.set_threshold(
    50_000, 20, 50
)  # by default Python searches jax's many small objects for circles a tenth of the time

PARTS = 9  # CI runs one a day
_finished = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts, K from 0, of the tests marked slow or every_family, and no "
        "others",
    )
    parser.addoption(
        "--where",
        action="store_true",
        help="print which tests run always and which in which part; run none",
    )


def pytest_configure(config):
    if config.getoption("--where"):
        config.option.markexpr = ""
    elif config.getoption("--part"):
        config.option.markexpr = " or ".join(grouping.LEFT_OUT)
    if config.getoption("dist", "no") == "loadgroup" and config.getoption("tx"):
        grouping.prepare()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return grouping.scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)  # pytest sorts them by their fixtures
def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part")
    number, parts = map(int, part.split("/")) if part else (0, 1)
    if number not in range(parts):
        raise pytest.UsageError(f"--part {part}: the parts are 0/{parts} to {parts - 1}/{parts}")
    others = [item for item in items if grouping.part(item, parts) not in (None, number)]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    if in_group_worker(config):
        items[:] = grouping.in_order(items)


def in_group_worker(config) -> bool:
    """Whether this process runs groups of tests for another."""
    return hasattr(config, "workerinput") and grouping.FILE in os.environ


@pytest.hookimpl(tryfirst=True)  # before xdist tells the scheduler that this worker has collected
def pytest_collection_finish(session):
    if in_group_worker(session.config):
        grouping.write(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if not session.config.getoption("--where"):
        return None
    places = collections.defaultdict(list)
    for item in session.items:
        part = grouping.part(item, PARTS)
        places["always" if part is None else f"part {part}/{PARTS}"].append(item.nodeid)
    for place, tests in sorted(places.items()):
        print("\n".join(f"{place}  {test}" for test in tests))
    print("\n".join(f"{place}: {len(tests)} tests" for place, tests in sorted(places.items())))
    return True


@pytest.fixture(autouse=True, scope="session")
def torch_for_all():
    """Some tests of a process run `rl generate`, which leaves torch out of transformers; others
    compare with its models."""
    from rl.commands import environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "leave_torch_out", lambda: None)
        yield


@pytest.fixture(autouse=True)
def few_programs():
    """Linux lets a process map 65,530 pieces of memory; every compiled program takes some, and past
    the limit XLA crashes. A few hundred tests in one process get there, so programs are forgotten
    now and then."""
    yield
    if (
        "jax" in sys.modules
        and next(_finished) % 20 == 0
        and (maps := Path("/proc/self/maps")).exists()
    ):
        with maps.open() as file:
            if sum(1 for _ in file) > 30_000:
                sys.modules["jax"].clear_caches()
                gc.collect()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Directory of a model of two layers, with random weights and the tokenizer of bytes."""
    import policy
    from policy.huggingface import sources
    from rollout.text.tokenizer import load_tokenizer

    directory = tmp_path_factory.mktemp("small_model")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = sources.preset("qwen3-0.6b", sizes | heads | {"initializer_range": 0.3})
    policy.save(policy.create(config, seed=1), directory)
    load_tokenizer("bytes").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def all_optimizations():
    """For tests of bits between programs, of their memory or of their operations: programs as a run
    compiles them."""
    import jax

    jax.clear_caches()  # jax does not know with which passes a program was compiled
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture(scope="session")
def served_model(tmp_path_factory):
    """A folder with a small model that writes random texts."""
    from served import save_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_server(served_model):
    """A server of that model. Its tests are of the group "serve", and leave it idle."""
    from served import serving

    with serving(served_model) as server:
        yield server


@pytest.fixture(scope="session")
def writer_server(tmp_path_factory):
    """A server whose model always thinks, speaks, and calls two tools."""
    from served import PIECES, save_writer, serving

    directory = tmp_path_factory.mktemp("models") / "writer"
    save_writer(directory, PIECES)
    with serving(directory, max_length=512) as server:
        yield server
