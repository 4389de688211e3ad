"""`rl import tunix`: YAML files and scripts with overrides."""

from pathlib import Path

import pytest
from importing import config_of, draft_of, refused, said_of

from rl.imports import tunix as importer
from rl.imports.draft import Draft
from rl.imports.given import Given, GivenValue
from rl.imports.rules import rule_of
from rl.imports.tables.tunix import TABLE

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports"
TUNIX = FIXTURES / "tunix"
ACTOR = "rl_training_config.actor_optimizer_config"


@pytest.mark.parametrize("mode", ["grpo", "agentic_grpo", "ppo", "agentic_ppo", "sft"])
def test_every_key_of_their_configurations_has_a_fate(mode):
    keys = (FIXTURES / "tunix_keys.txt").read_text().split()
    assert len(keys) > 250
    assert [key for key in keys if rule_of(TABLE, key) is None] == []
    words = {key: GivenValue("other", "run.yaml:1") for key in keys}
    words["training_mode"] = GivenValue(mode, "run.yaml:1")
    draft = Draft(importer.NAME, Given(words), TABLE)
    importer.convert(draft)
    assert [key for key in keys if draft.fate_of(key) is None] == []


def test_grpo_of_a_file():
    config = config_of("tunix", TUNIX / "grpo_qwen3.yaml", "--rows", "7473")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.aggregation) == ("grpo", "sequence")
    assert (algorithm.epsilon, algorithm.kl_coef, algorithm.kl) == (0.2, 0.08, "k3")
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_step) == (8, 4, 1)
    optimizer = stage.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.final_fraction) == (
        3e-6,
        "cosine",
        0.1,
    )
    assert (optimizer.warmup_steps, optimizer.clip_norm, optimizer.weight_decay) == (94, 0.1, 0.1)
    assert config.max_length == 256 + 768
    assert (stage.sampling.temperature, stage.sampling.top_k) == (0.9, 50)
    assert (config.mesh.fsdp, config.mesh.tensor, config.seed) == (2, 4, 42)
    assert (config.run.checkpoint_every, config.run.keep_checkpoints) == (500, 4)
    assert len(config.rewards.functions) == 4
    assert config.rewards.functions[0].options == {
        "function": "tunix/cli/reward_fn/gsm8k.py:check_answer"
    }
    # k1 is the default of Tunix: the file did not choose it.
    draft = draft_of("tunix", TUNIX / "grpo_qwen3.yaml")
    assert not draft.refused and "k1 is no loss" in said_of("tunix", TUNIX / "grpo_qwen3.yaml")


def test_grpo_of_a_script_with_the_file_of_defaults():
    config = config_of("tunix", TUNIX / "grpo_qwen3.sh")
    stage = config.stages[0]
    assert (stage.steps, stage.optimizer.warmup_steps) == (160, 16)  # 100 x 2 x 0.8
    assert config.model.adapter.targets == ["q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"]
    assert stage.algorithm.kl_coef == 0.0
    assert config.tokenizer is None  # the same as the model's


def test_ppo_with_anchors_of_yaml():
    config = config_of("tunix", TUNIX / "ppo_gemma3.yaml")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.lam, algorithm.kl_reward_coef) == ("ppo", 0.95, 0.08)
    assert (stage.critic.learning_rate, stage.critic.warmup_steps) == (1e-5, 374)
    assert (stage.steps, stage.optimizer.warmup_steps) == (3738, 374)
    assert stage.sampling.stop_token_ids == [1, 106]


def test_sft_in_four_bits():
    config = config_of("tunix", TUNIX / "sft_gemma.sh")
    stage = config.stages[0]
    assert (config.model.base_weights, config.model.base_block) == ("nf4", 256)
    assert (config.model.adapter.rank, config.model.adapter.alpha) == (16, 2.0)
    assert (stage.algorithm.name, stage.steps, stage.prompts_per_step) == ("sft", 100, 16)
    assert stage.optimizer.learning_rate == 1e-5 and config.max_length == 256


