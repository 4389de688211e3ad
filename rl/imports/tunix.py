"""Configurations of Tunix: its YAML files, and overrides in its scripts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from policy.json_types import JsonValue
from rl.errors import ConfigError
from rl.imports import shared
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, Syntax
from rl.imports.rules import Table
from rl.imports.shared import ALGORITHM, OPTIMIZER, SAMPLING, STAGE
from rl.imports.tables.tunix import TABLE

NAME = "Tunix 0.1"
SYNTAX = Syntax(
    framework="Tunix",
    program=re.compile(r"(?:^|[/.])((?:\w+_)?(?:grpo|ppo|peft)(?:_\w+)?_main)(?:\.py)?$"),
    form="dotted",
    files=("override_config_file",),
    file=re.compile(r"\.ya?ml$"),
    shipped=frozenset({"base_config.yaml", "base_agentic_config.yaml"}),
)
TUNIX_REWARD = "rewards.foreign.tunix:reward_fn"
_AGGREGATIONS = {
    "token-mean": "token",
    "sequence-mean-token-mean": "sequence",
    "sequence-mean-token-scale": "constant",
    "seq-mean-token-sum": "sequence_sum",
}
_KL = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
_AXES = {"fsdp": "fsdp", "tp": "tensor", "dp": "data", "data": "data", "sp": "context"}
_AXES |= {"ep": "expert", "expert": "expert", "tensor": "tensor", "context": "context"}
_MODULES = {
    "q_einsum": ["q_proj"],
    "kv_einsum": ["k_proj", "v_proj"],
    "qkv_einsum": ["q_proj", "k_proj", "v_proj"],
    "attn_vec_einsum": ["o_proj"],
}
_SHIPPED_REWARDS = {
    "gsm8k.py": [
        "match_format_exactly",
        "match_format_approximately",
        "check_answer",
        "check_numbers",
    ],
    "simple_math.py": ["check_format", "check_answer"],
    "gsm8k_verl.py": ["compute_score"],
}
_GSM8K = {"path": "openai/gsm8k", "subset": "main"}


def table_of(given: Given, facts: Facts) -> Table:
    """Returns the rules of all trainers of Tunix."""
    return TABLE


def convert(draft: Draft) -> None:
    """Gives each word of a configuration of Tunix its fate."""
    mode = mode_of(draft.given)
    draft.same("training_mode", note=f"read as {mode}")
    _model(draft)
    _mesh(draft)
    if mode == "sft":
        _sft(draft)
    else:
        _reinforce(draft, mode)
    draft.rest(skip=_unread(draft, mode))


def mode_of(given: Given) -> str:
    """Returns grpo, agentic_grpo, ppo, agentic_ppo or sft."""
    word = given.words.get("training_mode")
    if word is not None and isinstance(word.value, str):
        return word.value
    if given.program:
        kinds = ("agentic_ppo", "agentic_grpo", "ppo", "grpo")
        return next((kind for kind in kinds if kind in given.program), "sft")
    sections = {key.partition(".")[0] for key in given.words}
    for mode in ("agentic_grpo", "agentic_ppo", "ppo", "grpo"):
        if f"{mode}_config" in sections:
            return mode
    return "grpo" if sections & {"rl_training_config", "rollout_config"} else "sft"


def _unread(draft: Draft, mode: str) -> list[str]:
    """Returns the keys whose defaults do not count in a mode."""
    other = "rl_training_config" if mode == "sft" else "training_config"
    prefixes = (f"{other}.", "ppo_config.entropy", "agentic_ppo_config.entropy")
    keys = [key for key in TABLE if key.startswith(prefixes)]
    return keys + [key for key in TABLE if mode == "sft" and key.startswith("rollout_config.")]


def _key(draft: Draft, name: str) -> str:
    """Returns the key of the policy's model: of actor_model_config, else of model_config."""
    actor = f"actor_model_config.{name}"
    return actor if draft.has(actor) else f"model_config.{name}"


