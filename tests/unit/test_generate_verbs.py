"""`rl generate` and `rl chat` on a small model with the bytes' tokenizer."""

import io
import json
import shutil
import subprocess
import sys

import pytest

import policy
from rl.commands import cli
from rl.errors import ConfigError
from rollout import Generator, SamplingParams
from rollout.text.tokenizer import byte_level, load_tokenizer


def rl(*arguments: str) -> int:
    return cli.main([*map(str, arguments), "--platform", "cpu"])


def test_prompts_are_completed_as_the_generator_does(small_model, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\nand two\n")
    arguments = (
        "--prompts",
        file,
        "--samples",
        2,
        "--max-new-tokens",
        5,
        "--seed",
        3,
        "--slots",
        1,
    )  # blocks of two prompts
    assert rl("generate", small_model, *arguments) == 0
    result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokenizer = load_tokenizer(small_model)
    generator = Generator(
        policy.load(small_model), max_length=64, slots=2, seed=3, tokenizer=tokenizer
    )
    stops = (tokenizer.eos_token_id,)
    made = generator.generate(
        ["one", "and two"], SamplingParams(n=2, max_new_tokens=5, stop_token_ids=stops)
    )
    assert [(line["prompt"], line["sample"]) for line in result] == [
        ("one", 0),
        ("one", 1),
        ("and two", 0),
        ("and two", 1),
    ]
    for line, completion in zip(result, [c for group in made for c in group], strict=True):
        assert (line["tokens"], line["completion"], line["finish"]) == (
            completion.tokens,
            completion.text,
            completion.finish,
        )
        assert line["logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.slow
def test_penalties_and_forbidden_texts_are_arguments(small_model, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n")
    setting = ("--prompts", file, "--temperature", 0, "--max-new-tokens", 12)
    keys = (
        "--repetition-penalty",
        1.5,
        "--presence-penalty",
        0.5,
        "--frequency-penalty",
        0.25,
        "--min-tokens",
        8,
    )
    texts = ("--bad-words", "e", "--bad-words", "ab", "--logit-bias", "{40: 3.0, 41: -100}")
    assert rl("generate", small_model, *setting, *keys, *texts) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    tokenizer = load_tokenizer(small_model)
    generator = Generator(policy.load(small_model), max_length=64, slots=1, tokenizer=tokenizer)
    params = SamplingParams(
        max_new_tokens=12,
        temperature=0,
        stop_token_ids=(tokenizer.eos_token_id,),
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=8,
        bad_words=("e", "ab"),
        logit_bias={40: 3.0, 41: -100.0},
    )
    assert line["tokens"] == generator.generate(["one"], params)[0][0].tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--logit-bias", "{400: 1.0}"), "logit_bias names token 400, outside 0..319"),
        (("--min-tokens", 300), "min_tokens must be 0 or more, and at most max_new_tokens"),
        (("--bad-words", " "), "bad_words must not hold an empty string or blanks alone"),
        (("--presence-penalty", 3), r"presence_penalty must lie in [-2, 2]"),
    ],
)
def test_penalties_out_of_range_are_refused(small_model, tmp_path, capsys, arguments, message):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n")
    assert rl("generate", small_model, "--prompts", file, *arguments) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rl("generate", small_model, "--prompts", file, "--logit-bias", "40")
    assert (
        "must be a mapping of token ids to numbers such as {198: -100, 40: 2.5}"
        in capsys.readouterr().err
    )


def test_messages_go_through_the_template_and_a_run_is_its_export(small_model, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "export").symlink_to(small_model)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"prompt": messages}) + "\n")
    assert (
        rl(
            "generate",
            run,
            "--prompts",
            file,
            "--output",
            out,
            "--max-new-tokens",
            3,
            "--temperature",
            0,
        )
        == 0
    )
    (line,) = map(json.loads, out.read_text().splitlines())
    made = Generator(policy.load(small_model), tokenizer=load_tokenizer(small_model)).generate(
        [
            load_tokenizer(small_model).apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        ],
        SamplingParams(
            max_new_tokens=3,
            temperature=0,
            stop_token_ids=(load_tokenizer(small_model).eos_token_id,),
        ),
    )
    assert line["prompt"] == messages and line["tokens"] == made[0][0].tokens


def test_completions_end_where_transformers_ends_them(small_model, tmp_path, capsys):
    """By the list in config.json, in a small_model without generation_config.json."""
    import torch
    from transformers import AutoModelForCausalLM

    copy, file = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(small_model, copy)
    config = json.loads((copy / "config.json").read_text())
    even = list(range(8, 320, 2))
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": even}))
    file.write_text("one\nand two\n")
    options = ("--prompts", file, "--max-new-tokens", 12, "--temperature", 0)
    assert rl("generate", copy, *options) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(copy), load_tokenizer(copy)
    for line in lines:
        prompt = torch.tensor([tokenizer.encode(line["prompt"])])
        made = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[
            0, prompt.shape[1] :
        ].tolist()
        assert line["tokens"] == made and made[-1] in even and line["finish"] == "stop"


