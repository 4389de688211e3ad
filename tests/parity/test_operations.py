"""Operations counted from a configuration are those that torch counts while transformers
computes."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from oracles import STANDARD, configuration, oracle, saved, tokens

import policy
from policy import families
from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
from policy.config import Attention, Runtime
from policy.huggingface import sources
from policy.huggingface.peft.targets import resolved
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.accounting import chips
from rl.accounting.flops import Operations, lengths, memory_share, rates

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


def counted(model, row) -> int:
    """Of all products of matrices but those that make rotary angles."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.from_numpy(row), use_cache=False)
    return counter.get_total_flops() - _rotary(counter)


def _rotary(counter) -> int:
    """Of products that make rotary angles."""
    return sum(
        sum(result.values())
        for name, result in counter.get_flop_counts().items()
        if name.endswith(("rotary_emb", "rotary_emb_local"))
    )


@pytest.mark.parametrize(
    "kind", ["Llama", "Qwen3Moe", "DeepseekV3", "GptOss", "Gemma2", "Mixtral", "Olmo3"]
)
def test_one_token_needs_what_torch_counts(kind, tmp_path):
    """Of one token every key is seen, so that nothing differs but what is counted."""
    model = oracle(kind, **STANDARD[kind])
    ours = Operations(policy.load(saved(model, tmp_path)).graph)
    assert ours.forward([1]) == counted(model, tokens(1, 1))
    assert ours.forward([1, 1, 1]) == 3 * ours.forward([1])


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("down_proj", "o_proj")])
def test_an_update_of_an_adapter_needs_what_torch_counts(targets, tmp_path):
    """One pass forward, for base weights one more for the gradient of their inputs, for adapters
    three."""
    from torch.utils.flop_counter import FlopCounterMode

    peft = pytest.importorskip("peft", reason="the oracle is peft: pip install 'duet-rl[test]'")
    model = oracle("Llama", **STANDARD["Llama"])
    graph = policy.load(saved(model, tmp_path)).graph
    named = targets if targets == "all-linear" else list(targets)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=named))
    adapted.enable_input_require_grads()
    row = torch.from_numpy(tokens(1, 1))
    spec = resolved(graph, AdapterSpec(rank=2, targets=targets))
    ours = Operations(graph, adapters=Adapters(graph.with_runtime(adapter=spec)))
    assert ours.forward([1]) == counted(adapted, tokens(1, 1))
    with FlopCounterMode(display=False) as counter:
        adapted(row, use_cache=False).logits.sum().backward()
    assert ours.with_gradient([1]) == counter.get_total_flops() - _rotary(counter)
    assert ours.of_runs_with_gradient(np.array([3]), np.array([1])) == (
        ours.with_gradient([3]) - ours.with_gradient([1])
    )


@pytest.mark.parametrize(("experts", "share"), [("each", 1.0), ("shared", 1.0), ("none", 0.0)])
def test_adapters_of_experts_count_for_those_that_a_token_goes_to(experts, share):
    graph = Graph(sources.preset("qwen3-30b-a3b"), Runtime(), layout(devices=jax.devices()[:1]))
    spec = AdapterSpec(rank=8, targets=("gate_proj", "down_proj"), expert_rank=2, experts=experts)
    if experts == "none":
        spec = replace(spec, targets=("gate_proj", "q_proj"))
    adapters = Adapters(graph.with_runtime(adapter=resolved(graph, spec)))
    routed = 48 * 8 * 2 * 2 * (2048 + 768)  # layers, k, rank, two weights
    attention = 0 if share else 48 * 8 * (2048 + 4096)
    ours = Operations(graph, adapters=adapters)
    assert ours.adapter_weights == share * routed + attention
    plain = Operations(graph)
    assert plain.with_gradient([9]) == 3 * plain.forward([9])
    saved_work = plain.with_gradient([9]) - ours.with_gradient([9])
    assert saved_work == 9 * (2 * plain.active_weights - 6 * ours.adapter_weights)


def test_weights_that_learn_in_full_next_to_an_adapter_have_a_gradient():
    graph = Graph(sources.preset("qwen3-0.6b"), Runtime(), layout(devices=jax.devices()[:1]))
    spec = AdapterSpec(rank=8, targets=("q_proj",), train=("embed_tokens",))
    frozen, learning = (
        Operations(graph, adapters=Adapters(graph.with_runtime(adapter=resolved(graph, each))))
        for each in (replace(spec, train=()), spec)
    )
    head = graph.config.vocab_size * graph.config.hidden_size
    assert learning.with_gradient([5]) - frozen.with_gradient([5]) == 5 * 2 * head


