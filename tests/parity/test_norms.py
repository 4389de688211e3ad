"""Norms in bfloat16, where the place of the cast shows; in float32 all of them agree."""

import numpy as np
import pytest
from oracles import KINDS, oracle, saved, short

import policy
from policy import families

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if families.read(short(kind)).has_final_norm]
)
def test_the_final_norm_rounds_where_that_of_transformers_does(kind, tmp_path):
    import jax.numpy as jnp

    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    ours = policy.load(saved(theirs, tmp_path), dtype="bfloat16")
    norm = next(
        module
        for name, module in theirs.named_modules()
        if name
        in (
            "model.norm",
            "model.norm_f",
            "model.final_layernorm",
            "model.embedding_norm",
            "transformer.ln_f",
        )
    ).bfloat16()
    x = torch.randn(
        200, ours.config.hidden_size, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    with torch.no_grad():
        expected = norm(x).float().numpy()
    result = np.asarray(
        ours.graph.decoder(ours.params).norm(jnp.asarray(x.float().numpy(), jnp.bfloat16)),
        np.float32,
    )
    # A root that differs in its last bit moves a rounding now and then; another order of cast and
    # weight moves a quarter of them.
    assert (result != expected).mean() < 0.01
