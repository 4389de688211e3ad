"""The names of mesh axes and of logical axes, and the rules that map logical axes to mesh axes.
Does not import jax."""

from __future__ import annotations

# Axis of the mesh -> what its devices share out, for docs/configuration.md.
DESCRIPTIONS = {
    "data": "copies of the weights, each for a part of the batch",
    "fsdp": "parts into which weights, gradients and moments are cut; they split the batch too",
    "tensor": "parts into which heads and feed-forward layers are cut",
    "expert": "parts into which the experts are spread",
    "context": "parts into which sequences are cut",
}
AXES = tuple(DESCRIPTIONS)

# Axes of other frameworks that exist here with one device only, and their replacement.
UNUSED: dict[str, str] = {
    "diloco": "a run has no copies that drift apart; use data",
    "stage": "layers are not cut into pipeline stages; use fsdp",
    "fsdp_transpose": "weights are cut along one dimension; use fsdp",
    "context_usp_ulysses": "one way of attention at a time; use context, with "
    "model.context_parallel",
    "context_autoregressive": "caches are cut by slots and heads; use data or tensor",
    "tensor_sequence": "use tensor, and context for sequences",
    "autoregressive": "rollouts use the axes of training; use data or tensor",
}

# Logical axis of a weight or activation -> mesh axes in order of preference. An axis that is
# already used or that does not divide the dimension is dropped.
DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "embed": ("fsdp", "context", "expert"),
    "embed_vocab": ("fsdp", "context", "expert"),
    "embed_moe": ("fsdp", "context"),
    "q_lora": ("fsdp", "context", "expert"),
    "kv_lora": ("fsdp", "context", "expert"),
    "mlp": ("tensor",),
    "mlp_moe": ("tensor",),
    "heads": ("tensor",),
    "q_heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
    "exp": ("expert",),
    "engram_dim": ("tensor",),
    "engram_row": ("fsdp", "context", "expert", "tensor"),
    "cache_batch": ("data", "fsdp", "expert"),
    "cache_heads": ("tensor",),
}

# The rules that replace defaults where every device holds a slice of the width of all experts
# (`expert_parallel: hidden`).
HIDDEN_SPLIT_RULES: dict[str, tuple[str, ...]] = {
    "exp": ("fsdp", "context"),
    "mlp_moe": ("expert", "tensor"),
}

# The rules that override others while rollouts decode, under `generator.rules: stationary`. Every
# device multiplies with its own part of a weight, so that rows of activations travel between
# devices and weights do not. The outputs of a product are cut, or the inputs for the second of two
# products. `tensor` comes first, as in training, so that resharding stays among the devices that
# share it. Rows are replicated along the axes that cut products. Rows of a cache are not, and
# queries are sent to them: among devices that have the rows anyway, because the axes of a batch
# come first.
_WIDTH = ("tensor", "fsdp", "context")
STATIONARY_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "expert"),
    "cache_batch": ("data", "expert", "fsdp"),
    **dict.fromkeys(("embed", "embed_vocab", "embed_moe", "q_lora", "kv_lora"), ()),
    **dict.fromkeys(
        (
            "mlp",
            "mlp_moe",
            "heads",
            "q_heads",
            "kv_heads",
            "q_lora_up_proj",
            "kv_lora_up_proj",
            "vocab",
        ),
        _WIDTH,
    ),
}

# Logical axes that are replicated unless a rule says otherwise.
REPLICATED = ("norm", "kv", "kv_head_dim", "q_lora_up_proj", "kv_lora_up_proj")
