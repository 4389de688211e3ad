"""Files of adapters (policy/huggingface/peft) against `peft`, and against a merge by hand where it
leaves out a part of an adapter."""

import json
from pathlib import Path

import numpy as np
import pytest
from adapters import (
    SEQUENCE,
    Base,
    adapted,
    base,
    base_model,
    logits,
    merged_by_hand,
    random_params,
)
from oracles import classes

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.huggingface.peft.merge import merged
from policy.huggingface.peft.reader import read_adapter
from policy.huggingface.peft.writer import write_adapter
from policy.huggingface.tensorfiles import ModelFileError
from policy.model import Model

pytest.importorskip("peft")
# peft looks for the patterns of experts among modules only, and uses them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ALL = {"target_modules": "all-linear"}
WITH_EXPERTS = ALL | {"target_parameters": EXPERTS}


def other(*values, ids=None):
    return pytest.param(*values, id=ids, marks=pytest.mark.every_family)


# (kind, keys of the model, options of LoraConfig)
READ = [
    pytest.param("Llama", {}, ALL, id="llama"),
    pytest.param("Llama", {}, ALL | {"use_dora": True, "use_rslora": True}, id="llama-dora"),
    pytest.param(
        "Llama",
        {},
        {
            "target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 5},
            "alpha_pattern": {"v_proj": 9, "self_attn.q_proj": 2},
        },
        id="llama-patterns-tables",
    ),
    pytest.param(
        "Llama",
        {},
        {
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "use_dora": True,
            "modules_to_save": ["lm_head", "layers.1.input_layernorm"],
        },
        id="llama-one_layer-full_weights",
    ),
    pytest.param("Llama", {}, {"target_modules": ["q_proj"], "bias": "all"}, id="llama-biases"),
    pytest.param("Qwen3Moe", {}, WITH_EXPERTS, id="qwen3_moe-router"),
    pytest.param(
        "Qwen3Moe",
        {"mlp_only_layers": []},
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]},
        id="qwen3_moe-down",
    ),
    pytest.param(
        "GPT2",
        {},
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
        id="gpt2-dora",
    ),
    pytest.param("Qwen3_5Moe", {}, WITH_EXPERTS, id="qwen3_5_moe"),
    pytest.param("GptOss", {}, WITH_EXPERTS, id="gpt_oss"),
    other(
        "Llama",
        {},
        {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
        ids="llama-tables-dora",
    ),
    other(
        "Qwen3Moe",
        {},
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]},
        ids="qwen3_moe-gate_up",
    ),
    other("Qwen3_5", {}, ALL, ids="qwen3_5"),
    *(other(kind, {}, ALL, ids=kind) for kind in ("Qwen2", "Qwen3", "Gemma3", "Phi3", "Glm4")),
    *(
        other(kind, {}, WITH_EXPERTS, ids=kind)
        for kind in (
            *("Mixtral", "DeepseekV3", "Glm4Moe", "Qwen2Moe", "Qwen3Next", "GraniteMoe"),
            *("Lfm2Moe", "MiniMaxM2", "Mistral4", "Gemma4Moe"),
        )
    ),
    other("Llama4", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, ids="llama4"),
]


@pytest.mark.parametrize("kind, keys, options", READ)
def test_files_of_peft(kind, keys, options, tmp_path):
    """What we read computes what the model of peft computed that wrote it."""
    its = adapted(base_model(kind, **keys), r=4, lora_alpha=6, **options)
    expected = logits(its)
    its.save_pretrained(tmp_path)
    ours = base(kind, **keys)
    adapter = read_adapter(tmp_path, ours.ours.graph, ours.weights)
    result = merged(ours.ours.graph, adapter.spec, ours.ours.params | adapter.params)
    assert np.abs(expected - ours.logits(ours.ours.params)).max() > 1
    np.testing.assert_allclose(ours.logits(result.params), expected, atol=1e-4)


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(
            "Llama",
            {"use_dora": True, "layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
            id="llama-dora",
        ),
        other("Qwen3Moe", {"target_parameters": EXPERTS}, ids="qwen3_moe"),
        other("DeepseekV3", {"target_parameters": EXPERTS}, ids="deepseek_v3"),
        other("GptOss", {"target_parameters": EXPERTS}, ids="gpt_oss"),
        other("Qwen3_5", {}, ids="qwen3_5"),
    ],
)
def test_products_with_what_peft_wrote(kind, options, tmp_path):
    """The same without a merge: products read the base and the adapter."""
    its = adapted(base_model(kind), r=4, lora_alpha=6, **ALL | options)
    its.save_pretrained(tmp_path)
    ours = base(kind)
    adapter = read_adapter(tmp_path, ours.ours.graph, ours.weights)
    graph = ours.ours.graph.with_runtime(adapter=adapter.spec)
    model = Model(graph, ours.ours.params | adapter.params)
    np.testing.assert_allclose(model.logits(SEQUENCE), logits(its), atol=1e-4)


