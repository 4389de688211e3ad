"""Trees of sequences with equal beginnings: how they are packed, and what a packed row says about
them."""

import numpy as np
import pytest
import shared_prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.cache.media import Media
from policy.cache.step import UNKNOWN
from rl.training.batch import Batch
from rl.training.packing.trees import Sharing, groups_of, plan_trees


def batch_of(groups, T=24) -> Batch:
    """Rows of (tokens, trained), by group."""
    rows = [(number, *row) for number, group in enumerate(groups) for row in group]
    tokens, segments, mask = (
        np.zeros((len(rows), T), kind) for kind in (np.int32, np.int32, np.float32)
    )
    for i, (_, ids, trained) in enumerate(rows):
        tokens[i, : len(ids)], segments[i, : len(ids)], mask[i, : len(ids)] = ids, 1, trained
    return Batch(
        tokens=tokens,
        segments=segments,
        mask=mask,
        prompt=np.array([n for n, *_ in rows], np.int32),
    )


@st.composite
def groups(draw):
    """Rows of few different tokens, so that many begin equally, some of them trained in the
    middle."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=0, max_size=8))
        group = []
        for _ in range(draw(st.integers(1, 5))):
            ids = prompt + draw(st.lists(st.integers(0, 1), min_size=1, max_size=16))
            trained = [0] * len(prompt) + draw(
                st.lists(st.integers(0, 1), min_size=16, max_size=16)
            )
            group.append((ids, trained[: len(ids)]))
        result.append(group)
    return result


SHARINGS = [Sharing(), Sharing(2), Sharing(4), Sharing(2, one_level=True), Sharing(2, ahead=2)]


@settings(max_examples=60, deadline=None)
@given(groups(), st.sampled_from(SHARINGS))
def test_a_packing_holds_every_token_once_and_the_chains_before_are_the_rows(rows, sharing):
    data = batch_of(rows)
    N, T = data.tokens.shape
    packing = plan_trees(data, sharing.most_rows(N), sharing)
    tree, L = packing.tree, packing.shape[1]
    assert T * sharing.length_factor == L
    real = np.flatnonzero(data.segments)
    assert np.array_equal(np.sort(packing.source), real), "every token of a row has a place"
    kept = np.zeros(data.tokens.size, np.int64)
    kept[packing.source] = packing.target
    numbers = np.where(data.segments == 0, 0, data.tokens)
    assert np.array_equal(packing.unpack(packing.pack(data.tokens)), numbers)
    assert np.array_equal(np.unique(packing.target[packing.writes]), np.unique(packing.target))
    assert np.count_nonzero(packing.writes) == len(np.unique(packing.target)) == packing.distinct
    assert tree.count.sum() == len(real), "a place counts for all rows that share it"
    ends, starts = packing.runs
    assert (ends - starts).sum() == packing.distinct
    flat_before = np.where(
        tree.before < 0, -1, tree.before + np.arange(len(tree.before))[:, None] * L
    ).reshape(-1)
    for i in range(N):
        length = np.count_nonzero(data.segments[i])
        places = kept[i * T : i * T + length]
        assert len({place // L for place in places}) == 1, "no sequence in two packed rows"
        chain = [places[-1]]
        while flat_before[chain[-1]] >= 0:
            chain.append(flat_before[chain[-1]])
        assert np.array_equal(chain[::-1], places)
        assert np.array_equal(tree.position.reshape(-1)[places], np.arange(length))
        row = places[0] // L
        at, own = places % L, tree.node[row]
        sees = (
            (own[None] <= own[at, None])
            & (own[at, None] <= tree.last[row][None])
            & (own[None] != 0)
        )
        sees &= tree.position[row][None] <= tree.position[row][at, None]
        assert [set(np.flatnonzero(each)) for each in sees] == [
            set(at[: n + 1]) for n in range(length)
        ]
        assert np.array_equal(
            packing.unpack(packing.pack(data.mask))[i] >= data.mask[i], np.ones(T, bool)
        )
    packed = packing.batch(data)
    assert packed.mask.sum() == data.mask.sum(), "a trained token has a place of its own"
    assert (packed.segments[packed.mask > 0] > 0).all()
    assert not (np.diff(np.where(tree.node == 0, 10**6, tree.node), axis=1) < 0).any(), "preorder"


def test_groups_that_stay_together_keep_the_order_of_their_sequences():
    rng = np.random.default_rng(0)
    tokens, segments, mask = (np.zeros((6, 30), kind) for kind in (np.int32, np.int32, np.float32))
    for i in range(6):
        prompt, at = rng.integers(0, 9, 6).tolist(), 0
        for number in (1, 2):
            ids = prompt + rng.integers(0, 9, int(rng.integers(1, 8))).tolist()
            tokens[i, at : at + len(ids)], segments[i, at : at + len(ids)] = ids, number
            mask[i, at + 6 : at + len(ids)] = 1
            at += len(ids)
    data = Batch(tokens=tokens, segments=segments, mask=mask, prompt=np.arange(6, dtype=np.int32))
    packing = plan_trees(data, 6, Sharing(together=True))
    assert packing.filled_rows < 6 and packing.distinct < len(packing.source)
    own = packing.pack(np.where(mask > 0, np.arange(1, 7)[:, None] * 10 + segments, 0))
    for row in range(packing.filled_rows):
        pairs = {int(s): int(n) for s, n in zip(packing.segments[row], own[row], strict=True) if n}
        assert all(
            pairs[k] % 10 == 2 - k % 2 and pairs[k] // 10 == pairs[k + k % 2 * 2 - 1] // 10
            for k in pairs
        )


def test_a_cut_tree_fills_rows_and_repeats_its_beginning():
    """A group of 8 x (16 + 8) tokens in rows of 24 and of 48."""
    rng, prompt = np.random.default_rng(1), [3] * 16
    rows = [[(prompt + rng.integers(0, 9, 8).tolist(), [0] * 16 + [1] * 8) for _ in range(8)]]
    packing = plan_trees(batch_of(rows), 4, Sharing(2))
    assert packing.filled_rows == 2 and packing.distinct == 2 * 16 + 8 * 8
    assert np.count_nonzero(packing.tree.position[0] == 0) == 1


def test_groups_that_save_little_lie_flat():
    rows = [[([1] + [k] * 20, [0] + [1] * 20) for k in range(3)]]
    packing = plan_trees(batch_of(rows), 3, Sharing(2))
    assert packing.distinct == len(packing.source) and (packing.tree.count <= 1).all()


def test_a_turn_that_one_row_trains_on_is_shared_and_owned_by_it():
    """Three levels: two rows share a turn that the first trains on, the third parts after the
    prompt."""
    prompt, turn = [1, 2, 3, 4], [5, 6, 7]
    rows = [
        [
            (prompt + turn, [0] * 4 + [1] * 3),
            (prompt + turn + [8, 9], [0] * 7 + [1] * 2),
            (prompt + turn + [8, 8], [0] * 7 + [1] * 2),
        ]
    ]
    data = batch_of(rows)
    packing = plan_trees(data, 3, Sharing(2))
    packed = packing.batch(data)
    assert packing.distinct == 4 + 2 + 1 + 1 + 2 + 2  # the last token of a row is its own
    owned = packed.segments[0][packed.mask[0] > 0]
    assert sorted(np.unique(owned, return_counts=True)[1].tolist()) == [2, 2, 3]
    shared = (packing.tree.count[0] > 1) & (packed.mask[0] > 0)
    assert shared.sum() == 2 and len(set(packed.segments[0][shared])) == 1


@pytest.mark.parametrize(("routes", "distinct"), [((2, 2), 7), ((2, UNKNOWN), 7), ((2, 3), 11)])
def test_known_routes_that_differ_end_a_beginning(routes, distinct):
    data = batch_of([[([1, 1, 1, 1, 2], [0] * 4 + [1]), ([1, 1, 1, 1, 3, 3], [0] * 4 + [1] * 2)]])
    given = np.full((*data.tokens.shape, 1, 1), 1, np.int32)
    given[:, 0] = np.array(routes)[:, None, None]
    data = data.replace(routes={"layer": given})
    packing = plan_trees(data, 2, Sharing(2))
    assert packing.distinct == distinct
    if distinct == 7:
        assert packing.routes(data)["layer"].reshape(-1)[0] == 2, "what is known beats what is not"


def test_a_beginning_ends_before_a_picture_that_sees_itself():
    data = batch_of([[([1, 2, 2, 2, 5], [0] * 4 + [1]), ([1, 2, 2, 2, 6, 6], [0] * 4 + [1] * 2)]])
    places = np.where(data.segments > 0, np.arange(24), 0).astype(np.int32)
    until = np.where((places >= 1) & (places <= 4), np.maximum(places, 4), places).astype(np.int32)
    media = Media(index=np.full(data.tokens.shape, -1, np.int32), until=until)
    packing = plan_trees(data.replace(media=media), 2, Sharing(2))
    assert packing.tree.count.max() == 2 and np.count_nonzero(packing.tree.count == 2) == 1


def test_the_layout_is_a_function_of_the_batch():
    data = shared_prefixes.groups(50)
    one, other = (plan_trees(data, 12, Sharing(2)) for _ in range(2))
    assert np.array_equal(one.target, other.target) and len(groups_of(data)) == 4
