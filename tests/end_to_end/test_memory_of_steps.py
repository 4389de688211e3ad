"""Nothing that grows with the number of steps stays in memory, in any kind of stage."""

import gc
import json
import sys

import launch
import pytest

from rl.records.events import Events

STEPS = 1500
EARLY = 500
"""The step from which on nothing may grow: by then all caches are full and all notes are said."""
MOST_BLOCKS = STEPS - EARLY
"""Fewer blocks of memory of the interpreter than one a step: what each step keeps has at least
one."""

PROMPT = {"prompt": "1+1=", "completion": "2", "answer": "2"}
ROWS = {
    "sft": [PROMPT, PROMPT | {"prompt": "2+1=", "completion": "3"}],
    "grpo": [PROMPT, PROMPT | {"prompt": "2+1="}],
    "ppo": [PROMPT, PROMPT | {"prompt": "2+1="}],
    "dpo": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "2+1=", "chosen": "3", "rejected": "2"},
    ],
    "kto": [PROMPT | {"label": True}, PROMPT | {"completion": "3", "label": False}],
    "reward_model": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "2+1=", "chosen": "3", "rejected": "2"},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ROWS)
def test_the_memory_of_a_run_does_not_grow_with_its_steps(algorithm, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[algorithm]))
    samples = (
        {"samples_per_prompt": 2, "sampling": {"max_new_tokens": 2}}
        if algorithm in ("grpo", "ppo")
        else {}
    )
    stage = {"algorithm": algorithm, "steps": STEPS, "prompts_per_step": 2, **samples}
    blocks = {}
    written = Events.step

    def step(self, stage, number, *arguments):
        written(self, stage, number, *arguments)
        if number in (EARLY, STEPS):
            gc.collect()
            blocks[number] = sys.getallocatedblocks()

    monkeypatch.setattr(Events, "step", step)
    changes = (
        "evaluation=null",
        "data.task=null",
        "data.options=null",
        f"data.path={file}",
        "run.log_every=1000",
    )
    kept = ("run.samples.every=0", f"run.checkpoint_every={10 * STEPS}", "max_length=16")
    assert launch.train(tmp_path / "run", *changes, *kept, f"stages={json.dumps([stage])}") == 0
    assert blocks[STEPS] - blocks[EARLY] < MOST_BLOCKS, blocks
