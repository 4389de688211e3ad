"""The vision tower of Qwen2.5-VL: attention in windows, and configurations that it does not
compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import families
from policy.attention.dot_product_attention import attend
from policy.fields import tower_files
from policy.fields.config_fields import UnsupportedModel
from policy.towers.blocks import within
from policy.towers.window_vision import window_attention


@pytest.mark.parametrize(
    ("windows", "length", "size"),
    [
        ([4], 4, 4),  # one window and no padding
        ([1], 7, 4),
        ([3, 4, 1, 4, 2, 4], 21, 4),
        ([1, 1, 1, 1], 4, 1),
        ([5, 2], 9, 9),
        ([], 6, 4),  # an empty place of a batch
    ],
    ids=str,
)
def test_attention_in_windows_equals_attention_under_a_mask(windows, length, size):
    rng = np.random.default_rng(0)
    first = np.repeat(np.arange(len(windows)) + 1, windows)
    groups = np.zeros((2, length), np.int32)
    groups[0, : len(first)] = first
    groups[1, :1] = 1  # another picture
    q, k, v, factors = (rng.normal(size=(2, 3, length, 4)).astype(np.float32) for _ in range(4))
    real = (groups > 0)[:, None, :, None]

    def by_mask(q, k, v):
        return jnp.where(real, attend(q, k, v, within(jnp.asarray(groups)), 64), 0)

    def by_groups(q, k, v):
        return jnp.where(real, window_attention(q, k, v, jnp.asarray(groups), size, 64), 0)

    def of(attention):
        def loss(q, k, v):
            out = attention(q, k, v)
            return (out * factors).sum(), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    expected, ours = jax.jit(lambda: (of(by_mask), of(by_groups)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=0), ours, expected)


TEXT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]},
}
TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 8,
    "patch_size": 4,
    "window_size": 16,
}


def test_blocks_that_do_not_exist_are_ignored():
    """As the class does, whose default has numbers past the last block of a small tower."""
    read = tower_files.window_vision(TOWER | {"fullatt_block_indexes": [7, 1, -1]})
    assert read.full == (1,) and read.window == 2
    assert tower_files.window_vision(TOWER).full == ()


@pytest.mark.parametrize(
    ("text", "tower", "message"),
    [
        ({"head_dim": 10}, {}, r"head_dim 10 must be hidden_size / num_attention_heads, 8"),
        (
            {"num_attention_heads": 5},
            {},
            "hidden_size 32 is not a multiple of num_attention_heads 5",
        ),
        ({}, {"head_dim": 4}, "vision_config: head_dim 4 must be hidden_size / num_heads, 8"),
        ({}, {"num_heads": 3}, "hidden_size 16 of a tower is not a multiple of its 3 heads"),
        ({}, {"num_heads": 8}, "heads of 2 cannot turn by rows and columns"),
        (
            {},
            {"window_size": 7},
            "window_size 7 must be at least spatial_merge_size times patch_size, 8",
        ),
        (
            {},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not supported",
        ),
        ({}, {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(text, tower, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.read(TEXT | text | {"vision_config": TOWER | tower}, media=True)


def test_a_text_model_has_no_tower():
    with pytest.raises(UnsupportedModel, match="a model without towers"):
        families.read(TEXT, media=True)


@pytest.mark.parametrize(
    ("outer", "inner"), [(True, None), (None, True), (False, True), (True, False)]
)
def test_either_part_of_a_configuration_ties_the_head(outer, inner):
    """The class takes a true value of the text model for the wrapper."""
    hf = {
        "architectures": TEXT["architectures"],
        "tie_word_embeddings": outer,
        "vision_config": TOWER,
    }
    assert families.read(hf | {"text_config": TEXT | {"tie_word_embeddings": inner}}).tied_head
