"""Run by test_replay_on_a_mesh.py where four devices are forced: records and replays routes on one
device and on meshes, and prints what differs as JSON."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import learners
from oracles import configuration, random_model

import rl.algorithms
from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from rl.stages.sampling.batches import routes_of
from rl.training.trainer import Trainer
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.types import Trajectory

MESHES = {
    "one": (None, {}),
    "all_to_all": ({"fsdp": 2, "expert": 2}, {"expert_parallel": "all_to_all"}),
    "context": ({"fsdp": 2, "context": 2}, {}),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 2]]


def run(degrees, how) -> dict:
    sizes = learners.SIZES | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    mesh = layout(degrees) if degrees else layout({"fsdp": 1}, devices=jax.devices()[:1])
    model = random_model(
        families.read(configuration("DeepseekV3", **sizes)), runtime=Runtime(**how), mesh=mesh
    )
    generator = Generator(
        model,
        max_length=16,
        slots=4,
        options=GeneratorOptions(record_routes=True, tokens_per_dispatch=4),
    )
    completions = generator.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=6))
    made = [
        Trajectory.of_completion(prompt, completion).segments[0]
        for prompt, group in zip(PROMPTS, completions, strict=True)
        for completion in group
    ]
    data, rng = learners.batch(), np.random.default_rng(0)
    given = rng.permuted(np.broadcast_to(np.arange(8), (*data.tokens.shape, 1, 8)), axis=-1)[
        ..., :2
    ].astype(np.int8)
    data = data.replace(routes={"stacks.1.layers.0": given})
    stage = learners.stage("grpo", router_replay=True, micro_batch=4)
    trainer = Trainer(model.graph, stage, rl.algorithms.get("grpo"))
    logp = trainer.logprobs(model.params, data)[0]
    state, metrics = trainer.update(trainer.start(model.params, seed=0), data)
    weights = [
        np.asarray(state.policy.params[path]).ravel() for path in sorted(state.policy.params)
    ]
    return {
        "tokens": np.concatenate([segment.tokens for segment in made]),
        "recorded": routes_of(made, 16)["stacks.1.layers.0"],
        "logp": logp,
        "weights": np.concatenate(weights),
        "disagreement": np.float32(metrics["moe/replay_disagreement"]),
    }


def main() -> None:
    result = {name: run(*mesh) for name, mesh in MESHES.items()}
    one = result.pop("one")

    def difference(each, key):
        return float(np.abs(np.asarray(each[key], np.float64) - one[key]).max())

    print(
        json.dumps(
            {name: {key: difference(each, key) for key in one} for name, each in result.items()}
        )
    )


main()
