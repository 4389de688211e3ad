"""A decoder with its weights: `policy.load` and `policy.create` return it, trainer and generator
share it.

B rows, T tokens, E hidden, V vocabulary, I ids that a filter names per token, L layers; of a tower
R items, N inputs of an item, K numbers of an input, M rows, S features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from policy import compatibility, modes
from policy.adapter_spec import DORA_SCALE, LORA_A, LORA_B, MAGNITUDE
from policy.attention import context_parallel
from policy.attention.sequence_shards import AXIS
from policy.cache.media import Media
from policy.cache.step import Step
from policy.config import DecoderConfig, Runtime
from policy.decoder import Decoder
from policy.experts import expert_parallel
from policy.heads import features, head
from policy.intermediates import Aux
from policy.layers import batch_split
from policy.mesh.sharding import Layout
from policy.ops.adapted import Adapted, DoraParts, dora_scale, dora_scales
from policy.ops.host_memory import belongs_there, fetch, in_host_memory
from policy.ops.parameter import Constant, MatrixDims, RowTable
from policy.ops.seeds import checked_seed
from policy.programs import quantized_weights
from policy.programs.quantized_weights import QuantizedWeight
from policy.programs.scoring import Scorer, documents, media_of
from policy.remat import saved

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
"""Paths of weights [V, E] that no layer has. A tied head has the path of the embedding."""


class Graph:
    """The static half of a model: the arrays that it needs and the functions on them. It holds no
    array.

    Weights are a flat dict from path ("stacks.0.layers.0.mixer.q_proj") to array, in any order.
    `matrices` has the dimensions of the weights that products read. `inputs` names those that may
    be quantised, with the dimensions that their products sum over. With `Runtime.base_weights`
    these are `quantized`: each is stored as a `qwix.QArray` (policy/programs/quantized_weights.py).
    `shapes` and `sharding` are those of floats, `abstract` those of what is stored.
    """

    def __init__(self, config: DecoderConfig, runtime: Runtime, layout: Layout):
        compatibility.check(config, replace(runtime, layout=layout))
        quantized_weights.check(replace(runtime, layout=layout))
        expert_parallel.check(config, runtime, layout)
        context_parallel.check(config, runtime, layout)
        batch_split.check(config, runtime)
        layout = layout.for_experts(runtime.expert_parallel)
        self.config = config
        self.runtime = replace(runtime, layout=layout)
        self.layout = layout
        if runtime.host_parameters or (
            runtime.remat != "none" and saved(runtime.remat, runtime.remat_tensors).host
        ):
            in_host_memory(
                layout.replicated
            )  # refuses a platform without it before anything is built
        with nnx.use_eager_sharding(False):
            abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        self._definition, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        self._treedef = jax.tree.structure(state)
        self.paths = tuple(".".join(map(str, path)) for path, _ in flat)
        variables = [variable for _, variable in flat]
        self.axes = {
            path: v.get_metadata("out_sharding")
            for path, v in zip(self.paths, variables, strict=True)
        }
        self.matrices = {
            path: _matrix(v)
            for path, v in zip(self.paths, variables, strict=True)
            if v.get_metadata("matrix", None)
        }
        self.inputs = {
            path: self.matrices[path].rows
            for path, v in zip(self.paths, variables, strict=True)
            if path in self.matrices and v.get_metadata("quantizable")
        }
        self.quantized = frozenset(self.inputs if runtime.base_weights is not None else ())
        self.untrained = frozenset(
            p for p, v in zip(self.paths, variables, strict=True) if isinstance(v, Constant)
        )
        tables = (p for p, v in zip(self.paths, variables, strict=True) if isinstance(v, RowTable))
        self.host_tables = frozenset(tables if runtime.table_memory == "host" else ())
        matrices = frozenset(
            path
            for path in self.paths
            if path not in self.untrained and belongs_there(self.axes[path])
        )
        self.hosted = self.host_tables | matrices if runtime.host_parameters else self.host_tables
        self.shapes = {
            path: jax.ShapeDtypeStruct(
                v.shape, jnp.dtype(v.kind if path in self.untrained else runtime.param_dtype)
            )
            for path, v in zip(self.paths, variables, strict=True)
        }

    def with_runtime(self, **changes) -> Graph:
        """Returns the graph with some fields of its runtime changed; the dtypes of weights stay."""
        other = copy.copy(self)
        other.runtime = replace(self.runtime, **changes)
        compatibility.check(self.config, other.runtime)
        return other

    def for_inference(self, rules: Mapping[str, Sequence[str]] | None = None) -> Graph:
        """Returns the graph for calls of a few tokens, where devices along the mesh axis `context`
        have rows of their own instead of parts of a sequence. `rules` replace the mesh's rules by
        name. Raises ValueError for an unknown mesh axis."""
        layout = self.layout if self.layout.mesh.shape[AXIS] == 1 else self.layout.rows_over(AXIS)
        if rules is not None:
            layout = layout.for_rollouts(rules, self.runtime.expert_parallel)
        if layout == self.layout:
            return self
        other = copy.copy(self)
        other.layout = layout
        other.runtime = replace(self.runtime, layout=layout)
        return other

    def sharding(self, path: str) -> jax.sharding.NamedSharding:
        """Returns the sharding of the weight at `path`, in host memory if it lives there."""
        sharding = self.layout.sharding(self.axes[path], self.shapes[path].shape)
        return in_host_memory(sharding) if path in self.hosted else sharding

    def quantized_weight(self, path: str) -> QuantizedWeight:
        """Returns how one of the `quantized` weights is stored."""
        kind = self.runtime.base_weights
        assert kind is not None, "no weight is stored quantised"
        return QuantizedWeight(
            self.shapes[path].shape,
            self.shapes[path].dtype,
            self.axes[path],
            self.inputs[path],
            kind,
            self.runtime.base_block,
            self.layout,
            path in self.hosted,
        )

    @property
    def abstract(self) -> dict[str, Any]:
        """Returns the shape, dtype and sharding of each weight as it is stored, by path."""
        floats = {
            path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.sharding(path))
            for path, shape in self.shapes.items()
            if path not in self.quantized
        }
        return floats | {path: self.quantized_weight(path).abstract for path in self.quantized}

    @property
    def shardings(self) -> dict[str, Any]:
        """Returns the sharding of each weight as it is stored, by path."""
        return {path: self._stored_sharding(path) for path in self.paths}

    def _stored_sharding(self, path: str) -> Any:
        if path in self.quantized:
            return self.quantized_weight(path).shardings
        return self.sharding(path)

    def decoder(self, params: dict[str, jax.Array]) -> Decoder:
        """Returns the module with these arrays; to be called inside a jitted function. Weights in
        host memory and outside the stacks are fetched to the device here, except tables; a stack
        fetches its own, one repeat at a time."""
        stay = self.host_tables
        params = {
            p: array if p.startswith("stacks.") or p in stay else fetch(array)
            for p, array in params.items()
        }
        weights = [self._weight(path, params) for path in self.paths]
        return nnx.merge(self._definition, jax.tree.unflatten(self._treedef, weights))

    def _weight(self, path: str, params: dict[str, jax.Array]) -> Any:
        """Returns the weight at `path` with its adapter, if `params` have one."""
        if path + LORA_A not in params:
            return params[path]
        adapter = self.runtime.adapter
        assert adapter is not None, f"the runtime says nothing of the adapter of {path}"
        dora_scale = params.get(path + DORA_SCALE)
        if dora_scale is None and path + MAGNITUDE in params:
            dora_scale = self._dora_scale(path, params)
        a = params[path + LORA_A]
        b = params[path + LORA_B]
        return Adapted(params[path], a, b, dora_scale, adapter.scale, self.layer_dims(path))

    def with_dora_scales(self, params: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights with the scales of DoRA in the place of its magnitudes, for a
        program that calls `decoder` again and again."""
        paths = [path for path in self.paths if path + MAGNITUDE in params]
        scales = {path + DORA_SCALE: self._dora_scale(path, params) for path in paths}
        others = {path: each for path, each in params.items() if not path.endswith(MAGNITUDE)}
        return others | scales

    def _dora_scale(self, path: str, params: dict[str, Any]) -> Any:
        """Returns the scale of DoRA of the weight at `path`."""
        adapter = self.runtime.adapter
        assert adapter is not None  # weights with magnitudes have one
        parts = DoraParts(*(params[path + end] for end in ("", LORA_A, LORA_B, MAGNITUDE)))
        stacked = self.axes[path][:1] == ("layers",)
        compute = dora_scales if stacked else dora_scale
        return compute(parts, adapter.scale, self.layer_dims(path))

    def product_dims(self, path: str) -> MatrixDims:
        """Returns the dimensions of a weight that an adapter takes for inputs (rows) and outputs
        (columns). An embedding [V, E] reads V numbers, a head [V, E] reads E."""
        if path == EMBEDDING:
            return MatrixDims((0,), (1,))
        return MatrixDims((1,), (0,)) if path == HEAD else self.matrices[path]

    def layer_dims(self, path: str) -> MatrixDims:
        """Returns the dimensions that products read of the weight of one layer."""
        rows, columns = self.product_dims(path)
        if self.axes[path][:1] != ("layers",):
            return MatrixDims(rows, columns)
        return MatrixDims(tuple(dim - 1 for dim in rows), tuple(dim - 1 for dim in columns))

    def cast_for_products(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Casts the weights that only products read to the dtype of the products, as a layer would.
        Cast once here, their gradients have that dtype too, which saves 1 GiB per device in a
        float32 update of llama3.1-8b on 16 chips: XLA casts all layers at once in either case."""
        runtime = self.runtime
        if runtime.quantization is not None:  # rounds what is stored
            return params
        unchanged = self.hosted | self.quantized | (params.keys() - self.inputs.keys())
        return {
            path: array if path in unchanged else array.astype(runtime.dtype)
            for path, array in params.items()
        }

    def precision(self) -> AbstractContextManager:
        """Returns the context of every forward pass: with dtype float32, products at full precision
        on every platform."""
        return jax.default_matmul_precision(
            "highest" if self.runtime.dtype == "float32" else "default"
        )

    def init(self, seed: int, paths: Collection[str] | None = None) -> dict[str, jax.Array]:
        """Draws random weights from `seed`, each created where it lives and as it is stored; the
        numbers do not depend on the mesh. With `paths` only these weights, with the numbers that
        they have among all."""
        chosen = self.paths if paths is None else paths
        params = self._drawn(seed, [path for path in chosen if path not in self.quantized])
        for group in self._of_similar_size(path for path in chosen if path in self.quantized):
            floats = self._drawn(seed, group)
            params |= {path: self.quantized_weight(path).of(floats.pop(path)) for path in group}
        return params

    def _of_similar_size(self, paths: Iterable[str]) -> list[list[str]]:
        """Groups paths so that the weights of a group have no more numbers together than the
        largest weight: their floats exist at the same time."""
        groups: list[list[str]] = []
        sizes = {path: math.prod(self.shapes[path].shape) for path in paths}
        room = 0
        for path, size in sizes.items():
            if size > room:
                groups.append([])
                room = max(sizes.values())
            groups[-1].append(path)
            room -= size
        return groups

    def _drawn(self, seed: int, paths: Collection[str]) -> dict[str, Any]:
        """Draws the floats of these weights."""

        def create(key):
            decoder = Decoder(self.config, nnx.Rngs(key))
            leaves = dict(zip(self.paths, jax.tree.leaves(nnx.state(decoder)), strict=True))
            return {path: leaves[path].astype(self.shapes[path].dtype) for path in paths}

        shardings = {path: self.sharding(path) for path in paths}
        # The program runs once. On CPU this level compiles it in 0.4 of the time, to the same bits.
        options = {"xla_backend_optimization_level": 1} if self.layout.platform == "cpu" else None
        with nnx.use_eager_sharding(False):
            return jax.jit(create, out_shardings=shardings, compiler_options=options)(
                jax.random.key(checked_seed(seed))
            )

    def logprobs(
        self,
        params: dict[str, jax.Array],
        tokens_BT: jax.Array,
        step: Step,
        temperature: ArrayLike,
        kept_BTI: jax.Array | None = None,
    ) -> modes.TokenLogprobs:
        """Returns the log-probabilities and entropies of the tokens of a step under these weights,
        and the other outputs of the decoder, as policy/modes.py:logprobs."""
        with self.precision():
            return modes.logprobs(
                self.decoder(params), tokens_BT, step, temperature, self.runtime, kept_BTI
            )

    def encode(
        self,
        params: dict[str, jax.Array],
        kind: Literal["image", "audio"],
        values_RNK: jax.Array,
        shape_R2: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Runs the tower of pictures or of sounds: (rows [R, M, E], features [S, R, M, E] or None),
        as policy/towers says."""
        with self.precision():
            return getattr(self.decoder(params), kind)(values_RNK, shape_R2, self.runtime)

    def aux(self, params: dict[str, jax.Array], tokens_BT: jax.Array, step: Step) -> Aux:
        """Runs the layers without a head and returns their outputs besides hidden states."""
        with self.precision():
            return self.decoder(params)(tokens_BT, step, None, self.runtime).aux

    @property
    def trunk(self) -> Graph:
        """Returns the decoder that its forward pass runs: itself."""
        return self

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the dimensions of each weight."""
        return {path: shape.shape for path, shape in self.shapes.items()}

    @property
    def parameters(self) -> int:
        """The number of weights, counted without allocating them."""
        return sum(math.prod(size) for size in self.sizes.values())

    @property
    def replicated(self) -> dict[str, int]:
        """Returns the number of elements of each weight that is replicated on every device; empty
        if the mesh shards no weights.
        """
        mesh = self.layout.mesh.shape
        if all(size == 1 for axis, size in mesh.items() if axis != "data"):
            return {}
        specs = {path: self.layout.spec(self.axes[path], size) for path, size in self.sizes.items()}
        return {path: math.prod(self.sizes[path]) for path, spec in specs.items() if not any(spec)}


class Model:
    """A decoder with weights. `params` is the one reference to them: the trainer rebinds it after
    each step, the generator reads it at each call. `newly_initialized` names the weights of a
    loaded model that started, at least in part, as random numbers, and `source` is the directory
    that it was loaded from.

    A model is a pytree whose leaves are its weights, so that it can be an argument of a function
    under `jax.jit`. A model made of such leaves has no `source`.
    """

    def __init__(
        self,
        graph: Graph,
        params: dict[str, jax.Array],
        newly_initialized: frozenset[str] = frozenset(),
        source: str | None = None,
    ):
        self.graph = graph
        self.params = params
        self.newly_initialized = newly_initialized
        self.source = source

    @property
    def config(self) -> DecoderConfig:
        """The description of the decoder, as `config.json` gives it."""
        return self.graph.config

    def logits(
        self,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        segments: ArrayLike | None = None,
        *,
        media: Media | None = None,
        turns: ArrayLike | None = None,
        until: ArrayLike | None = None,
    ) -> jax.Array:
        """Computes the logits of the token after each: int[B, T] -> float32[B, T, V].

        Segment 0 is padding; None: one full segment per row. By default positions count from 0 in
        each segment. `media`: the rows of pictures and sounds that stand in the place of tokens.
        `turns` int[B, T, 3] and `until` int[B, T] take the place of its own
        (policy.cache.media.Media). Raises ValueError as `logprobs` does.
        """
        return self._logits(
            self.params, *self._arguments(tokens, positions, segments, (media, turns, until))
        )

    def logprobs(
        self,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        segments: ArrayLike | None = None,
        temperature: float | jax.Array = 1.0,
        *,
        media: Media | None = None,
        turns: ArrayLike | None = None,
        until: ArrayLike | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes (logp, entropy), float32[B, T]. `media`, `turns` and `until` are those of
        `logits`.

        logp[t] is the log-probability of token t given the tokens before it, at logits /
        temperature; entropy[t] is the entropy of that distribution. Both are 0 at the first token
        of a segment and on padding.

        Their bits depend only on the tokens of the segment up to t, not on B, T, the padding or the
        other segments: each segment is computed in a row of its own (`scorer`). This holds if the
        tokens of a segment are contiguous and have the positions 0, 1, 2, ...; other rows, and
        calls that a transformation of jax traces, are computed in the shape that they have.

        Raises ValueError if `tokens` are not two-dimensional, if another array has another shape,
        or if a full row is longer than the model's trained positions; compatibility.Conflict if
        pictures do not go with the runtime.
        """
        tokens, step = self._arguments(tokens, positions, segments, (media, turns, until))
        inputs = (tokens, temperature, *jax.tree.leaves((step, self.params)))
        spans = None
        if not any(isinstance(a, Tracer) for a in inputs):
            spans = documents(
                np.asarray(step.segments), np.asarray(step.positions), self.config.max_positions
            )
        if spans is None:
            return self._logprobs(self.params, tokens, step, jnp.float32(temperature))
        numbers = np.asarray(tokens), spans, float(temperature)
        scorer = self.scorer_for(max((span.end - span.start for span in spans), default=0))
        logp, entropy = scorer.logprobs(self.params, *numbers, media_of(step, spans))
        return jnp.asarray(logp), jnp.asarray(entropy)

    def encode(
        self, kind: Literal["image", "audio"], values: ArrayLike, shapes: ArrayLike
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the rows of pictures or sounds: (rows [R, M, E], features [S, R, M, E] or None).

        `values` [R, N, K] are the inputs of R items in the order of the tower (policy/media.py),
        padded to N, `shapes` int[R, 2] are (height, width) in patches or (frames, 1). The first
        `rows_of` of an item's shape are its own (`policy.media.Tower`). Raises ValueError if the
        model was loaded without such a tower or an array has another shape.
        """
        spec = getattr(self.config, kind)
        if spec is None:
            raise ValueError(
                f"this model has no tower for {kind}; load it with policy.load(directory, "
                "media=True)"
            )
        values = jnp.asarray(values, jnp.float32)
        shapes = jnp.asarray(shapes, jnp.int32)
        if (
            values.ndim != 3
            or values.shape[2] != spec.input_width
            or shapes.shape != (len(values), 2)
        ):
            raise ValueError(
                f"values must be [items, inputs, {spec.input_width}] and shapes [items, 2], got "
                f"{values.shape} and {shapes.shape}"
            )
        return self._encode(self.params, kind, values, shapes)

    def hidden_states(
        self,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        segments: ArrayLike | None = None,
        *,
        media: Media | None = None,
        turns: ArrayLike | None = None,
        until: ArrayLike | None = None,
    ) -> jax.Array:
        """Computes the output of each layer, before the final norm and before deepstack features
        are added: [L, B, T, E] (hyper-connections: [L, B, T, streams, E]). `media`, `turns` and
        `until` are those of `logits`."""
        return self._hidden(
            self.params, *self._arguments(tokens, positions, segments, (media, turns, until))
        )

    def _arguments(self, tokens, positions, segments, media_fields: tuple = (None, None, None)):
        tokens = jnp.asarray(tokens, jnp.int32)
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [rows, length], got shape {tokens.shape}")
        if (
            (limit := self.config.max_positions) is not None
            and positions is None
            and segments is None
            and tokens.shape[1] > limit
        ):
            raise ValueError(
                f"tokens have length {tokens.shape[1]}, this model has {limit} positions"
            )
        media, turns, until = media_fields
        if media is not None:
            turns = media.turns if turns is None else turns
            until = media.until if until is None else until
        for name, array in (
            ("positions", positions),
            ("segments", segments),
            ("until", until),
            ("media.index", None if media is None else media.index),
        ):
            if array is not None and jnp.shape(array) != tokens.shape:
                raise ValueError(
                    f"{name} must have the shape of tokens, {tokens.shape}, got {jnp.shape(array)}"
                )
        if turns is not None and jnp.shape(turns) != (*tokens.shape, 3):
            raise ValueError(
                f"turns must have the shape {(*tokens.shape, 3)}, got {jnp.shape(turns)}"
            )
        if media is not None:
            compatibility.check(self.config, self.graph.runtime, media=True)
        if not (media is None and turns is None and until is None):
            media = replace(media or Media(), turns=turns, until=until)
        return tokens, modes.make_step(
            tokens, positions, segments, jax.tree.map(jnp.asarray, media)
        )

    @cached_property
    def _encode(self):
        return jax.jit(self.graph.encode, static_argnums=1)

    @cached_property
    def _logits(self):
        def run(params, tokens, step):
            with self.graph.precision():
                decoder = self.graph.decoder(params)
                hidden = decoder(tokens, step, None, self.graph.runtime).hidden
                return head.logits(hidden, decoder.head_weight, self.config.logit_scaling)

        return jax.jit(run)

    @cached_property
    def _hidden(self):
        graph = self.graph.with_runtime(record=("hidden",))

        def run(params, tokens, step):
            with graph.precision():
                aux = graph.decoder(params)(tokens, step, None, graph.runtime).aux
            return jnp.stack([*features.by_number(aux, self.config, "hidden").values()])

        return jax.jit(run)

    def graph_for(self, max_length: int) -> Graph:
        """Returns the graph for sequences of at most `max_length` tokens. It is `graph`, unless
        LongRoPE chooses its factors by the length and the runtime does not say it."""
        if not self._length_decides:
            return self.graph
        return self._graphs_by_length[self._is_long(max_length)]

    @property
    def _length_decides(self) -> bool:
        return self.config.longrope_limit is not None and self.graph.runtime.max_length is None

    def _is_long(self, length: int) -> bool:
        assert self.config.longrope_limit is not None
        return length > self.config.longrope_limit

    @cached_property
    def _graphs_by_length(self) -> tuple[Graph, Graph]:
        limit = self.config.longrope_limit
        assert limit is not None
        return self.graph.with_runtime(max_length=limit), self.graph.with_runtime(
            max_length=limit + 1
        )

    def scorer_for(self, max_length: int) -> Scorer:
        """Returns the scorer of sequences of at most `max_length` tokens (`graph_for`)."""
        if not self._length_decides:
            return self.scorer
        return self._scorers_by_length[self._is_long(max_length)]

    @cached_property
    def _scorers_by_length(self) -> tuple[Scorer, Scorer]:
        short, long = self._graphs_by_length
        return Scorer(short), Scorer(long)

    @cached_property
    def scorer(self) -> Scorer:
        """Returns the programs of `logprobs`; the generator verifies exact completions with
        them."""
        return Scorer(self.graph)

    @cached_property
    def _logprobs(self):
        return jax.jit(lambda *args: self.graph.logprobs(*args)[:2])


jax.tree_util.register_pytree_node(
    Model,
    lambda model: ((model.params,), (model.graph, model.newly_initialized, model.source)),
    lambda static, arrays: Model(static[0], arrays[0], static[1]),
)


def _matrix(variable: nnx.Variable) -> MatrixDims:
    """Returns the dimensions of a weight that products read, counted with the repeats of a stack in
    front."""
    stacked = variable.get_metadata("out_sharding")[0] == "layers"
    rows, columns = variable.get_metadata("matrix")
    return MatrixDims(tuple(dim + stacked for dim in rows), tuple(dim + stacked for dim in columns))