def test_of_chosen_blocks_their_tokens_count(tmp_path):
    """Of blocks of 4 tokens a query sees at most 2 complete ones, and its own while that is
    open."""
    keys = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    model = oracle("Qwen4Exp", indexer_budget=8, indexer_compress_ratio=4, **keys)
    graph = policy.load(saved(model, tmp_path)).graph
    ours, mixer = Operations(graph), graph.config.layers[0].mixer
    assert ours.forward([1]) == counted(model, tokens(1, 1))
    complete = [(t + 1) // 4 for t in range(14)]
    pairs = sum(4 * min(each, 2) + (t + 1) % 4 for t, each in enumerate(complete))
    scored = 2 * mixer.indexer.heads * mixer.indexer.head_dim * sum(complete)
    between_tokens = 2 * (4 * mixer.heads * mixer.head_dim * pairs + scored)
    assert ours.forward([14]) == 2 * ours.active_weights * 14 + between_tokens


def test_pairs_that_do_not_see_each_other_do_not_count(tmp_path):
    """torch multiplies all T x T pairs; of 9 tokens 45 are causal, and of a window of 4 only 30."""
    model = oracle("Qwen3Moe", **STANDARD["Qwen3Moe"])
    graph = policy.load(saved(model, tmp_path / "plain")).graph
    spec = graph.config.layers[0].mixer
    pair = 4 * spec.heads * spec.head_dim * len(graph.config.layers)
    assert counted(model, tokens(1, 9)) - Operations(graph).forward([9]) == (81 - 45) * pair
    windowed = oracle("Qwen3Moe", use_sliding_window=True, sliding_window=4, **STANDARD["Qwen3Moe"])
    graph = policy.load(saved(windowed, tmp_path / "window")).graph
    assert all(
        isinstance(layer.mixer, Attention) and layer.mixer.window == 4
        for layer in graph.config.layers
    )
    assert counted(windowed, tokens(1, 9)) - Operations(graph).forward([9]) == (81 - 30) * pair


def test_a_shared_prompt_is_multiplied_once_and_seen_by_every_completion(tmp_path):
    graph = policy.load(saved(oracle("Llama", **STANDARD["Llama"]), tmp_path)).graph
    ours, attention = Operations(graph), lambda n: Operations(graph).forward([n], weighed=0)
    assert ours.forward([7, 9], weighed=11) == pytest.approx(
        2 * 11 * ours.active_weights + attention(7) + attention(9)
    )
    assert (
        Operations(graph, head=False).active_weights
        == ours.active_weights - graph.config.vocab_size * graph.config.hidden_size
    )


@pytest.mark.parametrize("layers", [[1], [1, 3]])
def test_of_a_table_of_ngrams_two_products_count(layers):
    hf = configuration("Qwen4Exp", **STANDARD["Qwen4Exp"] | {"ple_layer_ids": layers})
    with_tables, without = (
        Operations(
            Graph(families.read(each), Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]))
        )
        for each in (hf, hf | {"ple_layer_ids": None})
    )
    streams, hidden, width = hf["hc_count"], hf["hidden_size"], hf["ple_embed_dim"]
    keys_and_values = (streams + 1) * width * hidden
    assert with_tables.active_weights - without.active_weights == len(layers) * keys_and_values


def test_lengths_are_those_of_the_sequences():
    assert sorted(lengths(np.array([[1, 1, 2, 0], [0, 0, 0, 0], [1, 2, 2, 2]])).tolist()) == [
        1,
        1,
        2,
        3,
    ]
    assert lengths(np.zeros((2, 3), int)).size == 0


@pytest.mark.parametrize(
    ("preset", "tables", "billions"),
    [
        ("deepseek-v3", 1, 37.0),
        ("qwen3-30b-a3b", 1, 3.3),
        ("gpt-oss-20b", 0, 3.6),
        ("mixtral-8x7b", 1, 12.9),
    ],
)
def test_active_weights_are_those_that_the_papers_give(preset, tables, billions):
    """As papers and model cards round them; but for gpt-oss they count the table of embeddings
    too."""
    graph = Graph(sources.preset(preset), Runtime(), layout(devices=jax.devices()[:1]))
    table = graph.config.vocab_size * graph.config.hidden_size
    assert Operations(graph).active_weights + tables * table == pytest.approx(
        billions * 1e9, rel=0.02
    )


def test_rates_are_of_one_device_and_a_share_of_what_it_can_do():
    def on(kind, count):
        return SimpleNamespace(
            mesh=SimpleNamespace(devices=np.full(count, SimpleNamespace(device_kind=kind)))
        )

    result = rates("train", 918e12, 4000, 2.0, on("TPU v6 lite", 4))
    assert result == {
        "perf/train_tokens_per_s": 500.0,
        "perf/train_tflops_per_s": 114.75,
        "perf/mfu_train": 0.125,
    }
    assert rates("train", 1e12, 3, 2.0, on("cpu", 1)) == {
        "perf/train_tokens_per_s": 1.5,
        "perf/train_tflops_per_s": 0.5,
    }
    assert rates("sample", 1e12, 3, 0.0, on("cpu", 1)) == {}, "what was left out has no rate"
    assert memory_share(1640e9, 4.0, on("TPU v6 lite", 4)) == {"perf/sample_hbm_utilisation": 0.25}
    assert (
        memory_share(1640e9, 4.0, on("cpu", 1))
        == memory_share(0.0, 0.0, on("TPU v6 lite", 4))
        == {}
    )
    names = (
        "TPU v4",
        "TPU v5 lite",
        "TPU v5",
        "TPU v5p",
        "TPU v6 lite",
        "TPU7x",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA L40S",
    )
    assert [chips.of(name).name for name in names] == [
        "v4",
        "v5e",
        "v5p",
        "v5p",
        "v6e",
        "tpu7x",
        "h100",
        "l40s",
    ]
