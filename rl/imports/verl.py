"""Configurations of verl: the overrides of Hydra in its scripts, and its YAML files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from policy.json_types import JsonObject, JsonValue, as_object
from rl.imports import shared
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, Syntax
from rl.imports.rules import Table
from rl.imports.shared import ALGORITHM, OPTIMIZER, SAMPLING, STAGE
from rl.imports.tables.verl import RL, SFT

NAME = "verl 0.9"
SYNTAX = Syntax(
    framework="verl",
    program=re.compile(
        r"(?:^|[./])((?:fsdp_)?sft_trainer\w*|main_(?:ppo|dapo|grpo|gspo|entropy|spin|prime)\w*)"
        r"(?:\.py)?$"
    ),
    form="dotted",
)
VERL_REWARD = "rewards.foreign.verl:compute_score"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_SHIPPED = re.compile(
    r"(?:_generated_)?(?:ppo|sft|dapo)\w*_trainer\w*|ppo_trainer|sft_trainer_engine|sft_trainer"
)
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
    "remax": "remax",
    "opo": "opo",
}
_AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_NUMBER = r"\d*\.?\d+(?:e[+-]?\d+)?"
_STRAIGHT_THROUGH = "the value is that of {}, the gradient that of k2"
_REJECTIONS = {
    f"{level}_{kind}": f"{ours}_{kind}"
    for level, ours in (
        ("token", "token"),
        ("seq_sum", "sequence_sum"),
        ("seq_mean", "sequence_mean"),
        ("seq_max", "sequence_max"),
    )
    for kind in ("k2", "k3")
}


def table_of(given: Given, facts: Facts) -> Table:
    """Returns the rules of the trainer that the words are for."""
    return SFT if is_sft(given) else RL


def convert(draft: Draft) -> None:
    """Gives each word of a configuration of verl its fate."""
    if is_sft(draft.given):
        _sft(draft)
    else:
        _reinforce(draft)
    draft.rest()


def is_sft(given: Given) -> bool:
    """Tells whether the words are for verl's trainer of SFT."""
    if given.program:
        return "sft" in given.program
    sections = {key.partition(".")[0] for key in given.words}
    return "actor_rollout_ref" not in sections and bool(sections & {"optim", "model", "engine"})


def _reinforce(draft: Draft) -> None:
    _configuration_name(draft)
    _model(draft, "actor_rollout_ref.model")
    updates = _batches(draft)
    shared.put_steps(draft, "trainer.total_training_steps", "trainer.total_epochs")
    _run(draft)
    _optimizer(draft, f"{_ACTOR}.optim", f"{_ACTOR}.grad_clip", OPTIMIZER, updates)
    _sampling(draft)
    _data(draft, "data.train_files", "data.val_files")
    _algorithm(draft, updates)
    _rewards(draft)
    _evaluation(draft)


def _configuration_name(draft: Draft) -> None:
    """A configuration of Hydra that is not one of verl has values that are not read here."""
    for key in ("config_name", "config_path"):
        name = draft.text(key).removesuffix(".yaml")
        if key == "config_name" and name and not _SHIPPED.fullmatch(name):
            why = f"the values of {name}.yaml are not read; name this file before the script"
            draft.refuse(key, why=why)
        draft.same(key, note="its values are the defaults of verl")


def _model(draft: Draft, section: str) -> None:
    key = f"{section}.path"
    if draft.has(f"{section}.partial_pretrain"):
        key = f"{section}.partial_pretrain"
    draft.put("model.source", draft.text(key), key)
    if tokenizer := draft.text(f"{section}.tokenizer_path") or draft.text("data.tokenizer"):
        draft.put("tokenizer.source", tokenizer, f"{section}.tokenizer_path", "data.tokenizer")
    note = "weights are float32, products bfloat16"
    draft.put("model.dtype", "bfloat16", note=note)
    keys = [f"{section}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")]
    rank = keys[0]
    if not draft.has(rank) and draft.has("lora_rank"):
        keys[0] = "lora_rank"
    if not draft.integer(keys[0]) and draft.integer(f"{section}.lora.rank"):
        keys = [f"{section}.lora.{name}" for name in ("rank", "alpha", "target_modules")]
        if draft.has(keys[2]):
            draft.change(keys[2], note="names of modules of Megatron; all-linear is written")
        keys[2] = ""
    if shared.put_adapter(draft, *keys):
        if exclude := draft.texts(f"{section}.exclude_modules"):
            draft.put("model.adapter.exclude", exclude, f"{section}.exclude_modules")
        for name in ("lora_adapter_path", "lora.adapter_path"):
            if source := draft.text(f"{section}.{name}"):
                draft.put("model.adapter.source", source, f"{section}.{name}")
    lora = [f"{section}.lora.{name}" for name in ("rank", "alpha", "target_modules")]
    draft.same(*lora, note="no adapter of Megatron")
    _prediction(draft, section)


