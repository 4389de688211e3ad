"""Lists keys of TRL, verl, Tunix and OpenRLHF, so that a message can say the key of Duet.

Sources: trl/trainer/grpo_config.py, verl/trainer/config, tunix/cli/base_config.yaml,
openrlhf/cli/train_ppo_ray.py.
"""

from rl.config.stage import OPTIMIZERS

_LEARNING_RATE = "stages.N.optimizer.learning_rate"
_CLIP_NORM = "stages.N.optimizer.clip_norm"
_PROMPTS = "stages.N.prompts_per_step"
_SAMPLES = "stages.N.samples_per_prompt"
_NEW_TOKENS = "stages.N.sampling.max_new_tokens"
_KL_COEF = "stages.N.algorithm.kl_coef"
_STEPS = "stages.N.steps"
_EPOCHS = "stages.N.epochs"

FOREIGN: dict[str, str] = {
    "lr": _LEARNING_RATE,
    "learning_rate": _LEARNING_RATE,
    "peak_value": _LEARNING_RATE,
    "actor_learning_rate": _LEARNING_RATE,
    "critic_learning_rate": "stages.N.critic.learning_rate",
    "lr_scheduler_type": "stages.N.optimizer.schedule",
    "lr_scheduler": "stages.N.optimizer.schedule",
    "warmup": "stages.N.optimizer.warmup_steps",
    "warmup_steps": "stages.N.optimizer.warmup_steps",
    "lr_warmup_steps": "stages.N.optimizer.warmup_steps",
    "warmup_ratio": "stages.N.optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "stages.N.optimizer.warmup_steps",
    "optim": "stages.N.optimizer.name",
    "optim_type": "stages.N.optimizer.name",
    "weight_decay": "stages.N.optimizer.weight_decay",
    "adam_beta1": "stages.N.optimizer.beta1",
    "adam_beta2": "stages.N.optimizer.beta2",
    "adam_epsilon": "stages.N.optimizer.eps",
    "max_grad_norm": _CLIP_NORM,
    "grad_clip": _CLIP_NORM,
    "max_norm": _CLIP_NORM,
    "batch_size": _PROMPTS,
    "train_batch_size": _PROMPTS,
    "rollout_batch_size": _PROMPTS,
    "generation_batch_size": _PROMPTS,
    "num_generations": _SAMPLES,
    "n_samples_per_prompt": _SAMPLES,
    "group_size": _SAMPLES,
    "n": _SAMPLES,
    "max_completion_length": _NEW_TOKENS,
    "max_response_length": _NEW_TOKENS,
    "total_generation_steps": _NEW_TOKENS,
    "generate_max_len": _NEW_TOKENS,
    "max_tokens": _NEW_TOKENS,
    "max_new_tokens": _NEW_TOKENS,
    "temperature": "stages.N.sampling.temperature",
    "repetition_penalty": "evaluation.repetition_penalty",
    "presence_penalty": "evaluation.presence_penalty",
    "frequency_penalty": "evaluation.frequency_penalty",
    "logit_bias": "evaluation.logit_bias",
    "sequence_bias": "evaluation.logit_bias",
    "min_tokens": "stages.N.sampling.min_tokens",
    "min_new_tokens": "stages.N.sampling.min_tokens",
    "bad_words": "stages.N.sampling.bad_words",
    "bad_words_ids": "stages.N.sampling.bad_words",
    "max_prompt_length": "max_length",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "max_model_len": "max_length",
    "max_len": "max_length",
    "beta": _KL_COEF,
    "kl_loss_coef": _KL_COEF,
    "init_kl_coef": _KL_COEF,
    "init_coef": _KL_COEF,
    "kl_loss_type": "stages.N.algorithm.kl",
    "estimator": "stages.N.algorithm.kl",
    "clip_ratio": "stages.N.algorithm.epsilon",
    "clip_ratio_low": "stages.N.algorithm.epsilon",
    "eps_clip": "stages.N.algorithm.epsilon",
    "cliprange": "stages.N.algorithm.epsilon",
    "clip_ratio_high": "stages.N.algorithm.epsilon_high",
    "clip_ratio_c": "stages.N.algorithm.dual_clip",
    "loss_type": "stages.N.algorithm.aggregation",
    "loss_agg_mode": "stages.N.algorithm.aggregation",
    "scale_rewards": "stages.N.algorithm.scale",
    "importance_sampling_level": "stages.N.algorithm.ratio",
    "entropy_coeff": "stages.N.algorithm.entropy_coef",
    "mask_truncated_completions": "stages.N.algorithm.mask_truncated",
    "top_entropy_quantile": "stages.N.algorithm.top_entropy",
    "ref_model_sync_steps": "stages.N.algorithm.reference_every",
    "ref_model_mixup_alpha": "stages.N.algorithm.reference_mix",
    "max_num_gen_batches": "stages.N.algorithm.dynamic_batches",
    "vllm_importance_sampling_correction": "stages.N.algorithm.correction",
    "rollout_is": "stages.N.algorithm.correction",
    "rollout_is_threshold": "stages.N.algorithm.correction_max",
    "adv_estimator": "stages.N.algorithm.name",
    "advantage_estimator": "stages.N.algorithm.name",
    "trainer": "stages.N.algorithm.name",
    "gamma": "stages.N.algorithm.gamma",
    "lambd": "stages.N.algorithm.lam",
    "gae_lambda": "stages.N.algorithm.lam",
    "steps": _STEPS,
    "max_steps": _STEPS,
    "num_batches": _STEPS,
    "total_training_steps": _STEPS,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "num_episodes": _EPOCHS,
    "steps_per_generation": "stages.N.updates_per_step",
    "output_dir": "run.dir",
    "save_path": "run.dir",
    "default_local_dir": "run.dir",
    "checkpoint_dir": "run.dir",
    "save_steps": "run.checkpoint_every",
    "save_freq": "run.checkpoint_every",
    "save_interval_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "max_actor_ckpt_to_keep": "run.keep_checkpoints",
    "max_to_keep": "run.keep_checkpoints",
    "logging_steps": "run.log_every",
    "project_name": "run.wandb.project",
    "experiment_name": "run.wandb.name",
    "eval_steps": "stages.N.held_out.every",
    "test_freq": "evaluation.every",
    "eval_every_n_steps": "stages.N.held_out.every",
    "eval_strategy": "stages.N.held_out.every",
    "evaluation_strategy": "stages.N.held_out.every",
    "eval_dataset": "stages.N.held_out.data",
    "metric_for_best_model": "stages.N.best.metric",
    "greater_is_better": "stages.N.best.mode",
    "load_best_model_at_end": "stages.N.best.take",
    "num_generations_eval": "evaluation.samples",
    "reward_funcs": "rewards.functions",
    "reward_functions": "rewards.functions",
    "reward_weights": "rewards.functions.N.weight",
    "custom_reward_function": "rewards.functions",
    "model_name": "model.source",
    "model_name_or_path": "model.source",
    "lora_r": "model.adapter.rank",
    "lora_rank": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_target_modules": "model.adapter.targets",
    "target_modules": "model.adapter.targets",
    "modules_to_save": "model.adapter.train",
    "use_rslora": "model.adapter.rank_stabilised",
    "use_dora": "model.adapter.dora",
    "pretrain": "model.source",
    "model_path": "model.source",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "train_files": "data.path",
    "prompt_data": "data.path",
    "prompt_key": "data.columns.prompt",
    "input_key": "data.columns.prompt",
    "system_prompt": "data.system",
    "gradient_checkpointing": "model.remat",
    "max_num_seqs": "generator.slots",
}
"""Last part of the other framework's key -> key of Duet. N: number of a stage, or of an entry of
another list."""

