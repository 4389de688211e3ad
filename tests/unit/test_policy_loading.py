"""What loading costs: host memory on one device, and the bytes that each of eight devices has read
for it. Both are measured in a process of their own."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from oracles import configuration, random_model

import policy
from policy import families
from policy.config import Runtime
from policy.huggingface import model_directory
from policy.huggingface.tensorfiles import TensorFiles
from policy.mesh.sharding import layout
from policy.mesh.shards import Shard
from policy.model import Graph
from policy.ops.quantization import dequantised

MESHES = {
    "fsdp8": {"fsdp": 8},
    "fsdp2_tensor2_expert2": {"fsdp": 2, "tensor": 2, "expert": 2},
    "data8": {"data": 8},
}


def anonymous() -> int:
    """Bytes of memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]
    )


def memory_of_loading(directory) -> dict:
    """Bytes of the weights, and by how much loading them raised this process at its peak and in the
    end."""
    policy.create(families.read(configuration("Llama")))  # jax has started and compiled something
    return raised_by_loading(directory)


def memory_of_quantising(directory) -> dict:
    """What `memory_of_loading` says of nf4 weights, whose programs are compiled before."""
    policy.load(directory, base_weights="nf4")
    return raised_by_loading(directory, base_weights="nf4")


def raised_by_loading(directory, **options) -> dict:
    before, peak, done = anonymous(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = policy.load(directory, **options)
    done.set()
    watcher.join()
    floats = {
        path: dequantised(array) if path in model.graph.quantized else array
        for path, array in model.params.items()
    }
    wrong = [
        path
        for i, path in enumerate(sorted(model.params))
        if not (np.asarray(floats[path]) == i).all()
    ]
    weights = sum(array.nbytes for array in jax.tree.leaves(model.params))
    return {
        "weights": weights,
        "peak": peak - before,
        "after": anonymous() - before,
        "wrong": wrong,
    }


def bytes_for_each_shard(directory) -> dict:
    """mesh -> [bytes of a shard, bytes read for it] of every reading, and whether the weights are
    those of one device.
    """
    expected = policy.load(directory)
    real_empty, real_read, result = Shard.empty, TensorFiles.read, {}
    for name, degrees in MESHES.items():
        readings = []

        def empty(shard, dtype, readings=readings):
            numbers = real_empty(shard, dtype)
            readings.append([numbers.nbytes, 0])
            return numbers

        def read(files, *arguments, readings=readings):
            block = real_read(files, *arguments)
            readings[-1][1] += block.nbytes
            return block

        Shard.empty, TensorFiles.read = empty, read
        model = policy.load(directory, mesh=layout(degrees))
        same = all(
            np.array_equal(np.asarray(model.params[path]), np.asarray(a))
            for path, a in expected.params.items()
        )
        put = all(
            array.sharding == model.graph.sharding(path) for path, array in model.params.items()
        )
        held = sum(array.nbytes for array in model.params.values())
        result[name] = {"readings": readings, "same": same, "sharded": put, "held": held}
    return result


def run(task: str, directory, devices: int) -> dict:
    """The JSON that this file prints as a program."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, __file__, task, str(directory)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The directory of a model of 331 MB, whose largest stack has 101 MB."""
    keys = {
        "hidden_size": 512,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "vocab_size": 4096,
        "head_dim": 32,
    }
    graph = Graph(
        families.read(configuration("Llama", **keys)),
        Runtime(),
        layout({"fsdp": 1}, devices=jax.devices()[:1]),
    )
    params = {
        path: np.broadcast_to(np.float32(i), graph.shapes[path].shape)
        for i, path in enumerate(sorted(graph.paths))
    }
    directory = tmp_path_factory.mktemp("large")
    model_directory.write(directory, graph, params)
    return directory


@pytest.mark.slow
def test_the_host_holds_the_weights_once(large):
    """One copy of the largest stack would already raise the peak to 1.26 times the weights."""
    result = run("memory", large, devices=1)
    assert result["wrong"] == []
    assert result["weights"] > 280e6
    assert result["after"] > 0.95 * result["weights"]  # the measure sees the weights
    assert result["peak"] < 1.15 * result["weights"], result


@pytest.mark.slow
def test_of_weights_that_are_quantised_the_floats_of_a_layer_exist_at_a_time(large):
    """A layer of the largest stack has 6.3 MB. On CPU a code takes a byte."""
    result = run("quantising", large, devices=1)
    assert result["wrong"] == []
    assert 85e6 < result["weights"] < 110e6
    assert result["peak"] < result["weights"] + 20e6, result


@pytest.mark.slow
def test_every_device_reads_its_slice_only(tmp_path):
    policy.save(random_model(families.read(configuration("DeepseekV3"))), tmp_path)
    for name, result in run("slices", tmp_path, devices=8).items():
        assert result["same"] and result["sharded"], name
        assert all(shard == read for shard, read in result["readings"]), name
        assert sum(read for _, read in result["readings"]) == result["held"], name
        assert name == "data8" or len(result["readings"]) > 100, name


if __name__ == "__main__":
    task, directory = sys.argv[1:]
    tasks = {
        "memory": memory_of_loading,
        "quantising": memory_of_quantising,
        "slices": bytes_for_each_shard,
    }
    print(json.dumps(tasks[task](directory)))
