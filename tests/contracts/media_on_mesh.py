"""Pictures on a mesh of eight CPU devices against one device: run by test_media_on_a_mesh.py.

    python media_on_mesh.py '[["Gemma3", {"fsdp": 8}, {}], ...]'

Prints a JSON list with the largest differences of each case; those of a gradient as a share of its
largest number.
"""

import json
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from policy import families
from policy.cache.media import Media
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.modes import make_step
from rollout import Generator, GeneratorOptions, MediaPrompt, SamplingParams
from rollout.request import prefix_keys

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import media_oracles
from oracles import random_model


def model_of(kind: str, degrees: dict | None, how: dict):
    text, vision, keys = media_oracles.MODELS[kind]
    hf = keys | {
        "text_config": text,
        "vision_config": vision,
        "architectures": [f"{kind}ForConditionalGeneration"],
    }
    mesh = None if degrees is None else layout(degrees)
    return random_model(families.read(hf), seed=3, mesh=mesh, runtime=Runtime(**how))


def documents(kind: str) -> list:
    """Documents with two pictures, two of them, and rows drawn for one table."""
    rng, result = np.random.default_rng(0), []
    for seed, texts in ((1, (4, 3, 5)), (2, (2, 6, 3)), (3, (3, 2, 4)), (4, (5, 2, 2))):
        tokens, _, media = media_oracles.places(kind, texts, seed)
        deep = "deepstack_visual_indexes" in media_oracles.MODELS[kind][1]
        table = rng.normal(size=(int((media.index >= 0).sum()), 32)).astype(np.float32)
        table = media_oracles.MediaTable(
            table, np.stack([table[::-1], 2 * table]) if deep else None
        )
        result.append(media_oracles.Document(tokens, media.in_table(table), {}, np.zeros((0, 0))))
    return result


@cache
def scored(kind: str, degrees: str, how: str):
    """(log-probabilities of packed rows, gradient of the rows of the table)."""
    model, (a, b, c, d) = model_of(kind, json.loads(degrees), json.loads(how)), documents(kind)
    tokens, segments, media = media_oracles.batch(
        [[a, b], [c], [d, a], [b, c], [d], [a], [b], [c, d]], 64
    )
    weights = np.random.default_rng(0).normal(size=tokens.shape).astype(np.float32)
    rows, index = media["media"], jnp.asarray(media["media"].index)

    def loss(table, params):
        shown = Media(index, table, rows.deep, media["turns"], media["until"])
        step = make_step(jnp.asarray(tokens), None, segments, shown)
        logp, _, _ = model.graph.logprobs(params, jnp.asarray(tokens), step, 1.0)
        return jnp.sum(weights * logp), logp

    (_, logp), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        jnp.asarray(rows.table), model.params
    )
    return np.asarray(logp), np.asarray(slope)


def completions(kind: str, degrees: dict | None, how: dict) -> list:
    """Greedy tokens of prompts with pictures, over pages and with chunks."""
    model, prompts = model_of(kind, degrees, how), []
    for number, each in enumerate(documents(kind)):
        parts = [None if row < 0 else (str(number), row) for row in each.media.index.tolist()]
        prompts.append(
            MediaPrompt(
                tuple(each.tokens.tolist()), each.media, prefix_keys(each.tokens.tolist(), parts)
            )
        )
    options = GeneratorOptions(cache="paged", page_size=4, prefill_chunk=10, tokens_per_dispatch=4)
    generator = Generator(model, max_length=64, slots=8, options=options)
    return [
        c.tokens
        for (c,) in generator.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0.0))
    ]


def case(kind: str, degrees: dict, how: dict) -> dict:
    one, many = scored(kind, "null", "{}"), scored(kind, json.dumps(degrees), json.dumps(how))
    logp, gradient = (float(np.abs(a - b).max()) for a, b in zip(one, many, strict=True))
    result = {"logp": logp, "gradient": gradient / float(np.abs(one[1]).max())}
    if "context" not in degrees:
        result["tokens"] = completions(kind, None, {}) == completions(kind, degrees, how)
    return result


if __name__ == "__main__":
    print(json.dumps([case(*arguments) for arguments in json.loads(sys.argv[1])]))
