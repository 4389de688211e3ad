"""What the checkpoint tests run in processes of their own: several devices, a limit on file sizes,
a kill.

`python checkpoint_process.py ROLE DIRECTORY`; a failed assertion is the exit status.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import signal
import sys

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rl.run.checkpoint import Checkpoints


def values(number: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint are a function of its number, so that any of them can be
    checked."""
    rng = np.random.default_rng(number)
    return {
        "matrix": rng.normal(size=(512, 256)).astype(np.float32),
        "vector": rng.normal(size=(64,)).astype(jnp.bfloat16),
        "count": np.int32(number),
    }


def continue_saving(directory: str) -> None:
    """Restores and checks the newest checkpoint, then saves without end, each time more."""
    checkpoints = Checkpoints(directory, keep=2)
    result = checkpoints.restore(jax.tree.map(jnp.asarray, values(0)))
    start = 0 if result is None else result[0] + 1
    if result is not None:
        check(result)
    for number in itertools.count(start):
        checkpoints.save(number, jax.tree.map(jnp.asarray, values(number)), {"number": number})
        print(number, flush=True)


def check(restored) -> None:
    number, arrays, host = restored
    assert host == {"number": number}
    for name, value in values(number).items():
        assert np.asarray(arrays[name]).tobytes() == value.tobytes(), (number, name)


def limited(directory: str) -> None:
    """The disk is 'full' (files of at most so many bytes) in several of the places where a save
    writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    checkpoints = Checkpoints(directory, keep=1)
    arrays = jax.tree.map(jnp.asarray, values(1))
    checkpoints.save(1, arrays, {"number": 1}, wait=True)
    for limit in (100_000, 600, 300, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        checkpoints.save(2, arrays, {"number": 2}, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [name for name in os.listdir(directory) if ".tmp-" not in name] == ["0000000001"]
        check(checkpoints.restore(arrays))
    checkpoints.save(3, jax.tree.map(jnp.asarray, values(3)), {"number": 3}, wait=True)
    check(checkpoints.restore(arrays))
    assert os.listdir(directory) == ["0000000003"]


def full(directory: str) -> None:
    """A save finds room for any share of its bytes: the checkpoint before it stays, and nothing but
    a message is shown.
    """
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    import full_disk

    full_disk.mount(directory, 10**8)
    checkpoints = Checkpoints(directory, keep=1)
    arrays = {f"p/{i}": jnp.full((64, 40 * (i + 1)), i, jnp.float32) for i in range(12)}
    arrays = {
        name: jnp.cumsum(jnp.sin(jnp.arange(a.size, dtype=jnp.float32))).reshape(a.shape)
        for name, a in arrays.items()
    }
    checkpoints.save(1, arrays, {"number": 1}, wait=True)
    size, number = full_disk.used(directory), 1
    for room in range(0, size - size // 40, size // 20):  # the last one lacks a twentieth
        number += 1
        full_disk.resize(directory, size + room)
        checkpoints.save(number, arrays, {"number": number})
        assert checkpoints.host()[0] == 1
    full_disk.resize(directory, 10**8)
    checkpoints.save(number + 1, arrays, {"number": number + 1}, wait=True)
    assert checkpoints.host()[0] == number + 1
    checkpoints.close()


def sharded(directory: str) -> None:
    """Arrays over four devices, split, replicated and both; donated right after the save; restored
    to another mesh."""
    split = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    everywhere = NamedSharding(split.mesh, PartitionSpec())
    square = NamedSharding(jax.make_mesh((2, 2), ("x", "y")), PartitionSpec("x"))
    rng = np.random.default_rng(0)
    large = rng.normal(size=(2048, 1024)).astype(np.float32)
    arrays = {
        "split": jax.device_put(large, split),
        "replicated": jax.device_put(large[:512], everywhere),
        "both": jax.device_put(large[512:1024], square),
        "scalar": jax.device_put(np.int32(-3), everywhere),
    }
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
    overwrite = {
        name: jax.jit(jnp.negative, donate_argnums=0, out_shardings=x.sharding)
        for name, x in arrays.items()
    }

    def step(tree):
        return {name: overwrite[name](x) for name, x in tree.items()}

    checkpoints = Checkpoints(directory, keep=2)
    # Arrays made by a program: one made from numpy may share its memory, and then is not donated.
    arrays = step(step(arrays))
    before = jax.tree.map(np.array, arrays)
    for number in range(3):
        checkpoints.save(number, arrays, {})
        for _ in range(6):
            arrays = step(arrays)
    number, restored, _ = checkpoints.restore(template)
    assert number == 2
    moved = template | {"split": jax.ShapeDtypeStruct(large.shape, large.dtype, sharding=square)}
    for tree, expected in ((restored, template), (checkpoints.restore(moved)[1], moved)):
        for name in before:
            assert tree[name].sharding == expected[name].sharding, name
            assert all(
                np.asarray(s.data).tobytes() == before[name][s.index].tobytes()
                for s in tree[name].addressable_shards
            )
    # What was restored can be donated like any other array.
    again = jax.tree.map(np.asarray, step(step(restored)))
    assert all(again[name].tobytes() == before[name].tobytes() for name in before)
    checkpoints.close()


if __name__ == "__main__":
    {"save": continue_saving, "limited": limited, "full": full, "sharded": sharded}[sys.argv[1]](
        sys.argv[2]
    )
