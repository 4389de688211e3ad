"""Pictures in the text model, against transformers: logits with the rows of the oracle's tower,
packed documents, deepstack under scan, experts in both orders of their axes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import media_oracles
import numpy as np
import pytest
from oracles import by_kind

import policy
from policy import hook
from policy.cache.media import Media
from policy.compatibility import Conflict
from policy.modes import make_step
from policy.ops.dropout import Dropout

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """A multimodal model of transformers, the directory that it was saved to, ours read from there,
    and two documents."""

    theirs: object
    directory: object
    ours: policy.Model
    documents: list


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    @functools.cache
    def made(kind):
        theirs = media_oracles.build(kind)
        directory = tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(directory)
        documents = [
            media_oracles.document(kind, theirs, *each) for each in (((4, 3, 5), 1), ((2, 7), 2))
        ]
        return Pair(theirs, directory, policy.load(directory), documents)

    return made


def with_runtime(model, **changes):
    runtime = dataclasses.replace(model.graph.runtime, **changes)
    return policy.Model(type(model.graph)(model.config, runtime, model.graph.layout), model.params)


def check_documents(model, documents):
    """One batch: both documents packed into one row, and each alone. Logits are those of the
    oracle, and the packed documents those alone."""
    first, second = documents
    tokens, segments, media = media_oracles.batch([documents, [first], [second]], WIDTH)
    logits = np.asarray(model.logits(tokens, segments=segments, **media))
    parts = {
        name: slice(at, at + len(each))
        for name, at, each in ((0, 0, first), (1, len(first), second))
    }
    for number, each in enumerate(documents):
        packed, alone = logits[0, parts[number]], logits[1 + number, : len(each)]
        np.testing.assert_allclose(alone, each.logits, atol=1e-4, rtol=0)
        np.testing.assert_allclose(packed, alone, atol=1e-5, rtol=0)


# Deepstack and sections; blocks that look ahead.
@pytest.mark.parametrize("kind", by_kind(media_oracles.MODELS, always=("Qwen3VLMoe", "Gemma3")))
def test_logits_with_pictures_are_those_of_transformers_alone_and_packed(kind, pair):
    assert pair(kind).documents[0].logits.std() > 0.5, "the oracle says the same everywhere"
    check_documents(pair(kind).ours, pair(kind).documents)


@pytest.mark.parametrize("kind", by_kind(media_oracles.MODELS, always=("Qwen3VLMoe",)))
def test_unrolled_layers_say_the_same(kind, pair):
    check_documents(with_runtime(pair(kind).ours, scan=False, remat="none"), pair(kind).documents)


@pytest.mark.parametrize(
    ("kind", "absent"), [("Qwen3VLMoe", "turns"), ("Gemma3", "until"), ("Qwen3VLMoe", "deep")]
)
@pytest.mark.slow
def test_positions_blocks_and_deepstack_all_matter(kind, absent, pair):
    """Without each of them the logits are far from those of transformers, so the tests above can
    fail."""
    document = pair(kind).documents[0]
    tokens, segments, media = media_oracles.batch([[document]] * 3, WIDTH)
    changed = (
        {"media": dataclasses.replace(media["media"], deep=None)}
        if absent == "deep"
        else {absent: None}
    )
    logits = np.asarray(pair(kind).ours.logits(tokens, segments=segments, **media | changed))
    assert np.abs(logits[0, : len(document)] - document.logits).max() > 0.05


def gradients(model, tokens, segments, media):
    """d(sum of weighted log-probabilities) / d(rows, deepstack rows) by an update's forward
    pass."""
    weights = np.random.default_rng(0).normal(size=tokens.shape).astype(np.float32)

    def loss(rows, deep):
        index = jnp.asarray(media["media"].index)
        shown = Media(index, rows, deep, media["turns"], media["until"])
        step = make_step(jnp.asarray(tokens), None, segments, shown)
        logp, _, _ = model.graph.logprobs(model.params, jnp.asarray(tokens), step, 1.0)
        return jnp.sum(weights * logp), logp

    (_, logp), slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.asarray(media["media"].table), jnp.asarray(media["media"].deep)
    )
    return logp, *slopes


def rows_of_hook(documents, spans, table, rng):
    """These tokens of each document as 24 rows of the engine hook, in random order, idle rows among
    them."""
    fed = [(r, p) for r, (start, end) in enumerate(spans) for p in range(start, end)]
    fed += [(-1, 0)] * (24 - len(fed))
    fed = [fed[i] for i in rng.permutation(len(fed))]
    starts = np.cumsum([0] + [len(each.media.table) for each in documents])
    tokens, index, turns = [], [], []
    for r, p in fed:
        media = documents[r].media
        tokens.append(documents[r].tokens[p])
        index.append(media.index[p] + starts[r] if r >= 0 and media.index[p] >= 0 else -1)
        turns.append((p, p, p) if media.turns is None else media.turns[p])
    rows, deep = ([getattr(each.media, name) for each in documents] for name in ("table", "deep"))
    deep = None if deep[0] is None else jnp.concatenate(deep, axis=1)
    media = Media(jnp.array(index, jnp.int32), jnp.concatenate(rows), deep)
    request, positions = jnp.array(fed, jnp.int32).T
    given = None if documents[0].media.turns is None else jnp.array(turns, jnp.int32)
    return hook.Rows(jnp.array(tokens, jnp.int32), positions, request, table, given, media), fed


@pytest.mark.parametrize(
    "kind",
    by_kind(
        ("Qwen3VL", "Qwen3VLMoe", "Qwen3OmniMoeThinker", "Qwen2_5_VL", "Llama4"),
        always=("Qwen3VLMoe",),
    ),
)
def test_rows_of_the_engine_hook_with_pictures_are_the_full_forward_pass(kind, pair):
    """Two requests with pictures, which two calls cut in two; the last tokens are decoded after
    them."""
    model, documents = pair(kind).ours, pair(kind).documents
    first, second = map(len, documents)
    cuts = [
        ((0, 7), (0, 5)),
        ((7, first - 2), (5, second - 1)),
        ((first - 2, first), (second - 1, second)),
    ]
    pages, rng = jnp.array([[3, 9, 5, 2, 7, 12], [1, 4, 6, 8, 10, 0]]), np.random.default_rng(0)
    pages = (
        jnp.pad(pages, ((0, 0), (0, 6)), constant_values=0)
        .at[:, 6:]
        .set(jnp.array([range(13, 19), range(19, 25)]))
    )
    caches = hook.create_caches(model, 25, 4)
    result = [np.zeros_like(each.logits) for each in documents]

    @functools.partial(jax.jit, donate_argnames="caches")
    def run(model, rows, caches):
        hidden, caches, recorded = hook.forward(model, rows, caches, record=("hidden",))
        return hook.logits(model, hidden), hidden, recorded, caches

    for spans in cuts:
        rows, fed = rows_of_hook(documents, spans, pages, rng)
        logits, hidden, recorded, caches = run(model, rows, caches)
        np.testing.assert_array_equal(recorded["hidden"][len(model.config.layers) - 1], hidden)
        for row, (r, p) in enumerate(fed):
            if r >= 0:
                result[r][p] = logits[row]
    tokens, segments, media = media_oracles.batch([[each] for each in documents], WIDTH)
    full = np.asarray(model.logits(tokens, segments=segments, **media))
    for r, document in enumerate(documents):
        np.testing.assert_allclose(result[r], full[r, : len(document)], atol=2e-5, rtol=0)
        np.testing.assert_allclose(result[r], document.logits, atol=1e-4, rtol=0)
    if kind != "Llama4":
        plain = jnp.repeat(rows.positions[:, None], 3, axis=1)
        without = run(model, dataclasses.replace(rows, turns=plain), caches)[0]
        active = np.asarray(rows.request) >= 0
        assert np.abs(without - logits)[active].max() > 0.01, (
            "the tokens after a picture turn by other positions"
        )


@pytest.mark.parametrize("kind", by_kind(media_oracles.LOOKS_AHEAD, always=("Gemma3",)))
def test_the_engine_hook_refuses_pictures_that_see_themselves(kind, pair):
    model, documents = pair(kind).ours, pair(kind).documents
    rows, _ = rows_of_hook(
        documents, ((0, 2), (0, 2)), jnp.ones((2, 4), jnp.int32), np.random.default_rng(0)
    )
    caches = hook.create_caches(model, 5, 4)
    with pytest.raises(
        Conflict,
        match="does not go with attention to later parts of a picture: the tokens of a picture",
    ):
        hook.forward(model, rows, caches)
    jax.eval_shape(
        hook.forward, model, dataclasses.replace(rows, media=None), caches
    )  # text is served


def test_rows_with_media_of_another_shape_are_refused(pair):
    rows, _ = rows_of_hook(
        pair("Qwen3VLMoe").documents, ((0, 2), (0, 2)), jnp.ones((2, 4)), np.random.default_rng(0)
    )
    for changes, message in (
        ({"turns": rows.turns[:, :2]}, r"turns \[N, 3\].*'turns': \(24, 2\)"),
        (
            {"media": dataclasses.replace(rows.media, index=rows.media.index[:, None])},
            r"'media.index': \(24, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(rows, **changes).step()


@pytest.mark.slow
def test_deepstack_under_scan_equals_unrolled_to_the_bit(pair, all_optimizations):
    tokens, segments, media = media_oracles.batch([pair("Qwen3VL").documents], WIDTH)
    model = pair("Qwen3VL").ours
    assert model.config.stacks[0].repeats == 2
    scanned = gradients(with_runtime(model, scan=True, remat="full"), tokens, segments, media)
    unrolled = gradients(with_runtime(model, scan=False, remat="full"), tokens, segments, media)
    for a, b in zip(scanned, unrolled, strict=True):
        assert np.abs(np.asarray(a)).max() > 0.01
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_dropout_of_rows_with_pictures_does_not_depend_on_how_layers_are_computed(pair):
    tokens, segments, media = media_oracles.batch([pair("Qwen3VL").documents], WIDTH)

    def logp(model, rate):
        shown = dataclasses.replace(media["media"], turns=media["turns"], until=media["until"])
        step = make_step(jnp.asarray(tokens), None, segments, jax.tree.map(jnp.asarray, shown))
        step = dataclasses.replace(step, dropout=Dropout(jnp.asarray([7], jnp.uint32), rate=rate))
        return np.asarray(
            jax.jit(model.graph.logprobs)(model.params, jnp.asarray(tokens), step, 1.0)[0]
        )

    scanned, unrolled = (
        logp(with_runtime(pair("Qwen3VL").ours, scan=scan), 0.2) for scan in (True, False)
    )
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5, rtol=0)
    assert np.abs(scanned - logp(pair("Qwen3VL").ours, 0.0)).max() > 0.1


@pytest.mark.parametrize("kind", by_kind(("Qwen3VLMoe", "Gemma3"), always=("Gemma3",)))
def test_log_probabilities_of_text_after_pictures(kind, pair):
    """Those of transformers; the bits of a document do not depend on the others of a batch, with
    pictures or without."""
    first, second = pair(kind).documents
    text = media_oracles.plain(kind, 9)
    tokens, segments, media = media_oracles.batch([[first, text], [second]], WIDTH)
    logp = np.asarray(
        pair(kind).ours.logprobs(tokens, segments=segments, temperature=0.7, **media)[0]
    )
    for row, each in enumerate((first, second)):
        expected = torch.log_softmax(torch.tensor(each.logits[:-1]) / 0.7, -1).numpy()
        expected = np.take_along_axis(expected, each.tokens[1:, None], -1)[:, 0]
        is_text = each.media.index[1:] < 0
        np.testing.assert_allclose(
            logp[row, 1 : len(each)][is_text], expected[is_text], atol=1e-4, rtol=0
        )
    alone = np.asarray(pair(kind).ours.logprobs(text.tokens[None], temperature=0.7)[0])[0]
    np.testing.assert_array_equal(logp[0, len(first) : len(first) + len(text)], alone)
    one = media_oracles.batch([[second]], 30)
    again = np.asarray(
        pair(kind).ours.logprobs(one[0], segments=one[1], temperature=0.7, **one[2])[0]
    )
    np.testing.assert_array_equal(again[0, : len(second)], logp[1, : len(second)])


@pytest.mark.slow
def test_a_placeholder_without_a_row_is_a_token_and_one_with_a_row_may_be_no_id(pair):
    """The index decides: the embedding of a placeholder id is read where no row stands, and an id
    outside the vocabulary does no harm where one does."""
    model, document = pair("Qwen3VLMoe").ours, pair("Qwen3VLMoe").documents[0]
    tokens, segments, media = media_oracles.batch([[document]] * 3, WIDTH)
    tokens[1] = np.where(media["media"].index[1] >= 0, 10**6, tokens[1])
    tokens[2, len(document) - 2] = media_oracles.IMAGE
    logits = np.asarray(model.logits(tokens, segments=segments, **media))
    np.testing.assert_array_equal(logits[1], logits[0])
    theirs = pair("Qwen3VLMoe").theirs.model.language_model
    embedding = np.asarray(model.params["embed_tokens"])[media_oracles.IMAGE]
    np.testing.assert_array_equal(
        embedding, theirs.embed_tokens.weight[media_oracles.IMAGE].detach().numpy()
    )
    row, count = media["media"], len(media["media"].table)
    index = row.index.copy()
    index[0, len(document) - 2] = count  # the row says what the embedding says
    table, deep = (
        np.concatenate([row.table, embedding[None]]),
        np.pad(row.deep, ((0, 0), (0, 1), (0, 0))),
    )
    again = model.logits(tokens, segments=segments, **media | {"media": Media(index, table, deep)})
    np.testing.assert_allclose(np.asarray(again)[0], logits[2], atol=1e-6, rtol=0)
    logp, _ = model.logprobs(tokens, segments=segments, **media)
    assert np.isfinite(np.asarray(logp)).all()


def test_wrong_tables_and_shapes_are_refused_by_name(pair):
    model, document = pair("Qwen3VLMoe").ours, pair("Qwen3VLMoe").documents[0]
    tokens, segments, media = media_oracles.batch([[document]], 30)
    rows = media["media"]
    for wrong, message in (
        ({"media": dataclasses.replace(rows, table=rows.table[:, :8])}, "table has shape"),
        ({"media": dataclasses.replace(rows, deep=rows.deep[:1])}, "deep has shape"),
        (
            {"media": dataclasses.replace(rows, index=rows.index[:, :-1])},
            "media.index must have the shape of tokens",
        ),
        ({"turns": media["turns"][..., :2]}, "turns must have the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model.logits(tokens, segments=segments, **media | wrong)


def test_experts_are_read_in_both_orders_of_their_axes(pair, tmp_path):
    """The released files hold [experts, inputs, outputs], transformers writes [experts, outputs,
    inputs]."""
    from safetensors.torch import load_file, save_file

    state = load_file(pair("Qwen3VLMoe").directory / "model.safetensors")
    turned = {
        name: (tensor.transpose(1, 2) if ".experts." in name else tensor).contiguous()
        for name, tensor in state.items()
    }
    assert sum(".experts." in name for name in state) == 4
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(
        (pair("Qwen3VLMoe").directory / "config.json").read_text()
    )
    back = policy.load(tmp_path)
    for path, array in pair("Qwen3VLMoe").ours.params.items():
        np.testing.assert_array_equal(
            np.asarray(back.params[path]), np.asarray(array), err_msg=path
        )


@pytest.mark.parametrize(
    "kind", by_kind(("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL"), always=("Qwen3VLMoe",))
)
def test_a_saved_directory_is_one_of_the_multimodal_model(kind, pair, tmp_path):
    """It has the configuration of the wrapper, its names of the text weights, and the tower that
    was not read."""
    from safetensors.torch import load_file

    policy.save(pair(kind).ours, tmp_path)
    ours, theirs = (
        load_file(each / "model.safetensors") for each in (tmp_path, pair(kind).directory)
    )
    assert ours.keys() == theirs.keys() and any("visual." in name for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    written, read = (
        json.loads((each / "config.json").read_text()) for each in (tmp_path, pair(kind).directory)
    )
    assert (
        written["text_config"] == read["text_config"]
        and written["architectures"] == read["architectures"]
    )
    assert policy.load(tmp_path).config.stacks == pair(kind).ours.config.stacks