def _prediction(draft: Draft, section: str) -> None:
    trains = draft.truth(f"{section}.mtp.enable_train")
    keys = [
        f"{section}.mtp.{name}"
        for name in ("enable_train", "enable", "mtp_loss_scaling_factor", "detach_encoder")
    ]
    if not trains:
        draft.same(*keys, note="prediction modules are not trained")
        return
    draft.put("model.multi_token_prediction", {}, *keys[:2])
    draft.put(f"{STAGE}.mtp.coef", draft.number(keys[2]), keys[2])
    draft.put(f"{STAGE}.mtp.detach", draft.truth(keys[3]), keys[3])


def _batches(draft: Draft) -> int:
    """Writes prompts_per_step and updates_per_step. Returns the updates of a step."""
    batch = "data.train_batch_size"
    mini = f"{_ACTOR}.ppo_mini_batch_size"
    prompts = draft.integer(batch) or 1024
    part = draft.integer(mini) or 256
    samples = draft.integer(f"{_ROLLOUT}.n") or 1
    draft.put(f"{STAGE}.prompts_per_step", prompts, batch)
    draft.put(f"{STAGE}.samples_per_prompt", samples, f"{_ROLLOUT}.n")
    updates = shared.exact_quotient(prompts, part)
    if updates is None:
        draft.refuse(mini, batch, why=f"{prompts} prompts are no multiple of {part}")
        updates = 1
    note = f"{prompts} prompts in mini-batches of {part}"
    draft.put(f"{STAGE}.updates_per_step", updates, batch, mini, note=note)
    critic = "critic.ppo_mini_batch_size"
    if draft.has(critic) and draft.integer(critic) != part:
        draft.refuse(critic, why="the critic makes as many updates as the policy")
    draft.same(critic)
    return updates


def _run(draft: Draft) -> None:
    for key, target in (
        ("trainer.default_local_dir", "run.dir"),
        ("trainer.max_actor_ckpt_to_keep", "run.keep_checkpoints"),
        ("trainer.max_ckpt_to_keep", "run.keep_checkpoints"),
    ):
        if draft.has(key):
            draft.put(target, draft.value(key), key)
    every = draft.integer("trainer.save_freq") or -1
    draft.put("run.checkpoint_every", max(every, 0), "trainer.save_freq")
    loggers = draft.texts("trainer.logger") if draft.has("trainer.logger") else []
    names = ("trainer.project_name", "trainer.experiment_name")
    shared.put_trackers(draft, loggers, "trainer.logger", project=names[0], name=names[1])
    draft.same(*names, note="names for a tracker")
    draft.same("trainer.logger", note="the console")
    seed = "data.seed" if draft.has("data.seed") else "trainer.seed"
    if draft.has(seed):
        draft.put("seed", draft.integer(seed), seed)


def _optimizer(draft: Draft, section: str, clip: str, target: str, updates: int) -> None:
    """Writes an optimizer. verl advances its schedule once a step, whatever updates it makes."""
    keys = (f"{section}.optimizer", f"{section}.name")
    key = keys[1] if draft.has(keys[1]) and not draft.has(keys[0]) else keys[0]
    name = draft.text(key)
    ours = {"adamw": "adamw", "adam": "adamw", "muon": "muon", "sgd": "sgd", "lion": "lion"}
    ours = next((o for n, o in ours.items() if name.lower().endswith(n)), "")
    if ours:
        draft.put(f"{target}.name", ours, key)
    else:
        draft.refuse(key, why=f"Duet has no optimizer `{name}`")
    draft.same(*keys, note=f"{key} counts")
    draft.put(f"{target}.learning_rate", draft.number(f"{section}.lr"), f"{section}.lr")
    decay = f"{section}.weight_decay"
    draft.put(f"{target}.weight_decay", draft.number(decay), decay)
    _moments(draft, section, target, ours)
    clips = [key for key in (clip, f"{section}.clip_grad") if draft.has(key)]
    key = clips[0] if clips else f"{section}.clip_grad"
    limit = draft.number(key)
    if limit is not None and target == OPTIMIZER or clips:
        draft.put(f"{target}.clip_norm", limit or None, *(clips or [key]))
    _schedule(draft, section, target)
    _warmup(draft, section, target, updates)


