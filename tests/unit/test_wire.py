"""What processes tell each other comes back as it was, and nothing else travels."""

import math
from pathlib import Path

import numpy as np
import pytest

from policy.mesh import serialization
from rewards.workers.threads import Failure
from rl.data.datasets import Example
from rl.data.reader import Pair, Problem
from rl.errors import DataError, ResourceError
from rl.run.checkpoint import CheckpointError


def again(value):
    return serialization.read(serialization.write(value))


def test_values_come_back_as_they_were():
    example = Example(
        [{"role": "user", "content": "é\n"}],
        columns={"answer": 3, "list": [1.5, None, True]},
        where="a:1",
    )
    value = {
        3: (Problem(example, [1, 2]), Pair(([1], [0]), ([2], [1]), 0.25)),
        "path": Path("/a/b"),
        ("a", 1): [
            0.1,
            -math.inf,
            {},
            {"path": "no path"},
            {"dict": []},
            Failure("raised", "x"),
            np.float64(0.1),
            np.int32(7),
        ],
    }
    assert again(value) == value
    assert type(again(np.float64(0.5))) is float and math.isnan(again(math.nan))
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(again(array), array)
    assert again(array).dtype == np.float32


def test_errors_keep_their_class_or_the_nearest_one_that_is_known():
    class Full(ResourceError):
        """Not among them."""

    assert (
        type(again(DataError("row 6"))) is DataError and str(again(DataError("row 6"))) == "row 6"
    )
    assert (
        type(again(Full("disk"))) is ResourceError and type(again(FileExistsError("x"))) is OSError
    )
    assert type(again(CheckpointError("x"))) is CheckpointError


@pytest.mark.parametrize("value", [object(), {1: print}, [{1, 2}], 1j])
def test_nothing_else_travels(value):
    with pytest.raises(TypeError, match="cannot be told to the other processes"):
        serialization.write(value)
