"""Sets the environment variables that jax and transformers read when they are imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from pathlib import Path

_PROGRAM_CACHE_BYTES = 4_000_000_000  # jax removes the least recently used programs first
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu,cpu", "gpu": "cuda,cpu"}


def choose_platform(platform: str) -> None:
    """Sets JAX_PLATFORMS. `auto` leaves the choice to jax or to the environment."""
    # This project uses only the tokenizers of transformers, so its advice to install PyTorch would
    # mislead.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Forced CPU devices wait for each other on threads, by default one per device. A program with
    # two concurrent collectives hangs when some devices wait in the first and the rest in the
    # second.
    if forced := re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    ):
        os.environ.setdefault("PJRT_NPROC", str(8 * int(forced[1])))
    if platform not in _PLATFORMS:
        return
    os.environ["JAX_PLATFORMS"] = _PLATFORMS[platform]
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", _PLATFORMS[platform])


def leave_torch_out() -> None:
    """Imports transformers as on a machine without torch: its tokenizers do not need torch, whose
    import takes longer than all others of a text model. For processes that run no code of the user,
    who may have models of torch."""
    if "transformers" in sys.modules:
        return
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name == "torch" else real(name, package)
    )
    try:
        import transformers  # noqa: F401  # it looks for torch once
    finally:
        importlib.util.find_spec = real


def use_program_cache(directory: str | None) -> None:
    """Sets the variables of jax's persistent compilation cache, which jax reads when it is
    imported.

    A folder that the environment names may be shared with programs that set no size limit, so it
    gets none here either.
    """
    if directory is None or "jax" in sys.modules:
        return
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(directory).expanduser()
        _add_missing_times(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_PROGRAM_CACHE_BYTES))


def _add_missing_times(folder: Path) -> None:
    """Writes the time of last use of every cached program that has none.

    With a size limit jax writes the time after the program. After a kill between the two, jax would
    never write to the cache again.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            with contextlib.suppress(OSError):
                used.write_bytes(bytes(8))


def default_program_cache() -> str | None:
    """Returns the folder of compiled programs where no configuration names another; None: none is
    kept."""
    from rl.config.run import RunOptions

    return RunOptions.model_validate({}).program_cache
