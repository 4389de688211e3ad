"""The generator apart from its numbers: groups, weights, stops, errors. One tiny model for all of
it."""

import dataclasses
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, VOCAB, configuration, random_model

import rollout.generator
from policy import families
from policy.modes import VALUE_HEAD, make_step
from policy.programs.compiled_cache import CompiledCache
from rl.training.critic import Critic
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.engine.runner import LateCompilation, Widths, program_inputs
from rollout.engine.sampling import uniforms
from rollout.request import Request
from rollout.text.tokenizer import byte_level, characters, first_stop

OPTIONS = GeneratorOptions(tokens_per_dispatch=4)
ALPHABET = "".join(chr(0x4E00 + i) for i in range(VOCAB - 8 - 26)) + "abcdefghijklmnopqrstuvwxyz"


def fresh_model(seed=3, vocab_size=VOCAB):
    config = families.read(
        configuration("Llama", num_hidden_layers=1, vocab_size=vocab_size, tie_word_embeddings=True)
    )
    return random_model(config, seed=seed)


@pytest.fixture(scope="module")
def model():
    return fresh_model()


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model, max_length=64, slots=4, seed=1, options=OPTIONS)


@pytest.fixture(scope="module")
def spelling(model):
    """A generator whose tokens are characters."""
    return Generator(
        model, max_length=64, slots=4, seed=1, tokenizer=characters(ALPHABET), options=OPTIONS
    )


def tokens_of(out):
    return [[completion.tokens for completion in group] for group in out]


# Groups.


# One of the eight runs always.
GROUPS = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case != ("Llama", 3, "paged")))
    for case in itertools.product(("Llama", "Qwen3Next"), (1, 3), ("contiguous", "paged"))
]


@pytest.mark.parametrize(("kind", "slots", "cache"), GROUPS)
def test_the_prompt_of_a_group_is_prefilled_once(kind, slots, cache):
    """Also where its samples are admitted one after the other, and where a state of fixed size has
    moved on meanwhile.
    """
    model = random_model(
        families.read(configuration(kind, **KINDS[kind].standard | KINDS[kind].short)), seed=3
    )
    options = dataclasses.replace(OPTIONS, cache=cache, page_size=4)
    generator = Generator(model, max_length=64, slots=slots, seed=1, options=options)
    prompts = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]]
    out = generator.generate(prompts, SamplingParams(n=5, max_new_tokens=6))
    assert [len(group) for group in out] == [5, 5, 5]
    assert generator.engine.counts["prefill"] == sum(len(prompt) - 1 for prompt in prompts)
    for prompt, group in zip(prompts, out, strict=True):
        for completion in group:
            logp = np.asarray(model.logprobs(np.array([prompt + completion.tokens]))[0])[
                0, len(prompt) :
            ]
            np.testing.assert_allclose(
                completion.logprobs, logp, atol=KINDS[kind].generator, rtol=0
            )


def test_the_samples_of_a_group_differ_and_are_those_of_smaller_groups(generator):
    prompts = [[1, 2, 3], [4, 5]]
    five = tokens_of(generator.generate(prompts, SamplingParams(n=5, max_new_tokens=8)))
    assert len({tuple(tokens) for tokens in five[0]}) == 5
    two = tokens_of(generator.generate(prompts, SamplingParams(n=2, max_new_tokens=8)))
    assert two == [group[:2] for group in five]


def test_no_prompts_make_no_completions(generator):
    assert generator.generate([], SamplingParams()) == []


# Draws.


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_token_follows_from_seed_prompt_id_sample_position_and_the_forward_pass(
    model, generator, temperature
):
    """Repeats all of sampling outside: no number other than these four may play a part, not even
    the temperature's bits."""
    prompt, params = [7, 8, 9], SamplingParams(n=2, max_new_tokens=12, temperature=temperature)
    for sample, completion in enumerate(generator.generate([prompt], params, ids=[41])[0]):
        row = np.array([prompt + completion.tokens])
        logits = np.asarray(model.logits(row), np.float64)[0, len(prompt) - 1 : -1] / temperature
        cumulative = np.cumsum(np.exp(logits - logits.max(-1, keepdims=True)), axis=-1)
        positions = np.arange(len(prompt), row.shape[1], dtype=np.int32)
        u = np.asarray(
            uniforms(
                np.uint32(1),
                np.full_like(positions, 41),
                np.full_like(positions, sample),
                positions,
            )
        )
        expected = [
            int(np.searchsorted(c / c[-1], number, side="right"))
            for c, number in zip(cumulative, u, strict=True)
        ]
        assert completion.tokens == expected


