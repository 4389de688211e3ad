"""A run that was stopped goes on with as many devices as there are then."""

import json
import shutil
import signal

import launch
import pytest
from test_processes import GRPO, SFT, assert_same_numbers, on_devices

STAGES = [GRPO | {"steps": 4}, SFT]
RUN = (*launch.LIGHT, "generator.slots=8", "run.checkpoint_every=1", f"stages={json.dumps(STAGES)}")


def start(devices: int, *given: str):
    return launch.process(*given, environment=on_devices(devices))


def finish(running) -> str:
    code, out, err = launch.finish(running)
    assert code == 0, err
    return out


def drawn(directory) -> list[tuple]:
    """The prompt of every sample, in the order of the run."""
    rows = launch.trained(directory)
    return [
        (row["stage"], row["step"], row["prompt_id"], row["sample"], row["prompt"]) for row in rows
    ]


@pytest.mark.slow
def test_a_run_of_four_devices_goes_on_with_two_or_eight(tmp_path):
    """The same prompts and demonstrations, each once, and the same numbers up to rounding."""
    full, stopped = tmp_path / "full", tmp_path / "stopped"
    finish(start(4, *launch.arguments(full, *RUN)))
    running = start(4, *launch.arguments(stopped, *RUN))
    launch.wait_for(lambda: launch.lines(stopped) >= 2, running)
    running.send_signal(signal.SIGTERM)
    assert launch.finish(running)[0] == 75
    done = launch.lines(stopped)
    assert 2 <= done < 4, "stopped in the middle of the first stage"
    for devices in (2, 8):
        directory = tmp_path / f"on{devices}"
        shutil.copytree(stopped, directory)
        assert f"continuing {directory} after step {done} of grpo" in finish(
            start(devices, str(directory))
        )
        assert drawn(directory) == drawn(full)
        assert_same_numbers(directory, full)
