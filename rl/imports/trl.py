"""Configurations of TRL: YAML files and command lines of TrlParser."""

from __future__ import annotations

import re

from policy.json_types import JsonObject, JsonValue
from rl.config.foreign import ABSENT
from rl.errors import ConfigError
from rl.imports import shared
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, GivenValue, Syntax
from rl.imports.rules import Table
from rl.imports.shared import ALGORITHM, OPTIMIZER, SAMPLING, STAGE
from rl.imports.tables.trl import DPO_LOSSES, LOSSES, TABLES

NAME = "TRL 1.16"
_OTHERS = (
    "alphapo|async_distillation|async_grpo|bco|cpo|dpo_online|gkd|gold|hicra|maxrl|minillm|nash_md"
    "|odpo|online_dpo|orpo|papo|ppo|prm|sdft|sdpo|ssd|xpo"
)
"""Trainers of TRL without a table here, as scripts and `trl` name them."""
SYNTAX = Syntax(
    framework="TRL",
    program=re.compile(
        rf"^(?:.*/)?trl()$|^(?:.*[/.])?({_OTHERS}|sft|dpo|grpo|gspo|kto|reward|rloo|distillation)"
        r"(?:_\w+)?\.py$"
        r"|^trl\.scripts\.(\w+)$|^[^-=]*\.py$"
    ),
    helpers=frozenset({"env", "skills", "vllm-serve", "vllm_serve"}),
    form="flags",
    nested=False,
    files=("config",),
)
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = {
    "adamw": r"adamw(_torch(_fused|_xla|_npu_fused|_4bit|_8bit)?|_hf|_apex_fused|_anyprecision"
    r"|_8bit|_bnb_8bit)?|paged_adamw(_32bit|_8bit)?",
    "lion": r"lion(_8bit|_32bit)?|paged_lion(_32bit|_8bit)?",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_REWARDS = {
    "accuracy_reward": {"name": "math"},
    "reasoning_accuracy_reward": {"name": "math"},
    "get_soft_overlong_punishment": {
        "name": "soft_overlong",
        "options": {"limit": 1280, "cache": 256},
    },
    "think_format_reward": {
        "name": "regex_format",
        "options": {"pattern": r"(?s)<think>(?!.*<think>)(.*?)</think>.*"},
    },
}
_SAMPLED = ("grpo", "rloo", "distillation")
_LOGGING_STEPS = 10  # of TRL
_BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")


def table_of(given: Given, facts: Facts) -> Table:
    """Returns the rules of the trainer that the words are for, of SFT if they fit all."""
    return TABLES[_trainer(given, facts) or "sft"]


def convert(draft: Draft) -> None:
    """Gives each word of a configuration of TRL its fate."""
    trainer = _trainer(draft.given, draft.facts)
    if not trainer:
        trainer = "sft"
        draft.task(
            "the file does not say which trainer it is for, and was read as SFT: `--trainer dpo` "
            "reads it for another one"
        )
    for key in [key for key in draft.given.words if key.startswith("no_")]:
        if (name := key.removeprefix("no_")) in draft.table:  # how a command line says false
            word = draft.given.words.pop(key)
            draft.given.words[name] = GivenValue(False, word.where)
    _model(draft)
    updates = _batches(draft, trainer)
    _steps(draft, updates)
    _data(draft, trainer)
    _run(draft, updates)
    _evaluation(draft, trainer, updates)
    _optimizer(draft, updates)
    _ALGORITHMS[trainer](draft, updates)
    if end := draft.text("eos_token"):
        note = "the model's directory names the end of sequence; completions end here too"
        draft.put(f"{SAMPLING}.stop", [end], "eos_token", note=note, changed=True)
    draft.leave("use_vllm", why=ABSENT["use_vllm"])
    draft.rest()


def trainer_of(given: Given) -> str:
    """Returns the trainer that the words of a file belong to, "" if they fit all.

    The program says it, else the losses, else the keys, and of trainers with equal keys the name of
    the file, or else the first of TABLES.
    """
    program = {"gspo": "grpo"}.get(given.program, given.program)
    if program in TABLES:
        return program
    loss = given.words.get("loss_type")
    losses = loss.value if loss and isinstance(loss.value, list) else [loss.value] if loss else []
    for trainer, names in LOSSES.items():
        if losses and all(name in names for name in losses):
            return trainer
    counts = {
        trainer: sum(key in table for key in given.words) for trainer, table in TABLES.items()
    }
    best = [trainer for trainer, count in counts.items() if count == max(counts.values())]
    places = {word.where.partition(":")[0].lower() for word in given.words.values()}
    named = [trainer for trainer in best if any(trainer in place for place in places)]
    return (named or best)[0] if named or len(best) < len(TABLES) else ""


def _trainer(given: Given, facts: Facts) -> str:
    """Returns the trainer that the person or the words name, "" if neither does. Raises
    ConfigError for one that is not imported."""
    named = facts.trainer
    if named and named not in TABLES:
        raise ConfigError(f"--trainer {named}: the trainers of TRL here are {', '.join(TABLES)}")
    program = given.program
    if not named and re.fullmatch(_OTHERS, program):
        raise ConfigError(
            f"{program}: this trainer of TRL is not imported; those here are {', '.join(TABLES)}"
        )
    return named or trainer_of(given)


def _model(draft: Draft) -> None:
    source = draft.text("model_name_or_path")
    revision = draft.text("model_revision")
    if source and revision not in ("", "main"):
        source = f"hf://{source}@{revision}"
    shared.put_source(draft, "model", source, "model_name_or_path", "model_revision")
    draft.same("model_revision")
    _types(draft)
    if draft.truth("use_peft"):
        draft.same("use_peft", note="model.adapter")
        _adapter(draft)
    else:
        keys = [key for key in draft.given.words if key.startswith(("lora_", "use_dora", "use_rs"))]
        draft.same("use_peft", *keys, note="no adapter: use_peft is false")
    if draft.truth("load_in_4bit") and draft.text("bnb_4bit_quant_type") == "nf4":
        keys = ("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
        draft.put("model.base_weights", "nf4", *keys)
    elif draft.truth("load_in_8bit"):
        note = "bitsandbytes keeps outliers in 16 bits; Duet quantises all columns"
        draft.put("model.base_weights", "int8", "load_in_8bit", note=note, changed=True)


def _types(draft: Draft) -> None:
    """bf16 is the type of products (autocast), dtype that of the weights."""
    stored = (draft.text("dtype") if draft.has("dtype") else draft.text("torch_dtype")) or "float32"
    key = "dtype" if draft.has("dtype") else "torch_dtype"
    half = draft.truth("fp16")
    is_bf16 = draft.truth("bf16") if draft.has("bf16") else not half
    if half or stored == "float16":
        note = "Duet has no float16: products are bfloat16"
        draft.put("model.dtype", "bfloat16", "fp16", key, note=note, changed=True)
    elif is_bf16 or stored == "bfloat16":
        draft.put("model.dtype", "bfloat16", "bf16", key)
        draft.same("fp16")
    else:
        draft.same("bf16", "fp16", key, note="products are float32")
    if stored in ("bfloat16", "float16"):
        draft.put("model.param_dtype", "bfloat16", key)
    elif stored == "auto":
        note = "written as float32: TRL takes the type of the model's files"
        draft.put("model.param_dtype", "float32", key, note=note, changed=True)
    else:
        draft.same(key, note="weights are float32")


def _adapter(draft: Draft) -> None:
    default = ["q_proj", "v_proj"]
    shared.put_adapter(
        draft, "lora_r", "lora_alpha", "lora_target_modules", default_targets=default
    )
    if not draft.has("lora_target_modules"):
        note = "q_proj and v_proj are written, which PEFT takes for most architectures"
        draft.change("lora_target_modules", note=note)
    if names := draft.texts("lora_modules_to_save"):
        draft.put("model.adapter.train", names, "lora_modules_to_save")
    for key, option in (("use_rslora", "rank_stabilised"), ("use_dora", "dora")):
        if draft.truth(key):
            draft.put(f"model.adapter.{option}", True, key)
    dropout = draft.number("lora_dropout")
    if dropout and draft.has("lora_dropout"):
        draft.refuse("lora_dropout", why="adapters of Duet have no dropout; 0 is the same in both")
    elif dropout:
        note = f"TRL drops {dropout:g} of the adapters' inputs by default; Duet has no such dropout"
        draft.change("lora_dropout", note=note)


def _processes(draft: Draft) -> tuple[int, str]:
    """Returns the number of processes and the key that says it."""
    if draft.facts.processes:
        return draft.facts.processes, ""
    for key in ("num_processes", "nproc_per_node"):
        if count := _launched(draft, key) or _count(draft.given.words.get(key)):
            nodes = _launched(draft, "nnodes") if key == "nproc_per_node" else 1
            return count * (nodes or 1), key
    draft.task(
        "prompts_per_step counts one process; if TRL ran with N, import again with --processes N"
    )
    return 1, ""


def _launched(draft: Draft, flag: str) -> int:
    """Returns the number that the command before the program gives, 0 without one."""
    return _count(draft.given.launcher.get(flag))


def _count(given: GivenValue | None) -> int:
    text = "" if given is None else str(given.value)
    return int(text) if text.isdecimal() else 0


def _batches(draft: Draft, trainer: str) -> int:
    """Writes prompts_per_step and updates_per_step. Returns the updates of a step."""
    device = draft.integer("per_device_train_batch_size") or 8
    sums = draft.integer("gradient_accumulation_steps") or 1
    processes, processes_key = _processes(draft)
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps", processes_key]
    keys = [key for key in keys if key]
    if trainer not in ("grpo", "rloo"):
        note = f"{device} x {sums} accumulated x {processes} processes"
        draft.put(f"{STAGE}.prompts_per_step", device * sums * processes, *keys, note=note)
        if trainer == "distillation":
            draft.put(f"{STAGE}.samples_per_prompt", 1, note="TRL draws one completion of a prompt")
        return 1
    samples = draft.integer("num_generations") or 8
    per_generation = draft.integer("steps_per_generation") or sums
    batch = draft.integer("generation_batch_size")
    if batch is not None:
        keys.append("generation_batch_size")
        per_generation = shared.exact_quotient(batch, device * processes) or 0
    else:
        keys.append("steps_per_generation")
        batch = device * processes * per_generation
    updates = shared.exact_quotient(per_generation, sums)
    if (
        updates is None
        and per_generation
        and (joined := shared.exact_quotient(sums, per_generation))
    ):
        batch, updates = batch * joined, 1
    prompts = shared.exact_quotient(batch, samples)
    if prompts is None or updates is None:
        draft.refuse(
            *keys,
            why=f"{device} per device x {processes} processes, {sums} accumulated, {batch} "
            f"completions in groups of {samples} are no integer number of groups and updates",
        )
        prompts = max(1, batch // samples)
        updates = 1
    text = f"{batch} completions in groups of {samples}"
    draft.put(f"{STAGE}.prompts_per_step", prompts, *keys, "num_generations", note=text)
    draft.put(f"{STAGE}.samples_per_prompt", samples, "num_generations")
    text = f"batches: {per_generation}, of which an update accumulates {sums}"
    draft.put(f"{STAGE}.updates_per_step", updates, *keys, note=text)
    return updates


def _steps(draft: Draft, updates: int) -> None:
    shared.put_steps(draft, "max_steps", "num_train_epochs", per_step=updates)


def _data(draft: Draft, trainer: str) -> None:
    mixture = draft.value("datasets")
    if isinstance(mixture, list) and mixture:
        _mixture(draft, mixture)
    else:
        split = draft.text("dataset_train_split") if draft.has("dataset_train_split") else ""
        shared.put_data(draft, draft.texts("dataset_name"), "dataset_name")
        if split:
            draft.put("data.split", split, "dataset_train_split")
        if subset := draft.text("dataset_config") or ", ".join(draft.texts("dataset_configs")):
            draft.put("data.subset", subset, "dataset_config", "dataset_configs")
    if trainer in ("sft", "dpo", "kto", "reward"):
        _length_of_rows(draft)
    if draft.has("dataset_text_field"):
        draft.task(
            "data: Duet reads rows of prompt and completion, or of messages; make a column of plain "
            "text the `completion` of an empty `prompt`"
        )
        draft.change("dataset_text_field", note="rows of plain text need another form")


def _mixture(draft: Draft, mixture: list[JsonValue]) -> None:
    entries = []
    names = {"path": "path", "name": "subset", "split": "split", "fraction": "weight"}
    for entry in mixture:
        if not isinstance(entry, dict) or not entry.get("path"):
            draft.refuse("datasets", why="each entry needs a path")
            continue
        if unknown := set(entry) - set(names) - {"columns"}:
            draft.refuse("datasets", why=f"Duet reads no {', '.join(sorted(unknown))} of an entry")
        entries.append({ours: entry[key] for key, ours in names.items() if entry.get(key)})
    if entries:
        draft.put("data", entries, "datasets")


def _length_of_rows(draft: Draft) -> None:
    key = next(
        (k for k in ("max_length", "max_seq_length") if k in draft.given.words), "max_length"
    )
    length = draft.integer(key)
    if length is None:
        note = "TRL has no limit here; longer rows than max_length are refused"
        draft.change(key, note=note)
        return
    draft.put("max_length", length, key)
    if draft.text("truncation_mode") in ("", "keep_start"):
        note = "TRL cuts the end of rows that are too long"
        draft.put("data.too_long", "truncate", "truncation_mode", note=note)
    else:
        why = "Duet cuts the end of a row, not its start"
        draft.refuse("truncation_mode", why=why)


def _run(draft: Draft, updates: int) -> None:
    if (every := _every(draft, "save_strategy", "save_steps", updates)) is not None:
        draft.put("run.checkpoint_every", every, "save_steps", "save_strategy")
    trackers = draft.texts("report_to")
    if "all" in trackers:
        trackers = ["wandb", "tensorboard"]
    shared.put_trackers(draft, trackers, "report_to", name="run_name")
    draft.same("report_to", "run_name", note="no tracker")


def _every(draft: Draft, strategy: str, steps: str, updates: int) -> int | None:
    """Returns the steps of Duet between two events: 0 for none, None if nothing is to be written."""
    kind = draft.text(strategy)
    if kind in ("no", "False"):
        draft.same(steps, note=f"{strategy} is no")
        return 0
    if kind == "epoch":
        note = "once an epoch in TRL: set a number of steps"
        draft.change(strategy, note=note)
        return None
    if kind in ("steps", "best", "") and draft.has(steps):
        number = draft.number(steps) or 0
        if 0 < number < 1:
            draft.change(steps, note="a share of all steps: set a number of steps")
            return None
        return max(1, round(number / updates))
    return None


def _evaluation(draft: Draft, trainer: str, updates: int) -> None:
    key = "eval_strategy" if draft.has("eval_strategy") else "evaluation_strategy"
    strategy = draft.text(key)
    keys = (key, "eval_steps", "dataset_test_split")
    if strategy in ("", "no", "False"):
        draft.same(*keys, note="no evaluation")
        draft.leave(*_BEST, why="without an evaluation no checkpoint is the best")
        return
    every = _every(draft, key, "eval_steps", updates)
    note = ""
    if every is None and strategy == "steps" and not draft.has("eval_steps"):
        every = max(1, round((draft.number("logging_steps") or _LOGGING_STEPS) / updates))
        note = "as often as logging_steps"
    name = draft.texts("dataset_name")
    if not name:
        why = "the file names no dataset: write `held_out` or `evaluation`"
        draft.leave(*keys, *_BEST, why=why)
        return
    split = draft.text("dataset_test_split") or "test"
    data: dict[str, JsonValue] = {"path": name[0], "split": split}
    if draft.text("dataset_config"):
        data["subset"] = draft.text("dataset_config")
    if trainer in _SAMPLED:
        section = "evaluation"
        measured = "accuracy of completions, where TRL logs loss and rewards"
        draft.put(f"{section}.data", data, *keys, note=measured, changed=True)
        samples = draft.integer("num_generations_eval")
        if samples:
            draft.put(f"{section}.samples", samples, "num_generations_eval")
    else:
        section = f"{STAGE}.held_out"
        draft.put(f"{section}.data", {**data, **shared.form_of_rows(draft)}, *keys)
    draft.put(f"{section}.every", every or 0, "eval_steps", key, note=note)
    _best(draft, trainer)


def _best(draft: Draft, trainer: str) -> None:
    metric = draft.text("metric_for_best_model") or "loss"
    if not draft.truth("load_best_model_at_end"):
        draft.same(*_BEST, note="the last weights count")
        return
    if trainer in _SAMPLED or metric not in ("loss", "eval_loss"):
        draft.leave(*_BEST, why=f"`{metric}`: name a metric of docs/metrics.md in stages.0.best")
        return
    draft.put(f"{STAGE}.best.metric", "held_out/loss", *_BEST)
    mode = "max" if draft.truth("greater_is_better") else "min"
    draft.put(f"{STAGE}.best.mode", mode, "greater_is_better")


def _optimizer(draft: Draft, updates: int) -> None:
    name = draft.text("optim")
    ours = next((o for o, pattern in _OPTIMIZERS.items() if re.fullmatch(pattern, name)), "")
    if not ours:
        draft.refuse("optim", why=f"Duet has no optimizer `{name}`; `optimizer.name` has its own")
    elif "bit" in name:
        note = "moments are not quantised"
        draft.put(f"{OPTIMIZER}.name", ours, "optim", note=note, changed=True)
    else:
        draft.put(f"{OPTIMIZER}.name", ours, "optim")
    if ours in ("sgd", "adafactor"):
        keys = ("adam_beta1", "adam_beta2", "adam_epsilon")
        draft.same(*keys, note=f"{ours} does not read it")
        if ours == "sgd":
            draft.put(f"{OPTIMIZER}.momentum", 0.0, "optim", note="SGD of PyTorch by default")
    else:
        _moments(draft, ours)
    _schedule(draft)
    kind = draft.text("lr_scheduler_type")
    if kind == "constant":
        draft.same("warmup_steps", "warmup_ratio", note="a constant schedule has no warm-up")
    else:
        shared.put_warmup(draft, steps="warmup_steps", ratio="warmup_ratio", per_step=updates)
    clip = draft.number("max_grad_norm")
    if clip == 0:
        draft.put(f"{OPTIMIZER}.clip_norm", None, "max_grad_norm", note="0: none")


def _moments(draft: Draft, ours: str) -> None:
    for key, option in (("adam_beta1", "beta1"), ("adam_beta2", "beta2")):
        if (value := draft.number(key)) is not None:
            draft.put(f"{OPTIMIZER}.{option}", value, key)
    if ours == "adamw" and (eps := draft.number("adam_epsilon")) is not None:
        draft.put(f"{OPTIMIZER}.eps", eps, "adam_epsilon")
    draft.same("adam_epsilon", note=f"{ours} does not read it")


def _schedule(draft: Draft) -> None:
    kind = draft.text("lr_scheduler_type")
    options = draft.value("lr_scheduler_kwargs") or {}
    options = options if isinstance(options, dict) else {"?": options}
    if kind not in _SCHEDULES:
        draft.refuse("lr_scheduler_type", why="Duet has constant, linear and cosine")
        return
    final = None
    if kind == "cosine_with_min_lr":
        least = {key: value for key, value in options.items() if key.startswith("min_lr")}
        final = _least_share(draft, least)
        options = {key: value for key, value in options.items() if not key.startswith("min_lr")}
    if options.get("num_cycles") == 0.5:
        options = {key: value for key, value in options.items() if key != "num_cycles"}
    if options:
        draft.refuse("lr_scheduler_kwargs", why=f"Duet has no {', '.join(options)} of a schedule")
    shared.put_schedule(draft, _SCHEDULES[kind], "lr_scheduler_type", final, "lr_scheduler_kwargs")
    draft.same("lr_scheduler_kwargs", note="no further options")


def _least_share(draft: Draft, options: JsonObject) -> float:
    """Returns the share of the learning rate at which a cosine ends."""
    numbers = {key: value for key, value in options.items() if isinstance(value, int | float)}
    if len(numbers) < len(options):
        draft.refuse("lr_scheduler_kwargs", why="min_lr and min_lr_rate are numbers")
    rate = draft.number("learning_rate") or 1.0
    return numbers.get("min_lr_rate") or numbers.get("min_lr", 0.0) / rate


def _sft(draft: Draft, updates: int) -> None:
    loss = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}.get(draft.text("loss_type"))
    if loss is None:
        draft.refuse("loss_type", why="Duet has nll and dft")
    else:
        draft.put(f"{ALGORITHM}.name", "sft")
        draft.put(f"{ALGORITHM}.loss_type", loss, "loss_type")
    _trained_tokens(draft)
    if draft.truth("packing"):
        draft.change(
            "packing",
            note="TRL counts packed rows as a batch, Duet demonstrations, which it always packs: "
            "multiply prompts_per_step by the demonstrations in a row",
        )
    draft.same("packing", note="Duet packs rows, and the batch counts demonstrations")


def _trained_tokens(draft: Draft) -> None:
    keys = ("assistant_only_loss", "completion_only_loss")
    if draft.truth("assistant_only_loss") or draft.truth("completion_only_loss"):
        draft.put(f"{ALGORITHM}.train_on", "assistant", *keys)
    elif draft.has("completion_only_loss"):
        draft.put(f"{ALGORITHM}.train_on", "all", *keys)
    else:
        draft.put(
            f"{ALGORITHM}.train_on",
            "all",
            *keys,
            note="TRL trains on all tokens of `messages`; for rows of prompt and "
            "completion, of which it trains on the completion, write `assistant`",
            changed=True,
        )


def _dpo(draft: Draft, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "dpo")
    losses = draft.texts("loss_type") or ["sigmoid"]
    weights = draft.value("loss_weights")
    if not isinstance(weights, list):
        weights = [1.0] * len(losses) if weights is None else [weights]
    main = [loss for loss in losses if loss != "sft"]
    if len(main) != 1 or main[0] not in DPO_LOSSES or len(weights) != len(losses):
        draft.refuse("loss_type", "loss_weights", why=f"Duet has one of {', '.join(DPO_LOSSES)}")
    elif weights[losses.index(main[0])] != 1:
        draft.refuse("loss_weights", why="the weight of the first loss is 1 in Duet")
    else:
        draft.put(f"{ALGORITHM}.loss_type", main[0], "loss_type")
        if "sft" in losses:
            weight = weights[losses.index("sft")]
            draft.put(f"{ALGORITHM}.nll_coef", weight, "loss_type", "loss_weights")
        draft.same("loss_weights")
    if draft.truth("sync_ref_model"):
        draft.refuse("sync_ref_model", why="the reference model of DPO stays as it is")


def _kto(draft: Draft, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "kto")
    if draft.text("loss_type") not in LOSSES["kto"]:
        draft.refuse("loss_type", why="Duet has kto and apo_zero_unpaired")
    else:
        draft.put(f"{ALGORITHM}.loss_type", draft.text("loss_type"), "loss_type")
    if draft.truth("sync_ref_model"):
        draft.refuse("sync_ref_model", why="the reference model of KTO stays as it is")


def _reward(draft: Draft, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "reward_model")


def _grpo(draft: Draft, updates: int) -> None:
    _sampling(draft)
    _grpo_loss(draft)
    _grpo_penalties(draft)
    _moving_reference(draft, updates)
    _correction(draft)
    _reward_functions(draft)


def _sampling(draft: Draft) -> None:
    shared.put_lengths(draft, "max_completion_length", "max_prompt_length", "vllm_max_model_length")
    options = draft.value("generation_kwargs")
    if options and options not in ({}, "{}"):
        names = ", ".join(options) if isinstance(options, dict) else str(options)
        draft.refuse("generation_kwargs", why=f"write them as keys of stages.0.sampling: {names}")
    if draft.value("chat_template_kwargs"):
        variables = draft.value("chat_template_kwargs")
        draft.put("tokenizer.chat_template", {"variables": variables}, "chat_template_kwargs")


def _grpo_loss(draft: Draft) -> None:
    loss = draft.text("loss_type")
    level = draft.text("importance_sampling_level")
    names = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo", "luspo": "luspo"}
    aggregations = {"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant"}
    aggregations |= {
        "cispo": "token",
        "vespo": "token",
        "sapo": "sequence",
        "luspo": "sequence_sum",
    }
    if loss not in aggregations:
        draft.refuse("loss_type", why=f"Duet has {', '.join(aggregations)} of TRL")
        return
    draft.put(f"{ALGORITHM}.name", names.get(loss, "grpo"), "loss_type")
    local = "over the update, where TRL takes the mean of each device's rows"
    note = local if loss == "bnpo" else ""
    draft.put(
        f"{ALGORITHM}.aggregation", aggregations[loss], "loss_type", note=note, changed=bool(note)
    )
    if loss not in names or loss == "luspo":
        _ratio(draft, level)
    elif level == "token":
        draft.same("importance_sampling_level")
    else:
        draft.refuse("importance_sampling_level", why=f"{loss} has the ratio of each token")
    _clips(draft, loss)


def _ratio(draft: Draft, level: str) -> None:
    if level in ("token", "sequence"):
        draft.put(f"{ALGORITHM}.ratio", level, "importance_sampling_level")
    else:
        draft.refuse("importance_sampling_level", why="Duet has token and sequence")


def _clips(draft: Draft, loss: str) -> None:
    low = draft.number("epsilon")
    high = draft.number("epsilon_high")
    keys = ("epsilon", "epsilon_high", "delta")
    if loss == "cispo":
        _cispo(draft, "epsilon" if high is None else "epsilon_high")
    elif loss in ("sapo", "vespo"):
        draft.same(*keys, note=f"{loss} does not clip")
        _weights(draft, loss)
    else:
        draft.put(f"{ALGORITHM}.epsilon", low, "epsilon")
        if high is not None:
            draft.put(f"{ALGORITHM}.epsilon_high", high, "epsilon_high")
        elif loss == "luspo":
            draft.put(f"{ALGORITHM}.epsilon_high", low, "epsilon")
        if (delta := draft.number("delta")) is not None:
            draft.put(f"{ALGORITHM}.delta", delta, "delta")
        draft.same("epsilon_high", "delta", note="no value")


def _cispo(draft: Draft, key: str) -> None:
    """Writes the bounds of cispo. key: the one that sets the upper bound."""
    draft.put(f"{ALGORITHM}.epsilon", 1.0, note="no lower bound in TRL")
    bound = draft.number(key)
    if bound is not None:
        draft.put(
            f"{ALGORITHM}.epsilon_high",
            round(bound - 1, 12),
            key,
            note=f"the ratio is at most 1 + epsilon_high; TRL names the bound itself, {bound:g}",
            changed=True,
        )
    elif draft.fate_of(key) is None:
        draft.refuse(key, why="cispo needs a number")
    draft.same("epsilon", "epsilon_high", note="cispo has no lower bound")
    draft.same("delta", note="cispo has no delta")


def _weights(draft: Draft, loss: str) -> None:
    options = {
        "sapo": {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
        "vespo": {f"vespo_{name}": name for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")},
    }
    for key, option in options[loss].items():
        draft.put(f"{ALGORITHM}.{option}", draft.number(key), key)


def _grpo_penalties(draft: Draft) -> None:
    beta = draft.number("beta") or 0.0
    draft.put(f"{ALGORITHM}.kl_coef", beta, "beta")
    unbiased = draft.truth("use_bias_correction_kl")
    if beta:
        kind = "unbiased" if unbiased else "k3"
        draft.put(f"{ALGORITHM}.kl", kind, "use_bias_correction_kl")
    draft.same("use_bias_correction_kl", note="beta is 0: no KL term")
    scale = draft.text("scale_rewards").lower()
    names = {"true": "group", "false": "none", "group": "group", "batch": "batch", "none": "none"}
    if scale in names:
        draft.put(f"{ALGORITHM}.scale", names[scale], "scale_rewards")
    else:
        draft.refuse("scale_rewards", why="Duet has group, batch and none")
    combine = draft.text("multi_objective_aggregation")
    if combine == "normalize_then_sum":
        draft.put(f"{ALGORITHM}.combine", combine, "multi_objective_aggregation")
    elif combine == "sum_then_normalize":
        draft.same("multi_objective_aggregation")
    else:
        why = "Duet has sum_then_normalize and normalize_then_sum"
        draft.refuse("multi_objective_aggregation", why=why)
    share = draft.number("top_entropy_quantile")
    if share is not None and share < 1:
        draft.put(f"{ALGORITHM}.top_entropy", share, "top_entropy_quantile")
    draft.same("top_entropy_quantile")
    _entropy(draft)


def _entropy(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.entropy_coef", draft.number("entropy_coef") or 0.0, "entropy_coef")
    keys = ("entropy_target", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min")
    if not draft.truth("use_adaptive_entropy"):
        draft.same("use_adaptive_entropy", *keys, note="entropy_coef is constant")
        return
    options = ("entropy_target", "entropy_step", "entropy_coef_max")
    for key, option in zip(keys, options, strict=False):
        draft.put(f"{ALGORITHM}.{option}", draft.number(key), key, "use_adaptive_entropy")
    if draft.number("entropy_coef_min"):
        draft.refuse("entropy_coef_min", why="the least weight is 0 in Duet")
    draft.same("entropy_coef_min")


def _moving_reference(draft: Draft, updates: int) -> None:
    keys = ("ref_model_sync_steps", "sync_ref_model", "ref_model_mixup_alpha")
    if not draft.truth("sync_ref_model") or not draft.number("beta"):
        draft.same(*keys, note="the reference model stays, or there is none")
        return
    every = max(1, round((draft.integer("ref_model_sync_steps") or 512) / updates))
    draft.put(f"{ALGORITHM}.reference_every", every, *keys[:2])
    mix = draft.number("ref_model_mixup_alpha")
    draft.put(f"{ALGORITHM}.reference_mix", mix, "ref_model_mixup_alpha", "sync_ref_model")


def _correction(draft: Draft) -> None:
    keys = [
        f"vllm_importance_sampling_{name}"
        for name in ("correction", "mode", "clip_max", "clip_min", "cap")
    ]
    correction, mode, most, least, cap = keys
    if not draft.truth("use_vllm") or not draft.truth(correction):
        draft.same(*keys, note="TRL corrects only what vLLM sampled")
        return
    draft.put(f"{ALGORITHM}.correction", draft.text(mode), mode, correction)
    upper = cap if draft.has(cap) else most
    if (value := draft.number(upper)) is not None:
        draft.put(f"{ALGORITHM}.correction_max", value, upper)
    if (value := draft.number(least)) is not None:
        draft.put(f"{ALGORITHM}.correction_min", value, least)
    draft.same(*keys)


def _reward_functions(draft: Draft) -> None:
    functions: list[dict[str, JsonValue]] = []
    if model := draft.text("reward_model_name_or_path"):
        functions.append({"name": "reward_model", "options": {"source": model}})
    for name in draft.texts("reward_funcs"):
        functions.append(dict(_REWARDS.get(name) or {"name": shared.dotted_function(name)}))
    weights = draft.value("reward_weights")
    weights = weights if isinstance(weights, list) else [] if weights is None else [weights]
    if functions and weights and len(weights) != len(functions):
        why = f"it has {len(weights)} weights for {len(functions)} reward functions"
        draft.refuse("reward_weights", why=why)
    elif functions:
        for function, weight in zip(functions, weights, strict=False):
            function["weight"] = weight
    elif weights:
        draft.task(f"rewards.functions: the weights of the functions are {weights}, in their order")
        draft.change("reward_weights", note="write them as the weight of each reward function")
    shared.put_rewards(
        draft, functions, "reward_funcs", "reward_model_name_or_path", "reward_weights"
    )
    if any(name in _REWARDS for name in draft.texts("reward_funcs")):
        note = "rewards of Duet with the same purpose, on the column `answer` (TRL: `solution`)"
        draft.change("reward_funcs", note=note)
        draft.task(
            "rewards of Duet compare with the column `answer`; rename the column `solution`, or "
            "write your own function with an argument `solution`"
        )


def _rloo(draft: Draft, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "rloo")
    _sampling(draft)
    draft.put(f"{ALGORITHM}.kl_reward_coef", draft.number("beta") or 0.0, "beta")
    draft.put(f"{ALGORITHM}.epsilon", draft.number("epsilon"), "epsilon")
    if (high := draft.number("epsilon_high")) is not None:
        draft.put(f"{ALGORITHM}.epsilon_high", high, "epsilon_high")
    _moving_reference(draft, updates)
    _reward_functions(draft)


def _distillation(draft: Draft, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "gkd")
    _sampling(draft)
    beta = draft.number("beta")
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta if beta is not None else 1.0, "jsd")
    draft.put(f"{ALGORITHM}.divergence", kind, "beta")
    if kind == "jsd":
        draft.put(f"{ALGORITHM}.beta", beta, "beta")
    source = draft.text("teacher_model_name_or_path")
    revision = draft.text("teacher_model_revision")
    if source and revision:
        source = f"hf://{source}@{revision}"
    keys = ("teacher_model_name_or_path", "teacher_model_revision")
    shared.put_source(draft, "teacher", source, *keys)


_ALGORITHMS = {
    "sft": _sft,
    "dpo": _dpo,
    "grpo": _grpo,
    "kto": _kto,
    "reward": _reward,
    "rloo": _rloo,
    "distillation": _distillation,
}
