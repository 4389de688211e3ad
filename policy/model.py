"""A decoder with its weights: what load and create return, and what trainer and generator share."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from policy import compatibility, modes
from policy.attention import context_parallel
from policy.attention.sequence_shards import AXIS
from policy.config import DecoderConfig, Runtime
from policy.decoder import Decoder
from policy.execution import batch_split
from policy.experts import expert_parallel
from policy.heads import head
from policy.heads.scoring import Scorer, documents
from policy.intermediates import Aux
from policy.mesh.host_memory import belongs_there, fetch, in_host_memory
from policy.mesh.sharding import Layout
from policy.ops.parameter import Constant, RowTable
from policy.remat import saved


class Graph:
    """The static half of a model: what arrays it needs, and how to run it on them. Holds no array.

    Weights are a flat dict from path ("stacks.0.layers.0.mixer.q_proj") to array, in any order. `inputs` names those that may be
    quantised, with the dimensions that their products sum over.
    """

    def __init__(self, config: DecoderConfig, runtime: Runtime, layout: Layout):
        compatibility.check(config, replace(runtime, layout=layout))
        expert_parallel.check(config, runtime, layout)
        context_parallel.check(config, runtime, layout)
        batch_split.check(config, runtime)
        layout = layout.for_experts(runtime.expert_parallel)
        self.config, self.runtime, self.layout = config, replace(runtime, layout=layout), layout
        if runtime.host_parameters or (runtime.remat != "none" and saved(runtime.remat, runtime.remat_tensors).host):
            in_host_memory(layout.replicated)  # refuses a platform without it before anything is built
        with nnx.use_eager_sharding(False):
            abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        self._definition, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        self._treedef = jax.tree.structure(state)
        self.paths = tuple(".".join(map(str, path)) for path, _ in flat)
        variables = [variable for _, variable in flat]
        self.axes = {path: v.get_metadata("out_sharding") for path, v in zip(self.paths, variables, strict=True)}
        self.inputs = {
            path: _inputs(v) for path, v in zip(self.paths, variables, strict=True) if v.get_metadata("inputs", None)
        }
        self.untrained = frozenset(p for p, v in zip(self.paths, variables, strict=True) if isinstance(v, Constant))
        tables = (p for p, v in zip(self.paths, variables, strict=True) if isinstance(v, RowTable))
        self.tables = frozenset(tables if runtime.table_memory == "host" else ())
        matrices = frozenset(
            path for path in self.paths if path not in self.untrained and belongs_there(self.axes[path])
        )
        self.hosted = self.tables | matrices if runtime.host_parameters else self.tables
        self.shapes = {
            path: jax.ShapeDtypeStruct(v.shape, jnp.dtype(v.kind if path in self.untrained else runtime.param_dtype))
            for path, v in zip(self.paths, variables, strict=True)
        }

    def at(self, **changes) -> Graph:
        """The same graph with some fields of its runtime changed; the dtypes stay."""
        other = copy.copy(self)
        other.runtime = replace(self.runtime, **changes)
        compatibility.check(self.config, other.runtime)
        return other

    def for_inference(self, rules: Mapping[str, Sequence[str]] | None = None) -> Graph:
        """The same graph where devices along the mesh axis `context` have rows of their own: a call of a few tokens has nothing to
        cut along its sequences. `rules` are laid over those of the mesh. Raises ValueError for one that names no mesh axis."""
        layout = self.layout if self.layout.mesh.shape[AXIS] == 1 else self.layout.rows_over(AXIS)
        if rules is not None:
            layout = layout.for_rollouts(rules, self.runtime.expert_parallel)
        if layout == self.layout:
            return self
        other = copy.copy(self)
        other.layout, other.runtime = layout, replace(self.runtime, layout=layout)
        return other

    def sharding(self, path: str) -> jax.sharding.NamedSharding:
        place = self.layout.sharding(self.axes[path], self.shapes[path].shape)
        return in_host_memory(place) if path in self.hosted else place

    @property
    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        return {path: self.sharding(path) for path in self.paths}

    def decoder(self, params: dict[str, jax.Array]) -> Decoder:
        """The module on these arrays; to be called inside a jitted function. Of weights in host memory those outside the stacks
        come to the device here, whole; a stack fetches its own, one repeat at a time."""
        params = {path: array if path.startswith("stacks.") else fetch(array) for path, array in params.items()}
        return nnx.merge(self._definition, jax.tree.unflatten(self._treedef, [params[path] for path in self.paths]))

    def as_multiplied(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """`params`, of which those that nothing reads but products are in the dtype of these: what a layer would cast them to. Cast
        once, their gradients come in that dtype too, and those of all layers are there together. In the update of a llama3.1-8b in
        float32 on 16 chips that is 1 GiB less on each, for XLA casts all layers at once in either case."""
        runtime = self.runtime
        if runtime.quantization is not None:  # rounds what is stored
            return params
        kept = self.hosted | (params.keys() - self.inputs.keys())
        return {path: array if path in kept else array.astype(runtime.dtype) for path, array in params.items()}

    def precision(self):
        """Context of every forward pass: with dtype float32, matrix products at full precision on every platform."""
        return jax.default_matmul_precision("highest" if self.runtime.dtype == "float32" else "default")

    def init(self, seed: int, paths: Collection[str] | None = None) -> dict[str, jax.Array]:
        """Fresh weights, created where they live; the same for any mesh. With `paths` only those, the same as among all."""
        wanted = self.paths if paths is None else paths

        def create(key):
            decoder = Decoder(self.config, nnx.Rngs(key))
            leaves = dict(zip(self.paths, jax.tree.leaves(nnx.state(decoder)), strict=True))
            return {path: leaves[path].astype(self.shapes[path].dtype) for path in wanted}

        places = {path: self.sharding(path) for path in wanted}
        # The program runs once. On CPU this level compiles it in 0.4 of the time, to the same bits.
        options = {"xla_backend_optimization_level": 1} if self.layout.platform == "cpu" else None
        with nnx.use_eager_sharding(False):
            return jax.jit(create, out_shardings=places, compiler_options=options)(jax.random.key(seed))

    def logprobs(self, params, tokens_BT, step, temperature):
        """modes.train on these weights: (logp, entropy, Aux)."""
        with self.precision():
            return modes.train(self.decoder(params), tokens_BT, step, temperature, self.runtime)

    def aux(self, params, tokens_BT, step) -> Aux:
        """What the layers find, without a head."""
        with self.precision():
            return self.decoder(params)(tokens_BT, step, None, self.runtime)[2]

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The dimensions of each weight."""
        return {path: shape.shape for path, shape in self.shapes.items()}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(size) for size in self.sizes.values())

    @property
    def replicated(self) -> dict[str, int]:
        """Weights that every device holds whole, and how many numbers they have, by path; none where the mesh cuts no weights."""
        mesh = self.layout.mesh.shape
        if all(size == 1 for axis, size in mesh.items() if axis != "data"):
            return {}
        specs = {path: self.layout.spec(self.axes[path], size) for path, size in self.sizes.items()}
        return {path: math.prod(self.sizes[path]) for path, spec in specs.items() if not any(spec)}


