"""The algorithms of a run: every file in this folder without a leading underscore is one.

An algorithm file defines the frozen dataclass `Algorithm`. Its fields are its YAML keys. It defines

    stage                          the kind of stage that runs it: a file of rl/stages/
    inputs                         names of rl/stages/inputs.py that the stage provides
    needs_rewards                  whether it learns from rewards; if not, a stage that samples may
                                   have none
    repeated_inputs                further inputs, if a step makes several updates
    select_old_logp(...)           which array of a Batch or PolicyInputs holds the old
                                   log-probabilities, with rollouts
    adaptive_coefs                 initial values of the scalars that it adapts during training;
                                   the loss reads PolicyInputs.adaptive_coefs
    adapt_after_update(...)        their values after an update
    adapt_after_step(...)          their values after a step
    with_coefs(coefs)              the algorithm with these values, for `advantages` on the host
    with_totals(PolicyInputs)      the mini-batch with its counts, before it is cut into
                                   micro-batches
    metric_names                   metrics of the loss that docs/metrics.md lacks
    loss(PolicyInputs)             device: (scalar, metrics), differentiable in logp and entropy
    per_token(Tokens)              device: (loss of each token, metrics), for a `PolicyGradient`
    advantages(rewards, lengths)   host, with rollouts: float[P,G], NaN where a completion has no
                                   score -> float[P,G], or float[P,G,T] of tokens; further inputs
                                   come by name
    estimate(rewards, lengths, batch)
                                   host: (advantages, returns or None, metrics); calls `advantages`
                                   by default
    value_loss(...), correct(...), critic_trunk, critic_warmup, value_init_std
                                   with a critic; see `ppo`

The trainer knows no algorithm by name. Nothing here imports jax before `PolicyInputs` or a loss is
asked for: `get` also serves the check of a configuration.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from typing import TYPE_CHECKING, Any, TypeVar

from rewards.suggest import nearest

if TYPE_CHECKING:
    import jax
    import numpy as np
    from pydantic import ValidationError

    from rl.algorithms._inputs import PolicyInputs

MetricArray = TypeVar("MetricArray", "np.ndarray", "jax.Array")

__all__ = ["PolicyInputs", "get", "known", "neutral_value", "reduce_metrics"]


def known() -> list[str]:
    """Returns the sorted names of the algorithms."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )


def get(name: str, **options: Any) -> Any:
    """Returns the algorithm `name` with these options; other options keep their defaults.

    Raises ValueError for an unknown algorithm, and pydantic's ValidationError (a ValueError that
    lists all faults, each with its option) for an unknown option or a value of the wrong type or
    range.
    """
    if name not in known():
        raise ValueError(f"unknown algorithm {name!r}{nearest(name, known())}")
    algorithm = importlib.import_module(f"{__name__}.{name}").Algorithm

    from pydantic import ValidationError

    try:
        return algorithm(**options)
    except ValidationError as error:
        raise _with_nearest_names(
            error, name, [field.name for field in dataclasses.fields(algorithm)]
        ) from None


def reduce_metrics(stacked: dict[str, MetricArray]) -> dict[str, MetricArray]:
    """Reduces metrics of M micro-batches, each stacked to an array [M], to metrics of the
    mini-batch.

    Means are already divided by counts of the mini-batch, so they are summed; `*_max` and `*_min`
    take the extreme, and the effective sample size follows from the first two moments of the
    weights. Works on numpy and jax arrays, also under jit.
    """
    reduced = {}
    for key, values in stacked.items():
        if key.endswith("_max"):
            reduced[key] = values.max(axis=0)
        elif key.endswith("_min"):
            reduced[key] = values.min(axis=0)
        else:
            reduced[key] = values.sum(axis=0)
    if "sampler/ess" in reduced:
        square_mean = reduced["sampler/is_ratio_square_mean"].clip(
            min=1e-30
        )  # 0 where the batch has no token
        reduced["sampler/ess"] = reduced["sampler/is_ratio_mean"] ** 2 / square_mean
    return reduced


def neutral_value(key: str) -> float:
    """Returns the neutral value of a metric in `reduce_metrics`."""
    return -math.inf if key.endswith("_max") else math.inf if key.endswith("_min") else 0.0


def __getattr__(name: str) -> Any:
    if name == "PolicyInputs":
        return importlib.import_module(f"{__name__}._inputs").PolicyInputs
    if name in known():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _with_nearest_names(
    error: ValidationError, algorithm: str, names: list[str]
) -> ValidationError:
    """Returns the same faults, with the nearest valid name and the full list for unknown
    options."""
    from pydantic import ValidationError
    from pydantic_core import InitErrorDetails, PydanticCustomError

    details = []
    for fault in error.errors():
        kind = fault["type"]
        if kind == "unexpected_keyword_argument":
            option = fault["loc"][-1]
            text = f"{algorithm} has no option {option!r}{nearest(option, names)}"
            kind = PydanticCustomError(
                "unknown_option", "{text}", {"text": text, "algorithm": algorithm}
            )
        details.append(
            InitErrorDetails(
                type=kind, loc=fault["loc"], input=fault["input"], ctx=fault.get("ctx", {})
            )
        )
    return ValidationError.from_exception_data(algorithm, details)
