"""What holds of every optimizer, and each rule against one that was not written here."""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import learners
import numpy as np
import optax
import oracles
import pytest
from jax.sharding import AbstractMesh
from learners import host, same_bits
from pydantic import ValidationError

from policy import families
from policy.config import MultiTokenPrediction
from policy.huggingface.model_directory import places
from policy.media import Encoder, Siglip
from policy.mesh.sharding import Layout, layout
from policy.model import Graph
from policy.ops.parameter import MatrixDims
from rl.config import foreign
from rl.config.run import RunConfig
from rl.config.stage import (
    BY_MATRIX,
    BY_NUMBER,
    ONE_BY_NUMBER,
    OPTIMIZERS,
    OptimizerOptions,
    StageOptions,
)
from rl.run.checkpoint import Checkpoints
from rl.training import optimizer as optimizers
from rl.training.optimizer import WeightAxes, at_once, at_update, optimizer, update_count
from rl.training.teachers.projections import FeatureProjections

_DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"
OPTIONS = {
    "adamw": {"learning_rate": 0.05},
    "muon": {"learning_rate": 0.2},
    "lion": {"learning_rate": 0.03},
    "sgd": {"learning_rate": 0.02},
    "adafactor": {"learning_rate": 0.05},
}
"""Name of an optimizer -> options of the tests."""
VARIANTS = {
    "muon, original scale, no nesterov": {
        "name": "muon",
        "learning_rate": 0.05,
        "update_scale": "original",
        "nesterov": False,
    },
    "sgd without momentum": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.0},
    "adafactor, scaled": {"name": "adafactor", "learning_rate": 0.2, "scale_parameter": True},
}
EVERY = pytest.mark.parametrize("name", OPTIONS)

# Two layers of a decoder with three experts: shape, logical axes, dimensions of matrices.
WEIGHTS = {
    "embed_tokens": ((10, 6), ("vocab", "embed_vocab"), None),
    "norm.weight": ((6,), ("norm",), None),
    "stacks.0.layers.0.expert_up_proj": (
        (2, 3, 6, 4),
        ("layers", "exp", "embed_moe", "mlp_moe"),
        MatrixDims((2,), (3,)),
    ),
    "stacks.0.layers.0.input_norm": ((2, 6), ("layers", "norm"), None),
    "stacks.0.layers.0.o_a_proj": (
        (2, 2, 5, 3),
        ("layers", "heads", "embed", None),
        MatrixDims((2,), (3,)),
    ),
    "stacks.0.layers.0.o_proj": (
        (2, 2, 3, 6),
        ("layers", "heads", "kv", "embed"),
        MatrixDims((1, 2), (3,)),
    ),
    "stacks.0.layers.0.q_proj": (
        (2, 6, 2, 3),
        ("layers", "embed", "q_heads", "kv"),
        MatrixDims((1,), (2, 3)),
    ),
    "stacks.0.layers.0.router": ((2, 6, 3), ("layers", "embed", None), MatrixDims((1,), (2,))),
}
EXPERT = "stacks.0.layers.0.expert_up_proj"
AXES = WeightAxes(
    names={path: names for path, (_, names, _) in WEIGHTS.items()},
    matrices={path: matrix for path, (_, _, matrix) in WEIGHTS.items() if matrix},
    layout=layout({}, None, jax.devices()[:1]),
)


def options_of(case: str, **more) -> OptimizerOptions:
    return OptimizerOptions.model_validate({"name": case} | (OPTIONS | VARIANTS)[case] | more)


def numbers(seed: int, dtype="float32") -> dict:
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=shape).astype(jnp.dtype(dtype))
        for path, (shape, _, _) in WEIGHTS.items()
    }


def transform_of(options: OptimizerOptions, axes: WeightAxes = AXES, dtype="float32"):
    return optimizer(options, lambda count: options.learning_rate, axes, dtype)


@functools.cache
def program(case: str, dtype: str = "float32", **more):
    """(start: weights -> state, step: (grads, state, weights, good) -> (weights, state)); tests
    with equal options share the programs."""
    transform = transform_of(options_of(case, **more), dtype=dtype)
    step = jax.jit(lambda *arguments: at_once(transform, *arguments)[:2])
    return jax.jit(transform.init), step


