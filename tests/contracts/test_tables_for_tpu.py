"""An update of a model with a table in host memory, compiled for four chips of a TPU v5p, has
nothing as large as the table in the memory of a chip. On its own this file prints, as JSON, the
bytes of one chip's share of the table and of its temporary arrays, for the model that its argument
names."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu compiles for TPU; it is not installed",
    ),
]
SECTION = {"layers": [0], "vocab_bases": [120_000, 120_000], "heads": 4, "head_dim": 128}


@pytest.mark.parametrize("name", ["n-grams", "layer embeddings", "frozen layer embeddings"])
def test_a_chip_has_no_room_for_a_table_in_host_memory(name):
    """Micro-batches in a loop, and weight decay and clipping, which need the full gradient."""
    tests = Path(__file__).parents[1]
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    }
    environment = (
        os.environ
        | settings
        | {"PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]), "XLA_FLAGS": ""}
    )
    done = subprocess.run(
        [sys.executable, __file__, name],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["temporary"] < result["table"] / 4, result


def compiled_sizes(name: str) -> dict[str, int]:
    import jax
    import learners
    import numpy as np
    from jax.experimental import topologies
    from oracles import configuration, short

    import rl.algorithms
    from policy import families
    from policy.config import Runtime
    from policy.mesh.sharding import layout
    from policy.model import Graph
    from rl.training.trainer import Trainer
    from rl.training.updater import UpdateArguments

    mesh = layout(
        {"fsdp": 4}, devices=topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    )
    small = short(
        "Gemma4Small", hidden_size_per_layer_input=128, vocab_size_per_layer_input=240_000
    )
    hf = (
        configuration("Llama", **learners.SIZES, duet={"engram": SECTION})
        if name == "n-grams"
        else small
    )
    runtime = Runtime(table_memory="host", train_layer_embeddings=not name.startswith("frozen"))
    graph = Graph(families.read(hf), runtime, mesh)
    options = learners.stage(micro_batch=4, optimizer={"clip_norm": 1.0, "weight_decay": 0.1})
    trainer, data = (
        Trainer(graph, options, rl.algorithms.get("sft")),
        learners.batch(rows=8, length=16),
    )

    def abstract(a):
        return jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=mesh.replicated)

    inputs = jax.tree.map(abstract, (data, jax.eval_shape(trainer.loss_inputs, data)))
    (call,) = trainer.update_calls(trainer.abstract(), UpdateArguments(*inputs), 4)
    compiled = call.lower().compile()
    (table,) = (graph.shapes[path] for path in graph.host_tables)
    return {
        "table": table.size * 4 // mesh.mesh.size,
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(compiled_sizes(sys.argv[1])))