def test_equal_calls_give_equal_tokens_and_other_seeds_others(model, generator):
    prompts, params = [[1, 2], [3]], SamplingParams(max_new_tokens=8)
    first = tokens_of(generator.generate(prompts, params))
    assert tokens_of(generator.generate(prompts, params)) == first
    assert first == tokens_of(generator.generate(prompts, params, ids=[0, 1]))
    other = Generator(model, max_length=64, slots=4, seed=2, options=OPTIONS)
    assert tokens_of(other.generate(prompts, params)) != first


def test_greedy_takes_the_lowest_id_among_equals_and_reports_temperature_1(model):
    params = {
        path: array * 0 if path == "embed_tokens" else array for path, array in model.params.items()
    }
    flat = Generator(type(model)(model.graph, params), max_length=64, slots=4, options=OPTIONS)
    (completion,) = flat.generate([[5]], SamplingParams(max_new_tokens=3, temperature=0))[0]
    assert completion.tokens == [0, 0, 0]
    np.testing.assert_allclose(completion.logprobs, -np.log(VOCAB), rtol=1e-6)


def test_filters_change_the_draw_and_not_the_log_probabilities(model, generator):
    prompt = [1, 2, 3]
    params = SamplingParams(max_new_tokens=12, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    (completion,) = generator.generate([prompt], params)[0]
    row = np.array([prompt + completion.tokens])
    logp = np.asarray(model.logprobs(row, temperature=0.7)[0])[0, len(prompt) :]
    np.testing.assert_allclose(completion.logprobs, logp, atol=1e-5, rtol=0)
    logits = np.asarray(model.logits(row))[0, len(prompt) - 1 : -1]
    ranks = (logits > logits[np.arange(12), completion.tokens][:, None]).sum(-1)
    assert ranks.max() < 5
    (only,) = generator.generate([prompt], SamplingParams(max_new_tokens=12, top_k=1))[0]
    (greedy,) = generator.generate([prompt], SamplingParams(max_new_tokens=12, temperature=0))[0]
    assert only.tokens == greedy.tokens


# Weights.


def test_new_weights_are_used_at_once_and_old_ones_are_let_go():
    model, other = fresh_model(3), fresh_model(4)
    generator = Generator(model, max_length=64, slots=4, seed=1, options=OPTIONS)
    prompts, params = [[1, 2], [3]], SamplingParams(max_new_tokens=8)
    before = tokens_of(generator.generate(prompts, params))
    old = [weakref.ref(array) for array in model.params.values()]
    model.params = other.params
    gc.collect()
    assert not any(ref() is not None for ref in old), "the generator keeps weights"
    after = generator.generate(prompts, params)
    assert tokens_of(after) != before
    expected = Generator(other, max_length=64, slots=4, seed=1, options=OPTIONS).generate(
        prompts, params
    )
    assert after == expected


def test_weights_are_read_at_every_dispatch_and_passed_as_they_are(monkeypatch):
    """A step of the trainer between two dispatches is seen by the second; the arrays are the
    trainer's own."""
    model = fresh_model()
    generator = Generator(model, max_length=64, slots=1, seed=1, options=OPTIONS)
    programs, seen = generator.engine.runner, []
    real = programs.decode

    def spy(params, *args):
        assert all(params[path] is array for path, array in model.params.items())
        seen.append(params)
        result = real(params, *args)
        model.params = {path: array * 1.5 for path, array in model.params.items()}
        return result

    monkeypatch.setattr(programs, "decode", spy)
    generator.generate([[1, 2]], SamplingParams(max_new_tokens=8))
    assert len(seen) >= 2 and seen[0] is not seen[1]


def test_an_interrupted_call_leaves_the_generator_usable(model, monkeypatch):
    """The cache that the interrupted program was given is gone."""
    generator = Generator(model, max_length=64, slots=2, seed=1, options=OPTIONS)
    prompts, params = [[1, 2], [3], [4, 5]], SamplingParams(n=2, max_new_tokens=8)
    expected = generator.generate(prompts, params)
    programs = generator.engine.runner
    for name in ("decode", "copy_rows", "prefill"):
        real = getattr(programs, name)

        def interrupted(*args, real=real, **kwargs):
            real(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(programs, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                generator.generate(prompts, params)
        assert generator.generate(prompts, params) == expected


def test_a_copy_of_rows_writes_and_needs_room_for_nothing_else(generator):
    """Of the rows it copies, one after the other: room for one at a time."""
    programs, rng = generator.engine.runner, np.random.default_rng(0)
    cache = jax.tree.map(
        lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding),
        programs.empty(),
    )
    before = [np.array(array) for array in jax.tree.leaves(cache)]
    copied = jax.tree.leaves(programs.copy_rows(cache, [(0, 2), (2, 3)]))
    for expected, array in zip(before, copied, strict=True):
        expected[:, [2, 3]] = expected[:, [0]]
        np.testing.assert_array_equal(array, expected)
    memory, size = programs.memory["copy",], sum(array.nbytes for array in before)
    assert memory.aliased == size and 0 < memory.temporaries < 2 * size / programs.geometry.slots


# Stops.


def written_by(generator, prompt="abc", **params):
    """The first sample, run for all its tokens."""
    return generator.generate([prompt], SamplingParams(max_new_tokens=20, **params))[0][0]


def test_without_a_stop_a_completion_has_all_its_tokens(spelling):
    full = written_by(spelling)
    assert (full.finish, len(full.tokens), len(full.logprobs)) == ("length", 20, 20)
    assert full.text == spelling.tokenizer.decode(full.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("place", [0, 1, 3, 4, 6, 19])
def test_a_stop_token_is_the_last_token(spelling, place):
    """Places on both sides of the borders between dispatches of 4 tokens; the last is also the
    longest completion."""
    full = written_by(spelling)
    stop = full.tokens[place]
    first = full.tokens.index(stop)
    ended = written_by(
        spelling, stop_token_ids=(VOCAB - 1 if stop != VOCAB - 1 else VOCAB - 2, stop)
    )
    assert ended.finish == "stop"
    assert ended.tokens == full.tokens[: first + 1] and ended.tokens[-1] == stop
    np.testing.assert_allclose(ended.logprobs, full.logprobs[: first + 1], atol=1e-6)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (2, 4), (3, 2), (4, 4), (6, 7), (15, 5)])
def test_a_stop_string_ends_at_the_token_that_completes_it(spelling, start, length):
    """Also across the borders of tokens and dispatches."""
    full = written_by(spelling)
    pieces = [spelling.tokenizer.decode([token]) for token in full.tokens]
    stop = "".join(pieces[start : start + length])
    end = next(n for n in range(1, 21) if stop in "".join(pieces[:n]))
    ended = written_by(spelling, stop=("not in any text", stop))
    assert ended.finish == "stop"
    assert ended.tokens == full.tokens[:end] and len(ended.logprobs) == end


def test_a_stop_string_inside_characters_of_several_tokens():
    """The bytes of one character are tokens of their own: the string is complete with the last of
    them."""
    tokenizer = byte_level()
    generator = Generator(
        fresh_model(vocab_size=264), max_length=64, slots=4, tokenizer=tokenizer, options=OPTIONS
    )
    letters = tokenizer.encode("xé€", add_special_tokens=False)
    assert len(letters) == 6
    assert [first_stop(generator.tokenizer, letters[:n], 0, ("é",)) for n in range(1, 7)] == [
        None,
        None,
        3,
        3,
        3,
        3,
    ]
    assert [first_stop(generator.tokenizer, letters[:n], n - 1, ("x", "é€")) for n in (1, 6)] == [
        1,
        6,
    ]
    completion = generator.generate(["hé"], SamplingParams(max_new_tokens=6))[0][0]
    assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)


