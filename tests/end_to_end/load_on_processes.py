"""Loads a directory on a mesh over several processes; prints what this one has read of the files, and which numbers it holds.

Arguments: directory, number of processes, number of this one, coordinator."""

import json
import sys

import numpy as np

from rl.processes import Launch, start

directory, count, index, coordinator = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
watch = start(Launch(coordinator, count, index))

import policy  # noqa: E402
from policy.sharding import layout  # noqa: E402
from policy.tensorfiles import TensorFiles  # noqa: E402

whole, read = TensorFiles.read, []


def counted(*given, **named):
    found = whole(*given, **named)
    read.append(found.nbytes)
    return found


TensorFiles.read = counted
model = policy.load(directory, mesh=layout({"fsdp": -1}))
shards = {path: [np.asarray(shard.data) for shard in array.addressable_shards] for path, array in model.params.items()}
held = sum(shard.nbytes for each in shards.values() for shard in each)
total = sum(float(np.abs(shard).sum()) for each in shards.values() for shard in each)
print(json.dumps({"read": sum(read), "held": held, "weights": sum(a.nbytes for a in model.params.values()), "total": total}))
watch.leave(0)
