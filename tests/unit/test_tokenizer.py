import datetime
import json

import pytest

from policy.huggingface.tensorfiles import ModelFileError
from rl.config import files
from rl.config.run import RunConfig
from rl.data.tokenizer import read_tokenizer, reads_date
from rl.run.load import load
from rl.run.prepare import with_date
from rollout.text.chat import (
    ChatError,
    encode_answer,
    encode_completion,
    encode_conversation,
    render_prompt,
    with_variables,
)
from rollout.text.tokenizer import SPECIALS, load_tokenizer, stop_ids

ALPHABET = "0123456789+-*= \n"
TALK = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "é2"},
    {"role": "user", "content": "again <|end|>"},
    {"role": "assistant", "content": "3 "},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")


@pytest.mark.parametrize("source", ["characters", "bytes"])
def test_a_built_in_tokenizer_is_an_ordinary_directory(source, tmp_path):
    from transformers import AutoTokenizer

    made = load_tokenizer(source, ALPHABET if source == "characters" else None)
    made.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        text = "12 + 3=\n\n-9"
        ids = again.encode(text)
        assert ids == made.encode(text) and len(ids) == len(text)
        assert again.decode(ids) == text
        assert again.convert_ids_to_tokens(list(range(8))) == list(SPECIALS)
        assert (again.pad_token_id, again.bos_token_id, again.eos_token_id, again.unk_token_id) == (
            0,
            1,
            2,
            3,
        )
        assert len(again) == len(made) == 8 + (len(ALPHABET) if source == "characters" else 256)
        chat = TALK[1:2]
        assert again.apply_chat_template(chat, tokenize=False) == made.apply_chat_template(
            chat, tokenize=False
        )


def test_bytes_bring_any_text_back_and_characters_mark_what_they_do_not_know(tokenizer):
    text = "héé \U0001f600\n\t  x\x00 ,a 's  ' s" + "".join(map(chr, range(1, 700)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert load_tokenizer("characters", "ab").encode("axb") == [8, 3, 9]


def learned(tokenizer, row) -> str:
    """Returns the text that a row (ids, mask) trains on."""
    ids, mask = row
    return tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])


def test_the_mask_covers_what_the_assistant_writes_and_nothing_else(tokenizer):
    [(ids, mask)] = encode_conversation(tokenizer, TALK)
    assert learned(tokenizer, (ids, mask)) == "é2<eos>3 <eos>"
    marked = tokenizer.apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (ids, mask) == (marked["input_ids"], marked["assistant_masks"])


def test_a_demonstration_continues_exactly_the_prompt_that_sampling_sees(tokenizer):
    for prompt in ("1+1=", TALK[:2], TALK[:4]):
        ids, mask = encode_completion(tokenizer, prompt, "42")
        shown = render_prompt(tokenizer, prompt)
        assert ids[: len(shown)] == shown and mask == [0] * len(shown) + [1] * 3
        assert tokenizer.decode(ids[len(shown) :]) == "42<eos>"
        assert encode_completion(tokenizer, prompt, "42", "all") == (
            ids,
            [0] + [1] * (len(ids) - 1),
        )


QWEN = (
    "{%- for m in messages -%}{%- set last = loop.last -%}<|{{ m.role }}|>\n"
    "{%- if m.role == 'assistant' and last -%}<think>\n\n</think>\n\n{%- endif -%}{{ m.content "
    "}}<eos>\n{% endfor -%}{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}"
)
THOUGHT = "<think>\n\n</think>"
# The prompt ends with the beginning of a thought, which a conversation does not have, and neither
# its thoughts (DeepSeek R1).
R1 = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<eos>{%- "
    "endfor -%}{%- if add_generation_prompt -%}<|assistant|><think>\n{%- endif -%}"
)
COUNTS = "{{ messages | length }}{% for m in messages %}{{ m.content }}|{% endfor %}"
CASES = {
    "drops the thought of earlier turns": (QWEN, [f"{THOUGHT}3 <eos>", f"{THOUGHT}é2<eos>"]),
    "begins a thought in the prompt only": (R1, ["é2<eos>3 <eos>"]),
    "rewrites what came before": (COUNTS, ["3 |", "é2|"]),
    "drops the assistant": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        None,
    ),
    "begins twice": ("<bos><bos>{% for m in messages %}{{ m.content }}<eos>{% endfor %}", None),
}


@pytest.mark.parametrize("name", CASES)
def test_other_templates_are_masked_by_position_or_refused(name, tmp_path):
    template, expected = CASES[name]
    (tmp_path / "chat.jinja").write_text(template)
    tokenizer = load_tokenizer("bytes", chat_template=tmp_path / "chat.jinja")
    if expected is None:
        with pytest.raises(ChatError):
            encode_conversation(tokenizer, TALK)
        return
    rows = encode_conversation(tokenizer, TALK)
    assert [learned(tokenizer, row) for row in rows] == expected
    assert encode_conversation(tokenizer, TALK, history="last") == rows[:1]
    assert encode_conversation(tokenizer, TALK, train_on="last_turn") == rows[
        :1
    ] or name.startswith("begins")
    full = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(rows[0][0]) == full


