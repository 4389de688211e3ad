"""Decoders and attention on a mesh of eight CPU devices against one device: run by test_meshes.py.

    python meshes.py '[["decoder", "dense", {"fsdp": 8}, {}], ...]'

Prints a JSON list with the findings of each case.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding

from policy import families, modes
from policy.attention import flash_attention
from policy.attention.attention_plan import Keys
from policy.attention.context_parallel import attend_cut
from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
from policy.attention.sequence_shards import Order
from policy.cache import cache as caches
from policy.cache.layer_cache import own_tokens
from policy.cache.pages import Pages
from policy.config import Runtime
from policy.mesh.axes import STATIONARY_RULES
from policy.mesh.sharding import layout
from policy.modes import make_step
from policy.ops.parameter import MatrixDims
from rl.plan.hlo import HloProgram
from rl.training.optimizer import WeightAxes, orthogonalized
from rl.training.weights import WeightGroup
from rollout import Generator, GeneratorOptions, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import learners
from oracles import configuration, floats_and_integers, random_model, short, tokens

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
MODELS = {
    "dense": lambda: configuration("Llama", num_hidden_layers=2, num_key_value_heads=4),
    "windows": lambda: short("Gemma2"),
    "sinks": lambda: short("GptOss"),
    "experts": lambda: short("Mixtral"),
    "latent": lambda: short("DeepseekV3"),
    "indexed": lambda: short("DeepseekV32"),
    "shared_index": lambda: short("GlmMoeDsa"),
    "compressed": lambda: short("DeepseekV4", index_topk=2),
    "recurrent": lambda: short("Qwen3Next"),
    "channel_decays": lambda: short("KimiLinear"),
    "short_conv": lambda: short("Lfm2"),
    "groups_of_states": lambda: short("NemotronH"),
    "biased_states": lambda: short("GraniteMoeHybrid"),
    "two_mixers": lambda: short("FalconH1"),
    "streams": lambda: (
        configuration("Llama", num_hidden_layers=2)
        | {"duet": {"hyper_connections": {"reduce": "head"}}}
    ),
    "blocks_of_keys": lambda: short(
        "Qwen4Exp", layer_types=["full_attention", "linear_attention"], ple_layer_ids=None
    ),
    "ngrams": lambda: short("Qwen4Exp"),
    "square": lambda: short("Simple"),
    "shared_keys": lambda: short("Gemma4Small"),
}


def packed(B: int, T: int) -> np.ndarray:
    """int32[B, T]: segments of rows with two packed texts and padding; one row is a single text."""
    rng = np.random.default_rng(2)
    ends = rng.integers(T // 2, T + 1, (B, 1))
    ends[0] = T
    segments = np.where(np.arange(T) < rng.integers(2, T // 2, (B, 1)), 1, 2) * (
        np.arange(T) < ends
    )
    segments[0] = 1
    return segments.astype(np.int32)


def on_mesh(degrees: dict, **how):
    """The layout of these degrees; with the additional key "explicit" it is in explicit mode."""
    sizes = {axis: size for axis, size in degrees.items() if axis != "explicit"}
    return layout(sizes, explicit="explicit" in degrees, **how)


def attention(degrees: dict, scheme: str, options: dict) -> dict:
    """Attention whose sequences are cut, against attention over full sequences: the largest
    differences of the output and of the gradients of queries, keys, values and sinks. `options`:
    AttentionBounds, and "heads", "kv_heads", "sinks", "balance", "queries" of a chunk, "kernel":
    the one for TPUs, interpreted."""
    options = {
        "heads": 4,
        "kv_heads": 2,
        "sinks": False,
        "balance": False,
        "queries": 512,
        "kernel": False,
    } | options
    B, H, K, T, D, V = (
        4,
        options["heads"],
        options["kv_heads"],
        512 if options["kernel"] else 32,
        6,
        5,
    )
    rng = np.random.default_rng(0)
    shapes = [(B, H, T, D), (B, K, T, D), (B, K, T, V), (H,), (B, H, T, V)]
    q, k, v, sinks, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    limits = AttentionBounds(
        **{name: options[name] for name in AttentionBounds._fields if name in options}
    )
    step = make_step(jnp.zeros((B, T), jnp.int32), None, packed(B, T))
    keep = (np.asarray(step.segments) != 0)[:, None, :, None]

    def full(q, k, v, sinks):
        mask = Mask(step, own_tokens(step, {}), limits.window, limits.chunk)
        return attend(q, k, v, mask, T, limits.softcap, sinks if options["sinks"] else None)

    runtime = Runtime(
        context_parallel=scheme,
        context_load_balance=options["balance"],
        attention_chunk=options["queries"],
        layout=layout(degrees),
    )
    order = Order.of(step, None, runtime)
    places, ordered = (
        (np.arange(T), step)
        if order is None
        else (order.places, order.enter(step.segments, step)[1])
    )

    def cut(q, k, v, sinks):
        q, k, v = (a[:, :, places] for a in (q, k, v))
        out = attend_cut(
            q, Keys((k, v)), ordered, runtime, limits, sinks if options["sinks"] else None
        )
        return out[:, :, np.argsort(places)]

    (served, kernel), result = (flash_attention.served, flash_attention._kernel), []
    flash_attention.served = lambda *_: options["kernel"]
    flash_attention._kernel = lambda H, places, devices, limits, _=False: kernel(
        H, places, devices, limits, interpret=True
    )
    for function in (full, cut):

        def both(*arguments, function=function):
            out, pull = jax.vjp(lambda *a: jnp.where(keep, function(*a), 0), *arguments)
            return out, *pull(g)

        with jax.default_matmul_precision("highest"):
            result.append(jax.block_until_ready(jax.jit(both)(q, k, v, sinks)))
    flash_attention.served, flash_attention._kernel = served, kernel
    return {
        "difference": max(
            float(np.abs(a - b).max() / max(1.0, np.abs(a).max()))
            for a, b in zip(*result, strict=True)
        )
    }


@cache
def derived(kind: str, degrees: str, how: str):
    """(log-probabilities and entropies, gradients by path) of a decoder on packed and padded rows,
    on a mesh (null: one device).
    """
    degrees = json.loads(degrees)
    model = random_model(
        families.read(MODELS[kind]()),
        runtime=Runtime(**json.loads(how)),
        mesh=on_mesh(degrees) if degrees else None,
    )
    floats, _ = floats_and_integers(model.params)
    run = jax.jit(
        partial(scored, model.graph),
        out_shardings=(None, {path: model.graph.sharding(path) for path in floats}),
    )
    result, grads = jax.block_until_ready(run(model.params, tokens(8, 13), packed(8, 13)))
    return np.asarray(result), {path: np.asarray(g) for path, g in grads.items()}


def scored(graph, params, rows, segments):
    """(log-probabilities and entropies [2, B, T], the gradients of a sum of both in which each has
    a weight of its own).
    """
    cotangent = np.random.default_rng(0).normal(size=(2, *rows.shape))

    def loss(floats):
        logp, entropy, aux = graph.logprobs(
            integers | floats, rows, make_step(rows, segments=segments), 0.9
        )
        balance = sum(routing.balance.sum() for routing in aux.by_layer("routing").values())
        return jnp.sum(cotangent[0] * logp + cotangent[1] * entropy) + balance, jnp.stack(
            [logp, entropy]
        )

    floats, integers = floats_and_integers(params)
    grads, result = jax.grad(loss, has_aux=True)(floats)
    return result, grads


def products(kind: str, degrees: dict, how: dict) -> dict:
    """Of `scored`: how many products of matrices there are, by the type of the mesh's axes in the
    type of their result; and how what is carried from layer to layer is cut."""
    graph = random_model(
        families.read(MODELS[kind]()), runtime=Runtime(**how), mesh=on_mesh(degrees)
    ).graph
    result, carried = {}, set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
                types = sorted(
                    {each.name for each in eqn.outvars[0].aval.sharding.mesh.axis_types}
                ) or ["Auto"]
                result["+".join(types)] = result.get("+".join(types), 0) + 1
            if eqn.primitive.name == "scan" and eqn.outvars[0].aval.shape == (
                8,
                13,
                graph.config.hidden_size,
            ):
                carried.add(str(eqn.outvars[0].aval.sharding.spec))
            for inner in jaxprs_in_params(eqn.params):
                walk(inner)

    walk(jax.make_jaxpr(partial(scored, graph))(graph.shapes, tokens(8, 13), packed(8, 13)).jaxpr)
    return {"products": result, "carried": sorted(carried)}


def largest_all_gather(kind: str, degrees: dict, how: dict) -> dict:
    """Of `scored`, compiled: how many devices at most put an array together from their parts, of
    those no smaller than a quarter of the residual stream."""
    graph = random_model(
        families.read(MODELS[kind]()), runtime=Runtime(**how), mesh=on_mesh(degrees)
    ).graph
    run = jax.jit(
        partial(scored, graph),
        out_shardings=(None, {path: graph.sharding(path) for path in graph.shapes}),
    )
    exchanged = HloProgram(
        run.lower(graph.shapes, tokens(8, 13), packed(8, 13)).compile().as_text()
    ).exchanged()
    large = 4 * 8 * 13 * graph.config.hidden_size / 4
    return {
        "devices": max(
            each.group for each in exchanged if each.kind == "all-gather" and each.bytes >= large
        )
    }


def sent(kind: str, degrees: dict) -> dict:
    """How many collectives of each kind a dense layer takes while one token of each of 16 rows is
    decoded over pages, under stationary rules: what two layers more have more of."""
    rows, width, size, result = 16, 2, 4, []
    for layers in (2, 4):
        config = MODELS[kind]() | {"num_hidden_layers": layers, "first_k_dense_replace": layers}
        graph = random_model(families.read(config), mesh=on_mesh(degrees)).graph.for_inference(
            STATIONARY_RULES
        )

        def step(params, cache, ids, table, graph=graph):
            decoder, one = graph.decoder(params), modes.next_token_step(ids, ids, table)
            states, cache = modes.next_token_states(decoder, ids, one, cache, graph.runtime)
            logits = modes.logits(decoder, states, graph.runtime)
            return jnp.argmax(logits, axis=-1), caches.constrained(cache, graph.layout)

        def put(array, axes, graph=graph):
            return jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=graph.layout.sharding(axes, array.shape)
            )

        pool = Pages(8 * (rows // 8 * width + 1), size)
        cache = jax.eval_shape(
            lambda graph=graph, pool=pool: caches.create(
                graph.config, rows, pool, "float32", scan=False
            )
        )
        params = {path: put(shape, graph.axes[path]) for path, shape in graph.shapes.items()}
        ids, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (rows, width)))
        arguments = params, caches.by_axes(lambda axes, a, put=put: put(a, axes), cache)
        arguments += put(ids, ("cache_batch",)), put(table, ("cache_batch", None))
        exchanged = HloProgram(
            jax.jit(step, donate_argnums=1).lower(*arguments).compile().as_text()
        ).exchanged()
        result.append(Counter(each.kind for each in exchanged for _ in range(each.times)))
    two, four = result
    return {name: (number - two[name]) / 2 for name, number in four.items() if number != two[name]}


def decoder(kind: str, degrees: dict, how: dict) -> dict:
    """`derived` on a mesh against one device: the largest difference of a log-probability or
    entropy, and of a gradient as a share of the largest number in it (at least a thousandth of the
    largest of all)."""
    expected, one = derived(kind, "null", "{}")
    result, many = derived(kind, json.dumps(degrees), json.dumps(how))
    largest = {path: float(np.abs(gradient).max()) for path, gradient in one.items()}
    floor = 1e-3 * max(largest.values())
    shares = {
        path: float(np.abs(many[path] - one[path]).max()) / max(floor, largest[path])
        for path in one
    }
    worst = max(shares, key=shares.get)
    return {
        "logp": float(np.abs(result - expected).max()),
        "gradient": shares[worst],
        "worst": worst,
    }


def moments(degrees: dict, options: dict) -> dict:
    """Two updates in micro-batches on a mesh that cuts the optimizer's state over `data`, against
    one device: the largest difference of a weight and of a metric, bytes of moments that a device
    has as a share of all, and the ways in which the compiled update exchanges matrices."""
    result = []
    for mesh in (None, on_mesh(degrees, moments_over_data=True)):
        model = learners.experts(**({} if mesh is None else {"mesh": mesh}))
        trainer, state = learners.begin(model, learners.stage(micro_batch=4, **options), fresh=True)
        for seed in (0, 1):
            state, metrics = trainer.update(state, learners.batch(seed=seed))
        params = {path: np.asarray(array) for path, array in state.policy.params.items()}
        result.append((params, {name: float(value) for name, value in metrics.items()}))
    arrays = [array for array in jax.tree.leaves(state.policy.optimizer) if array.ndim]
    (one, logged), (many, also) = result
    return {
        "weights": max(float(np.abs(many[path] - one[path]).max()) for path in one),
        "metrics": max(
            abs(also[name] - value) for name, value in logged.items() if name != "perf/packed_share"
        ),
        "share": sum(a.addressable_shards[0].data.nbytes for a in arrays)
        / sum(a.nbytes for a in arrays),
        "same": all(
            a.sharding == state.policy.params[p].sharding for p, a in state.policy.params.items()
        ),
    }


def optimizer(degrees: dict, options: dict) -> dict:
    """Two steps of an optimizer by random gradients on a mesh, whose `data` cuts moments further,
    against one device: the largest difference of a weight, the largest change of one, and bytes of
    moments that a device has as a share of all. Two layers with experts."""
    result = []
    for mesh in (None, on_mesh(degrees, moments_over_data=True)):
        model = learners.experts(**({} if mesh is None else {"mesh": mesh}))
        trainer, state = learners.begin(model, learners.stage(optimizer=options), fresh=True)
        policy = trainer.optimizer_steps[WeightGroup.POLICY]
        step = jax.jit(policy.apply, out_shardings=(policy.shardings, None))
        learner = state.policy
        rng = np.random.default_rng(0)
        before = learners.host(learner.params)
        for _ in range(2):
            grads = {
                path: rng.normal(size=size).astype(np.float32)
                for path, size in sorted(model.graph.sizes.items())
                if path not in model.graph.untrained
            }
            learner, _ = step(learner, grads, jnp.float32(0.0), {})
        result.append(learners.host(learner.params))
    moments = [array for array in jax.tree.leaves(learner.optimizer) if array.ndim]
    one, many = result
    return {
        "weights": max(float(np.abs(many[path] - one[path]).max()) for path in one),
        "change": max(float(np.abs(one[path] - before[path]).max()) for path in one),
        "share": sum(a.addressable_shards[0].data.nbytes for a in moments)
        / sum(a.nbytes for a in moments),
    }


def orthogonal(degrees: dict, axes: list, inputs: list, shape: list) -> dict:
    """Which collectives the compiled Newton-Schulz iteration of an array of matrices has, and its
    largest difference from one device."""
    mesh = on_mesh(degrees, moments_over_data=True)
    outputs = [
        dim for dim, axis in enumerate(axes) if dim not in inputs and axis not in ("layers", "exp")
    ]
    dims = MatrixDims(tuple(inputs), tuple(outputs))
    named = WeightAxes({"w": tuple(axes)}, {"w": dims}, mesh)
    place = NamedSharding(mesh.mesh, mesh.moment_spec(named.names["w"], tuple(shape)))
    alone = replace(named, layout=layout({}, devices=jax.devices()[:1]))
    momentum = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def run(momentum, axes):
        return orthogonalized("w", momentum, axes, 5)

    one = jax.jit(partial(run, axes=alone))(momentum)
    many = jax.jit(partial(run, axes=named), in_shardings=place, out_shardings=place)
    text = many.lower(momentum).compile().as_text()
    return {
        "collectives": sorted(
            {name for name in ("all-gather", "all-reduce", "all-to-all") if f" {name}(" in text}
        ),
        "difference": float(np.abs(np.asarray(many(momentum)) - np.asarray(one)).max()),
    }


def completions(kind: str, degrees: dict, options: dict, how: dict | None = None) -> dict:
    """Greedy completions on a mesh against one device: whether the tokens are equal, the largest
    difference of a log-probability, and into how many parts the slots were cut. `how`: fields of
    the runtime on the mesh."""
    config, result = families.read(MODELS[kind]()), []
    if options.get("rules") == "stationary":
        options = options | {"rules": STATIONARY_RULES}
    for mesh, runtime in ((None, Runtime()), (on_mesh(degrees), Runtime(**(how or {})))):
        model = random_model(config, seed=3, mesh=mesh, runtime=runtime)
        generator = Generator(model, max_length=32, slots=8, options=GeneratorOptions(**options))
        result.append(
            [
                c
                for (c,) in generator.generate(
                    PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0)
                )
            ]
        )
    one, many = result
    return {
        "equal": [c.tokens for c in one] == [c.tokens for c in many],
        "logprobs": max(
            float(np.abs(np.subtract(a.logprobs, b.logprobs)).max())
            for a, b in zip(one, many, strict=True)
        ),
        "parts": generator.engine.runner.geometry.batch_sizes[0],
    }


if __name__ == "__main__":
    print(json.dumps([globals()[what](*arguments) for what, *arguments in json.loads(sys.argv[1])]))
