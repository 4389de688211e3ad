"""Divergences of a student from a teacher: a worked example, differences of the definition in
float64, tiles and chunks against all logits at once, likeliest tokens, memory.

On meshes: tests/contracts/test_divergence_on_a_mesh.py; against TRL:
tests/parity/test_trl_divergence.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.config import LogitScaling
from policy.heads import head
from policy.heads.divergence import Divergence, DivergenceOutputs, divergence, top_divergence
from policy.heads.head import Tiling

KINDS = {
    "forward": Divergence("forward"),
    "reverse": Divergence("reverse"),
    "jsd .1": Divergence("jsd", 0.1),
    "jsd .5": Divergence("jsd", 0.5),
    "jsd .9": Divergence("jsd", 0.9),
}
# A worked example, computed with numpy in float64: 3 tokens of a vocabulary of 4, of which the
# first two are trained on.
STUDENT = jnp.asarray([[2, 1, 0, -1], [0.5, 0.5, -0.5, 1.5], [0, 3, -2, 1]], jnp.float32)
TEACHER = jnp.asarray([[1, 2, 0.5, -2], [1, 0, -1, 2], [-1, 2, 0, 2]], jnp.float32)
TOKENS, MASK = np.array([1, 3, 1]), np.array([1.0, 1.0, 0.0])
ROWS = {
    ("reverse", 1.0): [0.431143, 0.082608, 0.362097],
    ("reverse", 2.0): [0.106009, 0.027955, 0.143900],
    ("forward", 1.0): [0.415104, 0.067131, 0.494929],
    ("forward", 2.0): [0.104056, 0.026345, 0.161552],
    ("jsd .1", 1.0): [0.036960, 0.006136, 0.041648],
    ("jsd .5", 1.0): [0.101643, 0.018306, 0.099111],
    ("jsd .9", 1.0): [0.038062, 0.007229, 0.032995],
}
MEANS_AT_2 = {
    "jsd .1": 0.005866,
    "jsd .5": 0.016380,
    "jsd .9": 0.005993,
    "reverse": 0.066982,
    "forward": 0.065200,
}
GRADIENTS = {
    "reverse": [
        [0.194617, -0.165287, -0.039020, 0.009689],
        [-0.026439, 0.071867, 0.026439, -0.071867],
    ],
    "forward": [
        [0.207661, -0.192248, -0.025752, 0.010339],
        [-0.020135, 0.054734, 0.020135, -0.054734],
    ],
    "jsd .5": [
        [0.046599, -0.041103, -0.007816, 0.002320],
        [-0.005602, 0.015227, 0.005602, -0.015227],
    ],
}
TOP_2 = {
    ("forward", "renormalise"): [0.462117, 0.0, 0.433781],
    ("forward", "none"): [0.362506, 0.164122, 0.360477],
    ("forward", "tail"): [0.397013, 0.067131, 0.409630],
    ("reverse", "renormalise"): [0.462117, 0.0, 0.327813],
    ("reverse", "tail"): [0.410993, 0.082608, 0.322794],
}


compared = jax.jit(divergence, static_argnames=("spec", "scalings", "tiling"))


def of_logits(student, teacher, spec, temperature=1.0, **options) -> DivergenceOutputs:
    """The divergence of given logits: the states are the logits, the heads the identity."""
    identity = jnp.eye(student.shape[1])
    return compared(student, identity, teacher, identity, spec, jnp.float32(temperature), **options)


@pytest.mark.parametrize(("kind", "temperature"), ROWS)
def test_rows_of_the_worked_example(kind, temperature):
    result = of_logits(STUDENT, TEACHER, KINDS[kind], temperature)
    np.testing.assert_allclose(result.divergence, ROWS[kind, temperature], atol=1e-6)
    np.testing.assert_array_equal(result.agreement, [0, 1, 1])
    np.testing.assert_array_equal(result.outside, 0)


def test_means_of_the_worked_example_at_temperature_2_and_with_hard_targets():
    means = {
        kind: float(MASK @ np.asarray(of_logits(STUDENT, TEACHER, KINDS[kind], 2.0).divergence)) / 2
        for kind in MEANS_AT_2
    }
    assert means == pytest.approx(MEANS_AT_2, abs=1e-6)
    logp, _ = head.logprobs(STUDENT, jnp.eye(4), jnp.asarray(TOKENS), 1.0)
    soft, hard = 2.0**2 * means["forward"], -float(MASK @ np.asarray(logp)) / 2
    assert [soft, hard, (soft + hard) / 2] == pytest.approx(
        [0.260800, 1.033357, 0.647078], abs=2e-6
    )


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_the_worked_example(kind):
    gradient = jax.grad(lambda z: MASK @ of_logits(z, TEACHER, KINDS[kind]).divergence / 2)(STUDENT)
    np.testing.assert_allclose(gradient, [*GRADIENTS[kind], [0.0] * 4], atol=1e-6)


@pytest.mark.parametrize(("kind", "tail"), TOP_2)
def test_the_two_likeliest_tokens_of_the_worked_example(kind, tail):
    result = of_logits(STUDENT, TEACHER, Divergence(kind, top_k=2, tail=tail))
    np.testing.assert_allclose(result.divergence, TOP_2[kind, tail], atol=1e-6)
    np.testing.assert_allclose(result.teacher_mass, [0.849971, 0.880797, 0.915281], atol=1e-6)
    np.testing.assert_allclose(result.student_mass, [0.880797, 0.731059, 0.952574], atol=1e-6)


# The definition in numpy, float64.


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def defined(kind, beta, log_p, log_q):
    """The divergence of rows, from the formulas of arXiv 2306.13649."""
    p, q = np.exp(log_p), np.exp(log_q)
    if kind == "forward":
        return (q * (log_q - log_p)).sum(axis=-1)
    if kind == "reverse":
        return (p * (log_p - log_q)).sum(axis=-1)
    m = (1 - beta) * p + beta * q
    return (beta * q * np.log(q / m) + (1 - beta) * p * np.log(p / m)).sum(axis=-1)


def dense(h, w, ht, wt, spec, temperature, scalings=(LogitScaling(), LogitScaling())):
    """Rows of the divergence from all logits at once, float64."""
    V, logits = min(len(w), len(wt)), []
    for states, weight, scaling in ((h, w, scalings[0]), (ht, wt, scalings[1])):
        z, cap = scaling.scale * states @ weight.T, scaling.softcap
        logits.append((z if cap is None else cap * np.tanh(z / cap))[:, :V] / temperature)
    return defined(spec.kind, spec.beta, *map(log_softmax, logits))


def differences(function, x, step=1e-5):
    """The gradient of a scalar function by central differences, float64."""
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][at] += step
        moved[1][at] -= step
        gradient[at] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return gradient


def arrays(M=5, E=4, D=3, V=7, U=7, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=shape) for shape in ((M, E), (V, E), (M, D), (U, D))]


# Equal vocabularies, the student's wider (with a cap on both), the teacher's wider.
@pytest.mark.parametrize(
    ("V", "U", "scalings"),
    [
        (7, 7, (LogitScaling(), LogitScaling())),
        (9, 7, (LogitScaling(0.6, 1.5), LogitScaling(1.3, 2.0))),
        (7, 10, (LogitScaling(0.5), LogitScaling(softcap=1.0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("kept_mib", [0, 1], ids=["again", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_definition_in_float64(
    kind, V, U, scalings, kept_mib
):
    """Tiles of two sizes, the rows in two chunks where no logits are kept."""
    h, w, ht, wt = arrays(V=V, U=U)
    weights, spec, temperature = np.array([0.7, -1.0, 0.0, 2.0, 0.3]), KINDS[kind], 0.7
    tiling = Tiling(2, kept_mib=kept_mib)

    def loss(h, w):
        return weights @ dense(h, w, ht, wt, spec, temperature, scalings)

    def ours(h, w):
        result = divergence(h, w, *map(jnp.float32, (ht, wt)), spec, temperature, scalings, tiling)
        return jnp.float32(weights) @ result.divergence, result

    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))
    (_, result), (g_h, g_w) = step(*map(jnp.float32, (h, w)))
    np.testing.assert_allclose(
        result.divergence, dense(h, w, ht, wt, spec, temperature, scalings), atol=2e-6
    )
    np.testing.assert_allclose(g_h, differences(lambda a: loss(a, w), h), atol=5e-6)
    np.testing.assert_allclose(g_w, differences(lambda a: loss(h, a), w), atol=5e-6)


def test_what_else_is_reported_of_each_token():
    h, w, ht, wt = map(jnp.float32, arrays(M=40, V=12, U=9, seed=1))
    result = compared(h, w, ht, wt, KINDS["reverse"], 0.8, tiling=Tiling(3))
    z, t = (np.asarray(a, np.float64) / 0.8 for a in (h @ w.T, ht @ wt.T))
    log_p, log_q = log_softmax(z[:, :9]), log_softmax(t)
    np.testing.assert_allclose(
        result.student_entropy, -(np.exp(log_p) * log_p).sum(axis=1), atol=2e-6
    )
    np.testing.assert_allclose(
        result.teacher_entropy, -(np.exp(log_q) * log_q).sum(axis=1), atol=2e-6
    )
    agreement = log_p.argmax(axis=1) == log_q.argmax(axis=1)
    assert 0 < agreement.sum() < 40
    np.testing.assert_array_equal(result.agreement, agreement)
    np.testing.assert_allclose(result.outside, np.exp(log_softmax(z))[:, 9:].sum(axis=1), atol=1e-6)


def dense_jax(h, w, ht, wt, spec, temperature):
    """Rows by automatic differentiation through all logits."""
    log_p, log_q = (
        jax.nn.log_softmax(a @ b.T / temperature, axis=-1) for a, b in ((h, w), (ht, wt))
    )
    return spec.terms(log_p, jax.lax.stop_gradient(log_q)).sum(axis=-1)


# One row a chunk, chunks with a remainder, chunks that divide, all at once; tiles of three tokens,
# with a remainder, and of all.
@pytest.mark.parametrize(
    ("chunk", "tokens"), [(1, 3), (4, 3), (13, 3), (1000, 3), (4, 11), (1000, 11)]
)
@pytest.mark.parametrize("kept_mib", [0, 1], ids=["again", "kept"])
def test_chunks_and_tiles_give_the_same(chunk, tokens, kept_mib, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk * 11)
    monkeypatch.setattr(head, "CPU_TILE_LOGITS", 1)
    monkeypatch.setattr(head, "LEAST_TOKENS", tokens)
    tiling = Tiling(kept_mib=kept_mib)
    h, w, ht, wt = map(jnp.float32, arrays(M=13, E=6, V=11, U=11))
    factor = jnp.float32(np.random.default_rng(2).normal(size=13))

    def gradients(function):
        def loss(h, w):
            rows = function(h, w, ht, wt, KINDS["jsd .5"], 0.7)
            rows = rows.divergence if isinstance(rows, DivergenceOutputs) else rows
            return jnp.sum(factor * jnp.square(rows)), rows

        (_, rows), g = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(h, w)
        return rows, *g

    results = gradients(partial(divergence, tiling=tiling))
    for ours, expected in zip(results, gradients(dense_jax), strict=True):
        np.testing.assert_allclose(ours, expected, atol=3e-6)


def test_a_tied_head_gets_the_gradient_of_both_uses():
    """The student's table is the embedding of its states as well as its head."""
    _, table, ht, wt = map(jnp.float32, arrays(M=13, E=6, V=11, U=11))
    tokens, spec = jnp.arange(13) % 11, KINDS["reverse"]

    def loss(function, table):
        rows = function(jnp.tanh(table[tokens]), table, ht, wt, spec, 1.0)
        return jnp.sum(rows.divergence if isinstance(rows, DivergenceOutputs) else rows)

    result, expected = (
        jax.jit(jax.grad(partial(loss, each)))(table) for each in (divergence, dense_jax)
    )
    np.testing.assert_allclose(result, expected, atol=5e-6)


