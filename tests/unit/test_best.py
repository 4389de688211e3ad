"""The best step of a stage, and the checkpoints that stay because of it."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from policy.mesh import processes
from rl.config.stage import BestOptions, UntilOptions
from rl.run.checkpoint import Checkpoints
from rl.run.resume.best import BestStep, BestSteps, named_by
from rl.run.state import Run
from rl.run.steps.until import is_reached

NAN = float("nan")


def best_of(mode: str, values) -> BestStep | None:
    steps = BestSteps(BestOptions(metric="m", mode=mode), None)
    for step, value in enumerate(values, start=1):
        steps.improved(step, step, value)
    return steps.newest


@pytest.mark.parametrize(
    ("mode", "values", "step"),
    [
        ("max", [1, 3, 2], 2),
        ("min", [1, 3, 2], 1),
        ("max", [2, 2, 2], 1),  # of equal values the first
        ("max", [NAN, 1, NAN], 2),
        ("min", [float("-inf"), 5, None, 4, None], 4),
        ("min", [None, NAN], None),
    ],
)
def test_the_best_step(mode, values, step):
    best = best_of(mode, values)
    assert (best and best.step) == step


def test_without_the_key_nothing_is_best():
    steps = BestSteps(None, {"best": {"number": 1, "step": 1, "value": 1.0}})
    assert not steps.improved(1, 1, 1.0) and steps.newest is None and steps.to_host() == {}


def test_a_best_step_that_could_not_be_saved_gives_way_to_the_one_before():
    options = BestOptions(metric="m", mode="max")
    steps = BestSteps(options, None)
    for step in (1, 2, 3):
        assert steps.improved(step, step, float(step))
    steps.keep({1, 2})  # the disk was full at step 3
    assert steps.newest == BestStep(2, 2, 2.0)
    again = BestSteps(options, steps.to_host())
    assert again.newest == steps.newest and not again.improved(4, 4, 2.0)
    again.keep({7})
    assert again.newest is None and again.improved(8, 8, 0.0)


def test_what_the_newest_checkpoints_need_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, needed=named_by)
    best = {1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 4}
    present = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 3, 4], 5: [4, 5], 6: [4, 5, 6]}
    for number, named in best.items():
        host = {"best": BestStep(named, named, 0.0)._asdict()}
        checkpoints.save(number, {"a": jnp.full(2, number)}, host, wait=True)
        assert sorted(checkpoints.numbers()) == present[number]
    fourth = checkpoints.find(4)
    assert fourth is not None and checkpoints.read(fourth, {"a": jnp.zeros(2, int)})[
        "a"
    ].tolist() == [4, 4]
    assert checkpoints.find(1) is None
    assert checkpoints.restore({"a": jnp.zeros(2, int)})[0] == 6
    (tmp_path / "0000000004" / "host.json").write_text("{}")
    assert checkpoints.find(4) is None
    checkpoints.save(7, {"a": jnp.zeros(2)}, {}, wait=True)
    checkpoints.save(8, {"a": jnp.zeros(2)}, {}, wait=True)
    assert sorted(checkpoints.numbers()) == [7, 8]
    checkpoints.close()


@pytest.mark.parametrize("own", [{}, {"eval/x": 9.0}, {"eval/x": NAN}])
@pytest.mark.parametrize(("first", "due"), [(0.5, False), (2.0, True), (None, False)])
def test_the_first_process_decides_which_step_is_best(monkeypatch, own, first, due):
    monkeypatch.setattr(processes, "broadcast", lambda value: first)
    saves = []
    best = BestSteps(
        BestOptions(metric="eval/x", mode="max"), {"best": {"number": 1, "step": 1, "value": 1.0}}
    )
    run = SimpleNamespace(
        best=best,
        checkpoints=SimpleNamespace(
            numbers=lambda: {1}, save=lambda number, *_, **__: saves.append(number)
        ),
        config=SimpleNamespace(stages=[SimpleNamespace(total_steps=9)]),
        events=SimpleNamespace(sync=lambda: True, rotate=lambda: None),
        timeline=SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext()),
        _host=lambda *_: {},
        _request_to_stop=lambda: None,
    )
    options = SimpleNamespace(best=best.options)
    settings = SimpleNamespace(run=SimpleNamespace(checkpoint_every=0))
    stage = SimpleNamespace(index=0, name="grpo", options=options, config=settings)
    assert not Run.save(run, stage, None, 2, False, own)
    assert saves == ([2] if due else []) and best.newest.value == (2.0 if due else 1.0)


@pytest.mark.parametrize("own", [{}, {"reward/mean": 0.1}, {"reward/mean": 0.99}])
@pytest.mark.parametrize(("first", "reached"), [(0.95, True), (0.5, False), (None, False)])
def test_the_first_process_decides_whether_until_is_reached(monkeypatch, own, first, reached):
    monkeypatch.setattr(processes, "broadcast", lambda value: first)
    assert is_reached(UntilOptions(metric="reward/mean", at_least=0.9), own) == reached
