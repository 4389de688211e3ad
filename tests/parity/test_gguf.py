"""GGUF files of tiny random models: transformers reads what Duet wrote, and Duet what it wrote."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

import policy
from policy import families
from policy.huggingface import reload, sources
from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf import metadata, rope, vocabulary, writer
from policy.huggingface.gguf.architectures import of_model_type
from policy.huggingface.gguf.directory import directory_of
from policy.huggingface.gguf.names import NameMap
from policy.huggingface.gguf.tensors import opened, tensors_of
from rollout.text.tokenizer import load_tokenizer, stop_ids


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keeps what is derived from files out of the cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Two value heads to a key head, so that files have these in another order.
DELTA_NETS = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
# Sizes that transformers' reader does not take from a file have their defaults.
KINDS = {
    "llama": {},
    "llama-biases": {"attention_bias": True},
    "llama-tied-theta": {"tie_word_embeddings": True, "rope_theta": 5e5},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {"head_dim": 128},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 8},
    "gemma3_text": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 8},
    "phi3": {},
    "gpt2": {"max_position_embeddings": 1024, "tie_word_embeddings": True},
    "lfm2": {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": {
        **DELTA_NETS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rotary_dim": 8,
    },
}
# Kinds whose file is also read back as `rl export` does, which compiles a program.
PROVEN = ("llama", "gemma2", "qwen3_5_moe_text")
PROMPT = [[5, 9, 33, 70, 12, 200]]


def model_of(kind, directory):
    """A random model of transformers in `directory`, with weights that float16 holds."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind.split("-")[0], **SMALL | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        size = 0.3 if weight.ndim > 1 else 0.2
        center = 1.0 if "norm" in name and "gemma" not in kind else 0.0
        weight.data = (center + size * torch.randn_like(weight)).half().float()
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.3 * torch.randn_like(buffer))
    model.tie_weights()
    model.save_pretrained(directory)
    return model.eval()


def fields():
    tokenizer: Any = load_tokenizer("bytes")
    special = {
        f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad")
    }
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return vocabulary.of_tokenizer(content, special, [2], "{{ messages[0]['content'] }}")


def greedy(model):
    with torch.no_grad():
        return model.generate(
            torch.tensor(PROMPT), max_new_tokens=5, do_sample=False, eos_token_id=None
        ).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_written(kind, tmp_path):
    reference = model_of(kind, tmp_path / "model")
    model = policy.load(tmp_path / "model")
    file = tmp_path / "x.gguf"
    writer.write(file, model, "f16", fields(), "x")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        # the one key that transformers does not see in the tensors of a file
        **{key: value for key, value in KINDS[kind].items() if key == "attention_bias"},
    ).eval()
    with torch.no_grad():
        before, after = reference(torch.tensor(PROMPT)).logits, read(torch.tensor(PROMPT)).logits
    assert torch.allclose(before, after, atol=2e-4), float((before - after).abs().max())
    assert greedy(reference) == greedy(read)
    # and so does Duet, to the bit
    again = policy.load(file)
    assert again.params.keys() == model.params.keys()
    for path, weight in model.params.items():
        assert np.allclose(np.asarray(weight), np.asarray(again.params[path]), atol=1e-7), path
    if kind in PROVEN:
        assert reload.check_gguf(model, file, "f16", PROMPT).difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_what_is_written(kind, tmp_path):
    """With `pip install xllamacpp`. Only tokens that are texts of their own can be drawn, since the
    server says nothing of others."""
    llama = pytest.importorskip("xllamacpp")
    reference = model_of(kind, tmp_path / "model")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokens = vocabulary.of_tokenizer(trained("qwen2"), special, [2], None)
    file = tmp_path / "x.gguf"
    writer.write(file, policy.load(tmp_path / "model"), "f16", tokens, "x")
    texts = tokens.tokens[: SMALL["vocab_size"]]
    banned = [n for n, text in enumerate(texts) if n < 5 or not f"{text}!".isascii()]
    ids = [*PROMPT[0]]
    with torch.no_grad():
        for _ in range(5):
            logits = reference(torch.tensor([ids])).logits[0, -1]
            logits[banned] = -1e9
            ids.append(int(logits.argmax()))
    params = llama.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 64
    params.warmup = False
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    reply = llama.Server(params).handle_completions(
        {
            "prompt": PROMPT[0],
            "max_tokens": 5,
            "temperature": 0.0,
            "logprobs": 1,
            "logit_bias": {str(n): -100 for n in banned},
        }
    )
    drawn = reply["choices"][0]["logprobs"]["content"]
    assert [each["id"] for each in drawn] == ids[len(PROMPT[0]) :]