@pytest.mark.parametrize(
    "spec",
    [*KINDS.values(), Divergence("forward", top_k=3), Divergence("reverse", top_k=3, tail="tail")],
)
def test_an_identical_teacher_gives_no_divergence_and_no_gradient(spec):
    # The student's rest is 1 minus a sum of float32, so it is exact to 1e-7 of 1 and not of itself.
    h, w, *_ = map(jnp.float32, arrays(M=6, scale=0.5 if spec.tail == "tail" else 2.0))

    def loss(h, w):
        return jnp.sum(divergence(h, w, h, w, spec, 0.9).divergence)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(h, w)
    assert abs(float(value)) < 1e-6
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def test_the_teacher_and_the_temperature_have_no_gradient():
    given = [jnp.float32(a) for a in arrays()]

    def loss(ht, wt, temperature):
        return jnp.sum(
            divergence(given[0], given[1], ht, wt, KINDS["jsd .5"], temperature).divergence
        )

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(given[2], given[3], 0.7):
        np.testing.assert_array_equal(gradient, 0.0)


def test_far_apart_logits_give_no_nan():
    h, w = jnp.asarray([[1e4], [-1e4]]), jnp.asarray([[1.0], [-1.0], [0.0]])
    for spec in KINDS.values():
        step = jax.value_and_grad(
            lambda h, s=spec: divergence(h, w, -h, w, s, 1.0).divergence.sum()
        )
        value, gradient = jax.jit(step)(h)
        assert np.isfinite(value) and np.isfinite(gradient).all(), spec


