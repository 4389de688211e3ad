"""Programs that are compiled once for each kind of arguments and then called."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.programs.compiled_cache import CompiledCache


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int8])
def test_arguments_of_few_bits_are_taken_at_the_first_call_and_the_next(dtype):
    """Committed arrays, as weights are: jax checks the layouts of these alone."""

    def product(weights, rows, *, times):
        return times * (rows @ weights.astype(jnp.float32))

    program = CompiledCache(jax.jit(product, static_argnames="times"), "cpu")
    weights = jax.device_put(np.arange(16).reshape(4, 4).clip(0, 7).astype(dtype), jax.devices()[0])
    rows = np.ones((2, 4), np.float32)
    for times in (1, 2, 1):
        np.testing.assert_array_equal(
            program(weights, rows, times=times), times * (rows @ np.asarray(weights, np.float32))
        )
    assert program.number == 2 and program.memory[rows.shape].arguments > 0


def test_keys_of_random_numbers_are_arguments_as_others_are():
    program = CompiledCache(jax.jit(lambda key, rows: rows + jax.random.uniform(key)), "cpu")
    assert program(jax.random.key(0), jnp.zeros(2)).shape == (2,) and program.number == 1


def test_a_program_of_a_known_shape_is_compiled_once_ahead_and_listed_by_its_shape():
    cache = CompiledCache(jax.jit(lambda rows, times: rows * times), "cpu")
    abstract = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    cache.compile_shape((2,), abstract, cache.lower(*abstract))
    for times in (2, 3):
        np.testing.assert_array_equal(
            cache.run((2,), np.ones((2, 3), np.float32), np.int32(times)), times
        )
    assert cache.number == 1 and cache.shapes == ((2,),)
    cache.run((4,), np.ones((4, 3), np.float32), np.int32(2))
    assert cache.number == 2 and cache.memory[4,].arguments > cache.memory[2,].arguments


def test_a_call_runs_what_was_compiled_for_its_arguments():
    cache = CompiledCache(
        jax.jit(lambda rows, old: rows),
        "cpu",
        shape_of=lambda rows, old: (len(rows), int(old is not None)),
    )
    rows = jnp.ones(3)
    cache.compile(rows, None)
    cache(rows, None)
    assert cache.number == 1 and cache.shapes == ((3, 0),)
    cache(rows, rows)
    assert cache.number == 2 and cache.shapes == ((3, 0), (3, 1))


def background(traced: list) -> CompiledCache:
    return CompiledCache(jax.jit(lambda x: traced.append(x.shape) or x + 1), "cpu")


def abstract(length: int) -> tuple:
    return (jax.ShapeDtypeStruct((length,), np.float32),)


@pytest.mark.parametrize("trace_here", [True, False])
def test_a_call_compiles_its_program_that_no_thread_has_begun(trace_here):
    traced, go_on = [], threading.Event()
    cache = background(traced)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(go_on.wait)  # the only thread is busy
        try:
            for _ in range(2):
                cache.compile_in_background(pool, (3,), abstract(3), trace_here=trace_here)
            cache.compile_in_background(pool, (4,), abstract(4), trace_here=False)
            assert cache.number == 0 and cache.shapes == ((3,), (4,)) and cache.left == 2
            assert cache.run((3,), np.ones(3, np.float32)).tolist() == [2, 2, 2]
            assert cache.number == 1 and cache.left == 1
            cache.cancel()
            assert cache.shapes == ((3,),) and cache.left == 0
        finally:
            go_on.set()
    assert traced[-1] == (3,) and (4,) not in traced


def test_a_call_waits_for_its_program_that_a_thread_compiles():
    traced, began, go_on = [], threading.Event(), threading.Event()

    def slow(x):
        traced.append(x.shape)
        began.set()
        go_on.wait()
        return x + 1

    cache = CompiledCache(jax.jit(slow), "cpu")
    with ThreadPoolExecutor(max_workers=1) as pool:
        cache.compile_in_background(pool, (3,), abstract(3), trace_here=False)
        began.wait()
        threading.Timer(0.1, go_on.set).start()
        for start in (1, 0):
            given = np.full(3, start, np.float32)
            assert cache.run((3,), given).tolist() == [start + 1] * 3
        cache.compile_in_background(pool, (3,), abstract(3), trace_here=False)
    assert traced == [(3,)] and cache.shapes == ((3,),) and cache.left == 0


def test_a_program_that_cannot_be_compiled_fails_where_it_is_needed():
    def broken(x):
        raise ValueError("no such product")

    cache = CompiledCache(jax.jit(broken), "cpu")
    with ThreadPoolExecutor(max_workers=1) as pool:
        cache.compile_in_background(pool, (3,), abstract(3), trace_here=False)
        with pytest.raises(ValueError, match="no such product"):
            cache.run((3,), np.ones(3, np.float32))