def test_a_stop_string_may_be_a_special_token_that_the_text_leaves_out(spelling):
    ids = [8, 9, spelling.tokenizer.eos_token_id, 10]
    assert first_stop(spelling.tokenizer, ids, 0, ("<eos>",)) == 3


def test_strings_are_encoded_without_an_end_of_sequence(model):
    from tokenizers.processors import TemplateProcessing

    tokenizer = characters(ALPHABET)
    plain = Generator(model, max_length=64, slots=4, seed=1, tokenizer=tokenizer, options=OPTIONS)
    expected = tokens_of(
        plain.generate([[1, *tokenizer.encode("abc")]], SamplingParams(max_new_tokens=6))
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)],
    )
    assert tokenizer.encode("a")[-1] == tokenizer.eos_token_id
    assert tokens_of(plain.generate(["abc"], SamplingParams(max_new_tokens=6))) == expected


# The queue.


def test_completions_are_streamed_as_they_end_and_a_stream_may_be_left(generator):
    prompts, params = (
        [[1, 2, 3], [4, 5], [6]],
        SamplingParams(n=3, max_new_tokens=12, stop_token_ids=tuple(range(0, VOCAB, 9))),
    )
    expected = tokens_of(generator.generate(prompts, params))
    seen = list(generator.stream(prompts, params))
    assert sorted((p, n) for p, n, _ in seen) == [(p, n) for p in range(3) for n in range(3)]
    assert all(completion.tokens == expected[p][n] for p, n, completion in seen)
    assert [(p, n) for p, n, _ in seen] != sorted((p, n) for p, n, _ in seen), (
        "none ended before one that came first"
    )
    stream = generator.stream(prompts, params)
    next(stream)
    stream.close()
    assert not generator.engine.busy and tokens_of(generator.generate(prompts, params)) == expected


