"""Configurations with values of any type, and tokenizers as people have them: read, or refused with
file and key."""

import copy
import io
import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from oracles import KINDS, configuration, random_model
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import classification, generation_config, sources
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from policy.model import Graph
from rl.commands import cli
from rl.config.run import RunConfig
from rl.data.inspect.source import length_faults
from rollout.text.chat import ChatError, encode_conversation, render_prompt
from rollout.text.tokenizer import byte_level, load_tokenizer

VALUES = (None, "x", [], {}, -1, 0, 2.5, True, float("nan"))
HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def paths(hf, before=()):
    """The keys of all values of a configuration, in sections too."""
    for key, value in hf.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "Llama" else pytest.mark.slow) for k in sorted(KINDS)]
)
def test_any_value_is_read_or_refused(kind):
    base = configuration(kind)
    for path in paths(base):
        for value in VALUES:
            changed = copy.deepcopy(base)
            section = changed
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = value
            try:
                families.read(changed)
            except UnsupportedModel:
                pass
            except Exception as error:
                pytest.fail(f"{'.'.join(path)}: {value!r}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "key, value",
    [
        ("vocab_size", "x"),
        ("hidden_size", None),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("head_dim", 7),
        ("rms_norm_eps", []),
        ("rms_norm_eps", -1e-6),
        ("initializer_range", -0.02),
        ("intermediate_size", 2.5),
    ],
)
def test_the_file_and_the_key_are_named(key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configuration("Llama") | {key: value}))
    with pytest.raises(UnsupportedModel, match=f"config.json: .*{key}"):
        policy.load(tmp_path)


@pytest.mark.parametrize(
    "kind, keys, expected",
    [
        (
            "Llama",
            {"num_key_value_heads": 3},
            "num_key_value_heads: 3 does not divide num_attention_heads, 4",
        ),
        (
            "Gemma4",
            {"num_key_value_heads": 3},
            "num_key_value_heads: 3 does not divide num_attention_heads, 4",
        ),
        (
            "FalconH1",
            {"num_key_value_heads": 3},
            "num_key_value_heads: 3 does not divide num_attention_heads, 4",
        ),
        ("Gemma4", {"global_head_dim": 7}, "global_head_dim: 7 is odd"),
        ("DeepseekV3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim: 3 is odd"),
        (
            "Glm4",
            {"head_dim": 6},
            "partial_rotary_factor of head_dim .*: 3 dimensions, an odd number",
        ),
        ("DeepseekV3", {"n_group": 3}, "n_group: 3 groups"),
        ("DeepseekV3", {"topk_group": 7}, "topk_group: 7 of 4 groups"),
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts"),
        ("DeepseekV4", {"compress_rope_theta": 0.0}, "compress_rope_theta: 0.0 cannot be used"),
        ("DeepseekV4", {"hc_eps": -1.0}, "hc_eps: -1.0 cannot be used"),
        ("DeepseekV4", {"hc_mult": 0}, "hc_mult: 0 cannot be used"),
        ("DeepseekV4", {"index_topk": 0}, "index_topk: 0 cannot be used"),
        ("Qwen4Exp", {"hc_lowrank": 0}, "hc_lowrank: 0 cannot be used"),
        (
            "Qwen4Exp",
            {"ple_layer_ids": [1], "ple_embed_dim": 16, "eos_token_id": 7, "split_ngram_parts": 0},
            "split_ngram_parts: 0 parts",
        ),
        ("Gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: 0.0 cannot be used"),
    ],
)
def test_sizes_that_do_not_go_with_each_other(kind, keys, expected):
    with pytest.raises(UnsupportedModel, match=expected):
        families.read(configuration(kind, **keys))


def test_files_with_a_byte_order_mark_and_of_any_depth(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configuration("Llama")), encoding="utf-8-sig")
    assert sources.read_config(tmp_path).family == "llama"
    file.write_text('{"a":' * 100_000)
    with pytest.raises(ModelFileError, match="config.json"):
        sources.read_config(tmp_path)
    for value in ("2", [[2]], [2.0], 2**40, {"a": 1}):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        file.write_text("{}")
        with pytest.raises(ModelFileError, match="generation_config.json: eos_token_id"):
            generation_config.stop_ids(tmp_path)


@pytest.mark.parametrize(
    "template, expected",
    [
        (
            {"rag": "{{ 'a' }}", "tool_use": "{{ 'b' }}"},
            "chat templates rag, tool_use and none of the name default",
        ),
        ("{{ none + 'a' }}", "the chat template fails: TypeError"),
        ("{{ absent.name }}", "refuses the conversation"),
        ("{{ strftime_now2('%d') }}", "refuses the conversation"),
        ("{{ raise_exception('no system') }}", "refuses the conversation: no system"),
        ("{{ messages[9].content }}", "refuses the conversation"),
        ("{% for", "refuses the conversation"),
    ],
)
def test_templates_that_fail(template, expected):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(ChatError, match=expected):
        render_prompt(tokenizer, HELLO[:1])


