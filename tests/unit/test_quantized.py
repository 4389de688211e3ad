"""Quantised weights: every slice equals that of the tensor dequantised by other means, and models
load from them."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from oracles import configuration, edit_config, random_model
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.fields import names
from policy.huggingface import model_directory
from policy.huggingface.model_directory import ModelFileError
from policy.huggingface.quantized import (
    Fp4,
    Fp8,
    Fp8Scheme,
    Int4,
    Int4Scheme,
    Mxfp4,
    Mxfp4Scheme,
    QuantizationError,
    scheme,
)

RNG = np.random.default_rng(0)


def fp8_pair(shape, block):
    """(values, scales) of random 8-bit floats."""
    grid = (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))
    values = (RNG.normal(size=shape) * 40).astype(ml_dtypes.float8_e4m3fn)
    return values, RNG.uniform(1e-4, 1e-2, grid).astype(np.float32)


def mxfp4_pair(leading, outputs, inputs):
    """(blocks, scales) of every code, at scales that float32 holds."""
    blocks = RNG.integers(0, 256, (*leading, outputs, inputs // 32, 16)).astype(np.uint8)
    return blocks, RNG.integers(100, 140, blocks.shape[:-1]).astype(np.uint8)


def fp4_pair(rows, columns):
    """(values, scales) of every code, at powers of two."""
    values = RNG.integers(-128, 128, (rows, columns // 2)).astype(np.int8)
    exponents = RNG.integers(100, 140, (rows, -(-columns // 32))).astype(np.uint8)
    return values, exponents.view(ml_dtypes.float8_e8m0fnu)


def fp4_one_by_one(values, scales):
    """By the definition: two values in a byte, the first in its low half."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    result = np.empty((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        byte = int(values[row, column // 2]) % 256
        code = byte // 16 if column % 2 else byte % 16
        exponent = int(scales.view(np.uint8)[row, column // 32]) - 127
        result[row, column] = (-1 if code >= 8 else 1) * sizes[code % 8] * 2.0**exponent
    return result


def int4_tensors(rows, columns, group):
    """(words, scales, shape) of every code, packed bit by bit; the scales are bfloat16."""
    codes = RNG.integers(0, 16, (rows, columns))
    words = np.zeros((rows, -(-columns // 8)), np.int32)
    for row, column in np.ndindex(rows, columns):
        for bit in range(4):
            if codes[row, column] >> bit & 1:
                words[row, column // 8] |= np.array(1 << 4 * (column % 8) + bit, np.uint32).view(
                    np.int32
                )
    scales = RNG.uniform(1e-2, 1e-1, (rows, -(-columns // group))).astype(ml_dtypes.bfloat16)
    return words, scales, np.array([rows, columns], np.int64)


def int4_one_by_one(words, scales, shape, group):
    result = np.empty(shape, np.float32)
    for row, column in np.ndindex(*result.shape):
        word = int(words[row, column // 8]) % 2**32
        code = word // 16 ** (column % 8) % 16
        result[row, column] = (code - 8) * np.float32(scales[row, column // group])
    return result


def fp8_by_repetition(values, scales, block):
    for axis, n in ((-2, block[0]), (-1, block[1])):
        scales = np.repeat(scales, n, axis=axis).take(range(values.shape[axis]), axis=axis)
    return values.astype(np.float32) * scales


def mxfp4_one_by_one(blocks, scales):
    """By the definition: sign, two bits of exponent with bias 1, one bit of mantissa."""
    *leading, outputs, groups, _ = blocks.shape
    result = np.empty((*leading, groups * 32, outputs), np.float32)
    for *lead, o, i in np.ndindex(*leading, outputs, groups * 32):
        byte = int(blocks[(*lead, o, i // 32, i % 32 // 2)])
        code = byte >> 4 if i % 2 else byte & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        result[(*lead, i, o)] = (-size if code & 8 else size) * 2.0 ** (
            int(scales[(*lead, o, i // 32)]) - 127
        )
    return result


def assert_every_slice(tensor, expected):
    assert tensor.shape == expected.shape
    cuts = [
        [slice(None), slice(0, n // 2), slice(n // 3, n), slice(n - 1, n), slice(0, 0)]
        for n in expected.shape
    ]
    for index in itertools.product(*cuts):
        result = tensor[index]
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected[index])


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 384), (128, 128)),
        ((200, 300), (128, 128)),
        ((3, 20, 30), (8, 16)),
        ((5, 6), (128, 128)),
        ((9, 8), (2, 3)),
    ],
)
def test_fp8_is_the_value_times_the_scale_of_its_block(shape, block):
    values, scales = fp8_pair(shape, block)
    assert_every_slice(Fp8("w", values, scales, block), fp8_by_repetition(values, scales, block))


def test_fp8_without_blocks_has_one_scale():
    values, _ = fp8_pair((5, 6), (5, 6))
    for scale in (
        np.float32([0.5]),
        np.array(0.5, np.float32),
        np.full((1, 1), 0.5, ml_dtypes.bfloat16),
    ):
        assert_every_slice(Fp8("w", values, scale, None), values.astype(np.float32) / 2)


def test_fp8_equals_transformers():
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales = fp8_pair((256, 384), (128, 128))
    theirs = Fp8Dequantize(None).convert(
        {
            "weight": torch.tensor(values.view(np.uint8)).view(torch.float8_e4m3fn),
            "weight_scale_inv": torch.tensor(scales),
        }
    )
    np.testing.assert_array_equal(
        Fp8("w", values, scales, (128, 128))[:, :], theirs["weight"].numpy()
    )


@pytest.mark.parametrize("shape", [(5, 96), (1, 64), (3, 40)])
def test_fp4_is_what_its_codes_say(shape):
    values, scales = fp4_pair(*shape)
    assert_every_slice(Fp4("w", values, scales), fp4_one_by_one(values, scales))


def test_fp4_equals_transformers():
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales = fp4_pair(7, 96)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.tensor(values),
        torch.tensor(scales.view(np.uint8)).view(torch.float8_e8m0fnu),
        torch.float32,
    )
    np.testing.assert_array_equal(Fp4("w", values, scales)[:, :], theirs.numpy())


def test_mxfp4_is_what_its_codes_say():
    blocks, scales = mxfp4_pair((3,), 5, 96)
    assert_every_slice(Mxfp4("w", blocks, scales), mxfp4_one_by_one(blocks, scales))


def test_mxfp4_equals_transformers():
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = mxfp4_pair((4,), 10, 64)
    theirs = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(Mxfp4("w", blocks, scales)[:, :, :], theirs.numpy())


@pytest.mark.parametrize(
    ("shape", "group"), [((5, 64), 32), ((3, 19), 6), ((1, 7), 32), ((4, 40), 8)]
)
def test_int4_is_what_its_bits_say(shape, group):
    tensors = int4_tensors(*shape, group)
    assert (tensors[0] < 0).any() or shape == (1, 7)
    assert_every_slice(Int4("w", *tensors, group), int4_one_by_one(*tensors, group))


def int4_config(**weights):
    """A quantization_config as compressed-tensors writes it."""
    described = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    }
    described |= {"actorder": None, "dynamic": False, "observer": "minmax"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group | {"weights": described | weights}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
    }


def test_descriptions_are_read_and_others_refused():
    assert scheme(None) is None and scheme({}) is None
    assert scheme({"quant_method": "fp8"}) == Fp8Scheme((128, 128))
    assert scheme({"quant_method": "fp8", "weight_block_size": [64, 32]}) == Fp8Scheme((64, 32))
    assert scheme({"quant_method": "fp8", "weight_block_size": None}) == Fp8Scheme(None)
    assert scheme({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == Mxfp4Scheme()
    assert scheme(int4_config()) == Int4Scheme(32)
    assert scheme(int4_config(group_size=128)) == Int4Scheme(128)
    with pytest.raises(QuantizationError, match="unquantised directory.*base_weights: nf4"):
        scheme({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"})
    for wrong in ({"quant_method": "gptq"}, {"bits": 4}, ["fp8"]):
        with pytest.raises(QuantizationError, match="fp8, mxfp4 and compressed-tensors"):
            scheme(wrong)
    with pytest.raises(QuantizationError, match="weight_block_size"):
        scheme({"quant_method": "fp8", "weight_block_size": [128, 0]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 8),
        ("type", "float"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("actorder", "group"),
        ("group_size", None),
        ("group_size", 0),
    ],
)
def test_int4_of_another_form_is_refused_by_its_key(key, value):
    with pytest.raises(QuantizationError, match=rf"config_groups.group_0.weights.{key} {value!r}"):
        scheme(int4_config(**{key: value}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": {}, "b": {}}}, "expected one group"),
        ({"config_groups": {"a": None}}, "config_groups.a None"),
        ({"config_groups": {"a": {"weights": None}}}, "config_groups.a.weights None"),
        (
            {"config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
            "config_groups.a.input_activations",
        ),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_other_parts_of_compressed_tensors_are_refused_by_their_key(change, words):
    with pytest.raises(QuantizationError, match=words):
        scheme(int4_config() | change)


BLOCK = (16, 24)


@pytest.fixture
def fp8_model(tmp_path):
    """(directory of a DeepSeek with fp8 projections, its tensors, directory of the same
    dequantised)."""
    policy.save(random_model(families.read(configuration("DeepseekV3"))), tmp_path / "dense")
    state, dense = load_file(tmp_path / "dense" / model_directory.SINGLE), {}
    for name, array in list(state.items()):
        dense[name] = array
        if "_proj" in name:
            values, scales = fp8_pair(array.shape, BLOCK)
            state |= {name: values, f"{name}_scale_inv": scales}
            dense[name] = fp8_by_repetition(values, scales, BLOCK)
    save_file(dense, tmp_path / "dense" / model_directory.SINGLE)
    directory = tmp_path / "fp8"
    directory.mkdir()
    save_file(state, directory / model_directory.SINGLE)
    hf = json.loads((tmp_path / "dense" / "config.json").read_text())
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
        "activation_scheme": "dynamic",
    }
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": quantization}))
    return directory, state, tmp_path / "dense"


def assert_same(one, other):
    for path, array in one.params.items():
        np.testing.assert_array_equal(
            np.asarray(other.params[path]), np.asarray(array), err_msg=path
        )


def test_a_model_of_fp8_weights_loads_as_the_dequantised_one_and_is_saved_without_them(
    fp8_model, tmp_path, monkeypatch
):
    directory, _, dense = fp8_model
    monkeypatch.setattr(model_directory, "PIECE", 100)
    model = policy.load(directory)
    assert_same(policy.load(dense), model)
    assert "quantization" not in model.config.hf
    policy.save(model, tmp_path / "out")
    assert "quantization" not in (tmp_path / "out" / "config.json").read_text()
    assert_same(model, policy.load(tmp_path / "out"))


def test_weights_of_8_and_of_4_bits_whose_scales_end_in_scale_load_as_the_dequantised_ones(
    fp8_model,
):
    """As in DeepSeek-V4's files: projections of 8 bits, experts of 4 bits, scales that are powers
    of two."""
    directory, state, dense = fp8_model
    state, expected = dict(state), load_file(dense / model_directory.SINGLE)
    for name in expected:
        scales = f"{name.removesuffix('.weight')}.scale"
        if ".mlp.experts." in name:
            state.pop(f"{name}_scale_inv")
            state[name], state[scales] = fp4_pair(*expected[name].shape)
            expected[name] = fp4_one_by_one(state[name], state[scales])
        elif f"{name}_scale_inv" in state:
            state[scales] = state.pop(f"{name}_scale_inv").astype(ml_dtypes.float8_e8m0fnu)
            expected[name] = fp8_by_repetition(state[name], state[scales].astype(np.float32), BLOCK)
    save_file(state, directory / model_directory.SINGLE)
    save_file(expected, dense / model_directory.SINGLE)
    assert_same(policy.load(dense), policy.load(directory))
    name = "model.layers.1.mlp.experts.0.up_proj"
    save_file(
        state | {f"{name}.scale": state[f"{name}.scale"][:, :0]}, directory / model_directory.SINGLE
    )
    with pytest.raises(
        ModelFileError, match=rf"{name}.scale has shape .24, 0., expected .24, 1.: one for each 32"
    ):
        policy.load(directory)
    state.pop(f"{name}.scale")
    save_file(state, directory / model_directory.SINGLE)
    with pytest.raises(ModelFileError, match=f"{name}.weight is I8: neither a float nor quantised"):
        policy.load(directory)


def test_faults_of_fp8_files_are_named(fp8_model):
    directory, good, _ = fp8_model
    name = "model.layers.1.self_attn.o_proj.weight"

    def refused(change, *words):
        state = dict(good)
        change(state)
        save_file(state, directory / model_directory.SINGLE)
        with pytest.raises(ModelFileError) as caught:
            policy.load(directory)
        assert all(word in str(caught.value) for word in words), caught.value

    refused(lambda state: state.pop(f"{name}_scale_inv"), f"missing tensor {name}_scale_inv")
    refused(
        lambda state: state.update({f"{name}_scale_inv": np.ones((2, 2), np.float32)}),
        f"{name}_scale_inv has shape [2, 2], expected [2, 1]",
    )
    refused(
        lambda state: state.update({"model.odd_scale_inv": np.ones(2, np.float32)}),
        "unexpected tensors model.odd_scale_inv",
    )
    refused(lambda state: state.update({name: state[name][:31]}), f"{name}")
    edit_config(directory, lambda config: config.pop("quantization_config"))
    refused(lambda state: None, "is F8_E4M3", "quantization_config")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_of_int4_experts_loads_as_the_dequantised_one(tmp_path, monkeypatch, wrapped):
    """Its experts are packed, all else is not, as in Kimi K2 Thinking and (`wrapped`) Kimi K2.5."""
    monkeypatch.setattr(model_directory, "PIECE", 100)
    policy.save(
        random_model(families.read(configuration("DeepseekV3", moe_intermediate_size=20))), tmp_path
    )
    dense, packed, group = load_file(tmp_path / model_directory.SINGLE), {}, 12
    for name, array in list(dense.items()):
        if "mlp.experts." not in name:
            packed[name] = array
            continue
        rows, columns = array.shape
        words, scales, shape = int4_tensors(rows, columns, group)
        packed |= {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}
        dense[name] = int4_one_by_one(words, scales, shape, group)
    save_file(dense, tmp_path / model_directory.SINGLE)
    expected = policy.load(tmp_path)
    prefix = "language_model." if wrapped else ""
    packed = {prefix + name: array for name, array in packed.items()}
    save_file(packed, tmp_path / model_directory.SINGLE)
    with pytest.raises(ModelFileError, match="missing tensor"):
        policy.load(tmp_path)
    edit_config(
        tmp_path,
        lambda config: config.update({"quantization_config": int4_config(group_size=group)}),
    )
    if wrapped:
        inner = json.loads((tmp_path / "config.json").read_text())
        outer = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": inner,
        }
        (tmp_path / "config.json").write_text(json.dumps(outer))
    result = policy.load(tmp_path)
    assert_same(expected, result)
    policy.save(result, tmp_path / "out")
    assert "quantization" not in (tmp_path / "out" / "config.json").read_text()
    assert_same(expected, policy.load(tmp_path / "out"))
    policy.save(
        result, tmp_path / "out", source=tmp_path
    )  # under the names of the source, and as floats
    written = load_file(tmp_path / "out" / model_directory.SINGLE)
    assert {prefix + name for name in dense} == written.keys()
    assert all(np.array_equal(written[prefix + name], array) for name, array in dense.items())
    name = f"{prefix}model.layers.1.mlp.experts.0.down_proj.weight"

    def refused(changes, match):
        state = {
            key: changes.get(key, array)
            for key, array in packed.items()
            if changes.get(key, array) is not None
        }
        save_file(state, tmp_path / model_directory.SINGLE)
        with pytest.raises(ModelFileError, match=match):
            policy.load(tmp_path)

    own = name.removeprefix(prefix)
    refused({f"{name}_scale": None}, f"missing tensor {own}_scale")
    refused({f"{name}_shape": None}, f"missing tensor {own}_shape")
    refused(
        {f"{name}_shape": np.array([32, 24])},
        f"{own}_scale has shape .32, 2.|has shape .32, 24., expected .32, 20.",
    )
    refused(
        {f"{name}_packed": packed[f"{name}_packed"][:, :2]},
        f"{own}_packed is int32.32, 2., expected int32.32, 3.",
    )
    refused(
        {f"{name}_scale": packed[f"{name}_scale"][:, :1]},
        f"{own}_scale has shape .32, 1., expected .32, 2.",
    )


@pytest.mark.parametrize("piece", [10, model_directory.PIECE])
def test_a_model_of_mxfp4_experts_loads_as_the_dequantised_one(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(model_directory, "PIECE", piece)
    fused = names.joined(
        "feed_forward.",
        ("expert_gate_proj", "expert_up_proj"),
        "mlp.experts.gate_up_proj",
        "x e f* -> x e f",
    ) | {"feed_forward.expert_down_proj": names.Stored("mlp.experts.down_proj")}
    family = families.get("qwen3_moe")
    monkeypatch.setattr(family, "NAMES", family.NAMES | fused)
    policy.save(
        random_model(families.read(configuration("Qwen3Moe", moe_intermediate_size=64))), tmp_path
    )
    dense, packed = load_file(tmp_path / model_directory.SINGLE), {}
    for name, array in list(dense.items()):
        if "mlp.experts." not in name:
            packed[name] = array
            continue
        experts, inputs, outputs = array.shape
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = mxfp4_pair((experts,), outputs, inputs)
        dense[name] = mxfp4_one_by_one(packed[f"{name}_blocks"], packed[f"{name}_scales"])
    save_file(dense, tmp_path / model_directory.SINGLE)
    expected = policy.load(tmp_path)
    save_file(packed, tmp_path / model_directory.SINGLE)
    with pytest.raises(ModelFileError, match="missing tensor"):
        policy.load(tmp_path)
    edit_config(
        tmp_path, lambda config: config.update({"quantization_config": {"quant_method": "mxfp4"}})
    )
    assert_same(expected, policy.load(tmp_path))
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(
        packed | {f"{name}_scales": packed[f"{name}_scales"][:1]}, tmp_path / model_directory.SINGLE
    )
    with pytest.raises(ModelFileError, match=f"{name}: _blocks uint8.8, 32, 2, 16"):
        policy.load(tmp_path)
