"""`rl import verl`: scripts and configurations as verl's examples have them."""

from pathlib import Path

import pytest
from importing import config_of, draft_of, refused, said_of

from rl.imports import verl as importer
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, GivenValue
from rl.imports.rules import SPEED, rule_of
from rl.imports.tables.verl import RL, SFT

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports"
VERL = FIXTURES / "verl"
ACTOR = "actor_rollout_ref.actor"
SFT_WORDS = "python -m verl.trainer.sft_trainer model.path=a/b data.train_files=c.parquet"


def keys_of(name: str) -> list[str]:
    return (FIXTURES / name).read_text().split()


@pytest.mark.parametrize(
    ("table", "names", "program"),
    [(RL, "verl_keys.txt", "main_ppo"), (SFT, "verl_sft_keys.txt", "sft_trainer")],
)
def test_every_key_of_their_configurations_has_a_fate(table, names, program):
    keys = keys_of(names)
    assert len(keys) > 300
    assert [key for key in keys if rule_of(table, key) is None] == []
    # A value that no key has by default: each word is mapped, changed, refused or left.
    given = Given({key: GivenValue("other", "run.sh:1") for key in keys}, program)
    draft = Draft(importer.NAME, given, importer.table_of(given, Facts()))
    importer.convert(draft)
    assert [key for key in keys if draft.fate_of(key) is None] == []


def test_gmpo_with_arrays_of_parameters():
    config = config_of("verl", VERL / "gmpo_fsdp.sh")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.aggregation) == ("gmpo", "sequence")
    assert (algorithm.epsilon, algorithm.epsilon_high) == (0.4, 0.4)
    assert (algorithm.kl_coef, algorithm.kl, algorithm.scale) == (0.001, "k3", "group")
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_step) == (
        1024,
        5,
        4,
    )
    assert config.max_length == 1024 + 2048 and config.model.source == "Qwen/Qwen3-8B"
    assert [data.name for data in config.data] == ["gsm8k_train", "math_train"]
    assert {data.too_long for data in config.data} == {"drop"}
    assert (config.evaluation.every, config.run.checkpoint_every) == (5, 20)
    assert stage.epochs == 15 and config.run.wandb.project == "verl_gmpo"


def test_grpo_with_an_adapter():
    config = config_of("verl", VERL / "grpo_lora.sh")
    adapter = config.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets) == (64, 32, "all-linear")
    assert config.data.path.endswith("/data/gsm8k/train.parquet")
    assert config.stages[0].algorithm.dual_clip == 3.0  # verl's default
    assert config.stages[0].updates_per_step == 1
    assert config.rewards.functions[0].name == importer.VERL_REWARD
    draft = draft_of("verl", VERL / "grpo_lora.sh")
    assert draft.fate_of("data.shuffle") == "changed"
    assert draft.fate_of("actor_rollout_ref.model.use_shm") == "left"


def test_ppo_with_a_critic_and_a_penalty_in_the_rewards():
    stage = config_of("verl", VERL / "ppo.sh").stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.gamma, algorithm.lam) == ("ppo", 1.0, 0.95)
    assert (algorithm.kl_reward_coef, algorithm.kl_target, algorithm.kl_horizon) == (
        0.002,
        0.05,
        10000,
    )
    assert (algorithm.kl_coef, algorithm.value_clip, algorithm.critic_warmup) == (0.0, 0.4, 3)
    assert (stage.critic.learning_rate, stage.optimizer.learning_rate) == (1e-5, 1e-6)
    # A tenth of 100 steps; each makes four updates, and verl warms up by steps.
    assert (stage.steps, stage.optimizer.warmup_steps) == (100, 40)
    assert (stage.sampling.temperature, stage.sampling.top_k) == (0.8, 50)


def test_dapo():
    config = config_of("verl", VERL / "dapo.sh")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.dual_clip) == (0.2, 0.28, 10.0)
    assert (algorithm.aggregation, algorithm.dynamic_batches) == ("token", 10)
    assert (algorithm.correction, algorithm.correction_max) == ("token_truncate", 2.0)
    assert (algorithm.rejection, algorithm.rejection_max) == ("sequence_mean_k3", 0.01)
    assert (stage.updates_per_step, stage.optimizer.warmup_steps) == (16, 160)
    assert config.max_length == 2048 + 20480
    overlong = config.rewards.functions[1]
    assert (overlong.name, overlong.options) == ("soft_overlong", {"cache": 4096})


def test_sft():
    config = config_of("verl", VERL / "sft.sh", "--rows", "2560")
    stage = config.stages[0]
    assert (stage.algorithm.name, stage.prompts_per_step, stage.epochs) == ("sft", 256, 2)
    optimizer = stage.optimizer
    assert (optimizer.schedule, optimizer.final_fraction) == ("cosine", 0.1)
    assert (optimizer.warmup_steps, optimizer.beta2) == (4, 0.95)  # 0.2 of 2 x 2560 / 256 updates
    assert (config.data.too_long, config.max_length) == ("truncate", 2048)
    assert stage.held_out.every == 50


