"""Engram inside a decoder: across calls, documents and files its numbers are the same, and what is
looked up learns."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from learners import batch, host, stage
from oracles import configuration, random_model, short, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.cache import cache as caches
from policy.cache.step import Step
from policy.config import Runtime
from policy.fields import names, ngrams
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface.tensorfiles import ModelFileError
from policy.layers.engram import set_classes
from policy.model import Graph
from policy.modes import make_step
from rollout.text.classes import token_classes
from rollout.text.tokenizer import load_tokenizer

SECTION = {
    "layers": [1],
    "vocab_bases": [50, 70],
    "max_ngram": 3,
    "heads": 2,
    "head_dim": 4,
    "kernel_size": 3,
    "pad_id": 3,
}
CLASSES = (np.random.default_rng(0).permutation(160) % 90).astype(np.int32)


def configured(streams=None, depth=3, **section):
    parts = {"engram": SECTION | section} | (
        {"hyper_connections": {"streams": streams}} if streams else {}
    )
    return families.read(configuration("Llama", num_hidden_layers=depth, duet=parts))


def remembering(config, **how):
    """A random model in which the memory weighs as much as anything else."""
    model = random_model(config, **how)
    rng = np.random.default_rng(5)
    for path, array in model.params.items():
        if ".lookup." in path and "classes" not in path:
            model.params[path] = jax.device_put(
                rng.normal(size=array.shape).astype(array.dtype), array.sharding
            )
    model.params = set_classes(model.params, CLASSES)
    return model


@pytest.fixture(scope="module")
def model():
    return remembering(configured(streams=2, ids=90, outer_norm=True))


def test_a_memory_is_a_stack_of_its_own_and_each_has_its_own_hashes():
    config = configured(depth=8, layers=[5, 2])
    assert [(len(stack.pattern), stack.repeats) for stack in config.stacks] == [
        (1, 2),
        (1, 1),
        (1, 2),
        (1, 1),
        (1, 2),
    ]
    first, second = config.layers[5].engram, config.layers[2].engram
    assert not set(first.rows) & set(second.rows) and min(first.rows) < min(second.rows)
    assert first.multipliers != second.multipliers
    assert [i for i, layer in enumerate(config.layers) if layer.engram] == [2, 5]


@pytest.mark.slow
def test_documents_alone_packed_and_padded_are_the_same(model):
    lengths, width = (9, 1, 12), 24
    documents = [tokens(1, n, seed=n)[0] for n in lengths]
    rows, segments = np.zeros((6, width), int), np.zeros((6, width), int)
    for number, document in enumerate(documents, 1):
        at, n = sum(lengths[: number - 1]), len(document)
        for row, start, segment in (
            (0, at, number),
            (1, width - sum(lengths) + at, number),
            (2 + number, width - n, 1),
        ):
            rows[row, start : start + n], segments[row, start : start + n] = document, segment
    rows[2], segments[2] = tokens(1, width), 1
    logits = np.asarray(model.logits(rows, segments=segments))
    for number, document in enumerate(documents, 1):
        alone, there = np.zeros((6, width), int), np.zeros((6, width), int)
        alone[0, : len(document)], there[0, : len(document)] = document, 1
        expected = np.asarray(model.logits(alone, segments=there))[0, : len(document)]
        for row, segment in ((0, number), (1, number), (2 + number, 1)):
            np.testing.assert_allclose(
                logits[row][segments[row] == segment],
                expected,
                atol=2e-5,
                rtol=0,
                err_msg=f"row {row}",
            )


@functools.cache
def forward(graph):
    @jax.jit
    def run(params, tokens_BT, step, kv):
        with graph.precision():
            decoder = graph.decoder(params)
            hidden, kv, _ = decoder(tokens_BT, step, kv, graph.runtime)
            return hidden @ decoder.head_weight.T, kv

    return run


def fed(model, rows, lengths, calls):
    """(logits float32[B, T, V], state of the memory) of tokens that are given as `calls` counts
    them, each row up to its length.
    """
    kv, at, result = caches.create(model.graph.config, len(rows), 14, jnp.float32, scan=True), 0, []
    for count in calls:
        positions = np.broadcast_to(at + np.arange(count), (len(rows), count)).astype(np.int32)
        step = Step(
            jnp.asarray(positions), jnp.asarray(positions < np.asarray(lengths)[:, None], jnp.int32)
        )
        logits, kv = forward(model.graph)(model.params, rows[:, at : at + count], step, kv)
        result.append(np.asarray(logits))
        at += count
    return np.concatenate(result, axis=1), kv


def memory_of(kv):
    """Its state in the cache, by name, [slots, ...]."""
    return {
        name: np.asarray(array[0])
        for name, array in kv[1][0][0].items()
        if name.startswith("ngram")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([5, 5, 1, 1, 1, 1], id="chunks"),
        pytest.param([1] * 14, id="decoding", marks=pytest.mark.slow),
    ],
)
def test_with_history_in_the_cache_every_token_is_that_of_the_full_forward(model, calls):
    rows, lengths = tokens(3, 14), np.array([14, 8, 4])
    expected = np.asarray(model.logits(rows))
    result, _ = fed(model, rows, lengths, calls)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(result[row, :length], expected[row, :length], atol=3e-5, rtol=0)


@pytest.mark.slow
def test_a_slot_that_is_not_in_use_keeps_its_state_and_a_copied_prefix_brings_its_own(model):
    rows = tokens(3, 9)
    full, part, short = (
        fed(model, rows, lengths, calls)[1]
        for lengths, calls in (
            ([9, 9, 9], [5, 1, 1, 1, 1]),
            ([9, 4, 0], [5, 1, 1, 1, 1]),
            ([4, 4, 0], [5]),
        )
    )
    states = memory_of(full), memory_of(part), memory_of(short)
    assert (
        sorted(states[0]) == ["ngram_conv", "ngram_ids"]
        and states[0]["ngram_ids"].dtype == np.int32
    )
    for name in states[0]:
        np.testing.assert_array_equal(states[1][name][1], states[2][name][1])
        np.testing.assert_allclose(states[1][name][0], states[0][name][0], atol=1e-5)
        assert not states[1][name][2].any() and states[0][name][2].any()
    turned = jax.tree.map(lambda a: a[:, [1, 0]], short)
    copied = memory_of(caches.insert(jax.tree.map(lambda a: a + 7, full), turned, np.array([2, 5])))
    for name, array in copied.items():
        np.testing.assert_array_equal(array[2], states[2][name][1])


@pytest.mark.slow
def test_a_generator_gives_the_log_probabilities_of_training():
    from rollout import Generator, SamplingParams

    model = remembering(configured(depth=2, ids=90, kernel_size=1, max_ngram=2, vocab_bases=[90]))
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (1, 7, 3, 12)]
    generator = Generator(model, max_length=32, slots=2)
    for _ in range(2):  # the second time over slots that were used
        for prompt, (out,) in zip(
            prompts, generator.generate(prompts, SamplingParams(max_new_tokens=9)), strict=True
        ):
            row = np.array([prompt + out.tokens])
            padded = np.pad(row, ((0, 0), (0, 24 - row.shape[1])))
            logp = np.asarray(
                model.logprobs(padded, segments=np.arange(24)[None] < row.shape[1])[0]
            )
            np.testing.assert_allclose(out.logprobs, logp[0, len(prompt) : row.shape[1]], atol=3e-5)


@pytest.mark.slow
def test_scanned_stacks_around_a_memory_equal_unrolled_ones():
    model = remembering(configured(depth=5, layers=[2], ids=90))
    rows = tokens(2, 9)
    expected = None
    for runtime in (Runtime(), Runtime(scan=False, remat="none")):
        graph = Graph(model.config, runtime, model.graph.layout)
        loss, grads = jax.jit(
            jax.value_and_grad(
                lambda p, g=graph: g.logprobs(p, rows, make_step(rows), 1.0)[0].sum(),
                allow_int=True,
            )
        )(model.params)
        grads = {path: np.asarray(grad) for path, grad in grads.items() if "classes" not in path}
        if expected:
            for path, grad in grads.items():
                np.testing.assert_allclose(grad, expected[path], atol=1e-3, rtol=1e-4, err_msg=path)
        expected = grads


def test_saving_and_loading_keeps_every_number_in_any_dtype(tmp_path):
    model = remembering(
        configured(streams=2, ids=90, outer_norm=True), runtime=Runtime("bfloat16", "bfloat16")
    )
    path = "stacks.1.layers.0.lookup.classes"
    assert path in model.graph.untrained and model.params[path].dtype == jnp.int32
    policy.save(model, tmp_path)
    section = json.loads((Path(tmp_path) / "config.json").read_text())["duet"]["engram"]
    assert section["ids"] == 90 and section["pad_id"] == 3
    back = policy.load(tmp_path, dtype="bfloat16")
    assert back.config.stacks == model.config.stacks and back.params.keys() == model.params.keys()
    for path, array in model.params.items():
        assert back.params[path].dtype == array.dtype
        np.testing.assert_array_equal(
            np.asarray(back.params[path], np.float32), np.asarray(array, np.float32), err_msg=path
        )


TABLE = "engram.table.shard_{s}.weight"


@pytest.fixture
def in_shards(monkeypatch, tmp_path):
    """A saved model whose table is stored in 7 shards, with the constants of its hashes."""
    llama = families.get("llama")
    stored = names.Stored(TABLE, also=(names.Stored("engram.table.weight"),))
    monkeypatch.setattr(llama, "NAMES", llama.NAMES | {"lookup.table": stored})
    monkeypatch.setattr(llama, "table_shards", lambda hf: 7, raising=False)
    monkeypatch.setattr(llama, "derived_tensors", ngrams.hash_tensors, raising=False)
    model = remembering(configured(ids=90))
    policy.save(model, tmp_path)
    return model, tmp_path


def prefixed(name):
    return f"model.layers.1.{name}"


def rewritten(directory, change):
    """The directory, after `change` of its tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_table_is_stored_in_shards_and_read_from_any(in_shards):
    model, directory = in_shards
    table = np.asarray(model.params["stacks.1.layers.0.lookup.table"][0])
    spec = model.config.layers[1].engram
    assert table.shape == (sum(spec.rows), 4) and len(table) % 7
    stored = load_file(directory / "model.safetensors")
    shards = [stored.pop(prefixed(TABLE.format(s=s))) for s in range(7)]
    np.testing.assert_array_equal(np.concatenate(shards), table)
    assert [len(rows) for rows in shards] == [-(-len(table) // 7)] * 6 + [
        len(table) - 6 * -(-len(table) // 7)
    ]
    constants = {name.split(".")[-1]: array for name, array in stored.items() if ".ple." in name}
    assert constants["layer_multipliers"].tolist() == list(spec.multipliers)
    assert constants["ngram_heads_vocab_sizes"].tolist() == list(spec.rows)
    assert constants["ngram_heads_offsets"].tolist() == [0, *np.cumsum(spec.rows)[:-1].tolist()]
    assert {array.dtype for array in constants.values()} == {np.dtype(np.int64)}
    for cuts in ([], [1], [50, 51, 200]):  # one shard, and shards of other sizes
        parts = np.split(table, cuts)
        uneven = {
            prefixed(TABLE.format(s=s)): np.ascontiguousarray(rows) for s, rows in enumerate(parts)
        }
        save_file(stored | uneven, directory / "model.safetensors")
        np.testing.assert_array_equal(
            policy.load(directory).params["stacks.1.layers.0.lookup.table"][0], table
        )
    save_file(stored | {prefixed("engram.table.weight"): table}, directory / "model.safetensors")
    np.testing.assert_array_equal(
        policy.load(directory).params["stacks.1.layers.0.lookup.table"][0], table
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(prefixed(TABLE.format(s=0))),
            "missing tensor model.layers.1.engram.table.shard_0",
        ),
        (
            lambda tensors: tensors.pop(prefixed(TABLE.format(s=6))),
            r"shard_0.weight to .*shard_5.weight have \d+ rows",
        ),
        (
            lambda tensors: tensors.pop(prefixed(TABLE.format(s=3))),
            r"shard_0.weight to .*shard_2.weight have \d+ rows",
        ),
        (
            lambda tensors: tensors.update(
                {prefixed(TABLE.format(s=2)): np.zeros((3, 5), np.float32)}
            ),
            r"shard_2.weight has shape \[3, 5\], expected \[3, 4\]",
        ),
        (
            lambda tensors: tensors.update(
                {prefixed("ple.ple_embedding.layer_multipliers"): np.arange(3)}
            ),
            "layer_multipliers has other numbers than config.json gives",
        ),
    ],
)
def test_shards_that_are_not_the_table_are_refused(in_shards, change, message):
    with pytest.raises(ModelFileError, match=message):
        policy.load(rewritten(in_shards[1], change))