@pytest.mark.every_family
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_starts_that_changed_the_base(start, tmp_path):
    """Refused, unless peft converted the adapter to one of the unchanged base, of twice the
    rank."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=start
    )
    its = get_peft_model(base_model("Llama"), config).eval()
    config.init_lora_weights = True  # as its documentation says
    its.save_pretrained(tmp_path / "start")
    config.init_lora_weights = start
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in its.named_parameters():
            if "lora_" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    expected = logits(its)
    its.save_pretrained(tmp_path / "changed")
    ours = base("Llama")
    with pytest.raises(ModelFileError, match="changed the base model"):
        read_adapter(tmp_path / "changed", ours.ours.graph)
    its.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "start"
    )
    adapter = read_adapter(tmp_path / "converted", ours.ours.graph)
    assert adapter.spec.rank == 8
    result = merged(ours.ours.graph, adapter.spec, ours.ours.params | adapter.params)
    np.testing.assert_allclose(ours.logits(result.params), expected, atol=1e-4)


# (kind, keys of the model, options of the adapter)
WRITTEN = [
    pytest.param("Llama", {}, {"rank_stabilised": True}, id="llama"),
    pytest.param(
        "Llama",
        {},
        {
            "dora": True,
            "targets": ("q_proj", "lm_head", "embed_tokens"),
            "train": ("stacks.0.layers.0.input_layernorm.weight",),
        },
        id="llama-dora-full_weights",
    ),
    pytest.param(
        "Llama",
        {"tie_word_embeddings": True},
        {"targets": ("q_proj",), "train": ("embed_tokens",)},
        id="llama-tied",
    ),
    pytest.param("Qwen3Moe", {"mlp_only_layers": []}, {"rank": 6}, id="qwen3_moe"),
    pytest.param("GptOss", {}, {}, id="gpt_oss"),
    pytest.param("GPT2", {}, {}, id="gpt2"),
    other("Qwen3Moe", {"mlp_only_layers": []}, {"experts": "shared"}, ids="qwen3_moe-shared"),
    other(
        "Qwen3Moe",
        {"mlp_only_layers": []},
        {"targets": (r"experts\.\d+\.gate_proj",)},
        ids="qwen3_moe-gate",
    ),
    other("Mixtral", {}, {"expert_rank": 4}, ids="Mixtral"),
    other("Llama4", {}, {"targets": ("q_proj", r"experts\..*")}, ids="Llama4"),
    *(
        other(kind, {}, {}, ids=kind)
        for kind in (
            *("Qwen2", "Qwen3", "Gemma3", "Phi3", "Qwen3_5", "Qwen3_5Moe", "Qwen2Moe"),
            *("GraniteMoe", "Lfm2Moe", "Mistral4"),
        )
    ),
]


@pytest.mark.parametrize("kind, keys, options", WRITTEN)
def test_peft_loads_what_we_write(kind, keys, options, tmp_path):
    from peft import PeftModel

    ours = base(kind, **keys)
    graph = ours.ours.graph
    spec = AdapterSpec(**{"rank": 4, "alpha": 6.0} | options)
    params = random_params(ours, spec)
    assert write_adapter(tmp_path, graph, spec, params, str(ours.directory)) == ()
    ours_merged = merged(graph, spec, ours.ours.params | params).params
    got = ours.logits(ours_merged)
    assert np.abs(got - ours.logits(ours.ours.params)).max() > 1
    its = PeftModel.from_pretrained(base_model(kind, **keys), tmp_path).eval()
    np.testing.assert_allclose(logits(its), got, atol=1e-4)
    again = read_adapter(tmp_path, graph, ours.weights)
    read = merged(graph, again.spec, ours.ours.params | again.params).params
    for path, array in ours_merged.items():
        np.testing.assert_allclose(read[path], array, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "kind, dropped",
    [
        pytest.param("Qwen3Moe", 6, id="qwen3_moe"),
        other("DeepseekV3", 12, ids="deepseek_v3"),
        other("Glm4Moe", 12, ids="glm4_moe"),
        other("Qwen3Next", 12, ids="qwen3_next"),
    ],
)
def test_what_peft_leaves_out_is_named(kind, dropped, tmp_path):
    """Dense and shared feed-forwards next to experts: the files agree with a merge by hand, and
    peft computes something else with them."""
    from peft import PeftModel

    ours = base(kind)
    graph = ours.ours.graph
    spec = AdapterSpec(rank=4, alpha=6.0)
    params = random_params(ours, spec)
    names = write_adapter(tmp_path, graph, spec, params, str(ours.directory))
    assert len(names) == dropped
    assert all("_proj" in name and ".experts." not in name for name in names)
    got = ours.logits(merged(graph, spec, ours.ours.params | params).params)
    by_hand = merged_by_hand(ours.directory, tmp_path, classes(kind)[1])
    np.testing.assert_allclose(logits(by_hand), got, atol=1e-4)
    its = PeftModel.from_pretrained(base_model(kind), tmp_path).eval()
    assert np.abs(logits(its) - got).max() > 0.1


@pytest.mark.parametrize("name", families.known())
def test_families_whose_experts_peft_converts(name):
    """CONVERTED_BY_PEFT against the tables of transformers and peft."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN as patterns,
    )
    from peft.utils.transformers_weight_conversion import _MOE_FUSED_TARGETS as fused

    family = families.get(name)
    converted = {kind for kind in family.MODEL_TYPES if patterns.get(kind) in fused}
    words = getattr(family, "CONVERTED_BY_PEFT", None)
    assert (words is not None) == bool(converted)
    for kind in converted:
        assert {word for each in fused[patterns[kind]].values() for word in each} <= {*words}


