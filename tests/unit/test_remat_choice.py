"""What `model.remat: auto` takes, from sizes alone; and that a run keeps it."""

import jax
import pytest

from policy.mesh import device_memory
from rl.accounting import chips
from rl.config import files
from rl.errors import ConfigError
from rl.plan.children import with_chosen_remat
from rl.run import build
from rl.run.load import load
from rl.run.resume import remat
from rl.run.resume.continued import (
    check_same,
    continued,
    with_model_keys,
    with_saved_choices,
)

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


def test_a_run_keeps_the_choices_of_its_start(tmp_path, monkeypatch):
    """Also if the machine has another memory; then a note says so."""
    made = config(tmp_path, "model=tiny-deepseek", "max_length=48", STAGE % 8)
    assert made.model.remat == "auto" and made.runtime.remat == "full"
    assert with_saved_choices(made) == made  # a new run
    monkeypatch.setattr(device_memory, "host_memory", lambda: 2**34)
    started, notes = remat.resolved(made, made.model)
    assert started.model.remat == started.runtime.remat == "none"
    assert started.model.kept_logits_mib == started.runtime.kept_logits_mib == 1024
    assert len(notes) == 2 and "1024" in notes[0] and "auto takes `none`" in notes[1]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yml").write_text(files.resolved_yaml(started))
    (folder / "events.jsonl").write_text("{}\n")
    assert with_saved_choices(made) == started == load([folder])
    assert continued(made).changes == []
    check_same(started, made)
    assert remat.resolved(started, made.model) == (started, [])
    assert remat.resolved(started, started.model) == (started, [])
    monkeypatch.setattr(device_memory, "host_memory", lambda: 2**22)
    same, notes = remat.resolved(with_saved_choices(made), made.model)
    assert same == started
    assert len(notes) == 2 and "keeps `model.kept_logits_mib: 1024`" in notes[0]
    assert "keeps `model.remat: none`" in notes[1] and "`full`" in notes[1]
    other = config(
        tmp_path, "model={source: tiny-deepseek, remat: full}", "max_length=48", STAGE % 8
    )
    with pytest.raises(ConfigError, match="model.remat: none there, full here"):
        check_same(started, other)
    other = config(
        tmp_path, "model={source: tiny-deepseek, kept_logits_mib: 7}", "max_length=48", STAGE % 8
    )
    with pytest.raises(ConfigError, match="model.kept_logits_mib: 1024 there, 7 here"):
        check_same(started, other)
    older = with_model_keys(started, kept_logits_mib=None)  # a version without the key
    check_same(older, started)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("kept_logits_mib: 7", 7), ("num_vocab_tiling: 2", 0), ("remat: full", 128)],
)
def test_kept_logits_are_what_is_set_and_none_with_tiles_that_are_set(
    tmp_path, monkeypatch, model, expected
):
    monkeypatch.setattr(device_memory, "host_memory", lambda: 2**31 + 2**29)
    made = config(tmp_path, f"model={{source: tiny-deepseek, {model}}}", STAGE % 8)
    started, _ = remat.resolved(made, made.model)
    assert started.model.kept_logits_mib == expected
    assert remat.with_kept_logits(made, 2**31).model.kept_logits_mib == expected


@pytest.mark.slow
def test_a_plan_chooses_for_its_devices(tmp_path):
    made = config(tmp_path, "model=tiny-deepseek", "max_length=48", STAGE % 8)
    small, note = with_chosen_remat(made, "cpu:1", 0.001)
    assert small.model.remat == "full" and note is not None and "of 0.00 GiB per device" in note
    assert with_chosen_remat(small, "cpu:1", None) == (small, None)