_OPTIMIZERS = [f"`{name}`" for name in OPTIMIZERS]
_NOTES: dict[str, str] = {
    "lr_scheduler_type lr_scheduler": "`constant` by default; `linear` or `cosine`, down to "
    "`final_fraction`",
    "warmup warmup_steps lr_warmup_steps": "updates",
    "warmup_ratio lr_warmup_steps_ratio": "updates, not a ratio: write ratio x `steps` x "
    "`updates_per_step`",
    "batch_size train_batch_size rollout_batch_size generation_batch_size": (
        "prompts, not completions: TRL counts completions, so divide its batch by `num_generations`"
    ),
    "num_generations n_samples_per_prompt group_size n": "the group",
    "repetition_penalty presence_penalty frequency_penalty logit_bias": (
        "not in stages: it changes ratios of probabilities, and the loss takes those of the "
        "policy itself"
    ),
    "sequence_bias": "of single tokens, and not in stages: it changes ratios of probabilities",
    "min_tokens min_new_tokens": "evaluations have their own",
    "bad_words bad_words_ids": "texts; evaluations have their own",
    "max_prompt_length max_seq_length max_seq_len max_model_len max_len": (
        "prompt and completion together: add `max_new_tokens` to the longest prompt"
    ),
    "beta kl_loss_coef init_kl_coef init_coef": (
        "weight of the KL term in the loss. For DPO write `stages.N.algorithm.beta`; for a KL "
        "term in the rewards `kl_reward_coef`"
    ),
    "kl_loss_type estimator": "`k3` is `low_var_kl` of verl; `k2` is `mse`; `k1` is only logged",
    "clip_ratio_high": "null: equal to `epsilon`",
    "loss_type loss_agg_mode": (
        "TRL: `grpo` is `sequence`, `dapo` is `token`, `dr_grpo` is `constant`. verl: "
        "`token-mean` is `token`, `seq-mean-token-sum` is `sequence_sum`, `seq-mean-token-mean` "
        "is `sequence`. For DPO and KTO write `stages.N.algorithm.loss_type`"
    ),
    "scale_rewards": "`group`, `batch` or `none`; verl: `norm_adv_by_std_in_grpo: false` is `none`",
    "vllm_importance_sampling_correction rollout_is": (
        "not needed for rollouts of the same weights: generator and trainer are one decoder"
    ),
    "adv_estimator advantage_estimator trainer": "`gae` is `ppo`, `reinforce_plus_plus` is "
    "`reinforce_pp`",
    "epochs num_epochs num_train_epochs total_epochs num_episodes": "in place of `stages.N.steps`",
    "eval_steps eval_every_n_steps": "for the loss; `evaluation.every` for the accuracy of "
    "completions",
    "eval_strategy evaluation_strategy": "a number of steps; 0: before the first and after the "
    "last one",
    "metric_for_best_model": "`held_out/loss` is `eval_loss`",
    "greater_is_better": "`max` is true, `min` is false",
    "load_best_model_at_end": "`best` (default) is true, `last` is false; it needs `metric` and "
    "`mode`",
    "eval_dataset": "for the loss; `evaluation.data` for the accuracy of completions",
    "steps_per_generation": "TRL: `steps_per_generation / gradient_accumulation_steps`",
    "reward_funcs reward_functions custom_reward_function": "`file.py:function`",
    "optim optim_type": f"{', '.join(_OPTIMIZERS[:-1])} or {_OPTIMIZERS[-1]}",
    "bf16 torch_dtype": "`bfloat16` or `float32` (default)",
    "dataset dataset_name train_files prompt_data": "a file, a folder, or a dataset on the hub",
    "lora_target_modules target_modules": "`all-linear`, or a list of regular expressions",
    "lora_r lora_rank": "of routed experts divided by the experts that a token chooses",
    "gradient_checkpointing": "`none`, `full`, and policies between them",
}
NOTES = {word: note for words, note in _NOTES.items() for word in words.split()}
"""Last part of the other framework's key -> how its value becomes that of the key of Duet: the last
column of the table in docs/from_other_frameworks.md."""

