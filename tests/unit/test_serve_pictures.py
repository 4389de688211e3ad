"""Pictures of requests to `rl serve`: data URLs, and nothing else."""

import base64
from pathlib import Path

import anthropic
import openai
import pytest
from media_rows import model_directory, png
from served import KEY, serving

import policy
from policy.huggingface import sources
from rl.data import prompts
from rl.data.encoding import ExampleEncoder
from rl.data.media import processors_of
from rl.training.media.tables import MediaTables
from rollout import Generator, SamplingParams
from rollout.media.reference import Reference
from rollout.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny Qwen3-VL with random weights, its tokenizer and its processor."""
    folder = Path(model_directory(tmp_path_factory.mktemp("models") / "tiny"))
    policy.save(policy.create(sources.read_config(folder, media=True), seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def server(directory):
    with serving(directory, media=True) as server:
        yield server


def url(shade):
    return f"data:image/png;base64,{base64.b64encode(png(shade)).decode()}"


def question(*urls):
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "and"}]}]


def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_a_picture_is_shown_as_in_training(server, directory):
    def answer(shade):
        return client(server).chat.completions.create(
            model="tiny", messages=question(url(shade)), max_tokens=6, seed=3
        )

    tokenizer = load_tokenizer(directory)
    processors = processors_of(directory, tokenizer)
    content = [{"type": "image"}, {"type": "text", "text": "and"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": [png(10)]}
    problems = prompts.problems([("here", row)], ExampleEncoder(tokenizer, processors), directory)
    [problem] = problems
    generator = Generator(
        policy.load(directory, media=True), max_length=128, slots=1, tokenizer=tokenizer
    )
    tables = MediaTables.of_blocks(generator.model.graph, processors, [problems])
    with tables.loader:
        table = tables.of(generator.model.params, [problem.expanded])
    params = SamplingParams(max_new_tokens=6, stop_token_ids=(tokenizer.eos_token_id,))
    [[expected]] = generator.generate(
        [table.prompt(problem.ids, problem.expanded)], params, ids=[3]
    )
    shown = answer(10)
    assert shown.choices[0].message.content == expected.text
    assert shown.usage.prompt_tokens == len(problem.ids)


def test_every_api_takes_pictures(server):
    chat = client(server).chat.completions.create(
        model="tiny", messages=question(url(10), url(200)), max_tokens=6, temperature=0
    )
    text = chat.choices[0].message.content
    parts = [{"type": "input_image", "image_url": url(shade)} for shade in (10, 200)]
    response = client(server).responses.create(
        model="tiny",
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": "and"}]}],
        max_output_tokens=6,
        temperature=0,
    )
    assert response.output_text == text
    blocks = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(png(shade)).decode(),
            },
        }
        for shade in (10, 200)
    ]
    message = anthropic.Anthropic(base_url=server.url, api_key=KEY).messages.create(
        model="tiny",
        messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": "and"}]}],
        max_tokens=6,
        extra_body={"temperature": 0},
    )
    assert message.content[0].text == text


@pytest.mark.parametrize(
    "address",
    [
        "https://example.com/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png;base64,????",
        "data:image/png;base64,aGVsbG8=",
        "data:image/png",
    ],
)
def test_other_addresses_and_broken_pictures_are_refused(server, address):
    answer = server.post("/v1/chat/completions", {"messages": question(address)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_more_pictures_than_the_model_has_places_for_are_refused(server):
    messages = question(*(url(shade) for shade in range(40)))
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert server.post("/v1/chat/completions", {"messages": question(url(10))}).status_code == 200


def test_a_turn_behind_a_picture_is_continued(server):
    image = {"type": "base64", "media_type": "image/png", "data": url(10).partition(",")[2]}
    asked = {"role": "user", "content": [{"type": "image", "source": image}]}
    begun = {"role": "assistant", "content": "ab"}

    def count(*messages):
        answer = server.post("/v1/messages/count_tokens", {"messages": messages})
        return answer.json()["input_tokens"]

    # The last turn is not closed, and no other one begins.
    assert count(asked, begun) < count(asked, begun, {"role": "user", "content": ""})
    longer = count(asked, begun | {"content": "abab"})
    assert longer - count(asked, begun) == 2
    tokens = server.post("/tokenize", {"messages": question(url(10))}).json()["count"]
    chat = server.post("/v1/chat/completions", {"messages": question(url(10)), "max_tokens": 1})
    assert chat.json()["usage"]["prompt_tokens"] == tokens


def test_a_picture_that_cannot_be_decoded_is_named(server, monkeypatch):
    def fail(self, processors):
        raise ValueError("the picture is broken")

    monkeypatch.setattr(Reference, "inputs", fail)
    input_ = [{"role": "user", "content": [{"type": "input_image", "image_url": url(77)}]}]
    asked = [{"role": "user", "content": "a"}, *input_]
    answer = server.post("/v1/responses", {"input": asked, "max_output_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1].content"
    assert answer.json()["error"]["code"] == "invalid_image"