def _model(draft: Draft) -> None:
    key, kind, path = (_key(draft, name) for name in ("model_id", "model_source", "model_path"))
    name = _key(draft, "model_name")
    source = draft.text(kind)
    if draft.text(key):
        draft.put("model.source", draft.text(key), key)
        if source not in ("", "huggingface"):
            note = f"the weights of the Hugging Face hub, where Tunix reads those of {source}"
            draft.change(kind, note=note)
    elif draft.text(path):
        draft.put("model.source", draft.text(path), path)
        draft.task("model.source: name a directory of Hugging Face, or a model of its hub")
    else:
        shared.put_source(draft, "model", "")
    draft.same(kind, path, name, note="model_id names the model")
    types = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    for theirs, ours in (("dtype", "dtype"), ("load_dtype", "param_dtype")):
        word = _key(draft, theirs)
        if draft.text(word) in types:
            draft.put(f"model.{ours}", types[draft.text(word)], word)
        elif draft.text(word):
            draft.refuse(word, why="Duet has bfloat16 and float32")
    _adapter(draft)
    tokenizer = draft.text("tokenizer_config.tokenizer_path")
    if tokenizer and tokenizer != draft.text(key):
        if draft.text("tokenizer_config.tokenizer_type") == "huggingface":
            draft.put("tokenizer.source", tokenizer, "tokenizer_config.tokenizer_path")
        else:
            note = "the tokenizer of the model's directory, where Tunix reads a file of its own"
            draft.change("tokenizer_config.tokenizer_path", note=note)
    keys = ("tokenizer_config.tokenizer_path", "tokenizer_config.tokenizer_type")
    draft.same(*keys, note="the tokenizer of the model's directory")
    seed = "seed" if draft.has("seed") else _key(draft, "rng_seed")
    draft.put("seed", draft.integer(seed), seed)
    seeds = ("actor_model_config.rng_seed", "model_config.rng_seed")
    draft.same(*seeds, note=f"{seed} is the seed")


def _adapter(draft: Draft) -> None:
    keys = [_key(draft, f"lora_config.{name}") for name in ("rank", "alpha", "module_path")]
    rank, alpha, modules = keys
    if not draft.has(rank):
        draft.same(*keys, _key(draft, "lora_config"), note="no adapter")
        return
    shared.put_adapter(draft, rank, alpha, "")
    names = [part for part in re.split(r"[|]", draft.text(modules)) if part]
    targets: list[str] = []
    for name in names:
        bare = name.lstrip(".*").strip("()")
        targets += [each for each in _MODULES.get(bare, [bare]) if each not in targets]
    if targets:
        renamed = any(name.lstrip(".*") in _MODULES for name in names)
        note = "names of Hugging Face" if renamed else ""
        draft.put("model.adapter.targets", targets, modules, note=note)
    kind = _key(draft, "lora_config.weight_qtype")
    tile = _key(draft, "lora_config.tile_size")
    types = {"nf4": "nf4", "int8": "int8", "int4": "int4", "float8_e4m3fn": "fp8"}
    if draft.text(kind) in types:
        draft.put("model.base_weights", types[draft.text(kind)], kind)
        if draft.integer(tile):
            draft.put("model.base_block", draft.integer(tile), tile)
    elif draft.text(kind):
        draft.refuse(kind, why=f"Duet has {', '.join(types)}")
    draft.same(kind, tile, note="the base is not quantised")


def _mesh(draft: Draft) -> None:
    for section in ("actor_model_config", "model_config"):
        shape = f"{section}.mesh.shape"
        names = f"{section}.mesh.axis_names"
        if not draft.has(shape):
            continue
        sizes = [int(size) for size in re.findall(r"-?\d+", draft.text(shape))]
        axes = [_AXES.get(name, "") for name in re.findall(r"[a-z_]+", draft.text(names))]
        if len(sizes) == len(axes) and all(axes):
            if "mesh.fsdp" not in draft.values:
                for axis, size in {"fsdp": 1, **dict(zip(axes, sizes, strict=True))}.items():
                    draft.put(f"mesh.{axis}", size, shape, names)
            draft.same(shape, names, note="the mesh of the policy")
        else:
            draft.leave(shape, names, why="`mesh` has the axes data, fsdp, tensor, expert, context")
        draft.same(f"{section}.mesh")
    draft.same("actor_model_config.mesh", "model_config.mesh", note="no mesh")