def test_a_turn_of_calls_to_tools_has_no_content():
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or 'call()' }}\n{% endfor %}"
    )
    [(ids, mask)] = encode_conversation(
        tokenizer, [HELLO[0], {"role": "assistant", "content": None}]
    )
    assert tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept]).endswith(
        "call()"
    )


def test_a_tokenizer_without_offsets(monkeypatch):
    tokenizer = byte_level()

    def slow(self, *texts, return_offsets_mapping=False, **options):
        raise NotImplementedError(
            "return_offset_mapping is not available when using Python tokenizers"
        )

    monkeypatch.setattr(type(tokenizer), "__call__", slow)
    with pytest.raises(ChatError, match="does not say where its tokens begin"):
        encode_conversation(tokenizer, HELLO)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[1"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("chat_template.json", '["a"]'),
    ],
)
def test_files_of_tokenizers_that_cannot_be_read(name, content, tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}: no tokenizer can be read from it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "kind, keys, length, levels",
    [
        ("Llama", {"max_position_embeddings": 64}, 64, []),
        ("Llama", {"max_position_embeddings": 64}, 65, ["warn"]),
        (
            "Llama",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
            128,
            [],
        ),
        ("GPT2", {}, 4096, ["refuse"]),
    ],
)
def test_more_tokens_than_positions(kind, keys, length, levels, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configuration(kind, **keys)))
    stage = {"algorithm": "sft", "steps": 1}
    run = {
        "model": str(tmp_path),
        "data": {"task": "arithmetic"},
        "max_length": length,
        "stages": [stage],
    }
    assert [each.level for each in length_faults(RunConfig.model_validate(run))] == levels


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    policy.save(random_model(families.read(configuration("Llama", vocab_size=320))), folder)
    byte_level().save_pretrained(folder)
    return folder


BROKEN = {
    "heads": ("config.json", lambda keys: keys | {"num_key_value_heads": 3}),
    "wrong type": ("config.json", lambda keys: keys | {"num_attention_heads": "4"}),
    "null": ("config.json", lambda keys: keys | {"hidden_size": None}),
    "stops": ("generation_config.json", lambda keys: {"eos_token_id": ["</s>"]}),
    "list": ("generation_config.json", lambda keys: [1]),
    "tokenizer": ("tokenizer_config.json", lambda keys: [1]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_verb_ends_with_the_code_of_a_broken_model(case, directory, tmp_path, capsys):
    name, change = BROKEN[case]
    source = tmp_path / "model"
    shutil.copytree(directory, source)
    file = source / name
    file.write_text(json.dumps(change(json.loads(file.read_text()) if file.exists() else {})))
    every_verb_ends_with_4(source, tmp_path, capsys, str(source))


def run_file(folder, source, **more):
    """Writes a run of one step on a model."""
    stage = {"algorithm": "sft", "steps": 1}
    run = {
        "model": str(source),
        "data": {"task": "arithmetic"},
        "max_length": 64,
        "platform": "cpu",
        "stages": [stage],
    }
    (folder / "run.yml").write_text(
        yaml.safe_dump(run | more | {"run": {"dir": str(folder / "run")}})
    )
    return folder / "run.yml"


def every_verb_ends_with_4(source, tmp_path, capsys, *words):
    run_file(tmp_path, source)
    (tmp_path / "prompts.txt").write_text("a\n")
    verbs = (
        ["train", "--check", tmp_path / "run.yml"],
        ["train", tmp_path / "run.yml"],
        ["inspect", tmp_path / "run.yml"],
        ["generate", source, "--prompts", tmp_path / "prompts.txt", "--platform", "cpu"],
        ["chat", source, "--platform", "cpu"],
    )
    for verb in verbs:
        code = cli.main([*map(str, verb)])
        said = capsys.readouterr().err
        assert code == 4 and all(word in said for word in words) and "Traceback" not in said, (
            verb[0],
            code,
            said,
        )
    assert not (tmp_path / "run").exists()


TENSOR = "model.layers.1.mlp.up_proj.weight"
OTHER_TENSORS = {
    "missing": (lambda tensors: tensors.pop(TENSOR), [f"missing tensor {TENSOR}", "[48, 32]"]),
    "head": (
        lambda tensors: tensors.pop("lm_head.weight"),
        ["missing tensor lm_head.weight", "tie_word_embeddings"],
    ),
    "shape": (
        lambda tensors: tensors.update({TENSOR: tensors[TENSOR][:40]}),
        [
            "model.safetensors",
            f"tensor {TENSOR} has shape [40, 32], expected [48, 32] by config.json",
        ],
    ),
    "kind": (
        lambda tensors: tensors.update({TENSOR: tensors[TENSOR].astype(np.int8)}),
        [f"{TENSOR} is I8"],
    ),
    "unexpected": (
        lambda tensors: tensors.update(
            {"model.layers.1.mlp.up_proj.bias": np.ones(48, np.float32)}
        ),
        ["unexpected tensors model.layers.1.mlp.up_proj.bias"],
    ),
}


def with_other_tensors(directory, folder, case):
    change, words = OTHER_TENSORS[case]
    shutil.copytree(directory, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return words


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_tensors_that_are_not_those_of_the_configuration(case, directory, tmp_path, capsys):
    words = with_other_tensors(directory, tmp_path / "model", case)
    assert cli.main(["train", "--check", str(run_file(tmp_path, tmp_path / "model"))]) == 4
    said = capsys.readouterr().err
    assert all(word in said for word in (str(tmp_path / "model"), *words)), said


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "shape" else pytest.mark.slow)
        for case in OTHER_TENSORS
    ],
)
def test_every_verb_compares_the_tensors_before_it_reads_a_number(
    case, directory, tmp_path, capsys, monkeypatch
):
    source = tmp_path / "model"
    words = with_other_tensors(directory, source, case)
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a number was read"))
    every_verb_ends_with_4(source, tmp_path, capsys, str(source), *words)
    assert cli.main(["plan", str(tmp_path / "run.yml"), "--topology", "cpu:1"]) == 4
    assert words[0] in capsys.readouterr().err