def test_sft_with_muon_of_megatron(tmp_path):
    """`optim=megatron` chooses a file of verl's, with other defaults."""
    script = tmp_path / "run.sh"
    words = (SFT_WORDS, "optim=megatron optim.optimizer=muon optim.muon_scalar_optimizer=adam")
    script.write_text(" ".join(words) + " model=hf_model optim.muon_tp_mode=blockwise\n")
    assert config_of("verl", script).stages[0].optimizer.name == "muon"
    draft = draft_of("verl", script)
    fates = {key: draft.fate_of(key) for key in ("optim", "model", "optim.muon_tp_mode")}
    assert fates == {"optim": "changed", "model": "left", "optim.muon_tp_mode": "changed"}
    script.write_text(script.read_text().replace("scalar_optimizer=adam", "scalar_optimizer=lion"))
    assert refused("verl", script) == {"optim.muon_scalar_optimizer"}


def test_a_configuration_of_hydra_with_interpolations():
    config = config_of("verl", VERL / "ppo_trainer.yaml")
    stage = config.stages[0]
    assert (stage.algorithm.ratio, stage.algorithm.aggregation) == ("sequence_token", "sequence")
    assert (stage.algorithm.scale, stage.optimizer.beta2) == ("none", 0.98)
    assert config.run.dir == "checkpoints/gspo"
    assert config.rewards.functions[0].options == {
        "score": "my_score.py:compute_score",
        "options": {"strict": True},
    }
    assert (stage.updates_per_step, stage.steps) == (2, 50)


def test_keys_after_the_files_go_first():
    config = config_of(
        "verl",
        VERL / "ppo_trainer.yaml",
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=4",
    )
    assert config.stages[0].prompts_per_step == 64 and config.stages[0].samples_per_prompt == 4


@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [
        ("token-mean", "token"),
        ("seq-mean-token-sum", "sequence_sum"),
        ("seq-mean-token-mean", "sequence"),
        ("seq-mean-token-sum-norm", "constant"),
    ],
)
def test_aggregations(mode, aggregation):
    config = config_of("verl", VERL / "ppo.sh", f"{ACTOR}.loss_agg_mode={mode}")
    assert config.stages[0].algorithm.aggregation == aggregation


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        ("gae", "ppo"),
        ("rloo", "rloo"),
        ("remax", "remax"),
        ("opo", "opo"),
        ("reinforce_plus_plus", "reinforce_pp"),
        ("reinforce_plus_plus_baseline", "reinforce_pp"),
    ],
)
def test_estimators(estimator, name):
    more = [f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=False"]
    algorithm = config_of("verl", VERL / "ppo.sh", *more).stages[0].algorithm
    assert algorithm.name == name
    if name == "rloo":  # verl clips the ratio of each token
        assert (algorithm.ratio, algorithm.aggregation) == ("token", "token")
    if name == "reinforce_pp":
        assert algorithm.baseline is (estimator.endswith("baseline"))


@pytest.mark.parametrize(
    ("kind", "estimator"), [("k1+", "k2"), ("mse", "k2"), ("low_var_kl", "k3"), ("k3+", "k2")]
)
def test_estimators_of_the_kl(kind, estimator):
    more = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}"]
    assert config_of("verl", VERL / "ppo.sh", *more).stages[0].algorithm.kl == estimator