def test_a_turn_that_is_rewritten_is_learned_as_it_was_when_it_was_the_last(tmp_path):
    (tmp_path / "chat.jinja").write_text(QWEN)
    tokenizer = load_tokenizer("bytes", chat_template=tmp_path / "chat.jinja")
    talk = [*TALK, TALK[1], TALK[4]]
    rows = encode_conversation(tokenizer, talk)
    for row, count in zip(rows, (7, 5, 3), strict=True):
        prompt = render_prompt(tokenizer, talk[: count - 1])
        assert row[0][: len(prompt)] == prompt and row[1][: len(prompt)] == [0] * len(prompt)
        assert learned(tokenizer, row) == f"{THOUGHT}{talk[count - 1]['content']}<eos>"
    with pytest.raises(ChatError, match="changes a turn of the answer"):
        encode_answer(tokenizer, TALK[:2], TALK[2:])
    assert learned(tokenizer, encode_answer(tokenizer, TALK[:4], TALK[4:])) == f"{THOUGHT}3 <eos>"


def test_an_answer_that_its_own_end_of_turn_contains_is_trained_on(tmp_path):
    (tmp_path / "chat.jinja").write_text(R1)
    tokenizer = load_tokenizer("bytes", chat_template=tmp_path / "chat.jinja")
    talk = [TALK[1], {"role": "assistant", "content": "e"}]
    assert learned(tokenizer, encode_conversation(tokenizer, talk)[0]) == "e<eos>"
    for content in (
        "a",
        "assistant",
        "<b>",
    ):  # letters of the header of the turn, and of what its prompt ends with
        talk = [TALK[1], {"role": "assistant", "content": content}]
        assert learned(tokenizer, encode_conversation(tokenizer, talk)[0]) == f"{content}<eos>"


def test_history_last_leaves_out_turns_that_are_rewritten(tmp_path):
    (tmp_path / "chat.jinja").write_text(QWEN)
    tokenizer = load_tokenizer("bytes", chat_template=tmp_path / "chat.jinja")
    talk = [*TALK[:4], TALK[4] | {"weight": 0}]
    assert [learned(tokenizer, row) for row in encode_conversation(tokenizer, talk)] == [
        f"{THOUGHT}é2<eos>"
    ]
    with pytest.raises(ChatError, match="changes every turn that is trained on"):
        encode_conversation(tokenizer, talk, history="last")