def stepped(case, weights, grads, updates=3, **how):
    """(weights, state) after updates by the same gradients."""
    start, step = program(case, **how)
    state = start(weights)
    for _ in range(updates):
        weights, state = step(grads, state, weights, np.bool_(True))
    return weights, state


def test_every_optimizer_is_in_the_list():
    assert OPTIONS.keys() == OPTIMIZERS.keys() == optimizers.RULES.keys()
    assert {*BY_MATRIX} | {*BY_NUMBER} == OPTIMIZERS.keys()
    table = _DOCS.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", table, re.M)[1:] == [*OPTIMIZERS]
    for name in OPTIMIZERS:
        assert f"`{name}`" in foreign.NOTES["optim"]


# What holds of every optimizer


@EVERY
def test_it_learns(name):
    """Less than half of the distance to a target is left after 60 updates, in every kind of
    weight."""
    start, step = program(name)
    target, weights = numbers(1), numbers(0)
    state = start(weights)
    for _ in range(60):
        grads = {path: 2 * (np.asarray(weights[path]) - target[path]) for path in target}
        weights, state = step(grads, state, weights, np.bool_(True))
    for path, first in numbers(0).items():
        left = np.linalg.norm(weights[path] - target[path])
        assert left < np.linalg.norm(first - target[path]) / 2, path


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_state_goes_on_with_the_same_bits(name, dtype, tmp_path):
    _, step = program(name, dtype)
    grads = numbers(2)
    saved = stepped(name, numbers(0, dtype), grads, dtype=dtype)
    if dtype == "bfloat16":  # small steps add up in a copy
        assert {array.dtype.name for array in saved[1][0].values()} == {"float32"}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, saved, {}, wait=True)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), saved
    )
    restored = checkpoints.restore(shapes)[1]
    assert same_bits(host(saved), host(restored))
    on, restored_on = (step(grads, s, w, np.bool_(True)) for w, s in (saved, restored))
    assert same_bits(host(on), host(restored_on))
    assert int(update_count(on[1])) == 4


@EVERY
def test_an_update_that_is_not_finite_changes_nothing(name):
    _, step = program(name)
    weights, state = stepped(name, numbers(0), numbers(2))
    broken = numbers(3)
    for grad in broken.values():
        grad.flat[0] = np.nan
    same = step(broken, state, weights, np.bool_(False))
    assert same_bits(host((weights, state)), host(same))


@EVERY
def test_decay_and_rate_act_on_matrices_as_those_of_adamw(name):
    """The learning rate is that of the number of the update, and a decay takes rate * decay *
    weight off the matrices, the table among them."""
    weights, grads = numbers(0), numbers(2)
    transforms = [
        optimizer(options_of(name, weight_decay=decay), lambda count: 0.01 * count, AXES, "float32")
        for decay in (0.0, 0.1)
    ]

    @jax.jit
    def steps(weights, grads):
        states = [at_update(each.init(weights), 7) for each in transforms]
        return [
            each.update(grads, state, weights)[0]
            for each, state in zip(transforms, states, strict=True)
        ]

    plain, decayed = steps(weights, grads)
    for path, weight in weights.items():
        taken = 0.0 if "norm" in path else 0.07 * 0.1 * weight
        np.testing.assert_allclose(plain[path] - decayed[path], taken, atol=1e-6)


@EVERY
def test_moments_of_few_bits_are_stored_so(name):
    weights, state = stepped(name, numbers(0), numbers(2), state_dtype="bfloat16")
    assert {a.dtype.name for a in jax.tree.leaves(state)} <= {"bfloat16", "int32"}
    exact = stepped(name, numbers(0), numbers(2))[0]
    for path, first in numbers(0).items():
        moved = np.abs(exact[path] - first).max()
        np.testing.assert_allclose(weights[path], exact[path], atol=0.1 * moved, err_msg=path)


@EVERY
def test_a_layer_and_an_expert_are_what_they_are_alone(name):
    """Scans, stacks and experts change no number: each layer, and each expert, alone, gets the same
    change."""
    together = stepped(name, numbers(0), numbers(2))[0]
    stacks = [path for path in WEIGHTS if path.startswith("stacks.")]

    def second(arrays):
        """The second layer, and of the experts the third."""
        layer = {path: np.asarray(arrays[path])[1:] for path in stacks}
        return layer | {EXPERT: layer[EXPERT][:, 2:]}

    alone = stepped(name, second(numbers(0)), second(numbers(2)))[0]
    for path, expected in second(together).items():
        np.testing.assert_allclose(alone[path], expected, rtol=2e-6, atol=6e-6, err_msg=path)


