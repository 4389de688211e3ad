"""Updates over the ids that filters left, and generators that record them, on meshes of eight CPU
devices, compared with one device: run by test_filters_on_a_mesh.py.

Prints a JSON object: for each mesh the largest difference of log-probabilities and entropies, of
what weights moved by over the norm of the leaf, of scores of completions and prompts, and whether
completions and their ids are the same.
"""

import json

import jax
import learners
import numpy as np
import shared_prefixes
from oracles import configuration, random_model

from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from rl.training.packing.trees import Sharing
from rollout import Generator, GeneratorOptions, SamplingParams

CONFIGURATION = configuration(
    "Llama", **learners.SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 4}
)
MESHES = {
    "fsdp": ({"fsdp": 8}, False),
    "tensor": ({"tensor": 4}, False),
    "fsdp and tensor": ({"fsdp": 4, "tensor": 2}, False),
    "explicit": ({"fsdp": 4, "tensor": 2}, True),
    "context": ({"fsdp": 4, "context": 2}, False),
}
PARAMS = SamplingParams(
    n=2,
    max_new_tokens=6,
    temperature=1.3,
    top_k=9,
    top_p=0.8,
    top_logprobs=3,
    prompt_logprobs=3,
)


def batch():
    """Groups of completions whose tokens have up to six ids, or leave them out, some of them
    none."""
    data, rng = shared_prefixes.groups(learners.VOCAB), np.random.default_rng(5)
    ids = np.full((*data.tokens.shape, 6), -1, np.int32)
    for n, t in np.argwhere(data.mask > 0):
        others = rng.choice(learners.VOCAB, rng.integers(0, 6), replace=False)
        own = np.unique([data.tokens[n, t], *others]) if len(others) else []
        ids[n, t, : len(own)] = own
        if n % 3 == 1:  # ids that are left out, as forbidden tokens are
            ids[n, t] = np.where(ids[n, t] == data.tokens[n, t], -1, -2 - np.maximum(ids[n, t], -1))
    return data.replace(kept=ids)


def scores_of(completions) -> np.ndarray:
    """All numbers of the scores, one after the other."""
    every = [s for each in completions for s in (each.scores, each.prompt_scores)]
    arrays = [a for s in every for a in (s.logprobs, s.top_logprobs, s.top_ids)]
    return np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])


def computed(mesh, sharing) -> tuple:
    """(log-probabilities and entropies, what each weight moved by, completions with their ids,
    their scores)."""
    runtime = Runtime(remat="full", num_vocab_tiling=3)
    model = random_model(families.read(CONFIGURATION), runtime=runtime, mesh=mesh)
    options = GeneratorOptions(record_kept=7, tokens_per_dispatch=4)
    generator = Generator(model, max_length=16, slots=8, seed=1, options=options)
    completions = [each for group in generator.generate([[1, 2, 3], [4]], PARAMS) for each in group]
    trainer, state = learners.begin(
        model, learners.stage({"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.1}), fresh=True
    )
    trainer.sharing = sharing
    before, numbers = (
        learners.host(state.policy.params),
        np.stack(trainer.logprobs(state.policy.params, batch())),
    )
    state, _ = trainer.update(state, batch())
    after = learners.host(state.policy.params)
    drawn = [(each.tokens, each.kept.tolist(), each.kept_counts) for each in completions]
    moved = {path: after[path] - before[path] for path in after}
    return numbers, moved, drawn, scores_of(completions)


def compare() -> dict:
    expected, result = computed(layout({"fsdp": 1}, devices=jax.devices()[:1]), None), {}
    for name, (degrees, explicit) in MESHES.items():
        devices = jax.devices()[: int(np.prod(list(degrees.values())))]
        numbers, moved, drawn, scores = computed(
            layout(degrees, devices=devices, explicit=explicit), Sharing(length_factor=2)
        )
        result[name] = {
            "logp": float(np.abs(numbers - expected[0]).max()),
            "weights": max(shared_prefixes.differences(expected[1], moved).values()),
            "drawn": drawn == expected[2],
            "scores": float(np.nanmax(np.abs(scores - expected[3]))),
        }
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps(compare()))
