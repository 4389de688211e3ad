"""One prompt, four completions of 4, 2, 3 and 1 tokens; float64 results for them were computed
apart, with numpy.

Where a row has ended every array holds garbage, so that each check also checks the masking.
"""

import numpy as np

import rl.algorithms

REWARDS = [[1.0, 0.0, 0.5, 0.0]]
LENGTHS = [4, 2, 3, 1]


def padded(rows, garbage=np.nan):
    array = np.full((len(rows), 4), garbage, np.float32)
    for row, values in enumerate(rows):
        array[row, : len(values)] = values
    return array


MASK = padded([[1] * length for length in LENGTHS], garbage=0)
LOGP = padded([[-0.5, -1, -0.2, -0.7], [-1.2, -0.3], [-0.8, -0.9, -0.4], [-2]])
OLD = padded([[-0.9, -1, -0.3, -0.6], [-0.8, -0.6], [-0.8, -0.5, -0.7], [-1.5]], garbage=-np.inf)
REF = padded([[-0.6, -1.3, -0.25, -0.7], [-1, -0.4], [-0.9, -0.9, -0.2], [-1.8]], garbage=np.inf)
SAMPLER = padded([[-0.95, -1, -0.28, -0.66], [-0.8, -0.55], [-1.9, -0.5, -0.7], [-1.5]])


def inputs(with_ref=False, with_sampler=False, **others):
    advantages = rl.algorithms.get("grpo").advantages(REWARDS)[0]
    arrays = {
        "logp": LOGP,
        "old_logp": OLD,
        "mask": MASK,
        "advantages": advantages,
        "prompt": np.zeros(4, np.int32),
    }
    if with_ref:
        arrays["ref_logp"] = REF
    if with_sampler:
        arrays["sampler_logp"] = SAMPLER
    return rl.algorithms.PolicyInputs(**arrays | {"max_length": 8} | others)


def close(actual, expected):
    """Within 5e-6: the written results have six decimals, the losses are float32."""
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=5e-6)
