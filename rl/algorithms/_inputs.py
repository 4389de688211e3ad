"""Defines the inputs of a loss and sums over their sequences.

Shapes: N rows of T tokens, P prompts; S sequence numbers in a row: 1, or T + 1 (0 is padding) where
rows are packed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The arrays of a mini-batch, or of one of its micro-batches, for `algorithm.loss`. An absent
    array is None.

    Where `mask` is 0, arrays with a value per token may hold any value, including NaN. `segments`
    and `prompt` are valid everywhere. The class is a jax pytree; `max_length` is static.
    """

    mask: jax.Array  # [N,T] 1 on trained tokens: not on prompts, padding and tool output
    # float32[N,T] log-probability of token t under the policy, with gradient
    logp: jax.Array | None = None
    old_logp: jax.Array | None = None  # before the first update of this batch; None: equal to logp
    sampler_logp: jax.Array | None = None  # from the generator
    ref_logp: jax.Array | None = None  # from the reference model
    entropy: jax.Array | None = None  # entropy of the distribution of token t, with gradient
    advantages: jax.Array | None = None  # [N] or [N,T]
    # [N,T] output of a trained reward model for the text up to token t, with gradient
    scores: jax.Array | None = None
    # from the teacher's distribution of token t, with gradient, at one temperature
    divergence: jax.Array | None = None
    # distance from the teacher's layers at the state that predicts t, with gradient
    features: jax.Array | None = None
    # [N,T] further numbers of that comparison, for metrics, by name
    teacher: dict[str, jax.Array] | None = None
    # score difference that a pair should have, read at the last token of an answer
    margin: jax.Array | None = None
    extra: dict[str, jax.Array] | None = None  # [N,T] further numbers of the data, by name
    # int[N,T] in 0..T: sequence within the row, 0 is padding; None: one a row
    segments: jax.Array | None = None
    # int[N], or [N,T] for packed rows: index of the group; -1: padding
    prompt: jax.Array | None = None
    full_mask: jax.Array | None = None  # [N,T] the mask with dropped tokens that count in no mean
    num_full_tokens: jax.Array | None = None  # scalar: sum of full_mask over the mini-batch
    # scalar: sum of mask over the mini-batch; None: counted here
    num_tokens: jax.Array | None = None
    num_sequences: jax.Array | None = None  # scalar
    num_prompts: jax.Array | None = None  # scalar
    chosen_tokens: jax.Array | None = None  # scalar: sum of mask over the chosen answers of pairs
    # [N] or [N,T]: sum of mask over all completions of the prompt
    prompt_tokens: jax.Array | None = None
    # [N] or [N,T]: 1 on completions that are correct, for a loss that imitates them
    correct: jax.Array | None = None
    # scalar: sum of mask over the correct completions of the mini-batch
    num_correct: jax.Array | None = None
    # scalar: mean sampler-correction weight over the tokens of the mini-batch
    mean_weight: jax.Array | None = None
    # scalar: entropy quantile of the batch, for `top_entropy`
    entropy_threshold: jax.Array | None = None
    # scalars that the algorithm adapts during training
    adaptive_coefs: dict[str, jax.Array] | None = None
    # largest completion, tokens
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


class Sequences:
    """Sums over each sequence of a batch. A row is one sequence or several packed sequences."""

    def __init__(self, inputs: PolicyInputs):
        self.mask_NT = jnp.asarray(inputs.mask) != 0
        self.segments_NT = None if inputs.segments is None else jnp.asarray(inputs.segments)
        if self.segments_NT is not None:
            present_NS = self.packed_sum(jnp.ones(self.mask_NT.shape, jnp.float32)) > 0
            self.exists_NS = present_NS.at[:, 0].set(False)
        elif inputs.prompt is not None:
            self.exists_NS = (jnp.asarray(inputs.prompt) >= 0)[:, None]
        else:
            self.exists_NS = jnp.ones((self.mask_NT.shape[0], 1), bool)
        self.length_NS = self.sum(jnp.ones(self.mask_NT.shape, jnp.float32))

    def packed_sum(self, values_NT: jax.Array) -> jax.Array:
        """Returns the sum of all tokens of each sequence of packed rows, [N,S]."""
        num_segments = values_NT.shape[1] + 1
        return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=num_segments))(
            values_NT, self.segments_NT
        )

    def sum(self, values_NT: jax.Array) -> jax.Array:
        """Returns the sum of the masked tokens of each sequence, [N,S]."""
        values_NT = jnp.where(self.mask_NT, values_NT, 0.0)
        if self.segments_NT is None:
            return values_NT.sum(1, keepdims=True)
        return self.packed_sum(values_NT)

    def mean(self, values_NT: jax.Array) -> jax.Array:
        """Returns the mean over the masked tokens of each sequence, [N,S]; 0 without such a
        token."""
        return self.sum(values_NT) / jnp.maximum(self.length_NS, 1.0)

    def max(self, values_NT: jax.Array) -> jax.Array:
        """Returns the largest value, at least 0, of the masked tokens of each sequence, [N,S]; 0
        without any."""
        values_NT = jnp.where(self.mask_NT, values_NT, 0.0)
        if self.segments_NT is None:
            return values_NT.max(1, keepdims=True)
        num_segments = values_NT.shape[1] + 1
        largest = partial(jax.ops.segment_max, num_segments=num_segments)
        return jnp.maximum(jax.vmap(largest)(values_NT, self.segments_NT), 0.0)

    def to_tokens(self, values_NS: jax.Array) -> jax.Array:
        """Returns [N,T]: at each token the value of its sequence."""
        if self.segments_NT is None:
            return jnp.broadcast_to(values_NS, self.mask_NT.shape)
        return jnp.take_along_axis(values_NS, self.segments_NT, axis=1)


