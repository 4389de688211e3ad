"""Adapters over `rl serve`: each is a model with a name."""

import numpy as np
import openai
import pytest
from served import KEY, serving

import policy
from policy.adapter_spec import AdapterSpec
from policy.huggingface.peft.factors import factor_shapes
from policy.huggingface.peft.targets import targets
from policy.huggingface.peft.writer import write_adapter
from rl.commands import cli
from rollout import Generator, SamplingParams
from rollout.adapter_pool import AdapterPool
from rollout.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def adapters(served_model, tmp_path_factory):
    """Two adapters of PEFT with random factors."""
    model = policy.load(served_model)
    spec = AdapterSpec(rank=4, targets=("q_proj", "o_proj"))
    folders = {}
    parent = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "prose")):
        rng = np.random.default_rng(seed)
        arrays = {}
        for path, target in targets(model.graph, spec).items():
            shapes = factor_shapes(model.graph, path, target.rank)
            arrays[f"{path}.lora_a"] = rng.normal(0, 0.5, shapes.a).astype(np.float32)
            arrays[f"{path}.lora_b"] = rng.normal(0, 0.5, shapes.b).astype(np.float32)
        folders[name] = parent / name
        write_adapter(folders[name], model.graph, spec, arrays, str(served_model))
    return folders


@pytest.fixture(scope="module")
def server(served_model, adapters):
    with serving(served_model, adapters=adapters) as server:
        yield server


def test_each_name_is_answered_by_its_adapter(server, served_model, adapters):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny", "sql", "prose"]
    pool = AdapterPool(policy.load(served_model), adapters)
    tokenizer = load_tokenizer(served_model)
    generator = Generator(pool.model, max_length=128, slots=2, tokenizer=tokenizer, adapters=pool)
    params = SamplingParams(max_new_tokens=10, temperature=0, stop_token_ids=(2,))
    texts = set()
    for name, adapter in (("tiny", None), ("sql", "sql"), ("prose", "prose")):
        answer = client.completions.create(model=name, prompt="hello", max_tokens=10, temperature=0)
        [[expected]] = generator.generate(["hello"], params, adapter=adapter)
        assert answer.choices[0].text == expected.text
        assert answer.model == name
        texts.add(expected.text)
    assert len(texts) == 3
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="hello")
    response = client.responses.create(model="sql", input="hello", max_output_tokens=2)
    assert response.model == "sql"


@pytest.mark.parametrize(("text", "code"), [("sql", 2), ("sql=", 2), ("sql=no/such/folder", 4)])
def test_an_adapter_that_cannot_be_read_is_named(served_model, capsys, text, code):
    arguments = ["serve", str(served_model), "--port", "0", "--platform", "cpu"]
    assert cli.main([*arguments, "--adapter", text]) == code
    assert "--adapter" in capsys.readouterr().err