def test_a_decoder_with_tables_of_its_own_takes_no_others():
    config = configured()
    with pytest.raises(ValueError, match="n-gram tables of its own"):
        ngrams.add_engram(config, ngrams.EngramSection((0,), (50, 70)))


@pytest.mark.slow
def test_one_update_moves_the_rows_that_were_looked_up_and_no_others():
    sizes = learners.SIZES | {"num_hidden_layers": 1}
    section = SECTION | {"layers": [0], "vocab_bases": [300, 300]}
    model = random_model(
        families.read(configuration("Llama", **sizes, duet={"engram": section})),
        runtime=learners.QUICK,
    )
    data, table = batch(4), "stacks.0.layers.0.lookup.table"
    trainer, state = learners.begin(
        model, stage(optimizer={"weight_decay": 0.0, "eps": 1e-8}), fresh=True
    )
    before = host(state.policy.params)[f"['{table}']"]
    state, metrics = trainer.update(state, data)
    after = host(state.policy.params)
    moved = (after[f"['{table}']"] != before).any(-1)[0]
    spec = model.config.layers[0].engram
    hit = np.zeros(sum(spec.rows), bool)
    for row, segments in zip(np.asarray(data.tokens), np.asarray(data.segments), strict=True):
        hit[looked_up(spec, row[segments != 0][:-1])] = (
            True  # the last token's state predicts nothing
        )
    assert moved.any() and not (moved & ~hit).any()
    assert moved.sum() > 0.9 * hit.sum()
    np.testing.assert_array_equal(
        after[f"['{table.replace('table', 'classes')}']"][0], np.arange(learners.VOCAB)
    )


