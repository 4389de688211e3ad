"""`rl import openrlhf`: flags with dotted and with older names."""

from collections import defaultdict
from pathlib import Path

import pytest
from importing import config_of, draft_of, refused, said_of

from rl.imports import openrlhf as importer
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, GivenValue
from rl.imports.rules import rule_of
from rl.imports.tables.openrlhf import OLDER, OLDER_OFFLINE, TABLES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports"
OPENRLHF = FIXTURES / "openrlhf"


def keys_by_program() -> dict[str, list[str]]:
    keys = defaultdict(list)
    for line in (FIXTURES / "openrlhf_keys.txt").read_text().splitlines():
        program, key = line.split()
        keys[program].append(key)
    return keys


@pytest.mark.parametrize("program", TABLES)
def test_every_flag_of_their_programs_has_a_fate(program):
    keys = keys_by_program()[program]
    assert len(keys) > 60
    older = OLDER if program == "train_ppo_ray" else OLDER_OFFLINE
    names = {key: key if key in TABLES[program] else older.get(key, key) for key in keys}
    assert [key for key in keys if rule_of(TABLES[program], names[key]) is None] == []
    given = Given({key: GivenValue("other", "run.sh:1") for key in keys}, program)
    draft = Draft(importer.NAME, given, importer.table_of(given, Facts()))
    importer.convert(draft)
    assert [key for key in keys if draft.fate_of(names[key]) is None] == []


def test_every_older_name_stands_for_a_key():
    every = {key: rule for table in TABLES.values() for key, rule in table.items()}
    names = {*OLDER.values(), *OLDER_OFFLINE.values()}
    assert [name for name in names if rule_of(every, name) is None] == []


def test_reinforce_with_older_names():
    config = config_of("openrlhf", OPENRLHF / "prorl.sh", "--rows", "5120")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.baseline, algorithm.aggregation) == (
        "reinforce_pp",
        True,
        "token",
    )
    assert (algorithm.epsilon, algorithm.epsilon_high) == (0.2, 0.27)
    assert (algorithm.kl_coef, algorithm.kl, algorithm.kl_reward_coef) == (1e-4, "k2", 0)
    assert (algorithm.correction, algorithm.correction_min, algorithm.correction_max) == (
        "token_mask",
        0.5,
        5.0,
    )
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_step) == (
        512,
        16,
        8,
    )
    assert stage.optimizer.warmup_steps == 240  # 3% of 100 x 5120 / 512 steps of 8 updates
    assert (stage.optimizer.schedule, stage.optimizer.final_fraction) == ("cosine", 0.1)
    assert (stage.optimizer.beta2, stage.optimizer.learning_rate) == (0.95, 1e-6)
    assert config.max_length == 1024 + 8192 and config.data.chat
    assert config.rewards.functions[0].options == {
        "function": "/openrlhf/examples/python/math_reward_func.py:reward_func",
        "label": "label",
    }
    assert (config.evaluation.samples, config.evaluation.every) == (4, 5)


def test_a_key_of_weights_and_biases_is_not_carried_over():
    said = said_of("openrlhf", OPENRLHF / "prorl.sh")
    assert "s3cret" not in said and "use_wandb (prorl.sh:" in said
    assert config_of("openrlhf", OPENRLHF / "prorl.sh").run.wandb is not None


def test_group_norm_with_dotted_names():
    config = config_of("openrlhf", OPENRLHF / "grpo.sh")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.scale, algorithm.aggregation) == ("grpo", "group", "sequence")
    assert (algorithm.correction, algorithm.correction_min, algorithm.correction_max) == (
        "geometric_mask",
        0.99,
        1.01,
    )
    assert (algorithm.kl, algorithm.kl_coef, algorithm.entropy_coef) == ("k3", 1e-3, 0.0)
    assert (stage.updates_per_step, config.max_length) == (2, 10240)
    overlong = config.rewards.functions[1]
    assert (overlong.name, overlong.weight, overlong.options) == (
        "soft_overlong",
        0.5,
        {"cache": 4096},
    )
    assert config.run.tensorboard and config.run.keep_checkpoints == 2


def test_ppo_with_a_reward_model():
    config = config_of("openrlhf", OPENRLHF / "ppo.sh")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.lam, algorithm.value_clip) == ("ppo", 0.95, 0.5)
    assert (algorithm.kl_reward_coef, algorithm.kl_coef) == (0.01, 0)
    assert (stage.critic.learning_rate, stage.updates_per_step) == (9e-6, 8)
    assert config.rewards.functions[0].options == {"source": "OpenRLHF/Llama-3-8b-rm-700k"}
    assert config.data.columns.prompt == "context_messages" and config.data.limit == 100000


def test_dpo_in_a_document_of_a_shell():
    config = config_of("openrlhf", OPENRLHF / "dpo.sh")
    stage = config.stages[0]
    algorithm = stage.algorithm
    assert (algorithm.name, algorithm.beta, algorithm.nll_coef) == ("dpo", 0.1, 0.2)
    assert (stage.prompts_per_step, stage.optimizer.learning_rate) == (256, 5e-7)
    assert (config.max_length, config.run.checkpoint_every) == (8192, 0)


