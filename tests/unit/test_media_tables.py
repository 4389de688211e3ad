"""Tables of steps at their edges: steps and mini-batches without a picture, pictures that occur
twice or touch, text prompts between pictures, stages that train towers after stages that do not,
and the rows that a run plans."""

import dataclasses

import learners
import numpy as np
import pytest
from media_oracles import drawn
from test_media_training import CLOSE, Loader, case, document, shown_to

import policy
from policy.config import Runtime
from policy.execution.encoding import MediaEncoder
from policy.media import Item
from policy.mesh import processes
from rl.training.batch import padded_batch
from rl.training.media.tables import MediaTables, table_rows
from rollout import Generator, MediaPrompt, SamplingParams


def logprobs_of(model, documents, table) -> np.ndarray:
    """Log-probabilities of documents, one a row, through a table."""
    rows = [(each.tokens.tolist(), [1] * len(each.tokens)) for each in documents]
    batch = table.add(
        padded_batch(rows, 64), [(row, 0, each) for row, each in enumerate(documents)]
    )
    trainer, state = learners.begin(model, learners.stage("sft", micro_batch=2))
    return trainer.logprobs(state.policy.params, batch, table.table)[0]


def test_a_step_of_text_has_a_table_without_items():
    one = case("Qwen3VL")
    tables = one.tables()
    table = tables.of(one.model.params, [None, None])
    assert len(table.table.rows) == tables.M and not table.first
    assert tables.metrics() == {
        "media/pictures": 0, "media/rows": 0, "media/encoded": 0, "media/distinct": 1.0,
        "media/encode_seconds": pytest.approx(0, abs=60), "media/wait_seconds": 0.0,
    }  # fmt: skip
    trainer, state = learners.begin(one.model, learners.stage("sft", micro_batch=2))
    text = one.batch.rows(slice(2, 3))
    added = table.add(text, [(0, 0, None)])
    assert (added.media.index == -1).all()
    logp, _ = trainer.logprobs(state.policy.params, added, table.table)
    np.testing.assert_allclose(logp, trainer.logprobs(state.policy.params, text)[0], atol=CLOSE)


def test_items_with_more_rows_than_a_table_are_refused():
    one = case("Qwen3VL")
    tables = one.tables()
    tables.M = 2
    with pytest.raises(AssertionError, match="rows in a table of 2"):
        tables.of(one.model.params, one.documents)


def test_a_mini_batch_without_a_picture_leaves_a_trained_tower_as_it_is():
    one = case("Qwen3VL")
    table = one.tables(trained=True).of(one.model.params, one.documents)
    text = one.add(table).rows(slice(2, 3))
    assert table.tower_inputs(text) == []
    options = learners.stage("sft", freeze=[], optimizer={"weight_decay": 0.0})
    trainer, state = learners.begin(one.model, options)
    before = learners.host(state.policy.params)
    state, metrics = trainer.update(state, text, **shown_to(text, table))
    after = learners.host(state.policy.params)
    changed = {path for path in before if before[path].tobytes() != after[path].tobytes()}
    assert (
        metrics["optim/skipped"] == 0 and changed and not any("image." in path for path in changed)
    )


def test_a_picture_that_occurs_twice_and_pictures_that_touch_have_the_rows_of_copies():
    one = case("Qwen3VL")
    first, second = inputs = drawn(one.model.config.image, [(4, 6), (2, 2)])
    copies = [dataclasses.replace(first, digest=f"copy.{n}") for n in range(3)]
    shown = [
        document("Qwen3VL", (3, first, first, 2), 0),
        document("Qwen3VL", (1, first, 2, second, second, 3), 1),
    ]
    other = dataclasses.replace(second, digest="copy")
    inputs |= dict.fromkeys(copies, inputs[first]) | {other: inputs[second]}
    parts = [(3, first, copies[0], 2), (1, copies[1], 2, second, other, 3)]
    apart = [document("Qwen3VL", each, seed) for seed, each in enumerate(parts)]
    tables = [MediaTables(MediaEncoder(one.model.graph), Loader(inputs), 32) for _ in range(2)]
    ours, theirs = (
        each.of(one.model.params, docs) for each, docs in zip(tables, (shown, apart), strict=True)
    )
    assert [each.encoder.encoded for each in tables] == [2, 5]
    np.testing.assert_array_equal(
        logprobs_of(one.model, shown, ours), logprobs_of(one.model, apart, theirs)
    )