@pytest.mark.parametrize("case", [*OPTIONS, "sgd without momentum"])
def test_a_trainer_plans_the_state_that_it_makes(case):
    """Shapes, types and shardings of the state, which a plan counts, of a model with latent
    attention and experts."""
    options = options_of(case)
    keys = {"algorithm": "sft", "steps": 10, "optimizer": options.model_dump()}
    trainer, state = learners.begin(learners.experts(), StageOptions.model_validate(keys))

    def described(tree):
        return jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), tree)

    made = state.policy.optimizer
    assert described(made) == described(trainer.abstract().policy.optimizer)
    sizes = {path: math.prod(size) for path, size in trainer.graph.sizes.items()}
    matrices = sum(sizes[path] for path in trainer.graph.matrices)
    others = sum(sizes.values()) - matrices - sum(sizes[path] for path in trainer.graph.untrained)
    kept = sum(a.size for a in jax.tree.leaves(made) if a.ndim)
    expected = {
        "adamw": 2 * (matrices + others),
        "muon": matrices + 2 * others,
        "lion": matrices + others,
        "sgd": matrices + others,
        "sgd without momentum": 0,
    }
    if case == "adafactor":
        assert kept < (matrices + others) / 2
    elif case in expected:
        assert kept == expected[case]


# The rules


def numpy_muon(weight, grads, rate, decay, scale, momentum=0.95, nesterov=True):
    """The matrix [d_in, d_out] after updates by these gradients: Keller Jordan's algorithm (the
    post Muon), with the scale of Moonlight's equation 4."""
    d_in, d_out = weight.shape
    buffer = np.zeros_like(weight)
    for grad in grads:
        buffer = momentum * buffer + grad
        x = grad + momentum * buffer if nesterov else buffer
        x = x / np.sqrt((x**2).sum())
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        factor = 0.2 * max(d_in, d_out) ** 0.5 if scale else max(1, d_out / d_in) ** 0.5
        weight = weight - rate * (factor * x + decay * weight)
    return weight


@pytest.mark.parametrize("case", ["muon", "muon, original scale, no nesterov"])
def test_muon_is_that_of_the_papers(case):
    """Heads joined; a matrix for each layer, for each expert and for each group of heads with
    inputs of its own. All other weights as AdamW has them."""
    options = options_of(case, weight_decay=0.1)
    adamw = {"learning_rate": options.learning_rate, "weight_decay": 0.1}
    grads = [numbers(seed) for seed in (2, 3, 4)]

    def run(name, **more):
        start, step = program(name, **more)
        weights, state = numbers(0), start(numbers(0))
        for each in grads:
            weights, state = step(each, state, weights, np.bool_(True))
        return weights

    weights, theirs = run(case, weight_decay=0.1), run("adamw", **adamw)

    def expected(path, shape, index):
        matrix, *changes = (
            each[path].astype(np.float64)[index].reshape(shape) for each in (numbers(0), *grads)
        )
        scale = options.update_scale == "match_rms_adamw"
        how = options.learning_rate, 0.1, scale, options.momentum, options.nesterov
        return numpy_muon(matrix, changes, *how)

    layer = "stacks.0.layers.0."
    for path, shape, index in (
        (layer + "q_proj", (6, 6), (0,)),
        (layer + "o_proj", (6, 6), (1,)),
        (EXPERT, (6, 4), (1, 2)),
        (layer + "o_a_proj", (5, 3), (0, 1)),
        (layer + "router", (6, 3), (1,)),
    ):
        actual = np.asarray(weights[path])[index].reshape(shape)
        ours = expected(path, shape, index)
        np.testing.assert_allclose(actual, ours, rtol=1e-4, atol=1e-5, err_msg=path)
    for path in ("embed_tokens", "norm.weight", layer + "input_norm"):
        np.testing.assert_allclose(weights[path], theirs[path], rtol=1e-6, err_msg=path)


