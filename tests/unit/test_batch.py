import numpy as np
import pytest

from rl.training.batch import padded_batch, padded_length, scatter_to_mask


def rows(*lengths):
    return [(list(range(10, 10 + n)), [0] * (n // 2) + [1] * (n - n // 2)) for n in lengths]


def test_rows_are_padded_on_the_right_and_keep_their_masks():
    batch = padded_batch(rows(3, 20), limit=128)
    assert batch.tokens.shape == (2, 64) and batch.prompt.tolist() == [0, 1]
    assert batch.tokens[0].tolist() == [10, 11, 12] + [0] * 61
    assert batch.segments.sum(1).tolist() == [3, 20] and batch.mask.sum(1).tolist() == [2, 10]
    assert batch.mask[0].tolist() == [0, 1, 1] + [0] * 61


@pytest.mark.parametrize("limit", [2, 16, 64, 127, 128, 200, 1024, 4097])
def test_few_lengths_occur_and_each_holds_its_rows(limit):
    lengths = {padded_length(longest, limit) for longest in range(1, limit + 1)}
    assert all(longest <= padded_length(longest, limit) <= limit for longest in range(1, limit + 1))
    assert len(lengths) <= max(1, min(8, limit // 64)) and max(lengths) == limit


def test_rows_left_out_count_for_nothing_and_the_others_stay():
    batch = padded_batch(rows(4, 5, 6), limit=16)
    left = batch.without_rows(np.array([False, True, False]))
    assert left.prompt.tolist() == [0, -1, 2] and left.mask.sum(1).tolist() == [2, 0, 3]
    assert left.segments.sum(1).tolist() == [4, 0, 6]
    assert (left.mask.dtype, left.segments.dtype, left.prompt.dtype) == (
        np.float32,
        np.int32,
        np.int32,
    )


def test_numbers_are_spread_to_the_places_of_their_tokens():
    mask = np.array([[0, 1, 1, 0], [1, 0, 0, 1]])
    np.testing.assert_array_equal(
        scatter_to_mask([[1, 2], [3, 4]], mask), [[0, 1, 2, 0], [3, 0, 0, 4]]
    )
    with pytest.raises(ValueError, match="shape"):
        scatter_to_mask([[1, 2]], np.array([[1, 1, 1]]))
