"""Scripts of tests that need several devices: in a process of their own, where so many are forced
on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path


def on_devices(number: int, script: Path, *arguments: str):
    """The JSON in the last line that the script prints, given these arguments. It may import
    modules of this folder."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={number}",
        # Threads of the runtime, by default as many as devices. Two collectives of a program may
        # wait for each other's.
        "PJRT_NPROC": str(8 * number),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
