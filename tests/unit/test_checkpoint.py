"""Checkpoints: what comes back, what is refused, what is kept."""

import json
import logging
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl.run.arrays import ArrayStore
from rl.run.checkpoint import CheckpointError, Checkpoints


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def state(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "layers": (
            {
                "kernel": jnp.asarray(rng.normal(size=(3, 8, 4)), jnp.bfloat16),
                "bias": jnp.zeros((0, 4)),
            },
        ),
        "norm": jnp.asarray(rng.normal(size=8), jnp.float32),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 10))
    )
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "step": jnp.int32(seed),
        "reference": None,
    }


def template(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_a_state_comes_back_with_its_structure_dtypes_and_host(tmp_path):
    saved, host = state(3), {"stage": "sft", "step": 3, "cursor": [1, 2], "best": 0.1 + 0.2}
    writer = Checkpoints(tmp_path / "checkpoints", keep=2)
    writer.save(3, saved, host)
    writer.close()
    number, restored, restored_host = Checkpoints(tmp_path / "checkpoints", keep=2).restore(
        template(saved)
    )
    assert (number, restored_host) == (3, host)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert [(x.dtype, x.shape) for x in jax.tree.leaves(restored)] == [
        (x.dtype, x.shape) for x in jax.tree.leaves(saved)
    ]
    assert bits(restored) == bits(saved)


def test_arrays_are_read_from_a_relative_path(tmp_path, monkeypatch):
    """`rl eval runs/a --step 2` names the folder so."""
    saved = {"x": jnp.arange(3.0)}
    store = ArrayStore()
    store.begin(tmp_path / "arrays", saved)
    store.wait()
    monkeypatch.chdir(tmp_path)
    read = store.read(Path("arrays"), template(saved))
    store.close()
    assert bits(read) == bits(saved)


def test_every_bit_pattern_survives(tmp_path):
    rng = np.random.default_rng(0)
    halves = np.arange(2**16, dtype=np.uint16)
    words = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    words[:4] = (
        0x7FC12345,
        0xFFC00001,
        0x7F800001,
        0x00000001,
    )  # NaNs with payloads, a signalling one, a subnormal
    arrays = {
        "bfloat16": jnp.asarray(halves.view(jnp.bfloat16)),
        "float16": jnp.asarray(halves.view(np.float16)),
        "float32": jnp.asarray(words.view(np.float32)),
        "negative_zero": jnp.asarray(np.full((16, 16), -0.0, np.float32)),
        "negative_zero_bfloat16": jnp.asarray(np.full((64,), -0.0, jnp.bfloat16)),
        "nan": jnp.asarray(np.full((8,), 0xFFC00001, np.uint32).view(np.float32)),
        "uint32": jnp.asarray(words),
        "int8": jnp.asarray(np.arange(-128, 128, dtype=np.int8)),
        "bool": jnp.asarray([True, False]),
    }
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, arrays, {}, wait=True)
    restored = checkpoints.restore(template(arrays))[1]
    assert {
        name: np.asarray(x).tobytes() == np.asarray(arrays[name]).tobytes()
        for name, x in restored.items()
    } == dict.fromkeys(arrays, True)


def test_the_directory_is_made_by_the_first_save_and_nothing_is_restored_before(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    assert checkpoints.restore(template(state())) is None
    assert checkpoints.host() is None
    assert not (tmp_path / "run").exists()
    checkpoints.save(0, state(), {"step": 0}, wait=True)
    assert checkpoints.host() == (0, {"step": 0})


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (5, 9, 10, 100):
        checkpoints.save(number, state(number), {"step": number})
    checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000000010", "0000000100"]
    assert checkpoints.host() == (100, {"step": 100})
    with pytest.raises(ValueError, match="at least"):
        Checkpoints(tmp_path, keep=0)


def test_rotation_does_not_count_damaged_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2):
        checkpoints.save(number, state(number), {}, wait=True)
    with (tmp_path / "0000000002" / "host.json").open("a") as file:
        file.write(" ")
    checkpoints.save(3, state(3), {}, wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000000001", "0000000003"]


def test_saving_the_newest_number_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, state(4), {"stage": "sft"}, wait=True)
    checkpoints.save(4, state(5), {"stage": "grpo"}, wait=True)
    number, restored, host = checkpoints.restore(template(state()))
    assert (number, host) == (4, {"stage": "grpo"})
    assert bits(restored) == bits(state(5))
    assert [p.name for p in tmp_path.iterdir()] == ["0000000004"]