def test_streams_that_are_read_in_turns_get_all_their_completions(generator):
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(n=2, max_new_tokens=8)
    expected = tokens_of(generator.generate(prompts, params))
    for one, other in zip(
        generator.stream(prompts, params), generator.stream(prompts, params), strict=True
    ):
        assert all(completion.tokens == expected[p][n] for p, n, completion in (one, other))
    assert not generator.engine.busy


def test_requests_that_arrive_at_any_time_get_what_they_get_alone(model, generator):
    """Also during a call of `generate`, with parameters of their own."""
    requested = {
        (7, 0): SamplingParams(max_new_tokens=9),
        (8, 2): SamplingParams(max_new_tokens=20, temperature=0),
        (9, 1): SamplingParams(max_new_tokens=5, temperature=0.6, top_k=4),
    }
    alone = {}
    for (prompt_id, sample), params in requested.items():
        many = generator.generate(
            [[prompt_id, 1, 2]], dataclasses.replace(params, n=sample + 1), ids=[prompt_id]
        )
        alone[prompt_id, sample] = many[0][sample].tokens
    other = Generator(model, max_length=64, slots=2, seed=1, options=OPTIONS)
    expected = tokens_of(other.generate([[5, 5], [6]], SamplingParams(max_new_tokens=10)))
    requests = []
    for (prompt_id, sample), params in requested.items():
        requests.append(other.submit(Request((prompt_id, 1, 2), params, prompt_id, sample)))
        other.step()
    assert tokens_of(other.generate([[5, 5], [6]], SamplingParams(max_new_tokens=10))) == expected
    while not all(request.finish for request in requests):
        other.step()
    assert [request.tokens for request in requests] == list(alone.values())


