"""Sparse attention of DeepSeek-V3.2 against transformers: the selected keys, greedy decoding over
their latents, and the divergence of the index scores from the attention weights, from the numbers
that transformers computes on its way."""

import numpy as np
import pytest
import stepwise
from oracles import oracle, reference_logits, saved, tokens

import policy
from policy.attention import sparse_attention
from rollout import Generator, SamplingParams

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


TOPK, LENGTH = 5, 21
# With few index heads relu leaves exact zeros, and the libraries choose differently between keys
# that tie.
KEYS = {"index_n_heads": 32, "num_hidden_layers": 2, "attention_bias": True}


def pair(directory, topk):
    model = oracle("DeepseekV32", seed=1, index_topk=topk, **KEYS)
    return policy.load(saved(model, directory)), model


def of_transformers(model, rows, monkeypatch):
    """For each layer (attention weights [B, H, T, T], index scores [B, T, T], -inf or nearly where
    invisible)."""
    scores, real = [], torch.Tensor.topk

    def watched(self, *args, **kwargs):
        if self.shape[1:] == (LENGTH, LENGTH):  # the routers rank, too
            scores.append(self.double().numpy())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    with torch.no_grad():
        weights = model(torch.tensor(rows), use_cache=False, output_attentions=True).attentions
    monkeypatch.undo()
    assert len(scores) == len(weights) == KEYS["num_hidden_layers"]
    return [(w.double().numpy(), s) for w, s in zip(weights, scores, strict=True)]


def expected_of(weights, scores, dense):
    """(divergence, recall) of one layer, summed over all queries."""
    visible = scores > -1e30
    order = np.argsort(
        np.argsort(-np.where(visible, scores, -np.inf), axis=-1, kind="stable"), axis=-1
    )
    kept = visible & (order < TOPK)
    allowed = visible if dense else kept
    p = weights.sum(axis=1)
    p /= p.sum(axis=-1, keepdims=True)
    assert np.all(p[~allowed] == 0)
    e = np.where(
        allowed, np.exp(scores - np.where(allowed, scores, -np.inf).max(axis=-1, keepdims=True)), 0
    )
    q = e / e.sum(axis=-1, keepdims=True)
    inside = allowed & (p > 0)
    return np.sum(p[inside] * np.log(p[inside] / q[inside])), p[kept].sum()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
def test_the_divergence_is_that_of_the_attention_weights_and_index_scores_of_transformers(
    stage, tmp_path, monkeypatch
):
    rows, dense = tokens(2, LENGTH, seed=4), stage == "dense_warmup"
    ours, model = pair(tmp_path, TOPK)
    if dense:
        model = oracle(
            "DeepseekV32", seed=1, index_topk=100, **KEYS
        )  # the same weights; sees everything
    else:
        np.testing.assert_allclose(
            np.asarray(ours.logits(rows)), reference_logits(model, rows), atol=2e-5
        )
    result = (
        stepwise.forward(ours, rows, indexer=stage, attention_chunk=8)[1]
        .by_layer("indexing")
        .values()
    )
    expected = [expected_of(*layer, dense) for layer in of_transformers(model, rows, monkeypatch)]
    divergence = np.concatenate([each.divergence for each in result])
    np.testing.assert_allclose(divergence, [each[0] for each in expected], rtol=1e-4)
    if dense:
        np.testing.assert_allclose(
            np.concatenate([each.recall for each in result]),
            [each[1] for each in expected],
            rtol=1e-4,
        )


@pytest.mark.slow
def test_greedy_decoding_over_selected_latents_is_that_of_transformers(tmp_path, monkeypatch):
    ours, model = pair(tmp_path, TOPK)
    real, taken = sparse_attention.gather_entries, []

    def watched(cache, name, at, dtype):
        taken.append(at.shape)
        return real(cache, name, at, dtype)

    monkeypatch.setattr(sparse_attention, "gather_entries", watched)
    generator, new = Generator(ours, max_length=64, slots=2), 24
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (19, 3)]
    out = generator.generate(prompts, SamplingParams(max_new_tokens=new, temperature=0))
    assert (2, 1, TOPK) in taken
    for prompt, (completion,) in zip(prompts, out, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=new, pad_token_id=0
        )
        assert completion.tokens == expected[0, len(prompt) :].tolist()
