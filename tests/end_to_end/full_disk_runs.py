"""Runs on a disk with room for a share of what they write: `python full_disk_runs.py DIRECTORY
SHARE ...`, each in percent.

Every run ends with exit code 0 or 5 and goes on, once there is room, to the numbers of the run that
had room. Prints the codes.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import full_disk
import launch

STAGE = (
    "{algorithm: sft, steps: 3, prompts_per_step: 8, optimizer: {learning_rate: 2e-3}, "
    "sampling: {max_new_tokens: 6}}"
)
MORE = (
    f"stages=[{STAGE}]",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=1",
    "run.tensorboard=true",
    *launch.LIGHT,
)
ROOM = 10**8


def train(run: Path) -> tuple[int, str]:
    """Returns the exit code and what was written to the standard error stream."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = launch.train(run, *MORE)
    return code, said.getvalue()


def main(directory: Path, shares: list[int]) -> None:
    full_disk.mount(directory, ROOM)
    undisturbed, run, codes = directory / "undisturbed", directory / "run", {}
    assert train(undisturbed)[0] == 0
    before, size = full_disk.used(directory), full_disk.used(undisturbed)
    for share in shares:
        full_disk.resize(directory, before + size * share // 100)
        codes[share], said = train(run)
        assert codes[share] in (0, 5), said
        assert "Traceback" not in said and said.count("not enough resources: ") == (
            codes[share] == 5
        ), said
        assert (
            codes[share] == 0
            or f"rl-train {run}" in said
            or "start the run again" in said
            or "run.dir" in said
        ), said
        full_disk.resize(directory, ROOM)
        assert train(run)[0] == 0
        launch.assert_same_run(run, undisturbed)
        shutil.rmtree(run)
    print(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(share) for share in sys.argv[2:]])