def test_a_change_of_muon_is_as_large_as_one_of_adamw():
    """0.2 is the root mean square of AdamW's changes (section 2.2 of the paper of Moonlight), for
    wide and for tall matrices."""
    rng = np.random.default_rng(0)
    sizes = {"wide": (16, 64), "tall": (64, 16), "square": (32, 32)}
    axes = WeightAxes(
        dict.fromkeys(sizes, ("embed", "mlp")),
        dict.fromkeys(sizes, MatrixDims((0,), (1,))),
        AXES.layout,
    )
    transform = transform_of(options_of("muon", learning_rate=1.0), axes)
    grads = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    changes = jax.jit(lambda g: transform.update(g, transform.init(g), g)[0])(grads)
    for name, change in changes.items():
        assert 0.15 < np.sqrt(np.mean(np.square(change))) < 0.23, name


def test_a_matrix_without_a_gradient_stays():
    """An expert that no token chose, in the first update."""
    weights, grads = numbers(0), numbers(2)
    grads[EXPERT][:, 1] = 0
    after = stepped("muon", weights, grads, updates=1)[0][EXPERT]
    np.testing.assert_array_equal(after[:, 1], weights[EXPERT][:, 1])
    assert (after[:, 0] != weights[EXPERT][:, 0]).all()


THEIRS = {
    "adamw": lambda rate: optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1),
    "lion": lambda rate: optax.lion(rate, b1=0.9, b2=0.99, weight_decay=0.1),
    "sgd": lambda rate: optax.chain(
        optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate)
    ),
    "sgd without momentum": lambda rate: optax.chain(
        optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate)
    ),
    "adafactor": lambda rate: optax.adafactor(
        rate,
        min_dim_size_to_factor=1,
        multiply_by_parameter_scale=False,
        weight_decay_rate=0.1 * rate,
    ),
    "adafactor, scaled": lambda rate: optax.adafactor(
        rate, min_dim_size_to_factor=1, weight_decay_rate=0.1 * rate
    ),
}


@pytest.mark.parametrize("case", THEIRS)
def test_a_plain_matrix_is_stepped_as_by_optax(case):
    axes = WeightAxes({"w": ("embed", "mlp")}, {"w": MatrixDims((0,), (1,))}, AXES.layout)
    options = options_of(case, weight_decay=0.1)
    rng = np.random.default_rng(0)
    first, *grads = ({"w": rng.normal(size=(7, 5)).astype(np.float32)} for _ in range(5))

    def run(transform):
        @jax.jit
        def step(grads, state, weights):
            changes, state = transform.update(grads, state, weights)
            return optax.apply_updates(weights, changes), state

        weights, state = first, jax.jit(transform.init)(first)
        for each in grads:
            weights, state = step(each, state, weights)
        return weights["w"]

    ours = run(transform_of(options, axes))
    theirs = run(THEIRS[case](options.learning_rate))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_matrices_of_a_decoder():
    """Every weight of a product, with the dimensions that its products sum over as rows."""
    graph: Graph = learners.experts().graph
    axes = WeightAxes(graph.axes, graph.matrices, graph.layout)

    def names(path):
        return tuple(
            tuple(graph.axes[path][dim] for dim in dims)
            for dims in (axes.rows(path), axes.columns(path))
        )

    ends = {path.split(".layers.0.")[-1]: names(path) for path in graph.paths}
    assert ends["mixer.o_proj"] == (("heads", "kv"), ("embed",))
    assert ends["mixer.kv_b_proj"] == (("kv_lora",), ("kv_heads", "kv_head_dim"))
    assert ends["feed_forward.expert_up_proj"] == (("embed_moe",), ("mlp_moe",))
    assert ends["embed_tokens"] == (("vocab",), ("embed_vocab",))
    assert ends["input_layernorm.weight"] == ((), ("norm",))


ADAMW_OF_MUON = {
    "DeepseekV3": "embed_tokens lm_head",
    "DeepseekV4": "embed head",
    "Qwen3Next": "embed_tokens lm_head linear_attn.conv1d",
    "KimiLinear": "embed_tokens lm_head q_conv1d k_conv1d v_conv1d",
    "NemotronH": "embeddings lm_head mixer.conv1d",
    "Qwen4Exp": "embed_tokens lm_head linear_attn.conv1d ngram_embedding.shard_0 ple.conv1d",
    "Gemma4Small": "embed_tokens embed_tokens_per_layer",
    "Lfm2": "embed_tokens conv.conv",
}
"""Kind of model -> ends of the stored names of the weights that decay and are no matrix, by hand."""


