from tiny import BASE, Kind

_FACTORS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
}
KINDS = {
    "GraniteMoeShared": Kind(
        "granitemoeshared",
        BASE
        | _FACTORS
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
        {"attention_bias": True},
    )
}
VARIANTS = {
    "granitemoeshared-nothing_shared-tied": (
        "GraniteMoeShared",
        {"shared_intermediate_size": 0, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
}
