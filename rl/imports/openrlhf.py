"""Configurations of OpenRLHF: the flags of its programs, with dotted or older names."""

from __future__ import annotations

import re
from dataclasses import replace

from policy.json_types import JsonValue
from rl.errors import ConfigError
from rl.imports import shared
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, Syntax
from rl.imports.rules import Table
from rl.imports.shared import ALGORITHM, OPTIMIZER, SAMPLING, STAGE
from rl.imports.tables.openrlhf import OLDER, OLDER_OFFLINE, TABLES

NAME = "OpenRLHF 0.11"
SYNTAX = Syntax(
    framework="OpenRLHF",
    program=re.compile(r"(?:^|[/.])(train_(?:ppo_ray|es_ray|sft|dpo|rm|kto|kd|opd|prm))(?:\.py)?$"),
    form="flags",
)
OPENRLHF_REWARD = "rewards.foreign.openrlhf:reward_func"
_SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
_MOST_ROWS = 1_000_000  # a larger max_samples is no limit
_LAST_ANSWER = "OpenRLHF trains on the last answer"
_ADVANTAGE = "algo.advantage"


def table_of(given: Given, facts: Facts) -> Table:
    """Returns the rules of the program that the words are for. Raises ConfigError without any."""
    program = program_of(given)
    if program not in TABLES:
        raise ConfigError(f"{program}: Duet has no counterpart of this program of OpenRLHF")
    return TABLES[program]


def convert(draft: Draft) -> None:
    """Gives each word of a configuration of OpenRLHF its fate."""
    program = program_of(draft.given)
    _rename(draft, OLDER if program == "train_ppo_ray" else OLDER_OFFLINE)
    _run(draft)
    if program == "train_ppo_ray":
        _reinforce(draft)
    elif program == "train_opd":
        _distill_on_policy(draft)
    else:
        _offline(draft, program)
    draft.rest()


def program_of(given: Given) -> str:
    """Returns the program of OpenRLHF that the words are for."""
    if given.program:
        return given.program
    counts = {
        program: sum(key in table for key in given.words) for program, table in TABLES.items()
    }
    counts["train_ppo_ray"] += sum(key in OLDER and key not in OLDER_OFFLINE for key in given.words)
    return max(counts, key=lambda program: counts[program])


def _rename(draft: Draft, older: dict[str, str]) -> None:
    words = draft.given.words
    for key in [key for key in words if key in older and key not in draft.table]:
        word = words.pop(key)
        words.setdefault(older[key], replace(word, name=key))


