"""Which weights an adapter names (policy/huggingface/peft/targets.py)."""

import math

import jax
import oracles
import pytest

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.config import Runtime
from policy.huggingface import sources
from policy.huggingface.peft.targets import TargetError, resolved, targets
from policy.mesh.sharding import layout
from policy.model import Graph


def graph_of(config) -> Graph:
    return Graph(config, Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]))


def short(kind, **keys) -> Graph:
    return graph_of(families.read(oracles.short(kind, **keys)))


def numbers_a_rank(graph: Graph) -> int:
    """How many numbers an adapter of rank 1 of all linear layers has."""
    total = 0
    for path in targets(graph, AdapterSpec(rank=1)):
        shape = graph.shapes[path].shape
        rows, columns = graph.matrices[path]
        inputs = math.prod(shape[dim] for dim in rows)
        outputs = math.prod(shape[dim] for dim in columns)
        total += math.prod(shape) // (inputs * outputs) * (inputs + outputs)
    return total


@pytest.mark.parametrize(
    "preset, numbers",
    [
        ("llama3.1-8b", 2_621_440),
        ("qwen3-30b-a3b", 52_740_096),
        ("deepseek-v3", 418_414_400),
    ],
)
def test_numbers_of_published_models(preset, numbers):
    assert numbers_a_rank(graph_of(sources.preset(preset))) == numbers


def test_all_linear_leaves_out_router_indexer_norms_embedding_and_head():
    graph = short("DeepseekV32")
    chosen = targets(graph, AdapterSpec())
    assert not [path for path in chosen if "router" in path or "indexer" in path or "norm" in path]
    assert not {"embed_tokens", "lm_head"} & set(chosen)
    assert any("shared.gate_proj" in path for path in chosen)


def test_ranks_of_experts():
    graph = short("Qwen3Moe")
    moe = next(layer.moe for layer in graph.config.layers if layer.moe)
    chosen = targets(graph, AdapterSpec(rank=8))
    ranks = {path: target.rank for path, target in chosen.items() if "expert_" in path}
    assert set(ranks.values()) == {8 // moe.router.experts_per_token}
    assert {target.rank for path, target in chosen.items() if path not in ranks} == {8}
    assert {target.rank for target in targets(graph, AdapterSpec(rank=1)).values()} == {1}
    own = targets(graph, AdapterSpec(rank=8, expert_rank=5))
    assert {own[path].rank for path in ranks} == {5}
    assert not [path for path in targets(graph, AdapterSpec(experts="none")) if "expert_" in path]


def test_patterns_name_modules_by_their_end_after_a_dot():
    graph = short("Llama", num_hidden_layers=4)
    assert {
        path.rpartition(".")[2] for path in targets(graph, AdapterSpec(targets=("q_proj",)))
    } == {"q_proj"}
    with pytest.raises(TargetError, match="matches no module"):
        targets(graph, AdapterSpec(targets=("_proj",)))
    spec = AdapterSpec(targets=(r"layers\.1\..*",), exclude=("k_proj",))
    of_one = targets(graph, spec)
    assert {target.repeats for target in of_one.values()} == {(1,)}
    assert resolved(graph, spec).adapted == tuple(of_one.values())
    assert len(of_one) == 6
    chosen = targets(graph, AdapterSpec(targets=("lm_head", "q_proj"), train=("lm_head",)))
    assert [path.rpartition(".")[2] for path in chosen] == ["q_proj"]


def test_names_of_fused_tensors_and_of_both_spellings():
    phi = targets(short("Phi3"), AdapterSpec(targets=("qkv_proj",)))
    assert {path.rpartition(".")[2] for path in phi} == {"q_proj", "k_proj", "v_proj"}
    mixtral = short("Mixtral")
    assert targets(mixtral, AdapterSpec(targets=("w2",))) == targets(
        mixtral, AdapterSpec(targets=(r"experts\.\d+\.down_proj",))
    )


def test_refusals_say_what_to_type():
    graph = short("Qwen3Moe")
    with pytest.raises(TargetError, match=r"nearest: q_proj"):
        targets(graph, AdapterSpec(targets=("qproj",)))
    with pytest.raises(TargetError, match="exclude: 'nothing' matches no module"):
        targets(graph, AdapterSpec(exclude=("nothing",)))
    with pytest.raises(TargetError, match="no regular expression"):
        targets(graph, AdapterSpec(targets=("(",)))
    with pytest.raises(TargetError, match="adapters together"):
        targets(graph, AdapterSpec(targets=(r"experts\.0\.up_proj",)))
    with pytest.raises(TargetError, match="matches no module"):  # a router
        targets(graph, AdapterSpec(targets=(r"mlp\.gate",)))
    tied = short("Llama", tie_word_embeddings=True)
    with pytest.raises(TargetError, match="the head of this model is its embedding"):
        targets(tied, AdapterSpec(targets=("embed_tokens",)))