def test_bounds_of_the_correction_as_verl_writes_them():
    correction = "algorithm.rollout_correction"
    more = [f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=0.5_5.0"]
    algorithm = config_of("verl", VERL / "ppo.sh", *more).stages[0].algorithm
    assert algorithm.correction == "token_mask"
    assert (algorithm.correction_min, algorithm.correction_max) == (0.5, 5.0)
    more[1] = f"{correction}.rollout_is_threshold=1.2.3_4"
    assert refused("verl", VERL / "ppo.sh", *more) == {f"{correction}.rollout_is_threshold"}


def test_a_clip_ratio_that_verl_does_not_read_is_named():
    said = said_of("verl", VERL / "ppo.sh", f"{ACTOR}.clip_ratio=0.1")
    assert "verl reads clip_ratio_low and clip_ratio_high, 0.2 and 0.2 here" in said


@pytest.mark.parametrize(
    "word",
    [
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.kl_loss_type=kl {ACTOR}.use_kl_loss=True",
        f"{ACTOR}.ppo_mini_batch_size=300",
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.policy_loss.loss_mode=kl_cov",
        f"{ACTOR}.clip_ratio_hihg=0.28",
        "algorithm.adv_estimator=grpo_passk",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "trainer.v1.trainer_mode=separate_async",
        "critic.model.path=another/model",
        "data.custom_cls.path=rows.py",
        "distillation.enabled=True",
        "algorithm.kl_ctrl.kl_coef=$COEF",
    ],
)
def test_what_changes_the_training_is_refused(tmp_path, word):
    script = tmp_path / "run.sh"
    script.write_text((VERL / "ppo.sh").read_text().rstrip() + f" \\\n    {word}\n")
    assert word.partition("=")[0] in refused("verl", script)


def test_a_branch_of_a_script_and_an_argument_without_a_value(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "SAVE=$1\nPEFT=${PEFT:-1}\nextra=()\n"
        'if [ "$PEFT" = 1 ]; then\n  extra+=(model.lora_rank=8)\nfi\n'
        "torchrun -m verl.trainer.sft_trainer optim.lr=1e-4 trainer.default_local_dir=$SAVE "
        '"${extra[@]}"\n'
    )
    config = config_of("verl", script)
    assert config.model.adapter.rank == 8 and config.run.dir is None
    assert "$1 has no value before the script runs" in said_of("verl", script)


def test_a_penalty_of_long_completions_by_its_newer_name(tmp_path):
    script = tmp_path / "run.sh"
    section = "reward_model.reward_kwargs"
    words = f"+{section}.overlong_buffer_cfg.enable=True +{section}.overlong_buffer_cfg.len=64"
    text = (VERL / "ppo.sh").read_text().rstrip()
    script.write_text(
        f"{text} \\\n {words} +{section}.max_resp_len=256 reward_model.reward_manager=dapo\n"
    )
    overlong = config_of("verl", script).rewards.functions[1]
    assert overlong.options == {"cache": 64, "limit": 256}


def test_a_configuration_that_is_not_of_verl_is_asked_for(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo --config-name='my_grpo' data.seed=1\n")
    assert "config_name" in refused("verl", script)
    script.write_text("python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer\n")
    config_of("verl", script)


def _script(folder, *words) -> Path:
    script = folder / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo {' '.join(words)}\n")
    return script


def test_a_bound_that_is_null_is_that_of_both(tmp_path):
    script = _script(tmp_path, f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null")
    draft = draft_of("verl", script)
    assert draft.written_number("stages.0.algorithm.epsilon") == 0.3
    assert draft.written_number("stages.0.algorithm.epsilon_high") == 0.2
    assert "clip_ratio_high, 0.3 and 0.2 here" in said_of("verl", script)


def test_an_optimizer_by_its_older_name(tmp_path):
    draft = draft_of("verl", _script(tmp_path, f"{ACTOR}.optim.name=sgd"))
    assert draft.values["stages.0.optimizer.name"].value == "sgd"


def test_unknown_options_of_an_optimizer_and_an_adapter_of_the_critic_are_refused(tmp_path):
    words = (f"{ACTOR}.optim.unknown=1", "algorithm.adv_estimator=gae", "critic.model.lora_rank=8")
    keys = refused("verl", _script(tmp_path, *words, "critic.optim.unknown=2"))
    assert keys >= {words[0][:-2], "critic.model.lora_rank", "critic.optim.unknown"}
    draft = draft_of("verl", _script(tmp_path, f"{ACTOR}.fsdp_config.model_dtype=bfloat16"))
    assert draft.fate_of(f"{ACTOR}.fsdp_config.model_dtype") == "changed"


def test_reasons_of_a_section_come_before_those_of_all_engines():
    for key in ("shuffle", "data_loader_seed", "rollout_n"):
        assert rule_of(RL, f"{ACTOR}.{key}") is not SPEED


def test_held_out_rows_are_read_as_those_of_the_stage(tmp_path):
    script = tmp_path / "run.sh"
    words = "data.val_files=v.parquet data.prompt_key=question data.response_key=answer"
    script.write_text(f"{SFT_WORDS} {words} data.truncation=right\n")
    config = config_of("verl", script)
    (held_out,) = [config.stages[0].held_out.data]
    assert held_out.columns.prompt == "question" and held_out.columns == config.data.columns
    assert held_out.too_long == "truncate" and held_out.chat == config.data.chat


def test_a_reward_model_with_a_penalty_is_written_once(tmp_path):
    section = "reward.reward_model"
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    words = (f"{section}.enable=True", f"{section}.model_path=a/b", f"{buffer}.enable=True")
    draft = draft_of("verl", _script(tmp_path, *words, f"{buffer}.len=64"))
    (entry,) = [each for each in draft.entries if each.target == "rewards.functions"]
    assert [each["name"] for each in entry.value] == ["reward_model", "soft_overlong"]
    assert f"{section}.model_path" in entry.keys and draft.fate_of(f"{section}.enable") == "mapped"


def test_a_reference_to_a_value_that_is_missing_has_none_either(tmp_path):
    script = _script(
        tmp_path,
        "actor_rollout_ref.model.path=$NONE",
        r"data.train_files=\${actor_rollout_ref.model.path}",
    )
    assert {"actor_rollout_ref.model.path", "data.train_files"} <= refused("verl", script)


def test_a_key_that_hydra_deletes_has_no_value(tmp_path):
    script = _script(tmp_path, "data.seed=7", "~data.seed=7", "trainer.seed=3")
    assert config_of("verl", script).seed == 3
