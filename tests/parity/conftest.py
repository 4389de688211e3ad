"""One pair of models for each kind of decoder, shared by the tests of logits, saved files, rows and
log-probabilities.
"""

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from oracles import STANDARD, oracle, reference_logits, saved, tokens

ROW = tokens(2, 70)  # what tests of a pair give to its models: one shape, so one program


@dataclass(frozen=True)
class Pair:
    """A model of transformers with what it says of ROW, float32[2, 70, V], the directory that it
    was saved to, and ours that was read from there."""

    theirs: object
    expected: object
    directory: Path
    ours: object

    def with_weights_of(self, other):
        """Ours with the weights of another model of the same configuration; they share compiled
        programs."""
        model = copy.copy(self.ours)
        model.params = other.params
        return model


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """pair(kind, keys) -> Pair of the standard configuration of a kind with these keys; made once
    in a process."""
    import policy

    @functools.cache
    def made(kind: str, keys: str) -> Pair:
        theirs = oracle(kind, **STANDARD[kind] | json.loads(keys))
        directory = saved(theirs, tmp_path_factory.mktemp(kind))
        ours = policy.load(directory)
        return Pair(theirs, reference_logits(theirs, ROW), directory, ours)

    return lambda kind, keys=None: made(kind, json.dumps(keys or {}))
