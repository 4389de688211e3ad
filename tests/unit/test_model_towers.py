"""Models that read pictures or sounds, around their weights: presets, built-in tokenizers, processors, saved files."""

import json

import jax
import numpy as np
import pytest

import policy
from policy.config import Runtime
from policy.huggingface import model_directory, sources
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.config.model import ModelOptions, TokenizerOptions
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.data.tokenizer import read_tokenizer
from rollout.media.expand import expand
from rollout.media.item import MediaError
from rollout.media.reference import refer
from rollout.text.chat import ChatError, render_prompt
from rollout.text.tokenizer import SPECIALS, load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz ?#CDEFGAB"
PRESETS = [name for name in sources.presets() if sources.preset_processor(name)]
# Parameters of the models with their towers, as their cards on the Hugging Face hub give them.
PUBLISHED = {
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "gemma3-4b": 4_300_079_472,
    "gemma3-27b": 27_432_406_640,
    "llama4-scout": 108_641_793_536,
    "llama4-maverick": 401_583_781_376,
}
PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
SOUND = {"array": np.random.default_rng(0).normal(0, 0.1, 5120).astype(np.float32), "sampling_rate": 8000}
CHAT = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a"}]


def tokenizer_of(source, alphabet=ALPHABET):
    return load_tokenizer("characters", alphabet, media=towers.media_tokens(ModelOptions(source=source)))


def prompt_of(*kinds, text="what?"):
    return [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}]


def references(tmp_path, *kinds):
    return [refer(kind, PICTURE if kind == "image" else SOUND, tmp_path) for kind in kinds]


# Presets.


def stored_names(graph):
    """Returns the names of all tensors in a saved directory."""
    names = []
    for place in model_directory.places(graph):
        experts = range(graph.shapes[place.path].shape[place.layers is not None] if place.stored.numbered else 1)
        for layer in [None] if place.layers is None else place.layers:
            names += [(place.name(place.stored, layer, expert), np.zeros(0)) for expert in experts]
    return {name for name, _ in model_directory._wrapped(graph.config, json.loads(graph.config.hf), names)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_towers_has_the_tensors_of_the_class_of_transformers(name):
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    graph = Graph(sources.preset(name, media=True), Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]))
    hf = json.loads(graph.config.hf)
    assert graph.config.image is not None and (graph.config.audio is not None) == bool(hf.get("audio_config"))
    oracle = getattr(transformers, hf["architectures"][0])
    with torch.device("meta"):
        model = oracle(oracle.config_class(**{key: value for key, value in hf.items() if key != "architectures"}))
    state, parameters = model.state_dict(), sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() for key, b in model.named_buffers() if key in state)
    assert graph.parameters == parameters + buffers
    assert parameters == PUBLISHED.get(name, parameters)
    tied = set() if not graph.config.tied_head else {key for key in state if key.endswith("lm_head.weight")}
    # Experts have one form in the released files and in the class, and others in what transformers saves.
    forms = [set(each) - tied - {"language_model.lm_head.weight"} * bool(tied) for each in ()]
    forms += [{key for key in each if not (tied and key.endswith("lm_head.weight"))} for each in (state, written(model))]
    assert stored_names(graph) in forms
