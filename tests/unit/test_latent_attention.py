"""Latent attention over its cache, where the expansion of keys and values is absorbed, is latent
attention over expanded ones.
"""

import numpy as np
import pytest
import stepwise
from oracles import configuration, random_model, tokens
from tiny import YARN

from policy import families
from policy.cache import cache
from policy.huggingface import sources

# One dense layer: no router whose choice could fall otherwise.
ONE = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
FULL_QUERY = {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None}
SHAPES = {
    "query_latent-yarn": (
        "DeepseekV3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v2_lite": (
        "DeepseekV2",
        FULL_QUERY | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "biases-halves": ("DeepseekV3", {"attention_bias": True, "rope_interleave": False}),
    "odd": (
        "DeepseekV3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 9,
            "kv_lora_rank": 7,
            "qk_nope_head_dim": 5,
            "qk_rope_head_dim": 10,
            "v_head_dim": 11,
        },
    ),
    "values_wider_than_keys": (
        "DeepseekV2",
        FULL_QUERY | {"qk_nope_head_dim": 2, "v_head_dim": 21, "num_attention_heads": 1},
    ),
    "indexed": ("DeepseekV32", {"index_topk": 5, "index_n_heads": 32, "attention_bias": True}),
}
QUICK = ("indexed",)
ROWS, LENGTH, PROMPT = 3, 27, 9
LENGTHS = np.array([27, 5, 19])  # the second ends inside the prompt, the third while decoding


def model_of(name):
    kind, keys = SHAPES[name]
    return random_model(families.read(configuration(kind, **ONE | keys)), seed=2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SHAPES]
)
def test_absorbed_equals_expanded(name):
    model, rows = model_of(name), tokens(ROWS, LENGTH, seed=1)
    real = np.arange(LENGTH) < LENGTHS[:, None]
    expected, _ = stepwise.forward(model, rows, real.astype(np.int32))
    result, _ = stepwise.through_cache(model, rows, LENGTHS, PROMPT, chunk=3, capacity=LENGTH + 6)
    assert np.std(expected[real]) > 0.3
    np.testing.assert_allclose(result[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["indexed", pytest.param("query_latent-yarn", marks=pytest.mark.slow)]
)
def test_documents_packed_into_one_row_are_those_of_slots_of_their_own(name):
    model, documents = model_of(name), [tokens(1, n, seed=n)[0] for n in (9, 1, 17)]
    packed = np.concatenate([*documents, [0, 0]])[None]
    segments = np.concatenate([*(np.full(len(d), i + 1) for i, d in enumerate(documents)), [0, 0]])[
        None
    ]
    together = stepwise.forward(model, packed, segments)[0][0]
    rows = np.zeros((3, 17), int)
    for row, document in enumerate(documents):
        rows[row, : len(document)] = document
    alone, _ = stepwise.through_cache(model, rows, [9, 1, 17], prompt=1)
    for i in range(3):
        np.testing.assert_allclose(
            alone[i, : len(documents[i])], together[segments[0] == i + 1], atol=1e-5, rtol=0
        )


def test_the_cache_holds_576_numbers_a_token_of_a_layer_of_deepseek_v3():
    config = sources.preset("deepseek-v3")
    mixer = config.layers[0].mixer
    assert cache.bytes_per_token(config, "bfloat16") == len(config.layers) * 2 * 576
    assert (
        mixer.heads * (mixer.nope_dim + mixer.rope.dim + mixer.v_dim) == 40_960
    )  # what expanded keys and values would take
    assert cache.bytes_per_token(sources.preset("deepseek-v3.2"), "bfloat16") == len(
        config.layers
    ) * 2 * (576 + 128)
