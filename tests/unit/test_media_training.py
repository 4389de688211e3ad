"""Updates on rows with pictures: places in packed rows, frozen and trained towers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from media_oracles import IMAGE, LOOKS_AHEAD, drawn, random_policy

from policy import modes
from policy.execution.encoding import MediaEncoder
from rl.data.encoded import Row
from rl.stages.sampling.batches import routes_of
from rl.stages.supervised import expanded_at
from rl.training.batch import padded_batch, segmented_batch
from rl.training.media.tables import MediaTables, table_rows
from rl.training.reward_model import RewardModelScorer
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.media.expand import Expanded
from rollout.types import Trajectory

SHAPES = {kind: [(4, 6), (2, 2)] for kind in ("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL")} | {
    "Gemma3": [(6, 6), (6, 6)]
}
CLOSE = 2e-5


@dataclasses.dataclass
class Loader:
    """Contents that are items, and what the towers read of them."""

    known: dict
    asked: list = dataclasses.field(default_factory=list)
    waited: float = 0.0

    def inputs(self, references):
        self.asked += [each.digest for each in references]
        return {each: self.known[each] for each in references}


def document(kind: str, parts, seed: int) -> Expanded:
    """A document of texts (a length) and pictures (an item)."""
    rng, tokens, index, turns, until = np.random.default_rng(seed), [], [], [], []
    count = row = 0
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(0, 149, part).tolist()
            index += [-1] * part
            until += range(len(until), len(until) + part)
            turns += [(count + n,) * 3 for n in range(part)]
            count += part
            continue
        h, w = (side // 2 for side in part.shape)
        tokens += [IMAGE] * part.rows
        index += range(row, row + part.rows)
        until += [len(until) + part.rows - 1] * part.rows
        turns += [(count, count + y, count + x) for y in range(h) for x in range(w)]
        row, count = row + part.rows, count + max(h, w)
    qwen, items = (
        kind.startswith("Qwen"),
        tuple(part for part in parts if not isinstance(part, int)),
    )
    arrays = [np.asarray(each, np.int32) for each in (tokens, index, turns if qwen else [], until)]
    return Expanded(
        arrays[0],
        arrays[1],
        arrays[2] if qwen else None,
        arrays[3] if kind in LOOKS_AHEAD else None,
        items,
        np.zeros(len(tokens), np.int32),
        items,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Three documents with pictures and one of text, one per row of a batch."""

    kind: str
    model: object
    inputs: dict
    documents: list
    answers: list
    batch: object

    def tables(self, trained: bool = False, M: int = 32) -> MediaTables:
        return MediaTables(MediaEncoder(self.model.graph), Loader(self.inputs), M, trained)

    def add(self, table):
        return table.add(self.batch, [(row, 0, each) for row, each in enumerate(self.documents)])


def shown_to(batch, table) -> dict:
    """What an update on this batch takes."""
    return {"table": table.table, "tower_inputs": table.tower_inputs(batch)}


@functools.cache
def case(kind: str) -> Case:
    model = random_policy(kind)
    one, two = inputs = drawn(model.config.image, SHAPES[kind])
    parts = [(3, one, 2), (2, two, 1, one, 3), None, (1, two, 4)]
    documents = [
        None if each is None else document(kind, each, seed) for seed, each in enumerate(parts)
    ]
    rng = np.random.default_rng(5)
    answers = [rng.integers(0, 149, n).tolist() for n in (4, 2, 9, 3)]
    rows = []
    for each, answer in zip(documents, answers, strict=True):
        prompt = [] if each is None else each.tokens.tolist()
        rows.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    batch = padded_batch(rows, 64)
    return Case(kind, model, inputs, documents, answers, batch)


