"""What a compiled update copies: XLA overwrites weights and moments where nothing reads the old ones
after the new ones."""

import re

import learners
import pytest


def copied(text: str) -> list[str]:
    """The arrays of learners that a compiled program copies, but counters."""
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r"= \w+\[\d[\d,]*\]\S* copy\(%(learners\w+)", entry)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "adafactor"])
def test_an_update_copies_no_weights_and_no_moments(name, all_optimizations):
    options = learners.stage(optimizer={"name": name})
    trainer, state = learners.begin(learners.dense(), options)
    call = learners.update_call(trainer, state, learners.batch(), micro_rows=4)
    text = call.lower().compile().as_text()
    assert text is not None
    assert copied(text) == []
