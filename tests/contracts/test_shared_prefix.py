"""Beginnings that sequences share are computed once, with the numbers of the sequences alone.

The oracle is the packed update of the same trainer without trees: log-probabilities, entropies,
loss, metrics, gradients and counts of experts of groups of uneven lengths, of which some are cut.
"""

from dataclasses import replace

import jax
import learners
import numpy as np
import pytest
import shared_prefixes
from oracles import KINDS, by_kind, configuration, random_model

from policy import families
from policy.attention import block_attention
from policy.config import Runtime
from rl.training.auxiliary_losses import auxiliary_loss, totals
from rl.training.packing.trees import Sharing
from rl.training.weights import Weights

UNROLLED = Runtime(remat="none", scan=False)
SCANNED = Runtime(remat="full", scan=True)
GATED = 3e-5  # a gate whose gradient is a sum over all tokens of terms that cancel
GRPO = {"name": "grpo", "kl_coef": 0.1, "aggregation": "sequence"}


def model_of(kind: str, runtime: Runtime):
    keys = KINDS[kind].standard | KINDS[kind].short
    return random_model(families.read(configuration(kind, **keys)), runtime=runtime)


def results(trainer, params, data) -> tuple:
    """(loss, metrics, counts of experts, gradients) of an update on all packed rows at once."""
    packing = trainer.packing_of(data)[0]
    batch = packing.batch(data)
    inputs, counted = trainer.loss_inputs(batch), totals(batch)
    floats = {
        path: array for path, array in params.items() if np.issubdtype(array.dtype, np.floating)
    }

    def loss(weights):
        output = trainer._policy_loss(Weights(policy=params | weights), batch, inputs)
        auxiliary, more = auxiliary_loss(trainer.stage, output.aux, batch, counted)
        return output.loss + auxiliary, (
            output.metrics | more,
            {p: each.counts for p, each in output.aux.by_layer("routing").items()},
        )

    (value, (metrics, counts)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
    return value, metrics, counts, grads


def check(kind: str, runtime: Runtime, **options):
    model = model_of(kind, runtime)
    recurrent = any(spec.is_recurrent for spec in model.graph.config.layers)
    experts = any(spec.moe for spec in model.graph.config.layers)
    router = {"bias_rate": 0.05, "balance_coef": 0.3} if experts else {}
    stage = learners.stage(GRPO, router=router, **options)
    modules = model.graph.config.multi_token_prediction
    sharing = Sharing(2, ahead=modules.depth if stage.mtp and modules else 0, one_level=recurrent)
    (plain, state), (trees, _) = shared_prefixes.pair(model, stage, sharing)
    data = shared_prefixes.groups(model.graph.config.vocab_size)
    packing = trees.packing_of(data)[0]
    assert packing.distinct < 0.8 * len(packing.source) and packing.tree.count.max() >= 3
    ours, theirs = (trainer.logprobs(state.policy.params, data) for trainer in (trees, plain))
    bound = 5e-5 if recurrent else 1e-5
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=bound)
    (loss, metrics, counts, grads), (loss_alone, alone, counts_alone, grads_alone) = (
        results(trainer, state.policy.params, data) for trainer in (trees, plain)
    )
    np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
    for name in alone:
        np.testing.assert_allclose(metrics[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for path in counts_alone:
        np.testing.assert_array_equal(counts[path], counts_alone[path])
    worst = shared_prefixes.differences(grads_alone, grads)
    bound = 2e-4 if recurrent else GATED if kind == "Gemma4Small" else 1e-5
    assert max(worst.values()) < bound, max(worst.items(), key=lambda each: each[1])


TEXT = [kind for kind in KINDS if "VL" not in kind and "Omni" not in kind]


@pytest.mark.parametrize("kind", by_kind(TEXT, always=("DeepseekV3", "Gemma3", "Qwen3Next")))
def test_numbers_are_those_of_sequences_alone(kind):
    check(kind, UNROLLED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "DeepseekV32", "Qwen3Next", "Llama4"])
def test_they_are_with_scanned_layers_that_compute_again(kind):
    check(kind, SCANNED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime", [UNROLLED, SCANNED, replace(SCANNED, remat="minimal_with_context")], ids=str
)
@pytest.mark.parametrize("kind", ["Gemma3", "Llama4", "DeepseekV3"])
def test_they_are_with_attention_in_blocks(kind, runtime, monkeypatch):
    """Blocks of 8, so that these short rows have five: windows, chunks and latent attention."""
    sizes, run = [], block_attention.block_attention
    monkeypatch.setitem(block_attention.SIZES, "cpu", 8)
    monkeypatch.setattr(
        block_attention,
        "block_attention",
        lambda spec, *a: sizes.append(spec.size) or run(spec, *a),
    )
    check(kind, runtime)
    assert set(sizes) == {8}


def test_one_token_of_a_completion_changes_its_row_alone_and_one_of_a_prompt_its_group():
    model = model_of("Llama", UNROLLED)
    (_, state), (trees, _) = shared_prefixes.pair(model, learners.stage(GRPO))
    data = shared_prefixes.groups(model.graph.config.vocab_size)
    before = trees.logprobs(state.policy.params, data)[0]
    for row, column, rows in ((1, 8, [1]), (2, 3, [0, 1, 2, 3])):
        tokens = data.tokens.copy()
        changed = np.isin(np.arange(len(tokens)), rows)
        tokens[changed, column] = (tokens[row, column] + 1) % model.graph.config.vocab_size
        after = trees.logprobs(state.policy.params, data.replace(tokens=tokens))[0]
        same = (after == before).all(axis=1)
        np.testing.assert_array_equal(same, ~changed)


def test_the_first_token_of_a_completion_is_trained():
    """With a mask of first tokens alone: their log-probabilities, the loss and its gradient are
    those of rows alone."""
    model = model_of("Llama", UNROLLED)
    (plain, state), (trees, _) = shared_prefixes.pair(model, learners.stage({"name": "grpo"}))
    data = shared_prefixes.groups(model.graph.config.vocab_size)
    first = (np.cumsum(data.mask, axis=1) == 1) & (data.mask > 0)
    data = data.replace(mask=first.astype(np.float32))
    (loss, _, _, grads), (alone, _, _, expected) = (
        results(trainer, state.policy.params, data) for trainer in (trees, plain)
    )
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    norms = {path: float(np.linalg.norm(grad)) for path, grad in expected.items()}
    assert min(norms[path] for path in norms if "q_proj" in path) > 1e-3
    assert max(shared_prefixes.differences(expected, grads).values()) < 1e-5


@pytest.mark.slow
def test_values_before_and_after_each_token():
    model = model_of("Llama", UNROLLED)
    (plain, state), (trees, _) = shared_prefixes.pair(
        model, learners.stage({"name": "ppo", "value_init_std": 0.3})
    )
    data = shared_prefixes.groups(model.graph.config.vocab_size)
    for one, other in zip(trees.values(state, data), plain.values(state, data), strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5)