@pytest.mark.parametrize("kind", ADAMW_OF_MUON)
def test_muon_takes_all_but_tables_convolutions_and_vectors(kind):
    graph = Graph(families.read(oracles.short(kind)), learners.QUICK, AXES.layout)
    axes = WeightAxes(graph.axes, graph.matrices, graph.layout)
    ends = set()
    for place in places(graph):
        if place.path in graph.untrained or place.path in graph.matrices:
            continue
        name = place.name(place.stored, place.layers and place.layers[0], 0).removesuffix(".weight")
        if axes.decays(place.path):
            ends |= {end for end in ADAMW_OF_MUON[kind].split() if f".{name}".endswith(f".{end}")}
            assert any(f".{name}".endswith(f".{end}") for end in ends), name
    assert ends == set(ADAMW_OF_MUON[kind].split())
    assert (
        graph.inputs.items() <= {path: dims.rows for path, dims in graph.matrices.items()}.items()
    )
    for path, (rows, columns) in graph.matrices.items():
        counted = {graph.axes[path][dim] for dim in range(len(graph.axes[path]))} - {
            graph.axes[path][dim] for dim in rows + columns
        }
        assert counted <= {"layers", "exp", "heads"}, path


def test_muon_takes_prediction_modules_towers_and_projections_of_features():
    config = families.read(oracles.short("DeepseekV3"))
    layer = config.stacks[-1].pattern[0]
    modules = MultiTokenPrediction(depth=2, layer=layer)
    graph = Graph(replace(config, multi_token_prediction=modules), learners.QUICK, AXES.layout)
    joined = graph.matrices["mtp.eh_proj"]
    assert joined == MatrixDims((1,), (2,)) and "mtp.eh_proj" not in graph.inputs
    left = {path for path in graph.paths if path.startswith("mtp.") and path not in graph.matrices}
    assert all("norm" in path or "correction_bias" in path for path in left)
    blocks = Encoder(depth=2, width=8, heads=2, mlp_width=16, activation="gelu_tanh", eps=1e-6)
    image = Siglip(blocks, patch=2, side=4, pool=2)
    pictures = Graph(replace(config, image=image), learners.QUICK, AXES.layout)
    tower = {path for path in pictures.paths if path.startswith("image.")}
    assert {path for path in tower if path.endswith("_proj")} == tower & pictures.matrices.keys()
    assert not tower & pictures.inputs.keys()
    (q_proj,) = (path for path in tower if path.endswith("q_proj"))
    assert pictures.matrices[q_proj] == MatrixDims((1,), (2, 3)), "heads are joined"
    maps = FeatureProjections(graph, width=8, pairs=[(0, 1)])
    assert maps.matrices.keys() == maps.axes.keys()


def test_operations_of_newton_schulz():
    options = options_of("muon")
    sizes = {EXPERT: (2, 3, 6, 4), "norm.weight": (6,), "embed_tokens": (10, 6)}
    # X X^T, (X X^T)^2 and its product with X, of 6 matrices whose sides are 4 and 6.
    each = 2 * 4 * 4 * 6 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 6
    assert optimizers.operations(options, AXES, sizes) == 5 * 6 * each
    assert optimizers.operations(options_of("adamw"), AXES, sizes) == 0


NO_DECAY = {
    "Qwen3Next": "input_layernorm post_attention_layernorm norm q_norm k_norm "
    "linear_attn.norm A_log dt_bias",
    "KimiLinear": "input_layernorm post_attention_layernorm norm kv_a_layernorm o_norm A_log dt_bias",
    "NemotronH": "norm norm_f mixer.norm A_log D dt_bias conv1d.bias",
    "GptOss": "input_layernorm post_attention_layernorm norm sinks q_proj.bias k_proj.bias "
    "v_proj.bias o_proj.bias router.bias gate_up_proj_bias down_proj_bias",
}
"""Kind of model -> ends of the stored names of what weight decay leaves, by hand."""


