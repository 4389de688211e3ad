"""What `model.remat: auto` takes, from sizes alone; and that a run keeps it."""

from types import SimpleNamespace

import jax
import pytest

from rl.accounting import chips, memory
from rl.config import files
from rl.errors import ConfigError
from rl.plan.children import with_chosen_remat
from rl.run import build
from rl.run.load import load
from rl.run.resume import remat
from rl.run.resume.continued import check_same, continued, with_saved_remat

GIVEN = ["tokenizer=bytes", "data.task=arithmetic", "mesh={fsdp: 1}"]
STAGE = "stages=[{algorithm: sft, steps: 2, prompts_per_step: 64, micro_batch: %d}]"


def config(tmp_path, *more):
    (tmp_path / "run.yml").write_text(f"run: {{dir: {tmp_path / 'run'}}}\n")
    return load([tmp_path / "run.yml"], [*GIVEN, *more])


@pytest.mark.parametrize(
    ("chip", "model", "rows", "length", "expected"),
    [
        ("H100", "qwen2.5-0.5b", 8, 1024, "none"),
        ("H100", "qwen2.5-0.5b", 32, 1024, "save_dot_with_context_except_mlp"),
        ("TPU v5 lite", "qwen2.5-0.5b", 4, 1024, "save_dot_with_context_except_mlp"),
        ("TPU v5 lite", "qwen2.5-0.5b", 8, 1024, "full"),
        ("TPU v5", "qwen2.5-0.5b", 32, 1024, "none"),
        ("L4", "smollm2-135m", 8, 1024, "none"),
        ("L4", "smollm2-135m", 32, 1024, "full"),
    ],
)
def test_the_choice_follows_from_chip_model_and_tokens(
    tmp_path, chip, model, rows, length, expected
):
    made = config(tmp_path, f"model={model}", f"max_length={length}", STAGE % rows)
    kind = chips.of(chip)
    assert kind is not None
    size = kind.memory * 2**30
    graph = build.graph(made, build.on_mesh(made, jax.devices()[:1]))
    platform = "tpu" if "TPU" in chip else "gpu"
    assert remat.choose(remat.updates(made, graph, size), size, platform).policy == expected


def test_all_stages_fit_and_unknown_memory_holds_nothing():
    small = remat.UpdateMemory(1.0, dict(zip(remat.ORDER, (8.0, 4.0, 2.0, 1.0), strict=True)))
    large = remat.UpdateMemory(2.0, dict(zip(remat.ORDER, (80.0, 40.0, 20.0, 10.0), strict=True)))
    choice = remat.choose([small, large], 60.0, "cpu")
    assert choice == remat.RematChoice("save_dot_with_context_except_mlp", 20.0, 22.0, 60.0)
    assert remat.choose([small], 60.0, "cpu").policy == "none"
    hosted = remat.UpdateMemory(1.0, {name: small.kept[name] for name in remat.ORDER[1:]})
    assert remat.choose([small, hosted], 60.0, "cpu").policy == "minimal_flash"
    for available in (None, 1.0):
        assert remat.choose([small, large], available, "tpu").policy == "full"


def test_a_run_keeps_the_policy_of_its_start(tmp_path, monkeypatch):
    """Also if the machine has another memory; then a note says so."""
    made = config(tmp_path, "model=tiny-deepseek", "max_length=48", STAGE % 8)
    assert made.model.remat == "auto" and made.runtime.remat == "full"
    assert with_saved_remat(made) == made  # a new run
    started, notes = remat.resolved(made, "auto")
    assert started.model.remat == started.runtime.remat == "none"
    assert len(notes) == 1 and "auto takes `none`" in notes[0]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yml").write_text(files.resolved_yaml(started))
    (folder / "events.jsonl").write_text("{}\n")
    assert with_saved_remat(made) == started == load([folder])
    assert continued(made).changes == []
    check_same(started, made)
    assert remat.resolved(started, "auto") == (started, [])
    assert remat.resolved(started, "none") == (started, [])
    monkeypatch.setattr(memory, "of_host", lambda: 2**22)
    same, notes = remat.resolved(with_saved_remat(made), "auto")
    assert same == started
    assert len(notes) == 1 and "keeps `model.remat: none`" in notes[0] and "`full`" in notes[0]
    other = config(
        tmp_path, "model={source: tiny-deepseek, remat: full}", "max_length=48", STAGE % 8
    )
    with pytest.raises(ConfigError, match="model.remat: none there, full here"):
        check_same(started, other)


@pytest.mark.slow
def test_a_plan_chooses_for_its_devices(tmp_path):
    made = config(tmp_path, "model=tiny-deepseek", "max_length=48", STAGE % 8)
    small, note = with_chosen_remat(made, "cpu:1", 0.001)
    assert small.model.remat == "full" and note is not None and "of 0.00 GiB per device" in note
    assert with_chosen_remat(small, "cpu:1", None) == (small, None)


def test_memory_of_a_machine_is_the_smallest_limit_in_full_steps(tmp_path):
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    own = cgroup / "slice" / "job"
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    assert memory.of_host(cgroup, proc) is None
    (proc / "meminfo").write_text(f"MemTotal: {8 * 2**20 - 3000} kB\n")
    assert memory.of_host(cgroup, proc) == 8 * 2**30 - 2**28
    (proc / "self" / "cgroup").write_text("0::/slice/job\n")
    (own / "memory.max").write_text("max\n")
    assert memory.of_host(cgroup, proc) == 8 * 2**30 - 2**28
    (cgroup / "slice" / "memory.max").write_text(f"{3 * 2**30}\n")
    assert memory.of_host(cgroup, proc) == 3 * 2**30
    (cgroup / "memory.max").write_text(f"{2**30 + 5}\n")
    assert memory.of_host(cgroup, proc) == 2**30


def test_memory_of_a_control_group_of_version_1(tmp_path):
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    (cgroup / "memory" / "job").mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {8 * 2**20} kB\n")
    (proc / "self" / "cgroup").write_text("5:cpu:/other\n4:memory:/job\n")
    (cgroup / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{2**31}\n")
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert memory.of_host(cgroup, proc) == 2**31


def test_memory_of_a_device(monkeypatch):
    monkeypatch.setattr(memory, "of_host", lambda: 2**33)
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    assert memory.of_device(device, 1) == 80 * 2**30
    other = SimpleNamespace(
        device_kind="new", platform="gpu", memory_stats=lambda: {"bytes_limit": 7}
    )
    assert memory.of_device(other, 1) == 7
    assert memory.of_device(SimpleNamespace(device_kind="cpu", platform="cpu"), 4) == 2**31
