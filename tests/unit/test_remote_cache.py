"""Copies of remote models and data: fetched once, complete or absent, and again after a change."""

import errno
import json
import multiprocessing
import os
import signal

import faulty_files
import pytest
from huggingface_hub import constants

import policy
from policy.huggingface import sources
from rl.commands import cli
from rl.data import models
from rl.errors import DataError, ModelError, ResourceError
from rl.remote import cache
from rl.remote.faults import RemoteError, Retries
from rl.remote.store import Store
from rollout.text.tokenizer import load_tokenizer

SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(cache, "_RETRIES", Retries(tries=2, sleep=lambda seconds: None))
    monkeypatch.chdir(tmp_path)
    faulty_files.clear()
    cache.forget()
    yield
    faulty_files.clear()
    cache.forget()


@pytest.fixture
def store():
    made = Store("faulty://bucket/model")
    for name, data in {"config.json": b"{}", "model.safetensors": b"w" * 64, "x.bin": b"1"}.items():
        made.write(name, data)
    return made


def again(url, patterns=()):
    """What another process gets."""
    cache.forget()
    return cache.fetched(url, patterns)


def reads():
    return sorted(path.rpartition("/")[2] for name, path in faulty_files.plan.log)


def test_a_folder_is_fetched_once_and_a_changed_object_again(store):
    faulty_files.use(names=("get_file",))
    first = again(store.url, ("*.json", "*.safetensors"))
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]
    assert reads() == ["config.json", "model.safetensors"]
    assert again(store.url, ("*.json", "*.safetensors")) == first and len(reads()) == 2
    store.write("model.safetensors", b"v" * 64)  # the same size
    second = again(store.url, ("*.json", "*.safetensors"))
    assert (second / "model.safetensors").read_bytes() == b"v" * 64 and len(reads()) == 3
    assert (first / "model.safetensors").read_bytes() == b"w" * 64  # a run may be reading it
    assert (second / "config.json").stat().st_ino == (first / "config.json").stat().st_ino


def test_a_changed_folder_is_fetched_where_the_disk_has_no_hard_links(store, monkeypatch):
    first = again(store.url)

    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store.write("x.bin", b"2")
    second = again(store.url)
    assert (second / "x.bin").read_bytes() == b"2"
    assert (second / "config.json").read_bytes() == (first / "config.json").read_bytes()


def test_an_object_that_goes_while_it_is_fetched_is_named(store):
    def remove(call):
        if call.path.endswith("x.bin"):
            raise FileNotFoundError(call.path)

    faulty_files.use(remove, names=("get_file",))
    with pytest.raises(RemoteError, match="x.bin.*removed while it was fetched"):
        again(store.url)


def test_one_object_and_a_folder_with_folders(store):
    store.write("part/rows.jsonl", b"{}\n")
    file = again(f"{store.url}/part/rows.jsonl")
    assert file.name == "rows.jsonl" and file.read_bytes() == b"{}\n"
    folder = again(store.url)
    assert (folder / "part" / "rows.jsonl").is_file() and (folder / "x.bin").is_file()
    with pytest.raises(RemoteError, match="no such object"):
        again(f"{store.url}/absent")


def test_a_killed_download_is_no_model(tmp_path):
    disk = Store(f"faulty-disk://{tmp_path}/remote")
    disk.write("config.json", b"{}")
    disk.write("model.safetensors", b"w" * 64)

    def child(number):
        faulty_files.use(faulty_files.die_within(number), names=("get_file",))
        again(disk.url)

    for number in (1, 2):
        process = multiprocessing.get_context("fork").Process(target=child, args=(number,))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert not list(cache._copies(next(cache.root().iterdir())))
    copy = again(disk.url)
    assert (copy / "model.safetensors").read_bytes() == b"w" * 64


def test_without_the_service_the_newest_copy_is_taken(store, monkeypatch, capsys):
    copy = again(store.url)
    faulty_files.use(
        faulty_files.fail(PermissionError(errno.EACCES, "Forbidden")), names=("info", "find")
    )
    assert again(store.url) == copy and "Forbidden" in capsys.readouterr().err
    with pytest.raises(RemoteError, match="Forbidden"):
        again("faulty://bucket/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    log = faulty_files.use(names=("info", "find", "get_file")).log
    assert again(store.url) == copy and not log
    with pytest.raises(RemoteError, match="offline .HF_HUB_OFFLINE., and .* has no copy"):
        again("faulty://bucket/other")


def test_a_cache_without_room_says_what_to_set(store, monkeypatch):
    usage = cache.shutil.disk_usage("/")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ResourceError, match="no room; set DUET_CACHE"):
        again(store.url)


