"""The page allocator: which pages of the cache hold the tokens of which sequence. Pure Python: no
arrays, no device, no clock.

A page holds the entries of `size` tokens, in every layer. Sequences may share pages: the
completions of a prompt share the pages of the prompt, and a prompt shares the pages of an earlier
one that begins with the same tokens. A sequence never writes to a page that another one uses too;
it writes to a copy.

A full page is indexed by its tokens and all tokens before them. It stays in the index when no
sequence uses it any more, until it is allocated again; the page that became idle first is reused
first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Chain:
    """The pages of a sequence in the order of its tokens. weights_version: the version of the
    weights that computed its first entries."""

    pages: list[int] = field(default_factory=list)
    weights_version: int = 0


@dataclass(frozen=True)
class PageCopy:
    """Page `source` must be copied to page `target` before the sequence writes."""

    source: int
    target: int


@dataclass(eq=False, repr=False)
class _IndexNode:
    """A node of the page index, which is a tree. The way from the root to a node spells the tokens
    of a page and all tokens before them; each edge has the tokens of one page.

    tokens: on the edge from `parent`. page: the indexed page; None: a page after it is still
    indexed.
    """

    parent: _IndexNode | None
    tokens: tuple[int, ...]
    page: int | None = None
    children: dict[tuple[int, ...], _IndexNode] = field(default_factory=dict)


class PageAllocator:
    """Allocates pages first + 1 .. first + pages - 1, of `size` tokens each. Page `first` is never
    allocated: table entries without a page point to it.

    Raises ValueError for fewer than 2 pages and for pages of no token.
    """

    def __init__(self, pages: int, size: int, first: int = 0):
        if pages < 2 or size < 1:
            raise ValueError(
                f"PageAllocator: {pages} pages of {size} tokens; there must be at least 2, of at "
                "least 1 token"
            )
        self.size = size
        self._free = list(range(first + 1, first + pages))  # a heap: the lowest is allocated first
        self._ref_counts = dict.fromkeys(self._free, 0)
        self._weights_version = 0
        self._root = _IndexNode(None, ())
        self._node_of: dict[int, _IndexNode] = {}  # by indexed page
        # Indexed pages that no sequence uses, in the order in which they became idle.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Returns the number of pages that can be allocated."""
        return len(self._free) + len(self._idle)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Returns the indexed pages that hold the first of these tokens, as many as follow each
        other."""
        pages = []
        node = self._root
        for page_tokens in self._split(tokens):
            node = node.children.get(page_tokens)
            if node is None or node.page is None:
                break
            pages.append(node.page)
        return pages

    def _split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields the tokens of each page that these tokens fill."""
        for start in range(0, len(tokens) - self.size + 1, self.size):
            yield tuple(tokens[start : start + self.size])

    def open(self, pages: Sequence[int] = ()) -> Chain:
        """Opens a sequence that begins with these pages."""
        for page in pages:
            self._ref_counts[page] += 1
            self._idle.pop(page, None)
        return Chain(list(pages), self._weights_version)

    def share(self, chain: Chain, tokens: int) -> Chain:
        """Opens another sequence with the same first `tokens` tokens."""
        other = self.open(chain.pages[: -(-tokens // self.size)])
        other.weights_version = chain.weights_version
        return other

    def missing(self, chain: Chain, start: int, end: int) -> int:
        """Returns the number of pages that `reserve` would allocate."""
        return self._must_copy(chain, start, end) + max(0, -(-end // self.size) - len(chain.pages))

    def reserve(self, chain: Chain, start: int, end: int) -> list[PageCopy] | None:
        """Allocates pages for tokens start .. end - 1 of a sequence that has its tokens before
        `start`. Returns the page copies that must run first. Returns None and changes nothing if
        there are not enough pages."""
        if self.missing(chain, start, end) > self.available:
            return None
        copies = []
        if self._must_copy(chain, start, end):
            first = start // self.size
            copies = [PageCopy(chain.pages[first], self._allocate_page())]
            self._release_page(chain.pages[first])
            chain.pages[first] = copies[0].target
        chain.pages += [
            self._allocate_page() for _ in range(-(-end // self.size) - len(chain.pages))
        ]
        return copies

    def _must_copy(self, chain: Chain, start: int, end: int) -> bool:
        """Whether the first page to write is shared with another sequence, or is in the index."""
        first = start // self.size
        if end <= start or first >= len(chain.pages):
            return False
        return self._ref_counts[chain.pages[first]] > 1 or chain.pages[first] in self._node_of

    def index_pages(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Indexes the pages that these tokens fill; their entries must be in the cache. Of pages
        with equal tokens the first stays in the index. Pages that older weights computed are not
        indexed."""
        if chain.weights_version != self._weights_version:
            return
        node = self._root
        for page, page_tokens in zip(chain.pages, self._split(tokens), strict=False):
            parent = node
            node = node.children.get(page_tokens)
            if node is None:
                node = parent.children[page_tokens] = _IndexNode(parent, page_tokens)
            if node.page is None and page not in self._node_of:
                node.page = page
                self._node_of[page] = node
        self._prune(node)

    def _prune(self, node: _IndexNode) -> None:
        """Removes a node without page and children, and then its parents as far as they have
        neither."""
        while node.parent is not None and node.page is None and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent

    def close(self, chain: Chain) -> None:
        """Releases the pages, the last one first: a page is of no use without the pages before
        it."""
        for page in reversed(chain.pages):
            self._release_page(page)
        chain.pages = []

    def reset_prefix_cache(self) -> None:
        """Empties the index: the weights have changed."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()
        self._node_of.clear()
        self._root = _IndexNode(None, ())
        self._weights_version += 1

    def _allocate_page(self) -> int:
        """Allocates a page: a free one, else the one that became idle first."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            node = self._node_of.pop(page)
            node.page = None
            self._prune(node)
        self._ref_counts[page] = 1
        return page

    def _release_page(self, page: int) -> None:
        """Lets one sequence give up a page. A page that no sequence uses becomes idle if it is
        indexed, else free."""
        if self._ref_counts[page] < 1:
            raise ValueError(f"page {page} is released by a sequence that does not have it")
        self._ref_counts[page] -= 1
        if self._ref_counts[page] == 0:
            if page in self._node_of:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)
