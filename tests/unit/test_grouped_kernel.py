"""Kernels of grouped products, interpreted, against `jax.lax.ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from policy.ops import grouped_kernel


@pytest.mark.parametrize(
    ("M", "sizes"),
    [
        (300, [100, 0, 150, 50]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(300, [0, 40, 0, 3]), (128, [128, 0, 0, 0]), (700, [513, 1, 0, 130])]
        ),
    ],
    ids=["all", "few", "one group", "blocks"],
)
def test_products_and_gradients_are_those_of_ragged_dot(M, sizes):
    """Rows that no group has, of which the last of a block are, are anything: no gradient may know
    them."""
    E, F, G = 256, 384, len(sizes)
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((M, E), (G, E, F), (M, F))
    )
    sizes, used = jnp.asarray(sizes, jnp.int32), (np.arange(M) < sum(sizes))[:, None]
    given = jnp.where(used, rows, jnp.nan)

    def computed(product, rows, cotangent):
        out, back = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        d_rows, d_weights = back(cotangent)
        return [
            np.asarray(a, np.float32)
            for a in (jnp.where(used, out, 0), jnp.where(used, d_rows, 0), d_weights)
        ]

    expected = computed(jax.lax.ragged_dot, rows, jnp.where(used, cotangent, 0))
    result = computed(
        lambda *a: grouped_kernel.product(*a, True), given, jnp.where(used, cotangent, jnp.nan)
    )
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_rows_that_differ_by_device_computed_again_for_the_gradient():
    """Inside `jax.shard_map`, whose rules hold for one device as well: rows differ over it, weights
    do not. Rematerialisation makes programs anew that know nothing of how the first was traced."""
    E = F = 128
    sizes, rng = jnp.asarray([33, 0, 50], jnp.int32), np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((100, E), (3, E, F), (100, F))
    )
    mesh, cut, seen = (
        jax.sharding.Mesh(jax.devices()[:1], ("x",)),
        PartitionSpec("x"),
        (np.arange(100) < 83)[:, None],
    )

    def over(product):
        def local(rows, weights):
            def body(rows, _):
                return jnp.tanh(jnp.where(seen, product(rows, weights, sizes), 0)), None

            return jax.lax.scan(jax.checkpoint(body), rows, None, length=2)[0]

        run = jax.shard_map(local, mesh=mesh, in_specs=(cut, PartitionSpec()), out_specs=cut)
        return jax.jit(
            jax.grad(lambda rows, weights: jnp.sum(run(rows, weights) * cotangent), (0, 1))
        )(rows, weights)

    result, expected = over(lambda *a: grouped_kernel.product(*a, True)), over(jax.lax.ragged_dot)
    for one, other in zip(
        (result[0][:83], result[1]), (expected[0][:83], expected[1]), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())
