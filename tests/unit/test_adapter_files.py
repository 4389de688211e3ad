"""What is read from and refused in the directory of an adapter (policy/huggingface/peft)."""

import json

import jax
import numpy as np
import oracles
import pytest
from safetensors.numpy import save_file

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.config import Runtime
from policy.huggingface.model_directory import places
from policy.huggingface.peft.factors import FactorPair, factor_form
from policy.huggingface.peft.merge import MergeError, merged, product
from policy.huggingface.peft.reader import read_adapter
from policy.huggingface.peft.targets import TargetError, targets
from policy.huggingface.peft.writer import write_adapter
from policy.huggingface.tensorfiles import ModelFileError
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.ops.parameter import MatrixDims

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
Q_PROJ = "stacks.0.layers.0.mixer.q_proj"
rng = np.random.default_rng(0)


def short(kind, **keys) -> Graph:
    config = families.read(oracles.short(kind, **keys))
    return Graph(config, Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]))


def random(*shape):
    return rng.normal(size=shape).astype(np.float32)


def weights(graph: Graph) -> dict[str, np.ndarray]:
    return {path: random(*shape.shape) for path, shape in graph.shapes.items()}


@pytest.fixture
def llama():
    """A Llama of two layers: 32 inputs, 48 outputs of q_proj."""
    return short("Llama")


def q_projs(layers=(0, 1), rank=2, lengths=False):
    """The tensors of adapters of q_proj in these layers."""
    tensors = {}
    for layer in layers:
        tensors[LAYER.format(layer, "A")] = random(rank, 32)
        tensors[LAYER.format(layer, "B")] = random(48, rank)
        if lengths:
            name = LAYER.format(layer, "A").replace("lora_A.weight", "lora_magnitude_vector")
            tensors[name] = np.abs(random(48))
    return tensors


@pytest.fixture
def folder(tmp_path):
    """folder(tensors, **keys of the configuration): writes a directory."""

    def made(tensors, **keys):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        config = {key: value for key, value in (CONFIG | keys).items() if value is not None}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path

    return made


def test_experts_of_the_numeric_fixture():
    """A = [.1 ... .8] as [4, 2] and B = [.1 ... .8] as [2, 4], two experts of rank 2."""
    numbers = np.arange(1, 9, dtype=np.float32) / 10
    graph = short("Qwen3_5Moe", num_experts=2, num_experts_per_tok=1)
    place = next(place for place in places(graph) if place.path.endswith("expert_down_proj"))
    form = factor_form(place, place.stored)
    assert form is not None
    a, b = form.stored_shapes(2)
    assert (a[0], b[1]) == (4, 4)  # experts times rank
    pair = FactorPair(np.zeros(a, np.float32), np.zeros(b, np.float32))
    pair.a[:, :2] = numbers.reshape(4, 2)
    pair.b[:2] = numbers.reshape(2, 4)
    ours = form.split(pair)[0]
    change = product(ours.a, ours.b, MatrixDims((1,), (2,)), np.einsum)  # [X, in, out]
    np.testing.assert_allclose(
        change.transpose(0, 2, 1)[:, :2, :2],
        [[[0.1, 0.14], [0.26, 0.38]], [[0.38, 0.44], [0.86, 1.0]]],
        rtol=1e-6,
    )


def test_lora_and_dora_of_the_numeric_fixture():
    """W, A, B and x as they are given; y = x W'."""
    weight = np.float32([[0.5, -1, 0.25], [1.5, 0.5, -0.75]])
    a = np.float32([[0.2, -0.1, 0.4], [-0.3, 0.5, 0.1]])
    b = np.float32([[1, -0.5], [0.25, 0.75]])
    x = np.float32([[1, 2, -1], [0.5, -0.5, 1]])
    from policy.huggingface.peft.merge import _merge

    dims = MatrixDims((0,), (1,))
    lora, _ = _merge(weight.T, a.T, b.T, None, dims, 3.0)
    np.testing.assert_allclose(lora.T, [[1.55, -2.05, 1.3], [0.975, 1.55, -0.225]], atol=1e-6)
    stabilised, _ = _merge(
        weight.T, a.T, b.T, None, dims, AdapterSpec(2, 6, rank_stabilised=True).scale
    )
    np.testing.assert_allclose(
        x @ stabilised, [[-4.719848, 4.734924], [3.969848, -0.621231]], atol=2e-6
    )
    lengths = np.linalg.norm(weight, axis=1)
    dora, _ = _merge(weight.T, a.T, b.T, lengths, dims, 3.0)
    np.testing.assert_allclose(x @ dora, [[-1.531448, 4.078756], [1.233114, -0.486131]], atol=2e-6)


