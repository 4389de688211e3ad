"""Arrays that live in host memory (`pinned_host`), and computing on them where they are.

On a TPU what `on_host` computes runs on the host's processors in the middle of the program; only its arguments and results move.
"""

from __future__ import annotations

import jax
from jax.experimental.compute_on import compute_on

KIND = "pinned_host"


def on_host(function, *trees):
    """function(*trees), computed by the host; the arguments are brought there if need be, and the result stays there."""
    there = jax.device_put(trees, jax.memory.Space.Host)
    return jax.device_put(compute_on("device_host")(jax.jit(function))(*there), jax.memory.Space.Host)


def to_device(tree):
    return jax.device_put(tree, jax.memory.Space.Device)
