"""What a layer records of its mixer is the output of the attention module of transformers, scanned
and unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, by_kind, oracle, saved, tokens

import policy
from policy.heads.features import by_number
from policy.modes import make_step

# Attention; with a norm after it; latent attention; gated delta net and attention.
MIXING = ("Llama", "Gemma3", "DeepseekV3", "Qwen3Next")


def of_transformers(model, rows):
    """The outputs of the modules named so, in the order of the layers: [L, B, T, E]."""
    import torch

    outputs = []
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("self_attn", "linear_attn"):
            module.register_forward_hook(
                lambda _m, _i, out: outputs.append(
                    (out[0] if isinstance(out, tuple) else out).numpy()
                )
            )
    with torch.no_grad():
        model(torch.tensor(rows), use_cache=False)
    return np.stack(outputs)


@pytest.mark.parametrize("kind", by_kind(MIXING, always=("Llama", "DeepseekV3", "Qwen3Next")))
def test_the_output_of_each_mixer(kind, tmp_path):
    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    model, rows = policy.load(saved(theirs, tmp_path)), tokens(2, 9)
    expected = of_transformers(theirs, rows)
    for how in ({}, {"scan": False, "remat": "none"}):
        graph = model.graph.with_runtime(record=("mixed",), **how)
        aux = jax.jit(
            lambda params, graph=graph: graph.aux(
                params, jnp.asarray(rows), make_step(jnp.asarray(rows))
            )
        )(model.params)
        for path, stacked in aux.by_layer("mixed").items():
            assert stacked.shape == (
                len(graph.config.layer_numbers(path)),
                2,
                9,
                graph.config.hidden_size,
            )
        mixed = by_number(aux, graph.config, "mixed")
        assert list(mixed) == list(range(len(graph.config.layers)))
        # Errors add up over the layers: the tolerance of the logits of this kind.
        np.testing.assert_allclose(
            np.stack([*mixed.values()]),
            expected,
            atol=KINDS[kind].logits * (1 + np.abs(expected).max()),
        )
