"""How processes find each other: what the command line and what clusters say."""

import pytest

from rl.cluster import launch as launching
from rl.cluster.launch import Launch, launch
from rl.errors import ConfigError, ProcessLost

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((2, None, "a:1"), "--process: --processes, --process and --coordinator go together"),
        ((None, 0, None), "--processes, --coordinator: "),
        ((2, 2, "a:1"), "--process 2: 2 processes have the numbers 0 to 1"),
        ((2, -1, "a:1"), "--process -1"),
        ((2, 0, "a"), "--coordinator a: use HOST:PORT"),
        ((2, 0, ":80"), "--coordinator :80"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        launch(*given)


def test_the_command_line_goes_first():
    assert launch(2, 1, "[::1]:80") == Launch("[::1]:80", 2, 1)
    assert launch(1, None, None) is launch(1, 0, "a:1") is None


@pytest.mark.parametrize(
    ("environment", "address", "rest"),
    [
        (SLURM, r"node3:\d+", (4, 3, (1,))),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, r"127\.0\.0\.1:6\d{4}", (4, 3, (1,))),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, r"10\.96\.0\.1:\d+", (2, 1, (0,))),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, r"127\.0\.0\.1:6\d{4}", (2, 1, (0,))),
        (SLURM | {"SLURM_NTASKS": "1"}, None, None),
        ({}, None, None),
    ],
)
def test_clusters_are_detected(environment, address, rest, monkeypatch):
    """On one machine the coordinator is where no other can reach it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = launching._detected()
    if address is None:
        assert result is None
        return
    import re

    assert (
        re.fullmatch(address, result.coordinator)
        and (result.count, result.index, result.devices) == rest
    )


def test_a_process_that_does_not_reach_the_others_may_start_again(monkeypatch):
    def too_late(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

    monkeypatch.setattr("jax.distributed.initialize", too_late)
    with pytest.raises(
        ProcessLost, match="process 1 of 2 cannot connect.*at a:1.*timed out"
    ) as lost:
        launching.start(Launch("a:1", 2, 1))
    assert lost.value.exit_code == 76