def test_config_has_what_vllm_reads(tmp_path):
    """One scale for all tensors, r at least the rank of each, no key that vLLM refuses."""
    from safetensors.numpy import load_file

    ours = base("Qwen3Moe", mlp_only_layers=[])
    spec = AdapterSpec(rank=6, alpha=9.0)
    write_adapter(tmp_path, ours.ours.graph, spec, random_params(ours, spec), "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (6, 9.0, "LORA")
    assert config["base_model_name_or_path"] == "base"
    assert config["modules_to_save"] is None and config["use_dora"] is False
    assert config["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    ranks = {array.shape[0] for name, array in tensors.items() if "lora_A" in name}
    assert ranks == {2, 6}
    assert all(
        alpha == rank * 9 / 6
        for rank, alpha in zip(
            config["rank_pattern"].values(), config["alpha_pattern"].values(), strict=True
        )
    )


FIXTURES = Path(__file__).parents[1] / "fixtures" / "adapters"


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("*-*")), ids=lambda folder: folder.name)
def test_files_of_each_version_of_peft(folder):
    made = json.loads((folder / "base.json").read_text())
    ours = base(made["kind"], **made["keys"])
    adapter = read_adapter(folder, ours.ours.graph, ours.weights)
    result = merged(ours.ours.graph, adapter.spec, ours.ours.params | adapter.params)
    got = ours.logits(result.params)[:, -1]
    np.testing.assert_allclose(got, np.load(folder / "logits.npy"), atol=1e-4)


@pytest.mark.parametrize("media", [True, False], ids=["towers", "text"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("Gemma3"),
        other("Qwen2_5_VL"),
        other("Qwen3VL"),
        other("Qwen3_5"),
        other("Llama4"),
    ],
)
def test_multimodal_models(kind, media, tmp_path):
    """With and without towers, the merged weights are those that peft merges, in both
    directions."""
    import media_oracles
    from peft import PeftModel

    import policy

    towers = r".*(visual|vision|audio).*"
    options = {"target_modules": ["q_proj", "k_proj", "qkv", "down_proj", "gate_proj"]}
    options |= {} if media else {"exclude_modules": towers}
    build = media_oracles.build(kind)
    build.save_pretrained(tmp_path / "base")
    ours = Base(tmp_path / "base", policy.load(tmp_path / "base", media=media))
    graph = ours.ours.graph

    def check(its, spec, params):
        its.merge_and_unload().save_pretrained(tmp_path / "merged")
        expected = policy.load(tmp_path / "merged", media=media).params
        got = merged(graph, spec, ours.ours.params | params).params
        for path, array in expected.items():
            np.testing.assert_allclose(got[path], array, atol=1e-5, err_msg=path)

    its = adapted(build, r=2, lora_alpha=6, **options)
    its.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", graph, ours.weights)
    assert any(path.startswith("image.") for path in adapter.params) == media
    check(its, adapter.spec, adapter.params)

    spec = AdapterSpec(rank=2, alpha=4.0, experts="none", targets=(r"self_attn\.[qv]_proj",))
    params = random_params(ours, spec)
    write_adapter(tmp_path / "written", graph, spec, params, str(tmp_path / "base"))
    its = PeftModel.from_pretrained(media_oracles.build(kind), tmp_path / "written")
    check(its, spec, params)