def test_one_scale_for_different_ranks_and_alphas(llama, folder):
    """Ranks are padded with zeros, and scales other than the commonest are multiplied into b."""
    tensors = q_projs((0,)) | q_projs((1,), rank=5)
    directory = folder(tensors, rank_pattern={"layers.1.self_attn.q_proj": 5})
    spec, params, *_ = read_adapter(directory, llama)
    assert (spec.rank, spec.targets) == (5, ("q_proj",))
    a, b = params[f"{Q_PROJ}.lora_a"], params[f"{Q_PROJ}.lora_b"]
    assert a.shape == (2, 32, 5) and b.shape == (2, 5, 4, 12)
    assert not a[0, :, 2:].any() and not b[0, 2:].any()
    for layer, scale in ((0, 6 / 2), (1, 6 / 5)):
        expected = scale * tensors[LAYER.format(layer, "B")] @ tensors[LAYER.format(layer, "A")]
        change = spec.scale * a[layer] @ b[layer].reshape(5, 48)
        np.testing.assert_allclose(change.T, expected, rtol=1e-5, atol=1e-6)


def test_layers_without_an_adapter_have_zeros_and_the_lengths_of_the_base(llama, folder):
    directory = folder(q_projs((1,), lengths=True), use_dora=True, layers_to_transform=[1])
    with pytest.raises(ModelFileError, match="together with the base model"):
        read_adapter(directory, llama)
    base = weights(llama)
    spec, params, *_ = read_adapter(directory, llama, base)
    assert not params[f"{Q_PROJ}.lora_a"][0].any() and not params[f"{Q_PROJ}.lora_b"][0].any()
    result = merged(llama, spec, base | params).params[Q_PROJ]
    np.testing.assert_allclose(result[0], base[Q_PROJ][0], rtol=1e-5)
    assert np.abs(result[1] - base[Q_PROJ][1]).max() > 0.1


def test_absent_keys_have_the_values_of_peft(llama, folder):
    """r 8 and lora_alpha 8: an absent lora_alpha is not a scale of 0."""
    directory = folder(q_projs(rank=8), r=None, lora_alpha=None)
    spec, _, base, _ = read_adapter(directory, llama)
    assert (spec.rank, spec.alpha, spec.scale, base) == (8, 8, 1.0, "")


def test_a_spec_survives_a_round_trip(llama, tmp_path):
    spec = AdapterSpec(rank=4, alpha=6.0, targets=(r"model\.layers\.(?:1)\.self_attn\.q_proj",))
    params = {f"{Q_PROJ}.lora_a": random(2, 32, 4), f"{Q_PROJ}.lora_b": random(2, 4, 4, 12)}
    for array in params.values():
        array[0] = 0
    assert write_adapter(tmp_path, llama, spec, params, "base") == ()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["layers.1.self_attn.q_proj"]
    again, read, *_ = read_adapter(tmp_path, llama)
    assert (again.targets, again.rank, again.alpha) == (spec.targets, 4, 6.0)
    for path, array in params.items():
        np.testing.assert_array_equal(read[path], array)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"peft_type": "VERA"}, "peft_type is 'VERA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"lora_bias": True}, "a bias of B"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"trainable_token_indices": [3]}, "trainable tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base model"),
        ({"init_lora_weights": "olora"}, "changed the base model"),
        ({"init_lora_weights": "corda"}, "changed the base model"),
        ({"init_lora_weights": "loftq"}, "changed the base model"),
        ({"use_dora": True}, "missing tensor .*lora_magnitude_vector"),
        ({"r": 4}, "has rank 2, and adapter_config.json says 4"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"target_modules": ["q_proj", "k_proj"]}, "missing tensors of .*k_proj"),
        ({"r": "many"}, "adapter_config.json: invalid literal"),
    ],
)
def test_configurations_that_are_refused(keys, message, llama, folder):
    with pytest.raises(ModelFileError, match=message):
        read_adapter(folder(q_projs(), **keys), llama)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop(LAYER.format(1, "B")),
            "missing tensor .*layers.1.self_attn.q_proj.lora_B",
        ),
        (lambda t: [t.pop(LAYER.format(1, k)) for k in "AB"], "missing tensors of .*layers.1"),
        (
            lambda t: t.update({LAYER.format(7, k): random(2, 2) for k in "AB"}),
            "unexpected tensors .*layers.7",
        ),
        (lambda t: t.update({LAYER.format(0, "A"): random(2, 31)}), r"\[2, 31\].*needs \[2, 32\]"),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": random(161, 32)}),
            "another vocabulary size",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": random(
                        2
                    )
                }
            ),
            "unexpected tensors .*trainable tokens",
        ),
    ],
)
def test_tensors_that_are_refused(change, message, llama, folder):
    tensors = q_projs()
    change(tensors)
    with pytest.raises(ModelFileError, match=message):
        read_adapter(folder(tensors), llama)


