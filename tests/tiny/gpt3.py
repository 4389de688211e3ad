from tiny import VOCAB, Kind

_BASE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 48,
    "initializer_range": 0.2,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = {
    "GPT2": Kind(
        "gpt2",
        _BASE,
        short={"n_layer": 2},
        model="GPT2LMHeadModel",
        required=("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
    )
}
VARIANTS = {
    "gpt2-untied-one_head-narrow": (
        "GPT2",
        {"tie_word_embeddings": False, "n_head": 1, "n_inner": None, "n_layer": 1},
    ),
    "gpt2-scales-relu": (
        "GPT2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-2,
        },
    ),
}
WIDE = {
    "gpt2-unscaled-eight_heads": ("GPT2", {"scale_attn_weights": False, "n_head": 8, "n_layer": 4})
}
PUBLISHED = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200}