@pytest.mark.slow
def test_text_prompts_are_completed_between_prompts_with_pictures():
    one = case("Qwen3VL")
    table = one.tables().of(one.model.params, one.documents)
    text = [5, 9, 17, 3]
    ids = [text if each is None else each.tokens.tolist() for each in one.documents]
    prompts = [table.prompt(*each) for each in zip(ids, one.documents, strict=True)]
    assert [isinstance(each, MediaPrompt) for each in prompts] == [True, True, False, True]
    greedy = SamplingParams(max_new_tokens=4, temperature=0)
    together = Generator(one.model, max_length=48, slots=2).generate(prompts, greedy)
    generator = Generator(one.model, max_length=48, slots=2)
    for prompt, (completion,) in zip(prompts, together, strict=True):
        ((alone,),) = generator.generate([prompt], greedy)
        assert alone.tokens == completion.tokens


def test_a_stage_that_trains_a_tower_reads_inputs_and_one_that_does_not_encodes_none():
    """In any order: the table of a frozen stage holds no inputs, so a stage that trains cannot go
    on with it."""
    one = case("Qwen3VL")
    tables = one.tables()
    frozen = tables.of(one.model.params, one.documents)
    assert frozen.tower_inputs(one.add(frozen)) is None
    tables.start_stage(trained=True)
    trained = tables.of(one.model.params, one.documents)
    assert trained is not frozen and len(trained.tower_inputs(one.add(trained))) > 0
    tables.forget()
    assert tables.of(one.model.params, one.documents) is not trained
    tables.start_stage(trained=False)
    again, encoded = tables.of(one.model.params, one.documents), tables.encoder.encoded
    tables.forget()
    assert tables.of(one.model.params, one.documents) is again and tables.encoder.encoded == encoded
    alone = tables.of(one.model.params, one.documents[:1])
    assert alone.tower_inputs(one.add(again)) is None


def test_planned_rows_hold_every_batch(monkeypatch):
    """Rows of data of one and two sequences, with pictures that several rows show, and batches that
    repeat rows; also if two processes hold the rows."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        pool = [
            Item("image", str(n), (1, 1), int(rng.integers(1, 40)))
            for n in range(rng.integers(1, 12))
        ]
        rows = []
        for _ in range(rng.integers(1, 15)):
            items = tuple(pool[n] for n in rng.integers(0, len(pool), rng.integers(0, 4)))
            one = dataclasses.replace(document("Qwen3VL", (1,), 0), items=items)
            rows.append([one] * int(rng.integers(1, 3)) if items else [])
        count, said = int(rng.integers(1, 6)), []

        def of_both(own, said=said):
            said.append(own)
            return said[-2:]

        alone = table_rows(rows, count)
        with monkeypatch.context() as patch:
            patch.setattr(processes, "all_gather_object", of_both)
            table_rows(rows[::2], count)
            split = table_rows(rows[1::2], count)
        for M in (alone, split):
            assert M == 0 or M & (M - 1) == 0
        for _ in range(5):
            batch = [rows[n] for n in rng.integers(0, len(rows), count)]
            shown = {item.digest: item.rows for row in batch for each in row for item in each.items}
            assert sum(shown.values()) <= min(alone, split)


HOW = {
    "full": {"remat": "full"},
    "unrolled": {"remat": "full", "scan": False},
    "matmul": {"remat": "minimal"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [*HOW.values(), {"dropout": 0.3}], ids=[*HOW, "dropout"])
def test_an_update_of_everything_does_not_depend_on_how_it_is_computed(how):
    """Two pictures in packed rows, with a trained tower; with dropout, also for other
    micro-batches."""
    one, how = case("Qwen3VL"), dict(how)
    options = {
        "freeze": [],
        "dropout": how.pop("dropout", 0.0),
        "optimizer": {"learning_rate": 1.0, "eps": 1.0},
    }
    results = []
    for runtime, micro_batch in (
        (Runtime(remat="none"), None),
        (Runtime(**({"remat": "none"} | how)), 1),
    ):
        model = policy.create(one.model.config, seed=3, runtime=runtime)
        table = MediaTables(MediaEncoder(model.graph), Loader(one.inputs), 32, trained=True).of(
            model.params, one.documents
        )
        trainer, state = learners.begin(
            model, learners.stage("sft", micro_batch=micro_batch, **options), fresh=True
        )
        before = learners.host(state.policy.params)
        batch = one.add(table)
        state, _ = trainer.update(state, batch, **shown_to(batch, table))
        after = learners.host(state.policy.params)
        results.append({path: after[path] - before[path] for path in before})
    for path, change in results[0].items():
        np.testing.assert_allclose(results[1][path], change, atol=2e-5, err_msg=path)
    assert any(
        np.abs(change).max() > 1e-3 for path, change in results[0].items() if "image." in path
    )
