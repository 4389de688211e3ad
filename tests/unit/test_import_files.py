"""What `rl import` reads: files, scripts of a shell, arguments; and what it writes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from importing import config_of, draft_of, run_import, said_of

from rl.commands import cli
from rl.config import foreign, keys
from rl.errors import ConfigError
from rl.imports import convert, given, shell, writing
from rl.imports.draft import Draft, Facts
from rl.imports.given import Given, GivenValue
from rl.imports.rules import ABSENT, Copy, Leave, Refuse, reason, target
from rl.imports.tables import openrlhf, trl, tunix, verl
from rl.imports.trl import SYNTAX as TRL
from rl.imports.verl import SYNTAX as VERL

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports"
TABLES = {
    **{f"trl {name}": table for name, table in trl.TABLES.items()},
    "verl": verl.RL,
    "verl sft": verl.SFT,
    "tunix": tunix.TABLE,
    **{f"openrlhf {name}": table for name, table in openrlhf.TABLES.items()},
}
SCRIPT = """#!/bin/bash
set -xeuo pipefail
MODEL=${MODEL:-Qwen/Qwen3-0.6B}   # a comment with a 'quote
n=${N-5}; batch=$((n * 8 + 2))
files="['$HOME/a.parquet', \\"$MODEL\\"]"
LIST=(
    data.files="$files"
    # data.commented=1
    data.batch=$batch
)
LIST+=(data.more='["x","y"]')
EMPTY=()
if [ "$n" -gt 4 ]; then
    MODEL=other
    NEW=in_a_branch
fi
read -r -d '' WORDS <<EOF
  --flag \\
  $MODEL
EOF
echo "not this: data.x=1" > log.txt 2>&1
train "${LIST[@]}" "${EMPTY[@]}" $WORDS new=$NEW tail="${n}th" $'a\\tb' ''"" "$@" | tee out
"""


def words_of(script: str, environment=()) -> list[str]:
    """Returns the words of the command `train` of a script."""
    commands = [words for words in shell.commands(script, "run.sh", dict(environment)) if words]
    return [text.text for text in next(words for words in commands if words[0].text == "train")]


def words_of_bash(script: str) -> list[str]:
    """Returns the same words as bash has them."""
    done = subprocess.run(
        ["bash", "-c", "train() { printf '%s\\0' train \"$@\"; }\n" + script],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "~"},
        timeout=30,
    )
    return done.stdout.decode().split("\0")[:-1]


BRANCHES = """
MODE=${MODE:-dppo_kl}
case $MODE in
    dppo_tv) CLIP=0.15 ;;
    dppo_kl | other) CLIP=0.05 ;;
    *) echo unknown; CLIP=9 ;;
esac
PEFT=1; SIZE=
extra=()
if [ "${PEFT}" = "1" ] && [ $CLIP != 3 ]; then
    extra+=(rank=32 "alpha=16")
elif [ -n "$SIZE" ]; then extra+=(never=1)
else
    extra+=(neither=1)
fi
if [[ -z $SIZE || $PEFT -gt 4 ]]; then small=yes; fi
if [ -n "$SIZE" ] || [ "$PEFT" -ge 1 ]; then if [ 1 -eq 2 ]; then inner=1; else inner=2; fi; fi
case "$PEFT" in 1) one=1;; 2) one=2;; esac
if [[ $MODE == dppo_* ]]; then glob=1; else glob=0; fi
train clip=$CLIP "${extra[@]}" small=$small inner=$inner one=$one glob=$glob
"""
LISTS = """
BIG=0; M=3
[ "$BIG" = 1 ] && N=64
[ -z "$N" ] && N=8
[ "$M" -gt 2 ] ||
    M=5
[ "$M" = 3 ] && { P=1; Q=2; } || P=3
[[ -n "$NONE" && "$M" == 3 ]] && M=7
[ "$M" = 4 ] && { P=9
    Q=9
}
declare -a ARGS=(a "b c"); declare -r X=1; export BIG Y=2; declare -i Z=4
: ${W:=5} "${N:=6}"
case "$M" in
    4) train never=1 | cat ;;
    3)
        (cd . ; true)
        train n=$N m=$M p=$P q=$Q "${ARGS[@]}" x=$X y=$Y z=$Z w=$W | cat
        ;;
