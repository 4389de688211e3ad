"""The decoder: embedding, stacks of layers, final norm. Training, prefill and decoding all use this
one forward pass.

B rows, T tokens, E hidden, V vocabulary, R repeats of a stack.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from policy import towers
from policy.attention.sequence_shards import Order, along_length
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig, LearnedPositions, Runtime, Stack
from policy.intermediates import Aux, LayerAux
from policy.layers import batch_split, media_rows, shared_index, shared_keys
from policy.layers.layer import Layer
from policy.layers.layer_embeddings import LayerEmbeddings
from policy.layers.prediction_module import PredictionModule
from policy.layers.residual import streams
from policy.mesh.explicit import in_explicit_mode, with_explicit_axes
from policy.mesh.sharding import Layout, axes_of, constrain, decoded, row_major, sharded_lookup
from policy.ops.adapted import Adapted
from policy.ops.dropout import drop
from policy.ops.host_memory import fetch_layer, lies_on_host
from policy.ops.norms import norm
from policy.ops.parameter import normal, split_module, stacked, weight
from policy.ops.rope import materialized, rotation, sinusoids
from policy.ops.stacked import keep_stacked
from policy.remat import checkpointed

HiddenT = TypeVar("HiddenT", bound=batch_split.Hidden)


class StackOutput(NamedTuple, Generic[HiddenT]):
    """What a stack of layers computes, or a repeat of one: the residual stream after it, the parts
    of its cache, and the LayerAux of each layer of the pattern, a stack's with arrays [R, ...]."""

    hidden: HiddenT
    cache: tuple | None
    layers: tuple[LayerAux, ...]


class UnnormedOutput(NamedTuple):
    """What a decoder computes before its final norm: states [B, T, E], the streams of
    hyper-connections reduced, its cache, and the LayerAux of each path (policy/intermediates.py).
    """

    hidden: jax.Array
    cache: tuple | None
    layers: dict[str, LayerAux]


class DecoderOutput(NamedTuple):
    """What a decoder computes: the states after the final norm [B, T, E], the cache with the
    entries of these tokens, None without a cache, and its other outputs."""

    hidden: jax.Array
    cache: tuple | None
    aux: Aux


