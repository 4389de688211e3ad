"""Run by test_in_place_on_a_mesh.py where eight devices are forced: prints, as JSON, what a trainer
and its generator do with the arrays of a run, and whether a checkpoint of theirs comes back on
other meshes."""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import learners
from meshes import PROMPTS

from policy.mesh.axes import STATIONARY_RULES
from policy.mesh.sharding import layout
from policy.model import Model
from rl.run.checkpoint import Checkpoints
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.engine.weights import RolloutWeights

DEGREES = {"data": 2, "fsdp": 2, "tensor": 2}
OTHERS = {
    "fsdp8": ({"fsdp": 8}, {}),
    "data2_expert2_zero": ({"data": 2, "expert": 2}, {"moments_over_data": True}),
    "context2": ({"context": 2}, {}),
    "one": ({"fsdp": 1}, {}),
}
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def on_a_device(tree) -> int:
    """Bytes of the first shard of each array."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


def trained(mode: str):
    """(trainer, state, model) after an update of policy and critic; moments are cut over copies of
    the weights too. `mode` is auto, or explicit: with shardings in the types."""
    model = learners.dense(
        mesh=layout(DEGREES, moments_over_data=True, explicit=mode == "explicit")
    )
    trainer, state = learners.begin(model, learners.stage("ppo"), fresh=True)
    state, _ = trainer.update(state, learners.batch())
    return trainer, state, Model(model.graph, state.policy.params)


def in_place(trainer, state) -> dict:
    """Bytes of a device that each update writes in place, and those of what it owns."""
    both = {
        "policy": (trainer.policy_update, state.policy),
        "critic": (trainer.critic_update, state.critic),
    }
    written = {
        name: [memory.aliased for memory in one.executable.memory.values()]
        for name, (one, _) in both.items()
    }
    return {
        "written": written,
        "held": {name: on_a_device(learner) for name, (_, learner) in both.items()},
    }


def completed(generator) -> list:
    return [completion for (completion,) in generator.generate(PROMPTS, GREEDY)]


def read(model) -> tuple[dict, list]:
    """(findings, completions). What programs of a generator are given as weights: whether they are
    the arrays of the model, with the same buffers, sharded as the program was compiled for; and how
    many bytes these programs write in place."""
    generator = Generator(model, max_length=32, slots=4)
    completed(generator)  # compiles
    runner, given = generator.engine.runner, []
    before = {path: pointers(array) for path, array in model.params.items()}

    def watched(name, compiled):
        def run(*arguments):
            given.append((name, compiled, arguments[0]))
            return compiled(*arguments)

        return run

    for name, program in runner.executables.items():
        program._compiled = {
            shape: watched(name, compiled) for shape, compiled in program._compiled.items()
        }
    generator.reset_prefix_cache()
    made, result = completed(generator), {"prefill": [], "decode": []}
    for name, compiled, params in given:
        if name in result:
            same = [
                params[path] is array and pointers(params[path]) == before[path]
                for path, array in model.params.items()
            ]
            # None where it is not used: prefill needs no more of the last layer than its keys.
            places = {
                path: place
                for path, place in compiled.input_shardings[0][0].items()
                if place is not None
            }
            sharded = [
                place.is_equivalent_to(params[path].sharding, params[path].ndim)
                for path, place in places.items()
            ]
            result[name].append(
                all(same) and all(sharded) and (len(sharded) == len(same) or name == "prefill")
            )
    result["written"] = max(
        memory.aliased for key, memory in runner.memory.items() if key[0] in ("prefill", "decode")
    )
    return result | {"cache": on_a_device(generator.engine.batch.full_cache())}, made


def elastic(state, folder) -> dict:
    """Mesh -> whether every array of a checkpoint comes back there with its bits, at its place."""
    checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=1)
    checkpoints.save(1, state, {"progress": 3}, wait=True)
    expected, result = learners.host(state), {}
    for name, (degrees, how) in OTHERS.items():
        devices = jax.devices()[: int(np.prod(list(degrees.values())))]
        model = learners.dense(mesh=layout(degrees, devices=devices, **how))
        template = learners.trainer(model, learners.stage("ppo")).abstract()
        number, restored, host = checkpoints.restore(template)
        same = learners.same_bits(learners.host(restored), expected) and (number, host) == (
            1,
            {"progress": 3},
        )
        put = jax.tree.map(
            lambda array, requested: array.sharding == requested.sharding, restored, template
        )
        result[name] = bool(same and all(jax.tree.leaves(put)))
        if name == "one":  # and from there back to all devices
            checkpoints.save(2, restored, {}, wait=True)
    back = checkpoints.restore(state)[1]
    checkpoints.close()
    return result | {"back": learners.same_bits(learners.host(back), expected)}


def resharded(model, plain: list) -> dict:
    """Compares completions with weights resharded for decoding with `plain`, the completions with
    the training sharding."""
    generator = Generator(
        model, max_length=32, slots=4, options=GeneratorOptions(rules=STATIONARY_RULES)
    )
    generator.reshard_for_rollout()
    copies = generator.weights._copies
    moved = completed(generator)
    kept = all(
        array is model.params[path]
        for path, array in generator._params.items()
        if path not in copies
    )
    share = sum(a.nbytes for path, a in model.params.items() if path in copies) / sum(
        a.nbytes for a in model.params.values()
    )
    generator.release()
    return {
        "equal": [c.tokens for c in plain] == [c.tokens for c in moved],
        "logprobs": max(
            float(np.abs(np.subtract(a.logprobs, b.logprobs)).max())
            for a, b in zip(plain, moved, strict=True)
        ),
        "kept": kept,
        "share": share,
        "dropped": generator.weights._copies is None,
    }


def quantised(model) -> dict:
    """Compares quantised weights that are resharded with quantised weights in the training
    sharding: one program makes both."""
    plain, moved = (
        RolloutWeights(model.graph, "int8", rules).with_copies(model.params)
        for rules in (None, STATIONARY_RULES)
    )
    same = [
        learners.same_bits(learners.host(plain[path]), learners.host(moved[path]))
        for path in model.params
    ]
    graph = model.graph.for_inference(STATIONARY_RULES)
    values = {
        path: moved[path].qvalue if path in graph.inputs else moved[path] for path in model.params
    }
    put = [
        values[path].sharding.is_equivalent_to(graph.sharding(path), values[path].ndim)
        for path in model.params
    ]
    return {"same": all(same), "sharded": all(put)}


def copied(model) -> dict:
    """Whether a copy of rows over a cut cache is right, and bytes of a device: what its program
    needs and writes in place, the cache, and one row of it."""
    generator = Generator(model, max_length=32, slots=16)
    programs = generator.engine.runner
    cache = programs.empty()
    filled = jax.tree.map(
        lambda a: jax.device_put(np.arange(a.size, dtype=a.dtype).reshape(a.shape), a.sharding),
        cache,
    )
    expected = [np.array(array) for array in jax.tree.leaves(filled)]
    result = jax.tree.leaves(programs.copy_rows(filled, [(0, 5), (5, 15), (14, 1)]))
    for array in expected:
        array[:, [5, 15, 1]] = array[:, [0, 0, 14]]
    memory, size = programs.memory["copy",], on_a_device(result)
    rows = result[0].sharding.shard_shape(result[0].shape)[1]
    same = all(np.array_equal(array, other) for array, other in zip(result, expected, strict=True))
    return {
        "same": same,
        "needed": memory.temporaries,
        "written": memory.aliased,
        "cache": size,
        "row": size // rows,
    }


def main() -> None:
    trainer, state, model = trained(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        result = {"in place": in_place(trainer, state), "elastic": elastic(state, folder)}
    result["read"], made = read(model)
    result["copied"] = copied(model)
    experts = learners.experts(mesh=layout({"fsdp": 2, "tensor": 2, "expert": 2}))
    plain = completed(Generator(experts, max_length=32, slots=4))
    result["resharded"] = {"dense": resharded(model, made), "experts": resharded(experts, plain)}
    print(json.dumps(result | {"quantised": quantised(experts)}))


main()
