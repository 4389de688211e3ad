"""Every family: tokens and log-probabilities of the generator equal those of the full forward pass.
S slots, V vocabulary."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from oracles import KINDS, VOCAB, by_kind, configuration, oracle, random_model, saved

import policy
import rollout.engine.programs
from policy import families
from policy.config import Runtime
from rollout import Generator, GeneratorOptions, SamplingParams

TOLERANCE = 1e-5
WIDTH = 64
NEW = 24
# Those that a family lists, and the standard model of every kind that lists none.
LISTED = {kind for kind, _ in tiny.GENERATED.values()}
MODELS = tiny.GENERATED | {
    kind: (kind, entry.standard | entry.short)
    for kind, entry in KINDS.items()
    if kind not in LISTED
}
WIDE = tiny.GENERATED_WIDE
# Two that share nothing: grouped heads with a window, and latent attention with experts.
BOTH = ("qwen3-window", "deepseek-v3-groups-yarn")
PROMPTS = [
    [int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (40, 1, 16, 2, 15, 17)
]
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)


@functools.cache
def model_of(name, **runtime):
    kind, keys = (MODELS | WIDE)[name]
    return random_model(
        families.read(configuration(kind, **keys)), seed=3, runtime=Runtime(**runtime)
    )


@functools.cache
def generator_of(name, slots=6, **options):
    options = GeneratorOptions(**{"tokens_per_dispatch": 16, "prefill_chunk": 256} | options)
    return Generator(model_of(name), max_length=WIDTH, slots=slots, seed=5, options=options)


@functools.cache
def baseline(name, temperature):
    return generator_of(name).generate(
        PROMPTS, SamplingParams(max_new_tokens=NEW, temperature=temperature)
    )


def rows_of(out, prompts=PROMPTS):
    """(tokens, segments, which are completions), [N, WIDTH] each, of prompts followed by their
    first completions."""
    tokens, segments, written = (np.zeros((len(prompts), WIDTH), int) for _ in range(3))
    for row, (prompt, (completion, *_)) in enumerate(zip(prompts, out, strict=True)):
        end = len(prompt) + len(completion.tokens)
        tokens[row, :end], segments[row, :end] = prompt + completion.tokens, 1
        written[row, len(prompt) : end] = 1
    return tokens, segments, written.astype(bool)


def margins(model, tokens, segments):
    """float[N, WIDTH]: by how little the choice of an expert, of a group or of the keys of sparse
    attention was made at a token, least over the layers."""
    import jax
    import jax.numpy as jnp

    from policy.attention.indexer import IndexedMask
    from policy.experts.router import TopKRouter
    from policy.modes import make_step

    real, best, result = TopKRouter.__call__, IndexedMask._best, []

    def gap(values, kept):
        ranked = -jnp.sort(-values, axis=-1)
        return (
            ranked[:, kept - 1] - ranked[:, kept]
            if kept < values.shape[-1]
            else jnp.full(len(values), jnp.inf)
        )

    def watched(self, x_NE, *ids):
        experts, weights, scores = real(self, x_NE, *ids)
        if self.spec.by_token:
            return experts, weights, scores
        spec, choice = (
            self.spec,
            scores + (self.correction_bias[...] if self.spec.correction_bias else 0.0),
        )
        if spec.groups > 1:
            grouped = choice.reshape(-1, spec.groups, spec.experts // spec.groups)
            best = (
                jax.lax.top_k(grouped, 2)[0].sum(-1)
                if spec.group_score == "top2"
                else grouped.max(-1)
            )
            result.append(gap(best, spec.topk_groups))
            choice = jnp.where(self._eligible(choice), choice, -1e9)
        result.append(gap(choice, spec.experts_per_token))
        return experts, weights, scores

    def watched_keys(self, visible, scores):
        ranked = -jnp.sort(jnp.where(visible, -scores, jnp.inf), axis=-1).reshape(
            -1, scores.shape[-1]
        )
        last, next_ = ranked[:, self.topk - 1], ranked[:, self.topk]
        result.append(jnp.where(jnp.isinf(next_), jnp.inf, last - next_))
        return best(self, visible, scores)

    def run(params, tokens, segments):
        runtime = dataclasses.replace(model.graph.runtime, scan=False, remat="none")
        with model.graph.precision():
            model.graph.decoder(params)(tokens, make_step(tokens, None, segments), None, runtime)
        return jnp.min(jnp.stack(result), axis=0)

    TopKRouter.__call__, IndexedMask._best = watched, watched_keys
    try:
        return np.asarray(jax.jit(run)(model.params, tokens, segments)).reshape(tokens.shape)
    finally:
        TopKRouter.__call__, IndexedMask._best = real, best


def tolerance_of(name):
    """That of the kind; rounding adds up over the layers of one deep model."""
    return KINDS[(MODELS | WIDE)[name][0]].generator * (
        2 if name == "deepseek-v3-all_moe-deep" else 1
    )


def assert_logprobs_equal(name, out, temperature):
    """Where rounding can change the choice of an expert (a margin below 1e-5), that token and what
    follows are left out.
    """
    model, tolerance = model_of(name), tolerance_of(name)
    tokens, segments, written = rows_of(out)
    expected = np.asarray(model.logprobs(tokens, segments=segments, temperature=temperature)[0])[
        written
    ]
    result = np.concatenate([np.asarray(completion.logprobs) for completion, *_ in out])
    assert expected.std() > 0.2, "the model says the same everywhere"
    compared = np.ones(len(result), bool)
    if np.abs(result - expected).max() > tolerance:
        unsure = np.logical_or.accumulate(margins(model, tokens, segments) < TOLERANCE, axis=1)
        compared = ~np.pad(unsure[:, :-1], ((0, 0), (1, 0)))[written]
    left_out = int((~compared).sum())
    assert left_out <= len(result) // 4, (
        f"{left_out} of {len(result)} tokens have a router margin below {TOLERANCE}"
    )
    np.testing.assert_allclose(result[compared], expected[compared], atol=tolerance, rtol=0)


def assert_same(actual, expected, tolerance=TOLERANCE):
    """The same tokens, with log-probabilities equal up to rounding."""
    for group, requested in zip(actual, expected, strict=True):
        assert [c.tokens for c in group] == [c.tokens for c in requested]
        assert [c.finish for c in group] == [c.finish for c in requested]
        for a, b in zip(group, requested, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)


def test_every_family_is_checked_here():
    kinds = {kind for kind, _ in MODELS.values()}
    assert {
        families.find(configuration(kind)).__name__.rpartition(".")[2] for kind in kinds
    } == set(families.known())


def check_logprobs(name, temperature):
    out = baseline(name, temperature)
    assert [[len(c.tokens) for c in group] for group in out] == [[NEW]] * len(PROMPTS)
    assert_logprobs_equal(name, out, temperature or 1.0)


def check_greedy(name):
    """Token by token the forward pass of everything before; the chosen one is the best up to
    rounding."""
    out, model = baseline(name, 0), model_of(name)
    tokens, segments, _ = rows_of(out)
    rows, lengths = np.arange(len(PROMPTS)), np.array([len(prompt) for prompt in PROMPTS])
    same = 0
    for t in range(NEW):
        seen = np.arange(WIDTH) < (lengths + t)[:, None]
        logits = np.asarray(model.logits(tokens * seen, segments=segments * seen))[
            rows, lengths + t - 1
        ]
        chosen = tokens[rows, lengths + t]
        assert (logits.max(-1) - logits[rows, chosen]).max() < 2e-5
        same += int((logits.argmax(-1) == chosen).sum())
    assert same >= NEW * len(PROMPTS) - 1


@pytest.mark.parametrize("temperature", [1.0, 0])
@pytest.mark.parametrize("name", by_kind(MODELS, always=BOTH))
def test_log_probabilities_are_those_of_the_forward_pass(name, temperature):
    check_logprobs(name, temperature)


@pytest.mark.slow
def test_so_they_are_at_another_temperature():
    check_logprobs("qwen3-window", 0.7)


@pytest.mark.parametrize("name", by_kind(MODELS, always=BOTH))
def test_greedy_decoding_is_the_argmax_of_the_forward_pass(name):
    check_greedy(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_all_of_it_for_more_models(name):
    for temperature in (1.0, 0):
        check_logprobs(name, temperature)
    check_greedy(name)


@pytest.mark.parametrize("kind", by_kind(always=["DeepseekV3"]))
def test_greedy_decoding_equals_that_of_transformers(kind, tmp_path):
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    ours = Generator(policy.load(saved(theirs, tmp_path)), max_length=WIDTH, slots=6)
    prompts, new = [PROMPTS[5], PROMPTS[3]], 32
    for prompt, (completion,) in zip(
        prompts,
        ours.generate(prompts, SamplingParams(max_new_tokens=new, temperature=0)),
        strict=True,
    ):
        expected = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=new, pad_token_id=0
        )
        assert completion.tokens == expected[0, len(prompt) :].tolist()


PAGED = {"cache": "paged", "page_size": 8}
# Pages for two of the six longest rows: requests pause, and are read in again.
FEW_PAGES = PAGED | {"pages": 15, "prefill_chunk": 7}
WAYS = {
    "deepseek-v3-groups-yarn": [
        {"prefill_chunk": 7},
        {"slots": 3, "tokens_per_dispatch": 5, "prefill_chunk": 32},
        FEW_PAGES,
    ],
    "qwen3-window": [
        {"slots": 16, "prefill_chunk": 7},
        {"slots": 1, "tokens_per_dispatch": 5},
        {"sliding_window_cache": True, "prefill_chunk": 7},
    ],
    "gemma4_small": [  # layers that read the cache of another layer
        FEW_PAGES | {"sliding_window_cache": True},
        FEW_PAGES,
        {"sliding_window_cache": True, "prefill_chunk": 7, "slots": 16},
    ],
}
MORE_WAYS = [
    {"slots": 3, "tokens_per_dispatch": 5, "prefill_chunk": 1},
    FEW_PAGES | {"sliding_window_cache": True},
    {"slots": 16, "tokens_per_dispatch": 1, "prefill_chunk": 7},
    PAGED | {"page_size": 5, "slots": 3},
]
# One way for each model, in turns.
MODELS_AND_WAYS = [
    pytest.param(*pair, id=pair[0])
    for pair in zip(MODELS, itertools.cycle(MORE_WAYS), strict=False)
]


def check_way(name, way):
    generator = generator_of(name, **way)
    for temperature in (0, 1.0):
        result = generator.generate(
            PROMPTS, SamplingParams(max_new_tokens=NEW, temperature=temperature)
        )
        assert_same(result, baseline(name, temperature), tolerance_of(name))
    assert bool(generator.engine.counts["preempted"]) == ("pages" in way)


WAYS_OF_BOTH = [  # by default the one that changes most: few pages
    pytest.param(
        name,
        way,
        id=f"{name}-{way}",
        marks=() if way == FEW_PAGES and name != "gemma4_small" else pytest.mark.slow,
    )
    for name, ways in WAYS.items()
    for way in ways
]


@pytest.mark.parametrize(("name", "way"), WAYS_OF_BOTH)
def test_slots_dispatches_and_chunks_change_no_completion(name, way):
    check_way(name, way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), MODELS_AND_WAYS)
def test_slots_dispatches_and_chunks_change_no_completion_of_any_model(name, way):
    check_way(name, way)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_entries_of_blocks_in_shared_pages(windows):
    """Completions of one prompt, then prompts that go on from completions, with pages and prompts
    that end inside blocks. With sliding windows full prompts alone are shared."""
    prompts, params = (
        [PROMPTS[0][:29], PROMPTS[4]],
        SamplingParams(max_new_tokens=12, temperature=1.0, n=3),
    )

    def both(generator):
        groups = generator.generate(prompts, params)
        longer = [
            prompt + group[0].tokens[:7] for prompt, group in zip(prompts, groups, strict=True)
        ]
        return groups + generator.generate(longer, SamplingParams(max_new_tokens=12, temperature=0))

    paged = generator_of(
        "deepseek_v4", prefill_chunk=7, cache="paged", page_size=5, sliding_window_cache=windows
    )
    plain = generator_of("deepseek_v4", prefill_chunk=7, slots=5)
    assert_same(both(paged), both(plain), tolerance_of("deepseek_v4"))
    assert (paged.engine.counts["prefill"] < 60) == (not windows), "tokens of both calls: 98"


@pytest.mark.parametrize("name", BOTH)
def test_a_completion_is_the_same_alone_in_any_order_and_in_a_used_slot(name):
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0)
    generator, expected = generator_of(name), baseline(name, 1.0)
    order = [4, 0, 3, 5, 1, 2]
    assert_same(
        generator.generate([PROMPTS[i] for i in order], params, ids=order),
        [expected[i] for i in order],
    )
    assert_same(generator.generate([PROMPTS[4]], params, ids=[4]), [expected[4]])
    many = generator.generate(PROMPTS * 3, params, ids=[*range(6)] * 3)
    assert_same(many, expected * 3)
    other = generator.generate([PROMPTS[4]], params, ids=[9])
    assert other[0][0].tokens != expected[4][0].tokens


@pytest.mark.parametrize(
    "name", ["qwen3-window", pytest.param("deepseek-v3-all_moe-deep", marks=pytest.mark.slow)]
)
def test_a_scanned_cache_is_an_unrolled_one(name, monkeypatch):
    unrolled = baseline(name, 0)
    monkeypatch.setattr(rollout.engine.programs, "UNROLLED_LAYERS", 0)
    scanned = Generator(model_of(name), max_length=WIDTH, slots=6, seed=5)
    assert_same(scanned.generate(PROMPTS, GREEDY), unrolled)
    assert (
        len(scanned.engine.batch.full_cache()[-1])
        == 1
        < len(generator_of(name).engine.batch.full_cache()[-1])
    )


# One for each kind of mixer and cache.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama-mqa-tied", *BOTH, "DeepseekV32", "Qwen3Next", "gemma4", "gpt_oss"]
)
def test_bfloat16_is_finite_and_near_the_forward_pass(name):
    model = model_of(name, dtype="bfloat16", param_dtype="bfloat16")
    out = Generator(model, max_length=WIDTH, slots=6).generate(
        PROMPTS, SamplingParams(max_new_tokens=NEW)
    )
    tokens, segments, written = rows_of(out)
    result = np.concatenate([c.logprobs for c, *_ in out])
    assert (
        result.shape == (NEW * len(PROMPTS),) and np.isfinite(result).all() and (result <= 0).all()
    )
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    # Where the choice of experts flips at low precision a token is far off; most are not.
    expected = np.asarray(model.logprobs(tokens, segments=segments)[0])[written]
    assert np.median(np.abs(result - expected)) < 0.1


def on_eight_devices(*meshes):
    script = Path(__file__).with_name("generate_on_mesh.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PJRT_NPROC": "64",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    run = subprocess.run(
        [sys.executable, script, json.dumps(meshes)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "donated buffers were not usable" not in run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def check_meshes(*meshes, **options):
    results = on_eight_devices(*((mesh, options, {}) for mesh in meshes))
    expected = [
        [[c.tokens, c.logprobs] for c in group] for group in baseline("deepseek-v3-groups-yarn", 0)
    ]
    for mesh, result in zip(meshes, results, strict=True):
        if options:
            assert result["parts"] == 4 and result["preempted"], (
                f"{mesh}: {result['parts']} parts of the cache"
            )
        else:
            assert result["decoding"] == [8], (
                f"{mesh}: decoding was compiled for {result['decoding']} rows"
            )
        for group, requested in zip(result["completions"], expected, strict=True):
            for (tokens, logps), (expected_tokens, expected_logps) in zip(
                group, requested, strict=True
            ):
                assert tokens == expected_tokens, mesh
                np.testing.assert_allclose(
                    logps, expected_logps, atol=TOLERANCE, rtol=0, err_msg=str(mesh)
                )


@pytest.mark.slow
def test_a_mesh_of_eight_devices_generates_what_one_device_does():
    check_meshes({"fsdp": 2, "tensor": 2, "expert": 2})


@pytest.mark.slow
def test_a_mesh_that_shards_the_vocabulary_counts_and_forbids_tokens_as_one_device_does():
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2}
    changes |= {"min_tokens": 9, "stop_token_ids": [3, 4], "logit_bias": {"3": 4.0, "9": -5.0}}
    (result,) = on_eight_devices(({"fsdp": 2, "tensor": 4}, {}, changes))
    sampling = dataclasses.replace(GREEDY, **changes)
    expected = generator_of("deepseek-v3-groups-yarn").generate(PROMPTS, sampling)
    tokens = [[completion[0] for completion in group] for group in result["completions"]]
    assert tokens == [[completion.tokens for completion in group] for group in expected]


@pytest.mark.slow
def test_a_mesh_that_cuts_slots_gives_each_part_pages_of_its_own():
    check_meshes(
        {"fsdp": 2, "expert": 2, "tensor": 2},
        cache="paged",
        page_size=8,
        pages=44,
        tokens_per_dispatch=8,
    )


@pytest.mark.slow
def test_other_meshes_generate_what_one_device_does():
    check_meshes(
        {"fsdp": 8},
        {"data": 2, "tensor": 4},
        {"expert": 4, "fsdp": 2},
        {"context": 2, "tensor": 2, "data": 2},
    )
