"""A reward model of any family is, in its directory, the sequence classification model that
transformers makes of it.
"""

import jax
import numpy as np
import pytest
from oracles import random_model, short

from policy import families
from policy.config import Runtime
from policy.huggingface import classification, sources
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.training.reward_model import RewardModelScorer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["DeepseekV3", "GPT2", "Glm4", "Phi3", "Qwen3_5", "Mistral4"])
def test_transformers_gives_the_scores_of_what_we_write(kind, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification

    mesh, rng = layout({"fsdp": 1}, devices=jax.devices()[:1]), np.random.default_rng(0)
    config = families.read(short(kind))
    graph = Graph(sources.trunk(config), Runtime(), mesh)
    weights = random_model(config).params
    head = rng.normal(size=config.hidden_size).astype(np.float32)
    classification.write(
        tmp_path, graph, {path: weights[path] for path in graph.paths}, head, pad_id=0
    )
    sequences = [rng.integers(1, 159, length).tolist() for length in (5, 9, 3)]
    result = RewardModelScorer.read(tmp_path, Runtime(), mesh, 16)(sequences)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert {
        key: list(value) for key, value in info.items() if value
    } == {} and "Classification" in graph.config.hf
    with torch.no_grad():
        expected = [model.eval()(torch.tensor([ids])).logits.item() for ids in sequences]
    np.testing.assert_allclose(result, expected, atol=2e-5)
