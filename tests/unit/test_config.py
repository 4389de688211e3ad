import dataclasses
import json
import math
import re
import time
from pathlib import Path

import pytest
import yaml
from oracles import write_weight_file

import rl.algorithms
from policy.huggingface import sources
from rewards.suggest import nearest, nearest_path
from rl import stages
from rl.commands.cli import main, train_main
from rl.config import files, foreign, keys, packaged, yaml_tree
from rl.config.schema import HOME
from rl.errors import ConfigError
from rl.run.load import load
from rl.stages import metric_names

GOOD = """\
model: {source: MODEL}
tokenizer: bytes
data: {task: arithmetic}
rewards: {functions: ["REWARD:score"]}
max_length: 64
stages:
  - algorithm: sft
    steps: 2
    optimizer:
      learning_rate: 1e-3
  - algorithm: grpo
    steps: 3
    sampling: {max_new_tokens: 8}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model, a reward and a good configuration."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
    )
    (tmp_path / "run.yml").write_text(GOOD.replace("MODEL", "model").replace("REWARD", "reward.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def edited(old: str, new: str, name: str = "bad.yml") -> str:
    text = Path("run.yml").read_text()
    assert old in text
    return write(name, text.replace(old, new))


def message(*paths, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths, overrides)
    return str(caught.value)


def test_the_good_configuration_loads_and_numbers_are_read_as_people_write_them(folder):
    config = load(["run.yml"], ["stages.1.optimizer.learning_rate=1e-5", "stages.0.steps=1e3"])
    assert config.model.source == "model"
    assert config.stages[0].optimizer.learning_rate == 1e-3
    assert config.stages[1].optimizer.learning_rate == 1e-5
    assert config.stages[0].steps == 1000 and type(config.stages[0].steps) is int


BAD = [
    # (old text, new text, line, path, further parts of the message)
    ("max_length: 64", "max_lenght: 64", 5, "max_lenght", ["unknown key", "nearest: max_length"]),
    ("    steps: 3", "    stepz: 3", 12, "stages.1.stepz", ["nearest: steps"]),
    (
        "learning_rate: 1e-3",
        "learning_rat: 1e-3",
        10,
        "stages.0.optimizer.learning_rat",
        ["nearest: learning_rate"],
    ),
    (
        "max_new_tokens: 8",
        "max_new_token: 8",
        13,
        "stages.1.sampling.max_new_token",
        ["nearest: max_new_tokens"],
    ),
    ("{source: MODEL}", "{source: model, dtyp: float32}", 1, "model.dtyp", ["nearest: dtype"]),
    ("{source: MODEL}", "{dtype: float32}", 1, "model.source", ["required"]),
    ("    steps: 3\n", "", 11, "stages.1", ["exactly one of `steps` and `epochs`"]),
    ("steps: 3", "steps: many", 12, "stages.1.steps", ["integer", "'many'"]),
    ("steps: 3", "steps: true", 12, "stages.1.steps", ["integer", "True"]),
    ("steps: 3", 'steps: "3"', 12, "stages.1.steps", ["integer"]),
    ("steps: 3", "steps: 2.5", 12, "stages.1.steps", ["2.5"]),
    ("steps: 3", "steps: -1", 12, "stages.1.steps", ["greater than or equal to 0", "-1"]),
    ("steps: 3", "steps:", 11, "stages.1", ["exactly one of `steps` and `epochs`"]),
    ("max_length: 64", "max_length: [64]", 5, "max_length", ["integer", "a list"]),
    (
        "max_length: 64",
        "platform: gpus",
        5,
        "platform",
        ["nearest: gpu", "valid: auto, cpu, gpu, tpu"],
    ),
    ("max_length: 64", "run: {tensorboard: on}", 5, "run.tensorboard", ["true or false", "'on'"]),
    ("max_length: 64", "run: [1]", 5, "run", ["mapping"]),
    (
        "max_length: 64",
        "max_length: 64\nmax_length: 65",
        6,
        "",
        ["`max_length` is written twice", "bad.yml:5"],
    ),
    (
        "algorithm: grpo",
        "algorithm: grop",
        11,
        "stages.1.algorithm",
        ["unknown algorithm", "nearest: grpo, "],
    ),
    (
        "algorithm: grpo",
        "algorithm: {name: grpo, epsilonn: 1}",
        11,
        "stages.1.algorithm.epsilonn",
        ["nearest: epsilon,"],
    ),
    (
        "algorithm: grpo",
        "algorithm: {name: grpo, epsilon: x}",
        11,
        "stages.1.algorithm.epsilon",
        ["number", "'x'"],
    ),
    (
        "algorithm: grpo",
        "algorithm: {name: grpo, scale: goup}",
        11,
        "stages.1.algorithm.scale",
        ["nearest: group"],
    ),
    ("task: arithmetic", "task: arithmetics", 3, "data.task", ["nearest: arithmetic"]),
    (
        "task: arithmetic",
        "task: arithmetic, options: {term: 2}",
        3,
        "data.options.term",
        ["nearest: terms"],
    ),
    (
        "task: arithmetic",
        "task: arithmetic, options: {terms: 1}",
        3,
        "data.options.terms",
        ["between 2 and 8"],
    ),
    ("task: arithmetic", "path: missing.jsonl", 3, "data.path", ["no such file"]),
    ("task: arithmetic", "path: model/data", 3, "data.path", ["no such file"]),
    ("task: arithmetic", "task: arithmetic, path: run.yml", 3, "data", ["exactly one of"]),
    ("REWARD:score", "missing.py:score", 4, "rewards.functions.0", ["missing.py"]),
    ("REWARD:score", "REWARD:scores", 4, "rewards.functions.0", ["score"]),
    ("REWARD:score", "exact_anser", 4, "rewards.functions.0", ["exact_anser"]),
    ("{source: MODEL}", "modell", 1, "model", ["no directory modell"]),
    ("tokenizer: bytes", "tokenizer: byte", 2, "tokenizer", ["nearest: bytes"]),
    ("tokenizer: bytes", "tokenizer: characters", 2, "tokenizer", ["alphabet"]),
    ("tokenizer: bytes\n", "", 1, "tokenizer", ["holds no tokenizer"]),
    ("data: {task: arithmetic}\n", "", 6, "stages.0.data", ["sft needs data"]),
    (
        'rewards: {functions: ["REWARD:score"]}\n',
        "",
        10,
        "stages.1.rewards",
        ["grpo needs rewards"],
    ),
    (
        "max_new_tokens: 8",
        "max_new_tokens: 64",
        13,
        "stages.1.sampling.max_new_tokens",
        ["max_length (64)"],
    ),
    ("steps: 3", "steps: 3\n    micro_batch: 257", 13, "stages.1.micro_batch", ["256"]),
    (
        "steps: 3",
        "steps: 3\n    router: {capacity_factor: 1.25}",
        13,
        "stages.1.router.capacity_factor",
        ["grpo compares the policy with a model that drops nothing", "sft stages only"],
    ),
    (
        "steps: 2",
        "steps: 2\n    router: {ragged_buffer_factor: 1.25}",
        9,
        "stages.0.router.ragged_buffer_factor",
        ["all_to_all", "the scheme is auto"],
    ),
    (
        "{source: MODEL}",
        "{source: MODEL, quantization: int4}",
        1,
        "model.quantization",
        ["valid: ", "fp8_full", "int8"],
    ),
    ("max_length: 64", "generator: {weights: int16}", 5, "generator.weights", ["valid: ", "int4"]),
    ("max_length: 64", "generator: {kv_cache: bf16}", 5, "generator.kv_cache", ["valid: ", "int8"]),
    (
        "max_length: 64",
        "generator: {exact: true, kv_cache: int8}",
        5,
        "generator.kv_cache",
        ["exact: true"],
    ),
    (
        "{source: MODEL}",
        "{source: MODEL, quantization: fp8_full}\ngenerator: {weights: int8}",
        2,
        "generator.weights",
        ["int8 weights", "fp8_full activations"],
    ),
    ("max_length: 64", "mesh: {data: -1}", 5, "mesh", ["only one axis"]),
    ("model}", "model, remat: minimum}", 1, "model.remat", ["minimum", "nearest: minimal"]),
    (
        "model}",
        "model, remat_tensors: {mlpwo: device}}",
        1,
        "model.remat_tensors",
        ["auto says itself", "remat: custom"],
    ),
    (
        "model}",
        "model, remat: custom, remat_tensors: {mlpw: device}}",
        1,
        "model.remat_tensors.mlpw",
        ["nearest: mlpwo"],
    ),
    (
        "model}",
        "model, remat: custom, remat_tensors: {mlpwo: disk}}",
        1,
        "model.remat_tensors.mlpwo",
        ["disk", "offload"],
    ),
    (
        "model}",
        "model, remat: none, host_parameters: true}",
        1,
        "model.remat",
        ["host_parameters saves nothing"],
    ),
    (
        "model}",
        "model, scan: false, host_parameters: true}\nplatform: tpu",
        1,
        "model.scan",
        ["TPUs", "scan: true"],
    ),
    ("model}", "model, num_vocab_tiling: 0}", 1, "model.num_vocab_tiling", ["0"]),
    ("max_length: 64", "mesh: {rules: {embed: [fspd]}}", 5, "mesh.rules.embed", ["nearest: fsdp"]),
    (
        "max_length: 64",
        "generator: {rules: {embd: []}}",
        5,
        "generator.rules.embd",
        ["nearest: embed"],
    ),
    (
        "max_length: 64",
        "generator: {rules: {mlp: [tensr]}}",
        5,
        "generator.rules.mlp",
        ["nearest: tensor"],
    ),
    (
        "max_length: 64",
        "generator: {rules: stationery}",
        5,
        "generator.rules",
        ["nearest: stationary"],
    ),
    (
        "max_length: 64",
        "evaluation: {data: {task: arithmetic}, samples: 4, k: [1, 8]}",
        5,
        "evaluation.k",
        ["between 1 and samples (4)", "8"],
    ),
    (
        "max_length: 64",
        "evaluation: {data: {task: arithmetic, options: {eval_share: 0.3}}}",
        5,
        "evaluation.data.options.eval_share",
        ["0.3 here", "must be the same"],
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "parts"), BAD, ids=[f"{b[3]}: {b[1][:30]}" for b in BAD]
)
def test_a_bad_key_or_value_is_reported_with_its_place(folder, old, new, line, path, parts):
    filled = [text.replace("MODEL", "model").replace("REWARD", "reward.py") for text in (old, new)]
    said = message(edited(*filled))
    assert said.startswith(f"bad.yml:{line}: {path}"), said
    assert all(part in said for part in parts), said


def test_all_errors_are_reported_at_once_also_those_behind_an_unknown_key(folder):
    said = message(edited("max_length: 64", "max_lenght: 64\nseed: 0\nrun: {dirr: x}"))
    assert "max_lenght" in said and "run.dirr" in said
    said = message(
        edited("model}", "nothing, dtyp: 1}"),
        overrides=["data.task=x", "seed=-1", "run.log_every=0"],
    )
    for part in (
        "model.dtyp",
        "no directory nothing",
        "no task x",
        "override 2: seed",
        "override 3: run.log_every",
    ):
        assert part in said
    assert len(said.splitlines()) == 5


FOREIGN_KEYS = [
    ("stages.0.optimizer.lr=1e-3", "unknown key; Duet calls it `stages.0.optimizer.learning_rate`"),
    ("lr=1e-3", "unknown key; Duet calls it `stages.N.optimizer.learning_rate`"),
    ("learning_rate=1e-3", "unknown key; it belongs to `stages.N.optimizer`"),
    ("algorithm=grpo", "unknown key; it belongs to `stages.N`"),
    ("algorithm.name=grpo", "unknown key; it belongs to `stages.N`"),
    ("stages.1.beta=0.1", "unknown key; Duet calls it `stages.1.algorithm.kl_coef`"),
    (
        "stages.1.algorithm.beta=0.1",
        "grpo has no option 'beta'; Duet calls it `stages.1.algorithm.kl_coef`",
    ),
    ("stages.0.algorithm.beta=0.1", "sft has no option 'beta' (valid: loss_type, train_on)"),
    ("stages.1.algorithm.num_generations=4", "Duet calls it `stages.1.samples_per_prompt`"),
    ("stages.1.epsilon=0.1", "unknown key; it belongs to `stages.1.algorithm`"),
    ("functions=[a]", "unknown key; it belongs to `rewards` or `stages.N.rewards`"),
    ("stages.0.max_length=8", "unknown key; it belongs to the top level"),
    (
        "stages.0.optimizer.warmup_ratio=0.1",
        "Duet calls it `stages.0.optimizer.warmup_steps`: updates, not a ratio: write ratio x "
        "`steps` x `updates_per_step`",
    ),
    (
        "num_train_epochs=3",
        "unknown key; Duet calls it `stages.N.epochs`: in place of `stages.N.steps`",
    ),
    (
        "stages.0.optim=adafactor",
        "unknown key; Duet calls it `stages.0.optimizer.name`: `adamw`, `muon`, `lion`, ",
    ),
    (
        "stages.0.policy={lr: 1.0}",
        "unknown key; of its keys, `lr` is `stages.0.optimizer.learning_rate`",
    ),
    (
        "stages.0.optimizer=adafactor",
        "must be a mapping of keys to values; write {name: adafactor}",
    ),
    (
        "stages.0.optimizer={name: adafacto}",
        "must not be 'adafacto' (nearest: adafactor; valid: adafactor, adamw, lion, muon, sgd",
    ),
    (
        "stages=[]",
        "stages: there is no stage to run; add one, such as `- {algorithm: sft, steps: 100}`",
    ),
    ("rewards.functions=[]", "rewards.functions: has 0 entries, and needs 1 or more"),
    ("model.torch_dtype=bfloat16", "unknown key; Duet calls it `model.dtype`"),
    (
        "model.lora_rank=16",
        "unknown key; Duet calls it `model.adapter.rank`",
    ),
    ("run.resume_from_checkpoint=x", "unknown key; leave this out: `rl-train RUN` continues a run"),
    ("data.use_vllm=true", "unknown key; Duet trains and generates with one decoder"),
    (
        "actor_rollout_ref.actor.optim.lr=1",
        "unknown key; of its keys, `lr` is `stages.N.optimizer.learning_rate`",
    ),
    ("stages.0.xyz=1", "unknown key (nearest: "),
    (
        "stages.1.sampling.repetition_penalty=1.2",
        "unknown key; it belongs to `evaluation`: not in stages: it changes ratios of "
        "probabilities",
    ),
    (
        "stages.1.sampling.logit_bias={5: 1.0}",
        "it belongs to `evaluation`: not in stages: it changes ratios",
    ),
]


@pytest.mark.parametrize(("override", "part"), FOREIGN_KEYS)
def test_a_key_of_another_framework_or_section_leads_to_the_right_place(folder, override, part):
    said = message("run.yml", overrides=[override])
    assert part in said and ("stages.N" in said) == ("(N: number of the stage, from 0)" in said)
    assert said.startswith("override 1: ") and "\n" not in said and len(said) < 400


def test_every_key_that_stands_for_one_of_another_framework_exists(folder):
    for word, key in foreign.FOREIGN.items():
        section, _, name = key.replace(".N", ".0").rpartition(".")
        model = files._model_at(tuple(section.split(".")) if section else ())
        options = {
            o for a in rl.algorithms.known() for o in dataclasses.asdict(rl.algorithms.get(a))
        }
        known = {*model.model_fields, *(options if section == "stages.0.algorithm" else ())}
        assert name in known and key in keys.schema_keys(), (word, key)
    for text in foreign.ABSENT.values():
        for key in re.findall(r"`([\w.]+)`", text):
            assert key in keys.schema_keys(), key


def test_a_long_list_of_names_is_cut_to_the_nearest_three():
    assert nearest("stepz", ["steps", "seed"]) == " (nearest: steps; valid: seed, steps)"
    many = nearest("stepz", [f"name{i}" for i in range(30)] + ["steps"])
    assert (
        many.startswith(" (nearest: steps, ")
        and many.count(",") == 2
        and many.endswith("; 31 are valid)")
    )


FILES = [
    ("", "the file is empty"),
    ("# nothing\n", "the file is empty"),
    ("- a\n", ":1: the file holds a list"),
    ("text\n", ":1: the file holds a single value"),
    ("a: [1\nb: 2\n", ":2: not valid YAML (column"),
    ("a: 1\n\tb: 2\n", ":2: not valid YAML"),
    ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ("a: &x [*x]\n", ":1: an alias (*) stands inside"),
    ("a: !!python/object/apply:os.system [ls]\n", ": unknown key"),
    (
        "a: !!python/name:os.system\n",
        ":1: the tag tag:yaml.org,2002:python/name:os.system is not supported",
    ),
    ("[1]: 2\n", ":1: a key must be plain text"),
]


@pytest.mark.parametrize(("text", "part"), FILES)
def test_a_file_that_is_no_configuration_is_refused(folder, text, part):
    said = message(write("bad.yml", text))
    assert said.startswith("bad.yml") and part in said


def _nested_aliases(wide: int, deep: int) -> str:
    """A list in a list `deep` times, `wide` entries each: the billion laughs for 9 and 9."""
    inner = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * wide)}]" for i in range(1, deep)]
    return "\n".join([f"a0: &a0 [{', '.join(['x'] * wide)}]", *inner, ""])


BEYOND_BOUNDS = {
    "nested aliases": (
        _nested_aliases(wide=9, deep=9),
        "more than 20,000 values, those that aliases (*) repeat included",
    ),
    "a chain of aliases": (_nested_aliases(wide=1, deep=2000), "nested more than 32 deep"),
    "nested lists": (
        "a: " + "[" * 5000 + "]" * 5000,
        ":1: lists and mappings are nested more than 32 deep",
    ),
    "a long text": (
        "a: '" + "x" * 2**18 + "'\n",
        ":1: a configuration has at most 262,144 characters",
    ),
    "a long list": ("a: [" + "0," * 20_001 + "]\n", ":1: more than 20,000 values"),
}


@pytest.mark.parametrize("what", BEYOND_BOUNDS)
def test_a_file_beyond_the_bounds_is_refused_at_once(folder, what):
    text, part = BEYOND_BOUNDS[what]
    began = time.process_time()
    said = message(write("bad.yml", text))
    assert said.startswith("bad.yml") and part in said and len(said) < 1000
    assert time.process_time() - began < 20


def test_files_that_cannot_be_read_are_named(folder):
    assert "nothing.yml: no such file" in message("nothing.yml")
    assert "model: a directory without config.yml" in message("model")
    Path("latin.yml").write_bytes(b"a: \xff\n")
    assert "latin.yml: not UTF-8 (byte" in message("latin.yml")
    assert "no configuration" in message()
    assert "nowhere: no such directory" in message(overrides=["resume=nowhere"])


OVERRIDES = [
    ("stages.2.steps=3", "override 1: stages.2: there are 2 stages: write stages.1.steps=3"),
    (
        "stages.-1.algorithm.kl_coef=3",
        "stages.-1: there are 2 stages: write stages.1.algorithm.kl_coef=3",
    ),
    ("stages.steps=3", "override 1: stages.steps: there are 2 stages: write stages.0.steps=3"),
    (
        "stages.grpo.steps=3",
        "override 1: stages.grpo: entries of a list have numbers, from 0, and grpo is number 1: "
        "write",
    ),
    ("stages.grpo.steps=3", "write stages.1.steps=3"),
    ("stages.sft.optimizer.learning_rate=1e-4", "write stages.0.optimizer.learning_rate="),
    ("rewards.functions.reward.py:score=3", "there is 1 entry"),
    ("rewards.functions.1.weight=2", "there is 1 entry: write rewards.functions.0.weight=2"),
    ("stages.2.sampling={top_k: 3, stop: [a]}", "write 'stages.1.sampling={top_k: 3, stop: [a]}'"),
    ("stages.2.algorithm=a b", "write 'stages.1.algorithm=a b'"),
    ("stages.0.steps=", "no value after `=`"),
    ("stages.0.steps = ", "no value after `=`"),
    ("=3", "an override is key.path=value"),
    ("stages..steps=3", "an override is key.path=value"),
    ("stages.0.stepz=3", "override 1: stages.0.stepz: unknown key (nearest: steps"),
    ("stages.0.steps=x", "override 1: stages.0.steps: must be an integer"),
    ("stages.0.steps=[1", "override 1: not valid YAML"),
]


@pytest.mark.parametrize(("override", "part"), OVERRIDES)
def test_a_bad_override_is_reported_with_its_number(folder, override, part):
    said = message("run.yml", overrides=[override])
    assert said.startswith("override 1: ") and part in said


FULL_TEXTS = [
    "Reason step by step, and put the final answer behind ####.",
    "# Rules",
    "one #",
    "3 # three",
    "first line\nsecond # line\n\n  indented\n",
    "ends with a blank ",
    "*Be brief* & kind",
    "!important: [a]",
    "Answer: yes",
    "Rules:\n- one\n- two",
    "- a\n- b",
    "{question} Think.",
    "{question}",
    "[x] done",
    "'a' or 'b'?",
    '"a" # or "b"',
    "it's 100% `code` @ home",
    "--- a",
    "\ue000 # \x1b[0m \u2028 \x85",
]


@pytest.mark.parametrize("text", FULL_TEXTS)
def test_a_text_on_the_command_line_is_the_full_text(folder, text):
    config = load(["run.yml"], [f"data.system={text}", f"run.wandb.name={text}"])
    assert config.data.system == config.run.wandb.name == text
    write("again.yml", files.resolved_yaml(config))
    assert load(["again.yml"]).data.system == text


VALUES = [
    ("3", 3),
    (" 1e3 ", 1000.0),
    ("true", True),
    ("null", None),
    ("~", None),
    ("[1, a #b]", [1, "a #b"]),
    ("{a: b #c, d: 1}", {"a": "b #c", "d": 1}),
    ("- a\n- b", ["a", "b"]),
    ("'it''s # x'", "it's # x"),
    ('"a\\nb #c"', "a\nb #c"),
    ('"a\nb"', "a\nb"),
    ("'a\nb'", "a\nb"),
    ("''", ""),
    ("|\n a\n b\n", "a\nb\n"),
    ("!!str 5", "5"),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_an_override_is_yaml_without_comments(text, value):
    assert yaml_tree.plain(yaml_tree.typed_value(text, "override 1")) == value


def test_overrides_of_wrong_lists_and_mappings_are_refused(folder):
    assert "written twice" in message("run.yml", overrides=["data={path: a, path: b}"])
    assert "not valid YAML" in message("run.yml", overrides=["data={path: a"])
    assert "must be an integer, got '3 # three'" in message(
        "run.yml", overrides=["stages.0.steps=3 # three"]
    )
    assert "not UTF-8" in message("run.yml", overrides=["data.system=\udcff"])


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        *(
            (name, True)
            for name in (
                "grpo",
                "dr_grpo",
                "dapo",
                "gspo",
                "cispo",
                "sapo",
                "vespo",
                "rloo",
                "opo",
                "maxrl",
            )
        ),
        ("{name: rloo, kl_reward_coef: 0.1}", True),
        ("{name: grpo, combine: normalize_then_sum}", True),
        ("{name: grpo, scale: others}", True),
        ("{name: reinforce_pp, baseline: true}", True),
        ("{name: reinforce_pp, baseline: true, kl_reward_coef: 0.1}", True),
        ("{name: raft, dynamic_batches: 2}", True),
        *((name, False) for name in ("ppo", "remax", "raft", "reinforce_pp")),
    ],
)
def test_one_sample_of_a_prompt_is_refused_where_samples_are_compared(folder, algorithm, refused):
    overrides = [f"stages.1.algorithm={algorithm}", "stages.1.samples_per_prompt=1"]
    if refused:
        assert "stages.1.samples_per_prompt: " in message("run.yml", overrides=overrides)
    else:
        load(["run.yml"], overrides)


METRICS = [
    (
        "stages.0.until={metric: los, at_most: 1}",
        "stages.0.until.metric: no metric 'los' (nearest: loss",
    ),
    (
        "stages.0.until={metric: eval/greedy_acuracy, at_least: 1}",
        "no metric 'eval/greedy_acuracy' (nearest: ",
    ),
    (
        "stages.0.until={metric: eval/greedy_accuracy, at_least: 1}",
        "sft never has the metric eval/greedy_accuracy: no `eval",
    ),
    (
        "stages.0.until={metric: reward/mean, at_least: 1}",
        "sft never has the metric reward/mean: this stage samples no",
    ),
    (
        "stages.0.until={metric: rewards/score/mean, at_least: 1}",
        "this stage samples no completions",
    ),
    (
        "stages.0.until={metric: kto/kl, at_least: 1}",
        "sft never has the metric kto/kl: another algorithm has it",
    ),
    (
        "stages.1.until={metric: rewards/scor/mean, at_least: 1}",
        "no metric 'rewards/scor/mean' (nearest: rewards/score/mean",
    ),
    (
        "stages.1.until={metric: value/loss, at_most: 1}",
        "grpo never has the metric value/loss: its algorithm has no critic",
    ),
    ("stages.1.until={metric: activation/mean/0, at_most: 1}", "`diagnostics` is false"),
    (
        "stages.1.algorithm={name: dapo, dynamic_batches: 2, dynamic_reward: scor}",
        "no reward function 'scor' (nearest: score",
    ),
]


@pytest.mark.parametrize(("override", "part"), METRICS)
def test_names_of_metrics_are_checked(folder, override, part):
    said = message("run.yml", overrides=[override])
    assert said.startswith("override 1: stages.") and part in said and "\n" not in said


def test_metrics_of_evaluations_and_rewards_are_known(folder):
    write("mine.py", "def digits(completions):\n    return 1\n")
    evaluation = [
        "evaluation={data: {task: arithmetic}, samples: 2, k: [2], metrics: ['mine.py:digits']}",
        "stages.0.sampling.max_new_tokens=8",
    ]
    for metric in (
        "eval/pass@2",
        "eval/digits",
        "eval/digits/mean",
        "time/eval",
        "loss",
        "optim/lr",
    ):
        load(["run.yml"], [*evaluation, f"stages.0.until={{metric: {metric}, at_least: 1}}"])
    for metric in (
        "rewards/score/std",
        "reward/mean",
        "entropy",
        "activation/mean/mtp1",
        "grad_norm/embed",
    ):
        overrides = [
            "stages.1.diagnostics=true",
            f"stages.1.until={{metric: {metric}, at_least: 1}}",
        ]
        load(["run.yml"], [*evaluation, *overrides])
    assert "nearest: eval/pass@2" in message(
        "run.yml", overrides=[*evaluation, "stages.0.until={metric: eval/pass@4, at_least: 1}"]
    )
    dynamic = "stages.1.algorithm={name: dapo, dynamic_batches: 2, dynamic_reward: score}"
    load(["run.yml"], [dynamic, "stages.1.until={metric: dynamic/batches, at_least: 2}"])


def test_the_names_of_metrics_are_those_of_the_docs():
    text = (packaged.PACKAGED.parent / "docs/metrics.md").read_text()
    assert list(metric_names.NAMES) == re.findall(r"^\| `([^`]+)` \|", text, re.M)


def test_seeds_that_would_draw_what_others_draw_are_refused(folder, capsys):
    assert load(["run.yml"], ["seed=4294967295"]).seed == 2**32 - 1
    for seed in (2**32, 2**63, -1):
        assert "seed: must be " in message("run.yml", overrides=[f"seed={seed}"])
        with pytest.raises(SystemExit):
            main(["generate", "model", "--prompts", "p.txt", f"--seed={seed}"])
        assert "a seed is a number from 0 to 4294967295" in capsys.readouterr().err


NOT_FINITE = [
    "stages.0.optimizer.learning_rate",
    "stages.0.optimizer.eps",
    "stages.1.optimizer.clip_norm",
    "stages.1.sampling.temperature",
    "stages.1.max_logp_diff",
    "stages.1.router.capacity_factor",
    "stages.1.algorithm.kl_coef",
    "stages.1.algorithm.delta",
    "rewards.functions.0.weight",
    "rewards.timeout_s",
    "run.samples.keep_gib",
    "model.overrides",
]


@pytest.mark.parametrize("key", NOT_FINITE)
@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", ".NaN"])
def test_numbers_that_are_not_finite_are_refused(folder, key, number):
    said = message(
        "run.yml",
        overrides=[
            f"{key}={{a: [1, {number}]}}" if key == "model.overrides" else f"{key}={number}"
        ],
    )
    assert said.startswith(f"override 1: {key}: ") and "finite number" in said and "\n" not in said


def test_a_number_beyond_64_bits_is_refused_where_it_is_written(folder):
    said = message(
        "run.yml",
        overrides=[
            "stages.0.optimizer.learning_rate=1e999",
            "rewards.functions.0.options={a: -1e999}",
        ],
    )
    assert (
        "override 1: `1e999` is larger than any number" in said
        and "override 2: `-1e999` is larger" in said
    )
    assert "override 1: `1e999` is larger" in message(
        "run.yml", overrides=["model.overrides={rope: [1e999]}"]
    )
    assert "model.overrides: rope.0: nan is no finite" in message(
        "run.yml", overrides=["model.overrides={rope: [.nan]}"]
    )
    assert yaml_tree.typed_value("-.INF", "o").value == -math.inf and math.isnan(
        yaml_tree.typed_value(".NaN", "o").value
    )


def test_every_number_of_the_schema_is_finite():
    for model, path in sections(files.RunConfig, ""):
        assert model.model_config["allow_inf_nan"] is False, path


def test_a_stop_token_outside_the_vocabulary_is_refused(folder):
    Path("model/config.json").write_text(sources.preset("tiny-deepseek", {"vocab_size": 320}).hf)
    load(["run.yml"], ["stages.1.sampling.stop_token_ids=[0, 319]"])
    for token in (-1, 320):
        said = message("run.yml", overrides=[f"stages.1.sampling.stop_token_ids=[0, {token}]"])
        assert (
            f"stages.1.sampling.stop_token_ids: {token} is no token" in said and "0 to 319" in said
        )


@pytest.mark.parametrize(
    "override, expected",
    [
        (
            "data={path: rows.jsonl, split: test}",
            "data.split: the file rows.jsonl is read as it is and has no splits",
        ),
        (
            "data={path: rows.jsonl, subset: main}",
            "data.subset: the file rows.jsonl is read as it is and has no subsets",
        ),
        ("data=s4://bucket/rows.jsonl", "s4:// is no scheme that fsspec knows"),
        ("data=s3://me:secret@bucket/rows.jsonl", "a URL with a password is refused"),
        (
            "data=hf://datasets/org/name",
            "; write org/name, which is looked for on the Hugging Face hub",
        ),
        ("model.token=hf_x", "model.token: no secret stands in a configuration"),
        ("run.wandb={api_key: x}", "set the environment variable WANDB_API_KEY"),
        ("data=$HOME/rows.jsonl", "Variables of a shell are not replaced here"),
        (
            "rewards.functions=[{name: exact_answer, weight: 0}]",
            "rewards.functions: every reward has weight 0",
        ),
        (
            "tokenizer.chat_template={{ messages }}",
            "put a text that begins with a brace into quotes",
        ),
    ],
)
def test_settings_that_would_be_passed_over_are_refused(folder, override, expected):
    write("rows.jsonl", '{"prompt": "a", "completion": "b"}\n')
    assert expected in message("run.yml", overrides=[override])


def test_a_cache_of_parts_that_no_query_reads_is_said(folder):
    for length, cut, is_said in ((512, False, True), (512, True, False), (256, False, False)):
        overrides = [f"max_length={length}", f"generator.sliding_window_cache={str(cut).lower()}"]
        config = load(["run.yml"], ["model={source: deepseek-v4-flash}", *overrides])
        remarks = [remark for stage in stages.create(config) for remark in stage.remarks()]
        assert len(remarks) == is_said
        assert (
            not is_said
            or "keeps the parts of entries of all 512 tokens, not of the last 128 alone"
            in remarks[0]
        )


def test_settings_that_do_something_else_are_said(folder, capsys):
    config = load(
        ["run.yml"], ["stages.0.optimizer.warmup_steps=1", "stages.1.optimizer.warmup_steps=2"]
    )
    assert [list(stage.remarks()) for stage in stages.create(config)] == [[], []]
    Path("model/config.json").write_text(sources.preset("tiny-deepseek", {"vocab_size": 320}).hf)
    write_weight_file("model")
    write("rows.jsonl", '{"prompt": "a", "completion": "b"}\n' * 3)
    overrides = [
        "stages.0.optimizer.warmup_steps=3",
        "stages.0.data=rows.jsonl",
        "stages.0.prompts_per_step=4",
    ]
    assert train_main(["--check", "run.yml", *overrides]) == 0
    said = capsys.readouterr().out
    assert "stages.0.optimizer.warmup_steps: 3 updates, and the stage makes 2" in said
    assert "the data has 3 rows, and a step takes 4" in said and said.count("and a step takes") == 1


@pytest.mark.parametrize(
    ("every", "steps", "said"),
    [
        (0, 2, True),
        (2, 2, True),
        (1, 2, False),
        (0, 1, False),  # one step has none to be compared with
    ],
)
def test_a_best_step_that_is_compared_with_none_is_said(folder, every, steps, said):
    best = "stages.1.best={metric: eval/greedy_accuracy, mode: max}"
    evaluation = f"evaluation={{data: {{task: arithmetic}}, every: {every}}}"
    overrides = [f"stages.1.steps={steps}", best, evaluation, "max_length=512"]
    config = load(["run.yml"], overrides)
    remarks = [remark for stage in stages.create(config) for remark in stage.remarks()]
    text = (
        "stages.1.best: eval/greedy_accuracy is measured after the last step alone "
        "(evaluation.every:"
    )
    assert [remark.startswith(text) for remark in remarks] == [True] * said


def test_an_unquoted_text_that_ends_at_a_comment_is_noted(folder):
    write("cut.yml", "data:\n  system: put it behind ####.\nrun:\n  dir: runs/a #1\n")
    write(
        "good.yml",
        "data:\n  system: 'behind ####.'   # quoted\n  path: rows.jsonl   # aligned\nseed: 1 # a "
        "number\n",
    )
    write(
        "choice.yml",
        "stages:\n  - optimizer: {schedule: cosine} # a choice\n    shared_prefix: auto # or "
        "never\n",
    )
    assert files.cut_texts(["good.yml", "choice.yml"]) == []
    first, second = files.cut_texts(["cut.yml"])
    assert (
        first.startswith("cut.yml:2: data.system: ")
        and "'put it behind'" in first
        and "quote" in first
    )
    assert second.startswith("cut.yml:4: run.dir: ") and "'runs/a'" in second
    for path in packaged.PACKAGED.rglob("*.yml"):
        assert files.cut_texts([path]) == [], path


def test_check_prints_the_note_about_a_cut_text(folder, capsys):
    Path("model/config.json").write_text(sources.preset("tiny-deepseek", {"vocab_size": 320}).hf)
    write_weight_file("model")
    edited("arithmetic}", "arithmetic}\nrun: {wandb: {name: a #1\n  }}")
    assert train_main(["--check", "bad.yml"]) == 0
    assert "bad.yml:4: run.wandb.name: the text ends before ` #`" in capsys.readouterr().out


PATH_KEYS = [
    "run.dir",
    "model.source",
    "tokenizer.source",
    "tokenizer.chat_template.file",
    "data.path",
    "evaluation.data.path",
    "evaluation.metrics.0",
    "teacher.source",
    "teacher.files",
    "rewards.functions.0.name",
    "rewards.functions.0.options.source",
    "stages.0.data.path",
    "stages.0.rewards.functions.0.name",
    "stages.0.teacher.source",
]


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_tilde_is_the_home_directory_in_every_key_that_is_a_path(folder, monkeypatch, key):
    monkeypatch.setenv("HOME", str(folder / "home"))
    values = {"name": "reward_model", "options": {"source": "x"}}
    tree = {"rewards": {"functions": [values]}, "evaluation": {"data": "x", "metrics": ["x"]}}
    tree |= {
        "model": "x",
        "stages": [{"algorithm": "sft", "steps": 1, "rewards": {"functions": [{"name": "x"}]}}],
    }
    *sections, last = (int(part) if part.isdecimal() else part for part in key.split("."))
    inner = tree
    for part, following in zip(sections, [*sections[1:], last], strict=True):
        if isinstance(inner, dict) and not isinstance(inner.get(part), (dict, list)):
            inner[part] = {}
        inner = inner[part]
        assert isinstance(inner, list) == isinstance(following, int)
    inner[last] = "~/folder/file.py:name"
    value = files.RunConfig.model_validate(tree).model_dump()
    for part in (*sections, last):
        value = value[part]
    assert value == f"{folder}/home/folder/file.py:name"


def test_every_key_of_the_schema_that_is_a_path_says_so():
    words = re.compile("director|folder|file")
    no_paths = {
        "program_cache",
        "if_present",
        "overrides",
        "multi_token_prediction.missing",
        "wandb.name",
        "wandb.mode",
        "mlflow.name",
        "mlflow.uri",
        "trackio.name",
        "trackio.space",
        "tensorboard",
    }
    no_paths |= {
        "samples.keep_gib",
        "columns",
        "path.subset",
        "algorithm.name",
        "dir.keep_checkpoints",
        "stages.freeze",
    }
    for model, path in sections(files.RunConfig, ""):
        for name, field in model.model_fields.items():
            key = f"{path}.{name}"
            if words.search(field.description or "") and not any(
                key.endswith(one) for one in no_paths
            ):
                assert HOME in field.metadata or next(keys.models_in(field.annotation), None), key


def sections(model, path):
    yield model, path
    for name, field in model.model_fields.items():
        for section, _ in keys.models_in(field.annotation):
            yield from sections(section, f"{path}.{name}")


def test_configuration_files_and_runs_of_the_home_directory_are_read(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    config = load(["~/run.yml"], ["run.dir=~/runs/a #1"])
    assert config.directory == folder / "runs/a #1" and not Path("~").exists()
    (folder / "runs/a #1").mkdir(parents=True)
    write("runs/a #1/config.yml", files.resolved_yaml(config))
    assert load([], ["resume=~/runs/a #1"]).run.dir == f"{folder}/runs/a #1"
    assert load(["~/runs/a #1"]) == load([], ["resume=~/runs/a #1"])


def test_an_index_in_a_list_of_one_stage_or_none_is_explained(folder):
    write("one.yml", "stages: [{algorithm: sft, steps: 7}]\n")
    assert "stages.1: there is 1 stage: write stages.0.steps=3" in message(
        "one.yml", overrides=["stages.1.steps=3"]
    )
    write("none.yml", "stages: []\n")
    assert "stages.0: `stages` is an empty list" in message(
        "none.yml", overrides=["stages.0.steps=3"]
    )


def test_the_entries_of_a_list_are_named_as_people_know_them(folder):
    edited(
        "  - algorithm: sft",
        "  - {algorithm: {name: grpo}, steps: 1}\n  - {algorithm: {preset: dapo}, steps: 1}\n  - "
        "algorithm: sft",
    )
    assert "write stages.3.steps=3" in message("bad.yml", overrides=["stages.grpo-2.steps=3"])
    assert "write stages.0.steps=3" in message("bad.yml", overrides=["stages.grpo.steps=3"])
    assert "write stages.1.steps=3" in message("bad.yml", overrides=["stages.dapo.steps=3"])
    write(
        "few.yml",
        GOOD.replace('"REWARD:score"', "exact_answer, {name: length, weight: 2}").replace(
            "MODEL", "model"
        ),
    )
    said = message("few.yml", overrides=["rewards.functions.length.weight=3"])
    assert "length is number 1: write rewards.functions.1.weight=3" in said


def test_stages_by_name_in_a_file_are_a_list(folder):
    said = message(write("map.yml", "model: model\nstages: {grpo: {steps: 3}}\n"))
    assert (
        "map.yml:2: stages: must be a list with an entry for each stage, such as `- {algorithm: sft"
        in said
    )


def test_a_mistyped_path_gets_the_nearest_one_that_exists(folder):
    for name in (
        "configs/s.yml",
        "runs/first/config.yml",
        "models/qwen/config.json",
        "datas/rows.jsonl",
        "rewards/r.py",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write(name, "x: 1")
    assert "configs/s.yaml: no such file (nearest: configs/s.yml)" in message("configs/s.yaml")
    assert "run/first: no such file, and no directory of a run (nearest: runs/first)" in message(
        "run/first"
    )
    assert "no run to continue (nearest: runs/first)" in message(overrides=["resume=runs/frist"])
    cases = {
        "model": "./model/qwem",
        "tokenizer": "./models/qwenn",
        "tokenizer.chat_template": "models/qwen/config.jsn",
        "data": "data/row.jsonl",
        "rewards.functions.0": "reward/r.py:score",
    }
    near = {
        "model": "models/qwen",
        "tokenizer": "models/qwen",
        "tokenizer.chat_template": "models/qwen/config.json",
    }
    near |= {"data": "datas/rows.jsonl", "rewards.functions.0": f"{folder}/rewards/r.py"}
    Path("model").rename("other")
    for key, value in cases.items():
        said = message("run.yml", overrides=[f"{key}={value}"])
        assert f"(nearest: {near[key]})" in said, (key, said)


def test_the_nearest_path_is_one_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nearest_path("a/b") == nearest_path("") == nearest_path("/nowhere-at-all") == ""
    Path("runs").mkdir()
    assert (
        nearest_path("run") == " (nearest: runs)"
        and nearest_path("run/first") == ""
        and nearest_path("runs") == ""
    )
    assert (
        nearest_path(f"{tmp_path}/run") == f" (nearest: {tmp_path}/runs)"
        and nearest_path("a\0b/c") == ""
    )


def test_overrides_change_lists_by_index_and_extend_shorthands(folder):
    config = load(
        ["run.yml"],
        ["stages.1.algorithm.epsilon=0.3", "model.dtype=bfloat16", "rewards.functions.0.weight=2"],
    )
    assert config.stages[1].algorithm.name == "grpo"
    assert config.stages[1].algorithm.model_extra["epsilon"] == 0.3
    assert (config.model.source, config.model.dtype) == ("model", "bfloat16")
    assert (config.rewards.functions[0].name, config.rewards.functions[0].weight) == (
        "reward.py:score",
        2,
    )


def test_later_files_win_and_a_list_replaces_a_list(folder):
    write("over.yml", "max_length: 32\nstages: [{algorithm: sft, steps: 7}]\nrun: {dir: there}\n")
    config = load(["run.yml", "over.yml"], ["max_length=48"])
    assert (config.max_length, len(config.stages), config.stages[0].steps) == (48, 1, 7)
    assert config.run.dir == "there" and config.data.task == "arithmetic"
    assert load(["over.yml", "run.yml"]).max_length == 64


def test_a_file_replaces_a_task_and_a_task_a_file(folder):
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    Path("rows").mkdir()
    task = "data={task: arithmetic, options: {max_operand: 3}, split: x, limit: 8, chat: true}"
    data = load(["run.yml"], [task, "data=rows.jsonl"]).data
    assert (data.task, data.options, data.split, data.path) == (None, {}, None, "rows.jsonl")
    assert data.limit == 8 and data.chat  # how rows are used stays
    assert load(["run.yml"], [task, "data={path: rows, split: y}"]).data.split == "y"
    path = "data={path: rows, split: x, columns: {prompt: question}}"
    data = load(["run.yml"], [path, "data={task: arithmetic, options: {max_operand: 3}}"]).data
    assert (data.path, data.split, data.columns.prompt, data.options) == (
        None,
        None,
        "prompt",
        {"max_operand": 3},
    )
    data = load(["run.yml"], [path, "data.path=./rows"]).data
    assert (data.path, data.split, data.columns.prompt) == ("./rows", "x", "question")
    with pytest.raises(ConfigError, match="exactly one of"):
        load(["run.yml"], ["data={task: arithmetic, path: rows.jsonl}"])


def test_every_stage_is_merged_over_each_stage_and_overrides_win_over_it(folder):
    write("small.yml", "every_stage:\n  steps: 1\n  sampling: {max_new_tokens: 4}\n")
    config = load(["run.yml", "small.yml"], ["stages.1.steps=9"])
    assert [stage.steps for stage in config.stages] == [1, 9]
    assert [stage.sampling.max_new_tokens for stage in config.stages] == [4, 4]
    assert config.stages[0].optimizer.learning_rate == 1e-3
    assert config.every_stage == {}
    assert "small.yml:1: every_stage: there are no stages" in message("small.yml", "run.yml")


def test_if_present_is_merged_over_existing_sections_and_makes_no_new_ones(folder):
    write("small.yml", "if_present:\n  rewards: {workers: 1}\n  evaluation: {problems: 3}\n")
    assert load(["run.yml"]).evaluation is None
    config = load(["run.yml", "small.yml"])
    assert (
        config.rewards.workers == 1
        and config.rewards.functions
        and config.evaluation is None
        and config.if_present == {}
    )
    write("watched.yml", "evaluation: {data: {task: arithmetic}, problems: 50}\n")
    assert (
        load(
            ["run.yml", "watched.yml", "small.yml"], ["stages.0.sampling.max_new_tokens=4"]
        ).evaluation.problems
        == 3
    )
    write("wrong.yml", "if_present:\n  rewards: {workerz: 1}\n")
    assert message("run.yml", "wrong.yml").startswith("wrong.yml:2: rewards.workerz: unknown key")


def test_a_mistake_in_every_stage_is_said_once(folder):
    write("small.yml", "every_stage:\n  stepz: 1\n")
    said = message("run.yml", "small.yml")
    assert said.startswith("small.yml:2: stages.0.stepz: unknown key") and "\n" not in said


def test_the_resolved_configuration_loads_to_the_same_run(folder):
    tricky = [
        "stages.1.algorithm.epsilon=0.3",
        "run.wandb.name='1e5'",
        "run.wandb.project='on'",
        "stages.0.optimizer.learning_rate=1.2345678901234567e-9",
    ]
    config = load(["run.yml"], tricky)
    Path("runs").mkdir()
    write("runs/config.yml", files.resolved_yaml(config.model_copy(update={"run": config.run})))
    again = load(["runs/config.yml"])
    assert again == config
    assert (
        again.run.wandb.name == "1e5"
        and again.stages[0].optimizer.learning_rate == 1.2345678901234567e-9
    )
    assert (
        yaml.safe_load(files.resolved_yaml(config))["run"]["wandb"] == config.run.wandb.model_dump()
    )
    assert "epsilon:" in files.resolved_yaml(config)
    shown = yaml.safe_load(files.changed_yaml(config))
    assert "weight_decay" not in shown["stages"][0]["optimizer"]
    assert shown["stages"][1]["algorithm"] == {"name": "grpo", "epsilon": 0.3}
    keys = files.changed_keys(config)
    assert "stages.1.algorithm.epsilon" in keys and "stages.0.optimizer.weight_decay" not in keys


def test_a_run_directory_stands_for_its_configuration_and_stays_its_own_place(folder):
    config = load(["run.yml"], ["run.dir=elsewhere"])
    Path("runs/a").mkdir(parents=True)
    write("runs/a/config.yml", files.resolved_yaml(config))
    for again in (load(["runs/a"]), load([], ["resume=runs/a"]), load(["runs/a"], ["seed=1"])):
        assert again.run.dir == "runs/a" and again.stages == config.stages
    assert again.seed == 1


def test_packaged_configurations_load_from_anywhere(folder, monkeypatch):
    monkeypatch.setattr(packaged, "PACKAGED", folder / "pkg")
    (folder / "pkg" / "models").mkdir(parents=True)
    write("pkg/models/small.yml", "x: 1\n")
    write("pkg/quick.yml", Path("run.yml").read_text().replace("{source: model}", "small"))
    for name in ("quick", "quick.yml", "configs/quick.yml"):
        assert load([name]).model.source == "small"
    assert "nearest: quick.yml" in message("quik.yml")
    assert "nearest: small" in message("quick", overrides=["model=smal"])
    write("quick.yml", Path("run.yml").read_text())
    assert load(["quick.yml"]).model.source == "model"


def test_the_command_line_reports_bad_configurations_as_text_with_exit_code_2(folder, capsys):
    bad = edited("max_length: 64", "max_lenght: 64\nplatform: gpus")
    assert train_main(["--check", bad, "stages.0.steps=x"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "3 problems" in said and "bad.yml:5: max_lenght" in said and "override 1" in said
    Path("model/config.json").write_text(sources.preset("tiny-deepseek", {"vocab_size": 320}).hf)
    write_weight_file("model")
    assert train_main(["--check", "run.yml"]) == 0
    assert "learning_rate: 0.001" in capsys.readouterr().out


def test_a_reward_that_does_not_load_is_reported_at_its_line_as_one_problem(folder, capsys):
    write("broken.py", "import nothing_of_this_name\n")
    assert train_main(["--check", edited("reward.py:score", "broken.py:score")]) == 2
    said = capsys.readouterr().err
    assert "problems" not in said
    assert "bad.yml:4: rewards.functions.0.name" in said and "nothing_of_this_name" in said
    options = "[{name: exact_answer, options: {colum: x}}]"
    assert message(edited('["reward.py:score"]', options)).startswith(
        "bad.yml:4: rewards.functions.0.options.colum"
    )


def test_pages_must_hold_a_completion_and_a_sliding_window_cache_needs_a_window(folder):
    assert "at least" in message(
        "run.yml", overrides=["generator.cache=paged", "generator.page_size=8", "generator.pages=2"]
    )
    for key in ("pages=9", "page_size=8"):
        assert "add `cache: paged`" in message("run.yml", overrides=[f"generator.{key}"])
    Path("model/config.json").write_text(sources.preset("tiny-deepseek").hf)
    write_weight_file("model")
    assert "generator.sliding_window_cache: no layer" in message(
        "run.yml", overrides=["generator.sliding_window_cache=true"]
    )
    config = load(
        ["run.yml"], ["generator.cache=paged", "generator.page_size=8", "generator.pages=999"]
    )
    assert config.generator.pages == 999


def test_drafts_and_their_training_need_modules_that_predict(folder):
    stored = json.loads(sources.preset("tiny-deepseek").hf)
    Path("model/config.json").write_text(json.dumps(stored))
    write_weight_file("model")
    result = message("run.yml", overrides=["generator.speculative=1", "stages.0.mtp={}"])
    assert (
        "generator.speculative" in result
        and "stages.0.mtp" in result
        and "multi_token_prediction: {depth: 1}" in result
    )
    config = load(
        ["run.yml"],
        ["generator.speculative=1", "stages.0.mtp={}", "model.multi_token_prediction={}"],
    )
    assert config.model.sections == {
        "multi_token_prediction": {"depth": 1, "input": "post_norm", "final_norm": True}
    }
    fresh = load(["run.yml"], ["model.multi_token_prediction={missing: fresh}"]).model
    assert (
        fresh.multi_token_prediction.missing == "fresh" and fresh.sections == config.model.sections
    )
    Path("model/config.json").write_text(
        json.dumps(stored | {"duet": {"multi_token_prediction": {"depth": 1}}})
    )
    assert load(["run.yml"], ["generator.speculative=1"]).stages[0].mtp is None


@pytest.mark.parametrize(
    ("override", "now"),
    [
        ("if_given={run: {log_every: 2}}", "if_present"),
        ("stages.0.internal_metrics=true", "diagnostics"),
        ("generator.rings=true", "sliding_window_cache"),
        ("stages.0.algorithm={name: sft, learnt: all}", "train_on"),
    ],
)
def test_a_key_of_an_earlier_version_is_refused_with_its_name_now(folder, override, now):
    assert f"is called `{now}` now" in message("run.yml", overrides=[override])


def test_an_option_is_declared_at_the_component_that_reads_it():
    """A section takes default, description and bounds from there; YAML writes lists where the
    component has tuples."""
    from policy.options import option
    from rl.config.schema import Section, fields_of

    @dataclasses.dataclass(frozen=True)
    class Component:
        size: int = option(4, ge=1, description="how many")
        names: tuple[str, ...] = option((), description="which")
        internal: int = 3

    @fields_of(Component, size=8)
    class Options(Section):
        """A section."""

    assert (
        list(Options.model_fields) == ["size", "names"]
        and Options.model_fields["size"].description == "how many"
    )
    assert Options().model_dump() == {"size": 8, "names": []} and Options(names=["a"]).names == [
        "a"
    ]
    for wrong in ({"size": 0}, {"internal": 1}, {"names": "a"}):
        with pytest.raises(ValueError):
            Options(**wrong)
    with pytest.raises(TypeError, match="no option sizes"):
        fields_of(Component, sizes=8)


@pytest.mark.parametrize(
    "name", ["gs://bucket/x", "s3://bucket/x", "hf://org/name", "file:///tmp/x"]
)
def test_a_run_directory_that_is_no_local_path_is_refused_and_nothing_is_created(
    folder, name, capsys
):
    assert train_main(["--check", "run.yml", f"run.dir={name}"]) == 2
    said = capsys.readouterr().err
    assert f"run.dir: {name} is no local path" in said and "run.dir=runs/NAME" in said
    assert f"run.remote={'gs://BUCKET/NAME' if name.startswith('hf') else name}" in said
    assert train_main(["run.yml", f"run.dir={name}"]) == 2
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        "model",
        "reward.py",
        "run.yml",
    }
