"""A decoder with a trained vector for each position: longer texts are refused, wherever they come
from."""

import pytest
import yaml
from oracles import configuration, random_model, tokens

import policy
from policy import families
from rl.commands.cli import train_main
from rollout import Generator


@pytest.fixture(scope="module")
def model():
    return random_model(families.read(configuration("GPT2", n_positions=16, n_layer=1)))


def test_logits_of_a_longer_row_are_refused(model):
    assert model.logits(tokens(1, 16)).shape == (1, 16, 160)
    with pytest.raises(ValueError, match="length 17, this model has 16 positions"):
        model.logits(tokens(1, 17))


def test_a_generator_of_longer_texts_is_refused(model):
    Generator(model, max_length=16)
    with pytest.raises(ValueError, match="max_length 17 is more than the 16 positions"):
        Generator(model, max_length=17)


def test_a_run_over_longer_texts_ends_with_the_exit_code_of_a_wrong_configuration(
    model, tmp_path, capsys
):
    policy.save(model, tmp_path / "model")
    settings = {
        "run": {"dir": str(tmp_path / "run")},
        "platform": "cpu",
        "model": str(tmp_path / "model"),
        "tokenizer": {"source": "characters", "alphabet": "0123456789+="},
        "max_length": 20,
        "data": {"task": "arithmetic", "options": {"operations": ["+"], "max_operand": 9}},
        "stages": [{"algorithm": "sft", "steps": 1, "prompts_per_step": 2}],
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(settings))
    assert train_main([str(tmp_path / "run.yml")]) == 2
    assert "max_length: 20 is more than the 16 positions" in capsys.readouterr().err