def looked_up(spec, document):
    from policy.layers.engram import table_rows

    shifted = [
        np.pad(document, (j, 0), constant_values=spec.pad_id)[: len(document)]
        for j in range(len(spec.multipliers))
    ]
    return np.asarray(
        table_rows(spec, [jnp.asarray(each[None], jnp.int32) for each in shifted])
    ).ravel()


CLIPPED = {"clip_norm": 0.1, "weight_decay": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engram", "per_layer"])
def test_a_table_in_host_memory_gives_the_same_numbers_and_learns_the_same(kind, tmp_path):
    sizes = learners.SIZES | {"num_hidden_layers": 2}
    engram = configuration(
        "Llama", **sizes, duet={"engram": SECTION | {"layers": [1], "outer_norm": True}}
    )
    config = families.read(engram if kind == "engram" else short("Qwen4Exp"))
    [number] = (number for number, layer in enumerate(config.layers) if layer.engram)
    data, table, result = batch(4), f"stacks.{number}.layers.0.lookup.table", {}
    for memory in ("device", "host"):
        model = random_model(config, runtime=Runtime(table_memory=memory))
        places = {path: array.sharding.memory_kind for path, array in model.params.items()}
        assert [path for path, place in places.items() if place == "pinned_host"] == (
            [table] if memory == "host" else []
        )
        logp = np.asarray(model.logprobs(data.tokens, segments=data.segments)[0])
        policy.save(model, tmp_path)
        again = policy.load(tmp_path, runtime=Runtime(table_memory=memory))
        assert {path: array.sharding.memory_kind for path, array in again.params.items()} == places
        trainer, state = learners.begin(model, stage(micro_batch=2, optimizer=CLIPPED), fresh=True)
        for _ in range(2):
            state, metrics = trainer.update(state, data)
        assert {
            path: array.sharding.memory_kind for path, array in state.policy.params.items()
        } == places
        moments = [
            leaf
            for leaf in jax.tree.leaves(state.policy.optimizer)
            if leaf.shape == model.params[table].shape
        ]
        assert len(moments) == 2 and {leaf.sharding.memory_kind for leaf in moments} == {
            places[table]
        }
        result[memory] = {"logp": logp} | host(again.params) | host(state) | host(metrics)
    for key, array in result["device"].items():
        np.testing.assert_allclose(result["host"][key], array, atol=1e-6, rtol=3e-6, err_msg=key)


def test_an_update_makes_no_array_as_large_as_a_table_in_host_memory():
    """Between the computations of the host: there XLA takes even those in host memory through the
    device. Only what the last one makes is as large, weights and two moments."""
    section = SECTION | {"layers": [0], "vocab_bases": [700, 900], "outer_norm": True}
    config = families.read(configuration("Llama", **learners.SIZES, duet={"engram": section}))
    model, data = random_model(config, runtime=Runtime(table_memory="host")), batch(4)
    trainer, state = learners.begin(model, stage(micro_batch=2, optimizer=CLIPPED))
    size, made = model.params["stacks.0.layers.0.lookup.table"].size, []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inside = [
                inner for inner in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(inner)
            ]
            if inside and not eqn.primitive.name.startswith("compute_on"):
                for inner in inside:
                    visit(getattr(inner, "jaxpr", inner))
            else:
                made.extend(
                    (eqn.primitive.name, str(v.aval)) for v in eqn.outvars if v.aval.size >= size
                )

    call = learners.update_call(trainer, state, data, 2)
    visit(
        trainer.policy_update.executable.jitted.trace(
            call.learners, call.arguments, micro_rows=2
        ).jaxpr.jaxpr
    )
    assert all("<host>" in aval for _, aval in made)
    assert len([name for name, _ in made if name not in ("squeeze", "device_put")]) == 3, (
        made
    )  # those stay where they are


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [3]}, "layers: 3 does not exist, the decoder has layers 0 to 2"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [1, 1]}, "each once"),
        ({"vocab_bases": [50]}, "each order from 2 to 3"),
        ({"max_ngram": 1}, "max_ngram"),
        ({"vocab_bases": [2**30, 2**30]}, "2\\^31 rows"),
        ({"integers": "int16"}, "'int16' is none of int32, int64"),
        ({"ids": 161}, "ids 161 must be at most the vocabulary, 160"),
        ({"pad_id": 160}, "pad_id 160"),
        ({"head": 1}, "unknown keys head"),
    ],
)
def test_wrong_sections_are_refused(changes, message):
    with pytest.raises(UnsupportedModel, match=f"duet.engram.*{message}"):
        configured(**changes)


