"""A tokenizer may be longer than a model's embedding, by tokens that no row uses (Gemma 3 1B is published so)."""

import json

import oracles
import pytest

import policy
from policy import families
from policy.huggingface import sources
from rl.config.model import TeacherOptions
from rl.data import models, teacher
from rl.data.reader import DataReader
from rl.errors import ConfigError, DataError
from rl.run import build
from rl.run.load import load

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
    build._check(config, sources.preset("tiny-deepseek", {"vocab_size": EMBEDDED}), DataReader(config).tokenizer)


@pytest.mark.parametrize("text", ["prompt", "completion"])
def test_a_row_with_another_token_is_named(run, text):
    good = {"prompt": "1+1=", "completion": "2"}
    config = run(good, good | {text: "\x00"})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: token 196 .* is outside the model's vocabulary of 190"):
        demonstrations(config)


def test_a_teacher_needs_the_ids_that_are_in_use(run, tmp_path):
    config = run({"prompt": "1+1=", "completion": "2"})
    tokenizer = DataReader(config).tokenizer
    used = models.ids_in_use(tokenizer, config.model)
    assert used == EMBEDDED
    for size in (EMBEDDED, EMBEDDED - 1):
        directory = tmp_path / str(size)
        policy.save(oracles.random_model(families.read(oracles.configuration("Llama", vocab_size=size))), directory)
        tokenizer.save_pretrained(directory)
    teacher.check_teacher(TeacherOptions(source=str(tmp_path / str(EMBEDDED))), tokenizer, (2,), used)
    with pytest.raises(ConfigError, match="has a vocabulary of 189, the run uses 190 tokens"):
        teacher.check_teacher(TeacherOptions(source=str(tmp_path / str(EMBEDDED - 1))), tokenizer, (2,), used)
