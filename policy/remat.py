"""Rematerialisation: which intermediate values of a layer are saved for the backward pass, and
where; the others are computed again.

Values have names (`checkpoint_name` in the layers); a policy puts some of them in device memory and
some in host memory. The input of each repeat of a stack is saved as well, for all else is computed
from it. "none" goes by operations instead of names (`checkpointed`). Free of jax at import, so that
a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Memory = Literal["device", "offload", "remat"]

# Name of a value -> description. B rows, T tokens, E hidden, H and K query and key-value heads, D
# their dimension (V of values), r and c latent ranks, Y dimension of the rotated part, F width of a
# feed-forward. An expert's row counts as a token of its own: k T of them, and padding.
TENSORS = {
    "decoder_layer_input": "input of each layer [B, T, E]",
    "query_wa_proj": "latent attention: query latent before its norm [B, T, r]",
    "mla_q": "latent attention: query latent after its norm",
    "kv_wa_proj": "latent attention: key-value latent before its norm, and the rotated key [B, T, "
    "c + Y]",
    "mla_kv": "key-value latent after its norm [B, T, c]",
    "query_proj": "queries, normed and rotated [B, H, T, D]; delta net: before the convolution; "
    "short convolution: c",
    "key_proj": "keys, normed and rotated [B, K, T, D]; latent attention: expanded, H heads",
    "value_proj": "values [B, K, T, V]; latent attention: expanded, H heads",
    "context": "output of attention or the delta rule, before any gate or norm [B, H, T, V]",
    "attention_out": "input of the output projection [B, H, T, V]",
    "out_proj": "output of the mixer [B, T, E]",
    "mlpwi_0": "feed-forward: gate, or the only input projection if there is no gate, before the "
    "activation [B, T, F]",
    "mlpwi_1": "feed-forward: up projection [B, T, F]",
    "mlpwo": "feed-forward: output of the down projection [B, T, E]",
    "quantization": "operands of quantised products",
}

_QKV = ("query_proj", "key_proj", "value_proj")
_MINIMAL = (*_QKV, "mla_q", "mla_kv", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")


@dataclass(frozen=True)
class Saved:
    """Names of the values that are saved in `device` memory and in `host` memory, from which the
    backward pass fetches them."""

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()


POLICIES = {
    "full": Saved(),
    "minimal": Saved(_MINIMAL),
    "minimal_with_context": Saved((*_MINIMAL, "context")),
    "minimal_flash": Saved((*_MINIMAL, "context")),
    "minimal_with_quantization": Saved((*_MINIMAL, "quantization")),
    "minimal_with_context_and_quantization": Saved((*_MINIMAL, "context", "quantization")),
    "save_dot_with_context_except_mlp": Saved((*_QKV, "context", "out_proj")),
    "save_dot_except_mlpwi": Saved((*_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": Saved((*_QKV, "out_proj")),
    "save_qkv_proj": Saved(_QKV),
    "save_out_proj": Saved(("out_proj",)),
    "qkv_proj_offloaded": Saved(host=_QKV),
    "minimal_offloaded": Saved(host=_MINIMAL),
}
NAMES = ("none", *POLICIES, "custom")


def saved(policy: str, tensors: tuple[tuple[str, str], ...] = ()) -> Saved:
    """Returns the values that `policy` saves. "custom" saves `tensors`, pairs (name, memory), and
    the input of every layer on the device unless `tensors` says otherwise; the other policies take
    no tensors.

    Raises ValueError for an unknown policy, tensor or memory, and for tensors with a policy other
    than "custom".
    """
    if policy not in POLICIES and policy != "custom":
        raise ValueError(f"remat: unknown policy {policy!r}; choose one of {', '.join(NAMES)}")
    if policy != "custom":
        if tensors:
            raise ValueError(f"remat: {policy} takes no tensors; use `custom` to choose them")
        return POLICIES[policy]
    places = {"decoder_layer_input": "device"} | dict(tensors)
    for name, memory in places.items():
        if name not in TENSORS:
            raise ValueError(f"remat: unknown tensor {name!r}; choose among {', '.join(TENSORS)}")
        if memory not in ("device", "offload", "remat"):
            raise ValueError(f"remat: {name}: {memory!r} must be device, offload or remat")
    return Saved(
        device=tuple(name for name, memory in places.items() if memory == "device"),
        host=tuple(name for name, memory in places.items() if memory == "offload"),
    )


# Operations on single numbers, and rearrangements: `none` computes their results again, mostly as
# part of the operation that reads them. Saving them too would cost more memory traffic.
_ELEMENTWISE = """
abs add add_any and ceil clamp convert_element_type cos copy div eq erf erf_inv exp exp2 expm1 floor
ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow reduce_precision
rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square
sub tanh xor
"""
_REARRANGING = """
bitcast_convert_type broadcast_in_dim concatenate expand_dims iota layout_constraint pad reshape
reshard rev sharding_constraint slice split squeeze stop_gradient transpose
"""
_RECOMPUTED = frozenset((_ELEMENTWISE + _REARRANGING).split())


def _costs_more_than_memory(primitive: Any, *_: Any, **params: Any) -> bool:
    """The policy of `none`, in jax's form: tells whether the result of an operation is saved.

    Of named values "context" is, since jax saves no result of a loop without a name, and "adapted",
    the sum of a product and that of its adapter (policy/ops/adapted.py), so that the two are not
    saved in its place.
    """
    if primitive.name == "name":
        return params["name"] in ("context", "adapted")
    return primitive.name not in _RECOMPUTED


def checkpointed(
    function: Callable, policy: str, tensors: tuple[tuple[str, str], ...] = (), *, scanned: bool
) -> Callable:
    """Wraps `function` so that its backward pass computes everything again except the values that
    `policy` saves, with the `tensors` of "custom".

    "none" saves the results of products, reductions, kernels and loops that the backward pass
    reads, and computes only what follows from them number by number: masks, casts, activations,
    norms, rotations. Outside of a loop it leaves the choice to the compiler.

    `scanned`: `function` is the body of a scan, whose loop already keeps the compiler from merging
    the second computation with the first.
    """
    import jax

    if policy == "none":
        if not scanned:
            return function
        return jax.checkpoint(function, policy=_costs_more_than_memory, prevent_cse=False)
    kept = saved(policy, tensors)
    policies = jax.checkpoint_policies
    if kept.host:
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept.device,
            names_which_can_be_offloaded=kept.host,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        rule = policies.save_only_these_names(*kept.device)
    return jax.checkpoint(function, policy=rule, prevent_cse=not scanned)
