"""The keys of Tunix 0.1.7 (base_config.yaml, base_agentic_config.yaml and its examples), and what
becomes of each."""

from __future__ import annotations

from rl.imports.rules import CHECKPOINTS, LOGS, OFF, SPEED, Copy, Joint, Leave, Refuse, Rule

_ENGINE = Leave("Duet trains and generates with one decoder: `generator` has its options")
_DEVICES = Leave("`mesh` says how arrays are spread over devices")
_LOADER = Leave("Duet reads rows itself")
_STORE = Leave("models of the Hugging Face hub are kept in its cache")
_ROLES = Leave("policy, reference and rollouts share one decoder")
_AGENT = Refuse("this import writes no environment; write one of Duet", OFF)

_OPTIMIZER: dict[str, Rule] = {
    "opt_type": Joint("adamw"),
    "learning_rate": Joint(1e-5),
    "schedule_type": Joint("warmup_cosine_decay_schedule"),
    "value": Joint(1e-5),
    "peak_value": Joint(3e-5),
    "init_value": Joint(0.0),
    "end_value": Joint(0.0),
    "alpha": Joint(0.0),
    "warmup_ratio": Joint(0.1),
    "warmup_steps": Joint(),
    "decay_steps": Joint(),
    "transition_steps": Joint(),
    "b1": Joint(0.9),
    "b2": Joint(0.99),
    "eps": Joint(),
    "momentum": Joint(),
    "weight_decay": Joint(0.1),
    "max_grad_norm": Joint(0.1),
}
_TRAINING: dict[str, Rule] = {
    "max_steps": Joint(),
    "eval_every_n_steps": Joint(2),
    "gradient_accumulation_steps": Joint(1),
    "mini_batch_size": Joint(),
    "train_micro_batch_size": Leave("`stages.N.micro_batch` changes speed and memory only"),
    "rollout_micro_batch_size": SPEED,
    "compute_logps_micro_batch_size": SPEED,
    "compute_logps_chunk_size": SPEED,
    "max_seq_token_per_tpu": SPEED,
    "checkpoint_root_directory": Copy("run.dir"),
    "checkpointing_options.save_interval_steps": Copy(default=180),
    "checkpointing_options.max_to_keep": Copy(default=1),
    "checkpointing_options": CHECKPOINTS,
    "checkpointing_options.*": CHECKPOINTS,
    "metrics_logging_options.project_name": LOGS,
    "metrics_logging_options.*": LOGS,
    "metrics_logging_options": LOGS,
    "metrics_prefix": LOGS,
    "pbar_description": LOGS,
    "perf_metrics_options": LOGS,
    "perf_metrics_options.*": LOGS,
    "profiler_options": LOGS,
    "profiler_options.*": LOGS,
    "data_sharding_axis": _DEVICES,
    "max_inflight_computations": SPEED,
}
_MODEL: dict[str, Rule] = {
    "model_name": Joint(),
    "model_id": Joint(),
    "model_source": Joint("huggingface"),
    "model_path": Joint(),
    "model_download_path": _STORE,
    "intermediate_ckpt_dir": _STORE,
    "model_display": LOGS,
    "rng_seed": Joint(0),
    "use_flash_attention": SPEED,
    "flash_attention_block_size": SPEED,
    "use_sliding_window_kv_cache": SPEED,
    "remat_config": Leave("`model.remat: auto` chooses what is recomputed"),
    "dtype": Joint(),
    "load_dtype": Joint(),
    "param_dtype": Joint(),
    "lora_config": Joint(),
    "lora_config.rank": Joint(),
    "lora_config.alpha": Joint(),
    "lora_config.module_path": Joint(),
    "lora_config.weight_qtype": Joint(),
    "lora_config.tile_size": Joint(),
    "mesh": Joint(),
    "mesh.shape": Joint(),
    "mesh.axis_names": Joint(),
    "mesh.*": _DEVICES,
    "same_mesh_as": _DEVICES,
    "kwargs": Refuse("write the keys of `model`", (None, {})),
    "kwargs.*": Refuse("write the keys of `model`", OFF),
}
_GRPO: dict[str, Rule] = {
    "num_generations": Joint(2),
    "num_iterations": Refuse(neutral=(1, None)),
    "beta": Joint(0.08),
    "kl_loss_mode": Joint("kl"),
    "epsilon": Joint(0.2),
    "epsilon_high": Joint(),
    "loss_algo": Joint("grpo"),
    "loss_agg_mode": Joint("sequence-mean-token-mean"),
    "advantage_estimator": Joint("grpo"),
    "policy_loss_fn": Refuse("Duet has the loss of GRPO", ("grpo", None)),
    "algo_variant": Leave("the other keys say the algorithm"),
    "reward_manager": Refuse("write a reward of Duet", ("sequence-level", None)),
    "system_prompt": Joint(),
    "max_concurrency": _ENGINE,
    "max_response_length": Leave("`rollout_config.total_generation_steps` sets it"),
    "off_policy_steps": Refuse("Duet samples and updates in turn", (0, None)),
    "degenerate_group_masking": Refuse(
        "groups of equal rewards have advantage 0 and count in means; see dynamic_batches", OFF
    ),
    "force_compute_kl": LOGS,
    "use_rollout_logps": Joint(),
    "sampler_is": Joint(),
    "sampler_is_threshold": Joint(2.0),
    "episode_timeout": _ENGINE,
}
_PPO: dict[str, Rule] = {
    "num_iterations": Refuse(neutral=(1, None)),
    "mini_batch_size": Joint(),
    "gamma": Joint(1.0),
    "gae_lambda": Joint(0.95),
    "beta": Joint(0.08),
    "epsilon": Joint(0.2),
    "epsilon_low": Joint(),
    "epsilon_high": Joint(),
    "epsilon_c": Joint(),
    "entropy_coef": Copy("stages.N.algorithm.entropy_coef"),
    "clip_range_value": Joint(0.2),
    "kl_method": Joint("low_var_kl"),
    "advantage_estimator": Refuse("Duet has gae", ("gae", None)),
    "policy_loss_fn": Refuse("Duet has the loss of PPO", ("ppo", None)),
    "value_loss_fn": Refuse("Duet has the loss of PPO", ("ppo", None)),
    "algo_variant": Leave("the other keys say the algorithm"),
    "reward_manager": Refuse("write a reward of Duet", ("sequence-level", None)),
    "max_concurrency": _ENGINE,
    "system_prompt": Joint(),
    "off_policy_steps": Refuse("Duet samples and updates in turn", (0, None)),
}


