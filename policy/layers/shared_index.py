"""The keys that an indexer chooses for later layers as well (Indexer.keeps, SharedIndexer).

A layer that keeps its choice reports it as `LayerAux.selection`, and the layers after it find it in
`Step.selection`: columns of the row, of its cache if there is one, -1 where there are fewer. All
layers see the same columns. The choice never passes from one repeat of a stack to the next.

R repeats of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policy.cache.step import Step
from policy.config import LayerSpec
from policy.intermediates import LayerAux


def after_layer(spec: LayerSpec, step: Step, aux: LayerAux) -> Step:
    """Returns the step for the next layers of a pattern."""
    return replace(step, selection=aux.selection) if spec.keeps_index else step


def for_later_stacks(
    specs: Sequence[LayerSpec], step: Step, outputs: tuple[LayerAux, ...], recorded: bool
) -> tuple[Step, tuple[LayerAux, ...]]:
    """Returns the step for later stacks, with the last choice of a stack, and the outputs of the
    stack, without choices unless they are `recorded`.

    outputs: one LayerAux with arrays [R, ...] for each of the R repeats and each layer of the
    pattern.
    """
    for spec, output in zip(specs, outputs, strict=True):
        if spec.keeps_index:
            selection = None if output.selection is None else output.selection[-1]
            step = replace(step, selection=selection)
    return step, outputs if recorded else tuple(replace(each, selection=None) for each in outputs)
