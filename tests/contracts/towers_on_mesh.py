"""Towers on a mesh of CPU devices against one device: run by test_towers_on_a_mesh.py.

    python towers_on_mesh.py '[["Qwen3VL", {"fsdp": 2, "tensor": 2}], ...]'

Prints a JSON list with the largest difference of the rows and of the gradients of weights, as a
share of the largest number.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from policy import families
from policy.mesh.sharding import layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import media_oracles
from oracles import random_model

SHAPES = {kind: [(4, 6), (2, 2), (6, 4), (2, 8)] for kind in ("Qwen3VL", "Qwen2_5_VL", "Gemma4")}


def results(kind: str, mesh) -> tuple:
    """(rows, gradients of a weighted sum of rows and features) of four pictures of noise."""
    text, vision, keys = media_oracles.MODELS[kind]
    hf = keys | {
        "text_config": text,
        "vision_config": vision,
        "architectures": [f"{kind}ForConditionalGeneration"],
    }
    model = random_model(families.read(hf, media=True), seed=3, mesh=mesh)
    shapes = np.asarray(SHAPES.get(kind, [(6, 6)] * 4), np.int32)
    rng = np.random.default_rng(0)
    values = rng.normal(
        size=(4, max(36, shapes.prod(-1).max()), model.config.image.input_width)
    ).astype(np.float32)
    rows, _ = model.encode("image", values, shapes)
    factors = rng.normal(size=rows.shape).astype(np.float32)

    def loss(params):
        rows, features = model.graph.encode(params, "image", values, shapes)
        return (rows * factors).sum() + (0.0 if features is None else features.sum())

    gradients = jax.jit(jax.grad(loss, allow_int=True))(model.params)
    return np.asarray(rows), {
        p: np.asarray(a) for p, a in gradients.items() if p.startswith("image.")
    }


def difference(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max())


if __name__ == "__main__":
    out = []
    for kind, degrees in json.loads(sys.argv[1]):
        rows, gradients = results(kind, layout({"fsdp": 1}, devices=jax.devices()[:1]))
        sharded, theirs = results(kind, layout(degrees))
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        worst = max(difference(theirs[path], gradients[path]) for path in gradients) / largest
        out.append(
            {
                "rows": difference(sharded, rows) / float(np.abs(rows).max()),
                "gradient": float(worst),
            }
        )
    print(json.dumps(out))
