"""Schedules of coefficients over the steps of a stage, against their formulas."""

import subprocess
import sys

import numpy as np
import pytest

from rl.algorithms._schedules import scheduled


def test_values_along_a_stage():
    t = np.linspace(0.0, 1.0, 5)
    linear = [scheduled("linear", 2.0, 1.0, each) for each in t]
    cosine = [scheduled("cosine", 2.0, 1.0, each) for each in t]
    np.testing.assert_allclose(linear, 2.0 + (1.0 - 2.0) * t, rtol=1e-15)
    np.testing.assert_allclose(
        cosine, 1.0 + (2.0 - 1.0) * (1.0 + np.cos(np.pi * t)) / 2.0, rtol=1e-15
    )
    assert {scheduled("constant", 0.3, 0.9, each) for each in t} == {0.3}
    assert scheduled("linear", 0.3, None, 0.5) == scheduled("cosine", 0.3, None, 0.5) == 0.3


def test_after_the_last_step_the_end_stays():
    assert scheduled("linear", 2.0, 1.0, 1.5) == 1.0 and scheduled("cosine", 2.0, 1.0, 7.0) == 1.0
    assert scheduled("linear", 2.0, 1.0, -1.0) == 2.0


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match="must be constant, linear or cosine"):
        scheduled("square", 2.0, 1.0, 0.5)


def test_no_jax_is_needed():
    code = "import sys, rl.algorithms._schedules; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
