"""Pictures in the text model, against transformers: logits with the rows of the oracle's tower, packed documents,
deepstack under scan, experts in both orders of their axes."""

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
from policy.cache.media import Media, MediaInputs
from policy.modes import make_step
from policy.ops.dropout import Dropout

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'")
pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """A multimodal model of transformers, the directory that it was saved to, ours read from there, and two
    documents."""

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
        documents = [media_oracles.document(kind, theirs, *each) for each in (((4, 3, 5), 1), ((2, 7), 2))]
        return Pair(theirs, directory, policy.load(directory), documents)

    return made


def with_runtime(model, **changes):
    runtime = dataclasses.replace(model.graph.runtime, **changes)
    return policy.Model(type(model.graph)(model.config, runtime, model.graph.layout), model.params)


def check_documents(model, documents):
    """One batch: both documents packed into one row, and each alone. Logits are those of the oracle, and the packed
    documents those alone."""
    first, second = documents
    tokens, segments, media = media_oracles.batch([documents, [first], [second]], WIDTH)
    logits = np.asarray(model.logits(tokens, segments=segments, **media))
    parts = {name: slice(at, at + len(each)) for name, at, each in ((0, 0, first), (1, len(first), second))}
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


@pytest.mark.parametrize(("kind", "absent"), [("Qwen3VLMoe", "turns"), ("Gemma3", "until"), ("Qwen3VLMoe", "deep")])
@pytest.mark.slow
def test_positions_blocks_and_deepstack_all_matter(kind, absent, pair):
    """Without each of them the logits are far from those of transformers, so the tests above can fail."""
    document = pair(kind).documents[0]
    tokens, segments, media = media_oracles.batch([[document]] * 3, WIDTH)
    changed = {"media": dataclasses.replace(media["media"], deep=None)} if absent == "deep" else {absent: None}
    logits = np.asarray(pair(kind).ours.logits(tokens, segments=segments, **media | changed))
    assert np.abs(logits[0, : len(document)] - document.logits).max() > 0.05


def gradients(model, tokens, segments, media):
    """d(sum of weighted log-probabilities) / d(rows, deepstack rows) by an update's forward pass."""
    weights = np.random.default_rng(0).normal(size=tokens.shape).astype(np.float32)

    def loss(rows, deep):
        inputs = MediaInputs(Media(jnp.asarray(media["media"].index), rows, deep), media["turns"], media["until"])
        step = make_step(jnp.asarray(tokens), None, segments, inputs)
        logp, _, _ = model.graph.logprobs(model.params, jnp.asarray(tokens), step, 1.0)
        return jnp.sum(weights * logp), logp

    (_, logp), slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.asarray(media["media"].table), jnp.asarray(media["media"].deep)
    )
    return logp, *slopes