def _reinforce(draft: Draft, mode: str) -> None:
    section = f"{mode}_config"
    if mode not in ("grpo", "agentic_grpo", "ppo", "agentic_ppo"):
        raise ConfigError(f"training_mode {mode}: Duet has grpo, ppo and the agentic ones of Tunix")
    is_ppo = mode.endswith("ppo")
    training = "rl_training_config"
    updates = _batches(draft, section, training)
    _steps(draft, training)
    shared.put_lengths(
        draft, "rollout_config.total_generation_steps", "rollout_config.max_prompt_length"
    )
    top = "rollout_config.top_k"
    draft.put(f"{SAMPLING}.top_k", max(draft.integer(top) or 0, 0), top)
    _data(draft)
    _optimizer(draft, f"{training}.actor_optimizer_config", OPTIMIZER, updates)
    if is_ppo:
        _ppo(draft, section, updates)
    else:
        _grpo(draft, section)
    system = f"{section}.system_prompt"
    if draft.text(system):
        draft.put("data.system", draft.text(system), system)
    draft.same(system, note="no system message")
    _rewards(draft)
    _evaluation(draft, f"{training}.eval_every_n_steps")
    others = [
        key
        for key in draft.given.words
        if re.match(r"(agentic_)?(grpo|ppo)_config|(training|optimizer)_config", key)
        and not key.startswith(f"{section}.")
    ]
    draft.same(*others, note=f"Tunix reads {section} and {training}")


def _batches(draft: Draft, section: str, training: str) -> int:
    """Writes prompts_per_step and updates_per_step. Returns the updates of a step."""
    prompts = draft.integer("batch_size") or 1
    draft.put(f"{STAGE}.prompts_per_step", prompts, "batch_size")
    samples = f"{section}.num_generations"
    count = draft.integer(samples) or 1
    draft.put(f"{STAGE}.samples_per_prompt", count, samples)
    mini = f"{training}.mini_batch_size"
    if not draft.has(mini):
        mini = f"{section}.mini_batch_size"
    part = draft.integer(mini) or prompts
    updates = shared.exact_quotient(prompts, part)
    if updates is None:
        draft.refuse(mini, "batch_size", why=f"{prompts} prompts are no multiple of {part}")
        updates = 1
    note = f"{prompts} prompts in mini-batches of {part}"
    draft.put(f"{STAGE}.updates_per_step", updates, mini, "batch_size", note=note)
    sums = f"{training}.gradient_accumulation_steps"
    draft.same(sums, note="a mini-batch is one update")
    return updates


def _steps(draft: Draft, training: str) -> None:
    most = f"{training}.max_steps"
    batches = "num_batches"
    epochs = "num_train_epochs"
    share = "train_fraction"
    passes = draft.number(epochs) or 1
    fraction = draft.number(share) or 1.0
    if (steps := draft.integer(most)) and steps > 0:
        draft.put(f"{STAGE}.steps", steps, most)
        draft.same(batches, epochs, share, note=f"{most} sets the steps")
    elif (count := draft.integer(batches)) and count > 0:
        number = int(count * passes * fraction)
        note = f"{count} x {passes:g} x {fraction:g}"
        draft.put(f"{STAGE}.steps", number, batches, epochs, share, note=note)
    else:
        total = passes * fraction
        passes_number = int(total) if total == int(total) else total
        note = f"{share} holds rows out in Tunix" if fraction != 1 else ""
        draft.put(f"{STAGE}.epochs", passes_number, epochs, share, note=note, changed=bool(note))
    draft.same(most, batches, epochs, share)


def _data(draft: Draft) -> None:
    name = "dataset_name"
    train = "data_config.train_data_path"
    module = "data_module"
    folder = "data_directory"
    if draft.text(train):
        shared.put_data(draft, [draft.text(train)], train)
        draft.same(name, note="data_config names the rows")
    elif draft.text(name).lower() in ("gsm8k", "openai/gsm8k"):
        draft.put("data.path", _GSM8K["path"], name)
        draft.put("data.subset", _GSM8K["subset"], name)
        draft.put("data.columns.prompt", "question", name)
        draft.task(
            "data: Tunix puts instructions around the question, and takes the number after #### as "
            "the answer; write `data.system`, and rows whose column `answer` is the number alone"
        )
    else:
        shared.put_data(draft, draft.texts(name), name)
        draft.task("data: name the columns of the rows, or make a file of prompts and answers")
    if draft.text(module):
        draft.task(f"data: {draft.text(module)} is code; write its rows to a file")
        draft.change(module, note="code: Duet reads rows of a file or of the hub")
    draft.same(module, note="no code")
    if draft.text(folder):
        draft.leave(folder, why="data.path names the rows")
    draft.same(folder)
    prompt = "prompt_key"
    chat = "apply_chat_template_to_dataset"
    if draft.has(prompt):
        draft.put("data.columns.prompt", draft.text(prompt), prompt)
    draft.put("data.chat", True, chat, note="the chat template is applied")
    draft.same(chat, note="the chat template is applied in both")