@pytest.fixture
def model(tmp_path):
    """The URL of a tiny model, and its local folder."""
    folder = tmp_path / "local"
    policy.save(policy.create(sources.preset("qwen3-0.6b", SIZES | HEADS), seed=1), folder)
    load_tokenizer("bytes").save_pretrained(folder)
    remote = Store("faulty://bucket/tiny")
    for path in folder.iterdir():
        remote.put(path, path.name)
    return remote.url, folder


def test_a_model_is_read_from_a_url(model):
    url, folder = model
    log = faulty_files.use(names=("get_file",)).log
    configuration = models.directory(url)
    assert (configuration / "config.json").is_file()
    assert not any("safetensors" in path for _, path in log)
    full = models.directory(url, weights=True)
    assert (full / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert models.pinned(url) == url


def test_what_is_no_model_is_refused_with_its_url(store):
    store.delete("config.json")
    with pytest.raises(ModelError, match="faulty://bucket/model.*config.json"):
        models.directory(store.url)
    with pytest.raises(ModelError, match="faulty://bucket/absent"):
        models.directory("faulty://bucket/absent")


def test_data_are_read_from_a_url(tmp_path):
    from rl.config.data import DataOptions
    from rl.data.datasets import load

    rows = [{"prompt": f"{number}", "completion": "x"} for number in range(3)]
    Store("faulty://bucket/data").write(
        "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
    )
    for path in ("faulty://bucket/data/train.jsonl", "faulty://bucket/data"):
        assert len(load(DataOptions(path=path))) == 3
    with pytest.raises(DataError, match="faulty://bucket/absent.jsonl"):
        load(DataOptions(path="faulty://bucket/absent.jsonl"))


def test_a_run_is_checked_and_a_model_generates_from_urls(model, tmp_path, capsys):
    """One URL for the model, one for the data; config.yml keeps them."""
    url, _ = model
    rows = "".join(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n" for _ in range(4))
    Store("faulty://bucket/data").write("train.jsonl", rows.encode())
    (tmp_path / "run.yml").write_text(
        "max_length: 32\nplatform: cpu\nstages: [{algorithm: sft, steps: 1, prompts_per_step: 4}]\n"
    )
    run = [str(tmp_path / "run.yml"), f"model={url}", "data=faulty://bucket/data/train.jsonl"]
    assert cli.train_main(["--check", *run]) == 0
    said = capsys.readouterr().out
    assert f"source: {url}" in said and "at a URL: its rows were not read" in said
    assert cli.main(["inspect", *run]) == 0
    (tmp_path / "prompts.txt").write_text("1+1=\n")
    arguments = ["generate", url, "--prompts", str(tmp_path / "prompts.txt")]
    assert cli.main([*arguments, "--max-new-tokens", "2"]) == 0


def test_urls_that_cannot_be_used_are_faults_of_their_keys(tmp_path, capsys):
    (tmp_path / "run.yml").write_text(
        "stages: [{algorithm: sft, steps: 1, prompts_per_step: 4}]\ntokenizer: bytes\n"
    )
    wrong = ["model=tiny-deepseek", "data=s4://bucket/rows.jsonl", "run.remote=s4://bucket/run"]
    assert cli.train_main(["--check", str(tmp_path / "run.yml"), *wrong]) == 2
    said = capsys.readouterr().err
    assert "data.path: s4:// is no scheme" in said and "run.remote: s4:// is no scheme" in said
    absent = ["model=faulty://bucket/absent", "data={task: arithmetic}"]
    assert cli.train_main(["--check", str(tmp_path / "run.yml"), *absent]) == 4
    assert "model faulty://bucket/absent: " in capsys.readouterr().err


def test_a_gguf_file_is_read_from_a_url(model, tmp_path, monkeypatch):
    """The file is fetched; its directory is that of any GGUF file."""
    Store("faulty://bucket/files").write("small.gguf", b"GGUF, but not really")
    with pytest.raises(ModelError, match="small.gguf"):
        models.directory("faulty://bucket/files/small.gguf")
    copies = [path for path in cache.root().rglob("small.gguf") if path.is_file()]
    assert copies[0].read_bytes() == b"GGUF, but not really"