@pytest.mark.slow
def test_tensors_are_compared_without_jax(directory, tmp_path):
    """In a process of its own, which needs no device of the run."""
    words = with_other_tensors(directory, tmp_path / "model", "shape")
    run_file(tmp_path, tmp_path / "model")
    code = """
import sys
from rl.commands import cli
codes = [cli.main([verb, *more, sys.argv[1]]) for verb, *more in (["train", "--check"], ["inspect"])]
print("codes", codes, "jax" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "codes [4, 4] False" in done.stdout, done.stdout + done.stderr
    assert all(done.stderr.count(word) == 2 for word in words)


def test_a_teacher_and_a_reward_model_of_another_shape(directory, tmp_path, capsys):
    words = with_other_tensors(directory, tmp_path / "teacher", "shape")
    teacher = {
        "teacher": str(tmp_path / "teacher"),
        "stages": [{"algorithm": "distill", "steps": 1}],
    }
    scores = tmp_path / "scores"
    policy_model = policy.load(directory)
    graph = Graph(
        sources.trunk(policy_model.config), policy_model.graph.runtime, policy_model.graph.layout
    )
    trunk = {path: policy_model.params[path] for path in graph.paths}
    classification.write(scores, graph, trunk, np.zeros(32, np.float32), None)
    rewards = [{"name": "reward_model", "options": {"source": str(scores)}}]
    scored = {
        "rewards": {"functions": rewards},
        "stages": [{"algorithm": "grpo", "steps": 1}],
        "max_length": 320,
    }
    check = ["train", "--check", str(run_file(tmp_path, directory, **scored))]
    assert cli.main(check) == 0, capsys.readouterr().err
    save_file(
        load_file(scores / "model.safetensors") | {"score.weight": np.zeros((1, 31), np.float32)},
        scores / "model.safetensors",
    )
    assert cli.main(check) == 4
    assert (
        f"reward model {scores}" in (said := capsys.readouterr().err)
        and "[1, 31], expected [1, 32]" in said
    )
    run_file(tmp_path, directory, **teacher)
    assert cli.main(check) == 4
    said = capsys.readouterr().err
    assert all(word in said for word in (f"teacher {tmp_path / 'teacher'}", *words)), said


def said_by_verbs(source, folder, capsys, monkeypatch):
    """Yields (verb, exit code, standard error) of each verb with a few tokens more than 64."""
    (folder / "prompts.txt").write_text("a\n")
    run = str(run_file(folder, source, max_length=65, tokenizer="bytes"))
    few = ["--platform", "cpu", "--max-new-tokens"]
    for verb in (
        ["generate", str(source), "--prompts", str(folder / "prompts.txt"), *few, "64"],
        ["chat", str(source), "--max-length", "65", *few, "4"],
        ["plan", run, "--topology", "cpu:1"],
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        code = cli.main(verb)
        yield verb[0], code, capsys.readouterr().err


@pytest.mark.parametrize("kind, learned", [("Llama", False), ("GPT2", True)])
def test_verbs_say_that_there_are_more_tokens_than_positions(
    kind, learned, tmp_path, capsys, monkeypatch
):
    """A warning where rotary positions go on, as check 16 of `rl inspect`; a refusal where they are
    learned."""
    source, positions = tmp_path / "model", "n_positions" if learned else "max_position_embeddings"
    policy.save(
        random_model(families.read(configuration(kind, vocab_size=320, **{positions: 64}))), source
    )
    byte_level().save_pretrained(source)
    for verb, code, said in said_by_verbs(source, tmp_path, capsys, monkeypatch):
        assert " is more than the 64 positions of this model. " in said, (verb, said)
        assert code == (2 if learned else 0) and ("warning: " in said) != learned, (
            verb,
            code,
            said,
        )


def test_a_conversation_has_as_many_tokens_as_the_model_has_positions(
    directory, capsys, monkeypatch
):
    made = Mock()
    monkeypatch.setattr("rollout.Generator", made)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["chat", str(directory), "--platform", "cpu"]) == 0
    assert made.call_args.kwargs["max_length"] == 128 and "warning" not in capsys.readouterr().err