def test_the_names_of_their_distillation_script(tmp_path):
    script = tmp_path / "kd.sh"
    script.write_text(
        "deepspeed --module openrlhf.cli.train_kd --model_name_or_path a/b --teacher_model c/d "
        "--ckpt_save_path kept --dataset e/f\n"
    )
    config = config_of("openrlhf", script)
    assert config.teacher is not None
    assert (config.model.source, config.teacher.source) == ("a/b", "c/d")
    assert config.stages[0].algorithm.train_on == "last_turn"
    draft = draft_of("openrlhf", script)
    assert draft.fate_of("model.model_name_or_path") == "mapped"
    assert draft.fate_of("ckpt.output_dir") == "left"


def test_distillation_at_the_tokens_of_the_policy(tmp_path):
    config = config_of("openrlhf", OPENRLHF / "opd.sh", "--rows", "400")
    stage = config.stages[0]
    assert (stage.algorithm.name, stage.algorithm.aggregation) == ("opd", "token")
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.epochs) == (8, 1, 1)
    assert (config.max_length, stage.sampling.max_new_tokens) == (512 + 256, 256)
    assert config.teacher is not None and config.teacher.source == "Qwen/Qwen3-4B"
    assert config.data.chat and config.data.columns.prompt == "question"
    assert stage.optimizer.warmup_steps == 2  # 3% of 50 updates
    words = ("--", "--generate.temperature", "0.8")
    assert draft_of("openrlhf", OPENRLHF / "opd.sh", *words).fate_of(words[1][2:]) == "changed"
    script = tmp_path / "run.sh"
    script.write_text((OPENRLHF / "opd.sh").read_text().replace("topk 0", "topk 5"))
    assert refused("openrlhf", script) == {"opd.topk"}


@pytest.mark.parametrize("program", ["train_es_ray", "train_prm"])
def test_a_program_without_a_counterpart_is_named(tmp_path, program):
    script = tmp_path / "run.sh"
    script.write_text(f"uv run python -m openrlhf.cli.{program} --pretrain a/b\n")
    assert f"{program}: Duet has no counterpart" in said_of("openrlhf", script)


def test_sft_on_two_datasets():
    config = config_of("openrlhf", OPENRLHF / "sft.sh")
    assert [data.weight for data in config.data] == [0.7, 0.3]
    assert config.data[0].prompt_template == "User: {question}\nAssistant: "
    assert config.data[0].columns.completion == "response"
    assert (config.model.adapter.rank, config.stages[0].algorithm.name) == (64, "sft")


@pytest.mark.parametrize(
    ("estimator", "name", "scale"),
    [
        ("gae", "ppo", None),
        ("reinforce", "reinforce_pp", None),
        ("rloo", "rloo", None),
        ("group_norm", "grpo", "group"),
        ("dr_grpo", "grpo", "none"),
    ],
)
def test_estimators(estimator, name, scale):
    words = ("--", "--algo.advantage.estimator", estimator)
    algorithm = config_of("openrlhf", OPENRLHF / "grpo.sh", *words).stages[0].algorithm
    assert algorithm.name == name
    assert scale is None or algorithm.scale == scale


@pytest.mark.parametrize(
    "flag",
    [
        "--algo.advantage.estimator flash_reinforce",
        "--algo.kl.estimator k1",
        "--train.max_epochs 2",
        "--train.async_enable",
        "--train.agent_func_path agent.py",
        "--reward.normalize_enable",
        "--reward.stop_properly_penalty_coef 0.5",
        "--actor.optim muon",
        "--train.batch_size 300",
        "--reward.remote_url http://127.0.0.1:5000/score",
        "--algo.advantage.is_correction_gating binary_kl",
        "--rollout.n_sample_per_prompt 4",
    ],
)
def test_what_changes_the_training_is_refused(tmp_path, flag):
    script = tmp_path / "run.sh"
    script.write_text((OPENRLHF / "grpo.sh").read_text().rstrip() + f" {flag}\n")
    assert flag.split()[0].removeprefix("--") in refused("openrlhf", script)


def test_the_default_penalty_of_rewards_is_refused_for_groups(tmp_path):
    script = tmp_path / "run.sh"
    text = (OPENRLHF / "grpo.sh").read_text()
    script.write_text(text.replace("   --algo.kl.use_loss\n", ""))
    assert "algo.kl.init_coef" in refused("openrlhf", script)
    assert draft_of("openrlhf", OPENRLHF / "grpo.sh").fate_of("algo.kl.init_coef") == "mapped"


@pytest.mark.parametrize(("flag", "trained"), [("", "last_turn"), ("--multiturn", "assistant")])
def test_only_conversations_of_several_turns_train_on_each_answer(tmp_path, flag, trained):
    script = tmp_path / "sft.sh"
    script.write_text(
        "deepspeed --module openrlhf.cli.train_sft --pretrain a/b --dataset c/d "
        f"--input_key messages --apply_chat_template {flag}\n"
    )
    draft = draft_of("openrlhf", script)
    assert draft.values["stages.0.algorithm.train_on"].value == trained


def test_secrets_of_the_command_line_do_not_reach_the_file(tmp_path):
    script = tmp_path / "sft.sh"
    script.write_text("deepspeed --module openrlhf.cli.train_sft --pretrain a/b --dataset c/d\n")
    for words in (["logger.wandb.key=s3cret"], ["--", "--logger.wandb.key", "s3cret"]):
        said = said_of("openrlhf", script, *words)
        assert "s3cret" not in said and "logger.wandb.key" in said


def test_the_text_none_is_no_value(tmp_path):
    script = tmp_path / "sft.sh"
    script.write_text(
        "deepspeed --module openrlhf.cli.train_sft --pretrain a/b --dataset c/d --use_wandb None\n"
    )
    assert "run.wandb" not in draft_of("openrlhf", script).values