def test_a_number_below_the_newest_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(4, state(), {}, wait=True)
    with pytest.raises(ValueError, match="holds checkpoint 4"):
        checkpoints.save(3, state(), {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda s: s["params"].update(norm=jnp.zeros(9)),
            r"params/norm: float32\[8\] in the checkpoint, float32\[9\]",
        ),
        (lambda s: s["params"].update(norm=jnp.zeros(8, jnp.bfloat16)), "params/norm: .* bfloat16"),
        (
            lambda s: s["params"].update(extra=jnp.zeros(1)),
            "params/extra: in the run, not in the checkpoint",
        ),
        (lambda s: s["params"].pop("norm"), "params/norm: in the checkpoint, not in the run"),
        (
            lambda s: s["params"]["layers"][0].update(bias=jnp.zeros((0, 5))),
            "params/layers/0/bias: ",
        ),
        (
            lambda s: s.update(optimizer=optax.sgd(1.0).init(s["params"])),
            "optimizer/1/0/mu/norm: in the checkpoint, not",
        ),
    ],
)
def test_a_template_that_differs_is_an_error_that_names_the_path(tmp_path, change, named):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(), {}, wait=True)
    other = state()
    change(other)
    with pytest.raises(CheckpointError, match=named) as raised:
        checkpoints.restore(template(other))
    assert raised.value.exit_code == 4
    with pytest.raises(ValueError, match="step: the template says no sharding"):
        checkpoints.restore(template(state()) | {"step": jax.ShapeDtypeStruct((), jnp.int32)})


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"a": {"b": 3}}, "a/b is int"),
        ({"a": (np.zeros(3),)}, "a/0 is ndarray"),
        ({"k": jax.random.key(0)}, "k is PRNGKey"),
    ],
)
def test_what_is_not_an_array_of_numbers_is_refused_before_anything_is_written(
    tmp_path, arrays, named
):
    with pytest.raises(TypeError, match=named):
        Checkpoints(tmp_path / "checkpoints", keep=1).save(1, arrays, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        Checkpoints(tmp_path / "checkpoints", keep=1).save(1, {}, {"rng": object()})
    assert not (tmp_path / "checkpoints").exists()


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, monkeypatch):
    """The background thread is held back until the donated buffers have been written over many
    times."""
    released = threading.Event()
    checkpoints = Checkpoints(tmp_path, keep=1)
    write = checkpoints._write
    monkeypatch.setattr(checkpoints, "_write", lambda *args: (released.wait(), write(*args)))
    overwrite = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    value = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    # Made by a program: an array made from numpy may share its memory, and then is not donated.
    x = overwrite(jnp.asarray(value))
    value = np.array(x)
    checkpoints.save(1, {"x": x}, {})
    for _ in range(20):
        x = overwrite(x)
    jax.block_until_ready(x)
    finished = list(tmp_path.glob("0000000001"))
    released.set()
    assert not finished
    assert bits(checkpoints.restore({"x": x})[1]) == [value.tobytes()]


def test_an_error_that_is_not_the_storages_reaches_the_caller(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1), {}, wait=True)

    def broken(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a bug"):
        patched.setattr("rl.run.checkpoint.seal", broken)
        checkpoints.save(2, state(2), {}, wait=True)
    assert [p.name for p in tmp_path.iterdir()] == ["0000000001"]
    checkpoints.save(3, state(3), {}, wait=True)
    assert checkpoints.host()[0] == 3


@pytest.mark.parametrize(
    "place", ["rl.run.checkpoint.seal", "pathlib.Path.mkdir", "pathlib.Path.write_text"]
)
def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(
    tmp_path, monkeypatch, caplog, place
):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def failed_save(number):
        caplog.clear()
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "duet.checkpoint"):
            patched.setattr(place, full)
            checkpoints.save(number, state(number), {}, wait=True)
        (record,) = [r for r in caplog.records if r.name == "duet.checkpoint"]
        assert record.levelno == logging.ERROR
        return record.getMessage()

    message = failed_save(1)
    assert (
        "checkpoint 1 was NOT saved" in message
        and "No space left" in message
        and "no earlier checkpoint" in message
    )
    checkpoints.save(2, state(2), {}, wait=True)
    assert "Progress is safe up to checkpoint 2" in failed_save(3)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["0000000002"]
    assert bits(checkpoints.restore(template(state()))[1]) == bits(state(2))
    checkpoints.save(4, state(4), {}, wait=True)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["0000000004"]


def test_what_a_late_writer_of_a_failed_save_leaves_is_removed_and_not_taken_for_a_kill(
    tmp_path, monkeypatch, caplog
):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1), {}, wait=True)
    temporary = []

    def full(directory, *_):
        temporary.append(directory)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rl.run.checkpoint.seal", full)
        checkpoints.save(2, state(2), {}, wait=True)
    temporary[0].mkdir()
    killed = tmp_path / "0000000002.tmp-9"
    killed.mkdir()
    with caplog.at_level(logging.WARNING, "duet.checkpoint"):
        caplog.clear()
        assert checkpoints.host()[0] == 1
    assert not temporary[0].exists()
    assert [
        str(killed) in r.getMessage() for r in caplog.records if r.name == "duet.checkpoint"
    ] == [True]


def test_the_manifest_covers_every_file(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(), {}, wait=True)
    manifest = json.loads((tmp_path / "0000000001" / "manifest.json").read_text())
    root = tmp_path / "0000000001"
    files = {
        p.relative_to(root).as_posix(): p.stat().st_size for p in root.rglob("*") if p.is_file()
    }
    del files["manifest.json"]
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == files
    assert manifest["arrays"]["params/layers/0/kernel"] == {"shape": [3, 8, 4], "dtype": "bfloat16"}
    assert (manifest["format"], manifest["number"]) == (1, 1)