TEXTS = (
    "Hello world, it's 12345 o'clock!",
    "def f(x):\n    return x ** 2\n\n\n# caf\u00e9 \u6625\u7720",
    "<|user|>hi<|end|>  two  spaces",
    "x",
)
CORPUS = [text * 3 for text in TEXTS] + ["the cat sat on the mat " * 5, "return 12 123 it's"]


def trained(pre):
    """A tokenizer whose merges were trained on CORPUS, with this pre-tokenizer; None: one with byte
    fallback, as sentencepiece makes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
    if pre is None:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        special += [f"<0x{number:02X}>" for number in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
        tokenizer.train_from_iterator(CORPUS, trainer)
        content = json.loads(tokenizer.to_str())
        # as in files of Llama: bytes are no added tokens
        content["added_tokens"] = content["added_tokens"][:5]
        return content
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = vocabulary.PRE_TOKENIZERS[pre]
    if pre in ("qwen2", "qwen35"):
        content["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize("pre", [*vocabulary.PRE_TOKENIZERS, None])
def test_tokenizers_come_back(pre, tmp_path):
    from tokenizers import Tokenizer

    content = trained(pre)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    written = vocabulary.of_tokenizer(content, special, [2, 4], "{{ 1 }}")
    small = SMALL | {"model_type": "llama", "vocab_size": 410, "head_dim": 16}
    model = policy.create(families.read(small))
    file = tmp_path / "x.gguf"
    writer.write(file, model, "q8_0", written, "x")
    original = Tokenizer.from_str(json.dumps(content))
    directory = directory_of(file, tmp_path / "cache")
    ours = load_tokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == original.decode(ids, skip_special_tokens=False)
        # transformers cuts digits as gpt-2 does, and puts no space after a special token
        if pre != "smollm" and not (pre is None and "<|" in text):
            assert theirs.encode(text, add_special_tokens=False) == ids, text
    assert ours.chat_template == theirs.chat_template == "{{ 1 }}"
    assert stop_ids(ours, directory) == (2, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mixtral"}, "model type mixtral: not written as GGUF.*gemma2.*qwen3_moe"),
        ({"model_type": "gpt_oss"}, "gpt_oss: not written.*does not find the experts"),
        ({"model_type": "gemma4_text"}, "gemma4_text: not written.*scales of layers"),
        (
            {"model_type": "stablelm", "use_parallel_residual": True},
            "stablelm: not written.*subtract the mean",
        ),
        (
            {
                "model_type": "lfm2",
                "conv_bias": True,
                "layer_types": ["conv", "full_attention"],
            },
            "conv_bias True",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_value_head_dim": 64},
            "linear_value_head_dim 64.*llama.cpp takes linear_key_head_dim, 128",
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
            },
            "layer_types",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type linear of llama.*no scaling of rotary positions",
        ),
        ({"model_type": "phi3", "sliding_window": 8}, "sliding_window 8 .llama.cpp attends to all"),
        ({"model_type": "gemma2", "head_dim": 16}, "scalar 256.*llama.cpp takes 16"),
        (
            {"model_type": "gemma2", "num_hidden_layers": 46, "head_dim": 256},
            "scalar 256.*llama.cpp takes 16",
        ),
        (
            {"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32},
            "scalar 32.*transformers takes 256",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window 8"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 100}, "query_pre_attn_scalar 100"),
    ],
)
def test_what_a_file_cannot_say_is_refused(keys, message):
    hf = {**SMALL, "model_type": "llama", "head_dim": 16, **keys}
    with pytest.raises(ModelFileError, match=message):
        metadata.metadata(families.read(hf))


@pytest.mark.parametrize(
    ("keys", "key", "number", "kind"),
    [
        ({"model_type": "phi3"}, "phi3.attention.sliding_window", 0, "UINT32"),
        (
            {
                "model_type": "gemma2",
                "attn_logit_softcapping": 50,
                "sliding_window": 8,
                "head_dim": 256,
            },
            "gemma2.attn_logit_softcapping",
            50,
            "FLOAT32",
        ),
    ],
)
def test_metadata_has_the_keys_and_types_that_llama_cpp_needs(keys, key, number, kind, tmp_path):
    hf = {**SMALL, "head_dim": 16, "tie_word_embeddings": True, **keys}
    file = tmp_path / "x.gguf"
    writer.write(file, policy.create(families.read(hf)), "f16", fields(), "x")
    field = opened(file).fields[key]
    assert (field.contents(), field.types[-1].name) == (number, kind)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rotary_positions_of_llama_3_are_written_and_read(tmp_path):
    """Issue 7268 of vLLM: rope_freqs.weight is no weight, and without it long texts go wrong."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    long = {"max_position_embeddings": 131072, "head_dim": 64, "vocab_size": 320}
    hf = {**SMALL, **long, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    config = AutoConfig.for_model("llama", **hf)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    model = policy.create(families.read({"model_type": "llama", **hf}))
    file = tmp_path / "x.gguf"
    writer.write(file, model, "f16", fields(), "x")
    stored = opened(file).tensors["rope_freqs.weight"].data
    assert np.allclose(stored, (plain / scaled).numpy(), rtol=1e-5) and stored.max() == 32
    read = policy.load(file)
    assert json.loads(read.config.hf)["rope_scaling"] == LLAMA3
    assert read.config.stacks == model.config.stacks
    odd = stored.copy()
    odd[3] = 2.0
    with pytest.raises(ModelFileError, match="not those of Llama 3.1"):
        rope.scaling(odd, 5e5, 64)
    assert rope.scaling(np.ones(32, np.float32), 5e5, 64) is None


def test_the_beginning_of_sequence_is_added_as_the_tokenizer_does(tmp_path):
    """Issue 3966 of llama.cpp: the file must say whether a text begins with one."""
    for number, adds in enumerate((True, False)):
        content = trained("gpt-2")
        if adds:
            special = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
            content["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"<s>": special},
            }
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        written = vocabulary.of_tokenizer(content, names, [2], None)
        assert written.adds_bos == adds
        small = SMALL | {"model_type": "llama", "vocab_size": 410, "head_dim": 16}
        file = tmp_path / f"{number}.gguf"
        writer.write(file, policy.create(families.read(small)), "f16", written, "x")
        ours = load_tokenizer(directory_of(file, tmp_path / "cache"))
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        assert (ours.encode("cat")[0] == 1) is (theirs.encode("cat")[0] == 1) is adds


def test_a_tokenizer_with_more_tokens_than_the_model_is_cut(tmp_path):
    """Issue 4195 of LLaMA-Factory: more tokens than embeddings make a file that no one reads."""
    content = trained("gpt-2")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    small = SMALL | {"model_type": "llama", "vocab_size": 300, "head_dim": 16}
    file = tmp_path / "x.gguf"
    model = policy.create(families.read(small))
    writer.write(file, model, "f16", vocabulary.of_tokenizer(content, names, [2], None), "x")
    assert len(opened(file).fields["tokenizer.ggml.tokens"].contents()) == 300
    assert max(load_tokenizer(directory_of(file, tmp_path)).encode("the cat sat on the mat")) < 300
    with pytest.raises(ModelFileError, match="embeddings for 300"):
        many = vocabulary.of_tokenizer(content, names, [2, 301], None)
        writer.write(file, model, "f16", many, "x")


def test_tokenizers_of_another_kind_are_refused():
    content = trained("gpt-2")
    for normalizer in (
        {"type": "Lowercase"},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    ):
        with pytest.raises(ModelFileError, match="no key for its normalizer"):
            vocabulary.of_tokenizer(content | {"normalizer": normalizer}, {}, [], None)
    content["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(ModelFileError, match="pre-tokenizer"):
        vocabulary.of_tokenizer(content, {}, [], None)
    content["model"]["type"] = "WordLevel"
    with pytest.raises(ModelFileError, match="WordLevel"):
        vocabulary.of_tokenizer(content, {}, [], None)


def test_eight_bits_are_those_of_the_package_and_large_weights_are_refused(tmp_path):
    model_of("qwen2", tmp_path / "model")
    model = policy.load(tmp_path / "model")
    file = tmp_path / "x.gguf"
    writer.write(file, model, "q8_0", fields(), "x")
    assert 1e-5 < reload.check_gguf(model, file, "q8_0", PROMPT).difference < 2
    before, after = model.params, policy.load(file).params
    for path, weight in before.items():
        error = np.abs(np.asarray(weight) - np.asarray(after[path])).max()
        assert error <= np.abs(np.asarray(weight)).max() / 127 * 0.51, path
    assert {t.tensor_type.name for t in opened(file).tensors.values()} == {"F32", "Q8_0"}
    with pytest.raises(reload.NotReloaded, match="is not what was written"):
        moved = {path: weight * 1.01 for path, weight in before.items()}
        reload.check_gguf(policy.Model(model.graph, moved), file, "q8_0", PROMPT)
    large = {path: weight * 1e6 for path, weight in before.items()}
    with pytest.raises(ModelFileError, match="largest number of float16"):
        writer.write(file, policy.Model(model.graph, large), "f16", fields(), "x")


def repacked(source, target, matrix, fields=(), tensors=()):
    """Writes a file again. matrix: returns the bytes of a matrix, and their type, for its floats.
    fields, tensors: pairs of a name and what the new file has there."""
    import gguf

    old = gguf.GGUFReader(source)
    name = old.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    for key, field in old.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *dict(fields)):
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    for key, value in fields:
        adds = {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}
        adds[type(value)](key, value)
    for tensor in old.tensors:
        floats = gguf.dequantize(tensor.data, tensor.tensor_type)
        if floats.ndim == 1:
            writer.add_tensor(tensor.name, floats)
        else:
            data, number = matrix(floats)
            writer.add_tensor(tensor.name, data, raw_dtype=number)
    for key, array in tensors:
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_other_types_are_read_as_transformers_does(tmp_path):
    """Matrices have a type each."""
    import gguf

    model_of("llama", tmp_path / "model")
    model = policy.load(tmp_path / "model")
    file = tmp_path / "x.gguf"
    writer.write(file, model, "f16", fields(), "x")
    names = ("F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    kinds = itertools.cycle(gguf.GGMLQuantizationType[name] for name in names)

    def quantised(floats):
        kind = next(kinds)
        return gguf.quantize(floats, kind), kind

    repacked(file, tmp_path / "y.gguf", quantised)
    stored = {tensor.tensor_type.name for tensor in opened(tmp_path / "y.gguf").tensors.values()}
    assert stored == set(names)
    plain = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="y.gguf", quantization_config=plain, dtype=torch.float32
    ).save_pretrained(tmp_path / "theirs")
    ours, theirs = policy.load(tmp_path / "y.gguf"), policy.load(tmp_path / "theirs")
    for path, weight in theirs.params.items():
        assert np.array_equal(np.asarray(weight), np.asarray(ours.params[path])), path


BLOCKS = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


def test_types_that_only_llama_cpp_writes_are_read_as_transformers_does(tmp_path):
    """Random blocks, for which transformers has code of its own. Matrices have a type each."""
    import gguf
    from transformers.integrations.gguf import dequant

    small = SMALL | {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 256}
    file = tmp_path / "x.gguf"
    writer.write(file, policy.create(families.read(small)), "f16", fields(), "x")
    kinds = itertools.cycle(gguf.GGMLQuantizationType[kind] for kind in BLOCKS)
    drawn = np.random.default_rng(0)

    def blocks(floats):
        kind = next(kinds)
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (len(floats), floats.shape[-1] // numbers * size)
        return drawn.integers(0, 0x7C, shape, np.uint8), kind  # no scale is infinite

    repacked(file, tmp_path / "y.gguf", blocks)
    stored = opened(tmp_path / "y.gguf").tensors
    read = tensors_of(tmp_path / "y.gguf")
    seen = set()
    for name, tensor in read.items():
        place = NameMap(of_model_type("qwen2"), 2).of(name)
        assert place is not None
        theirs = stored[place.tensor]
        if len(tensor.shape) == 1:
            continue
        kind = theirs.tensor_type
        seen.add(kind.name)
        rows = slice(3, 9)
        numbers = dequant.dequantize(torch.from_numpy(theirs.data[rows].copy()), int(kind))
        expected = numbers.reshape(6, -1)[:, 5:70].numpy()
        ours = tensor[rows, slice(5, 70)]
        assert np.allclose(ours, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()), kind
    assert seen == set(BLOCKS)


def test_a_type_that_nothing_dequantises_is_refused(tmp_path):
    import gguf

    small = SMALL | {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 256}
    file = tmp_path / "x.gguf"
    writer.write(file, policy.create(families.read(small)), "f16", fields(), "x")
    kind = gguf.GGMLQuantizationType.Q8_K
    repacked(
        file,
        tmp_path / "y.gguf",
        lambda floats: (np.zeros((len(floats), floats.shape[-1] // 256 * 292), np.uint8), kind),
    )
    with pytest.raises(ModelFileError, match="Q8_K"):
        policy.load(tmp_path / "y.gguf")


FACTORS = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0] * 7 + [2.0]}
SCALED = {
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 6},
        {"rope_type": "linear", "factor": 8.0},
        {"scaling.type": "linear", "scaling.factor": 8.0},
    ),
    "qwen2": (
        {"model_type": "qwen2"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
    ),
    "phi3": (
        {"model_type": "phi3", "original_max_position_embeddings": 32},
        {"rope_type": "longrope", "attention_factor": 1.2, **FACTORS},
        {"scaling.attn_factor": 1.2, "scaling.original_context_length": 32},
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_rescaled_rotary_positions_of_files_are_read(kind, tmp_path):
    """Files of Gemma 3 4B and larger, of long Qwen 2.5 and of Phi-3.5 have them."""
    keys, rope_scaling, numbers = SCALED[kind]
    small = SMALL | {"tie_word_embeddings": kind == "gemma3"} | keys
    file = tmp_path / "x.gguf"
    plain = {key: value for key, value in small.items() if not key.startswith("original")}
    writer.write(file, policy.create(families.read(plain)), "f16", fields(), "x")
    named = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    repacked(
        file,
        tmp_path / "y.gguf",
        lambda floats: (floats, None),
        [(f"{kind}.rope.{key}", value) for key, value in numbers.items()],
        [
            (name, np.asarray(rope_scaling[key], np.float32))
            for name, key in named.items()
            if key in rope_scaling
        ],
    )
    read = sources.read_config(directory_of(tmp_path / "y.gguf"))
    expected = families.read(small | {"rope_scaling": rope_scaling})
    assert ropes_of(read) == ropes_of(expected) != ropes_of(families.read(plain))


def ropes_of(config):
    """The rotary positions of a layer with a window, if there is one, and of the last layer."""
    return [stack.pattern[-1].mixer.rope for stack in config.stacks]


@pytest.mark.parametrize(("kind", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_divides_by_another_number(kind, layers):
    """llama.cpp knows the model of 27 billion weights by its layers, and files have no key."""
    architecture = of_model_type(kind)
    hf = {**SMALL, "model_type": kind, "head_dim": 256, "sliding_window": 8}
    numbers = metadata.metadata(families.read(hf))
    small = metadata.configuration(architecture, numbers, ())
    large = metadata.configuration(architecture, numbers | {"block_count": layers}, ())
    assert (small["query_pre_attn_scalar"], large["query_pre_attn_scalar"]) == (256, 16)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    """llama.cpp counts them as layers of Qwen3.5."""
    model_of("qwen3_5_text", tmp_path / "model")
    model = policy.load(tmp_path / "model")
    writer.write(tmp_path / "x.gguf", model, "f16", fields(), "x")
    repacked(
        tmp_path / "x.gguf",
        tmp_path / "y.gguf",
        lambda floats: (floats, None),
        [("qwen35.block_count", 3), ("qwen35.nextn_predict_layers", 1)],
        [("blk.2.attn_norm.weight", np.ones(64, np.float32))],
    )
    read = policy.load(tmp_path / "y.gguf")
    assert read.params.keys() == model.params.keys()
    assert read.config.stacks == model.config.stacks


def test_damaged_files_and_other_architectures_are_refused(tmp_path):
    import gguf

    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(30))
    with pytest.raises(ModelFileError, match="not a complete GGUF file"):
        policy.load(file)
    other = gguf.GGUFWriter(file, "mamba")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    with pytest.raises(ModelFileError, match="architecture mamba; Duet reads gemma2"):
        policy.load(file)
