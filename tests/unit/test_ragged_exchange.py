"""Where rows go in a ragged exchange, against a simulation with lists."""

import jax.numpy as jnp
import numpy as np
import pytest

from policy.experts.ragged_exchange import groups_on_arrival, trips, trips_by_group


@pytest.mark.parametrize("room", [1000, 11, 4])
@pytest.mark.parametrize("seed", range(3))
def test_rows_arrive_by_sender_and_group_and_the_last_stay_behind_when_the_room_is_full(room, seed):
    P, G = 4, 3
    counts = np.random.default_rng(seed).integers(0, 5, (P, P * G))
    counts[seed] = 0
    trip, arriving = trips(jnp.asarray(counts), room)
    # Every row is (sender, its number there, group); they lie sorted by group.
    before = [
        [(i, n, g) for n, g in enumerate(np.repeat(np.arange(P * G), counts[i]))] for i in range(P)
    ]
    after = [
        [row for i in range(P) for row in before[i] if row[2] // G == j][:room] for j in range(P)
    ]
    for i in range(P):
        for j in range(P):
            start, size, target = (int(a[i, j]) for a in (trip.source, trip.sizes, trip.target))
            assert before[i][start : start + size] == after[j][target : target + size]
            assert size == sum(row[0] == i for row in after[j])
    for j in range(P):
        length = len(after[j]) + 2
        groups = np.asarray(groups_on_arrival(arriving[:, j], length))
        np.testing.assert_array_equal(groups, [row[2] % G for row in after[j]] + [G, G])
    assert (room == 1000) == (int(trip.sizes.sum()) == counts.sum())
    for forth, back in (
        (trip.source, trip.back.target),
        (trip.target, trip.back.source),
        (trip.sizes, trip.back.sizes),
    ):
        np.testing.assert_array_equal(forth, back.T)


@pytest.mark.parametrize("seed", range(3))
def test_rows_arrive_by_group_and_sender(seed):
    P, G = 4, 3
    counts = np.random.default_rng(seed).integers(0, 5, (P, P * G))
    counts[seed] = 0
    trip = trips_by_group(jnp.asarray(counts), G)
    before = [
        [(i, n, g) for n, g in enumerate(np.repeat(np.arange(P * G), counts[i]))] for i in range(P)
    ]
    for j in range(P):
        after = sorted(
            (row for rows in before for row in rows if row[2] // G == j),
            key=lambda row: (row[2], row[0], row[1]),
        )
        for i in range(P):
            for g in range(G):
                start, size, target = (
                    int(a[i, j, g]) for a in (trip.source, trip.sizes, trip.target)
                )
                assert before[i][start : start + size] == after[target : target + size]
                assert size == sum(row[0] == i and row[2] == j * G + g for row in after)
                back = trip.back
                assert (int(back.source[j, i, g]), int(back.target[j, i, g])) == (target, start)
