"""Generates greedily with one dense Qwen3-shaped model in one jitted program, as a careful user
writes it by hand.

benchmarks/generate.py measures the engine of Duet against it: requests, slots, stops and
log-probabilities should cost nothing.

B rows, P prompt tokens, N new tokens, T tokens of a call, C cache length, E hidden, H query heads,
K key-value heads, D head dimension, I width of the feed-forward, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


class PlainLoop:
    """`generate(prompts int[B, P]) -> int[B, N]` with the weights of a Duet model of
    benchmarks/models.py: float32, layers unrolled, projections that read the same input fused,
    heads before tokens in the cache. Weights are arguments of the program, one array for each fused
    projection of each layer."""

    def __init__(self, model, spec: dict, new_tokens: int):
        """Takes `spec`: keys of a Hugging Face configuration, as in benchmarks/models.py."""
        self._spec = spec
        self._new = new_tokens
        self._weights = _weights(
            {path: np.asarray(array) for path, array in model.params.items()}, spec
        )
        self._program = jax.jit(self._generate)

    def generate(self, prompts: np.ndarray) -> np.ndarray:
        return np.asarray(self._program(self._weights, jnp.asarray(prompts, jnp.int32)))

    def _generate(self, weights, prompts_BP):
        B, P = prompts_BP.shape
        spec = self._spec
        C = P + self._new
        empty = jnp.zeros((B, spec["num_key_value_heads"], C, spec["head_dim"]))
        cache = [(empty, empty) for _ in weights["layers"]]
        last_B, cache = _forward(weights, prompts_BP, cache, 0, spec)

        def one(i, state):
            made_BN, last_B, cache = state
            made_BN = jax.lax.dynamic_update_slice(made_BN, last_B[:, None], (0, i))
            return made_BN, *_forward(weights, last_B[:, None], cache, P + i, spec)

        made_BN = jnp.zeros((B, self._new), jnp.int32)
        made_BN, last_B, _ = jax.lax.fori_loop(0, self._new - 1, one, (made_BN, last_B, cache))
        return made_BN.at[:, -1].set(last_B)


def _weights(params: dict[str, np.ndarray], spec: dict) -> dict:
    """Returns one array for each product of each layer."""

    def layer(r: int) -> dict:
        w = {
            path.removeprefix("stacks.0.layers.0."): array[r]
            for path, array in params.items()
            if path.startswith("stacks.")
        }
        E = spec["hidden_size"]
        qkv = np.concatenate([w[f"mixer.{name}_proj"].reshape(E, -1) for name in "qkv"], axis=1)
        gate_up = np.concatenate([w["feed_forward.gate_proj"], w["feed_forward.up_proj"]], axis=1)
        return {
            "norm": w["input_layernorm.weight"],
            "qkv": qkv,
            "q_norm": w["mixer.q_norm.weight"],
            "k_norm": w["mixer.k_norm.weight"],
            "o": w["mixer.o_proj"].reshape(-1, E),
            "feed_norm": w["pre_feedforward_layernorm.weight"],
            "gate_up": gate_up,
            "down": w["feed_forward.down_proj"],
        }

    layers = [layer(r) for r in range(spec["num_hidden_layers"])]
    stacked = {
        "embed": params["embed_tokens"],
        "norm": params["norm.weight"],
        "head": params["lm_head"].T.copy(),
        "layers": layers,
    }
    return jax.tree.map(jnp.asarray, stacked)


def _forward(weights, tokens_BT, cache, start, spec: dict) -> tuple[jax.Array, list]:
    """Returns (the likeliest token after the last one int32[B], cache) for tokens at positions
    start, start + 1, ..."""
    norm = partial(_norm, eps=spec.get("rms_norm_eps", 1e-6))
    B, T = tokens_BT.shape
    H = spec["num_attention_heads"]
    K = spec["num_key_value_heads"]
    D = spec["head_dim"]
    positions = start + jnp.arange(T)
    angles = positions[:, None] * spec["rope_parameters"]["rope_theta"] ** (
        -jnp.arange(0, D, 2) / D
    )
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    x = weights["embed"][tokens_BT]
    new = []
    for w, (keys, values) in zip(weights["layers"], cache, strict=True):
        qkv = (norm(x, w["norm"]) @ w["qkv"]).reshape(B, T, H + 2 * K, D).swapaxes(1, 2)
        q, k, v = jnp.split(qkv, [H, H + K], axis=1)
        q = _rotated(norm(q, w["q_norm"]), cos, sin)
        k = _rotated(norm(k, w["k_norm"]), cos, sin)
        keys, values = (
            jax.lax.dynamic_update_slice(old, a, (0, 0, start, 0))
            for old, a in ((keys, k), (values, v))
        )
        q = q.reshape(B, K, H // K, T, D) / D**0.5
        scores = jnp.einsum("bkgtd,bkcd->bkgtc", q, keys)
        scores = jnp.where(jnp.arange(keys.shape[2]) <= positions[:, None], scores, -jnp.inf)
        out = jnp.einsum("bkgtc,bkcd->bkgtd", jax.nn.softmax(scores), values).reshape(B, H, T, D)
        x = x + out.swapaxes(1, 2).reshape(B, T, H * D) @ w["o"]
        gate, up = jnp.split(norm(x, w["feed_norm"]) @ w["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w["down"]
        new.append((keys, values))
    logits = norm(x[:, -1], weights["norm"]) @ weights["head"]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), new


def _norm(x, weight, eps: float):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight


def _rotated(x, cos, sin):
    u, v = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