def test_a_request_that_is_withdrawn_leaves_its_slot_to_others(model):
    generator = Generator(model, max_length=64, slots=1, seed=1, options=OPTIONS)
    expected = generator.generate([[3, 4]], SamplingParams(max_new_tokens=10))
    first = generator.submit(Request((1, 2), SamplingParams(max_new_tokens=40)))
    second = generator.submit(Request((3, 4), SamplingParams(max_new_tokens=10)))
    for _ in range(3):
        generator.step()
    assert first.tokens and not second.tokens
    generator.cancel(first)
    while not second.finish:
        generator.step()
    assert second.tokens == expected[0][0].tokens and first.finish is None


def test_what_begins_like_an_earlier_prompt_is_not_read_again(model, generator):
    fresh = Generator(model, max_length=64, slots=2, seed=1, options=OPTIONS)
    params, first = SamplingParams(max_new_tokens=6, temperature=0), list(range(1, 41))
    (turn,) = fresh.generate([first], params)[0]
    assert fresh.engine.counts["prefill"] == 39
    second = [*first, *turn.tokens, 7, 8]
    (again,) = fresh.generate([second], params)[0]
    assert fresh.engine.counts["prefill"] == 39 + 2
    assert again.tokens == generator.generate([second], params)[0][0].tokens
    fresh.reset_prefix_cache()
    fresh.generate([second], params)
    assert fresh.engine.counts["prefill"] == 39 + 2 + len(second) - 1


# Compiled programs.