def _run(draft: Draft) -> None:
    every = draft.integer("ckpt.save_steps") or -1
    draft.put("run.checkpoint_every", max(every, 0), "ckpt.save_steps")
    if draft.has("logger.wandb.key"):
        options = {}
        for key, name in (("project", "project"), ("run_name", "name")):
            if draft.text(f"logger.wandb.{key}"):
                options[name] = draft.text(f"logger.wandb.{key}")
        keys = ("logger.wandb.project", "logger.wandb.run_name", "logger.wandb.key")
        note = "the key itself is read from WANDB_API_KEY"
        draft.put("run.wandb", options, *keys, note=note)
    draft.same("logger.wandb.project", "logger.wandb.run_name", note="names for wandb")
    if draft.text("logger.tensorboard_dir"):
        draft.put("run.tensorboard", True, "logger.tensorboard_dir")
    if draft.text("ds.param_dtype") == "bf16":
        draft.put("model.dtype", "bfloat16", "ds.param_dtype")
    else:
        note = "Duet has no float16: products are bfloat16"
        draft.put("model.dtype", "bfloat16", "ds.param_dtype", note=note, changed=True)
    if draft.truth("ds.load_in_4bit"):
        draft.put("model.base_weights", "nf4", "ds.load_in_4bit")
    draft.same("ds.load_in_4bit")
    shared.put_adapter(draft, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")


def _reinforce(draft: Draft) -> None:
    shared.put_source(
        draft, "model", draft.text("actor.model_name_or_path"), "actor.model_name_or_path"
    )
    updates = _batches(draft)
    shared.put_steps(draft, "", "train.num_episodes")
    if draft.has("rollout.prompt_max_len") or draft.has("rollout.max_new_tokens"):
        total = "data.max_len" if draft.has("data.max_len") else ""
        shared.put_lengths(draft, "rollout.max_new_tokens", "rollout.prompt_max_len", total)
        draft.same("data.max_len", "rollout.prompt_max_len", note="the lengths of both")
    else:
        shared.put_lengths(draft, "rollout.max_new_tokens", total="data.max_len")
    paths = "data.prompt_dataset"
    _data(draft, paths, "data.prompt_probs", "data.prompt_split")
    _columns(draft, {"data.input_key": "prompt"})
    _optimizer(draft, "actor.", OPTIMIZER, updates)
    _algorithm(draft, updates)
    _rewards(draft)
    _evaluation(draft)


def _distill_on_policy(draft: Draft) -> None:
    """Writes a stage that learns from a teacher at the tokens of its own completions."""
    shared.put_source(
        draft, "model", draft.text("model.model_name_or_path"), "model.model_name_or_path"
    )
    shared.put_source(
        draft, "teacher", draft.text("teacher.model_name_or_path"), "teacher.model_name_or_path"
    )
    draft.put(f"{STAGE}.prompts_per_step", draft.integer("train.batch_size"), "train.batch_size")
    draft.put(f"{STAGE}.samples_per_prompt", 1, note="OpenRLHF draws one completion of a prompt")
    shared.put_steps(draft, "", "train.max_epochs")
    shared.put_lengths(draft, "generate.max_new_tokens", "data.prompt_max_len")
    _data(draft, "data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
    _columns(draft, {"data.input_key": "prompt"})
    _optimizer(draft, "", OPTIMIZER, 1)
    _divergence(draft)


def _divergence(draft: Draft) -> None:
    likeliest = "opd.topk"
    softmax = "opd.kd_temperature"
    sampling = "generate.temperature"
    temperature = draft.number(sampling)
    draft.put(f"{SAMPLING}.temperature", temperature, sampling)
    if draft.integer(likeliest):
        draft.put(f"{ALGORITHM}.name", "gkd", likeliest)
        draft.put(f"{ALGORITHM}.divergence", "reverse", likeliest)
        draft.put(f"{ALGORITHM}.temperature", draft.number(softmax), softmax)
        why = "Duet compares all tokens, not the likeliest of the policy; `gkd` is written"
        draft.refuse(likeliest, why=why)
        return
    draft.put(f"{ALGORITHM}.name", "opd", likeliest)
    draft.put(f"{ALGORITHM}.aggregation", "token", note="of OpenRLHF")
    draft.same(softmax, note="only of opd.topk")
    if temperature != 1:
        note = "Duet compares policy and teacher at this temperature, OpenRLHF at 1"
        draft.change(sampling, note=note)


def _batches(draft: Draft) -> int:
    """Writes prompts_per_step and updates_per_step. Returns the updates of a step."""
    prompts = draft.integer("rollout.batch_size") or 1024
    samples = draft.integer("rollout.n_samples_per_prompt") or 1
    batch = draft.integer("train.batch_size") or 128
    keys = ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size")
    draft.put(f"{STAGE}.prompts_per_step", prompts, keys[0])
    draft.put(f"{STAGE}.samples_per_prompt", samples, keys[1])
    updates = shared.exact_quotient(prompts * samples, batch)
    if updates is None:
        why = f"{prompts} x {samples} completions are no multiple of a batch of {batch}"
        draft.refuse(*keys, why=why)
        updates = 1
    note = f"{prompts} x {samples} completions in batches of {batch}"
    draft.put(f"{STAGE}.updates_per_step", updates, *keys, note=note)
    return updates


def _data(draft: Draft, paths: str, shares: str, split: str) -> None:
    names = shared.parts(draft, paths)
    weights = shared.parts(draft, shares)
    shared.put_data(draft, names, paths, split=draft.text(split) if draft.has(split) else "")
    if weights and len(names) > 1:
        if len(weights) == len(names) and all(map(_is_number, weights)):
            entries = [
                {**entry, "weight": float(weight)}
                for entry, weight in zip(draft.written_entries("data"), weights, strict=True)
            ]
            draft.put("data", entries, paths, shares)
        else:
            draft.refuse(shares, why=f"they are no {len(names)} numbers, one for each dataset")
    draft.same(shares, split)
    limit = draft.integer("data.max_samples") or 0
    if 0 < limit < _MOST_ROWS and len(names) > 1:
        note = "no limit is written: OpenRLHF limits the rows of all datasets together"
        draft.change("data.max_samples", note=note)
    elif 0 < limit < _MOST_ROWS:
        draft.put("data.limit", limit, "data.max_samples")
    draft.same("data.max_samples", note="no limit")


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\d*\.?\d+(?:[eE]-?\d+)?", text))


def _columns(draft: Draft, columns: dict[str, str]) -> None:
    """Writes names of columns, and how a prompt is made of them."""
    chat = draft.truth("data.apply_chat_template")
    template = draft.text("data.input_template")
    key = next(iter(columns))
    names = {name: draft.text(source) for source, name in columns.items() if draft.text(source)}
    options: dict[str, JsonValue] = {}
    prompt = names.get("prompt", "prompt")
    if chat:
        options["chat"] = True
    elif template and "{}" in template:
        options["prompt_template"] = template.replace("{}", "{" + prompt + "}")
        names.pop("prompt", None)
    names = {name: value for name, value in names.items() if value != name}
    sources = {"chat": "data.apply_chat_template", "prompt_template": "data.input_template"}
    if datasets := draft.written_entries("data"):
        more = options | ({"columns": names} if names else {})
        entries = [{**entry, **more} for entry in datasets]
        draft.put("data", entries, *columns, *sources.values())
    else:
        for option, value in options.items():
            draft.put(f"data.{option}", value, sources[option], key)
        for name, value in names.items():
            source = next(k for k, n in columns.items() if n == name)
            draft.put(f"data.columns.{name}", value, source)
    draft.same(*columns, *sources.values(), note="the prompt is the text of its column")


def _optimizer(draft: Draft, prefix: str, target: str, updates: int) -> None:
    if draft.text(f"{prefix}optim") != "adam":
        why = "Muon has a learning rate of its own for matrices: docs/optimizers.md"
        draft.refuse(f"{prefix}optim", why=why)
    draft.put(f"{target}.name", "adamw", f"{prefix}optim")
    for key, option in (("lr", "learning_rate"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        draft.put(f"{target}.{option}", draft.number(f"{prefix}adam.{key}"), f"{prefix}adam.{key}")
    betas = draft.value(f"{prefix}adam.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for number, value in enumerate(betas, start=1):
            draft.put(f"{target}.beta{number}", value, f"{prefix}adam.betas")
    draft.put(f"{target}.clip_norm", draft.number(f"{prefix}max_norm"), f"{prefix}max_norm")
    key = f"{prefix}lr_scheduler"
    ratio = f"{prefix}min_lr_ratio"
    kind = draft.text(key)
    schedule = _SCHEDULES.get(kind)
    warmup = f"{prefix}lr_warmup_ratio"
    if schedule is None:
        draft.refuse(key, why=f"Duet has {', '.join(_SCHEDULES)}")
    elif target == OPTIMIZER:
        final = draft.number(ratio) if kind == "cosine_with_min_lr" else None
        shared.put_schedule(draft, schedule, key, final, ratio)
        shared.put_warmup(draft, ratio=warmup, per_step=updates)
    else:
        draft.put(f"{target}.schedule", schedule, key)
        if kind == "cosine_with_min_lr" and draft.number(ratio):
            draft.put(f"{target}.final_fraction", draft.number(ratio), ratio)
        policy = draft.values.get(f"{OPTIMIZER}.warmup_steps")
        if policy is not None:
            draft.put(f"{target}.warmup_steps", policy.value, warmup, note="as the policy")
        draft.same(warmup, note="as the policy")
    draft.same(ratio, note=f"{kind} does not read it")


def _algorithm(draft: Draft, updates: int) -> None:
    key = f"{_ADVANTAGE}.estimator"
    estimator = draft.text(key)
    name = _ESTIMATORS.get(estimator, "")
    if estimator == "flash_reinforce":
        why = "Duet has no baseline over the batch without a division by the standard deviation"
        draft.refuse(key, why=f"{why}; reinforce_pp is nearest")
        name = "reinforce_pp"
    elif not name:
        draft.refuse(key, why=f"Duet has {', '.join(_ESTIMATORS)}")
        name = "grpo"
    draft.put(f"{ALGORITHM}.name", name, key)
    if name == "reinforce_pp":
        draft.put(f"{ALGORITHM}.baseline", estimator == "reinforce_baseline", key)
    if name == "grpo":
        scale = "none" if estimator == "dr_grpo" else "group"
        draft.put(f"{ALGORITHM}.scale", scale, key)
        if scale == "group":
            draft.put(f"{ALGORITHM}.std_eps", 1e-9, note="of OpenRLHF")
    plain = f"{_ADVANTAGE}.no_std_norm"
    if draft.truth(plain) and name in ("ppo", "reinforce_pp"):
        draft.refuse(plain, why="advantages of this algorithm are divided by their deviation")
    draft.same(plain)
    _loss(draft, name)
    _penalties(draft, name)
    _returns(draft, name, updates)
    _correction(draft)
    _filter(draft)


def _loss(draft: Draft, name: str) -> None:
    both = "actor.eps_clip"
    pair = "actor.eps_clip_low_high"
    bounds = draft.value(pair)
    if isinstance(bounds, list) and len(bounds) == 2:
        draft.put(f"{ALGORITHM}.epsilon", bounds[0], pair)
        draft.put(f"{ALGORITHM}.epsilon_high", bounds[1], pair)
        draft.same(both, note="eps_clip_low_high counts")
    else:
        draft.put(f"{ALGORITHM}.epsilon", draft.number(both), both)
    mode = "actor.loss_agg_mode"
    kind = "actor.policy_loss_type"
    is_gspo = draft.text(kind) == "gspo"
    if is_gspo:
        draft.put(f"{ALGORITHM}.ratio", "sequence", kind)
        draft.put(f"{ALGORITHM}.aggregation", "sequence", kind, mode, note="always of gspo")
    else:
        if name == "rloo":
            draft.put(f"{ALGORITHM}.ratio", "token", kind)
        aggregations = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
        ours = aggregations.get(draft.text(mode))
        if ours is None or draft.text(kind) != "ppo":
            draft.refuse(
                mode, kind, why="Duet has token-mean and seq-mean-token-mean; ppo and gspo"
            )
        else:
            draft.put(f"{ALGORITHM}.aggregation", ours, mode)
    draft.same(mode, kind)


def _penalties(draft: Draft, name: str) -> None:
    coef = "algo.kl.init_coef"
    in_loss = "algo.kl.use_loss"
    kind = "algo.kl.estimator"
    target = "algo.kl.target"
    horizon = "algo.kl.horizon"
    unbiased = "algo.kl.unbiased_gradient"
    size = draft.number(coef) or 0.0
    if draft.truth(in_loss):
        draft.put(f"{ALGORITHM}.kl_coef", size, coef, in_loss)
        estimator = draft.text(kind)
        if draft.truth(unbiased):
            note = "the gradient is that of the KL divergence"
            draft.put(f"{ALGORITHM}.kl", "unbiased", unbiased, kind, note=note)
        elif estimator in ("k2", "k3"):
            draft.put(f"{ALGORITHM}.kl", estimator, kind)
        elif size:
            draft.refuse(kind, why=shared.NO_K1)
        draft.same(target, horizon, kind, unbiased, note="the weight of a loss is constant")
        return
    if name in ("ppo", "reinforce_pp", "rloo"):
        draft.put(f"{ALGORITHM}.kl_reward_coef", size, coef)
        if draft.number(target) is not None:
            draft.put(f"{ALGORITHM}.kl_target", draft.number(target), target)
            draft.put(f"{ALGORITHM}.kl_horizon", draft.integer(horizon), horizon)
        if size and draft.text(kind) != "k1":
            draft.refuse(kind, why="the penalty of rewards is k1")
    elif size:
        why = f"rewards of {name} have no KL penalty (OpenRLHF has 0.01 by default); "
        draft.refuse(coef, in_loss, why=why + "use_loss puts it into the loss, 0 leaves it out")
    draft.same(coef, in_loss, kind, target, horizon, unbiased, note="no penalty, or a constant one")


def _returns(draft: Draft, name: str, updates: int) -> None:
    gamma = f"{_ADVANTAGE}.gamma"
    lambd = f"{_ADVANTAGE}.lambd"
    steps = "critic.freezing_steps"
    clip = "critic.value_clip"
    if name in ("ppo", "reinforce_pp") and draft.text(f"{_ADVANTAGE}.estimator") in (
        "gae",
        "reinforce",
    ):
        draft.put(f"{ALGORITHM}.gamma", draft.number(gamma), gamma)
    critic = [key for key in draft.given.words if key.startswith("critic.")]
    if name != "ppo":
        draft.same(gamma, lambd, steps, clip, *critic, note=f"{name} reads neither, nor a critic")
        return
    draft.put(f"{ALGORITHM}.lam", draft.number(lambd), lambd)
    draft.put(f"{ALGORITHM}.value_clip", draft.number(clip), clip)
    warmup = draft.integer(steps) or -1
    if warmup > 0:
        draft.put(f"{ALGORITHM}.critic_warmup", warmup, steps)
    draft.same(steps, note="the critic has no head start")
    _optimizer(draft, "critic.", f"{STAGE}.critic", updates)
    path = "critic.model_name_or_path"
    if draft.has(path) and draft.text(path) != draft.text("actor.model_name_or_path"):
        draft.refuse(path, why="a critic starts as a copy of the policy")
    elif draft.text("reward.model_name_or_path") and not draft.has(path):
        note = "the critic starts as a copy of the policy, where OpenRLHF takes the reward model"
        draft.change("reward.model_name_or_path", note=note)
    draft.same(path)


def _correction(draft: Draft) -> None:
    names = ("level", "mode", "gating", "threshold", "enable", "type")
    keys = {name: f"{_ADVANTAGE}.is_correction_{name}" for name in names}
    icepop = f"{_ADVANTAGE}.use_icepop"
    level = draft.text(keys["level"])
    mode = draft.text(keys["mode"])
    used = [keys["level"], keys["mode"]]
    if draft.truth(keys["enable"]):
        kind = "icepop" if draft.truth(icepop) else draft.text(keys["type"])
        older = {"tis": ("token", "clip"), "icepop": ("token", "mask")}
        level, mode = older.get(kind, ("seq", "mask"))
        used = [keys["enable"], keys["type"], icepop]
    if level == "off":
        draft.same(*keys.values(), icepop, note="no correction")
        return
    if draft.text(keys["gating"]) != "ratio":
        draft.refuse(keys["gating"], why="Duet compares the ratio; `rejection` has k2 and k3")
    kinds = {
        ("token", "clip"): "token_truncate",
        ("token", "mask"): "token_mask",
        ("seq", "mask"): "geometric_mask",
    }
    if (level, mode) not in kinds:
        draft.refuse(*used, why="Duet has token clip, token mask and seq mask")
        return
    draft.put(f"{ALGORITHM}.correction", kinds[level, mode], *used)
    bounds = draft.value(keys["threshold"])
    bounds = bounds if isinstance(bounds, list) else [bounds]
    for name, value in zip(("max", "min"), reversed(bounds), strict=False):
        draft.put(f"{ALGORITHM}.correction_{name}", value, keys["threshold"])
    draft.same(*keys.values(), icepop)


def _filter(draft: Draft) -> None:
    on = "algo.dynamic_filtering_enable"
    bounds = "algo.dynamic_filtering_range"
    if not draft.truth(on):
        draft.same(on, bounds, note="no group is left out")
        return
    note = "groups of equal rewards are left out, OpenRLHF leaves out means at or beyond the range"
    draft.put(f"{ALGORITHM}.dynamic_batches", 100, on, bounds, note=note, changed=True)


def _rewards(draft: Draft) -> None:
    functions: list[dict[str, JsonValue]] = []
    url = "reward.remote_url"
    model = "reward.model_name_or_path"
    label = draft.text("data.label_key")
    for place in shared.parts(draft, url):
        if place.endswith(".py"):
            options = {"function": f"{place}:reward_func", **({"label": label} if label else {})}
            functions.append({"name": OPENRLHF_REWARD, "options": options})
        else:
            draft.refuse(url, why="Duet calls no server of rewards; write a function that does")
    for source in shared.parts(draft, model):
        functions.append({"name": "reward_model", "options": {"source": source}})
    size = "reward.overlong_buffer_len"
    factor = "reward.overlong_penalty_factor"
    if draft.number(size):
        cache = draft.integer(size)
        weight = draft.number(factor)
        functions.append({"name": "soft_overlong", "options": {"cache": cache}, "weight": weight})
    shared.put_rewards(draft, functions, url, model, size, factor, "data.label_key")
    draft.same("data.label_key", size, factor, note="rewards get all columns of a row")


def _evaluation(draft: Draft) -> None:
    names = ("dataset", "split", "temperature", "n_samples_per_prompt", "steps")
    dataset, split, temperature, samples, every = (f"eval.{name}" for name in names)
    paths = shared.parts(draft, dataset)
    if not paths:
        draft.same(split, temperature, samples, every, note="no evaluation")
        return
    common: dict[str, JsonValue] = {"split": draft.text(split)}
    if (column := draft.text("data.input_key")) != "prompt":
        common["columns"] = {"prompt": column}
    if draft.truth("data.apply_chat_template"):
        common["chat"] = True
    entries = [{"path": path, **common} for path in paths]
    if len(entries) > 1:
        named = zip(entries, shared.names_of(paths), strict=True)
        entries = [{**entry, "name": name} for entry, name in named]
    draft.put("evaluation.data", entries[0] if len(entries) == 1 else entries, dataset, split)
    draft.put("evaluation.every", max(draft.integer(every) or 0, 0), every)
    draft.put("evaluation.samples", draft.integer(samples), samples)
    draft.put("evaluation.temperature", draft.number(temperature), temperature)


def _offline(draft: Draft, program: str) -> None:
    """Writes a stage of demonstrations, pairs or labelled answers."""
    shared.put_source(
        draft, "model", draft.text("model.model_name_or_path"), "model.model_name_or_path"
    )
    draft.put(f"{STAGE}.prompts_per_step", draft.integer("train.batch_size"), "train.batch_size")
    shared.put_steps(draft, "", "train.max_epochs")
    draft.put("max_length", draft.integer("data.max_len"), "data.max_len")
    _data(draft, "data.dataset", "data.dataset_probs", "data.dataset_split")
    _optimizer(draft, "", OPTIMIZER, 1)
    _OFFLINE[program](draft)
    paths = shared.parts(draft, "eval.dataset")
    if paths:
        held_out: dict[str, JsonValue] = {"path": paths[0], "split": draft.text("eval.split")}
        held_out |= {"chat": True} if draft.truth("data.apply_chat_template") else {}
        held_out |= shared.form_of_rows(draft)
        draft.put(f"{STAGE}.held_out.data", held_out, "eval.dataset", "eval.split")
        every = max(draft.integer("eval.steps") or 0, 0)
        draft.put(f"{STAGE}.held_out.every", every, "eval.steps")
        if len(paths) > 1:
            draft.refuse("eval.dataset", why="write the other datasets into held_out.data")
    draft.same("eval.split", "eval.steps", note="no held-out rows")
    reference = "ref.model_name_or_path"
    if draft.has(reference) and draft.text(reference) != draft.text("model.model_name_or_path"):
        draft.refuse(reference, why="the reference model is the policy at the start of the stage")
    draft.same(reference)


def _sft(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "sft")
    turns = draft.truth("data.multiturn")
    trained = "assistant" if turns else "last_turn"
    note = "" if turns else _LAST_ANSWER
    draft.put(f"{ALGORITHM}.train_on", trained, "data.multiturn", note=note)
    _demonstrations(draft)


def _demonstrations(draft: Draft) -> None:
    output = draft.text("data.output_key")
    if output or not draft.truth("data.apply_chat_template"):
        _columns(draft, {"data.input_key": "prompt", "data.output_key": "completion"})
        return
    messages = draft.text("data.input_key")
    if messages != "messages":
        draft.put("data.columns.messages", messages, "data.input_key")
    keys = ("data.input_key", "data.output_key", "data.apply_chat_template", "data.input_template")
    draft.same(*keys, note="the conversation is in one column")


def _dpo(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "dpo")
    kind = "ipo" if draft.truth("model.ipo_enable") else "sigmoid"
    draft.put(f"{ALGORITHM}.loss_type", kind, "model.ipo_enable")
    _pairs(draft)


def _pairs(draft: Draft) -> None:
    if draft.text("data.prompt_key"):
        names = {"data.prompt_key": "prompt"}
        names |= {"data.chosen_key": "chosen", "data.rejected_key": "rejected"}
        _columns(draft, names)
        return
    for key, name in (("data.chosen_key", "chosen"), ("data.rejected_key", "rejected")):
        if draft.text(key) != name:
            draft.put(f"data.columns.{name}", draft.text(key), key)
        draft.same(key)
    keys = ("data.prompt_key", "data.apply_chat_template", "data.input_template")
    draft.same(*keys, note="answers hold the full conversation")


def _reward_model(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "reward_model")
    _pairs(draft)


def _kto(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "kto")
    if draft.text("data.label_key") != "label":
        draft.refuse("data.label_key", why="the column of labels is `label`: rename it in the data")
    draft.same("data.label_key")
    _demonstrations(draft)


def _distill(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "distill")
    draft.put(f"{ALGORITHM}.train_on", "last_turn", note=_LAST_ANSWER)
    draft.put(f"{ALGORITHM}.alpha", draft.number("model.kd_coef"), "model.kd_coef")
    shared.put_source(draft, "teacher", draft.text("model.teacher_model"), "model.teacher_model")
    _demonstrations(draft)


_OFFLINE = {
    "train_sft": _sft,
    "train_dpo": _dpo,
    "train_rm": _reward_model,
    "train_kto": _kto,
    "train_kd": _distill,
}