def _under(prefix: str, table: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{prefix}.{key}": rule for key, rule in table.items()}


TABLE: dict[str, Rule] = {
    **_under("model_config", _MODEL),
    **_under("actor_model_config", _MODEL),
    **{
        f"{role}_model_config{rest}": _ROLES
        for role in ("reference", "rollout", "critic")
        for rest in ("", ".*")
    },
    "reward_model_config": Refuse("name the model in the reward `reward_model`", OFF),
    "reward_model_config.*": Refuse("name the model in the reward `reward_model`", OFF),
    "tokenizer_config.tokenizer_path": Joint(),
    "tokenizer_config.tokenizer_type": Joint("huggingface"),
    "tokenizer_config.*": Leave(
        "the tokenizer and its chat template say which tokens begin a text"
    ),
    "data_source": _LOADER,
    "data_directory": Joint(),
    "data_module": Joint(),
    "data_config": _LOADER,
    "data_config.train_data_path": Joint(),
    "data_config.eval_data_path": Joint(),
    "data_config.*": _LOADER,
    "apply_chat_template_to_dataset": Joint(True),
    "dataset_name": Joint(),
    "prompt_key": Joint(),
    "batch_size": Joint(16),
    "max_target_length": Joint(256),
    "num_train_epochs": Joint(1),
    "train_fraction": Joint(1.0),
    "num_batches": Joint(0),
    "num_test_batches": Joint(100),
    "tfds_download": _LOADER,
    "seed": Joint(),
    "warmup_ratio": Leave("`optimizer_config.warmup_ratio` counts"),
    **_under("optimizer_config", _OPTIMIZER),
    **_under("training_config", _TRAINING),
    **_under("rl_training_config", _TRAINING),
    **_under("rl_training_config.actor_optimizer_config", _OPTIMIZER),
    "rl_training_config.critic_optimizer_config": _ROLES,
    **_under("rl_training_config.critic_optimizer_config", _OPTIMIZER),
    **_under("grpo_config", _GRPO),
    **_under("agentic_grpo_config", _GRPO),
    **{
        f"agentic_{name}_config.max_turns": Refuse(
            "a turn of an environment: this import writes none", (1, None)
        )
        for name in ("grpo", "ppo")
    },
    **_under("ppo_config", _PPO),
    **_under("agentic_ppo_config", _PPO),
    **{
        f"agentic_config{rest}": Refuse("Tunix 0.1.7 calls this section agentic_grpo_config")
        for rest in ("", ".*")
    },
    "agentic_grpo_config": Joint(),
    "agentic_ppo_config": Joint(),
    "training_mode": Joint(),
    "rollout_config.total_generation_steps": Joint(768),
    "rollout_config.max_prompt_length": Joint(256),
    "rollout_config.temperature": Copy(default=0.9),
    "rollout_config.top_p": Copy("stages.N.sampling.top_p", 1.0),
    "rollout_config.top_k": Joint(50),
    "rollout_config.eos_tokens": Copy("stages.N.sampling.stop_token_ids"),
    "rollout_config.*": _ENGINE,
    "rollout_engine": _ENGINE,
    "vllm_config": _ENGINE,
    "vllm_config.*": _ENGINE,
    "sglang_jax_config": _ENGINE,
    "sglang_jax_config.*": _ENGINE,
    "offload_to_cpu": SPEED,
    "split_mesh_config.*": _DEVICES,
    "chat_parser_config.*": Leave("the chat template of the tokenizer says it"),
    "agent_class_path": _AGENT,
    "agent_kwargs": Leave("of agent_class_path"),
    "agent_kwargs.*": Leave("of agent_class_path"),
    "env_class_path": _AGENT,
    "env_kwargs": Leave("of env_class_path"),
    "env_kwargs.*": Leave("of env_class_path"),
    "kubernetes_config": _DEVICES,
    "kubernetes_config.*": _DEVICES,
    "verl_compatible": Joint(False),
    "reward_functions": Joint(),
    "_parent_": Leave("base_config.yaml has the defaults that are written"),
}
"""The defaults are those of base_config.yaml."""
