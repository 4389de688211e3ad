"""The note of a run whose groups have equal rewards: once, on ill runs only, for algorithms that
learn nothing from them.
"""

import json
from pathlib import Path

import pytest

import rl.stages
from rl.run.health.equal_rewards import MOST, RECENT, EqualRewards
from rl.run.load import load

RECORDED = Path(__file__).resolve().parents[1] / "illnesses" / "recorded"
ILL = ("equal_rewards", "learning_rate", "learning_rate_updates", "template_plain")
HARD = {"reward/frac_zero_std": 0.84, "reward/mean": 0.02, "reward/std": 0.14}
SOLVED = {"reward/frac_zero_std": 1.0, "reward/mean": 1.0, "reward/std": 0.0}


def notes(steps, *overrides, fresh=True):
    """(step, note) of the notes about these steps of the last stage of the quickstart."""
    stage = rl.stages.create(load(["configs/quickstart.yml"], overrides))[-1]
    watch = EqualRewards(stage, fresh)
    return [
        (step, text) for step, metrics in enumerate(steps, 1) if (text := watch.after_step(metrics))
    ]


def test_problems_that_are_too_hard_are_noted_once():
    ((step, text),) = notes([HARD] * 40)
    assert step == RECENT and text.startswith(
        "grpo: 84% of the groups of the last 10 steps have equal rewards"
    )
    for words in (
        "0.02",
        "nothing to learn",
        "easier problems",
        "stages.1.samples_per_prompt (now 8)",
        "dynamic_batches",
    ):
        assert words in text
    assert (
        "dynamic_batches"
        not in notes([HARD] * 40, "stages.1.algorithm={name: dapo, dynamic_batches: 4}")[0][1]
    )


def test_most_of_the_recent_steps_have_to_have_equal_groups():
    mixed = HARD | {"reward/frac_zero_std": 0.5}
    assert notes([mixed] * (RECENT - MOST) + [HARD] * MOST)
    assert not notes(([mixed] * (RECENT - MOST + 1) + [HARD] * (MOST - 1)) * 4)


def test_solved_problems_are_no_reason_for_a_note_unless_the_reward_never_differed():
    start = HARD | {"reward/frac_zero_std": 0.2}
    assert not notes([start, *[SOLVED] * 40]) and not notes([SOLVED] * 40, fresh=False)
    assert "every one 1: " in notes([SOLVED] * 40)[0][1]
    assert not notes([HARD | {"reward/mean": 0.9}] * 40)
    assert notes([HARD | {"reward/mean": 0.9}] * 40, "evaluation.correct_at=2")


@pytest.mark.parametrize(
    "override",
    [
        "stages.1.algorithm={name: reinforce_pp}",  # compares with the batch
        "stages.1.algorithm={name: ppo}",  # with a critic
        "stages.1.algorithm={name: remax}",  # with a greedy completion
        "stages.1.algorithm={name: raft}",  # trains on the best one of any group
        "stages.1.algorithm={name: rloo, kl_reward_coef: 0.1}",  # its penalties differ in a group
    ],
)
def test_an_algorithm_that_learns_from_equal_groups_gets_no_note(override):
    assert not notes([HARD] * 40, override)


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir()))
def test_recorded_runs(name):
    rows = [
        json.loads(line) for line in (RECORDED / name / "events.jsonl").read_text().splitlines()
    ]
    steps = [row["metrics"] for row in rows if row["stage"] == "grpo" and row["step"]]
    steps = [
        {key: float("nan") if value is None else value for key, value in each.items()}
        for each in steps
    ]
    assert len(notes(steps)) == (name in ILL)
