"""Runs that are made ill here and now, and what `rl explain` says of them."""

import sys

import launch
import pytest

from rl.reporting.explain import findings

sys.path.insert(0, str(launch.ROOT / "tests" / "illnesses"))

import make  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "illness"),
    [("learning_rate_sft", "learning rate too high"), ("mask", "wrong mask"), ("healthy_sft", None)],
)
def test_an_illness_is_named(tmp_path, name, illness):
    named = [each.illness for each in findings(make.make(name, tmp_path)) if each.alarm]
    assert named[:1] == ([illness] if illness else [])


@pytest.mark.slow
def test_every_illness_but_one_at_most_is_named(tmp_path):
    ill = {
        "equal_rewards": "equal rewards",
        "faults": "reward faults",
        "truncated": "clipped completions",
        "template_between": "wrong template",
        "stale": "stale groups",
    }
    missed = [
        name for name, each in ill.items() if each not in {f.illness for f in findings(make.make(name, tmp_path))}
    ]
    assert not missed