def test_directories_that_are_refused(llama, folder, tmp_path):
    with pytest.raises(ModelFileError, match="adapter_config.json: no such file"):
        read_adapter(tmp_path, llama)
    folder(q_projs())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="a pickle, which Duet never reads"):
        read_adapter(tmp_path, llama)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(ModelFileError, match="adapter_model.safetensors: no such file"):
        read_adapter(tmp_path, llama)


def test_names_as_other_programs_write_them(llama, folder):
    """Without PEFT's prefix, with the name of the adapter, and with those of a multimodal model."""
    expected = read_adapter(folder(tensors := q_projs()), llama).params

    def check(rename):
        read = read_adapter(folder({rename(name): each for name, each in tensors.items()}), llama)
        for path, array in expected.items():
            np.testing.assert_array_equal(read.params[path], array)

    check(lambda name: name.removeprefix("base_model.model."))
    check(lambda name: name.replace(".weight", ".default.weight"))
    check(lambda name: name.replace("model.model.layers", "model.model.language_model.layers"))


def test_adapters_of_one_use_of_a_tied_table(folder):
    """peft merges them into the table of both uses (huggingface/peft#2018)."""
    graph = short("Llama", tie_word_embeddings=True)
    head = {
        "base_model.model.lm_head.lora_A.weight": random(2, 32),
        "base_model.model.lm_head.lora_B.weight": random(160, 2),
    }
    with pytest.raises(ModelFileError, match="adapter of lm_head.*are one table"):
        read_adapter(folder(head, target_modules=["lm_head"]), graph)
    table = random(160, 32)
    both = {
        "base_model.model.lm_head.weight": table,
        "base_model.model.model.embed_tokens.weight": table.copy(),
    }
    read = read_adapter(folder(q_projs() | both), graph)
    np.testing.assert_array_equal(read.params["embed_tokens"], table)
    assert read.spec.train == ("embed_tokens",)
    both["base_model.model.lm_head.weight"] = table + 1
    with pytest.raises(ModelFileError, match="different weights for embed_tokens and lm_head"):
        read_adapter(folder(q_projs() | both), graph)
    with pytest.raises(ModelFileError, match="has lm_head alone"):
        read_adapter(folder(q_projs() | {"base_model.model.lm_head.weight": table}), graph)
    params = {"embed_tokens.lora_a": random(160, 2), "embed_tokens.lora_b": random(2, 32)}
    with pytest.raises(MergeError, match="one table"):
        merged(graph, AdapterSpec(2), weights(graph) | params)


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.1"])
def test_square_experts_go_by_the_version(version, folder):
    """Where all matrices are square (hidden 24, gate and up 2 x 12; down alone is adapted with 24 x
    24 below), the version decides: NVIDIA-NeMo/Automodel#3592 loads these in silence."""
    graph = short(
        "Qwen3Moe", hidden_size=24, moe_intermediate_size=12, num_experts=4, mlp_only_layers=[]
    )
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.mlp.experts.lora_{{}}.weight"
        tensors |= {name.format("A"): random(8, 24), name.format("B"): random(24, 8)}
    keys = {"target_parameters": ["experts.gate_up_proj"], "target_modules": []}
    directory = folder(tensors, peft_version=version, **keys)
    if version is None:
        with pytest.raises(ModelFileError, match="no peft_version"):
            read_adapter(directory, graph)
        return
    spec, params, *_ = read_adapter(directory, graph)
    path = "stacks.0.layers.0.feed_forward.expert_up_proj"
    a, b = params[f"{path}.lora_a"][0], params[f"{path}.lora_b"][0]  # [X, E, r], [X, r, F]
    prefix = "base_model.model.model.layers.0.mlp.experts.lora_"
    its_a = tensors[f"{prefix}A.weight"].reshape(4, 2, 24)
    its_b = tensors[f"{prefix}B.weight"].reshape(24, 2, 4)
    change = np.einsum("ore,eri->eoi", its_b, its_a)
    if version == "0.18.1":
        change = change.transpose(0, 2, 1)
    np.testing.assert_allclose(
        np.einsum("eir,ero->eoi", a, b), change[:, 12:], rtol=1e-5, atol=1e-5
    )
    assert spec.expert_rank == 2