class LayerStack(nnx.Module):
    """`repeats` copies of a pattern of layers, their weights stacked along axis 0."""

    def __init__(self, stack: Stack, first: int, config: DecoderConfig, rngs: nnx.Rngs):
        """Creates the weights; `first` is the number of the stack's first layer."""
        self.first = first
        self.repeats = stack.repeats
        following = config.layers[first + len(stack.pattern) * stack.repeats :][:1]
        self.hands_on_index = any(spec.shares_index for spec in following)
        self.layers = nnx.List(
            [stacked(partial(Layer, spec, config), rngs, stack.repeats) for spec in stack.pattern]
        )

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: tuple | None, runtime: Runtime
    ) -> StackOutput[jax.Array]:
        """Computes all repeats. `step.routes` has one entry for each layer of the pattern, which
        may be None."""
        graph, weights = nnx.split(self.layers)
        routes = step.routes
        embeddings = self._own_embeddings(step)
        step = replace(step, routes=None, layer_embeddings=None)
        split = cache is None and batch_split.applies(self.layers, x_BTE.shape, runtime)
        x = batch_split.split(x_BTE, runtime) if split else x_BTE

        def repeat(x, part, repeat_weights, embeddings, r, index):
            """Computes repeat number `r` of the pattern. `part` holds the cache arrays of one or
            all repeats; this repeat's are at `index`. `embeddings`: of each layer of the pattern.
            """
            outputs = []
            arrays = []
            pattern_step = step
            for i, layer in enumerate(nnx.merge(graph, fetch_layer(repeat_weights, runtime))):
                view = None if part is None else LayerCache.of(part[i], index, step, runtime.layout)
                layer_step = pattern_step
                if step.dropout is not None:
                    layer_step = layer_step.for_layer(self.first + r * len(self.layers) + i)
                layer_step = _decode_rotations(layer_step, runtime)
                if routes[i] is not None:
                    layer_step = replace(
                        layer_step,
                        routes=jax.lax.dynamic_index_in_dim(routes[i], r, axis=2, keepdims=False),
                    )
                if embeddings is not None:
                    layer_step = replace(layer_step, layer_embeddings=embeddings[i])
                x = jax.tree.map(lambda a: checkpoint_name(a, "decoder_layer_input"), x)
                if split:
                    x, aux = batch_split.run(layer, x, layer_step, runtime)
                else:
                    x, view, aux = layer(x, layer_step, view, runtime)
                if step.media is not None and layer.spec.deepstack:
                    number = self.first + r * len(self.layers) + i
                    x = media_rows.add_deep(cast(jax.Array, x), step.media, number, runtime.layout)
                x = x if cache is not None else jax.tree.map(lambda a: along_length(a, runtime), x)
                pattern_step = shared_index.after_layer(layer.spec, pattern_step, aux)
                if "selection" not in runtime.record and not self.hands_on_index:
                    aux = replace(aux, selection=None)
                outputs.append(aux)
                arrays.append(None if view is None else view.arrays)
            return StackOutput(x, None if part is None else tuple(arrays), tuple(outputs))

        if cache is None:
            repeat = checkpointed(
                repeat, runtime.remat, runtime.remat_tensors, scanned=runtime.scan
            )
        unrolled = (
            not runtime.scan if cache is None else len(cache) == self.repeats
        )  # a scanned cache has one part
        if unrolled:
            output = self._unrolled(x, cache, (weights, embeddings), repeat)
            return StackOutput(batch_split.merge(output.hidden), output.cache, output.layers)

        decodes = (
            step.positions.shape[1] == 1
            and runtime.layout is not None
            and runtime.layout.platform == "tpu"
        )

        def body(carry, xs):
            x, part = carry
            repeat_weights, embeddings, r = xs
            if cache is not None:
                repeat_weights = _as_stored(repeat_weights, runtime)
                if decodes:
                    repeat_weights = keep_stacked(repeat_weights, weights, r, _is_expert)
            output = repeat(x, part, repeat_weights, embeddings, r, r)
            return (output.hidden, output.cache), output.layers

        carry = (x, None if cache is None else cache[0])
        (x, part), layers = jax.lax.scan(
            body, carry, (weights, embeddings, jnp.arange(self.repeats))
        )
        parts = None if cache is None else (part,)
        return StackOutput(batch_split.merge(x), parts, layers)

    def _own_embeddings(self, step: Step) -> tuple[jax.Array, ...] | None:
        """Returns the embeddings for each layer of the pattern, [R, B, T, n]."""
        if step.layer_embeddings is None:
            return None
        period = len(self.layers)
        end = self.first + self.repeats * period
        return tuple(step.layer_embeddings[self.first + i : end : period] for i in range(period))

    def _unrolled(
        self, x: batch_split.Hidden, cache: tuple | None, inputs, repeat
    ) -> StackOutput[batch_split.Hidden]:
        """Computes the repeats one after the other, each with a cache part of its own. With a cache
        they are traced once; in training each is traced, since remat policies do not see names
        inside a nested program."""
        parts = []
        outputs = []
        repeat = repeat if cache is None else jax.jit(repeat, static_argnames="index")
        for r in range(self.repeats):
            own = jax.tree.map(lambda a, r=r: a[r], inputs)
            part = None if cache is None else cache[r]
            x, part, layers = repeat(x, part, *own, r, index=0)
            parts.append(part)
            outputs.append(layers)
        stacked_outputs = jax.tree.map(lambda *a: jnp.stack(a), *outputs)
        return StackOutput(x, None if cache is None else tuple(parts), stacked_outputs)


def _decode_rotations(step: Step, runtime: Runtime) -> Step:
    """Constrains the rotary tables of `step` to the rows of the activations (sharding.decoded). It
    runs before the loop over layers and inside it, so that the devices exchange the tables once."""
    return replace(
        step, rotations=jax.tree.map(lambda a: decoded(a, step, runtime.layout), step.rotations)
    )


