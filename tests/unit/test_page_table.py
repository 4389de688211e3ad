"""The table of pages under any order of arrivals, shared prompts, growth, ends and changes of weights."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.page_table import PageCopy, PageTable

SIZE = 4


def counted(table: PageTable, chains) -> None:
    """Every page is either free, idle or used, by as many sequences as the table says; none is lost, none is there twice."""
    used = Counter(page for chain in chains for page in chain.pages)
    assert dict(used) == {page: n for page, n in table._users.items() if n}
    everywhere = [*table._free, *table._idle, *used]
    assert sorted(everywhere) == sorted(table._users)
    assert all(table._known[table._keys[page]] == page for page in table._keys) and len(table._known) == len(
        table._keys
    )


def tokens_of(key) -> tuple:
    """All tokens that a page is known by."""
    return () if key is None else (*tokens_of(key[0]), *key[1])


class Model:
    """A cache as a dict: what stands at each place of each page. Sequences write their tokens and read all of them back."""

    def __init__(self, pages: int):
        self.table, self.places, self.sequences = PageTable(pages, SIZE), {}, []

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
        self.table.remember(chain, tokens)
        self.sequences.append((chain, list(tokens)))
        return True

    def write(self, chain, tokens, start) -> None:
        for i in range(start, len(tokens)):
            self.places[chain.pages[i // SIZE], i % SIZE] = self.entry(chain, tokens, i)

    def entry(self, chain, tokens, i):
        """It depends on all tokens before, and on the weights with which the sequence began."""
        return chain.weights, *tokens[: i + 1]

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
        self.table.remember(chain, tokens)
        self.table.close(chain)

    def check(self) -> None:
        counted(self.table, [chain for chain, _ in self.sequences])
        for page, key in self.table._keys.items():
            known = tokens_of(key)
            for i in range(SIZE):
                assert self.places[page, i][1:] == known[: len(known) - SIZE + i + 1]
        for chain, tokens in self.sequences:
            for i in range(len(tokens)):
                assert self.places[chain.pages[i // SIZE], i % SIZE] == self.entry(chain, tokens, i)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens, so that prompts often share a prefix
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), TOKENS),
        st.tuples(st.just("share"), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(st.just("grow"), st.integers(0, 99), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        st.tuples(st.just("forget")),
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
        elif what == "forget":
            model.table.forget()
        elif model.sequences:
            number, *rest = arguments
            getattr(model, what)(number % len(model.sequences), *rest)
        model.check()
    while model.sequences:
        model.end(0)
    counted(model.table, [])
    assert model.table.available == pages - 1


def test_a_prompt_shares_the_pages_of_one_with_the_same_prefix():
    model = Model(9)
    model.admit([1] * 8 + [2, 3])
    model.end(0)
    assert model.table.find([1] * 8 + [4]) == model.table.find([1] * 8) == [1, 2]
    assert model.table.find([1] * 7) == [1] and model.table.find([1] * 3) == model.table.find([2] * 8) == []


def test_completions_of_one_prompt_write_to_pages_of_their_own():
    table = PageTable(9, SIZE)
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
    model.table.forget()
    assert model.table.find([1] * 5) == []
    model.end(0)  # begun with the old ones
    assert model.table.find([1] * 5) == []


def test_a_page_cannot_be_released_twice():
    table = PageTable(4, SIZE)
    chain = table.open()
    table.reserve(chain, 0, 1)
    stolen = list(chain.pages)
    table.close(chain)
    chain.pages = stolen
    with pytest.raises(ValueError, match="page 1 is released"):
        table.close(chain)
