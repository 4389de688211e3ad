"""Loads model directories on a mesh of eight CPU devices and compares them with one device: run by
test_loading_on_a_mesh.py.

    python load_on_mesh.py DIRECTORY ...

Prints a JSON object: for each directory whether all weights have the same bits, floats and those
that are quantised as they are read, the number of weights that are cut into pieces, and the largest
difference of logits.
"""

import json
import sys

import jax
import numpy as np

import policy
from policy.mesh.sharding import layout


def compare(directory: str) -> dict:
    mesh = layout({"fsdp": 2, "tensor": 2, "expert": 2})
    one, many = policy.load(directory), policy.load(directory, mesh=mesh)
    same = all(
        np.array_equal(np.asarray(array), np.asarray(many.params[path]))
        for path, array in one.params.items()
    )
    cut = sum(
        len({str(s.index) for s in array.addressable_shards}) > 1 for array in many.params.values()
    )
    tokens = np.random.default_rng(0).integers(0, one.config.vocab_size, (8, 12))
    difference = float(
        np.abs(np.asarray(one.logits(tokens)) - np.asarray(many.logits(tokens))).max()
    )
    quantised = [
        policy.load(directory, base_weights="nf4", base_block=8, mesh=each).params
        for each in (None, mesh)
    ]
    equal = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), *quantised)
    return {
        "same": same and all(jax.tree.leaves(equal)),
        "cut": cut,
        "weights": len(one.params),
        "difference": difference,
    }


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps({directory: compare(directory) for directory in sys.argv[1:]}))
