"""Kernels that attend over pages where they lie find what the portable form finds over gathered pages. B rows, H heads, M pages of
a row, P tokens of a page."""

import numpy as np
import pytest

from policy.layers import paged_attention


def by_numpy(q_BHL, pool_NPL, table_BM, lengths_B, rank):
    out = []
    for q, pages, length in zip(q_BHL, table_BM, lengths_B, strict=True):
        keys = pool_NPL[pages].reshape(-1, pool_NPL.shape[-1])[:length].astype(np.float64)
        scores = q.astype(np.float64) @ keys.T
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out.append(weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :rank])
    return np.stack(out)


@pytest.mark.parametrize("lengths", [[1, 12, 33, 40], [17], [40, 1], [8, 8, 9]])
def test_latents_are_attended_over_their_pages(lengths, monkeypatch):
    """Blocks of two pages and a table of five: rows of one to three blocks, the last of them in part, in scattered pages."""
    monkeypatch.setattr(paged_attention, "BLOCK_TOKENS", 16)
    B, H, L, rank, M, P = len(lengths), 4, 24, 16, 5, 8
    rng = np.random.default_rng(0)
    q, pool = rng.normal(size=(B, H, L)).astype(np.float32), rng.normal(size=(30, P, L)).astype(np.float32)
    table = rng.permutation(np.arange(1, 30))[: B * M].reshape(B, M).astype(np.int32)
    table[0] = table[-1]  # two rows with the same pages
    pool[0] = 100.0
    arguments = (q, pool[None], table, np.asarray(lengths, np.int32))
    found = paged_attention.latent_kernel(*arguments, rank=rank, interpret=True)
    np.testing.assert_allclose(found, by_numpy(q, pool, table, lengths, rank), atol=2e-6)