def test_variables_and_the_date_of_a_run_reach_the_template(tmp_path):
    template = (
        "{{ strftime_now('%d %b %Y') }}{{ strftime_now( \"%Y\" ) }} {{ thinking }}{{ "
        "messages[0].content }}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    options = {"file": str(tmp_path / "chat.jinja"), "variables": {"thinking": False}}
    values = {
        "model": "tiny",
        "max_length": 8,
        "stages": [{"algorithm": "sft", "steps": 1, "data": "rows.jsonl"}],
    }

    def prompt(**more):
        config = RunConfig.model_validate(
            values | {"tokenizer": {"source": "bytes", "chat_template": options} | more}
        )
        tokenizer, _ = read_tokenizer(config)
        return tokenizer.decode(render_prompt(tokenizer, TALK[:1])), reads_date(config)

    assert prompt(date="2026-01-31") == ("31 Jan 20262026 Falseshort", True)
    today = datetime.date.today()
    assert prompt()[0] == f"{today:%d %b %Y}{today:%Y} Falseshort"
    with pytest.raises(ValueError, match="must be a day such as 2026-01-31"):
        prompt(date="31 January")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    assert prompt() == ("short", False)


def test_a_run_that_is_continued_reads_the_date_of_its_start(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    tokenizer = {"source": "bytes", "chat_template": str(tmp_path / "chat.jinja")}
    values = {
        "model": "tiny-deepseek",
        "tokenizer": tokenizer,
        "run": {"dir": str(tmp_path / "run")},
        "max_length": 8,
        "stages": [{"algorithm": "sft", "steps": 1, "data": {"task": "arithmetic"}}],
    }
    (tmp_path / "run.yml").write_text(json.dumps(values))
    config = load([tmp_path / "run.yml"])
    assert with_date(config).tokenizer.date == datetime.date.today().isoformat()
    (tmp_path / "run").mkdir()
    started = config.model_copy(
        update={"tokenizer": config.tokenizer.model_copy(update={"date": "2026-01-31"})}
    )
    (tmp_path / "run" / "config.yml").write_text(files.resolved_yaml(started))
    assert with_date(config).tokenizer.date == datetime.date.today().isoformat()  # it has no event
    (tmp_path / "run" / "events.jsonl").write_text("{}")
    assert with_date(config) == started == load([tmp_path / "run"])
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    assert with_date(config) == config


def test_a_turn_with_weight_0_is_not_trained_on(tokenizer):
    turns = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    [(ids, mask)] = encode_conversation(tokenizer, turns)
    assert learned(tokenizer, (ids, mask)) == "3 <eos>"
    assert ids == encode_conversation(tokenizer, TALK)[0][0]
    with pytest.raises(ChatError, match="all turns of the assistant have weight 0"):
        encode_conversation(tokenizer, turns[:3])
    with pytest.raises(ChatError, match="train_on=assistant"):
        encode_conversation(tokenizer, turns, train_on="all")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = "{% if tools %}{{ tools | map(attribute='function.name') | join }}|{% endif %}"


def test_tools_reach_the_template_or_are_refused(tmp_path):
    (tmp_path / "chat.jinja").write_text(
        WITH_TOOLS + "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    )
    tokenizer = load_tokenizer("bytes", chat_template=tmp_path / "chat.jinja")
    with_tools = with_variables(tokenizer, tools=TOOLS)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.decode(render_prompt(with_tools, messages[:1])) == "add|1+1<eos>"
    assert tokenizer.decode(render_prompt(tokenizer, messages[:1])) == "1+1<eos>"
    [(ids, mask)] = encode_conversation(with_tools, messages)
    assert tokenizer.decode(ids) == "add|1+1<eos>2<eos>" and sum(mask) == 2
    with pytest.raises(ChatError, match="the chat template does not write them"):
        render_prompt(with_variables(load_tokenizer("bytes"), tools=TOOLS), messages[:1])
    named = load_tokenizer("bytes")
    named.chat_template = {"default": "no", "tool_use": WITH_TOOLS}
    assert named.decode(render_prompt(with_variables(named, tools=TOOLS), messages[:1])) == "add|"


def test_messages_need_a_chat_template(tokenizer):
    bare = load_tokenizer("bytes")
    bare.chat_template = None
    with pytest.raises(ChatError, match="no chat template"):
        render_prompt(bare, TALK)


def test_a_tokenizer_that_frames_its_text_keeps_its_beginning_and_loses_its_end():
    from tokenizers.processors import TemplateProcessing

    framed = load_tokenizer("characters", ALPHABET)
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert render_prompt(framed, "1+1=") == [1, 9, 18, 9, 21]
    ids, mask = encode_completion(framed, "1+1=", "2")
    assert ids == [1, 9, 18, 9, 21, 10, 2] and mask == [0, 0, 0, 0, 0, 1, 1]
    with pytest.raises(ChatError, match="two beginnings"):
        render_prompt(framed, "<bos>1")


def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_generation_configuration(
    tokenizer, tmp_path
):
    assert stop_ids(tokenizer) == stop_ids(tokenizer, tmp_path) == (2,)
    for listed, result in ((7, (2, 7)), ([9, 2, 7], (2, 7, 9)), (None, (2,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert stop_ids(tokenizer, tmp_path) == result


OUTER, INNER = {"eos_token_id": [5, 9]}, {"text_config": {"eos_token_id": [6, 9]}}
THINKER = {
    "model_type": "qwen3_omni_moe",
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
}


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        (OUTER, None, (2, 5, 9)),
        (OUTER, {}, (2, 5, 9)),
        (OUTER, {"eos_token_id": None}, (2, 5, 9)),
        (OUTER, {"eos_token_id": 7}, (2, 7)),
        (OUTER | INNER, None, (2, 5, 9)),
        (INNER, {"do_sample": True}, (2, 6, 9)),
        (INNER | {"eos_token_id": None}, None, (2, 6, 9)),
        (THINKER | {"thinker_config": INNER}, None, (2, 6, 9)),
        ({"eos_token_id": -1}, None, (2,)),
    ],
)
def test_stop_tokens_without_a_generation_configuration_are_those_of_the_configuration(
    tokenizer, tmp_path, config, generation, stops
):
    """As transformers 5.24, which also reads the configuration where the other file is missing."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(tokenizer, tmp_path) == stops


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}', '{"eos_token_id": 2', "[]"]
)
def test_stop_tokens_of_a_broken_file(tokenizer, tmp_path, file, content):
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelFileError, match=f"{tmp_path}/{file}"):
        stop_ids(tokenizer, tmp_path)


def test_bad_tokenizers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs an alphabet"):
        load_tokenizer("characters")
    with pytest.raises(ValueError, match="each of its characters once"):
        load_tokenizer("characters", "aa")
    with pytest.raises(ValueError, match="give a directory or one of bytes, characters"):
        load_tokenizer("byte")
    with pytest.raises(ValueError, match="no tokenizer can be read"):
        load_tokenizer(tmp_path)