def _as_stored(weights, runtime: Runtime):
    """Pins the weights of one repeat to the memory layout in which they are stored. Otherwise a TPU
    begins each loop of decoding steps with a copy of the query, key and value projections of all
    layers, ordered by head: a tenth of llama3.1-8b. A device may have a narrow part of the last
    dimension; then the one before fills the lanes, since the 48 of an expert of Qwen's would take
    128. Other arrays that do not fill the tiles of 8 x 128 are left to the compiler, which stores
    them in an order of its own."""
    layout = runtime.layout
    if layout is None or layout.platform != "tpu":
        return weights

    def pinned(array, axes):
        if array.ndim < 2 or array.shape[-2] % 8:
            return array
        cut = (
            array.shape
            if array.ndim != len(axes)
            else layout.sharding(axes, array.shape).shard_shape(array.shape)
        )
        if cut[-1] % 128 == 0:
            return row_major(array, layout)
        if cut[-2] % 128 == 0 and cut[-1] % 8 == 0:
            *others, rows, columns = range(array.ndim)
            return with_layout_constraint(
                array, MemoryLayout(major_to_minor=(*others, columns, rows))
            )
        return array

    def of_variable(variable):
        axes = (variable.get_metadata("out_sharding") or ())[1:]
        value = variable.get_value()
        if isinstance(value, Adapted):
            return variable.replace(replace(value, base=pinned(value.base, axes)))
        return jax.tree.map(lambda array: pinned(array, axes), variable)

    return jax.tree.map(of_variable, weights, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _is_expert(variable: nnx.Variable) -> bool:
    """Tells whether a stacked variable holds weights of experts in device memory, floats [R, X, E,
    F]."""
    axes = variable.get_metadata("out_sharding") or ()
    value = variable.get_value()
    value = value.base if isinstance(value, Adapted) else value
    return (
        isinstance(value, jax.Array)
        and len(axes) == 4
        and axes[1] == "exp"
        and not lies_on_host(value)
    )


def _embedded(table_VE, tokens_BT: jax.Array, runtime: Runtime) -> jax.Array:
    """Returns table[tokens] in the dtype of the activations, with what an adapter adds to it."""
    if not isinstance(table_VE, Adapted):
        return _look_up(table_VE, tokens_BT, runtime)
    rows_BTE = _look_up(table_VE.base, tokens_BT, runtime)
    low_BTr = table_VE.a[tokens_BT].astype(rows_BTE.dtype) * table_VE.scale
    rows_BTE = rows_BTE + low_BTr @ table_VE.b.astype(rows_BTE.dtype)
    if table_VE.dora_scale is None:
        return rows_BTE
    return rows_BTE * table_VE.dora_scale.astype(rows_BTE.dtype)


def _look_up(table_VE, tokens_BT: jax.Array, runtime: Runtime) -> jax.Array:
    """Returns table[tokens] in the dtype of the activations. If the table is sharded along E, the
    devices that share it read their parts of the rows of all their tokens and exchange them: 16 MiB
    for 2,048 tokens of llama3.1-8b per device. Otherwise the partitioner would gather the full
    table and sum a float32 gradient of its size, 2 GiB."""
    layout = runtime.layout
    if in_explicit_mode():
        return _read_rows(table_VE, ("vocab", "embed_vocab"), tokens_BT, layout).astype(
            runtime.dtype
        )
    if layout is None or layout.mesh.size == 1:
        return table_VE[tokens_BT].astype(runtime.dtype)
    vocab_axes, width_axes = layout.spec(("vocab", "embed_vocab"), table_VE.shape)
    if width_axes is not None:
        spec = _without_axes(tokens_BT, width_axes, layout)
        rows_BTE = table_VE[_constrain_to(tokens_BT, spec, layout)].astype(runtime.dtype)
        return constrain(
            _constrain_to(rows_BTE, PartitionSpec(*spec, width_axes), layout),
            ("batch", "length", None),
            layout,
        )
    if vocab_axes is not None and layout.decodes:
        rows_BTE = sharded_lookup(table_VE, tokens_BT, layout).astype(runtime.dtype)
    else:
        rows_BTE = table_VE[tokens_BT].astype(runtime.dtype)
    return (
        constrain(rows_BTE, ("batch", "length", None), layout)
        if layout.cache_rows_differ
        else rows_BTE
    )


def _read_rows(
    table, axes: tuple[str | None, str], index_BT: jax.Array, layout: Layout | None
) -> jax.Array:
    """Returns table[index]. In explicit mode the devices that share the table read their parts of
    the rows of all their tokens and exchange them."""
    if not in_explicit_mode():
        return table[index_BT]
    assert layout is not None
    width_axes = layout.spec(axes, table.shape)[1]
    spec = _without_axes(index_BT, width_axes, layout)
    rows_BTE = table.at[jax.reshard(index_BT, spec)].get(
        out_sharding=PartitionSpec(*spec, width_axes)
    )
    return constrain(rows_BTE, ("batch", "length", None), layout)


def _without_axes(tokens_BT: jax.Array, width_axes, layout: Layout) -> PartitionSpec:
    """Returns the sharding of tokens over the mesh axes that do not shard the width of the table,
    such as `data`. The table is replicated over these axes."""
    tokens = layout.spec(("batch", "length"), tokens_BT.shape)
    return PartitionSpec(
        *(
            tuple(axis for axis in axes_of(dim) if axis not in axes_of(width_axes)) or None
            for dim in tokens
        )
    )


def _constrain_to(x: jax.Array, spec: PartitionSpec, layout: Layout) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


class Decoder(nnx.Module):
    """Maps tokens to hidden states after the final norm, which the head (policy/heads/head.py)
    turns into logits or log-probabilities."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        axes = ("vocab", "embed_vocab")
        self.embed_tokens = weight(rngs, shape, axes, normal(config.initializer_range))
        if config.max_positions is not None:
            table = (config.max_positions, config.hidden_size)
            self.embed_positions = weight(
                rngs, table, (None, "embed_vocab"), normal(config.initializer_range)
            )
        first = list(
            accumulate((len(stack.pattern) * stack.repeats for stack in config.stacks), initial=0)
        )
        if config.layer_embedding is not None:
            self.layer_embeddings = LayerEmbeddings(config.layer_embedding, config, rngs)
        self.stacks = nnx.List(
            [
                LayerStack(stack, n, config, rngs)
                for stack, n in zip(config.stacks, first, strict=False)
            ]
        )
        self.norm = (
            norm(config.hidden_size, config.norm, rngs) if config.has_final_norm else nnx.identity
        )
        if not config.tied_head:
            self.lm_head = weight(rngs, shape, axes, normal(config.initializer_range))
        self.streams = streams(config, rngs)
        if config.multi_token_prediction is not None:
            create = partial(PredictionModule, config.multi_token_prediction, config)
            self.mtp = stacked(create, rngs, config.multi_token_prediction.depth)
        if config.image is not None:
            self.image = towers.create(config.image, config.hidden_size, rngs)
        if config.audio is not None:
            self.audio = towers.create(config.audio, config.hidden_size, rngs)

    def __call__(
        self, tokens_BT: jax.Array, step: Step, cache: tuple | None, runtime: Runtime
    ) -> DecoderOutput:
        """Runs the decoder. `cache` comes from policy.cache.cache.create; None: tokens see the
        tokens of this call only."""
        explicit = cache is None and runtime.layout is not None and runtime.layout.explicit
        forward = self._explicit if explicit else self._forward
        if (order := Order.of(step, cast(Any, cache), runtime)) is None:
            return forward(tokens_BT, step, cache, runtime)
        assert cache is None, (
            "only training splits sequences over devices, so Order.of returns None with a cache"
        )
        tokens_BT, step = order.enter(tokens_BT, step)
        output = forward(tokens_BT, step, cache, runtime)
        return DecoderOutput(order.leave(output.hidden), None, order.leave_aux(output.aux))

    def _explicit(
        self, tokens_BT: jax.Array, step: Step, cache: tuple | None, runtime: Runtime
    ) -> DecoderOutput:
        """Runs `_forward` in explicit mode. Weights are sharded by their logical axes and arrays of
        tokens by rows and length; all other shardings follow from these."""
        assert cache is None and runtime.layout is not None
        layout = runtime.layout
        arrays, decoder = split_module(self)
        variables = jax.tree.leaves(
            nnx.state(self), is_leaf=lambda node: isinstance(node, nnx.Variable)
        )

        def run(arrays, tokens_BT, step):
            output = cast(Decoder, decoder(arrays))._forward(tokens_BT, step, None, runtime)
            return output.hidden, output.aux

        def spec_of(a):
            per_token = jnp.shape(a)[:2] == tokens_BT.shape
            return (
                layout.spec(("batch", "length", *[None] * (a.ndim - 2)), a.shape)
                if per_token
                else PartitionSpec()
            )

        weight_specs = [
            layout.spec(v.get_metadata("out_sharding"), a.shape)
            for v, a in zip(variables, arrays, strict=True)
        ]
        specs = weight_specs, spec_of(tokens_BT), jax.tree.map(spec_of, step)
        hidden, aux = cast(
            Any, with_explicit_axes(run, layout.mesh, specs)(arrays, tokens_BT, step)
        )
        return DecoderOutput(hidden, None, aux)

    def _forward(
        self, tokens_BT: jax.Array, step: Step, cache: tuple | None, runtime: Runtime
    ) -> DecoderOutput:
        hidden, cache, layers = self.before_norm(tokens_BT, step, cache, runtime)
        normed = self.norm(hidden)
        spec = self.config.multi_token_prediction
        mtp_input = None
        if spec is not None:
            mtp_input = normed if spec.input == "post_norm" else hidden
        return DecoderOutput(normed, cache, Aux(layers, mtp_input))

    def before_norm(
        self, tokens_BT: jax.Array, step: Step, cache: tuple | None, runtime: Runtime
    ) -> UnnormedOutput:
        """Runs everything up to the final norm. Without a cache, call `__call__` instead if the
        mesh shards the length or is in explicit mode."""
        step = self.complete_step(tokens_BT, step, runtime)
        layout = runtime.layout
        if (
            layout is not None
            and layout.platform == "cpu"
            and not in_explicit_mode()
            and (cache is None or tokens_BT.shape[1] == 1)
        ):
            step = replace(
                step,
                rotations={
                    name: materialized(table) for name, table in (step.rotations or {}).items()
                },
            )
        step = _decode_rotations(step, runtime)
        x = self.embed(step, runtime)
        if self.config.layer_embedding is not None:
            step = replace(step, layer_embeddings=self.layer_embeddings(x, step, runtime))
        x = drop(x, step.dropout)
        x = x if self.streams is None else self.streams.expand(x)
        x = x if cache is not None else along_length(x, runtime)
        caches = []
        layers = {}
        for s, stack in enumerate(self.stacks):
            paths = [f"stacks.{s}.layers.{i}" for i in range(len(stack.layers))]
            stack_step = replace(step, routes=[(step.routes or {}).get(path) for path in paths])
            x, part, outputs = stack(x, stack_step, None if cache is None else cache[s], runtime)
            step, outputs = shared_keys.for_later_stacks(step, outputs, part, layout)
            specs = self.config.stacks[s].pattern
            recorded = "selection" in runtime.record
            step, outputs = shared_index.for_later_stacks(specs, step, outputs, recorded)
            caches.append(part)
            layers |= dict(zip(paths, outputs, strict=True))
        x = x if self.streams is None else self.streams.reduce(x)
        return UnnormedOutput(x, None if cache is None else tuple(caches), layers)

    def complete_step(self, tokens_BT: jax.Array, step: Step, runtime: Runtime) -> Step:
        """Returns `step` (of policy/modes.py) with these tokens and the tables of all rotary
        embeddings at its positions."""
        if step.media is not None:
            media_rows.check(self.config, step.media)
            tokens_BT = step.media.text_tokens(tokens_BT)
        longest = self._longest(step, runtime)
        tables = {
            str(rope): rotation(rope, step.positions, step.turns, longest)
            for rope in self.config.ropes
        }
        return replace(step, tokens=tokens_BT, rotations=tables)

    def _longest(self, step: Step, runtime: Runtime) -> int | jax.Array | None:
        """Returns the tokens of the longest sequence, by which LongRoPE chooses its factors: as the
        runtime says, else by the last position of the call that is not padding. None: the decoder
        has no LongRoPE."""
        if self.config.longrope_limit is None:
            return None
        if runtime.max_length is not None:
            return runtime.max_length
        return 1 + jnp.max(jnp.where(step.segments > 0, step.positions, -1))

    def embed(self, step: Step, runtime: Runtime) -> jax.Array:
        """Returns the embedding [B, T, E] of the step's tokens with its rows of pictures and sounds
        in their places, plus the embedding of positions if the configuration has one."""
        config = self.config
        assert step.tokens is not None
        x = _embedded(self.embed_tokens[...], step.tokens, runtime)
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        x = x if step.media is None else media_rows.place(x, step.media, runtime.layout)
        return (
            x + self._position_embedding(step.positions, runtime.layout).astype(x.dtype)
            if config.positions
            else x
        )

    def _position_embedding(self, positions_BT: jax.Array, layout: Layout | None) -> jax.Array:
        """Returns float32[B, T, E], the sum of the position tables that the configuration has."""
        total = jnp.float32(0.0)
        for table in self.config.positions:
            if isinstance(table, LearnedPositions):
                rows = _read_rows(
                    self.embed_positions[...], (None, "embed_vocab"), positions_BT, layout
                )
                total += rows.astype(jnp.float32)
            else:
                total += sinusoids(positions_BT, self.config.hidden_size)
        return total

    @property
    def head_weight(self) -> jax.Array | Adapted:
        """Returns the output projection [V, E], which is the embedding table if the head is
        tied."""
        return (self.embed_tokens if self.config.tied_head else self.lm_head)[...]
