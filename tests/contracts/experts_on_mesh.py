"""Mixtures of experts on a mesh of CPU devices against one device: run by
test_experts_on_a_mesh.py.

    python experts_on_mesh.py '[["layer", {"expert": 2}, "gather", "groups", {}], ...]'

Prints a JSON list with the findings of each case: the largest differences, as a share of the
largest number.
"""

import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from policy import families
from policy.cache.step import Step
from policy.config import ClampedSwiglu, DecoderConfig, Mlp, Moe, Norm, Router, Runtime
from policy.experts import expert_parallel, expert_shards, experts
from policy.experts.moe import MixtureOfExperts
from policy.mesh.sharding import layout
from policy.model import Model
from policy.modes import make_step
from rollout import Generator, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import learners
import oracles
from oracles import STANDARD, configuration, random_model

E = 16
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
GROUPS = {
    "score": "sigmoid",
    "correction_bias": True,
    "groups": 4,
    "topk_groups": 2,
    "group_score": "top2",
    "scale": 2.5,
}
LIMITED = ClampedSwiglu(0.5, alpha=1.0, up_offset=0.0)
MIXTURES = {
    "groups": Moe(Router(8, 3, **GROUPS), 12, shared=Mlp(8)),
    "biases": Moe(Router(8, 2, bias=True), 12, bias=True, clamp=ClampedSwiglu(1.0)),
    "input": Moe(Router(8, 1, score="sigmoid", renormalize=False), 12, weigh="input"),
    "limited": Moe(
        Router(8, 2, "sqrt_softplus", correction_bias=True),
        12,
        shared=Mlp(8, clamp=LIMITED),
        clamp=LIMITED,
    ),
    "narrow": Moe(Router(8, 2), 9, bias=True),
    "six": Moe(Router(6, 2), 12),
}


def mixture(name: str, skew: float):
    """(graph, numpy weights) of a mixture; a large `skew` sends all tokens to the last experts."""
    with nnx.use_eager_sharding(False):
        module = MixtureOfExperts(
            MIXTURES[name], DecoderConfig(16, E, (), Norm(), "none", "{}"), nnx.Rngs(0)
        )
    graph, state = nnx.split(module)
    rng = np.random.default_rng(1)
    weights = jax.tree.map(lambda a: rng.normal(0, 0.5, a.shape).astype(np.float32), state)
    for bias in ("bias", "correction_bias") if skew else ():
        if bias in weights["router"]:
            tilt = skew * np.arange(MIXTURES[name].router.experts, dtype=np.float32)
            weights["router"][bias] = weights["router"][bias].replace(tilt)
    return graph, weights


def rows(B: int, T: int, equal_rows: int = 0):
    """(x, cotangent, segments with two packed texts and padding); all tokens of the first
    `equal_rows` rows are the same."""
    rng = np.random.default_rng(2)
    x, cotangent = rng.normal(size=(2, B, T, E)).astype(np.float32)
    x[:equal_rows] = x[0, 0]
    segments = np.where(np.arange(T) < T // 2, 1, 2) * (
        np.arange(T) < rng.integers(1, T + 1, (B, 1))
    )
    return x, cotangent, segments.astype(np.int32)


def in_expected_room_only(tokens, ready, body, shards):
    """In place of `expert_parallel._in_parts`: what has room for the worst case computes nothing
    that is a number."""
    out, dropped = IN_PARTS(tokens, ready, body, shards)
    return out * jnp.nan if shards.worst_case else out, dropped


IN_PARTS = expert_parallel._in_parts