def _optimizer(draft: Draft, section: str, target: str, updates: int) -> None:
    kind = f"{section}.opt_type"
    name = draft.text(kind).lower()
    if name not in ("adamw", "adam", "sgd", "lion", "adafactor"):
        draft.refuse(kind, why="Duet has adamw, sgd, lion and adafactor of optax")
        name = "adamw"
    draft.put(f"{target}.name", "adamw" if name == "adam" else name, kind)
    decay = f"{section}.weight_decay"
    if name in ("adamw", "lion"):
        draft.put(f"{target}.weight_decay", draft.number(decay), decay)
        for key, option in (("b1", "beta1"), ("b2", "beta2")):
            draft.put(f"{target}.{option}", draft.number(f"{section}.{key}"), f"{section}.{key}")
    if name == "adamw" and draft.has(f"{section}.eps"):
        draft.put(f"{target}.eps", draft.number(f"{section}.eps"), f"{section}.eps")
    if name == "sgd":
        momentum = draft.number(f"{section}.momentum") or 0.0
        draft.put(f"{target}.momentum", momentum, f"{section}.momentum")
    unread = ("b1", "b2", "eps", "momentum", "weight_decay")
    draft.same(*(f"{section}.{key}" for key in unread), note=f"{name} does not read it")
    clip = f"{section}.max_grad_norm"
    draft.put(f"{target}.clip_norm", draft.number(clip) or None, clip)
    _schedule(draft, section, target, updates)


def _schedule(draft: Draft, section: str, target: str, updates: int) -> None:
    names = ("schedule_type", "learning_rate", "value", "peak_value", "init_value", "end_value")
    kind, rate, value, peak, first, last = (f"{section}.{name}" for name in names)
    alpha = f"{section}.alpha"
    # schedule -> (key of the rate, schedule of Duet, key of the last rate, key of the first rate)
    schedules = {
        "": (rate, "constant", "", ""),
        "constant_schedule": (value, "constant", "", ""),
        "warmup_constant_schedule": (peak, "constant", "", first),
        "warmup_cosine_decay_schedule": (peak, "cosine", last, first),
        "cosine_decay_schedule": (first, "cosine", alpha, ""),
        "linear_schedule": (first, "linear", last, ""),
    }
    shape = draft.text(kind)
    if shape not in schedules:
        known = ", ".join(filter(None, schedules))
        draft.refuse(kind, why=f"Duet has {known} of optax")
        return
    used, ours, final, start = schedules[shape]
    if not draft.has(used) and draft.has(rate) and shape == "warmup_cosine_decay_schedule":
        note = "Tunix reads peak_value with this schedule"
        draft.put(f"{target}.learning_rate", draft.number(rate), rate, note=note, changed=True)
    else:
        draft.put(f"{target}.learning_rate", draft.number(used), used)
        if draft.has(rate):
            draft.same(rate, note=f"Tunix reads {used.rpartition('.')[2]}")
    draft.put(f"{target}.schedule", ours, kind)
    least = draft.number(final) if final else None
    most = draft.number(used)
    if least and most:
        share = least if final == alpha else round(least / most, 12)
        draft.put(f"{target}.final_fraction", share, final)
    if start and draft.number(start):
        draft.refuse(start, why="a warm-up starts at 0")
    _decay(draft, section, updates)
    steps = f"{section}.warmup_steps"
    ratio = f"{section}.warmup_ratio"
    if shape.startswith("warmup") and target == OPTIMIZER:
        shared.put_warmup(draft, steps=steps, ratio=ratio, per_step=updates)
    elif shape.startswith("warmup") and draft.integer(steps):
        draft.put(f"{target}.warmup_steps", draft.integer(steps), steps)
    draft.same(steps, ratio, note="no warm-up, or as the policy")
    draft.same(rate, value, peak, first, last, alpha, note=f"{shape or 'no schedule'}: not read")


def _decay(draft: Draft, section: str, updates: int) -> None:
    steps = draft.written_number(f"{STAGE}.steps")
    for name in ("decay_steps", "transition_steps"):
        key = f"{section}.{name}"
        number = draft.integer(key)
        if number and steps is not None and number != steps * updates:
            why = f"a schedule ends with its stage, after {steps * updates} updates"
            draft.refuse(key, why=why)
        draft.same(key, note="a schedule ends with its stage")


