"""Tokenizer and model belong together: a tokenizer may be longer than the embedding by tokens that
no row uses (Gemma 3 1B is published so), and weights keep the tokenizer that they were trained
with."""

import json

import oracles
import pytest

import policy
from policy import families
from policy.huggingface import sources
from rl.config.model import TeacherOptions
from rl.data import models, teacher
from rl.data.reader import DataReader
from rl.data.tokenizer import read_tokenizer
from rl.errors import ConfigError, DataError
from rl.run import build
from rl.run.load import load
from rollout.text.tokenizer import load_tokenizer

EMBEDDED = 190  # of the 264 tokens of bytes; that of byte 0 is 196


@pytest.fixture
def run(tmp_path):
    """Returns the configuration of a run over these rows."""

    def config(*rows, size=EMBEDDED):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        values = {
            "model": {"source": "tiny-deepseek", "overrides": {"vocab_size": size}},
            "tokenizer": {"source": "bytes"},
            "data": {"path": str(tmp_path / "rows.jsonl")},
            "stages": [{"algorithm": "sft", "steps": 1}],
        }
        (tmp_path / "run.yml").write_text(json.dumps(values))
        return load([tmp_path / "run.yml"], [])

    return config


def demonstrations(config):
    return DataReader(config).demonstrations(config.data, "assistant").own


def test_rows_whose_tokens_have_an_embedding_are_read(run):
    config = run({"prompt": "1+1=", "completion": "2"})
    assert len(demonstrations(config)) == 1
    build._check(
        config,
        sources.preset("tiny-deepseek", {"vocab_size": EMBEDDED}),
        DataReader(config).tokenizer,
    )


@pytest.mark.parametrize("text", ["prompt", "completion"])
def test_a_row_with_another_token_is_named(run, text):
    good = {"prompt": "1+1=", "completion": "2"}
    config = run(good, good | {text: "\x00"})
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: token 196 .* is outside the model's vocabulary of 190"
    ):
        demonstrations(config)


def test_a_teacher_needs_the_ids_that_are_in_use(run, tmp_path):
    config = run({"prompt": "1+1=", "completion": "2"})
    tokenizer = DataReader(config).tokenizer
    used = models.ids_in_use(tokenizer, config.model)
    assert used == EMBEDDED
    for size in (EMBEDDED, EMBEDDED - 1):
        directory = tmp_path / str(size)
        policy.save(
            oracles.random_model(families.read(oracles.configuration("Llama", vocab_size=size))),
            directory,
        )
        tokenizer.save_pretrained(directory)
    teacher.check_teacher(
        TeacherOptions(source=str(tmp_path / str(EMBEDDED))), tokenizer, (2,), used
    )
    with pytest.raises(ConfigError, match="has a vocabulary of 189, the run uses 190 tokens"):
        teacher.check_teacher(
            TeacherOptions(source=str(tmp_path / str(EMBEDDED - 1))), tokenizer, (2,), used
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the directory of a model with a tokenizer of characters."""
    directory = tmp_path_factory.mktemp("trained")
    policy.save(oracles.random_model(families.read(oracles.configuration("Llama"))), directory)
    load_tokenizer("characters", "0123456789+=").save_pretrained(directory)
    return directory


def of_model(directory, tmp_path, *overrides):
    """Returns the configuration of a run on this model."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}))
    values = {
        "model": str(directory),
        "data": str(tmp_path / "rows.jsonl"),
        "stages": [{"algorithm": "sft", "steps": 1}],
    }
    (tmp_path / "run.yml").write_text(json.dumps(values))
    return load([tmp_path / "run.yml"], list(overrides))


def test_weights_keep_the_tokenizer_that_they_were_trained_with(trained, tmp_path):
    with pytest.raises(
        ConfigError, match="bytes in place of the tokenizer of .*; leave `tokenizer` out"
    ):
        read_tokenizer(of_model(trained, tmp_path, "tokenizer=bytes"))
    same = of_model(trained, tmp_path, "tokenizer={source: characters, alphabet: '0123456789+='}")
    assert len(read_tokenizer(same)[0]) == len(read_tokenizer(of_model(trained, tmp_path))[0])


def test_a_chat_template_alone_is_that_of_the_models_tokenizer(trained, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    config = of_model(trained, tmp_path, f"tokenizer.chat_template={tmp_path / 'own.jinja'}")
    tokenizer = read_tokenizer(config)[0]
    assert tokenizer.encode("1+1=") == load_tokenizer(trained).encode("1+1=")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "1"
    with pytest.raises(ConfigError, match="only `characters` takes an alphabet"):
        of_model(trained, tmp_path, "tokenizer.alphabet=ab")
    with pytest.raises(ConfigError, match="no such file: none.jinja"):
        of_model(trained, tmp_path, "tokenizer.chat_template=none.jinja")
