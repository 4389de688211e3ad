"""A server's view of the generator: the order in which requests get a slot, requests that are
withdrawn, and steps that fail."""

import pytest
from test_generate import OPTIONS, fresh_model

from rollout import Generator, SamplingParams
from rollout.request import Queue, Request
from rollout.types import GeneratorOptions


def request(number: int, new: int) -> Request:
    return Request((3, 4), SamplingParams(max_new_tokens=new), prompt_id=number)


def order_of(queue: Queue) -> list[int]:
    return [queue.pop().prompt_id for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("order", "expected"), [("longest", [1, 3, 0, 2, 4]), ("arrival", [0, 1, 2, 3, 4])]
)
def test_the_queue_has_an_order(order, expected):
    queue = Queue(order)
    queue.add(request(n, new) for n, new in enumerate([5, 9, 5, 9, 1]))
    assert order_of(queue) == expected


def test_a_request_that_returns_keeps_its_place():
    """As those do whose tokens `exact` has replaced."""
    queue = Queue("arrival")
    first, second, third = (request(n, 5) for n in range(3))
    queue.add([first, second])
    assert queue.pop() is first
    queue.add([third])
    queue.add([first])
    assert order_of(queue) == [0, 1, 2]


def test_short_requests_are_not_starved():
    """Long ones that keep arriving would go first; in order of arrival they do not."""
    options = GeneratorOptions(tokens_per_dispatch=4, queue="arrival")
    generator = Generator(fresh_model(), max_length=64, slots=1, seed=1, options=options)
    generator.submit(request(0, 30))
    generator.step()
    short = generator.submit(request(1, 2))
    number = 1
    while not short.finish:
        number += 1
        generator.submit(request(number, 20))
        generator.step()
    assert number < 12


def test_the_next_requests_work_after_a_step_that_fails(monkeypatch):
    generator = Generator(fresh_model(), max_length=64, slots=2, seed=1, options=OPTIONS)
    [[expected]] = generator.generate([[3, 4]], SamplingParams(max_new_tokens=6), ids=[7])
    running, waiting = generator.submit(request(1, 20)), generator.submit(request(2, 20))
    later = generator.submit(request(3, 20))
    for _ in range(2):
        generator.step()
    assert running.tokens and waiting.tokens and not later.tokens
    with monkeypatch.context() as patch:

        def fails(*_):
            raise RuntimeError("no memory")

        patch.setattr(generator.engine.runner, "decode", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            generator.step()
    assert generator.step() == [] and not generator.engine.busy
    again = generator.submit(request(7, 6))
    while not again.finish:
        generator.step()
    assert again.tokens == expected.tokens
    assert not later.tokens and running.finish is waiting.finish is None
    generator.cancel(running)  # of a request that was dropped nothing is left
    assert generator.engine.free_slots == 2


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_a_request_can_be_withdrawn_while_the_device_works_on_it(cache):
    """Between two steps a decode runs; neither its slot nor its pages are lost."""
    options = GeneratorOptions(tokens_per_dispatch=4, cache=cache, page_size=8)
    generator = Generator(fresh_model(), max_length=64, slots=2, seed=1, options=options)
    [[expected]] = generator.generate([[3, 4]], SamplingParams(max_new_tokens=6), ids=[7])
    for steps in range(4):
        gone = [generator.submit(request(n, 40)) for n in range(3)]
        for _ in range(steps):
            generator.step()
        for each in gone:
            generator.cancel(each)
        lengths = [len(each.tokens) for each in gone]
        again = generator.submit(request(7, 6))
        while not again.finish:
            generator.step()
        assert again.tokens == expected.tokens
        assert [len(each.tokens) for each in gone] == lengths
        assert not generator.engine.busy and generator.engine.free_slots == 2


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'longest' nor 'arrival'"):
        GeneratorOptions(queue="shortest")