def _moments(draft: Draft, section: str, target: str, name: str) -> None:
    betas = draft.value(f"{section}.betas")
    if name in ("adamw", "lion", "muon") and isinstance(betas, list) and len(betas) == 2:
        for number, value in enumerate(betas, start=1):
            draft.put(f"{target}.beta{number}", value, f"{section}.betas")
    elif name == "sgd":
        draft.same(f"{section}.betas", note="sgd does not read it")
    for key in (f"{section}.eps", f"{section}.adam_eps"):
        if draft.has(key) and name in ("adamw", "muon"):
            draft.put(f"{target}.eps", draft.number(key), key)
    if name == "muon":
        momentum = f"{section}.muon_momentum"
        draft.put(f"{target}.momentum", draft.number(momentum), momentum)
        steps = f"{section}.muon_num_ns_steps"
        draft.put(f"{target}.ns_steps", draft.integer(steps), steps)
        if draft.has(f"{section}.muon_nesterov"):
            nesterov = f"{section}.muon_nesterov"
            draft.put(f"{target}.nesterov", draft.truth(nesterov), nesterov)


def _schedule(draft: Draft, section: str, target: str) -> None:
    names = ("lr_scheduler_type", "warmup_style", "lr_scheduler", "lr_decay_style", "decay_type")
    keys = [f"{section}.{name}" for name in names]
    key = next((key for key in keys[1:] if draft.has(key)), keys[0])
    kind = draft.text(key)
    if kind not in ("constant", "cosine", "linear"):
        draft.refuse(key, why="Duet has constant, linear and cosine")
        return
    draft.put(f"{target}.schedule", kind, key)
    draft.same(*keys)
    ratio = f"{section}.min_lr_ratio"
    finals = [f"{section}.{name}" for name in ("min_lr", "lr_min", "min_lr_factor")]
    final = draft.number(ratio)
    used = ratio
    rate = draft.number(f"{section}.lr")
    for name in finals:
        if (least := draft.number(name)) and rate:
            final = least if name.endswith("factor") else least / rate
            used = name
    if final and kind != "constant":
        draft.put(f"{target}.final_fraction", final, used)
    draft.same(ratio, *finals, note="the last learning rate is 0, or constant")


def _warmup(draft: Draft, section: str, target: str, updates: int) -> None:
    steps = f"{section}.lr_warmup_steps"
    ratio = f"{section}.lr_warmup_steps_ratio"
    if not draft.has(ratio) and draft.has(f"{section}.warmup_steps_ratio"):
        ratio = f"{section}.warmup_steps_ratio"
    number = draft.integer(steps)
    if number is not None and number > 0:
        note = f"{number} steps of {updates} updates" if updates > 1 else ""
        draft.put(f"{target}.warmup_steps", number * updates, steps, note=note)
        draft.same(ratio, note=f"{steps} sets the warm-up")
    else:
        draft.same(steps, note="no number of steps")
        shared.put_warmup(draft, ratio=ratio, per_step=updates, target=target)


def _sampling(draft: Draft) -> None:
    shared.put_lengths(draft, "data.max_response_length", "data.max_prompt_length")
    temperature = f"{_ROLLOUT}.temperature"
    sample = f"{_ROLLOUT}.do_sample"
    if draft.truth(sample):
        draft.put(f"{SAMPLING}.temperature", draft.number(temperature), temperature)
        draft.same(sample)
    else:
        draft.put(f"{SAMPLING}.temperature", 0, sample, temperature, note="greedy")
    key = f"{_ROLLOUT}.top_k"
    draft.put(f"{SAMPLING}.top_k", max(draft.integer(key) or 0, 0), key)
    replay = f"{_ROLLOUT}.enable_rollout_routing_replay"
    mode = f"{_ACTOR}.router_replay.mode"
    if draft.truth(replay) or draft.text(mode) == "R3":
        draft.put(f"{STAGE}.router_replay", True, replay, mode)
    elif draft.text(mode) not in ("disabled", ""):
        draft.refuse(mode, why="Duet replays the experts of the generator (R3)")
    draft.same(replay, mode)