@pytest.fixture
def all_optimizations():
    """Bits are compared between two programs as a run compiles them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


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
        inputs = MediaInputs(*jax.tree.map(jnp.asarray, tuple(media.values())))
        step = make_step(jnp.asarray(tokens), None, segments, inputs)
        step = dataclasses.replace(step, dropout=Dropout(jnp.asarray([7], jnp.uint32), rate=rate))
        return np.asarray(jax.jit(model.graph.logprobs)(model.params, jnp.asarray(tokens), step, 1.0)[0])

    scanned, unrolled = (logp(with_runtime(pair("Qwen3VL").ours, scan=scan), 0.2) for scan in (True, False))
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5, rtol=0)
    assert np.abs(scanned - logp(pair("Qwen3VL").ours, 0.0)).max() > 0.1


@pytest.mark.parametrize("kind", by_kind(("Qwen3VLMoe", "Gemma3"), always=("Gemma3",)))
def test_log_probabilities_of_text_after_pictures(kind, pair):
    """Those of transformers; the bits of a document do not depend on the others of a batch, with pictures or
    without."""
    first, second = pair(kind).documents
    text = media_oracles.plain(kind, 9)
    tokens, segments, media = media_oracles.batch([[first, text], [second]], WIDTH)
    logp = np.asarray(pair(kind).ours.logprobs(tokens, segments=segments, temperature=0.7, **media)[0])
    for row, each in enumerate((first, second)):
        expected = torch.log_softmax(torch.tensor(each.logits[:-1]) / 0.7, -1).numpy()
        expected = np.take_along_axis(expected, each.tokens[1:, None], -1)[:, 0]
        is_text = each.media.index[1:] < 0
        np.testing.assert_allclose(logp[row, 1 : len(each)][is_text], expected[is_text], atol=1e-4, rtol=0)
    alone = np.asarray(pair(kind).ours.logprobs(text.tokens[None], temperature=0.7)[0])[0]
    np.testing.assert_array_equal(logp[0, len(first) : len(first) + len(text)], alone)
    one = media_oracles.batch([[second]], 30)
    again = np.asarray(pair(kind).ours.logprobs(one[0], segments=one[1], temperature=0.7, **one[2])[0])
    np.testing.assert_array_equal(again[0, : len(second)], logp[1, : len(second)])


@pytest.mark.slow
def test_a_placeholder_without_a_row_is_a_token_and_one_with_a_row_may_be_no_id(pair):
    """The index decides: the embedding of a placeholder id is read where no row stands, and an id outside the
    vocabulary does no harm where one does."""
    model, document = pair("Qwen3VLMoe").ours, pair("Qwen3VLMoe").documents[0]
    tokens, segments, media = media_oracles.batch([[document]] * 3, WIDTH)
    tokens[1] = np.where(media["media"].index[1] >= 0, 10**6, tokens[1])
    tokens[2, len(document) - 2] = media_oracles.IMAGE
    logits = np.asarray(model.logits(tokens, segments=segments, **media))
    np.testing.assert_array_equal(logits[1], logits[0])
    theirs = pair("Qwen3VLMoe").theirs.model.language_model
    embedding = np.asarray(model.params["embed_tokens"])[media_oracles.IMAGE]
    np.testing.assert_array_equal(embedding, theirs.embed_tokens.weight[media_oracles.IMAGE].detach().numpy())
    row, count = media["media"], len(media["media"].table)
    index = row.index.copy()
    index[0, len(document) - 2] = count  # the row says what the embedding says
    table, deep = np.concatenate([row.table, embedding[None]]), np.pad(row.deep, ((0, 0), (0, 1), (0, 0)))
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
        ({"media": dataclasses.replace(rows, index=rows.index[:, :-1])}, "media.index must have the shape of tokens"),
        ({"turns": media["turns"][..., :2]}, "turns must have the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model.logits(tokens, segments=segments, **media | wrong)


def test_experts_are_read_in_both_orders_of_their_axes(pair, tmp_path):
    """The released files hold [experts, inputs, outputs], transformers writes [experts, outputs, inputs]."""
    from safetensors.torch import load_file, save_file

    state = load_file(pair("Qwen3VLMoe").directory / "model.safetensors")
    turned = {
        name: (tensor.transpose(1, 2) if ".experts." in name else tensor).contiguous() for name, tensor in state.items()
    }
    assert sum(".experts." in name for name in state) == 4
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((pair("Qwen3VLMoe").directory / "config.json").read_text())
    back = policy.load(tmp_path)
    for path, array in pair("Qwen3VLMoe").ours.params.items():
        np.testing.assert_array_equal(np.asarray(back.params[path]), np.asarray(array), err_msg=path)


@pytest.mark.parametrize("kind", by_kind(("Qwen3VL", "Qwen3VLMoe"), always=("Qwen3VLMoe",)))
def test_a_saved_directory_is_one_of_the_multimodal_model(kind, pair, tmp_path):
    """It has the configuration of the wrapper and its names of the text weights."""
    from safetensors.torch import load_file

    policy.save(pair(kind).ours, tmp_path)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path, pair(kind).directory))
    assert set(theirs) - set(ours) == {name for name in theirs if ".visual." in name}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    written, read = (json.loads((each / "config.json").read_text()) for each in (tmp_path, pair(kind).directory))
    assert written["text_config"] == read["text_config"] and written["architectures"] == read["architectures"]
    assert policy.load(tmp_path).config.stacks == pair(kind).ours.config.stacks