def test_small_changes_that_bfloat16_loses():
    graph = short("Llama")
    graph = Graph(graph.config, Runtime(param_dtype="bfloat16"), graph.layout)
    base = weights(graph)
    params = {f"{Q_PROJ}.lora_a": random(2, 32, 2), f"{Q_PROJ}.lora_b": random(2, 2, 4, 12)}
    result = merged(graph, AdapterSpec(2, 1e-3), base | params)
    assert list(result.lost_in_bfloat16) == [Q_PROJ]
    ratio = (
        1e-3
        / 2
        * np.linalg.norm(np.einsum("lir,lrhd->lihd", *params.values()))
        / np.linalg.norm(base[Q_PROJ])
    )
    np.testing.assert_allclose(result.changes[Q_PROJ], ratio, rtol=1e-4)
    assert not merged(graph, AdapterSpec(2, 100.0), base | params).lost_in_bfloat16
    assert result.params[Q_PROJ].dtype == "bfloat16"


def test_adapters_of_routers_need_the_base(folder):
    """Duet has no adapter of a router: the weight is returned in full."""
    graph = short("Qwen3Moe", mlp_only_layers=[])
    name = "base_model.model.model.layers.{}.mlp.gate.lora_{}.weight"
    tensors = {}
    for layer in range(2):
        tensors |= {name.format(layer, "A"): random(2, 32), name.format(layer, "B"): random(8, 2)}
    directory = folder(tensors, target_modules=["gate"])
    path = "stacks.0.layers.0.feed_forward.router.weight"
    with pytest.raises(ModelFileError, match=f"an adapter of {path}"):
        read_adapter(directory, graph)
    base = weights(graph)
    spec, params, *_ = read_adapter(directory, graph, base)
    assert spec.train == (path,) and list(params) == [path]
    change = 3 * tensors[name.format(1, "B")] @ tensors[name.format(1, "A")]
    np.testing.assert_allclose(params[path][1], base[path][1] + change.T, rtol=1e-4, atol=1e-5)


def test_targets_of_what_was_read(folder):
    """`targets` of the description name the arrays that come with it."""
    graph = short("Phi3")
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj.lora_{{}}.weight"
        b = random(8 * 12, 2)
        b[48:] = 0  # no adapter of keys and values
        tensors |= {name.format("A"): random(2, 48), name.format("B"): b}
    spec, params, *_ = read_adapter(folder(tensors, target_modules=["qkv_proj"]), graph)
    assert {f"{path}.lora_a" for path in targets(graph, spec)} <= params.keys()
    assert not params["stacks.0.layers.0.mixer.k_proj.lora_a"].any()
    with pytest.raises(TargetError):
        targets(graph, AdapterSpec(targets=("k_proj",)))


def test_the_score_of_a_reward_model(llama, folder):
    """peft saves it with the adapter of a sequence classification model."""
    score = random(1, 32)
    directory = folder(q_projs() | {"base_model.model.score.weight": score})
    with pytest.raises(ModelFileError, match="unexpected tensors base_model.model.score.weight"):
        read_adapter(directory, llama)
    others = read_adapter(directory, llama, others=("score.weight",)).others
    np.testing.assert_array_equal(others["score.weight"], score)
