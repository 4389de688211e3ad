"""Special tokens of a completion: rewards can ask for them, samples and the viewer show them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import trajectories

from rewards import Runner, RunnerOptions, Scores
from rl.commands import cli
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.records import messages
from rl.records.samples import TOKEN, SampleLog
from rl.stages.sampling.records import sample_lines
from rollout import Completion, SamplingParams
from rollout.collect import Source, collect
from rollout.generator import Generator
from rollout.request import Request
from rollout.text.tokenizer import characters

RAW = "<think>1+1</think>2"


@pytest.fixture
def tokenizer():
    tokenizer = characters("0123456789+=")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


def completed(tokenizer, text, ended=True):
    """Returns the Completion of a text, as the generator makes it."""
    generator = Generator.__new__(Generator)
    generator.tokenizer, generator.options = (
        tokenizer,
        SimpleNamespace(record_values=False, record_kept=0),
    )
    tokens = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * ended
    request = Request((1,), SamplingParams(stop_token_ids=(tokenizer.eos_token_id,)), tokens=tokens)
    request.logprobs, request.finish = [0.0] * len(tokens), "stop" if ended else "length"
    return generator.completion(request)


@pytest.mark.parametrize("ended", [True, False])
def test_a_completion_has_its_text_with_and_without_special_tokens(tokenizer, ended):
    completion = completed(tokenizer, RAW, ended)
    assert (completion.text, completion.raw) == ("1+12", RAW)
    assert completed(tokenizer, "1+1=2", ended).raw == "1+1=2"


def test_rewards_that_name_raw_get_it(tokenizer):
    completion = completed(tokenizer, RAW)

    class Generates:
        counts = {}
        reset_prefix_cache = staticmethod(lambda: None)
        stream = staticmethod(lambda prompts, params, ids: iter([(0, 0, completion)]))

    pattern = r"<think>.*</think>\d"
    functions = (("regex_format", 1.0, {"pattern": pattern}), ("exact_answer", 1.0, {}))
    problem = Problem(
        Example([{"role": "user", "content": "1+1"}], columns={"answer": "1+12"}), [7]
    )
    with Runner(RunnerOptions(functions, workers=1)) as runner:
        rollouts = collect(Source(Generates(), runner), [problem], SamplingParams(), [0])
        assert rollouts.scores.result().rewards.tolist() == [[1.0, 1.0]]


def test_samples_and_the_viewer_show_special_tokens(tokenizer, tmp_path, capsys):
    completions = [completed(tokenizer, RAW), completed(tokenizer, "1+1=2")]
    scores = Scores(np.ones((2, 1)), np.ones(2), ("own",), [], {})
    rollouts = trajectories.rollouts([Problem(Example("1+1="), [7])], [0], [completions])
    special, plain = sample_lines(rollouts, scores, "grpo", 1, np.zeros(2))
    assert (special["completion"], special["raw"]) == ("1+12", RAW) and "raw" not in plain
    assert (
        messages.start(special, "completion", 80) == RAW
        and messages.start(plain, "completion", 80) == "1+1=2"
    )
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "config.yml").write_text(
        "tokenizer: {source: characters, alphabet: '0123456789+='}\n"
    )
    log = SampleLog(tmp_path, limit=1)
    log.write(
        [special, plain], [np.zeros(len(one["tokens"]) + 1, TOKEN) for one in (special, plain)]
    )
    log.close()
    assert cli.main(["samples", str(tmp_path), "<think>"]) == 0  # the search finds it
    assert RAW in capsys.readouterr().out
    spec = ["--rescore", f"{tmp_path}/own.py:thinks", "--json"]
    (tmp_path / "own.py").write_text(
        "def thinks(completions, raw):\n    return [float('<think>' in one) for one in raw]\n"
    )
    assert cli.main(["samples", str(tmp_path), *spec]) == 0
    assert json.loads(capsys.readouterr().out)["functions"]["thinks"]["after"] == 0.5


def test_a_checkpoint_of_an_earlier_version_has_completions_without_it():
    assert Completion([1], [0.0], "stop", "a").raw is None
