"""`rl import trl`, held against the dataclasses of the installed TRL."""

import dataclasses
from pathlib import Path

import pytest
import trl
from importing import config_of, draft_of, refused, said_of

from rl.commands import cli
from rl.imports import trl as importer
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, GivenValue
from rl.imports.rules import UNSET, Copy, Joint, rule_of
from rl.imports.tables.trl import TABLES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports" / "trl"
CONFIGS = {
    "sft": trl.SFTConfig,
    "dpo": trl.DPOConfig,
    "kto": trl.KTOConfig,
    "reward": trl.RewardConfig,
    "grpo": trl.GRPOConfig,
    "rloo": trl.RLOOConfig,
    "distillation": trl.DistillationConfig,
}
VALUES = {"label_smoothing": 0.1, "delta": 2.0, "loss_weights": [1.0], "lora_target_modules": ["q"]}
SWITCHES = {  # a field -> what has to be on before it counts
    "lora_": {"use_peft": True},
    "use_rslora": {"use_peft": True},
    "use_dora": {"use_peft": True},
    "vllm_importance": {"use_vllm": True},
    "use_bias_correction_kl": {"beta": 0.1},
    "sync_ref_model": {"beta": 0.1},
    "ref_model": {"sync_ref_model": True, "beta": 0.1},
    "entropy_": {"use_adaptive_entropy": True},
    "eval_steps": {"eval_strategy": "steps", "dataset_name": "a/b"},
    "dataset_test_split": {"eval_strategy": "steps", "dataset_name": "a/b"},
    "greater_is_better": {"load_best_model_at_end": True},
    "run_name": {"report_to": ["wandb"]},
}


def default_of(field: dataclasses.Field) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def other_value(field: dataclasses.Field) -> object:
    """Another value of a field than its default, of its type."""
    default, kind = default_of(field), str(field.type)
    if field.name in VALUES:
        return VALUES[field.name]
    if isinstance(default, bool) or (default is None and "bool" in kind):
        return not default
    if isinstance(default, int | float):
        return default + 1 if isinstance(default, int) else default / 2 or 0.5
    if isinstance(default, list) or "list" in kind:
        return ["other"]
    if default is None and "dict" in kind:
        return {"a": 1}
    return 4 if default is None and "int" in kind else "other"


def fields(trainer: str) -> list[dataclasses.Field]:
    sources = (CONFIGS[trainer], trl.ModelConfig, trl.ScriptArguments)
    return [field for source in sources for field in dataclasses.fields(source)]


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_field_has_a_rule_with_the_default_of_trl(trainer):
    for field in fields(trainer):
        rule = rule_of(TABLES[trainer], field.name)
        assert rule is not None, field.name
        if isinstance(rule, Copy | Joint) and rule.default is not UNSET:
            assert rule.default == default_of(field), field.name


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_field_that_differs_from_its_default_has_a_fate(trainer):
    without_target = set()
    for field in fields(trainer):
        switches = [more for name, more in SWITCHES.items() if field.name.startswith(name)]
        words = (switches[0] if switches else {}) | {field.name: other_value(field)}
        given = Given(
            {key: GivenValue(value, "run.yaml:1") for key, value in words.items()}, trainer
        )
        draft = Draft(importer.NAME, given, importer.table_of(given, Facts()))
        importer.convert(draft)
        matches = [entry for entry in draft.entries if field.name in entry.keys]
        assert matches, field.name
        if draft.fate_of(field.name) == "mapped" and not any(entry.target for entry in matches):
            without_target.add(field.name)
    # What changes nothing by itself: alone, these name no model, dataset or number of steps.
    alone = {"model_revision", "max_steps", "use_peft", "greater_is_better", "loss_weights"}
    alone |= {"vllm_importance_sampling_correction"}
    assert without_target <= alone


def test_sft():
    config = config_of("trl", FIXTURES / "sft.sh")
    stage = config.stages[0]
    assert (config.model.source, config.data.path) == ("Qwen/Qwen2-0.5B", "trl-lib/Capybara")
    assert (config.run.dir, config.max_length, config.data.too_long) == (
        "Qwen2-0.5B-SFT",
        1024,
        "truncate",
    )
    assert (stage.algorithm.name, stage.prompts_per_step, stage.epochs) == ("sft", 16, 1)
    assert (stage.optimizer.learning_rate, stage.optimizer.schedule) == (2e-5, "linear")
    assert (stage.held_out.every, stage.held_out.data.split) == (100, "test")
    assert stage.sampling.stop == ["<|im_end|>"]
    draft = draft_of("trl", FIXTURES / "sft.sh")
    assert draft.fate_of("packing") == "changed" and not draft.refused


def test_sft_on_what_the_assistant_says(tmp_path):
    (tmp_path / "sft.yaml").write_text("assistant_only_loss: true\nloss_type: dft\n")
    algorithm = config_of("trl", tmp_path / "sft.yaml").stages[0].algorithm
    assert (algorithm.name, algorithm.train_on, algorithm.loss_type) == ("sft", "assistant", "dft")


