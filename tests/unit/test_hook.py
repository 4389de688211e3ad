"""The engine hook (policy/hook.py): rows of several requests over pages that somebody else owns
give the numbers of the full forward pass. N rows, T tokens of a request, M pages of a request, P
tokens of a page, E hidden."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepwise
from oracles import KINDS, by_kind, random_model, short, tokens

from policy import families, hook
from policy.cache import cache as caches
from policy.cache.entries import entries
from policy.cache.pages import Pool
from policy.compatibility import Conflict
from policy.config import Runtime
from policy.mesh.axes import AXES
from policy.mesh.sharding import layout
from policy.model import Graph, Model

N, T, P, M, NUMBER = 16, 14, 4, 5, 24
STREAMS = {"duet": {"hyper_connections": {"streams": 2, "reduce": "head"}}}
# Keys and values, windows between norms, latents with experts, keys of an indexer, several streams.
MODELS = {kind: short(kind) for kind in KINDS} | {"streams": short("Llama", **STREAMS)}
RECURRENT = (
    "Qwen3Next",
    "Qwen3_5",  # and Qwen3_5Moe
    "KimiLinear",
    "Lfm2",
    "Lfm2Moe",
    "NemotronH",
    "OlmoHybrid",
    "GraniteMoeHybrid",
    "FalconH1",
    "Qwen4Exp",
)
SERVED = [name for name in MODELS if not name.startswith(RECURRENT)]
REPRESENTATIVE = ("Llama", "Gemma3", "DeepseekV3")
# Which tokens of three requests a call feeds, as spans. In the second call two requests are in the
# middle of their prompts, and the third one decodes.
CALLS = [((0, 5), (0, 3), (0, 8)), ((5, 9), (3, 7), (8, 9)), ((9, 14), (7, 11), (9, 10))]
LENGTHS = [spans[-1][1] for spans in zip(*CALLS, strict=True)]
every = pytest.mark.parametrize("name", by_kind(SERVED, always=REPRESENTATIVE))


@functools.cache
def model_of(name):
    return random_model(families.read(MODELS[name]), seed=3)


TEXT = tokens(3, T, seed=1)


def rows_of(spans, table, rng):
    """N rows in random order: these tokens of each request, and idle rows of other requests'
    tokens."""
    fed = [(r, p) for r, (start, end) in enumerate(spans) for p in range(start, end)]
    fed = [fed[i] for i in rng.permutation(len(fed))]
    idle = [(-1, int(p)) for p in rng.integers(0, T, N - len(fed))]
    order = rng.permutation(N)
    request, positions = np.array(fed + idle, np.int32)[order].T
    text = np.where(request < 0, 3, TEXT[request, positions]).astype(np.int32)
    return hook.Rows(*map(jnp.asarray, (text, positions, request, table)))


@functools.cache
def program(name):
    """The compiled hook and head of N rows; caches are donated."""

    def run(model, rows, entries):
        hidden, entries, recorded = hook.forward(model, rows, entries, record=("routes", "hidden"))
        return hidden, hook.logits(model, hidden), entries, recorded

    rows = hook.Rows(*[jnp.zeros(N, jnp.int32)] * 3, jnp.zeros((3, M), jnp.int32))
    lowered = jax.jit(run, donate_argnums=2).lower(model_of(name), rows, used_pages(name))
    return lowered.compile()


def used_pages(name):
    """Caches in which every entry that nobody wrote is a large number."""
    return jax.tree.map(lambda a: a + 7, hook.create_caches(model_of(name), NUMBER, P))


def serve(name, seed=0):
    """(what `program` gives for each token of the three requests: hidden [3, T, E], logits [3, T,
    V] and recorded by layer, 0 past the end of a request; the caches). `seed` of the pages and of
    the order of rows."""
    rng, run = np.random.default_rng(seed), program(name)
    table = (1 + rng.permutation(NUMBER - 1))[: 3 * M].reshape(3, M).astype(np.int32)
    table[:, -(-T // P) :] = 0
    state, result = used_pages(name), None
    for spans in CALLS:
        rows = rows_of(spans, table, rng)
        hidden, logits, state, recorded = run(model_of(name), rows, state)
        request, positions = np.asarray(rows.request), np.asarray(rows.positions)
        outputs, active = (hidden, logits, recorded), request >= 0

        def put(all_tokens, of_rows, at=(request[active], positions[active]), active=active):
            all_tokens[at] = np.asarray(of_rows)[active]
            return all_tokens

        if result is None:
            result = jax.tree.map(lambda a: np.zeros((3, T, *a.shape[1:]), a.dtype), outputs)
        result = jax.tree.map(put, result, outputs)
    return result, state


served = functools.cache(lambda name: serve(name)[0])


def bound(name):
    """Of hidden states, which are as large as logits here."""
    return KINDS.get(name, KINDS["Llama"]).logits


def assert_close(result, full, atol):
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            result[row, :length], np.asarray(full)[row, :length], atol=atol, rtol=0
        )


@every
def test_mixed_rows_are_the_full_forward_pass(name):
    _, logits, _ = served(name)
    assert_close(logits, model_of(name).logits(TEXT), atol=bound(name) * 2)


@every
def test_hidden_states_are_those_before_the_final_norm(name):
    hidden, _, recorded = served(name)
    last = np.asarray(model_of(name).hidden_states(TEXT))[-1]
    if model_of(name).config.hyper_connections is not None:
        assert last.ndim == 4 and hidden.ndim == 3
    else:
        assert_close(hidden, last, bound(name))
        np.testing.assert_array_equal(
            hidden, recorded["hidden"][len(model_of(name).config.layers) - 1]
        )
    normed, _ = stepwise.forward(model_of(name), TEXT)
    difference = max(
        np.abs(hidden[row, :n] - normed[row, :n]).max() for row, n in enumerate(LENGTHS)
    )
    assert difference > 0.1


@every
def test_recorded_outputs_go_by_the_number_of_the_layer(name):
    model, (_, _, recorded) = model_of(name), served(name)
    states = np.asarray(model.hidden_states(TEXT))
    assert sorted(recorded["hidden"]) == list(range(len(model.config.layers)))
    for n, layer in recorded["hidden"].items():
        assert_close(layer, states[n], bound(name))
    with_experts = [n for n, spec in enumerate(model.config.layers) if spec.moe is not None]
    assert sorted(recorded["routes"]) == with_experts
    _, aux = stepwise.forward(model, TEXT, record=("routes",))
    for path, routes in aux.by_layer("routes").items():
        for r, n in enumerate(model.config.layer_numbers(path)):
            chosen, full = np.sort(recorded["routes"][n]), np.sort(np.asarray(routes)[r])
            same = [
                np.mean(chosen[row, :length] == full[row, :length])
                for row, length in enumerate(LENGTHS)
            ]
            assert min(same) > 0.9, "rounding swaps few experts with equal scores"


@every
def test_which_pages_a_request_has_changes_no_bit(name):
    other, _ = serve(name, seed=8)
    jax.tree.map(np.testing.assert_array_equal, other, served(name))


@every
def test_caches_are_one_entry_per_layer_and_written_in_place(name):
    state, model = used_pages(name), model_of(name)
    assert len(state) == len(model.config.layers)
    for spec, layer in zip(model.config.layers, state, strict=True):
        assert layer.keys() == entries(spec, model.config).keys() and all(
            isinstance(a, Pool) for a in layer.values()
        )
        for entry, pool in layer.items():
            rate = entries(spec, model.config)[entry].rate or 1
            assert pool.array.shape[1:4] == (1, NUMBER, -(-P // rate))
    arrays = jax.tree.leaves(state)
    assert program(name).memory_analysis().alias_size_in_bytes == sum(a.nbytes for a in arrays)
    before = [np.array(a) for a in arrays]
    table = jnp.zeros((3, M), jnp.int32)
    _, _, state, _ = program(name)(
        model, rows_of([(0, 0)] * 3, table, np.random.default_rng(0)), state
    )
    assert all(a.is_deleted() for a in arrays)
    for old, new in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new, err_msg="all rows were idle")


@pytest.mark.slow
def test_requests_share_the_pages_of_a_prefix():
    """Request 1 goes on from the first two pages of request 0, which hold the same tokens."""
    model, run = model_of("Llama"), program("Llama")
    table = np.zeros((3, M), np.int32)
    table[0, :4], table[1, :4] = [9, 2, 5, 7], [9, 2, 3, 8]
    text = TEXT.copy()
    text[1, : 2 * P] = text[0, : 2 * P]
    state = used_pages("Llama")
    for spans in ([(0, 8), (0, 0)], [(8, 14), (8, 13)]):
        at = np.array([(r, p) for r, (start, end) in enumerate(spans) for p in range(start, end)])
        request, positions = np.pad(at, ((0, N - len(at)), (0, 0)), constant_values=-1).T
        fed = text[request, positions]
        _, logits, state, _ = run(
            model,
            hook.Rows(*(jnp.asarray(a, jnp.int32) for a in (fed, positions, request, table))),
            state,
        )
    full = np.asarray(model.logits(text))
    np.testing.assert_allclose(logits[: len(at)], full[at[:, 0], at[:, 1]], atol=2e-5)


def test_pages_can_be_copied_before_a_request_writes_into_one_that_it_shares():
    state = hook.create_caches(model_of("Gemma3"), NUMBER, P)
    state = jax.tree.map(lambda a: a + jnp.arange(NUMBER, dtype=a.dtype)[:, None, None], state)
    copied = caches.copy_pages(state, np.array([3]), np.array([5]))
    for pool in jax.tree.leaves(copied):
        np.testing.assert_array_equal(pool[:, :, 5], pool[:, :, 3])
        assert pool[0, 0, 4, 0, 0] == 4


def test_shapes_and_types_of_caches_need_no_memory():
    model = model_of("DeepseekV3")
    create = functools.partial(hook.create_caches, pages=10**9, page_size=16, quantization="int8")
    first = jax.eval_shape(create, model)[0]
    assert (
        first["latent"].array.shape == (1, 1, 10**9, 16, 20)
        and first["latent"].array.dtype == jnp.int8
    )
    assert first["latent.scale"].array.dtype == jnp.float32


def test_a_model_is_a_pytree_of_its_weights():
    model = model_of("Llama")
    arrays, structure = jax.tree.flatten(model)
    assert len(arrays) == len(model.params)
    other = jax.tree.unflatten(structure, arrays)
    assert other.params.keys() == model.params.keys() and other.graph is model.graph
    doubled = jax.tree.map(lambda a: 2 * a, model)
    np.testing.assert_array_equal(doubled.params["norm.weight"], 2 * model.params["norm.weight"])


def abstract(stored, runtime=Runtime(), mesh=None):
    """A model without weights, for what is refused before any is read."""
    mesh = mesh or layout({"fsdp": 1}, devices=jax.devices()[:1])
    return Model(Graph(families.read(stored), runtime, mesh), {})


ENGRAM = {"duet": {"engram": {"layers": [1], "vocab_bases": [50, 60], "heads": 2, "head_dim": 4}}}


def context_mesh():
    one = layout({"fsdp": 1}, devices=jax.devices()[:1])
    sizes = [2 if axis == "context" else 1 for axis in AXES]
    return dataclasses.replace(one, mesh=jax.sharding.AbstractMesh(tuple(sizes), AXES))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: abstract(short("Qwen3Next")),
            "does not go with a recurrent mixer: its state passes",
        ),
        (lambda: abstract(short("Llama", **ENGRAM)), "does not go with n-gram tables: its n-grams"),
        (
            lambda: abstract(short("Mixtral"), Runtime(capacity_factor=1.0)),
            "does not go with stages.N.router.capacity",
        ),
        (
            lambda: abstract(short("Llama"), mesh=context_mesh()),
            r"does not go with mesh.context=2: .*with context=1",
        ),
    ],
)
def test_what_the_hook_does_not_serve_is_refused_by_name(model, message):
    with pytest.raises(Conflict, match=message):
        hook.create_caches(model(), NUMBER, P)
    rows = hook.Rows(*[jnp.zeros(N, jnp.int32)] * 3, jnp.zeros((3, M), jnp.int32))
    with pytest.raises(Conflict, match=message):
        hook.forward(model(), rows, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": (N, 1)},
            r"tokens, positions and request of one shape \[N\].*'tokens': \(16, 1\)",
        ),
        ({"positions": (N - 1,)}, r"'positions': \(15,\)"),
        ({"pages": (M,)}, r"'pages': \(5,\)"),
        ({"caches": 1}, "caches has 1 layers, and the decoder has 2"),
        ({"record": ("hiden",)}, "record names 'hiden', which no layer has; valid: .*hidden"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    shapes = {"tokens": (N,), "positions": (N,), "request": (N,), "pages": (3, M)}
    rows = hook.Rows(
        **{name: jnp.zeros(changes.get(name, shape), jnp.int32) for name, shape in shapes.items()}
    )
    state = hook.create_caches(model_of("Llama"), NUMBER, P)[: changes.get("caches", 2)]
    run = functools.partial(hook.forward, record=changes.get("record", ()))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, model_of("Llama"), rows, state)


def test_no_other_family_is_left_out_here():
    for name, stored in MODELS.items():
        config = families.read(stored)
        assert (name in SERVED) == all(
            caches.supports_truncation(spec, config) for spec in config.layers
        ), name
