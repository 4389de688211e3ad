"""Presets: an algorithm with a paper's settings, under what a stage says itself."""

import pytest

from rl.config import files, packaged
from rl.errors import ConfigError
from rl.run.load import load

BASE = """
model: tiny-deepseek
tokenizer: {source: characters, alphabet: "0123456789+-*= "}
max_length: 64
data: {task: arithmetic}
rewards: {functions: [exact_answer]}
stages: [{algorithm: {preset: PRESET}, steps: 3, prompts_per_step: 16, sampling: {max_new_tokens: 8}}]
"""


def loaded(tmp_path, preset, *overrides):
    file = tmp_path / "run.yml"
    file.write_text(BASE.replace("PRESET", preset))
    return load([file], overrides)


@pytest.mark.parametrize("name", packaged.presets())
def test_every_preset_is_a_stage_that_is_saved_in_full(name, tmp_path):
    config = loaded(tmp_path, name)
    saved = tmp_path / "saved.yml"
    saved.write_text(files.resolved_yaml(config))
    assert "preset" not in saved.read_text()
    assert load([saved]) == config


def test_a_preset_holds_the_papers_settings_and_what_a_stage_says_wins(tmp_path):
    (stage,) = loaded(
        tmp_path, "deepseek_r1", "stages.0.samples_per_prompt=4", "stages.0.algorithm.epsilon=5"
    ).stages
    options = stage.algorithm.model_extra
    assert (stage.algorithm.name, options["kl_coef"], options["reference_every"]) == (
        "grpo",
        0.001,
        400,
    )
    assert (stage.optimizer.learning_rate, stage.samples_per_prompt, options["epsilon"]) == (
        3e-6,
        4,
        5.0,
    )
    assert stage.prompts_per_step == 16


def test_a_preset_can_come_from_the_command_line(tmp_path):
    (stage,) = loaded(tmp_path, "gspo", "stages.0.algorithm={preset: dr_grpo}").stages
    assert (stage.algorithm.name, stage.algorithm.model_extra["scale"]) == ("dr_grpo", "none")


def test_an_unknown_preset_is_named_with_its_place_and_the_nearest(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"run.yml:7: stages.0.algorithm.preset: no preset 'depseek_r1' \(nearest: "
        r"deepseek_r1; valid: ",
    ):
        loaded(tmp_path, "depseek_r1")


def test_an_option_that_the_presets_algorithm_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cispo has no option 'dual_clip'"):
        loaded(tmp_path, "cispo", "stages.0.algorithm.dual_clip=3")
