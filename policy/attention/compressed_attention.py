"""The attention of DeepSeek V4 (transformers' DeepseekV4Attention): to the last tokens, and to entries that stand for a
block of tokens each.

E hidden, H heads, D head dimension, r rank of the query latent, G groups of heads, J = H D / G, L rank of a group.
"""

from __future__ import annotations

from flax import nnx

from policy.config import CompressedAttention, Compression, DecoderConfig, EntryIndexer, Norm
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight, zeros


class Compressor(nnx.Module):
    """Weights of the entries: kv_proj, gate_proj [E, W], position_bias [rate, W], kv_norm [D]. W = 2 D with an
    overlap, [part in the next block | part in its own], else D."""

    def __init__(self, dim: int, spec: Compression, norm: Norm, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, W, init = config.hidden_size, dim * (1 + spec.overlap), normal(config.initializer_range)
        self.kv_proj = weight(rngs, (E, W), ("embed", "kv"), init)
        self.gate_proj = weight(rngs, (E, W), ("embed", "kv"), init)
        self.position_bias = weight(rngs, (spec.rate, W), (None, "kv"), zeros)
        self.kv_norm = RMSNorm(dim, norm, rngs)


class CompressedEntryIndexer(nnx.Module):
    """Weights: compressor, q_b_proj [r, H, D], weights_proj [E, H] of its own heads."""

    def __init__(self, spec: EntryIndexer, attention: CompressedAttention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        assert attention.compression is not None
        E, H, D, init = config.hidden_size, spec.heads, spec.head_dim, normal(config.initializer_range)
        self.compressor = Compressor(D, attention.compression, attention.norm, config, rngs)
        self.q_b_proj = weight(rngs, (attention.q_lora_rank, H, D), ("q_lora", "q_heads", "kv"), init)
        self.weights_proj = weight(rngs, (E, H), ("embed", "q_heads"), init)


class CompressedEntriesAttention(nnx.Module):
    """Weights: q_a_proj [E, r], q_a_norm [r], q_b_proj [r, H, D], kv_proj [E, D], kv_norm [D], sinks [H], o_a_proj
    [G, J, L], o_b_proj [G, L, E]; compressor and indexer where the layer has them."""

    def __init__(self, spec: CompressedAttention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, H, D, r = config.hidden_size, spec.heads, spec.head_dim, spec.q_lora_rank
        G, L, init = spec.o_groups, spec.o_lora_rank, normal(config.initializer_range)
        self.q_a_proj = weight(rngs, (E, r), ("embed", "q_lora_up_proj"), init, inputs=(0,))
        self.q_a_norm = RMSNorm(r, spec.norm, rngs)
        self.q_b_proj = weight(rngs, (r, H, D), ("q_lora", "q_heads", "kv"), init, inputs=(0,))
        self.kv_proj = weight(rngs, (E, D), ("embed", "kv"), init, inputs=(0,))
        self.kv_norm = RMSNorm(D, spec.norm, rngs)
        self.sinks = weight(rngs, (H,), ("q_heads",), init)
        self.o_a_proj = weight(rngs, (G, H * D // G, L), ("heads", "kv", None), init)
        self.o_b_proj = weight(rngs, (G, L, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.compression is not None:
            self.compressor = Compressor(D, spec.compression, spec.norm, config, rngs)
            if spec.compression.indexer is not None:
                self.indexer = CompressedEntryIndexer(spec.compression.indexer, spec, config, rngs)