def _grpo(draft: Draft, section: str) -> None:
    estimator = f"{section}.advantage_estimator"
    name = {"grpo": "grpo", "rloo": "rloo"}.get(draft.text(estimator))
    if name is None:
        draft.refuse(estimator, why="Duet has grpo and rloo")
    draft.put(f"{ALGORITHM}.name", name or "grpo", estimator)
    loss = f"{section}.loss_algo"
    if draft.text(loss) == "gspo-token":
        draft.put(f"{ALGORITHM}.ratio", "sequence_token", loss)
    elif draft.text(loss) != "grpo":
        draft.refuse(loss, why="Duet has grpo and gspo-token")
    elif name == "rloo":
        draft.put(f"{ALGORITHM}.ratio", "token", loss)
    draft.same(loss)
    mode = f"{section}.loss_agg_mode"
    if (ours := _AGGREGATIONS.get(draft.text(mode))) is None:
        draft.refuse(mode, why=f"Duet has {', '.join(_AGGREGATIONS)} of Tunix")
    else:
        draft.put(f"{ALGORITHM}.aggregation", ours, mode)
    for key in ("epsilon", "epsilon_high"):
        if draft.number(f"{section}.{key}") is not None:
            draft.put(f"{ALGORITHM}.{key}", draft.number(f"{section}.{key}"), f"{section}.{key}")
    beta = f"{section}.beta"
    kind = f"{section}.kl_loss_mode"
    size = draft.number(beta) or 0.0
    draft.put(f"{ALGORITHM}.kl_coef", size, beta)
    _kl(draft, kind, size)
    _correction(draft, section)


def _kl(draft: Draft, kind: str, size: float) -> None:
    ours = _KL.get(draft.text(kind))
    if not size:
        draft.same(kind, note="no KL term")
    elif ours is None:
        draft.refuse(kind, why=f"Duet has {', '.join(_KL)} of Tunix")
    elif ours != "k1":
        draft.put(f"{ALGORITHM}.kl", ours, kind)
    elif draft.has(kind):
        draft.refuse(kind, why=shared.NO_K1)
    else:
        draft.put(
            f"{ALGORITHM}.kl", "k3", kind, note=f"Tunix takes `kl`: {shared.NO_K1}", changed=True
        )


def _correction(draft: Draft, section: str) -> None:
    level = f"{section}.sampler_is"
    limit = f"{section}.sampler_is_threshold"
    sampler = f"{section}.use_rollout_logps"
    if draft.text(level) == "token":
        draft.put(f"{ALGORITHM}.correction", "token_truncate", level)
        draft.put(f"{ALGORITHM}.correction_max", draft.number(limit), limit)
    elif draft.text(level):
        draft.refuse(level, why="Duet has token")
    elif draft.truth(sampler):
        draft.put(f"{ALGORITHM}.old_logp", "sampler", sampler)
    draft.same(level, limit, sampler, note="no correction")


def _ppo(draft: Draft, section: str, updates: int) -> None:
    draft.put(f"{ALGORITHM}.name", "ppo")
    for key, option in (
        ("gamma", "gamma"),
        ("gae_lambda", "lam"),
        ("clip_range_value", "value_clip"),
    ):
        draft.put(f"{ALGORITHM}.{option}", draft.number(f"{section}.{key}"), f"{section}.{key}")
    both, low, high = (f"{section}.{name}" for name in ("epsilon", "epsilon_low", "epsilon_high"))
    first = low if draft.has(low) else both
    draft.put(f"{ALGORITHM}.epsilon", draft.number(first), first)
    second = high if draft.has(high) else both if draft.has(low) else ""
    if second:
        draft.put(f"{ALGORITHM}.epsilon_high", draft.number(second), second)
    draft.same(both, low, high, note="epsilon_low and epsilon_high count")
    dual = f"{section}.epsilon_c"
    if draft.number(dual):
        draft.put(f"{ALGORITHM}.dual_clip", draft.number(dual), dual)
    beta = f"{section}.beta"
    kind = f"{section}.kl_method"
    draft.put(f"{ALGORITHM}.kl_reward_coef", draft.number(beta) or 0.0, beta)
    if not draft.number(beta) or draft.text(kind) == "kl":
        draft.same(kind, note="the penalty of rewards is k1 (`kl`)")
    elif draft.has(kind):
        draft.refuse(kind, why="the penalty of rewards is k1 (`kl`)")
    else:
        note = "the penalty of rewards is k1, where Tunix takes k3: both have the same expectation"
        draft.change(kind, note=note)
    critic = "rl_training_config.critic_optimizer_config"
    if any(key.startswith(f"{critic}.") for key in draft.given.words):
        _optimizer(draft, critic, f"{STAGE}.critic", updates)
    draft.same(critic, note="the critic has defaults of Duet")