class Model:
    """`params` is the one reference to the weights: the trainer rebinds it after each step, the generator reads it at each call.
    `fresh` names those that began, at least in part, as random numbers beside others that were read."""

    def __init__(self, graph: Graph, params: dict[str, jax.Array], fresh: frozenset[str] = frozenset()):
        self.graph, self.params, self.fresh = graph, params, fresh

    @property
    def config(self) -> DecoderConfig:
        return self.graph.config

    def logits(self, tokens, positions=None, segments=None) -> jax.Array:
        """int[B, T] -> float32[B, T, V]. Segment 0 is padding; None: one full segment. Positions count from 0 in each segment."""
        return self._logits(self.params, *self._arguments(tokens, positions, segments))

    def logprobs(self, tokens, positions=None, segments=None, temperature=1.0) -> tuple[jax.Array, jax.Array]:
        """(logp, entropy), float32[B, T]. logp[t] is about token t given the tokens before it, at logits / temperature;
        entropy[t] is of the distribution that token t was drawn from. Both are 0 at the first token of a segment and on padding.

        Their bits depend on the tokens of the segment up to t alone, not on B, T, the padding or the other segments: each segment
        is computed in a row of its own (`scorer`). That holds where the tokens of a segment lie next to each other and have the
        positions 0, 1, 2, ...; other rows, and what a transformation of jax traces, are computed in the shape that they have.

        Raises ValueError where `tokens` are not two-dimensional, another array has another shape, or a full row is longer than
        the positions of the model.
        """
        tokens, step = self._arguments(tokens, positions, segments)
        given = (tokens, step.segments, step.positions, temperature, *self.params.values())
        traced = any(isinstance(a, jax.core.Tracer) for a in given)
        found = (
            None
            if traced
            else documents(np.asarray(step.segments), np.asarray(step.positions), self.config.max_positions)
        )
        if found is None:
            return self._logprobs(self.params, tokens, step, jnp.float32(temperature))
        return tuple(map(jnp.asarray, self.scorer.logprobs(self.params, np.asarray(tokens), found, float(temperature))))

    def hidden_states(self, tokens, positions=None, segments=None) -> jax.Array:
        """[L, B, T, E]: the output of each layer, before the final norm (hyper-connections: [L, B, T, streams, E])."""
        return self._hidden(self.params, *self._arguments(tokens, positions, segments))

    def _arguments(self, tokens, positions, segments):
        tokens = jnp.asarray(tokens, jnp.int32)
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [rows, length], got shape {tokens.shape}")
        if (
            (limit := self.config.max_positions) is not None
            and positions is None
            and segments is None
            and tokens.shape[1] > limit
        ):
            raise ValueError(f"tokens have length {tokens.shape[1]}, this model has {limit} positions")
        for name, array in (("positions", positions), ("segments", segments)):
            if array is not None and jnp.shape(array) != tokens.shape:
                raise ValueError(f"{name} must have the shape of tokens, {tokens.shape}, got {jnp.shape(array)}")
        step = modes.make_step(tokens, positions, segments)
        return tokens, step

    @cached_property
    def _logits(self):
        def run(params, tokens, step):
            with self.graph.precision():
                decoder = self.graph.decoder(params)
                hidden, _, _ = decoder(tokens, step, None, self.graph.runtime)
                return head.logits(hidden, decoder.head_weight, self.config.logit_softcap)

        return jax.jit(run)

    @cached_property
    def _hidden(self):
        graph = self.graph.at(record=("hidden",))

        def run(params, tokens, step):
            with graph.precision():
                _, _, aux = graph.decoder(params)(tokens, step, None, graph.runtime)
            layers = {
                n: a[r] for path, a in aux.by_layer("hidden").items() for r, n in enumerate(self.config.numbers(path))
            }
            return jnp.stack([layers[n] for n in sorted(layers)])

        return jax.jit(run)

    @cached_property
    def scorer(self) -> Scorer:
        """The programs that `logprobs` runs, which the generator checks exact completions by."""
        return Scorer(self.graph)

    @cached_property
    def _logprobs(self):
        return jax.jit(lambda *args: self.graph.logprobs(*args)[:2])


def _inputs(variable: nnx.Variable) -> tuple[int, ...]:
    """The dimensions that the products of a weight sum over, counted with the repeats of a stack in front."""
    stacked = variable.get_metadata("out_sharding")[0] == "layers"
    return tuple(dim + stacked for dim in variable.get_metadata("inputs"))