@cache
def computed(
    name: str,
    degrees: str,
    shape: tuple[int, ...],
    skew: float,
    how: str,
    room: int = 1 << 30,
    usual: str = "",
) -> dict:
    """Everything that a mixture computes of `rows(*shape)`, by name, on a mesh (null: one device)
    with room for so many bytes of rows at once. `usual`: nothing but the usual room may be taken
    ("only"), or it is small enough for there to be one ("small"), or tokens go through every expert
    ("every")."""
    expert_shards.ROOM, expert_shards.SPARE = room, 0 if usual else 64
    expert_parallel._in_parts = in_expected_room_only if usual == "only" else IN_PARTS
    experts.small_batch = lambda tokens, platform: usual == "every"
    graph, weights = mixture(name, skew)
    degrees, how = json.loads(degrees), json.loads(how)
    mesh = layout(degrees) if degrees else layout({"fsdp": 1}, devices=jax.devices()[:1])
    runtime = Runtime(**how)
    runtime = replace(runtime, layout=mesh.for_experts(runtime.expert_parallel))

    def run(weights, x, cotangent, segments):
        def forward(weights, x):
            step = Step(jnp.zeros_like(segments), segments)
            out, aux = nnx.merge(graph, weights)(x.astype(runtime.dtype), step, runtime)
            return out.astype(jnp.float32), aux.routing

        with jax.default_matmul_precision("highest"):
            out, back, routing = jax.vjp(forward, weights, x, has_aux=True)
            return out, *back(cotangent), routing

    out, d_weights, d_x, routing = jax.block_until_ready(jax.jit(run)(weights, *rows(*shape)))
    result = {
        "out": out,
        "d_x": d_x,
        "counts": routing.counts,
        "balance": routing.balance,
        "share": routing.share,
    }
    result |= {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(d_weights)
    }
    if routing.dropped is not None:
        result["dropped"] = routing.dropped
    return {name: np.asarray(a) for name, a in result.items()}


def layer(degrees: dict, scheme: str, name: str, options: dict) -> dict:
    """The array that differs most from one device, the difference as a share of its largest number
    (at least 1e-3), the choices dropped on the mesh, and the share of the output that is finite
    there."""
    options = {
        "shape": (8, 6),
        "skew": 0.0,
        "one": {},
        "how": {},
        "room": 1 << 30,
        "usual": "",
    } | options
    case = tuple(options["shape"]), options["skew"]
    one = computed(name, "null", *case, json.dumps(options["how"] | options["one"]))
    how = json.dumps(options["how"] | {"expert_parallel": scheme})
    many = computed(name, json.dumps(degrees), *case, how, options["room"], options["usual"])
    differences = {
        key: float(np.abs(many[key] - a).max() / max(np.abs(a).max(), 1e-3))
        for key, a in one.items()
    }
    worst = max(differences, key=differences.get)
    dropped, choices = float(many.get("dropped", 0)), float(many["counts"].sum())
    finite = float(np.isfinite(many["out"]).mean())
    return {
        "worst": worst,
        "difference": differences[worst],
        "dropped": dropped,
        "choices": choices,
        "finite": finite,
    }


@cache
def derived(degrees: str, how: str):
    """(log-probabilities, counts of choices, gradients) of a decoder with a dense layer and two of
    experts, on packed and padded rows, on a mesh (null: one device)."""
    config = families.read(
        configuration("DeepseekV3", **STANDARD["DeepseekV3"] | {"num_hidden_layers": 3})
    )
    tokens, cotangent = (
        oracles.tokens(8, 12),
        np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32),
    )
    segments, degrees = rows(8, 12)[2], json.loads(degrees)
    model = random_model(
        config, runtime=Runtime(**json.loads(how)), mesh=layout(degrees) if degrees else None
    )

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, tokens, segments):
        logp, entropy, aux = model.graph.logprobs(
            params, tokens, make_step(tokens, segments=segments), 0.9
        )
        balance = sum(routing.balance.sum() for routing in aux.by_layer("routing").values())
        counts = jnp.stack([routing.counts.sum(0) for routing in aux.by_layer("routing").values()])
        return jnp.sum(cotangent * logp + entropy) + balance, (logp, counts)

    (_, (logp, counts)), gradient = jax.block_until_ready(loss(model.params, tokens, segments))
    return (
        np.asarray(logp),
        np.asarray(counts),
        {path: np.asarray(g) for path, g in gradient.items()},
    )


def gradients(degrees: dict, how: dict) -> dict:
    """`derived` on a mesh against one device that runs plainly, by the same rule of quantisation:
    the largest difference of a log-probability, and of a gradient as a share of the largest number
    in it (at least a thousandth of the largest of all)."""
    logp, counts, one = derived("null", json.dumps({"quantization": how.get("quantization")}))
    also, same, many = derived(json.dumps(degrees), json.dumps(how))
    largest = {path: float(np.abs(gradient).max()) for path, gradient in one.items()}
    floor = 1e-3 * max(largest.values())
    shares = {
        path: float(np.abs(many[path] - one[path]).max()) / max(floor, largest[path])
        for path in one
    }
    worst = max(shares, key=shares.get)
    moved = int((counts != same).sum())
    return {
        "logprobs": float(np.abs(also - logp).max()),
        "gradient": shares[worst],
        "worst": worst,
        "counts": moved,
    }