def test_dpo_with_an_adapter():
    config = config_of("trl", FIXTURES / "dpo_lora.sh")
    stage = config.stages[0]
    assert stage.prompts_per_step == 2 * 8 * 4  # accelerate starts four processes
    assert (stage.steps, stage.epochs) == (1000, None)
    assert (stage.algorithm.name, stage.algorithm.beta, stage.algorithm.loss_type) == (
        "dpo",
        0.1,
        "sigmoid",
    )
    adapter = config.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets) == (32, 16, ["q_proj", "v_proj"])
    assert config.model.dtype == "bfloat16" and config.model.param_dtype == "float32"


def test_dpo_with_a_second_loss(tmp_path):
    file = tmp_path / "dpo.yaml"
    file.write_text("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.3]\nbeta: 0.05\n")
    algorithm = config_of("trl", file).stages[0].algorithm
    assert (algorithm.loss_type, algorithm.nll_coef, algorithm.beta) == ("sigmoid", 0.3, 0.05)
    file.write_text("loss_type: [sigmoid, bco_pair]\n")
    assert "loss_type" in refused("trl", file)


def test_kto_in_four_bits_with_a_warm_up_as_a_share():
    config = config_of("trl", FIXTURES / "kto_qlora.sh", "--rows", "1000", "--processes", "2")
    stage = config.stages[0]
    assert (config.model.base_weights, config.model.adapter.targets) == ("nf4", "all-linear")
    assert stage.prompts_per_step == 16
    assert stage.optimizer.warmup_steps == 7  # a tenth of ceil(1000 / 16) updates, rounded up
    assert "--rows" in said_of("trl", FIXTURES / "kto_qlora.sh")


def test_grpo():
    config = config_of("trl", FIXTURES / "grpo.yaml")
    stage = config.stages[0]
    # 8 per device x 8 steps per generation = 64 completions, in groups of 16; 8 / 2 updates
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_step) == (4, 16, 4)
    assert (stage.steps, config.run.checkpoint_every) == (200, 25)
    algorithm = stage.algorithm
    assert (algorithm.aggregation, algorithm.scale, algorithm.kl) == (
        "constant",
        "batch",
        "unbiased",
    )
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.kl_coef) == (0.2, 0.28, 0.04)
    assert (algorithm.correction, algorithm.correction_max) == ("token_truncate", 2.0)
    assert (algorithm.reference_every, algorithm.reference_mix) == (16, 0.9)
    assert algorithm.mask_truncated is True
    assert config.max_length == 512 + 1536 and stage.sampling.max_new_tokens == 1536
    optimizer = stage.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.beta2) == ("constant", 20, 0.99)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.01, 0.2)
    rewards = [(each.name, each.weight) for each in config.rewards.functions]
    assert rewards == [("math", 1.0), ("my_rewards.short:is_short", 0.1)]
    assert config.run.tensorboard and config.run.wandb.name == "deepmath"


