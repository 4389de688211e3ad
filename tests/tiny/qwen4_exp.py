from tiny import Kind
from tiny.qwen3_next import HYBRID, ROTARY, SHORT, SPARSE

# Many index heads: where all relu terms are 0 the scores tie, and libraries choose different
# blocks.
_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
}
_STREAMS = {"hc_count": 3, "hc_lowrank": 10}
# Of layers with a gated delta net. The rows of a table are few, so that n-grams share them.
_TABLES = {
    "ple_layer_ids": [1],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 12,
    "eos_token_id": 7,
}
_LOOSE = {"logits": 1e-4, "generator": 5e-5}
KINDS = {
    "Qwen4Exp": Kind(
        "qwen4_exp_text",
        HYBRID | SPARSE | ROTARY | _INDEXER | _STREAMS | {"initializer_range": 0.2},
        _TABLES | {"output_gate_type": "sigmoid", "initializer_range": 0.2},
        SHORT,
        config="Qwen4ExpTextConfig",
        given=_INDEXER | {"indexer_head_dim": 256},
        **_LOOSE,
    ),
}
VARIANTS = {
    "qwen4_exp-two_streams-one_key_head-five_layers-tied": (
        "Qwen4Exp",
        _TABLES
        | {
            "hc_count": 2,
            "num_hidden_layers": 5,
            "linear_num_key_heads": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "indexer_compress_ratio": 2,
            "ple_layer_ids": [2, 5],
            "ngram_size": 4,
            "ple_embed_dim": 18,
            "eos_token_id": [3, 7],
        },
    ),
    "qwen4_exp-attention_alone-biases": (
        "Qwen4Exp",
        {
            "initializer_range": 0.3,
            "layer_types": ["full_attention", "full_attention"],
            "num_hidden_layers": 2,
            "attention_bias": True,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
}
WIDE = {
    "qwen4_exp-blocks_of_one_token": (
        "Qwen4Exp",
        {"indexer_compress_ratio": 1, "indexer_budget": 5},
    ),
    "qwen4_exp-budget-longer-than-row": (
        "Qwen4Exp",
        {"indexer_budget": 96, "full_attention_interval": 2},
    ),
}
# Larger weights: with the others the tokens of a greedy completion are all as likely.
GENERATED = {
    "qwen4_exp": (
        "Qwen4Exp",
        KINDS["Qwen4Exp"].standard | KINDS["Qwen4Exp"].short | {"initializer_range": 0.25},
    )
}
