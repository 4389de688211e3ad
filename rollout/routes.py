"""The experts that computed the tokens of a completion, as the generator's cache remembers them (policy.cache.routes).

What is kept lies in the cache beside keys and values: it is copied, shared, overwritten and taken back with them, so that a prompt
that another request has read brings its routes along. The last token of a completion was never fed: it has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from policy.config import DecoderConfig


def check(config: DecoderConfig) -> None:
    """Raises ValueError where there is nothing to record."""
    if not any(spec.moe for spec in config.layers):
        raise ValueError("record_routes: this model has no mixture of experts, so no token is routed anywhere")


@dataclass(frozen=True)
class Routes:
    """`arrays` uint[R, C, k] by path of the layer, on their way from the device, of which the first `tokens` entries count: those
    of prompt and completion without the last token."""

    arrays: dict[str, jax.Array]
    tokens: int

    @classmethod
    def of(cls, arrays: dict[str, jax.Array], tokens: int) -> Routes:
        """Starts the copy to the host, which need not wait for it."""
        for array in arrays.values():
            array.copy_to_host_async()
        return cls(arrays, tokens)

    def host(self) -> dict[str, np.ndarray]:
        """uint[R, tokens, k] by path of the layer, for the repeats of its stack."""
        return {path: np.asarray(array)[:, : self.tokens] for path, array in self.arrays.items()}