def _data(draft: Draft, train: str, evaluation: str) -> None:
    shared.put_data(draft, draft.texts(train), train)
    listed = len(draft.texts(train)) > 1
    prompt = draft.text("data.prompt_key")
    source = draft.text("data.reward_fn_key")
    columns = {"prompt": (prompt, "data.prompt_key"), "source": (source, "data.reward_fn_key")}
    limit = draft.integer("data.train_max_samples") or -1
    truncation = draft.text("data.truncation")
    drops = draft.truth("data.filter_overlong_prompts") or truncation != "error"
    too_long = "drop" if drops else "refuse"
    if listed:
        names = {name: value for name, (value, _) in columns.items() if value != name}
        entries = [
            {**entry, "columns": names, "too_long": too_long}
            for entry in draft.written_entries("data")
        ]
        keys = (train, "data.prompt_key", "data.reward_fn_key", "data.filter_overlong_prompts")
        draft.put("data", entries, *keys)
        if limit > 0:
            draft.refuse("data.train_max_samples", why="write `limit` of each dataset")
    else:
        for name, (value, key) in columns.items():
            if value and value != name:
                draft.put(f"data.columns.{name}", value, key)
        if limit > 0:
            draft.put("data.limit", limit, "data.train_max_samples")
        draft.put("data.too_long", too_long, "data.filter_overlong_prompts")
    draft.same("data.train_max_samples", "data.prompt_key", "data.reward_fn_key")
    if truncation == "error" or draft.truth("data.filter_overlong_prompts"):
        draft.same("data.truncation", note="no prompt is cut")
    elif truncation in ("left", "right", "middle"):
        note = "prompts that are too long are left out, where verl cuts them"
        draft.change("data.truncation", note=note)
    else:
        draft.refuse("data.truncation", why="verl has error, left, right and middle")
    _template(draft)
    draft.same(evaluation, note="no evaluation")


def _template(draft: Draft) -> None:
    name = "data.apply_chat_template_kwargs"
    keys = [key for key in draft.given.words if key.startswith(f"{name}.")]
    variables = {key.removeprefix(f"{name}."): draft.value(key) for key in keys}
    if not keys and isinstance(draft.value(name), dict):
        keys = [name]
        variables = draft.value(name)
    if variables:
        draft.put("tokenizer.chat_template", {"variables": variables}, *keys)
    draft.same(name, note="no variables")


def _algorithm(draft: Draft, updates: int) -> None:
    key = "algorithm.adv_estimator"
    estimator = draft.text(key)
    mode = draft.text(f"{_ACTOR}.policy_loss.loss_mode")
    name = _ESTIMATORS.get(estimator, "")
    if not name:
        draft.refuse(key, why=f"Duet has {', '.join(_ESTIMATORS)} of verl")
        name = "grpo"
    own = {"geo_mean": "gmpo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo"}.get(mode)
    if own and name != "grpo":
        draft.refuse(f"{_ACTOR}.policy_loss.loss_mode", key, why=f"{own} needs the group of grpo")
    name = own if own and name == "grpo" else name
    draft.put(f"{ALGORITHM}.name", name, key, f"{_ACTOR}.policy_loss.loss_mode")
    if estimator == "reinforce_plus_plus_baseline":
        draft.put(f"{ALGORITHM}.baseline", True, key)
    _scale(draft, name, estimator)
    _loss(draft, name, mode)
    _aggregation(draft, mode)
    _penalties(draft, name)
    _returns(draft, name, updates)
    _correction(draft)
    _filter(draft)


def _scale(draft: Draft, name: str, estimator: str) -> None:
    key = "algorithm.norm_adv_by_std_in_grpo"
    if name in ("grpo", "gmpo", "sapo", "cispo", "dppo"):
        scale = "group" if draft.truth(key) else "none"
        draft.put(f"{ALGORITHM}.scale", scale, key)
        if scale == "group":
            draft.put(f"{ALGORITHM}.std_eps", 1e-6, note="of verl")
    else:
        draft.same(key, note=f"{name} does not read it")
    keys = ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
    if estimator == "gdpo":
        note = "each reward of the score has to be a reward function of its own"
        draft.put(f"{ALGORITHM}.combine", "normalize_then_sum", *keys, note=note, changed=True)
        draft.task(f"rewards.functions: gdpo sums normalised rewards; {note}")
    else:
        draft.same(*keys, note="only of gdpo")


