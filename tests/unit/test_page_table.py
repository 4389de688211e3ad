"""The table of pages under any order of arrivals, shared prompts, growth, ends and changes of
weights."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.page_allocator import PageAllocator, PageCopy

SIZE = 4


def counted(table: PageAllocator, chains) -> None:
    """Every page is either free, idle or used, by as many sequences as the table says; none is
    lost, none is there twice.
    """
    used = Counter(page for chain in chains for page in chain.pages)
    assert dict(used) == {page: n for page, n in table._ref_counts.items() if n}
    everywhere = [*table._free, *table._idle, *used]
    assert sorted(everywhere) == sorted(table._ref_counts)
    nodes = nodes_below(table._root)
    assert {node.page: node for node in nodes if node.page is not None} == table._node_of
    assert all(node.page is not None or node.children for node in nodes), (
        "a node that nothing needs"
    )


def tokens_of(node) -> tuple:
    """All tokens that a page is known by."""
    return () if node.parent is None else (*tokens_of(node.parent), *node.tokens)


def nodes_below(node) -> list:
    """All nodes of the index below this one."""
    return [each for child in node.children.values() for each in (child, *nodes_below(child))]


class Keyed(PageAllocator):
    """A PageAllocator whose index is a dict by all tokens up to the end of a page."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.known = {}

    def keys_of(self, tokens):
        return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    def find(self, tokens):
        pages = [self.known.get(key) for key in self.keys_of(tokens)]
        return pages[: pages.index(None)] if None in pages else pages

    def index_pages(self, chain, tokens):
        if chain.weights_version == self._weights_version:
            for page, key in zip(chain.pages, self.keys_of(tokens), strict=False):
                if key not in self.known and page not in self._node_of:
                    self.known[key], self._node_of[page] = page, key

    def _allocate_page(self):
        if not self._free:
            page = next(iter(self._idle))
            del self.known[self._node_of.pop(page)], self._idle[page]
            self._free.append(page)
        return super()._allocate_page()

    def reset_prefix_cache(self):
        self.known.clear()
        super().reset_prefix_cache()