def test_states_in_bfloat16_give_gradients_in_bfloat16():
    h, w, ht, wt = (jnp.asarray(a, jnp.bfloat16) for a in arrays())
    step = jax.jit(
        jax.grad(
            lambda h, w: divergence(h, w, ht, wt, KINDS["reverse"], 1.0).divergence.sum(), (0, 1)
        )
    )
    exact = jax.jit(jax.grad(lambda *a: dense_jax(*a, KINDS["reverse"], 1.0).sum(), (0, 1)))
    gradients, exact = step(h, w), exact(*map(jnp.float32, (h, w, ht, wt)))
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2
    for ours, expected in zip(gradients, exact, strict=True):  # 8 bits of each number
        np.testing.assert_allclose(
            np.float32(ours), expected, atol=2e-2 * float(jnp.abs(expected).max())
        )


# Likeliest tokens.


@pytest.mark.parametrize("tail", ["renormalise", "tail", "none"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd .5"])
def test_all_tokens_as_likeliest_are_the_full_divergence(kind, tail):
    given = list(map(jnp.float32, arrays(M=6, V=8, U=8)))
    spec = KINDS[kind]
    top = Divergence(spec.kind, spec.beta, top_k=8, tail=tail)

    def loss(spec, h, w):
        rows = divergence(h, w, *given[2:], spec, 0.7).divergence
        return rows.sum(), rows

    (full, full_g), (ours, ours_g) = (
        jax.jit(jax.value_and_grad(partial(loss, each), argnums=(0, 1), has_aux=True))(*given[:2])
        for each in (spec, top)
    )
    np.testing.assert_allclose(ours[1], full[1], atol=1e-5)
    for a, b in zip(ours_g, full_g, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3)])