ABSENT: dict[str, str] = {
    **dict.fromkeys(
        (
            *(
                "use_vllm",
                "vllm_config",
                "vllm_mode",
                "vllm_gpu_memory_utilization",
                "gpu_memory_utilization",
            ),
            *("rollout_engine", "enforce_eager", "vllm_num_engines", "vllm_tensor_parallel_size"),
        ),
        "Duet trains and generates with one decoder, without vLLM: leave this out; `generator` "
        "has its options",
    ),
    "tensor_model_parallel_size": "training and rollouts share one mesh: leave this out, and see "
    "`mesh.tensor`",
    **dict.fromkeys(
        ("num_iterations", "ppo_epochs"),
        "each completion is used once: leave this out; `stages.N.updates_per_step` splits the "
        "completions of a step",
    ),
    "max_epochs": "for SFT, DPO, KTO and reward models write `stages.N.epochs`; a completion is "
    "used once: `stages.N.updates_per_step` splits the completions of a step",
    **dict.fromkeys(
        (
            *(
                "per_device_train_batch_size",
                "ppo_micro_batch_size_per_gpu",
                "micro_train_batch_size",
            ),
            *("micro_batch_size", "train_micro_batch_size", "gradient_accumulation_steps"),
        ),
        "leave this out: `stages.N.prompts_per_step` sets the batch, and `stages.N.micro_batch` "
        "changes speed and memory only",
    ),
    "peft_config": "write `model.adapter`, such as {rank: 32, alpha: 32}",
    "lora_dropout": "adapters have no dropout: leave this out",
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        "write `model.base_weights: nf4` (or int8, int4, fp8), with `model.adapter`",
    ),
    "resume_from_checkpoint": "leave this out: `rl-train RUN` continues a run",
    "report_to": "write `run.tensorboard`, `run.wandb`, `run.mlflow` or `run.trackio`",
    "ppo_mini_batch_size": "write `stages.N.updates_per_step`: prompts_per_step divided by this "
    "number",
}
"""Last part of the other framework's key -> why Duet has no such key, and what to do."""
