"""A generator over several adapters computes for each request what `peft` computes with the adapter
that it names, whatever decodes with it, and compiles nothing for another one."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
from adapters import adapted, base, base_model  # noqa: E402
from tiny import VOCAB  # noqa: E402

from policy.huggingface.tensorfiles import ModelFileError  # noqa: E402
from rollout import Generator, GeneratorOptions, SamplingParams  # noqa: E402
from rollout.adapter_pool import AdapterPool  # noqa: E402
from rollout.request import Request  # noqa: E402

pytestmark = pytest.mark.xdist_group("adapter_pool")

OPTIONS = {
    "small": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "large": {"r": 6, "use_rslora": True, "target_modules": "all-linear"},
    "few layers": {"r": 2, "target_modules": ["down_proj"], "layers_to_transform": [0]},
}
NAMES = [None, *OPTIONS]
LONG = [int(i) for i in np.random.default_rng(3).integers(0, VOCAB, 40)]
PROMPTS = [LONG, [*LONG[:35], 1, 2], [3, 4], [5]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0, top_logprobs=3, prompt_logprobs=0)


@functools.cache
def folder_of(name: str) -> Path:
    directory = Path(tempfile.mkdtemp()) / name
    its_adapter(name).save_pretrained(directory)
    return directory


@functools.cache
def its_adapter(name: str | None):
    """The model of transformers, with an adapter of peft."""
    model = base_model("Llama")
    return model.eval() if name is None else adapted(model, len(name), **OPTIONS[name])


@functools.cache
def pool() -> AdapterPool:
    return AdapterPool(base("Llama").ours, {name: folder_of(name) for name in OPTIONS})


def generator_of(**options) -> Generator:
    options = GeneratorOptions(**{"tokens_per_dispatch": 4, "queue": "arrival"} | options)
    return Generator(pool().model, max_length=64, slots=4, seed=3, options=options, adapters=pool())


def requests_of(params, prompts=PROMPTS) -> list[Request]:
    """Of all adapters in turns, with equal prompts."""
    return [
        Request(tuple(prompt), params, n, adapter=name)
        for n, prompt in enumerate(prompts)
        for name in NAMES
    ]


def run(generator: Generator, requests: list[Request]) -> None:
    for request in requests:
        generator.submit(request)
    while not all(request.finish for request in requests):
        generator.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": "paged", "page_size": 4, "pages": 40, "batch_sizes": ()},
        pytest.param({"exact": True}, marks=pytest.mark.slow),
        pytest.param({"weights": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["contiguous", "pages", "exact", "weights of 8 bits"],
)
def test_each_request_is_computed_with_its_adapter(options):
    generator = generator_of(**options)
    requests = requests_of(GREEDY)
    run(generator, requests)
    close = 0.3 if "weights" in options else 1e-4
    for request in requests:
        tokens = [*request.prompt, *request.tokens]
        with torch.no_grad():
            z = its_adapter(request.adapter)(torch.tensor([tokens]), use_cache=False).logits
        logp = torch.log_softmax(z, -1)[0, :-1].numpy()
        own = logp[np.arange(len(tokens) - 1), tokens[1:]]
        n = len(request.prompt)
        np.testing.assert_allclose(request.prompt_scores.logprobs[1:], own[: n - 1], atol=close)
        np.testing.assert_allclose(request.scores.logprobs, own[n - 1 :], atol=close)
        assert (own[n - 1 :] > logp[n - 1 :].max(-1) - 2 * close).all()  # the likeliest token
    written = {(request.prompt, *request.tokens) for request in requests}
    assert len(written) > len(requests) // 2, "adapters change tokens"


def test_the_decoder_alone_gives_the_bits_that_it_gives_without_adapters():
    params = SamplingParams(max_new_tokens=8)
    plain = Generator(base("Llama").ours, max_length=64, slots=4, seed=3).generate(PROMPTS, params)
    pooled = generator_of(tokens_per_dispatch=128).generate(PROMPTS, params)
    assert [each.tokens for [each] in plain] == [each.tokens for [each] in pooled]
    assert [each.logprobs for [each] in plain] == [each.logprobs for [each] in pooled]


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_requests_that_arrive_at_any_time_get_what_they_get_alone(cache):
    generator = generator_of(cache=cache, page_size=4)
    params = SamplingParams(max_new_tokens=9)
    alone = {
        name: [each for [each] in generator.generate(PROMPTS, params, adapter=name)]
        for name in NAMES
    }
    requests = requests_of(params)
    for n, request in enumerate(requests):
        generator.submit(request)
        if n % 3 == 2:
            generator.step()
    gone = generator.submit(Request((1, 2), params, adapter="small"))
    generator.step()
    generator.cancel(gone)
    while not all(request.finish for request in requests):
        generator.step()
    for request in requests:
        expected = alone[request.adapter][request.prompt_id]
        assert request.tokens == expected.tokens
        np.testing.assert_allclose(request.logprobs, expected.logprobs, atol=1e-4)


def test_another_adapter_compiles_nothing_and_copies_no_weight_of_the_decoder():
    generator = generator_of()
    params = SamplingParams(max_new_tokens=6)
    count = generator.compile_ahead(41, [params], strict=True)
    copies = generator.engine.runner.decoding_weights
    run(generator, requests_of(params))
    before = {path: id(each) for path, each in copies._copies.items()}
    run(generator, requests_of(params))
    assert before and before == {path: id(each) for path, each in copies._copies.items()}
    assert len(generator.engine.runner.memory) == count


def test_what_does_not_go_together_is_refused_by_name(tmp_path):
    def folder(name, **options):
        adapted(base_model("Llama"), **options).save_pretrained(tmp_path / name)
        return tmp_path / name

    ours = base("Llama").ours
    targets = {"target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match=r"lengths: .* has DoRA"):
        AdapterPool(ours, {"lengths": folder("dora", use_dora=True, **targets)})
    with pytest.raises(ValueError, match=r"head: .* in full \(modules_to_save\)"):
        AdapterPool(ours, {"head": folder("full", modules_to_save=["lm_head"], **targets)})
    with pytest.raises(ValueError, match="name at least one"):
        AdapterPool(ours, {})
    with pytest.raises(ValueError, match="has an adapter already"):
        AdapterPool(pool().model, {"small": folder_of("small")})
    with pytest.raises(ModelFileError, match="nowhere"):
        AdapterPool(ours, {"small": tmp_path / "nowhere"})
    with pytest.raises(ValueError, match=r"AdapterPool\.model"):
        Generator(ours, adapters=pool())
    generator = generator_of()
    unknown = r"no adapter 'none of them'; this generator has small, large, few layers"
    with pytest.raises(ValueError, match=unknown):
        generator.submit(Request((1,), adapter="none of them"))
    with pytest.raises(ValueError, match=unknown):
        generator.generate([[1]], SamplingParams(max_new_tokens=2), adapter="none of them")
    with pytest.raises(ValueError, match="this generator has none"):
        Generator(ours, max_length=16).submit(Request((1,), adapter="small"))