@pytest.mark.parametrize("tail", ["renormalise", "tail", "none"])
def test_likeliest_tokens_against_differences_in_float64(kind, beta, tail):
    """The teacher knows 9 tokens of the student's 11: its likeliest ones are among these."""
    h, w, ht, wt = arrays(V=11, U=9, seed=3, scale=0.7)
    spec = Divergence(kind, beta, top_k=3, tail=tail)
    log_q = log_softmax(ht @ wt.T / 0.7)
    ids = np.argsort(-log_q, axis=1)[:, :3]

    def rows(h, w):
        sides = [np.take_along_axis(a, ids, axis=1) for a in (log_softmax(h @ w.T / 0.7), log_q)]
        if tail == "renormalise":
            sides = [log_softmax(a) for a in sides]
        elif tail == "tail":
            sides = [
                np.concatenate([a, np.log1p(-np.exp(a).sum(axis=1, keepdims=True))], axis=1)
                for a in sides
            ]
        return defined(kind, beta, *sides)

    def ours(h, w):
        result = divergence(h, w, *map(jnp.float32, (ht, wt)), spec, 0.7).divergence
        return result.sum(), result

    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))
    (_, result), (g_h, g_w) = step(*map(jnp.float32, (h, w)))
    np.testing.assert_allclose(result, rows(h, w), atol=5e-6)  # the student's rest is known to 1e-7
    np.testing.assert_allclose(g_h, differences(lambda a: rows(a, w).sum(), h), atol=1e-5)
    np.testing.assert_allclose(g_w, differences(lambda a: rows(h, a).sum(), w), atol=1e-5)