class Model:
    """A cache as a dict: what stands at each place of each page. Sequences write their tokens and
    read all of them back.
    """

    def __init__(self, pages: int, kind=PageAllocator):
        self.table, self.places, self.sequences = kind(pages, SIZE), {}, []

    def admit(self, tokens) -> bool:
        chain = self.table.open(self.table.find(tokens))
        cached = len(chain.pages) * SIZE
        for i in range(cached):
            assert self.places[chain.pages[i // SIZE], i % SIZE] == self.entry(chain, tokens, i)
        copies = self.table.reserve(chain, cached, len(tokens))
        if copies is None:
            self.table.close(chain)
            return False
        assert copies == []
        self.write(chain, tokens, cached)
        self.table.index_pages(chain, tokens)
        self.sequences.append((chain, list(tokens)))
        return True

    def write(self, chain, tokens, start) -> None:
        for i in range(start, len(tokens)):
            self.places[chain.pages[i // SIZE], i % SIZE] = self.entry(chain, tokens, i)

    def entry(self, chain, tokens, i):
        """It depends on all tokens before, and on the weights with which the sequence began."""
        return chain.weights_version, *tokens[: i + 1]

    def share(self, number: int, count: int) -> None:
        chain, tokens = self.sequences[number]
        same = 1 + count % len(tokens)
        self.sequences.append((self.table.share(chain, same), list(tokens[:same])))

    def grow(self, number: int, more) -> None:
        chain, tokens = self.sequences[number]
        before = list(chain.pages)
        copies = self.table.reserve(chain, len(tokens), len(tokens) + len(more))
        if copies is None:
            assert chain.pages == before
            self.end(number)  # preempted
            return
        for copy in copies:
            for i in range(SIZE):
                if (copy.source, i) in self.places:
                    self.places[copy.target, i] = self.places[copy.source, i]
        tokens += more
        self.write(chain, tokens, len(tokens) - len(more))

    def end(self, number: int) -> None:
        chain, tokens = self.sequences.pop(number)
        self.table.index_pages(chain, tokens)
        self.table.close(chain)

    def check(self) -> None:
        counted(self.table, [chain for chain, _ in self.sequences])
        for page, node in self.table._node_of.items():
            known = tokens_of(node)
            for i in range(SIZE):
                assert self.places[page, i][1:] == known[: len(known) - SIZE + i + 1]
        for chain, tokens in self.sequences:
            for i in range(len(tokens)):
                assert self.places[chain.pages[i // SIZE], i % SIZE] == self.entry(chain, tokens, i)


TOKENS = st.lists(
    st.integers(0, 1), min_size=1, max_size=14
)  # two tokens, so that prompts often share a prefix
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), TOKENS),
        st.tuples(st.just("share"), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(
            st.just("grow"), st.integers(0, 99), st.lists(st.integers(0, 1), min_size=1, max_size=6)
        ),
        st.tuples(st.just("reset_prefix_cache")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 12), EVENTS)
def test_no_page_is_lost_given_twice_or_written_to_by_a_stranger(pages, events):
    model = Model(pages)
    for what, *arguments in events:
        if what == "admit":
            model.admit(*arguments)
        elif what == "reset_prefix_cache":
            model.table.reset_prefix_cache()
        elif model.sequences:
            number, *rest = arguments
            getattr(model, what)(number % len(model.sequences), *rest)
        model.check()
    while model.sequences:
        model.end(0)
    counted(model.table, [])
    assert model.table.available == pages - 1


@pytest.mark.parametrize("seed", range(8))
def test_the_index_matches_pages_by_all_their_tokens(seed):
    """Long random runs on a few pages, so that pages leave the index before the pages after
    them."""
    random, pages = np.random.default_rng(seed), 4 + seed
    both = Model(pages), Model(pages, Keyed)
    for _ in range(1000):
        what = random.choice(
            ["admit", "share", "end", "grow", "reset"], p=[0.35, 0.1, 0.33, 0.2, 0.02]
        )
        tokens = random.integers(0, 2, random.integers(1, 20)).tolist()
        number, count = random.integers(0, 99, 2).tolist()
        for model in both:
            if what == "admit":
                model.admit(tokens)
            elif what == "reset":
                model.table.reset_prefix_cache()
            elif model.sequences:
                arguments = {"share": [count], "end": [], "grow": [tokens[:6]]}[what]
                getattr(model, what)(number % len(model.sequences), *arguments)
        first, second = ([chain.pages for chain, _ in model.sequences] for model in both)
        assert first == second and list(both[0].table._idle) == list(both[1].table._idle)
        assert both[0].table.find(tokens) == both[1].table.find(tokens)
        both[0].check()


def test_a_page_is_matched_again_when_the_page_before_it_is_back_in_the_index():
    table, tokens = PageAllocator(5, SIZE), [1] * SIZE + [2] * SIZE
    first, second, third = table.open(), table.open(), table.open()
    table.reserve(first, 0, SIZE)
    table.index_pages(first, tokens[:SIZE])
    table.reserve(second, 0, 2 * SIZE)
    table.index_pages(second, tokens)
    assert table.find(tokens) == [1, 3]
    table.close(first)
    table.reserve(third, 0, 2 * SIZE)
    assert third.pages == [4, 1] and table.find(tokens) == []
    table.index_pages(second, tokens)
    assert table.find(tokens) == [2, 3]


class Hashed(int):
    """A token that counts how often it is hashed."""

    count = 0

    def __hash__(self):
        Hashed.count += 1
        return int.__hash__(self)


def test_the_index_reads_each_token_of_a_prompt_a_few_times():
    table, tokens = PageAllocator(99, SIZE), [Hashed(n % 7) for n in range(300)]
    chain = table.open()
    table.reserve(chain, 0, len(tokens))
    Hashed.count = 0
    table.index_pages(chain, tokens)
    assert table.find(tokens) == chain.pages and Hashed.count <= 3 * len(tokens)


def test_a_prompt_shares_the_pages_of_one_with_the_same_prefix():
    model = Model(9)
    model.admit([1] * 8 + [2, 3])
    model.end(0)
    assert model.table.find([1] * 8 + [4]) == model.table.find([1] * 8) == [1, 2]
    assert (
        model.table.find([1] * 7) == [1]
        and model.table.find([1] * 3) == model.table.find([2] * 8) == []
    )


def test_completions_of_one_prompt_write_to_pages_of_their_own():
    table = PageAllocator(9, SIZE)
    first = table.open()
    assert table.reserve(first, 0, 6) == []
    second = table.share(first, 6)
    assert table.reserve(second, 6, 7) == [PageCopy(2, 3)] and second.pages == [1, 3]
    assert table.reserve(first, 6, 7) == [] and first.pages == [1, 2]  # alone there now


def test_a_page_that_nobody_uses_is_reused_until_its_room_is_needed():
    model = Model(4)
    for tokens in ([1] * 5, [2] * 5):
        model.admit(tokens)
        model.end(0)
    assert model.table.available == 3
    model.admit([3] * 8)
    assert model.table.find([1] * 5) == []  # given up first, gone first
    assert model.table.find([2] * 5) == [2]


def test_after_a_change_of_weights_nothing_old_is_reused():
    model = Model(4)
    model.admit([1] * 5)
    model.table.reset_prefix_cache()
    assert model.table.find([1] * 5) == []
    model.end(0)  # begun with the old ones
    assert model.table.find([1] * 5) == []


def test_a_page_cannot_be_released_twice():
    table = PageAllocator(4, SIZE)
    chain = table.open()
    table.reserve(chain, 0, 1)
    stolen = list(chain.pages)
    table.close(chain)
    chain.pages = stolen
    with pytest.raises(ValueError, match="page 1 is released"):
        table.close(chain)
