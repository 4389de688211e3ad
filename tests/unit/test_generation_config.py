"""The generation_config.json of an export: stops of training, sampling settings, and the keys of
the source."""

import json
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

import policy
from policy.huggingface import generation_config, sources
from rl.config.run import RunConfig
from rl.stages.export import generation
from rollout.text.tokenizer import load_tokenizer, stop_ids

SFT, GRPO = {"algorithm": "sft", "steps": 1}, {"algorithm": "grpo", "steps": 1}
SAMPLING = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "stop_token_ids": [0]}


def keys(*stages, model="tiny-deepseek", tokenizer=None, **more):
    """The keys of an export after these stages."""
    tree = {
        "model": str(model),
        "tokenizer": "bytes",
        "data": {"task": "arithmetic"},
        "rewards": {"functions": ["exact_answer"]},
    }
    config = RunConfig.model_validate(tree | {"stages": list(stages)} | more)
    tokenizer = tokenizer or load_tokenizer("bytes")
    return generation.keys(
        SimpleNamespace(config=config, tokenizer=tokenizer, stop_ids=stop_ids(tokenizer, model))
    )


def source(directory, **given):
    """A directory with this generation_config.json."""
    (directory / "generation_config.json").write_text(json.dumps(given))
    return directory


def test_stops_and_sampling_are_those_of_the_last_stage_that_samples():
    other = {"sampling": {"temperature": 0.1, "stop_token_ids": [9]}}
    made = keys(GRPO | other, GRPO | {"sampling": SAMPLING}, SFT | other)
    assert made == {
        "eos_token_id": [0, 2],
        "bos_token_id": 1,
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
    }
    assert keys(SFT, SFT | other)["eos_token_id"] == [2, 9]  # nothing samples: the last stage
    assert keys(SFT)["eos_token_id"] == 2


def test_greedy_decoding_has_no_filters_and_min_p_is_kept():
    greedy = keys(GRPO | {"sampling": SAMPLING | {"temperature": 0.0}})
    assert greedy["do_sample"] is False and not {"temperature", "top_k", "top_p"} & greedy.keys()
    assert keys(GRPO | {"sampling": {"min_p": 0.1}})["min_p"] == 0.1


def test_other_keys_of_the_source_stay(tmp_path):
    model = source(
        tmp_path,
        eos_token_id=[7, 2],
        bos_token_id=5,
        repetition_penalty=1.1,
        _from_model_config=True,
        temperature=0.6,
        top_k=20,
        min_p=0.2,
        do_sample=True,
    )
    sampled = keys(GRPO | {"sampling": SAMPLING}, model=model)
    assert sampled["eos_token_id"] == [0, 2, 7] and sampled["repetition_penalty"] == 1.1
    assert (sampled["temperature"], sampled["top_k"], sampled["bos_token_id"]) == (0.7, 5, 1)
    assert not {"min_p", "_from_model_config"} & sampled.keys()
    trained = keys(SFT, model=model)  # nothing was sampled: the source's own settings
    assert (trained["temperature"], trained["top_k"], trained["min_p"]) == (
        0.6,
        20,
        0.2,
    ) and "top_p" not in trained
    bare = load_tokenizer("bytes")
    bare.bos_token = None
    assert keys(SFT, model=model, tokenizer=bare)["bos_token_id"] == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_transformers_reads_it_and_stops_at_every_token(tmp_path, temperature):
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = policy.create(sources.preset("qwen3-0.6b", sizes | heads))
    made = keys(
        GRPO
        | {
            "sampling": SAMPLING
            | {"temperature": temperature, "stop_token_ids": list(range(0, 320, 2))}
        }
    )
    policy.save(model, tmp_path, generation=made)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert read.eos_token_id == list(range(0, 320, 2)) and read.do_sample == bool(temperature)
    assert (read.bos_token_id, read.pad_token_id) == (1, 0)
    assert not temperature or (read.temperature, read.top_k, read.top_p) == (0.7, 5, 0.9)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    import torch

    tokens = theirs.generate(torch.tensor([[1, 20]]), max_new_tokens=64)[0, 2:].tolist()
    assert all(token % 2 for token in tokens[:-1]) and (tokens[-1] % 2 == 0 or len(tokens) == 64)
    assert stop_ids(load_tokenizer("bytes"), tmp_path) == tuple(range(0, 320, 2))


def test_without_keys_no_file_is_written(tmp_path):
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    policy.save(policy.create(sources.preset("qwen3-0.6b", sizes | heads)), tmp_path)
    assert (
        not (tmp_path / generation_config.FILE).exists() and generation_config.read(tmp_path) == {}
    )
