"""The files of tokenizers and processors in an exported directory."""

import json

import pytest

from rl.config.run import RunConfig
from rl.data import models
from rl.data.tokenizer import write_tokenizer
from rollout.text.tokenizer import byte_level, load_tokenizer

# As transformers 4 writes them.
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "chat_template": "{{ 'own' }}",
}


@pytest.fixture
def source(tmp_path):
    """The directory of a model with a tokenizer, without weights."""
    folder = tmp_path / "source"
    byte_level().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "special_tokens_map.json").write_text('{"eos_token":   "<eos>"}')
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'older' }}"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ 'tools' }}")
    return folder


def written(tmp_path, source, options=None, tokenizer=None):
    """The folder of an export; `options`: the section `tokenizer` of the run."""
    values = {
        "model": str(source),
        "tokenizer": options,
        "data": {"task": "arithmetic"},
        "max_length": 64,
    }
    config = RunConfig.model_validate(values | {"stages": [{"algorithm": "sft", "steps": 1}]})
    folder = tmp_path / "export"
    folder.mkdir()
    template = (
        config.tokenizer and config.tokenizer.chat_template and config.tokenizer.chat_template.file
    )
    write_tokenizer(config, tokenizer or load_tokenizer(source, chat_template=template), folder)
    return folder


def contents(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_files_of_a_tokenizer_are_copied_as_they_are(source, tmp_path):
    assert contents(written(tmp_path, source)) == contents(source)


def test_names_of_python_files_are_left_out(source, tmp_path):
    (source / "tokenizer_config.json").write_text(
        json.dumps(CONFIG | {"auto_map": {"AutoTokenizer": ["a.B", None]}})
    )
    folder = written(tmp_path, source)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    assert saved == CONFIG
    models.copy_files(source, ["tokenizer.json", "absent.json"], folder)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_tokenizer_whose_directory_is_gone_is_written(source, tmp_path):
    tokenizer = load_tokenizer(source)
    folder = written(tmp_path, tmp_path / "gone" / "model", tokenizer=tokenizer)
    assert load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()


def test_a_template_of_the_run_replaces_all_others(source, tmp_path):
    (tmp_path / "new.jinja").write_text("{{ 'new' }}")
    folder = written(tmp_path, source, {"chat_template": str(tmp_path / "new.jinja")})
    assert (
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ 'new' }}"
    )
    assert (
        (folder / "chat_template.jinja").read_text()
        == load_tokenizer(folder).chat_template
        == "{{ 'new' }}"
    )
    assert (
        not {"chat_template.json", "additional_chat_templates/tools.jinja"}
        & contents(folder).keys()
    )


def test_a_built_in_tokenizer_is_written_in_the_form_of_transformers_4(tmp_path):
    tokenizer = byte_level()
    folder = written(tmp_path, "tiny-deepseek", {"source": "bytes"}, tokenizer)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["additional_special_tokens"] == [
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|end|>",
    ]
    assert not {"extra_special_tokens", "backend", "is_local", "local_files_only"} & saved.keys()
    again = load_tokenizer(folder)
    assert contents(folder).keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (
        again.get_vocab() == tokenizer.get_vocab()
        and again.chat_template == tokenizer.chat_template
    )
    assert again.all_special_ids == tokenizer.all_special_ids
    assert again("<|user|>é")["input_ids"] == tokenizer("<|user|>é")["input_ids"]