KINDS = pytest.mark.parametrize(
    "kind",
    ["Qwen3VL", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Gemma3", "Qwen2_5_VL"))],
)


@KINDS
def test_packed_rows_equal_each_document_alone(kind):
    one = case(kind)
    tables = one.tables()
    table = tables.of(one.model.params, one.documents)
    batch = one.add(table)
    trainer, state = learners.begin(one.model, learners.stage("sft", micro_batch=2))
    packed = trainer.packing_of(batch)[0]
    assert packed.filled_rows < len(one.documents)
    logp, _ = trainer.logprobs(state.policy.params, batch, table.table)
    for row, (each, answer) in enumerate(zip(one.documents, one.answers, strict=True)):
        tokens = np.asarray(([] if each is None else each.tokens.tolist()) + answer, np.int32)
        how = {}
        if each is not None:
            media = table.media(each).part(0, len(tokens))
            tokens = np.asarray(media.text_tokens(tokens))
            arrays = {name: getattr(media, name) for name in ("index", "turns", "until")}
            rows = {name: a[None] for name, a in arrays.items() if a is not None}
            how = {"media": dataclasses.replace(media, **rows)}
        alone, _ = one.model.logprobs(tokens[None], **how)
        np.testing.assert_allclose(logp[row, 1 : len(tokens)], np.asarray(alone)[0, 1:], atol=CLOSE)


def test_equal_pictures_are_encoded_once_and_other_tables_take_their_rows():
    one = case("Qwen3VL")
    tables = one.tables()
    first = tables.of(one.model.params, one.documents * 8)
    assert tables.encoder.encoded == 2 and sorted(tables.loader.asked) == ["0.0", "0.1"]
    assert tables.of(one.model.params, one.documents, again=True) is first
    metrics = tables.metrics()
    assert (
        metrics["media/pictures"] == 4 * 8
        and metrics["media/encoded"] == 2
        and metrics["media/distinct"] == 2 / 32
    )
    alone = tables.of(one.model.params, one.documents[3:])
    assert tables.encoder.encoded == 2
    rows = first.first[list(one.inputs)[1]]
    assert np.array_equal(alone.table.rows[:1], first.table.rows[rows : rows + 1])
    assert tables.metrics()["media/encoded"] == 0
    assert table_rows([[each] for each in one.documents if each], 2) == 8


@KINDS
def test_frozen_towers_stay_and_the_rest_learns(kind):
    one = case(kind)
    table = one.tables().of(one.model.params, one.documents)
    batch = one.add(table)
    trainer, state = learners.begin(one.model, learners.stage("sft", micro_batch=2))
    before = learners.host(state.policy.params)
    state, metrics = trainer.update(state, batch, **shown_to(batch, table))
    after = learners.host(state.policy.params)
    changed = {path for path in before if before[path].tobytes() != after[path].tobytes()}
    assert (
        changed and not any("image." in path for path in changed) and metrics["optim/skipped"] == 0
    )
    assert not any("image." in key for key in learners.host(state.policy.optimizer))


@pytest.mark.slow
@KINDS
def test_the_gradient_of_a_trained_tower_is_that_of_one_backward_pass(kind):
    one = case(kind)
    tables = one.tables(trained=True)
    table = tables.of(one.model.params, one.documents)
    batch = one.add(table)
    options = {"learning_rate": 1.0, "eps": 1.0, "clip_norm": None, "weight_decay": 0.0}
    encoder, M = tables.encoder, tables.M
    inputs = table.tower_inputs(batch)

    def loss(params):
        made = encoder.empty(M)
        for each in inputs:
            made = encoder.encoded_into(params, made, each)
        logp, _ = type(one.model)(one.model.graph, params).logprobs(
            batch.tokens, segments=batch.segments, media=batch.media.in_table(made)
        )
        return -jnp.sum(logp * batch.mask) / jnp.sum(batch.mask)

    expected = jax.jit(jax.grad(loss))(one.model.params)
    for rows in (None, 1):
        trainer, state = learners.begin(
            one.model, learners.stage("sft", micro_batch=rows, freeze=[], optimizer=options)
        )
        before = {path: np.array(array) for path, array in state.policy.params.items()}
        state, _ = trainer.update(state, batch, **shown_to(batch, table))
        for path, gradient in expected.items():
            if path in one.model.graph.untrained:
                continue
            step = np.asarray(gradient) / (
                np.abs(gradient) + 1.0
            )  # of AdamW with eps 1, in its first update
            np.testing.assert_allclose(
                before[path] - state.policy.params[path], step, atol=2e-5, err_msg=path
            )
        assert any(
            np.abs(gradient).max() > 1e-3 for path, gradient in expected.items() if "image." in path
        )


@pytest.mark.slow
def test_parts_are_frozen_by_name():
    one = case("Qwen3VL")
    table = one.tables(trained=True).of(one.model.params, one.documents)
    batch = one.add(table)
    options = learners.stage("sft", freeze=["image.blocks", "stacks", "embed_tokens"])
    trainer, state = learners.begin(one.model, options)
    before = learners.host(state.policy.params)
    state, _ = trainer.update(state, batch, **shown_to(batch, table))
    after = learners.host(state.policy.params)
    changed = {
        path.strip("[]'") for path in before if before[path].tobytes() != after[path].tobytes()
    }
    assert "image.merger.up_proj" in changed
    assert not any(path.startswith(("image.blocks", "stacks", "embed_tokens")) for path in changed)


@pytest.mark.slow
def test_reward_models_read_the_rows_of_the_policys_towers():
    one = case("Qwen3VL")
    table = one.tables().of(one.model.params, one.documents)
    prompts = [[] if each is None else each.tokens.tolist() for each in one.documents]
    pairs = [
        (
            Row(ids + answer, [0] * len(ids) + [1] * len(answer), media),
            Row(ids + [7], [0] * len(ids) + [1], media),
        )
        for ids, answer, media in zip(prompts, one.answers, one.documents, strict=True)
    ]
    batch = table.add(segmented_batch(pairs, 64), expanded_at(pairs))
    batch = batch.replace(margin=np.zeros(batch.tokens.shape, np.float32))
    trainer, state = learners.begin(one.model, learners.stage("reward_model"))
    assert not any(path.startswith("image.") for path in state.reward_model.params)
    losses = []
    for _ in range(4):
        state, metrics = trainer.update(state, batch, **shown_to(batch, table))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]

    params = state.reward_model.params
    scorer = RewardModelScorer(trainer.model.trunk, params, 64)
    sequences = [ids + answer for ids, answer in zip(prompts, one.answers, strict=True)]
    shown = [(row, 0, each) for row, each in enumerate(one.documents)]
    scores = scorer(sequences, functools.partial(table.add, shown=shown), table.table)
    for row, ids in enumerate(sequences):
        alone = table.add(padded_batch([(ids, [1] * len(ids))], 64), [(0, 0, one.documents[row])])
        step = modes.make_step(
            jnp.asarray(alone.tokens),
            segments=alone.segments,
            media=alone.media.in_table(table.table),
        )
        expected, _ = trainer.model.scores(params, jnp.asarray(alone.tokens), step)
        assert abs(scores[row] - expected[0, len(ids) - 1]) < CLOSE
    assert abs(scores[0] - scorer(sequences)[0]) > 1e-3  # without the pictures


