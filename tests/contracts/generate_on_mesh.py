"""Run by test_generator.py where eight devices are forced: prints the greedy completions on each
mesh given as JSON, [degrees of its axes, options of the generator, and changes of the sampling
parameters]."""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracles import random_model
from test_generator import GREEDY, MODELS, PROMPTS, WIDTH, configuration, families

from policy.mesh.sharding import layout
from rollout import Generator, GeneratorOptions


def main() -> None:
    kind, keys = MODELS["deepseek-v3-groups-yarn"]
    config, results = families.read(configuration(kind, **keys)), []
    for mesh, options, changes in json.loads(sys.argv[1]):
        model, options = (
            random_model(config, seed=3, mesh=layout(mesh)),
            GeneratorOptions(**options),
        )
        generator = Generator(model, max_length=WIDTH, slots=8, seed=5, options=options)
        for _ in range(2):
            out = generator.generate(PROMPTS, replace(GREEDY, **changes))
        completions = [[[c.tokens, c.logprobs] for c in group] for group in out]
        sizes = [key[1] for key in generator.engine.runner.memory if key[0] == "decode"]
        parts, preempted = (
            generator.engine.scheduler.cache_manager.num_shards,
            generator.engine.counts["preempted"],
        )
        results.append(
            {"completions": completions, "decoding": sizes, "parts": parts, "preempted": preempted}
        )
    print(json.dumps(results))


main()