@cache
def trained(degrees: str, changes: str, options: str):
    """(weights, metrics, greedy completions, how many weights are stored in pieces) of a small
    model after two updates in micro-batches, on a mesh (null: one device)."""
    degrees, keys = (
        json.loads(degrees),
        {"algorithm": "sft", "micro_batch": 4} | json.loads(options),
    )
    keys["router"] = {"bias_rate": 0.05, "balance_coef": 0.3} | keys.get("router", {})
    runtime = replace(learners.QUICK, **json.loads(changes))
    model = learners.experts(runtime=runtime, **({"mesh": layout(degrees)} if degrees else {}))
    trainer, state = learners.begin(model, learners.stage(**keys), fresh=True)
    cut = sum(len({str(s.index) for s in a.addressable_shards}) > 1 for a in model.params.values())
    for seed in (0, 1):
        state, metrics = trainer.update(state, learners.batch(seed=seed))
    generator = Generator(Model(model.graph, state.policy.params), max_length=24, slots=6)
    written = generator.generate(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0))
    result = {path: np.asarray(a) for path, a in state.policy.params.items()}
    return result, {name: float(m) for name, m in metrics.items()}, [c for (c,) in written], cut


def update(degrees: dict, scheme: str, options: dict) -> dict:
    """`trained` on a mesh against one device: how many biases differ at all, the largest difference
    of a weight, of a metric, of a log-probability, and whether completions are equal."""
    how, options = (
        options.get("how", {}),
        {name: value for name, value in options.items() if name != "how"},
    )
    one, logged, texts, _ = trained("null", "{}", json.dumps(options))
    many, also, same, cut = trained(
        json.dumps(degrees), json.dumps({"expert_parallel": scheme} | how), json.dumps(options)
    )
    biases = [path for path in one if path.endswith("correction_bias")]
    return {
        "biases": int(sum((many[path] != one[path]).sum() for path in biases)),
        "cut": cut,
        "weights": max(float(np.abs(many[path] - one[path]).max()) for path in one),
        "metrics": max(abs(also[name] - value) for name, value in logged.items()),
        "dropped": also.get("moe/dropped", 0.0),
        "logprobs": max(
            float(np.abs(np.subtract(a.logprobs, b.logprobs)).max())
            for a, b in zip(texts, same, strict=True)
        ),
        "equal": [a.tokens for a in texts] == [b.tokens for b in same],
    }


def rounded_gradients(degrees: dict, rows: int) -> dict:
    """The gradient of the sums that `hand_back` returns, in few bits: the largest difference of a
    number from the exact one, as a share of it, and how many differ at all. Row i is 10^-i times as
    large as the first, so no row can do with another's scale."""
    mesh = layout(degrees)
    runtime = Runtime(
        expert_parallel="gather", expert_gradients="float8_e5m2", layout=mesh.for_experts("gather")
    )
    cut = expert_shards.ExpertShards(MIXTURES["groups"], runtime, (rows, 1, E))
    parts = jax.sharding.PartitionSpec("expert")
    hand_back = jax.shard_map(
        partial(expert_parallel.hand_back, shards=cut),
        mesh=mesh.mesh,
        in_specs=parts,
        out_specs=parts,
    )
    g = np.random.default_rng(0).uniform(0.5, 1.0, (rows, E)) / 10.0 ** np.arange(rows)[:, None]
    g = g.astype(np.float32)
    sums = jnp.zeros((rows * degrees["expert"], E))
    (result,) = jax.jit(lambda sums, g: jax.vjp(hand_back, sums)[1](g))(sums, g)
    shares = np.abs(np.asarray(result).reshape(-1, rows, E) - g) / g
    return {"share": float(shares.max()), "differ": int((shares > 0).sum())}


if __name__ == "__main__":
    print(json.dumps([globals()[what](*arguments) for what, *arguments in json.loads(sys.argv[1])]))
