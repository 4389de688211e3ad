"""The probe of a stage whose prompts have pictures, and a run whose pictures are never shown."""

from pathlib import Path

import pytest

from rl.run import build
from rl.run.health.probe import inspect_probe
from rl.run.load import load
from rl.run.prepare import prepare

FOLDER = Path(__file__).parents[1] / "end_to_end"
CONFIG, ROWS = FOLDER / "mixed.yml", FOLDER / "mixed_rows.py"
GRPO = (
    '{"algorithm": "grpo", "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, '
    '"sampling": {"max_new_tokens": 6}}'
)


def config(*more: str):
    return load(
        [CONFIG],
        [f"data.task={ROWS}:prompts", "evaluation=null", f"rewards.functions=[{ROWS}:odd]", *more],
    )


@pytest.mark.slow
def test_a_probe_shows_pictures_and_keeps_to_the_table_of_a_step():
    result = inspect_probe(config(f"stages=[{GRPO}]"), 16)
    assert result.prompts == 2 and result.logp_diff < 1e-5


def test_pictures_that_no_step_shows_need_no_rows():
    """Those of an evaluation behind its last problem."""
    given = config(
        f"data.task={ROWS}:text", f"evaluation={{data: {{task: '{ROWS}:unseen'}}, problems: 8}}"
    )
    prepared = prepare(given)
    try:
        assert prepared.data.has_media and not any(
            each.expanded for each in prepared.evaluation_problems
        )
        graph = build.prepared_graph(given, prepared, media=True)
        assert build.media_tables(given, prepared, graph).M == 1
    finally:
        prepared.close()