def test_the_agentic_trainer_without_an_environment():
    config = config_of("tunix", TUNIX / "agentic_deepscaler.yaml")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.ratio, algorithm.aggregation, algorithm.kl) == (
        "sequence_token",
        "token",
        "k3",
    )
    assert (algorithm.correction, algorithm.correction_max) == ("token_truncate", 2.5)
    assert (stage.updates_per_step, stage.steps) == (2, 468)  # 312 x 3 x 0.5
    assert (stage.optimizer.schedule, stage.optimizer.learning_rate) == ("constant", 1e-6)
    assert stage.sampling.top_k == 0 and config.data.columns.prompt == "prompts"
    assert config.rewards.functions[0].options == {
        "function": "tunix/utils/math_rewards.py:compute_score"
    }


def test_functions_of_a_reward_file_are_read_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "raise SystemExit('this was run')\n\ndef right(prompts, completions, answer, **_): ...\n"
        "def _hidden(): ...\ndef short(prompts, completions, **_): ...\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text(
        (TUNIX / "grpo_qwen3.yaml").read_text().replace("tunix/cli/reward_fn/gsm8k", "mine")
    )
    functions = config_of("tunix", file).rewards.functions
    assert [each.options["function"] for each in functions] == ["mine.py:right", "mine.py:short"]


def test_an_override_file_over_another(tmp_path):
    (tmp_path / "more.yaml").write_text("batch_size: 32\ngrpo_config: {epsilon: 0.1}\n")
    script = tmp_path / "run.sh"
    base = TUNIX / "grpo_qwen3.yaml"
    script.write_text(
        f"python -m tunix.cli.grpo_main {base} override_config_file=more.yaml batch_size=64\n"
    )
    stage = config_of("tunix", script).stages[0]
    assert (stage.prompts_per_step, stage.algorithm.epsilon) == (64, 0.1)
    assert stage.samples_per_prompt == 4


@pytest.mark.parametrize(
    "line",
    [
        "grpo_config.num_iterations=2",
        "grpo_config.kl_loss_mode=kl",
        "grpo_config.loss_agg_mode=sequence-mean-token-sum-norm",
        "grpo_config.epsilonn=0.2",
        f"{ACTOR}.opt_type=lamb",
        f"{ACTOR}.schedule_type=sgdr_schedule",
        f"{ACTOR}.init_value=1e-7",
        "rl_training_config.mini_batch_size=3",
        "env_class_path=my.Env",
        "agentic_config.max_turns=3",
        "training_mode=agentic_grpo agentic_grpo_config.off_policy_steps=2",
    ],
)
def test_what_changes_the_training_is_refused(tmp_path, line):
    script = tmp_path / "run.sh"
    script.write_text(f"python -m tunix.cli.grpo_main {TUNIX / 'grpo_qwen3.yaml'} {line}\n")
    key = line.split()[-1].partition("=")[0]
    assert key in refused("tunix", script)


def test_a_schedule_that_ends_before_its_stage_is_refused(tmp_path):
    script = tmp_path / "run.sh"
    words = f"rl_training_config.max_steps=100 {ACTOR}.decay_steps=50"
    script.write_text(f"python -m tunix.cli.grpo_main {TUNIX / 'grpo_qwen3.yaml'} {words}\n")
    assert f"{ACTOR}.decay_steps" in refused("tunix", script)


def test_several_datasets_and_one_entry_for_the_targets_of_an_adapter(tmp_path):
    file = tmp_path / "run.yaml"
    text = (TUNIX / "grpo_qwen3.yaml").read_text()
    file.write_text(text)
    script = tmp_path / "run.sh"
    words = "'dataset_name=[a/b,c/d]' rl_training_config.eval_every_n_steps=5"
    lora = "actor_model_config.lora_config.rank=8 actor_model_config.lora_config.module_path=q_proj"
    script.write_text(f"python -m tunix.cli.grpo_main {file} {words} {lora}\n")
    draft = draft_of("tunix", script)
    assert len(draft.written_entries("data")) == 2
    (entry,) = [each for each in draft.entries if each.target == "model.adapter.targets"]
    assert entry.value == ["q_proj"]