def with_totals(
    inputs: PolicyInputs,
    by_prompt: bool = False,
    count_empty: bool = True,
    top_entropy: float | None = None,
) -> PolicyInputs:
    """Returns `inputs` with the absent totals counted from its own rows, as if they were the
    mini-batch.

    count_empty: sequences and prompts without a token in the mask count too.
    """
    sequences = Sequences(inputs)
    totals = {}
    if inputs.num_tokens is None:
        totals["num_tokens"] = sequences.length_NS.sum()
    if inputs.num_sequences is None:
        counted_NS = sequences.exists_NS if count_empty else sequences.length_NS > 0
        totals["num_sequences"] = counted_NS.sum().astype(jnp.float32)
    if inputs.correct is not None and inputs.num_correct is None:
        totals["num_correct"] = (
            (sequences.mask_NT & correct_tokens(inputs)).sum().astype(jnp.float32)
        )
    if by_prompt and (inputs.prompt_tokens is None or inputs.num_prompts is None):
        totals |= _prompt_totals(inputs, sequences, count_empty)
    if top_entropy is not None and inputs.entropy_threshold is None and inputs.entropy is not None:
        entropy_NT = jnp.where(sequences.mask_NT, jax.lax.stop_gradient(inputs.entropy), jnp.nan)
        totals["entropy_threshold"] = jnp.nanquantile(entropy_NT, 1.0 - top_entropy)
    return dataclasses.replace(inputs, **totals)


def correct_tokens(inputs: PolicyInputs) -> jax.Array:
    """Returns `correct` as bool[N,T], or bool[N,1] if it has one value per row."""
    correct = jnp.asarray(inputs.correct) != 0
    return correct[:, None] if correct.ndim == 1 else correct


def _prompt_totals(inputs: PolicyInputs, sequences: Sequences, count_empty: bool) -> dict:
    if inputs.prompt is None:
        raise ValueError(
            "aggregation 'prompt' needs PolicyInputs.prompt, or prompt_tokens and num_prompts"
        )
    prompt_N = jnp.asarray(inputs.prompt)
    if prompt_N.ndim == 2:
        return _packed_prompt_totals(prompt_N, sequences, count_empty)
    same_NN = ((prompt_N[:, None] == prompt_N[None, :]) & (prompt_N >= 0)[:, None]).astype(
        jnp.float32
    )
    tokens_N = same_NN @ sequences.length_NS.sum(1)
    counted_N = (prompt_N >= 0) if count_empty else tokens_N > 0
    prompts = jnp.where(counted_N, 1.0 / jnp.maximum(same_NN.sum(1), 1.0), 0.0).sum()
    return {"prompt_tokens": tokens_N, "num_prompts": prompts}


def _packed_prompt_totals(prompt_NT: jax.Array, sequences: Sequences, count_empty: bool) -> dict:
    """Returns the same for packed rows. Every prompt number is smaller than the number of
    tokens."""
    real_NT = prompt_NT >= 0
    num_segments = prompt_NT.size + 1
    numbers = jnp.where(real_NT, prompt_NT, prompt_NT.size).reshape(-1)

    def by_prompt(counted_NT):
        counted = (counted_NT & real_NT).astype(jnp.float32).reshape(-1)
        return jax.ops.segment_sum(counted, numbers, num_segments=num_segments)

    tokens_P = by_prompt(sequences.mask_NT)
    counted_P = by_prompt(real_NT) if count_empty else tokens_P
    return {
        "prompt_tokens": tokens_P[numbers].reshape(prompt_NT.shape),
        "num_prompts": (counted_P > 0).sum().astype(jnp.float32),
    }
