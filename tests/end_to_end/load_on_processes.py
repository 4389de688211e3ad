"""Loads a directory on a mesh over several processes, and a checkpoint of the same weights; prints
what this one has read of the files, in bytes, and what it holds.

Arguments: directory, number of processes, number of this one, coordinator.
"""

import json
import sys

import numpy as np

from rl.cluster.launch import Launch, start

directory, count, index, coordinator = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
watch = start(Launch(coordinator, count, index))

import jax  # noqa: E402
import tensorstore  # noqa: E402

import policy  # noqa: E402
from policy.huggingface.tensorfiles import TensorFiles  # noqa: E402
from policy.mesh.sharding import layout  # noqa: E402
from rl.run.checkpoint import Checkpoints  # noqa: E402

full, read = TensorFiles.read, []


def counted(*given, **named):
    result = full(*given, **named)
    read.append(result.nbytes)
    return result


TensorFiles.read = counted
model = policy.load(directory, mesh=layout({"fsdp": -1}))
held = sum(
    shard.data.nbytes for array in model.params.values() for shard in array.addressable_shards
)


def restored() -> int:
    """Bytes that tensorstore has read of files so far."""
    result = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value.get("value", 0) for metric in result for value in metric["values"])


checkpoints = Checkpoints(f"{directory}/checkpoints", 1)
checkpoints.save(1, model.params, {}, wait=True)
before = restored()
places = jax.tree.map(
    lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
    model.params,
)
_, params, _ = checkpoints.restore(places)
checkpoints.close()
for path, array in params.items():
    for ours, theirs in zip(
        array.addressable_shards, model.params[path].addressable_shards, strict=True
    ):
        np.testing.assert_array_equal(ours.data, theirs.data)
weights = sum(array.nbytes for array in params.values())
print(
    json.dumps(
        {"read": sum(read), "held": held, "weights": weights, "restored": restored() - before}
    )
)
watch.leave(0)
