"""Adapters of a policy: products, gradients, and every family, against merges by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import merged, with_adapter
from oracles import by_kind, random_model, short

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.config import Runtime
from policy.ops.adapted import Adapted, DoraParts, dora_scale
from policy.ops.linear import linear, ragged_linear
from policy.ops.parameter import MatrixDims
from rollout import Generator, GeneratorOptions, SamplingParams

W = np.array([[0.5, -1, 0.25], [1.5, 0.5, -0.75]])
A = np.array([[0.2, -0.1, 0.4], [-0.3, 0.5, 0.1]])
B = np.array([[1, -0.5], [0.25, 0.75]])
X = np.array([[1, 2, -1], [0.5, -0.5, 1]])
C = np.array([[1, -2], [0.5, 1]])
RUNTIME = Runtime()


def paper(scale):
    """The weight of the numbers above, as PEFT stores them."""
    dims = MatrixDims((0,), (1,))
    parts = (jnp.asarray(each.T, jnp.float32) for each in (W, A, B))
    return Adapted(*parts, None, scale, dims)


@pytest.mark.parametrize(
    "scale, y",
    [
        (3.0, [[-3.85, 4.3], [3.1, -0.5125]]),
        (6 / 2**0.5, [[-4.719848, 4.734924], [3.969848, -0.621231]]),
    ],
)
def test_a_product_adds_that_of_the_adapter(scale, y):
    out = linear("ne,ef->nf", jnp.asarray(X, jnp.float32), paper(scale), RUNTIME)
    np.testing.assert_allclose(out, y, atol=1e-6)


def test_gradients_of_dora_take_the_norm_as_a_constant():
    m = np.linalg.norm(W, axis=1)

    def loss(a, b, m):
        dims = MatrixDims((0,), (1,))
        factor = dora_scale(DoraParts(jnp.asarray(W.T), a, b, m), 3.0, dims)
        weight = Adapted(jnp.asarray(W.T), a, b, factor, 3.0, dims)
        y = linear("ne,ef->nf", jnp.asarray(X), weight, RUNTIME)
        return (y * C).sum(), y

    with jax.enable_x64(True):
        (_, y), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            jnp.asarray(A.T), jnp.asarray(B.T), jnp.asarray(m)
        )
    np.testing.assert_allclose(y, [[-1.531448, 4.078756], [1.233114, -0.486131]], atol=1e-5)
    d_a = [[0.424554, -1.113011, 1.537565], [-3.947184, -10.648215, 6.701032]]
    np.testing.assert_allclose(grads[0].T, d_a, atol=1e-4)
    d_b = [[-0.149167, 0.537001], [3.841619, -4.268465]]
    np.testing.assert_allclose(grads[1].T, d_b, atol=1e-4)
    np.testing.assert_allclose(grads[2], [-0.798582, -4.939224], atol=1e-4)


EQUATIONS = [
    ("bte,ehd->bhtd", (2, 3, 6), (6, 4, 5), (0,), 0),
    ("bhtd,hde->bte", (2, 4, 3, 5), (4, 5, 6), (0, 1), 0),
    ("bre,bef->brf", (3, 2, 6), (3, 6, 5), (1,), 1),
    ("ne,gef->gnf", (4, 6), (3, 6, 5), (1,), 1),
    ("gnf,gfe->gne", (3, 4, 5), (3, 5, 6), (1,), 1),
    ("gnf,gfe->ne", (3, 4, 5), (3, 5, 6), (1,), 1),
    ("...e,ef->...f", (2, 3, 6), (6, 5), (0,), 0),
]


@pytest.mark.parametrize("equation, x, w, rows, groups", EQUATIONS)
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_every_equation_equals_its_merged_weight(equation, x, w, rows, groups, shared):
    if shared and not groups:
        pytest.skip("a weight of one matrix")
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=each), jnp.float32) for each in (x, w))
    columns = tuple(dim for dim in range(groups, w.ndim) if dim not in rows)
    front = w.shape[:groups]
    sizes = [w.shape[dim] for dim in rows], [w.shape[dim] for dim in columns]
    a = jnp.asarray(rng.normal(size=((() if shared == "a" else front) + (*sizes[0], 2))))
    b = jnp.asarray(rng.normal(size=((() if shared == "b" else front) + (2, *sizes[1]))))
    weight = Adapted(w, a, b, None, 1.5, MatrixDims(rows, columns))
    letters = "xyz"[: len(sizes[0])], "uvw"[: len(sizes[1])]
    of_a, of_b = ("" if shared == each else "G" * groups for each in "ab")
    product = jnp.einsum(
        f"{of_a}{letters[0]}R,{of_b}R{letters[1]}->{'G' * groups}{''.join(letters)}", a, b
    )
    merged_weight = w + 1.5 * product.reshape(w.shape)
    np.testing.assert_allclose(
        linear(equation, x, weight, RUNTIME),
        linear(equation, x, merged_weight, RUNTIME),
        rtol=1e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_grouped_rows_equal_their_merged_weights(shared):
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(7, 6)), jnp.float32)
    sizes = jnp.asarray([3, 0, 4], jnp.int32)
    w, a, b, factor = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((3, 6, 5), (3, 6, 2), (3, 2, 5), (3, 5))
    )
    a, b = a[0] if shared == "a" else a, b[0] if shared == "b" else b
    weight = Adapted(w, a, b, factor, 0.5, MatrixDims((1,), (2,)))
    product = jnp.broadcast_to(a @ b, w.shape)
    merged_weight = (w + 0.5 * product) * factor[:, None]
    np.testing.assert_allclose(
        ragged_linear(rows, weight, sizes, RUNTIME),
        ragged_linear(rows, merged_weight, sizes, RUNTIME),
        rtol=1e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize("kind", by_kind())
def test_a_decoder_with_an_adapter_computes_what_the_merged_one_does(kind):
    model = random_model(families.read(short(kind, initializer_range=0.05)))
    adapted_model = with_adapter(model, size=0.05)
    tokens = np.random.default_rng(0).integers(1, 40, (2, 9))
    base, ours, theirs = (
        np.asarray(each.logits(tokens)) for each in (model, adapted_model, merged(adapted_model))
    )
    assert np.abs(ours - base).max() > 0.01
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * np.abs(theirs).max())


def sampled(model, **options):
    """Greedy completions, and the log-probabilities of the generator and of the model."""
    generator = Generator(
        model, max_length=16, slots=2, seed=0, options=GeneratorOptions(**options)
    )
    prompts = [[5, 6, 7], [9, 3, 4, 8]]
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    samples = [group[0] for group in generator.generate(prompts, params)]
    differences = []
    for prompt, sample in zip(prompts, samples, strict=True):
        row = np.asarray([[*prompt, *sample.tokens]])
        logp = np.asarray(model.logprobs(row)[0])[0, len(prompt) :]
        differences.append(np.abs(logp - np.asarray(sample.logprobs)).max())
    return [sample.tokens for sample in samples], max(differences)


SPECS = {
    "lora": AdapterSpec(rank=4, alpha=6.0),
    "shared": AdapterSpec(rank=4, alpha=6.0, experts="shared"),
    "dora": AdapterSpec(rank=4, alpha=6.0, dora=True, rank_stabilised=True),
}
TABLES = AdapterSpec(rank=4, alpha=6.0, dora=True, targets=("embed_tokens", "lm_head", "q_proj"))


def test_adapters_of_embedding_and_head():
    model = random_model(families.read(short("Llama", tie_word_embeddings=False)))
    policy = with_adapter(model, TABLES, size=0.05)
    same = merged(policy)
    tokens = np.random.default_rng(0).integers(1, 40, (2, 9))
    ours = np.asarray(policy.logits(tokens))
    assert np.abs(ours - np.asarray(model.logits(tokens))).max() > 0.01
    np.testing.assert_allclose(ours, same.logits(tokens), rtol=1e-4, atol=1e-5)
    for one, other in zip(policy.logprobs(tokens), same.logprobs(tokens), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    sampled_tokens, difference = sampled(policy)
    assert difference < 1e-5
    assert sampled_tokens == sampled(same)[0]


@pytest.mark.parametrize("kind", by_kind())
@pytest.mark.parametrize("form", SPECS)
def test_the_generator_samples_from_the_adapted_policy(kind, form):
    model = random_model(families.read(short(kind, initializer_range=0.05)))
    policy = with_adapter(model, SPECS[form], size=0.05)
    tokens, difference = sampled(policy)
    assert difference < 1e-5
    assert tokens == sampled(merged(policy))[0]


def test_adapters_lie_on_the_device_over_weights_in_host_memory():
    """The lengths of DoRA read a layer at a time."""
    config = families.read(short("Llama", initializer_range=0.05))
    tokens = np.random.default_rng(0).integers(1, 40, (2, 9))
    logits = []
    for runtime in (Runtime(), Runtime(host_parameters=True)):
        policy = with_adapter(random_model(config, runtime=runtime), SPECS["dora"], size=0.05)
        kinds = {path: policy.params[path].sharding.memory_kind for path in policy.params}
        logits.append(np.asarray(policy.logits(tokens)))
    kind = jax.devices()[0].default_memory().kind
    adapter = [path for path in kinds if path not in policy.graph.paths]
    assert policy.graph.hosted and {kinds[path] for path in adapter} == {kind}
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-6)
