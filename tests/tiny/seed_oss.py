from tiny import BASE, YARN, Kind

# The class of transformers drops parts of scores and outputs only while it trains.
_EVALUATED = {"attention_dropout": 0.0, "residual_dropout": 0.0}
KINDS = {"SeedOss": Kind("seed_oss", BASE | _EVALUATED | {"head_dim": 10}, {"mlp_bias": True})}
VARIANTS = {
    "seed_oss-out_bias-mqa-tied": (
        "SeedOss",
        {
            "attention_out_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "head_dim": 24,
        },
    ),
}
WIDE = {
    "seed_oss-no_biases-yarn": (
        "SeedOss",
        {"attention_bias": False, "rope_parameters": YARN, "num_key_value_heads": 4},
    ),
}
GENERATED = {"seed_oss": ("SeedOss", {"num_hidden_layers": 2})}
