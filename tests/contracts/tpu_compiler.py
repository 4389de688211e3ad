"""Sets a process up to compile for TPUs without one. Import it before jax. Needs libtpu."""

import os
import tempfile
from pathlib import Path

_dump = tempfile.TemporaryDirectory()
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
# `compiled.as_text()` fails for programs with asynchronous updates.
os.environ["XLA_FLAGS"] = f"--xla_dump_to={_dump.name} --xla_dump_hlo_as_text"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from the cache is not dumped


def program_text(name: str = "") -> str:
    """Returns the text of the largest program that has been compiled under a name with this end."""
    files = Path(_dump.name).glob(f"*{name}.*after_optimizations.txt")
    return max(files, key=lambda file: file.stat().st_size).read_text()
