"""Chat templates that TRL ships: every answer is learned once, and nothing else is."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import chat_templates  # noqa: E402

TEMPLATES = dict(chat_templates.templates())
NO_SYSTEM = ("gemma",)
"""Templates that refuse a system message."""
APPENDING = ("qwen2_5", "llama3", "gemma3", "deepseekv3", "cohere2", "phi3")
REWRITING = {"qwen3": 3, "qwen3_5_think": 3, "gptoss": 3}
"""Rows of a conversation with three answers."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_learned_once_and_nothing_else(name):
    for answers, options in (
        (1, {}),
        (3, {}),
        (2, {"reasoning": True}),
        (2, {"system": name not in NO_SYSTEM}),
    ):
        messages = chat_templates.conversation(answers, **options)
        rows = chat_templates.learned(TEMPLATES[name], messages)
        assert not chat_templates.wrong(rows, answers), rows
    if name in NO_SYSTEM:
        assert (
            chat_templates.verdict(TEMPLATES[name], chat_templates.conversation(1, system=True))
            == "refused"
        )


def test_templates_that_only_append_have_one_row_and_others_one_for_each_turn_that_they_rewrite():
    talk = chat_templates.conversation(3)
    rows = {
        name: chat_templates.verdict(TEMPLATES[name], talk) for name in (*APPENDING, *REWRITING)
    }
    assert rows == {
        **dict.fromkeys(APPENDING, "1"),
        **{name: str(count) for name, count in REWRITING.items()},
    }
