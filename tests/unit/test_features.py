"""Losses of recorded features: a worked example, which layers are compared, widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.heads.features import feature_loss

# Computed with numpy in float64. [L, T, E]; the third token is masked.
STUDENT = np.array([[[1, 0], [0.5, -0.5], [2, 2]], [[0, 1], [1, 1], [0, 0]]], np.float32)
TEACHER = np.array([[[0.5, 0.5], [1, 0], [1, 0]], [[0, 2], [-1, 1], [3, 1]]], np.float32)
MASK = np.array([[1, 1, 0]])
LOSSES = {
    "cosine": [[0.292893, 0.292893, 0.292893], [0, 1, 1]],
    "squared": [[0.25, 0.25, 2.5], [0.5, 2, 5]],
}
MEANS = {"cosine": (0.396447, 0.5), "squared": (0.75, 1.25)}  # of both layers, of the second alone


def by_layer(array_LTE):
    return {n: jnp.asarray(layer[None]) for n, layer in enumerate(array_LTE)}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_worked_example(kind):
    everywhere = np.ones((1, 3))
    for n in range(2):
        result = feature_loss(
            by_layer(STUDENT), by_layer(TEACHER), everywhere, kind, pairs=[(n, n)]
        )
        np.testing.assert_allclose(result[0], LOSSES[kind][n], atol=1e-6)
    means = [
        float(feature_loss(by_layer(STUDENT), by_layer(TEACHER), MASK, kind, pairs).sum()) / 2
        for pairs in (None, [(1, 1)])
    ]
    assert means == pytest.approx(MEANS[kind], abs=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_reach_the_student_and_the_projections_only(kind):
    """Against differences in float64, layers of other numbers and widths; at a feature of 0 the
    gradient is finite."""
    rng = np.random.default_rng(0)
    s, t, maps = rng.normal(size=(2, 3, 2)), rng.normal(size=(3, 3, 4)), rng.normal(size=(2, 2, 4))
    pairs, s[1, 1] = [(0, 2), (1, 0)], 0.0

    def ours(s, t, maps):
        return feature_loss(by_layer(s), by_layer(t), MASK, kind, pairs, maps).sum()

    def defined(s, maps):
        total = 0.0
        for i, (n, m) in enumerate(pairs):
            a, b = s[n] @ maps[i], t[m]
            norms = np.maximum(1e-6, np.linalg.norm(a, axis=1)) * np.linalg.norm(b, axis=1)
            rows = (
                1 - (a * b).sum(axis=1) / norms
                if kind == "cosine"
                else np.square(a - b).mean(axis=1)
            )
            total += (rows * MASK[0]).sum() / len(pairs)
        return total

    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2)))
    value, (g_s, g_t, g_maps) = step(*map(jnp.float32, (s, t, maps)))
    assert float(value) == pytest.approx(defined(s, maps), abs=1e-6)
    assert np.isfinite(g_s).all()
    np.testing.assert_array_equal(g_t, 0.0)

    def difference(array, function):
        result = np.zeros(array.shape)
        for at in np.ndindex(array.shape):
            steps = []
            for sign in (1, -1):
                moved = array.copy()
                moved[at] += sign * 1e-6
                steps.append(function(moved))
            result[at] = (steps[0] - steps[1]) / 2e-6
        return result

    away = np.ones((2, 3), bool)
    away[1, 1] = kind == "squared"  # near 0 the cosine bends within the step of the difference
    np.testing.assert_allclose(
        g_s[away], difference(s, lambda a: defined(a, maps))[away], atol=1e-5
    )
    np.testing.assert_allclose(g_maps, difference(maps, lambda a: defined(s, a)), atol=1e-5)


def test_layers_and_widths_that_do_not_fit_are_refused():
    student, teacher = by_layer(STUDENT), by_layer(np.concatenate([TEACHER, TEACHER]))
    with pytest.raises(
        ValueError, match=r"layers \[0, 1\] and the teacher at \[0, 1, 2, 3\]; name the pairs"
    ):
        feature_loss(student, teacher, MASK)
    with pytest.raises(
        ValueError, match=r"the teacher has none at layer 4; it has them at \[0, 1, 2, 3\]"
    ):
        feature_loss(student, teacher, MASK, pairs=[(0, 4)])
    wide = {n: jnp.concatenate([a, a], axis=-1) for n, a in by_layer(TEACHER).items()}
    with pytest.raises(
        ValueError, match=r"layer 0 of the student has width 2, layer 0 of the teacher 4"
    ):
        feature_loss(student, wide, MASK)
    with pytest.raises(ValueError, match="1 projections for 2 pairs"):
        feature_loss(student, wide, MASK, projection=[jnp.ones((2, 4))])