@pytest.mark.slow
def test_routes_of_prompts_with_pictures_are_replayed_and_quantised_rollouts_leave_towers_alone():
    one = case("Qwen3VLMoe")
    table = one.tables().of(one.model.params, one.documents)
    shown = [each for each in one.documents if each is not None]
    options = GeneratorOptions(
        record_routes=True, weights="int8", kv_cache="int8", cache="paged", page_size=8
    )
    generator = Generator(one.model, max_length=48, slots=4, options=options)
    assert generator.weights.paths and not any(
        path.startswith("image.") for path in generator.weights.paths
    )
    assert all(len(c.tokens) == 4 for [c] in complete(generator, table, shown))

    generator = Generator(
        one.model, max_length=48, slots=4, options=GeneratorOptions(record_routes=True)
    )
    completions = [completion for [completion] in complete(generator, table, shown)]
    rows = [
        (each.tokens.tolist() + c.tokens, [0] * len(each.tokens) + [1] * 4)
        for each, c in zip(shown, completions, strict=True)
    ]
    batch = table.add(padded_batch(rows, 48), [(row, 0, each) for row, each in enumerate(shown)])
    segments = [
        Trajectory.of_completion(each.tokens.tolist(), completion).segments[0]
        for each, completion in zip(shown, completions, strict=True)
    ]
    batch = batch.replace(routes=routes_of(segments, batch.tokens.shape[1]))
    trainer, state = learners.begin(one.model, learners.stage("grpo", router_replay=True))
    logp, _ = trainer.logprobs(state.policy.params, batch, table.table)
    for row, (each, completion) in enumerate(zip(shown, completions, strict=True)):
        own = logp[row, len(each.tokens) : len(each.tokens) + 4]
        np.testing.assert_allclose(own, completion.logprobs, atol=CLOSE)


def complete(generator, table, documents) -> list:
    prompts = [table.prompt(each.tokens.tolist(), each) for each in documents]
    return generator.generate(prompts, SamplingParams(max_new_tokens=4))
