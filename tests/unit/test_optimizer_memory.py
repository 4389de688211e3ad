"""What an update copies: XLA overwrites weights and moments where nothing reads the old ones after
the new ones."""

import re

import learners
import pytest

import policy


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


def test_the_first_update_reuses_the_memory_of_loaded_weights(tmp_path):
    policy.save(learners.dense(), tmp_path)
    model = policy.load(tmp_path)
    trainer, state = learners.begin(model, learners.stage())
    before = addresses(state.policy.params)
    updated, _ = trainer.update(state, learners.batch())
    assert addresses(updated.policy.params) == before


def addresses(params: dict) -> dict[str, int]:
    return {path: array.unsafe_buffer_pointer() for path, array in params.items()}
