"""Weight files as other tools leave them: adapters, pickles, pointers of git-lfs, files of two
saves, names without the first word. Each is read as transformers reads it, or refused with what to
do."""

import json
import shutil

import numpy as np
import pytest
from oracles import random_model, short, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface.tensorfiles import INDEX, SINGLE, ModelFileError
from rl.data import models
from rl.errors import ModelError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    policy.save(random_model(families.read(short("Llama"))), directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def in_shards(directory, count: int, number: int = 1) -> dict[str, str]:
    """Replaces the weights by `count` files of a save; returns the file of each tensor."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    files: dict[str, str] = {}
    for i in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        files |= dict.fromkeys(part, name)
    return files


def same(directory, saved) -> bool:
    row = tokens(1, 9)
    return np.array_equal(policy.load(directory).logits(row), policy.load(saved).logits(row))


def test_all_files_of_one_save_need_no_index(directory, saved):
    in_shards(directory, 3)
    assert same(directory, saved)


def test_files_of_two_saves_are_refused(directory):
    other = load_file(directory / SINGLE)
    in_shards(directory, 3)
    save_file(other, directory / "model-00001-of-00001.safetensors")
    with pytest.raises(
        ModelFileError, match=r"files of 2 saves and no model\.safetensors\.index\.json"
    ):
        policy.load(directory)


def test_a_file_that_a_save_lacks_is_reported(directory):
    in_shards(directory, 3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match="2 of 3 files"):
        policy.load(directory)


def test_the_index_says_which_file_a_tensor_is_read_from(directory, saved):
    """A longer save before this one left a file with other numbers."""
    files = in_shards(directory, 2)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    name = "model.norm.weight"
    holder = files[name]
    other = next(file for file in set(files.values()) if file != holder)
    wrong = load_file(directory / other) | {
        name: np.full_like(load_file(directory / holder)[name], 7.0)
    }
    save_file(wrong, directory / other, metadata={"format": "pt"})
    assert same(directory, saved)


def test_a_tensor_in_two_files_is_refused(directory):
    in_shards(directory, 2)
    first, second = sorted(directory.glob("*.safetensors"))
    twice = load_file(first)
    save_file(load_file(second) | twice, second, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"is in model-00001.* and in model-00002"):
        policy.load(directory)


@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_a_pointer_of_git_lfs_is_named(directory, name):
    (directory / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    )
    with pytest.raises(ModelFileError, match=f"{name}: a pointer of git-lfs"):
        policy.load(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_read(directory, name):
    (directory / SINGLE).rename(directory / name)
    with pytest.raises(ModelFileError, match=f"{name} is a pickle.*save_pretrained"):
        policy.load(directory)


def test_names_without_the_first_word_are_read(directory, saved):
    """AutoModel.save_pretrained writes a model without its head so; the head of this one is the
    embedding."""
    tensors = load_file(directory / SINGLE)
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        directory / SINGLE,
    )
    assert same(directory, saved)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_another_gate_of_delta_nets_is_refused(kind):
    families.read(short(kind, output_gate_type="swish"))
    with pytest.raises(UnsupportedModel, match="output_gate_type 'sigmoid'"):
        families.read(short(kind, output_gate_type="sigmoid"))


@pytest.mark.parametrize("left", [0, 20_000, None])
def test_checks_before_a_run_read_the_headers_of_weight_files(directory, left):
    """`--check`, `rl inspect` and `rl plan` refuse what a run refuses. left: bytes of the file;
    None: there is none."""
    models.check_files(str(directory))
    if left is None:
        (directory / SINGLE).unlink()
    else:
        (directory / SINGLE).write_bytes((directory / SINGLE).read_bytes()[:left])
    with pytest.raises(ModelError, match="safetensors"):
        models.check_files(str(directory))


@pytest.fixture
def tied(tmp_path):
    directory = tmp_path / "tied"
    policy.save(random_model(families.read(short("Llama", tie_word_embeddings=True))), directory)
    return directory


def with_head(directory, change) -> None:
    tensors = load_file(directory / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"lm_head.weight": change(embedding)},
        directory / SINGLE,
        metadata={"format": "pt"},
    )


def test_a_head_that_equals_the_embedding_is_tied(tied, caplog):
    before = policy.load(tied).logits(tokens(1, 9))
    with_head(tied, np.copy)
    model = policy.load(tied)
    assert model.config.tied_head and not caplog.records
    np.testing.assert_array_equal(model.logits(tokens(1, 9)), before)


def test_another_head_is_kept_as_transformers_does(tied, tmp_path, caplog):
    with_head(tied, lambda embedding: embedding[::-1].copy())
    model = policy.load(tied)
    assert not model.config.tied_head
    assert "tie_word_embeddings is true, but" in caplog.text
    policy.save(model, tmp_path / "again")
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert stored["tie_word_embeddings"] is False
    row = tokens(1, 9)
    np.testing.assert_array_equal(policy.load(tmp_path / "again").logits(row), model.logits(row))
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(row)).logits.numpy()
    np.testing.assert_allclose(model.logits(row), expected, atol=2e-5, rtol=0)


def test_a_head_of_another_size_is_refused(tied):
    with_head(tied, lambda embedding: embedding[:-3].copy())
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight has shape"):
        policy.load(tied)
