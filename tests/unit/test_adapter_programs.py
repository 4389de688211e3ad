"""What the program of an update over an adapter holds: no gradient, moment or merged copy of a
weight under it."""

import functools
import math
import re

import learners
import numpy as np
import pytest
from adapted import with_adapter
from oracles import short

import policy
from policy import families
from policy.adapter_spec import AdapterSpec
from policy.config import Runtime
from policy.model import Model

ROWS = 8
LAYERS = 3
# Primes, so that no other array has as many numbers as a weight.
SIZES = {
    "vocab_size": learners.VOCAB,
    "hidden_size": 53,
    "moe_intermediate_size": 59,
    "num_hidden_layers": LAYERS,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mlp_only_layers": [],
}
SPECS = {
    "each": AdapterSpec(rank=4, alpha=6.0, expert_rank=3),
    "shared": AdapterSpec(rank=4, alpha=6.0, expert_rank=3, experts="shared"),
    "dora": AdapterSpec(rank=4, alpha=6.0, expert_rank=3, dora=True),
}
MOVED = {"slice", "dynamic_slice", "reshape", "transpose", "convert", "optimization_barrier"}
"""Operations that read a weight, or a layer of a stack, and compute nothing."""


@functools.cache
def base(weights: str | None = None, **how) -> Model:
    config = families.read(short("Qwen3Moe", **SIZES))
    return policy.create(config, base_weights=weights, runtime=Runtime(**how))


def lowered(model: Model):
    trainer, state = learners.begin(model, learners.stage("grpo"), fresh=True)
    return learners.update_call(trainer, state, learners.batch(ROWS), ROWS).lower()


def sizes(model: Model) -> tuple[set[int], set[int]]:
    """The numbers of each stacked weight, and those of a layer."""
    stacks = {math.prod(model.graph.shapes[path].shape) for path in model.graph.inputs}
    return stacks, {size // LAYERS for size in stacks}


def computed(model: Model) -> set[str]:
    """The operations of an update whose results are floats with as many numbers as a weight of a
    layer or of a stack, but for those that move it."""
    stacks, layers = sizes(model)
    operations = re.findall(
        r"= \"?stablehlo\.(\w+).*-> tensor<([\dx]+)xf32>|= stablehlo\.(\w+) .*: tensor<([\dx]+)xf32>",
        lowered(model).as_text(),
    )
    result = {
        (one or other, shape or same)
        for one, shape, other, same in operations
        if math.prod(map(int, (shape or same).split("x"))) in stacks | layers
    }
    return {f"{name} {shape}" for name, shape in result if name not in MOVED}


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", SPECS)
def test_an_update_computes_nothing_of_the_size_of_a_weight(form, scan):
    how = {"scan": scan, "remat": "full" if scan else "none"}
    assert not computed(with_adapter(base(**how), SPECS[form]))


def test_an_update_of_the_weights_computes_their_gradients_and_moments():
    names = {each.partition(" ")[0] for each in computed(base(remat="full"))}
    assert {"dot_general", "multiply", "add"} <= names


def made(model: Model) -> set[str]:
    """The arrays of floats of the compiled update with as many numbers as a stacked weight that are
    not its arguments or what loops hand on."""
    stacks, _ = sizes(model)
    handed_on = {"parameter", "get-tuple-element", "bitcast", "copy"}
    arrays = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", lowered(model).compile().as_text())
    return {
        f"{name} {shape}"
        for shape, name in arrays
        if name not in handed_on and np.prod([*map(int, shape.split(","))]) in stacks
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", SPECS)
@pytest.mark.parametrize("weights", [None, "nf4"])
def test_a_compiled_update_makes_no_array_of_the_size_of_a_stack(form, weights):
    assert not made(with_adapter(base(weights, remat="full"), SPECS[form]))
