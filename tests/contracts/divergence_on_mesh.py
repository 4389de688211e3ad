"""Divergences and recorded features on a mesh of four CPU devices, compared with one: run by
test_divergence_on_a_mesh.py.

Prints a JSON object with the findings of each case: the largest difference of a result, of a
gradient (over the largest of its numbers) and whether a collective exchanged logits, or a device
held in full a head that is cut along its width.
"""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import learners
import numpy as np
from oracles import configuration, random_model, short, tokens

import rl.algorithms
from policy import families
from policy.config import LogitScaling, Runtime
from policy.heads.divergence import Divergence, divergence
from policy.heads.features import by_number
from policy.heads.head import Tiling
from policy.mesh.sharding import layout
from policy.modes import make_step
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.teacher import ModelTeacher
from rl.training.trainer import Trainer

MESHES = ({"fsdp": 4}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2})
# Vocabularies of student and teacher, and how their logits are scaled. 44: the last of three tiles
# is filled up.
CASES = {
    "equal": (48, 48, (LogitScaling(), LogitScaling()), Divergence("reverse")),
    "wider student": (48, 44, (LogitScaling(0.6, 1.5), LogitScaling()), Divergence("jsd", 0.3)),
    "wider teacher": (44, 48, (LogitScaling(), LogitScaling(1.3, 2.0)), Divergence("forward")),
    "likeliest": (
        48,
        44,
        (LogitScaling(), LogitScaling(softcap=2.0)),
        Divergence("reverse", top_k=3, tail="tail"),
    ),
}
M, E, D = 64, 8, 12


def on_mesh(case: str, degrees: dict, explicit: bool) -> dict:
    """The divergence of 64 rows in three chunks or tiles."""
    V, U, scalings, spec = CASES[case]
    mesh, rng = layout(degrees, explicit=explicit), np.random.default_rng(0)
    shapes = (M, E), (V, E), (M, D), (U, D)
    arrays = [(0.5 * rng.normal(size=shape)).astype(np.float32) for shape in shapes]
    axes = (("batch", None), ("vocab", "embed_vocab")) * 2
    places = [mesh.sharding(names, shape) for names, shape in zip(axes, shapes, strict=True)]
    factor = rng.normal(size=M).astype(np.float32)

    def loss(h, w, ht, wt, mesh=None):
        outputs = divergence(h, w, ht, wt, spec, jnp.float32(0.7), scalings, Tiling(3, mesh))
        return jnp.sum(factor * jnp.square(outputs.divergence)), outputs

    step = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    with jax.default_matmul_precision("highest"):
        program = jax.jit(step(partial(loss, mesh=mesh)), in_shardings=places)
        text = program.lower(*arrays).compile().as_text()
        (_, outputs), gradients = jax.block_until_ready(program(*arrays))
        (_, expected), expected_gradients = jax.jit(step(loss))(*arrays)
    results = re.findall(
        r" = (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text
    )
    exchanged = [
        shape.split(",") for result in results for shape in re.findall(r"f32\[([\d,]*)\]", result)
    ]
    widths = {"8", "4", "2", "12", "6", "3"}  # of states, or of their parts
    return {
        "results": max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True)
        ),
        "gradients": max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())
            for a, b in zip(gradients, expected_gradients, strict=True)
        ),
        "logits": [shape for shape in exchanged if len(shape) > 1 and not widths & {*shape}],
        "full": bool(mesh.spec(("vocab", "embed_vocab"), (V, E))[1])
        and bool(re.search(rf"f32\[(?:{V},{E}|{U},{D})\]", text)),
    }


def recorded(kind: str, degrees: dict | None, **runtime):
    mesh = None if degrees is None else layout(degrees)
    model = random_model(
        families.read(short(kind)), runtime=Runtime(record=("mixed",), **runtime), mesh=mesh
    )
    rows = jnp.asarray(tokens(4, 12))
    segments = jnp.asarray(
        np.array([[1] * 12, [1] * 5 + [2] * 7, [0] * 3 + [1] * 9, [1] * 9 + [0] * 3])
    )

    def run(params):
        aux = model.graph.aux(params, rows, make_step(rows, None, segments))
        return jnp.stack([*by_number(aux, model.config, "mixed").values()])

    return np.asarray(jax.block_until_ready(jax.jit(run)(model.params)))[
        :, np.asarray(segments) != 0
    ]


def updated(degrees: dict | None, explicit: bool = False) -> dict[str, np.ndarray]:
    """All arrays after two updates from a teacher of other width and depth, with a projection of
    its features."""
    how = {} if degrees is None else {"mesh": layout(degrees, explicit=explicit)}
    sizes = learners.SIZES, learners.SIZES | {"hidden_size": 24, "num_hidden_layers": 2}
    mine, theirs = (
        random_model(families.read(configuration("Llama", **each)), runtime=learners.QUICK, **how)
        for each in sizes
    )
    options = learners.stage({"name": "distill", "features_coef": 0.5, "features_layers": [[0, 1]]})
    algorithm = rl.algorithms.get("distill", **options.algorithm.model_extra)
    teacher = ModelTeacher(FrozenModel(theirs.graph), algorithm)
    teacher.params = theirs.params
    trainer = Trainer(mine.graph, options, algorithm, teacher=teacher)
    state = trainer.start(mine.params, seed=3)
    for _ in range(2):
        state, _ = trainer.update(state, learners.batch())
    (projection,) = state.projections.params.values()
    assert degrees is None or not projection.sharding.is_fully_replicated
    return learners.host(state)


def compare() -> dict:
    result = {}
    for degrees in MESHES:
        for case in CASES:
            for explicit in (False, True):
                result[f"{case} {degrees}{' explicit' * explicit}"] = on_mesh(
                    case, degrees, explicit
                )
    expected = recorded("Llama", None)
    for balance in (False, True):
        cut = recorded("Llama", {"fsdp": 2, "context": 2}, context_load_balance=balance)
        result[f"recorded, balance {balance}"] = {"results": float(np.abs(cut - expected).max())}
    expected = updated(None)
    for degrees, explicit in (({"fsdp": 2, "tensor": 2}, False), ({"fsdp": 4}, True)):
        arrays = updated(degrees, explicit)
        differences = [
            float(np.abs(arrays[path] - array).max()) for path, array in expected.items()
        ]
        result[f"projected, {degrees}, explicit {explicit}"] = {"results": max(differences)}
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps(compare()))