esac
"""
PLAIN = """
A='single $A "x"'; B="double $A \\$B \\"q\\" \\n"
C=$A$B; D=${C:+set}; E=${NONE:-${A}x}; F=${NONE-"in quotes"}
L=(1 "2 3" '4'); L+=(5)
M="a b  c"
train "$A" "$B" "${L[@]}" ${L[1]} $M "$M" x${L[0]}y "$D" "$E" "$F" \\$HOME "$HOME/x" a\
b 'c
d' k="v w" --x=1 # comment
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", [SCRIPT, BRANCHES, LISTS, PLAIN])
def test_a_script_is_read_as_bash_expands_it(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = words_of_bash(script.replace("set -xeuo pipefail", ":").replace(" | tee out", ""))
    assert len(expected) > 6
    assert words_of(script) == expected


def test_of_an_unknown_branch_only_new_variables_have_values():
    script = "A=1\nif command -v nvidia-smi; then A=2; B=3; fi\nif [ $1 = x ]; then C=4; fi\ntrain $A $B $C"
    assert words_of(script) == ["train", "1", "3", "4"]


def test_commands_of_a_branch_that_is_not_taken_do_not_count():
    script = "if [ a = b ]; then\n train x=1\nelse\n train x=2\nfi"
    assert words_of(script) == ["train", "x=2"]


def test_a_script_takes_variables_of_the_environment_but_no_secrets():
    words = words_of(
        "train a=$N b=${N:-1} c=$API_TOKEN d=${MY_KEY:-none}", {"N": "7", "API_TOKEN": "s"}
    )
    assert words == ["train", "a=7", "b=7", "c=$API_TOKEN", "d=none"]


def test_a_number_of_tokens_and_a_tokenizer_are_no_secrets():
    environment = {"MAX_TOKENS": "512", "TOKENIZER_PATH": "a/b", "API_TOKENS": "s"}
    words = words_of("train $MAX_TOKENS $TOKENIZER_PATH $API_TOKENS", environment)
    assert words == ["train", "512", "a/b", "$API_TOKENS"]


def test_what_has_no_value_is_named_with_what_helps(tmp_path):
    script = tmp_path / "run.sh"
    start = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path="
    for value, said in {
        "$MODEL": "$MODEL has no value here; export it",
        "${MODEL:?please set MODEL}": "has no value here; export it",
        "$MODEL_KEY": "$MODEL_KEY may be a secret",
        "$(ls models)": "$(ls models) has no value before the script runs; write the value",
        "${MODEL%/}": "${MODEL%/} has no value before the script runs; write the value",
        "$1": "$1 has no value before the script runs; write the value",
    }.items():
        script.write_text(f"MODEL_KEPT={value}\n{start}$MODEL_KEPT\n")
        (entry,) = (e for e in draft_of("verl", script).entries if e.fate == "refused")
        assert entry.keys == ("actor_rollout_ref.model.path",) and said in entry.text, entry


def test_words_know_their_lines_and_what_has_no_value():
    (words,) = shell.commands("train \\\n  a=1 \\\n  b=$(date +%s)x", "run.sh", {})
    assert [word.line for word in words] == [1, 2, 3]
    assert words[2].unresolved == ("$(date +%s)",) and words[2].text == "b=$(date +%s)x"


@pytest.mark.parametrize(
    "script", ["train 'a", 'train "a', "A=(1 2", "train ${A", "train $(a", "train `a", "a <<EOF\nb"]
)
def test_a_script_that_does_not_end_is_refused(script):
    with pytest.raises(ConfigError, match=r"run\.sh:\d+: .* has no end"):
        shell.commands(script, "run.sh", {})


def test_arithmetic_computes_integers_only():
    assert words_of("a=7; train $((a / 2)) $(( -a % 4 )) $((2 ** 9999))")[1:3] == ["3", "1"]
    (words,) = shell.commands("train $((__import__))", "run.sh", {})
    assert words[1].unresolved


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.yaml", b"", "the file is empty"),
        ("blank.sh", b" \n\n", "the file is empty"),
        ("binary.sh", b"\xff\xfe\x00train", "is not UTF-8"),
        ("list.yaml", b"- a\n- b\n", "has no keys at its top level"),
        ("nothing.yaml", b"{}\n", "has no keys"),
        ("broken.yaml", b"a: [1\n", "not valid YAML"),
        ("broken.json", b"{,}", "not valid JSON"),
        ("other.sh", b"echo hello\n", "no command of verl in it"),
        ("train.py", b"import verl\n", "code of Python is not read; write its arguments to a YAML"),
        ("train.ipynb", b"{}", "code of Python is not read"),
        ("tag.yaml", b"a: !!python/name:os.system x\n", "is not supported"),
        ("large.sh", b"#" * (2**20 + 1), "has more than 1,048,576 bytes"),
        (
            "twice.sh",
            b"python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2\n",
            "it starts 2 trainings (lines 1, 2)",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    code, text, output = run_import("verl", tmp_path / name)
    assert (code, text) == (2, "") and said in output


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "No such file" in said_of("trl", tmp_path / "no.yaml")
    assert "Is a directory" in said_of("trl", tmp_path)
    script = tmp_path / "run.sh"
    script.write_text("trl sft --config no.yaml\n")
    assert "no file no.yaml" in said_of("trl", script)


def test_keys_after_the_files_win_in_both_forms(tmp_path):
    """A dropped `learning_rate=...` would be a run with another learning rate."""
    file = tmp_path / "grpo.yaml"
    file.write_text("learning_rate: 1.0e-6\nrun_name: a\n")
    sources = [str(file), "learning_rate=2e-6", "--run_name", "x=1"]
    words = given.read(sources, TRL, {}).words
    assert (words["learning_rate"].value, words["run_name"].value) == (2e-6, "x=1")


@pytest.mark.parametrize("syntax", [TRL, VERL])
def test_a_file_after_the_first_key_is_refused(syntax):
    """It would be left out, and the run would have the defaults of the framework."""
    with pytest.raises(ConfigError, match="argument 2: `run.sh` is no key=value; name files"):
        given.read(["a.b=1", "run.sh"], syntax, {})


def test_a_folder_that_is_not_there_is_refused_before_anything_is_read(tmp_path, capsys):
    output = tmp_path / "new" / "run.yml"
    assert cli.main(["import", "trl", "missing.yaml", "-o", str(output)]) == 2
    assert f"there is no folder {output.parent}" in capsys.readouterr().err


def test_json_is_read_as_yaml_is(tmp_path):
    values = {"actor_rollout_ref": {"rollout": {"n": 4}}, "data": {"train_batch_size": 64}}
    values["actor_rollout_ref"]["actor"] = {"ppo_mini_batch_size": 32}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(values, indent="\t"))  # YAML has no tabs
    stage = config_of("verl", file).stages[0]
    assert (stage.samples_per_prompt, stage.updates_per_step) == (4, 2)


def test_numbers_that_yaml_1_1_reads_as_texts(tmp_path):
    # huggingface/trl #1450: PyYAML reads 1e-4 as a text.
    file = tmp_path / "sft.yaml"
    file.write_text(
        "learning_rate: 1e-4\nweight_decay: '1e-2'\npacking: no\nassistant_only_loss: on\n"
    )
    stage = config_of("trl", file).stages[0]
    assert (stage.optimizer.learning_rate, stage.optimizer.weight_decay) == (1e-4, 0.01)
    assert stage.algorithm.train_on == "assistant"


def test_completions_per_device_are_no_prompts(tmp_path):
    # huggingface/trl #2858: one completion per device, eight accumulated, in groups of eight
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "num_generations: 8\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n"
    )
    stage = config_of("trl", file).stages[0]
    assert (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_step) == (1, 8, 1)
    assert config_of("trl", file, "--processes", "4").stages[0].prompts_per_step == 4