@pytest.mark.parametrize("slots", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_programs_are_compiled_ahead(model, slots, monkeypatch):
    options = GeneratorOptions(tokens_per_dispatch=4, prefill_chunk=16)
    generator = Generator(model, max_length=64, slots=slots, seed=1, options=options)
    params = [SamplingParams(n=3, stop_token_ids=(1, 2)), SamplingParams(temperature=0, top_k=3)]
    count = generator.compile_ahead(40, params, strict=True)
    assert count == len(generator.engine.runner.memory) > 8
    monkeypatch.setattr(CompiledCache, "_compile", lambda *_: pytest.fail("compiled late"))
    for each in params:
        generator.generate(
            [[1] * n for n in (1, 5, 17, 40, 33)], dataclasses.replace(each, max_new_tokens=9, n=2)
        )
    assert count == generator.compile_ahead(40, params, strict=True)


@pytest.mark.parametrize(
    ("max_length", "longest", "shared", "cache"),
    [(256, 45, 40, {}), (32, 24, 16, {"cache": "paged", "page_size": 8})],
    ids=["prompts shorter than a chunk", "pages shorter than the shortest copied prefix"],
)
def test_the_rest_of_a_prompt_after_a_shared_prefix_is_compiled_ahead(
    model, max_length, longest, shared, cache
):
    """The second prompt begins like the first, so the program for later chunks computes its last
    tokens."""
    options = GeneratorOptions(tokens_per_dispatch=4, **cache)
    generator = Generator(model, max_length=max_length, slots=1, seed=1, options=options)
    first, second = ([1] * shared + [token] * (longest - shared) for token in (2, 3))
    generator.generate([first], SamplingParams(max_new_tokens=2))
    before, runner = generator.counts["prefill"], generator.engine.runner
    generator.generate([second], SamplingParams(max_new_tokens=2))
    assert generator.counts["prefill"] - before == longest - 1 - shared
    ahead = {key for key, _ in program_inputs(runner, model.params, longest, [Widths()])}
    assert "extend" in {name for name, *_ in runner.memory} and runner.memory.keys() <= ahead


@pytest.mark.parametrize(
    ("batch_sizes", "expected"),
    [pytest.param(None, [1, 4, 6], marks=pytest.mark.slow), ([], [6]), ([3, 9, 6, 3], [3, 6])],
)
def test_decoding_is_compiled_for_these_numbers_of_rows_and_completions_stay(
    model, generator, batch_sizes, expected
):
    options = dataclasses.replace(OPTIONS, batch_sizes=batch_sizes)
    few = Generator(model, max_length=64, slots=6, seed=1, options=options)
    params = SamplingParams(n=2, max_new_tokens=9)
    few.compile_ahead(12, [params], strict=True)
    assert (
        sorted(size for name, size, *_ in (k for k in few.engine.runner.memory if k[0] == "decode"))
        == expected
    )
    prompts = [[1] * n for n in (1, 5, 12, 3)]
    made = [[sample.tokens for sample in each] for each in few.generate(prompts, params)]
    assert made == [
        [sample.tokens for sample in each] for each in generator.generate(prompts, params)
    ]


def test_rows_of_a_batch_go_back_to_their_slots_and_padding_nowhere(generator):
    runner = generator.engine.runner
    empty = runner.empty()
    cache = jax.tree.map(lambda a: a + jnp.arange(1.0, 5.0)[:, None, None, None], empty)
    batch = jax.tree.map(lambda a: -a, runner.gather(cache, np.array([3, 1, 4, 5], np.int32)))
    after = runner.scatter(cache, batch, np.array([3, 1, 4, 5], np.int32))  # 4 slots
    for array in jax.tree.leaves(after):
        expected = np.broadcast_to(np.array([1, -2, 3, -4])[:, None, None, None], array.shape)
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_that_is_compiled_late_is_named(model, strict, caplog):
    generator = Generator(model, max_length=64, slots=2, seed=1, options=OPTIONS)
    generator.compile_ahead(10, [SamplingParams()], strict=strict)
    late = SamplingParams(max_new_tokens=4, stop_token_ids=tuple(range(5)))
    if strict:
        with pytest.raises(
            LateCompilation,
            match="program decode for 1 x 8 was not compiled ahead; strict_shapes forbids",
        ):
            generator.generate([[1, 2]], late)
    else:
        generator.generate([[1, 2]], late)
        assert "decode for 1 x 8 was not compiled ahead; it is compiled now" in caplog.text


def test_programs_that_are_compiled_in_the_background_make_the_same_completions(
    model, generator, caplog
):
    own = Generator(model, max_length=64, slots=6, seed=1, options=OPTIONS)
    runner, params = own.engine.runner, SamplingParams(n=2, max_new_tokens=9)
    count = own.compile_in_background(12, [params])
    expected = {key for key, _ in program_inputs(runner, model.params, 12, [Widths()])}
    assert count == len(expected) > 8
    prompts = [[1] * n for n in (1, 5, 12, 3)]
    made = [[sample.tokens for sample in each] for each in own.generate(prompts, params)]
    assert made == [
        [sample.tokens for sample in each] for each in generator.generate(prompts, params)
    ]
    runner.stop_compiling()
    assert runner.memory.keys() <= expected and not caplog.text
    own.generate([[1, 2]], SamplingParams(max_new_tokens=4, stop_token_ids=tuple(range(5))))
    assert "was not compiled ahead; it is compiled now" in caplog.text


# Errors.


@pytest.mark.parametrize(
    ("prompts", "params", "ids", "message"),
    [
        ([[1], []], {}, None, "prompt 1 is empty"),
        (
            [[1], [2] * 57],
            {},
            None,
            "prompt 1 has 57 tokens; with max_new_tokens 8 it is longer than max_length 64",
        ),
        ([[0, VOCAB]], {}, None, f"prompt 0 holds a token id outside 0..{VOCAB - 1}"),
        ([[1], [3, -1]], {}, None, "prompt 1 holds a token id outside"),
        (["abc"], {}, None, "prompt 0 is a string; pass a tokenizer"),
        ("abc", {}, None, "prompts is one string"),
        ([[1]], {"stop": ("x",)}, None, "stop strings need a tokenizer"),
        ([[1], [2]], {}, [0], "2 prompts but 1 ids"),
        ([[1]], {}, [-1], r"prompt id -1 is outside 0\.\."),
        ([[1]], {}, [2**31], "prompt id 2147483648 is outside"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls_are_refused_before_anything_is_computed(
    generator, monkeypatch, prompts, params, ids, message
):
    monkeypatch.setattr(rollout.generator.Generator, "_run", lambda *args: pytest.fail("computed"))
    with pytest.raises(ValueError, match=message):
        generator.generate(prompts, SamplingParams(**({"max_new_tokens": 8} | params)), ids=ids)


def test_a_prompt_that_just_fits_is_taken(generator):
    (completion,) = generator.generate([[2] * 56], SamplingParams(max_new_tokens=8))[0]
    assert len(completion.tokens) == 8


@pytest.mark.parametrize(
    "options",
    [{"cache": "paper"}, {"prefill_chunk": 0}, {"tokens_per_dispatch": 0}, {"batch_sizes": [4, 0]}],
    ids=str,
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="GeneratorOptions"):
        GeneratorOptions(**options)


@pytest.mark.parametrize("sizes", [{"max_length": 1}, {"slots": 0}], ids=str)
def test_bad_sizes_are_refused(model, sizes):
    with pytest.raises(ValueError, match="max_length must be at least 2 and slots at least 1"):
        Generator(model, **sizes)


def test_a_request_that_cannot_run_is_refused_before_it_waits_or_takes_a_slot(model):
    generator = Generator(model, max_length=16, slots=2)
    running = Request((1, 2), SamplingParams(max_new_tokens=4))
    generator.engine.insert(running)
    ended = Request((1,), SamplingParams(max_new_tokens=2), tokens=[1, 2], finish="length")
    wrong = {
        "is empty": Request(()),
        "outside 0..": Request((1, 10**6)),
        "longer than max_length 16": Request((1,) * 9, SamplingParams(max_new_tokens=8)),
        "stop strings need a tokenizer": Request(
            (1,), SamplingParams(max_new_tokens=2, stop=("x",))
        ),
        "bad_words need a tokenizer": Request(
            (1,), SamplingParams(max_new_tokens=2, bad_words=("x",))
        ),
        "logit_bias names token 1000000, outside 0..": Request(
            (1,), SamplingParams(max_new_tokens=2, logit_bias={10**6: 1.0})
        ),
        "has ended": ended,
        "runs already": running,
    }
    for message, request in wrong.items():
        for take in (generator.submit, generator.engine.insert):
            with pytest.raises(ValueError, match=message):
                take(request)
    assert generator.engine.free_slots == 1


# Values.


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cache": "paged", "page_size": 4, "pages": 12}, id="paged"),
        pytest.param({}, id="contiguous", marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_the_critic(model, options):
    """The value of a token is the value of the state before it, as the critic of PPO computes it
    over full texts. Tests fewer slots than requests, stop strings that take tokens back and, over
    few pages, pauses. Another head gives other values."""
    asked = GeneratorOptions(tokens_per_dispatch=3, record_values=True, **options)
    generator = Generator(
        model, max_length=40, slots=3, seed=1, tokenizer=characters(ALPHABET), options=asked
    )
    critic, rng = Critic(model.graph, shared=True), np.random.default_rng(0)
    values = jax.jit(lambda params, texts: critic.values(params, texts, make_step(texts))[0])
    prompts = [[int(token) for token in rng.integers(1, VOCAB, length)] for length in (1, 5, 9, 3)]
    for _ in range(2):
        head = rng.normal(size=model.config.hidden_size).astype(np.float32)
        generator.set_value_head(jnp.asarray(head))
        result = generator.generate(
            prompts, SamplingParams(n=2, max_new_tokens=24, stop=("a", "b", "c", "d"))
        )
        assert {completion.finish for group in result for completion in group} == {"stop", "length"}
        written = [
            (prompt, completion)
            for prompt, group in zip(prompts, result, strict=True)
            for completion in group
        ]
        texts = np.zeros((len(written), 40), np.int32)
        for text, (prompt, completion) in zip(texts, written, strict=True):
            text[: len(prompt) + len(completion.tokens)] = prompt + completion.tokens
        before = values(model.params | {VALUE_HEAD: head}, texts)
        for row, (prompt, completion) in zip(before, written, strict=True):
            np.testing.assert_allclose(
                completion.values, row[len(prompt) :][: len(completion.tokens)], atol=2e-5
            )
    assert not options or generator.counts["preempted"]


def test_values_are_refused_where_tokens_are_not_drawn_one_by_one():
    for other in ({"exact": True}, {"speculative": 2}):
        with pytest.raises(ValueError, match="record_values"):
            GeneratorOptions(record_values=True, **other)