def _loss(draft: Draft, name: str, mode: str) -> None:
    low = f"{_ACTOR}.clip_ratio_low"
    high = f"{_ACTOR}.clip_ratio_high"
    both = f"{_ACTOR}.clip_ratio"
    dual = f"{_ACTOR}.clip_ratio_c"
    key = f"{_ACTOR}.policy_loss.loss_mode"
    lowest = _bound(draft, low, both)
    highest = _bound(draft, high, both)
    is_read = {lowest, highest} == {draft.number(both)}
    if draft.has(both) and not is_read and not (draft.has(low) and draft.has(high)):
        note = f"verl reads clip_ratio_low and clip_ratio_high, {lowest} and {highest} here"
        draft.change(both, note=note)
    draft.same(both, note="clip_ratio_low and clip_ratio_high count")
    if mode not in ("vanilla", "gspo", "geo_mean", "sapo", "cispo", "dppo_tv"):
        draft.refuse(key, why="Duet has vanilla, gspo, geo_mean, sapo, cispo and dppo_tv of verl")
    if name == "sapo":
        for option in ("tau_pos", "tau_neg"):
            draft.put(
                f"{ALGORITHM}.{option}", draft.number(f"{_ACTOR}.{option}"), f"{_ACTOR}.{option}"
            )
        draft.same(low, high, dual, note="sapo does not clip")
        return
    draft.same(f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg", note="only of sapo")
    if name == "dppo":
        draft.put(f"{ALGORITHM}.delta_low", lowest, low)
        draft.put(f"{ALGORITHM}.delta_high", highest, high)
        draft.put(f"{ALGORITHM}.penalty", 0.0, note="none in verl")
        draft.put(f"{ALGORITHM}.old_logp", "trainer", note="as verl has it")
        draft.change(dual, note="dppo of Duet does not bound the ratio of kept tokens")
        return
    draft.put(f"{ALGORITHM}.epsilon", lowest, low)
    draft.put(f"{ALGORITHM}.epsilon_high", highest, high)
    if mode == "gspo":
        draft.put(f"{ALGORITHM}.ratio", "sequence_token", key)
    elif name == "rloo":
        draft.put(f"{ALGORITHM}.ratio", "token", key)
    if mode == "vanilla" and draft.number(dual) is not None:
        draft.put(f"{ALGORITHM}.dual_clip", draft.number(dual), dual)
    draft.same(dual, key, note=f"{mode} does not read it")


def _bound(draft: Draft, key: str, both: str) -> float | None:
    """Returns a bound of the ratio; where its key is null, verl reads the one for both."""
    value = draft.number(key)
    return draft.number(both) if value is None and draft.fate_of(key) is None else value


def _aggregation(draft: Draft, mode: str) -> None:
    key = f"{_ACTOR}.loss_agg_mode"
    factor = f"{_ACTOR}.loss_scale_factor"
    if mode in ("geo_mean", "sapo"):
        draft.put(f"{ALGORITHM}.aggregation", "sequence", key, note=f"always in {mode} of verl")
    elif (ours := _AGGREGATIONS.get(draft.text(key))) is None:
        draft.refuse(key, why=f"Duet has {', '.join(_AGGREGATIONS)} of verl")
    else:
        draft.put(f"{ALGORITHM}.aggregation", ours, key)
        if ours == "constant" and draft.has(factor):
            length = draft.integer("data.max_response_length")
            if draft.number(factor) != length:
                why = "a constant mean divides by the longest completion"
                draft.refuse(factor, why=why)
    draft.same(factor, note="only of seq-mean-token-sum-norm, or the longest completion")


def _penalties(draft: Draft, name: str) -> None:
    on, coef, kind = (f"{_ACTOR}.{key}" for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if draft.truth(on):
        draft.put(f"{ALGORITHM}.kl_coef", draft.number(coef), coef, on)
        estimator = draft.text(kind)
        straight = estimator.endswith("+")
        ours = _KL.get(estimator.removesuffix("+"))
        if ours is None or (ours == "k1" and not straight):
            draft.refuse(kind, why=shared.NO_K1 if ours else "Duet has mse and low_var_kl")
        elif straight:
            note = _STRAIGHT_THROUGH.format(ours)
            draft.put(f"{ALGORITHM}.kl", "k2", kind, note=note)
        else:
            draft.put(f"{ALGORITHM}.kl", ours, kind)
    else:
        draft.put(f"{ALGORITHM}.kl_coef", 0.0, on)
        draft.same(coef, kind, note="use_kl_loss is false")
    _reward_penalty(draft, name)


def _reward_penalty(draft: Draft, name: str) -> None:
    on = "algorithm.use_kl_in_reward"
    kind = "algorithm.kl_penalty"
    controls = [f"algorithm.kl_ctrl.{key}" for key in ("type", "kl_coef", "target_kl", "horizon")]
    adapts, coef, target, horizon = controls
    if not draft.truth(on):
        if name == "ppo":
            draft.put(f"{ALGORITHM}.kl_reward_coef", 0.0, on)
        draft.same(on, kind, *controls, note="no KL penalty in the rewards")
        return
    if name not in ("ppo", "reinforce_pp", "rloo"):
        why = f"rewards of {name} have no KL penalty; a KL term in the loss has `use_kl_loss`"
        draft.refuse(on, why=why)
        return
    draft.put(f"{ALGORITHM}.kl_reward_coef", draft.number(coef), coef, on)
    if draft.text(kind) not in ("kl", "k1"):
        draft.refuse(kind, why="the penalty of rewards is k1 (`kl`)")
    draft.same(kind)
    if draft.text(adapts) == "adaptive":
        draft.put(f"{ALGORITHM}.kl_target", draft.number(target), target, adapts)
        draft.put(f"{ALGORITHM}.kl_horizon", draft.integer(horizon), horizon, adapts)
    draft.same(*controls, note="constant")


def _returns(draft: Draft, name: str, updates: int) -> None:
    """Writes what belongs to returns and the critic."""
    gamma = "algorithm.gamma"
    lam = "algorithm.lam"
    if name in ("ppo", "reinforce_pp"):
        draft.put(f"{ALGORITHM}.gamma", draft.number(gamma), gamma)
    warmup = "trainer.critic_warmup"
    clip = "critic.cliprange_value"
    critic = [key for key in draft.given.words if key.startswith("critic.")]
    if name != "ppo":
        keys = [key for key in critic if draft.fate_of(key) is None]
        draft.same(gamma, lam, warmup, clip, *keys, note=f"{name} has no critic")
        return
    draft.put(f"{ALGORITHM}.lam", draft.number(lam), lam)
    draft.put(f"{ALGORITHM}.value_clip", draft.number(clip), clip)
    if draft.integer(warmup):
        draft.put(f"{ALGORITHM}.critic_warmup", draft.integer(warmup), warmup)
    draft.same(warmup, "critic.enable")
    _optimizer(draft, "critic.optim", "critic.grad_clip", f"{STAGE}.critic", updates)
    path = "critic.model.path"
    policy = "actor_rollout_ref.model.path"
    if draft.has(path) and draft.text(path) != draft.text(policy):
        draft.refuse(path, why="a critic starts as a copy of the policy")
    draft.same(path, note="a critic starts as a copy of the policy")
    for name in ("lora_rank", "lora.rank"):
        rank = f"critic.model.{name}"
        policy_rank = draft.integer(f"actor_rollout_ref.model.{name}") or 0
        if draft.has(rank) and (draft.integer(rank) or 0) != policy_rank:
            draft.refuse(rank, why="the critic has an adapter of the rank that the policy's has")
        elif policy_rank and not draft.has(rank):
            note = "the critic learns an adapter too, where verl trains all of its weights"
            draft.change(rank, note=note)
        draft.same(rank)


def _correction(draft: Draft) -> None:
    section = "algorithm.rollout_correction"
    level = f"{section}.rollout_is"
    limit = f"{level}_threshold"
    batch = f"{level}_batch_normalize"
    bypass = f"{section}.bypass_mode"
    loss = f"{section}.loss_type"
    if draft.truth(bypass):
        draft.put(f"{ALGORITHM}.old_logp", "sampler", bypass)
        if draft.text(loss) != "ppo_clip":
            draft.refuse(loss, why="Duet has the clipped objective, not reinforce")
    draft.same(bypass, loss)
    cap = f"{_ACTOR}.tis_imp_ratio_cap"
    if draft.has("algorithm.rollout_is_threshold") and not draft.has(level):
        level = "algorithm.rollout_is"
        limit = "algorithm.rollout_is_threshold"
    kind = draft.text(level).lower()
    if (draft.number(cap) or -1) > 0:
        draft.put(f"{ALGORITHM}.correction", "token_truncate", cap)
        draft.put(f"{ALGORITHM}.correction_max", draft.number(cap), cap)
    elif kind in ("token", "sequence"):
        _bounds(draft, kind, level, limit)
        if draft.truth(batch):
            draft.put(f"{ALGORITHM}.correction_normalize", True, batch)
    elif kind not in ("", "null", "none", "false"):
        draft.refuse(level, why="Duet has token and sequence")
    draft.same(level, limit, batch, cap, note="no correction")
    _rejection(draft, section)


def _bounds(draft: Draft, kind: str, level: str, limit: str) -> None:
    bounds = re.fullmatch(rf"({_NUMBER})_({_NUMBER})", draft.text(limit))
    if bounds is None:
        draft.put(f"{ALGORITHM}.correction", f"{kind}_truncate", level)
        draft.put(f"{ALGORITHM}.correction_max", draft.number(limit), limit)
    else:
        draft.put(f"{ALGORITHM}.correction", f"{kind}_mask", level, limit)
        draft.put(f"{ALGORITHM}.correction_min", float(bounds[1]), limit)
        draft.put(f"{ALGORITHM}.correction_max", float(bounds[2]), limit)


def _rejection(draft: Draft, section: str) -> None:
    key = f"{section}.rollout_rs"
    limit = f"{section}.rollout_rs_threshold"
    kind = draft.text(key)
    if kind in ("", "null", "None", "none"):
        draft.same(key, limit, f"{limit}_lower", note="no rejection")
    elif kind in _REJECTIONS:
        draft.put(f"{ALGORITHM}.rejection", _REJECTIONS[kind], key)
        draft.put(f"{ALGORITHM}.rejection_max", draft.number(limit), limit)
    else:
        draft.refuse(key, limit, why=f"Duet has one of {', '.join(_REJECTIONS)}")


def _filter(draft: Draft) -> None:
    on, most, metric = (
        f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches", "metric")
    )
    if not draft.truth(on):
        draft.same(on, most, metric, note="no group is left out")
        return
    batches = draft.integer(most) or 0
    if batches > 0:
        draft.put(f"{ALGORITHM}.dynamic_batches", batches, most, on)
    else:
        note = "verl has no limit"
        draft.put(f"{ALGORITHM}.dynamic_batches", 100, on, most, note=note, changed=True)
    if draft.text(metric) not in ("", "reward", "seq_reward", "score", "seq_final_reward"):
        note = f"groups differ in their reward, where verl compares `{draft.text(metric)}`"
        draft.change(metric, note=note)
    draft.same(metric, note="groups differ in their reward")


def _rewards(draft: Draft) -> None:
    sections = ("reward.custom_reward_function", "custom_reward_function")
    section = next((s for s in sections if draft.has(f"{s}.path")), sections[0])
    path = f"{section}.path"
    name = f"{section}.name"
    functions: list[dict[str, JsonValue]] = []
    note = "reads the columns of verl"
    prefix = f"{section}.reward_kwargs"
    options = {
        key.removeprefix(f"{prefix}."): draft.value(key)
        for key in draft.given.words
        if key.startswith(f"{prefix}.")
    }
    options |= as_object(draft.value(prefix))
    keys = [path, name, *(key for key in draft.given.words if key.startswith(prefix))]
    if draft.has(path):
        score = f"{draft.text(path)}:{draft.text(name) or 'compute_score'}"
        more = {"options": options} if options else {}
        functions.append({"name": VERL_REWARD, "options": {"score": score, **more}})
    elif model := _model_reward(draft):
        functions.append({"name": "reward_model", "options": {"source": draft.text(model)}})
        keys.append(model)
        note = "a model with a score head"
    else:
        functions.append({"name": VERL_REWARD})
        chosen = "`math` of Duet, where verl chooses a function by data_source"
        draft.change(path, note=chosen)
        draft.task(
            "rewards.functions: verl scores by the column data_source; `math` compares with "
            "reward_model.ground_truth. Name another reward, or a file:compute_score, in `score`"
        )
    _overlong(draft, functions)
    _manager(draft)
    shared.put_rewards(draft, functions, *keys, note=note)


def _model_reward(draft: Draft) -> str:
    """Returns the key that names the reward model, "" without one."""
    for on, path in (
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
        ("reward_model.enable", "reward_model.model.path"),
        ("reward_model.enable", "reward_model.model_path"),
    ):
        if draft.truth(on) and draft.text(path):
            draft.same(on, note=f"{path} names the model")
            return path
        draft.same(on, path, note="no reward model")
    return ""


def _overlong(draft: Draft, functions: list[dict[str, JsonValue]]) -> None:
    kwargs = "reward_kwargs.overlong_buffer_cfg"
    for section in (f"reward.{kwargs}", f"reward_model.{kwargs}", "reward_model.overlong_buffer"):
        on, size, factor = (f"{section}.{name}" for name in ("enable", "len", "penalty_factor"))
        longest = f"{section.rpartition('.')[0]}.max_resp_len"
        if draft.truth(on) and draft.integer(size):
            options: dict[str, JsonValue] = {"cache": draft.integer(size)}
            if draft.has(longest):
                options["limit"] = draft.integer(longest)
            weight = draft.number(factor)
            functions.append({"name": "soft_overlong", "options": options, "weight": weight})
            draft.same(on, size, factor, longest, note="the reward soft_overlong")
        draft.same(on, size, factor, longest, note="no penalty of long completions")


def _manager(draft: Draft) -> None:
    for key in (
        "reward.reward_manager.name",
        "reward_manager.name",
        "reward_model.reward_manager",
        "reward.reward_manager",
    ):
        if draft.text(key) in ("", "naive", "dapo", "gdpo", "batch", "prime", "null"):
            draft.same(key, note="each completion is scored by itself")
        else:
            draft.refuse(key, why="write a reward of Duet for it")


def _evaluation(draft: Draft) -> None:
    every = draft.integer("trainer.test_freq") or -1
    names = ("n", "temperature", "do_sample", "top_k", "top_p")
    keys = [f"{_ROLLOUT}.val_kwargs.{name}" for name in names]
    paths = draft.texts("data.val_files")
    if not paths or (every < 1 and not draft.has("data.val_files")):
        draft.same("trainer.test_freq", "data.val_max_samples", *keys, note="no evaluation")
        return
    entries = [_evaluated(draft, path) for path in paths]
    names = shared.names_of(paths)
    data = entries[0] if len(entries) == 1 else _named(entries, names)
    draft.put("evaluation.data", data, "data.val_files")
    draft.put("evaluation.every", max(every, 0), "trainer.test_freq")
    if (limit := draft.integer("data.val_max_samples") or -1) > 0:
        draft.put("evaluation.problems", limit, "data.val_max_samples")
    samples = draft.integer(keys[0]) or 1
    if draft.truth(keys[2]) and (draft.number(keys[1]) or 0) > 0:
        draft.put("evaluation.samples", samples, keys[0], keys[2])
        draft.put("evaluation.temperature", draft.number(keys[1]), keys[1])
        if (draft.integer(keys[3]) or -1) > 0 or (draft.number(keys[4]) or 1) < 1:
            draft.change(*keys[3:], note="sampled completions of evaluations have no filter")
    draft.same(*keys, note="greedy completions are always measured")
    draft.same("data.val_max_samples", note="all problems, at most evaluation.problems")


def _named(entries: Sequence[JsonObject], names: Sequence[str]) -> list[JsonObject]:
    return [{**entry, "name": name} for entry, name in zip(entries, names, strict=True)]


def _evaluated(draft: Draft, path: str) -> dict[str, JsonValue]:
    entry: dict[str, JsonValue] = {"path": path}
    columns = {}
    if (prompt := draft.text("data.prompt_key")) not in ("", "prompt"):
        columns["prompt"] = prompt
    return entry | ({"columns": columns} if columns else {})


def _sft(draft: Draft) -> None:
    _configuration_name(draft)
    _model(draft, "model")
    draft.put(f"{ALGORITHM}.name", "sft")
    draft.put(f"{ALGORITHM}.train_on", "assistant", note="verl trains on what the assistant says")
    draft.put(
        f"{STAGE}.prompts_per_step", draft.integer("data.train_batch_size"), "data.train_batch_size"
    )
    shared.put_steps(draft, "trainer.total_training_steps", "trainer.total_epochs")
    _run(draft)
    _optimizer(draft, "optim", "optim.clip_grad", OPTIMIZER, 1)
    draft.put("max_length", draft.integer("data.max_length"), "data.max_length")
    shared.put_data(draft, draft.texts("data.train_files"), "data.train_files")
    if len(draft.texts("data.train_files")) < 2:
        _sft_columns(draft)
    _template(draft)
    every = draft.integer("trainer.test_freq") or -1
    held_out = draft.texts("data.val_files")
    if held_out:
        form = shared.form_of_rows(draft)
        entries = [{"path": path, **form} for path in held_out]
        data = entries[0] if len(entries) == 1 else _named(entries, shared.names_of(held_out))
        draft.put(f"{STAGE}.held_out.data", data, "data.val_files")
        draft.put(f"{STAGE}.held_out.every", max(every, 0), "trainer.test_freq")
    draft.same("trainer.test_freq", "data.val_files", "data.val_max_samples", note="no evaluation")


def _sft_columns(draft: Draft) -> None:
    columns: Sequence[tuple[str, str]] = (
        ("data.messages_key", "messages"),
        ("data.multiturn.messages_key", "messages"),
        ("data.prompt_key", "prompt"),
        ("data.response_key", "completion"),
    )
    for key, name in columns:
        if draft.has(key) and draft.text(key) != name:
            draft.put(f"data.columns.{name}", draft.text(key), key)
        draft.same(key)
    if draft.has("data.prompt_key"):
        draft.put("data.chat", True, "data.prompt_key", note="verl renders prompts as messages")
    if (limit := draft.integer("data.train_max_samples") or -1) > 0:
        draft.put("data.limit", limit, "data.train_max_samples")
    kinds = {"error": "refuse", "right": "truncate"}
    kind = draft.text("data.truncation")
    if kind in kinds:
        draft.put("data.too_long", kinds[kind], "data.truncation")
    else:
        draft.refuse("data.truncation", why="Duet cuts the end of a row, not its start")
    draft.same("data.train_max_samples")