def test_a_recipe_of_open_r1(tmp_path):
    file = tmp_path / "config_demo.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\nmodel_revision: abc123\n"
        "torch_dtype: bfloat16\ndataset_name: open-r1/OpenR1-Math-220k\n"
        "dataset_prompt_column: problem\nsystem_prompt: Think first.\nbf16: true\n"
        "num_generations: 16\nper_device_train_batch_size: 16\nmax_prompt_length: 512\n"
        "max_completion_length: 2048\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs:\n  min_lr_rate: 0.1\nreward_weights: [1.0, 0.5]\n"
        "save_strategy: epoch\nwarmup_ratio: 0.1\nreport_to:\n- wandb\n"
    )
    config = config_of("trl", file, "--rows", "320")
    assert config.model.source == "hf://Qwen/Qwen2.5-1.5B-Instruct@abc123"
    assert (config.data.columns.prompt, config.data.system) == ("problem", "Think first.")
    assert config.stages[0].optimizer.final_fraction == 0.1
    assert config.stages[0].optimizer.warmup_steps == 96  # a tenth of 3 x 320 / 1 updates


def test_values_of_a_file_cannot_add_keys(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(json.dumps({"output_dir": "a\nseed: 7\n# b", "run_name": "x: y # z"}))
    config = config_of("trl", file)
    assert config.run.dir == "a\nseed: 7\n# b" and config.seed == 42
    file.write_text('? "odd\\nseed: 9"\n: 1\n')
    code, text, _ = run_import("trl", file)
    assert code == 2 and "\nseed: 9" not in text


def test_the_file_says_where_values_come_from_in_the_order_of_the_schema():
    _, text, _ = run_import("trl", FIXTURES / "trl" / "grpo.yaml")
    lines = text.splitlines()
    assert "      learning_rate: 1.0e-06  # learning_rate (grpo.yaml:11)" in lines
    assert "seed: 42  # default of TRL 1.16" in lines
    order = [line.partition(":")[0] for line in lines if line[:1].isalpha()]
    assert order == [
        key
        for key in dict.fromkeys(k.partition(".")[0] for k in keys.schema_keys())
        if key in order
    ]
    assert max(map(len, lines)) <= 100 or any("functions: [" in line for line in lines)


def test_the_file_goes_to_standard_output_and_the_report_to_standard_error(capsys):
    assert cli.main(["import", "trl", str(FIXTURES / "trl" / "sft.sh")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(writing.WRITTEN_BY) and err.startswith("mapped: ")


def test_the_report_as_json(tmp_path, capsys):
    file = FIXTURES / "trl" / "sft.sh"
    output = tmp_path / "run.yml"
    assert cli.main(["import", "trl", str(file), "--json", "-o", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["supported"] and report["faults"] == []
    (rate,) = [each for each in report["mapped"] if "learning_rate" in each["keys"]]
    assert rate["target"] == "stages.0.optimizer.learning_rate" and rate["value"] == 2e-5
    assert rate["keys"] == {"learning_rate": "sft.sh:5"}


def test_json_without_a_file_has_the_configuration_in_it(capsys):
    assert cli.main(["import", "trl", str(FIXTURES / "trl" / "sft.sh"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["configuration"].startswith(writing.WRITTEN_BY)


def test_only_files_of_rl_import_are_replaced(tmp_path, capsys):
    output = tmp_path / "run.yml"
    arguments = ["import", "trl", str(FIXTURES / "trl" / "sft.sh"), "-o", str(output)]
    assert cli.main(arguments) == 0 and cli.main(arguments) == 0
    output.write_text("model: mine\n")
    assert cli.main(arguments) == 2 and output.read_text() == "model: mine\n"
    assert "`rl import` did not write this file" in capsys.readouterr().err


def test_a_value_that_duet_refuses_ends_with_its_fault(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text("num_generations: 8\ntemperature: -1\n")
    code, text, said = run_import("trl", file)
    assert code == 2 and "sampling.temperature" in said and text


def test_keys_of_a_section_that_is_a_list_are_those_of_each_entry(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(
        "datasets:\n- {path: a/b, fraction: 0.7}\n- {path: c/d, name: e, fraction: 0.3}\n"
    )
    config = config_of("trl", file)
    assert [(data.path, data.subset, data.weight) for data in config.data] == [
        ("a/b", None, 0.7),
        ("c/d", "e", 0.3),
    ]
    assert {data.too_long for data in config.data} == {"truncate"}


@pytest.mark.parametrize("name", TABLES)
def test_rules_name_keys_and_reasons_that_exist(name):
    for key, rule in TABLES[name].items():
        if isinstance(rule, Copy):
            assert target(key, rule).replace("stages.0", "stages.N") in keys.schema_keys(), key
        elif isinstance(rule, Leave | Refuse):
            assert reason(key, rule), key


def test_a_rule_says_only_what_the_shared_table_does_not():
    """`rl.config.foreign` has the words of all frameworks: a rule of the same effect repeats it."""
    assert ABSENT is foreign.ABSENT
    repeated = [
        (name, key)
        for name, table in TABLES.items()
        for key, rule in table.items()
        if isinstance(rule, Copy)
        and rule.to
        and rule.to == foreign.FOREIGN.get(key.rpartition(".")[2])
    ]
    assert repeated == []


def test_every_word_of_a_draft_gets_one_fate():
    words = Given({"a": GivenValue(1, "x:1"), "b": GivenValue(2, "x:2")})
    draft = Draft("TRL 1.16", words, {"a": Copy("seed")}, Facts())
    draft.rest()
    assert (draft.fate_of("a"), draft.fate_of("b")) == ("mapped", "refused")
    assert draft.values["seed"].value == 1 and draft.refused


def test_numbers_of_options_are_checked():
    assert cli.main(["import", "trl", str(FIXTURES / "trl" / "sft.sh"), "--rows", "0"]) == 2
    with pytest.raises(ConfigError, match="--trainer ppo: the trainers of TRL"):
        draft_of("trl", FIXTURES / "trl" / "sft.sh", facts=convert.Facts(trainer="ppo"))


def test_trackers_that_duet_has_are_written(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text("report_to: [mlflow, trackio, comet_ml]\nrun_name: a\n")
    config, said = config_of("trl", file), said_of("trl", file)
    assert config.run.mlflow.name == config.run.trackio.name == "a" and config.run.wandb is None
    assert "no tracker for comet_ml" in said