@pytest.mark.slow
def test_stored_probabilities_give_what_a_live_teacher_gives():
    """From a file: log-probabilities at temperature 1 and the logarithm of the rest. Another
    temperature is a division.
    """
    log_p, log_q = (np.float32(log_softmax(np.float64(a))) for a in (STUDENT, TEACHER))
    ids = np.argsort(-log_q, axis=1)[:, :2]
    top = [jnp.asarray(np.take_along_axis(a, ids, axis=1)) for a in (log_p, log_q)]
    rest = jnp.log(1 - jnp.exp(top[1]).sum(axis=1))
    for kind in ("forward", "reverse"):
        spec = Divergence(kind, top_k=2, tail="tail")
        np.testing.assert_allclose(
            top_divergence(*top, rest, spec).divergence, TOP_2[kind, "tail"], atol=1e-6
        )
        warm, spec = (
            of_logits(STUDENT, TEACHER, Divergence(kind, top_k=2), 2.0),
            Divergence(kind, top_k=2),
        )
        at_2 = jnp.asarray(
            np.take_along_axis(log_softmax(np.float64(STUDENT) / 2), ids, axis=1), jnp.float32
        )
        np.testing.assert_allclose(
            top_divergence(at_2, top[1] / 2, None, spec).divergence, warm.divergence, atol=1e-6
        )


def test_a_rest_of_nothing_stays_finite():
    """All of the probability is on the stored tokens, up to rounding; a file then holds -inf."""
    sure = jnp.log(jnp.asarray([[0.75, 0.25], [1.0, 1e-30]]))
    spec = Divergence("reverse", top_k=2, tail="tail")
    for rest in (None, jnp.full(2, -jnp.inf)):
        value, gradient = jax.value_and_grad(
            lambda a, rest=rest: top_divergence(a, sure, rest, spec).divergence.sum()
        )(sure - 0.1)
        assert np.isfinite(value) and np.isfinite(gradient).all()


# Options and memory.


def test_values_that_are_no_divergence_are_refused():
    for wrong, match in (
        ({"kind": "kl"}, "forward, reverse, jsd"),
        ({"kind": "jsd", "beta": 1.0}, "between 0 and 1"),
        ({"top_k": 0}, "at least 1"),
        ({"tail": "drop"}, "none, renormalise, tail"),
    ):
        with pytest.raises(ValueError, match=match):
            Divergence(**wrong)
    specs = [Divergence.generalised(beta) for beta in (0.0, 0.3, 1.0)]
    assert [(spec.kind, spec.beta) for spec in specs] == [
        ("forward", 0.5),
        ("jsd", 0.3),
        ("reverse", 0.5),
    ]


def compiled(E, D, trains_head, M=8192, V=32768):
    """The compiled gradient of a sum of divergences, of shapes alone."""
    argnums = (0, 1) if trains_head else 0
    again = partial(divergence, tiling=Tiling(kept_mib=0))
    step = jax.grad(lambda *a: again(*a, KINDS["jsd .5"], 1.0).divergence.sum(), argnums=argnums)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, E), (V, E), (M, D), (V, D))
    ]
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return jax.jit(step).lower(*shapes).compile()
    finally:
        jax.config.update("jax_disable_most_optimizations", quick)


def test_the_compiled_gradient_takes_three_chunks_and_one_gradient_of_the_head():
    """At most: the compiler may reuse memory of a result. All logits of one side alone are 1
    GiB."""
    chunk, E = 4 * head.CHUNK_LOGITS, 256
    program = compiled(E, 512, True)
    assert program.memory_analysis().temp_size_in_bytes <= 3 * chunk + 4 * 32768 * E
    assert (
        "f32[8192,32768]" not in program.as_text() and "f32[16,512,32768]" not in program.as_text()
    )


def test_a_frozen_head_costs_no_product():
    """The product that gives the head's gradient is left out."""
    flops = [compiled(64, 64, trains, 64, 128).cost_analysis()["flops"] for trains in (True, False)]
    product = 2 * 64 * 64 * 128
    assert product <= flops[0] - flops[1] < 1.1 * product