def test_a_section_without_its_required_keys_says_which():
    with pytest.raises(UnsupportedModel, match="duet.engram.*vocab_bases"):
        families.read(configuration("Llama", duet={"engram": {"layers": [0]}}))


def test_tokens_that_differ_in_spelling_only_are_one_class():
    alphabet = "aAbBéÉ \t\nﬁ.e0①\u00a0"
    tokenizer = load_tokenizer("characters", alphabet)
    classes, count = token_classes(tokenizer, 40)
    of = {character: classes[tokenizer.convert_tokens_to_ids(character)] for character in alphabet}
    assert of["a"] == of["A"] and of["b"] == of["B"] and of["a"] != of["b"]
    assert of["é"] == of["É"] == of["e"]  # accents are stripped
    assert of[" "] == of["\t"] == of["\n"] == of["\u00a0"]  # a lone space stays one
    assert of["①"] != of["0"] and len({of[c] for c in "a b.e0①ﬁ"}) == 8
    assert count == len(set(classes[: len(tokenizer)])) and classes.dtype == np.int32
    assert (classes[len(tokenizer) :] == 0).all() and len(classes) == 40
    numbers = list(dict.fromkeys(classes[: len(tokenizer)].tolist()))
    assert numbers == sorted(numbers)  # numbered in the order of their first tokens
    broken, full = token_classes(load_tokenizer("bytes"), 264)
    assert (
        len(set(broken[8 + 128 :].tolist())) > 60 and full > 150
    )  # parts of characters stand for themselves