def test_gspo_of_a_command_line_over_a_file():
    stage = config_of("trl", FIXTURES / "gspo.sh").stages[0]
    assert (stage.prompts_per_step, stage.updates_per_step) == (1 * 32 * 8 // 8, 4)
    assert (stage.algorithm.ratio, stage.algorithm.aggregation) == ("sequence", "sequence")
    assert stage.optimizer.learning_rate == 5e-7  # the command line goes first


def test_distillation():
    config = config_of("trl", FIXTURES / "distillation.sh")
    algorithm = config.stages[0].algorithm
    assert (algorithm.name, algorithm.divergence) == ("gkd", "reverse")
    assert config.teacher.source == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.stages[0].samples_per_prompt == 1


@pytest.mark.parametrize(
    ("loss", "name", "aggregation"),
    [
        ("grpo", "grpo", "sequence"),
        ("dapo", "grpo", "token"),
        ("bnpo", "grpo", "token"),
        ("dr_grpo", "grpo", "constant"),
        ("cispo", "cispo", "token"),
        ("sapo", "sapo", "sequence"),
        ("vespo", "vespo", "token"),
        ("luspo", "luspo", "sequence_sum"),
    ],
)
def test_losses_of_grpo(tmp_path, loss, name, aggregation):
    file = tmp_path / "run.yaml"
    file.write_text(f"loss_type: {loss}\nepsilon_high: 5.0\n")
    algorithm = config_of("trl", file, "--trainer", "grpo").stages[0].algorithm
    assert (algorithm.name, algorithm.aggregation) == (name, aggregation)
    if loss == "cispo":  # TRL names the bound of the ratio, Duet its distance from 1
        assert (algorithm.epsilon, algorithm.epsilon_high) == (1.0, 4.0)


@pytest.mark.parametrize(
    "line",
    [
        "num_iterations: 2",
        "repetition_penalty: 1.1",
        "neftune_noise_alpha: 5",
        "optim: adagrad",
        "lr_scheduler_type: polynomial",
        "per_device_train_batch_size: 3",  # 3 completions are no groups of 8
        "lerning_rate: 1",
        "beta: high",
        "generation_kwargs: {num_beams: 4}",
        "importance_sampling_level: word",
    ],
)
def test_what_changes_the_training_is_refused(tmp_path, line):
    file = tmp_path / "grpo.yaml"
    file.write_text(f"num_generations: 8\n{line}\n")
    assert line.partition(":")[0] in refused("trl", file)


def test_a_misspelt_key_leads_to_the_nearest(tmp_path):
    (tmp_path / "grpo.yaml").write_text("num_generations: 8\nlerning_rate: 1.0\n")
    assert "nearest: learning_rate" in said_of("trl", tmp_path / "grpo.yaml")


def test_secrets_reach_neither_file_nor_report(tmp_path):
    file = tmp_path / "grpo.sh"
    file.write_text(
        "trl grpo --num_generations 8 --hub_token hf_abc --model_name_or_path $MY_TOKEN\n"
    )
    said = said_of("trl", file, environment={"MY_TOKEN": "s3cret"})
    assert "hf_abc" not in said and "s3cret" not in said and "$MY_TOKEN may be a secret" in said


def test_an_evaluation_by_its_older_name_and_the_best_checkpoint(tmp_path):
    file = tmp_path / "sft.yaml"
    lines = "evaluation_strategy: steps\neval_steps: 50\nload_best_model_at_end: true\n"
    file.write_text(f"model_name_or_path: a/b\ndataset_name: c/d\nmax_steps: 100\n{lines}")
    stage = config_of("trl", file, "--trainer", "sft").stages[0]
    assert (stage.held_out.every, stage.best.metric) == (50, "held_out/loss")
    file.write_text(file.read_text().replace("strategy: steps", 'strategy: "no"'))
    draft = draft_of("trl", file)
    assert draft.fate_of("load_best_model_at_end") == "left"


def test_an_evaluation_is_as_often_as_a_log_line_without_a_number_of_its_own(tmp_path):
    file = tmp_path / "sft.yaml"
    lines = "model_name_or_path: a/b\ndataset_name: c/d\nmax_steps: 100\neval_strategy: steps\n"
    file.write_text(lines)
    assert config_of("trl", file, "--trainer", "sft").stages[0].held_out.every == 10
    file.write_text(f"{lines}logging_steps: 25\n")
    config = config_of("trl", file, "--trainer", "sft")
    assert (config.stages[0].held_out.every, config.run.log_every) == (25, 25)


def test_a_sampled_stage_has_no_best_loss(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: a/b\ndataset_name: c/d\nmax_steps: 9\neval_strategy: steps\n"
        "eval_steps: 3\nload_best_model_at_end: true\n"
    )
    config = config_of("trl", file, "--trainer", "grpo")
    assert config.stages[0].best is None and config.evaluation.every == 3
    draft = draft_of("trl", file, facts=Facts(trainer="grpo"))
    assert draft.fate_of("load_best_model_at_end") == "left"


@pytest.mark.parametrize("value", ["null", "many"])
def test_cispo_needs_its_bound(tmp_path, value):
    file = tmp_path / "grpo.yaml"
    file.write_text(f"model_name_or_path: a/b\nloss_type: cispo\nepsilon: {value}\n")
    assert "epsilon" in refused("trl", file)


def test_keys_after_an_option_belong_to_the_files(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: a/b\n")
    out = tmp_path / "run.yml"
    words = ["import", "trl", str(file), "-o", str(out), "learning_rate=2e-6", "max_steps=3"]
    assert cli.main(words) == 0
    assert "learning_rate: 2.0e-06" in out.read_text() and "steps: 3" in out.read_text()


def test_heads_of_further_tokens_are_refused_in_one_line(tmp_path):
    file = tmp_path / "mtp.yaml"
    text = "model_name_or_path: a/b\ndataset_name: c/d\nmtp_enabled: true\nmtp_num_layers: 2\n"
    file.write_text(text + "train_split: train\nmax_train_samples: 9\n")
    assert refused("trl", file) == {"mtp_enabled"}
    data = config_of("trl", file, "mtp_enabled=false").data
    assert (data.split, data.limit) == ("train", 9)


@pytest.mark.parametrize(
    "command", ["uv run scripts/ppo/ppo_tldr.py", "trl nash_md", "python dpo_online.py"]
)
def test_a_trainer_that_is_not_imported_is_named(tmp_path, command):
    """Its keys would be read as those of SFT."""
    script = tmp_path / "run.sh"
    script.write_text(f"{command} --model_name_or_path a/b\n")
    assert "this trainer of TRL is not imported" in said_of("trl", script)


def test_a_server_of_vllm_is_no_training(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "CUDA_VISIBLE_DEVICES=4 trl vllm-serve --model a/b &\n"
        'srun --nodes=4 bash -c "\n  accelerate launch --num_processes 32 \\\n'
        "    grpo_math.py --model_name_or_path a/b --reward_funcs r.f --num_generations 8 \\\n"
        '    --max_steps 5 2>&1 | tee log\n" &\nwait\n'
    )
    config = config_of("trl", script)
    assert config.stages[0].algorithm.name == "grpo"
    assert config.stages[0].prompts_per_step == 32  # 8 a device x 32 processes / 8 completions
    draft = draft_of("trl", script)
    assert draft.place("max_steps") == "run.sh:3"  # lines that are joined count as one