def test_a_broken_generation_config_ends_with_4(small_model, tmp_path, capsys):
    copy, file = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(small_model, copy)
    file.write_text("one\n")
    (copy / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert rl("generate", copy, "--prompts", file) == 4
    assert f"{copy}/generation_config.json: eos_token_id" in capsys.readouterr().err


def test_a_chat_remembers_what_was_said_until_it_is_reset(small_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/reset\nhello\nhello\n"))
    assert (
        rl("chat", small_model, "--max-new-tokens", 8, "--temperature", 0, "--max-length", 128) == 0
    )
    first, again, later = capsys.readouterr().out.split("\n")[:3]
    assert first == again != later


def test_an_answer_of_a_chat_is_written_while_it_is_sampled(small_model, monkeypatch):
    class Output(io.StringIO):
        pieces = []

        def write(self, text):
            self.pieces.append(text)
            return super().write(text)

    out = Output()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setattr("sys.stdout", out)
    tokens = ("--max-new-tokens", 40, "--temperature", 0)
    assert rl("chat", small_model, *tokens, "--max-length", 128) == 0
    tokenizer = load_tokenizer(small_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )["input_ids"]
    generator = Generator(policy.load(small_model), max_length=128, slots=1, tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=(2,))
    [[completion]] = generator.generate([prompt], params)
    assert out.getvalue() == completion.text + "\n"
    assert len([piece for piece in out.pieces if piece.strip()]) > 2


@pytest.mark.parametrize(
    ("content", "arguments", "code", "said"),
    [
        ("", (), 3, "no prompts"),
        ('{"text": "a"}', (), 3, "prompts.jsonl:1: not an object with `prompt`"),
        (
            '{"prompt": "a"}\n{"prompt": [1]}',
            (),
            3,
            "prompts.jsonl:2: `prompt`: message 0 must be a mapping",
        ),
        (
            '{"prompt": "a"}',
            ("--temperature", -1),
            2,
            "temperature must be a finite number from 0 on",
        ),
        ('{"prompt": "a"}', ("--slots", 0), 2, "slots at least 1"),
        ('{"prompt": "a"}', ("--output", "no/such/folder/x"), 2, "--output no/such/folder/x"),
    ],
)
def test_what_cannot_be_read_or_drawn_is_said_with_its_exit_code(
    small_model, tmp_path, capsys, content, arguments, code, said
):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert rl("generate", small_model, "--prompts", file, *arguments) == code
    assert said in capsys.readouterr().err


def test_a_directory_without_a_model_is_refused(tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a")
    assert rl("generate", tmp_path, "--prompts", tmp_path / "p.txt") == 4
    assert "no config.json there" in capsys.readouterr().err
    assert rl("generate", tmp_path, "--prompts", tmp_path / "missing.txt") == 3


def test_tokenizers_are_read_without_torch(tmp_path):
    """In a process of its own: others of these tests need torch."""
    pytest.importorskip("torch", reason="there is nothing to leave out")
    byte_level().save_pretrained(tmp_path)
    code = (
        "import sys; from rl.commands.environment import leave_torch_out; leave_torch_out()\n"
        "from rollout.text.tokenizer import load_tokenizer\n"
        f"assert load_tokenizer({str(tmp_path)!r}).eos_token_id and 'torch' not in sys.modules\n"
        "import torch"  # for whoever needs it
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_variables_of_the_chat_template_come_from_the_command_or_the_run(small_model, tmp_path):
    from argparse import Namespace

    from rl.commands import sampled_model
    from rollout.text.chat import render_prompt

    run = tmp_path / "run"
    run.mkdir()
    (run / "export").symlink_to(small_model)
    sampling = {
        "max_new_tokens": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": [],
    }

    def prompt(variables):
        arguments = Namespace(
            model=str(run), dtype="float32", template_variables=variables, **sampling
        )
        tokenizer = sampled_model.find(arguments).tokenizer
        tokenizer.chat_template = "{{ thinking is defined and thinking }}"
        return tokenizer.decode(render_prompt(tokenizer, [{"role": "user", "content": "a"}]))

    assert prompt(None) == "False" and prompt("{thinking: yes}") == "yes"
    (run / "config.yml").write_text(
        "tokenizer: {source: bytes, chat_template: {variables: {thinking: 7}}}"
    )
    assert prompt(None) == "7" and prompt("{thinking: 8}") == "8"
    with pytest.raises(ConfigError, match="--template-variables: must be a mapping"):
        prompt("thinking")