def _rewards(draft: Draft) -> None:
    key = "reward_functions"
    verl = "verl_compatible"
    functions: list[dict[str, JsonValue]] = []
    for file in draft.texts(key):
        names = ["compute_score"] if draft.truth(verl) else _functions(draft, key, file)
        if not names:
            draft.refuse(key, why=f"{file} is not here: which functions has it? All are summed")
        functions += [
            {"name": TUNIX_REWARD, "options": {"function": f"{file}:{name}"}} for name in names
        ]
    shared.put_rewards(draft, functions, key, verl, note="the functions of the files, summed")
    draft.same(key, verl)
    if functions:
        draft.task("rewards.functions: the files have to stand at these paths")


def _functions(draft: Draft, key: str, file: str) -> list[str]:
    """Returns the functions that Tunix calls: those of the file without `_` at the front. The file
    is parsed, not run."""
    path = Path(file).expanduser()
    if path.is_file() and path.suffix == ".py":
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            draft.refuse(key, why=f"{file} cannot be read: {error}")
            return []
        defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        return sorted(node.name for node in defined if not node.name.startswith("_"))
    is_shipped = "reward_fn/" in file
    return sorted(_SHIPPED_REWARDS.get(path.name, [])) if is_shipped else []


def _evaluation(draft: Draft, every: str) -> None:
    name = "dataset_name"
    path = "data_config.eval_data_path"
    count = "num_test_batches"
    data: dict[str, JsonValue] | None = None
    if draft.text(path):
        data = {"path": draft.text(path)}
    elif (rows := draft.values.get("data.path")) and rows.value == _GSM8K["path"]:
        data = {**_GSM8K, "split": "test", "columns": {"prompt": "question"}}
    if data is None or not (draft.has(every) or draft.has(path)):
        draft.same(every, count, note="no rows of an evaluation are named")
        return
    note = "accuracy of completions, where Tunix logs rewards"
    draft.put("evaluation.data", data | {"chat": True}, path, name, note=note, changed=True)
    draft.put("evaluation.every", max(draft.integer(every) or 0, 0), every)
    problems = (draft.integer(count) or 0) * (draft.integer("batch_size") or 1)
    if problems and draft.has(count):
        draft.put("evaluation.problems", problems, count, "batch_size")
    draft.same(count, note="evaluation.problems")


def _sft(draft: Draft) -> None:
    draft.put(f"{ALGORITHM}.name", "sft")
    training = "training_config"
    sums = "training_config.gradient_accumulation_steps"
    batch = draft.integer("batch_size") or 1
    count = draft.integer(sums) or 1
    note = f"{batch} x {count} accumulated" if count > 1 else ""
    draft.put(f"{STAGE}.prompts_per_step", batch * count, "batch_size", sums, note=note)
    draft.same(sums)
    _steps(draft, training)
    draft.put("max_length", draft.integer("max_target_length"), "max_target_length")
    note = "Tunix cuts rows that are too long"
    draft.put("data.too_long", "truncate", "max_target_length", note=note)
    shared.put_data(draft, draft.texts("dataset_name"), "dataset_name")
    draft.task(
        "data: Tunix makes demonstrations of the dataset in code; name the columns, or a file"
    )
    _optimizer(draft, "optimizer_config", OPTIMIZER, 1)
    every = f"{training}.eval_every_n_steps"
    draft.leave(every, why="the file names no held-out rows: write stages.0.held_out")
    others = [
        key
        for key in draft.given.words
        if re.match(r"(agentic_)?(grpo|ppo|rl_training|rollout)_config|reward_functions", key)
    ]
    keys = ("num_test_batches", "apply_chat_template_to_dataset", "verl_compatible")
    draft.same(*others, *keys, note="SFT does not read it")