@pytest.mark.parametrize("kind", NO_DECAY)
def test_decay_leaves_norms_biases_and_decays_of_states(kind):
    graph = Graph(families.read(oracles.short(kind)), learners.QUICK, AXES.layout)
    axes = WeightAxes(graph.axes, graph.matrices, graph.layout)
    left = set()
    for place in places(graph):
        name = place.name(place.stored, place.layers and place.layers[0], 0).removesuffix(".weight")
        ends = [end for end in NO_DECAY[kind].split() if f".{name}".endswith(f".{end}")]
        if place.path in graph.untrained:
            continue
        assert axes.decays(place.path) == (not ends), (name, place.path)
        left |= set(ends)
    assert left == set(NO_DECAY[kind].split())


def test_decay_takes_tables_kernels_and_towers_and_no_vector_of_streams():
    names = {
        "image.blocks.0.q_proj": ("layers", "embed", "q_heads", "kv"),
        "layers.0.lookup.key_proj": (None, "engram_dim", "embed"),
        "layers.0.lookup.table": (None, "engram_row"),
        "layers.0.mixer.q_conv": ("layers", "kv_heads", "kv", None),
        "mixer.compressor.position_bias": (None, "kv"),
        "layers.0.lookup.key_bias": (None, None),
        "layers.0.lookup.conv_norm": (None, "norm"),
        "mixer_residual.reader.norm": ("layers", None, "norm"),
    }
    axes = WeightAxes(names, {}, AXES.layout)
    assert [axes.decays(path) for path in names] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(("experts", "count"), [(256, 1024), (5, 64)])
def test_muon_fills_up_the_product_of_layers_and_experts(experts, count):
    """4 layers of 256 experts on 64 devices are 1024 matrices, and no zeros."""
    mesh = AbstractMesh((1, 64), ("data", "fsdp"))
    layout = Layout(mesh, (("embed_moe", ("fsdp",)),))
    axes = WeightAxes(
        {"w": ("layers", "exp", "embed_moe", "mlp_moe")}, {"w": MatrixDims((2,), (3,))}, layout
    )
    weight = jax.ShapeDtypeStruct((4, experts, 64, 8), jnp.float32)
    program = str(jax.make_jaxpr(lambda w: optimizers.orthogonalized("w", w, axes, 1))(weight))
    assert max(int(n) for n in re.findall(r"f32\[(\d+),64,8\]", program)) == count


# Options


def test_nesterov_of_sgd_needs_momentum():
    with pytest.raises(ValidationError, match="`nesterov: true` needs a `momentum` above 0"):
        OptimizerOptions(name="sgd", momentum=0.0, nesterov=True)
    assert OptimizerOptions(name="sgd", nesterov=True).nesterov


def test_the_optimizer_of_a_critic_is_checked_where_there_is_one():
    def run(algorithm):
        stage = {"algorithm": algorithm, "steps": 1, "critic": {"name": "muon"}}
        model = {"source": "tiny-deepseek", "table_memory": "host"}
        return RunConfig.model_validate(
            {"model": model, "data": {"path": "rows.jsonl"}, "stages": [stage]}
        )

    assert run("grpo").stages[0].critic.name == "muon"
    with pytest.raises(ValidationError, match=f"must be {ONE_BY_NUMBER} with"):
        run("ppo")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_of_other_optimizers_are_refused(name):
    own = OPTIMIZERS[name]
    for options in OPTIMIZERS.values():
        for option, value in options.items():
            if option in own:
                assert getattr(OptimizerOptions(name=name), option) == own[option]
                continue
            with pytest.raises(ValidationError, match=f"{name} does not read `{option}`, only "):
                OptimizerOptions(**{"name": name, option: value})
    saved = OptimizerOptions(name=name).model_dump()
    assert OptimizerOptions(**saved) == OptimizerOptions(name=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_matrices_refuse_moments_in_host_memory(name):
    if name in BY_MATRIX:
        text = f"computes with a matrix at a time, .* leave it out, or use {ONE_BY_NUMBER}"
        with pytest.raises(ValidationError, match=text):
            OptimizerOptions(name=name, host_memory=True)
    else:
        assert OptimizerOptions(name=name, host_memory=True).host_memory
