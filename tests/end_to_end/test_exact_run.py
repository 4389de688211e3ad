"""A run with `generator.exact`: how its completions are decoded changes no number of it."""

import json

import launch
import pytest

from rl.records import events

STAGE = {
    "algorithm": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "updates_per_step": 2,
    "optimizer": {"learning_rate": 1e-3},
    "sampling": {"max_new_tokens": 6},
}
EXACT = ("generator.exact=true", "evaluation=null", f"stages={json.dumps([STAGE])}")


def numbers(directory):
    """What a run wrote, but for times and what the generator says of its own work."""
    rows = events.read(directory / "events.jsonl")
    kept = [
        {
            k: v
            for k, v in row["metrics"].items()
            if not k.startswith(("time/", "perf/", "generator/"))
        }
        for row in rows
    ]
    return kept, (directory / "samples.jsonl").read_text()


@pytest.mark.slow
def test_slots_chunks_and_dispatches_change_no_number_of_a_run(tmp_path):
    ways = {
        "one": ("generator.slots=4",),
        "other": (
            "generator.slots=1",
            "generator.prefill_chunk=4",
            "generator.tokens_per_dispatch=3",
        ),
    }
    for name, way in ways.items():
        assert launch.train(tmp_path / name, *EXACT, *way) == 0
    assert numbers(tmp_path / "one") == numbers(tmp_path / "other")
    assert launch.weights(tmp_path / "one") == launch.weights(tmp_path / "other")
    last = events.read(tmp_path / "one" / "events.jsonl")[-1]["metrics"]
    assert last["sampler/logp_diff_max"] == 0.0 and last["generator/replaced_share"] < 0.05
    assert abs(last["kl/approx_update"]) > 1e-6
