"""Completion of command lines: what `rl _complete` offers, and what real shells insert at Tab."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.commands import cli
from rl.commands.setup import completion
from rl.config.editors import complete

ROOT = Path(__file__).resolve().parents[2]
RUN = """
model: tiny-deepseek
stages:
  - {algorithm: sft, steps: 1}
  - {algorithm: {preset: dapo}, steps: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a configuration of two stages, a folder and another file."""
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text(RUN)
    Path("my runs").mkdir()
    Path("notes.txt").write_text("")
    return tmp_path


def words(word: str, *before: str) -> list[str]:
    return [candidate for candidate, _ in complete.candidates(word, before)]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("see", ["seed="]),
        ("stages.", ["stages.0.", "stages.1."]),
        ("stages.1.opt", ["stages.1.optimizer."]),
        ("stages.1.optimizer.sch", ["stages.1.optimizer.schedule="]),
        (
            "stages.1.optimizer.schedule=",
            [f"stages.1.optimizer.schedule={one}" for one in ("constant", "linear", "cosine")],
        ),
        ("stages.0.algorithm.tr", ["stages.0.algorithm.train_on="]),
        ("stages.1.algorithm.tr", []),
        ("stages.1.algorithm.epsilon_", ["stages.1.algorithm.epsilon_high="]),
        ("stages.0.algorithm.epsilon_", []),
        ("stages.0.algorithm=gr", ["stages.0.algorithm=grpo"]),
        (
            "generator.sliding_window_cache=",
            [f"generator.sliding_window_cache={one}" for one in ("true", "false")],
        ),
        ("generator.rules=s", ["generator.rules=stationary"]),
        ("tokeni", ["tokenizer.", "tokenizer="]),
        ("model.source=qwen3-0", ["model.source=qwen3-0.6b"]),
        ("rewards.functions.", ["rewards.functions.0.", "rewards.functions.0="]),
        ("rewards.functions.0.name=ex", ["rewards.functions.0.name=exact_answer"]),
        ("mesh.ten", ["mesh.tensor="]),
        ("every_stage.st", ["every_stage.steps="]),
        ("data.path=no", ["data.path=notes.txt"]),
        ("run.y", ["run.yml"]),
        ("run.d", ["run.dir="]),
        ("my", ["my runs/"]),
        ("not", []),
        ("quickstart.", ["quickstart.yml"]),
        ("nothing.", []),
        ("nothing=", []),
    ],
)
def test_candidates_of_a_word(word, expected, folder):
    assert words(word, "run.yml") == expected


def test_an_override_of_the_line_says_the_algorithm(folder):
    assert words("stages.0.algorithm.la", "run.yml", "stages.0.algorithm=ppo")[:1] == [
        "stages.0.algorithm.lam="
    ]


def test_a_broken_file_is_no_obstacle(folder):
    Path("bad.yml").write_text("stages: [")
    assert words("stages.", "bad.yml", "absent.yml", "notes.txt") == ["stages.0."]


def test_descriptions_and_quoting_are_of_the_shell(folder, capsys):
    assert cli.main(["_complete", "fish", "rl-train", "max_l"]) == 0
    assert capsys.readouterr().out.startswith(
        "max_length=\ttokens of a prompt and its completion together"
    )
    cli.main(["_complete", "bash", "rl-train", "my\\ r"])
    assert capsys.readouterr().out == "my\\ runs/\t\n"
    cli.main(["_complete", "zsh", "rl-train", "my r"])
    assert capsys.readouterr().out == "my runs/\t\n"


# Shells. Each line is typed, and Tab pressed at its end; then the words of the line are shown.
LINES = {
    "rl rew": ["rl", "reward"],
    "rl train run.yml --che": ["rl", "train", "run.yml", "--check"],
    "rl generate --platf": ["rl", "generate", "--platform"],
    "rl generate --platform tp": ["rl", "generate", "--platform", "tpu"],
    "rl completion zs": ["rl", "completion", "zsh"],
    "rl-train run.y": ["rl-train", "run.yml"],
    "rl-train run.yml --vers": ["rl-train", "run.yml", "--version"],
    "rl-train run.yml stages.1.opt": ["rl-train", "run.yml", "stages.1.optimizer."],
    "rl plan run.yml seed=1 stages.1.optimizer.sch": [
        "rl",
        "plan",
        "run.yml",
        "seed=1",
        "stages.1.optimizer.schedule=",
    ],
    "rl-train run.yml stages.1.optimizer.schedule=cos": [
        "rl-train",
        "run.yml",
        "stages.1.optimizer.schedule=cosine",
    ],
    "rl-train my": ["rl-train", "my runs/"],
}
# Only without a space after `optimizer.` and `schedule=` can the word go on.
STEPS = {
    "rl-train run.yml stages.1.opt\tsch\tcos": [
        "rl-train",
        "run.yml",
        "stages.1.optimizer.schedule=cosine",
    ]
}
START = {
    "bash": """PS1=; show() { local IFS='|'; echo "=>$*<="; }; eval "$(rl completion bash)\"""",
    "zsh": """PS1=; show() { local IFS='|'; echo "=>$*<="; }; autoload -U compinit; compinit -D -u
eval "$(rl completion zsh)\"""",
}
# The other way to load it into zsh: a file of $fpath.
START["zsh-file"] = START["zsh"].replace(
    "autoload -U", "mkdir f; rl completion zsh > f/_rl; fpath=($PWD/f $fpath); autoload -U"
)
START["zsh-file"] = START["zsh-file"].replace('eval "$(rl completion zsh)"', "")
COMMAND = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


def environment(folder: Path) -> dict[str, str]:
    """Returns variables with which `rl` and `rl-train` are commands, as after an installation."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, main in (("rl", "main"), ("rl-train", "train_main")):
        file = programs / name
        file.write_text(
            f"#!{sys.executable}\nimport sys\nfrom rl.commands import cli\nsys.exit(cli.{main}())\n"
        )
        file.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "TERM": "xterm",
        "COLUMNS": "200",
    }


def type_lines(command: list[str], lines: list[str], folder: Path, seconds: float = 60) -> str:
    """Types lines into a shell that has a terminal. Returns what it printed until it ended."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment(folder))
    output, limit = b"", time.monotonic() + seconds
    text = "\n".join([*lines, "exit", ""]).encode()
    try:
        while time.monotonic() < limit:
            readable, writable, _ = select.select([terminal], [terminal] if text else [], [], 1)
            if readable:
                try:
                    output += os.read(terminal, 65536)
                except OSError:  # the shell has ended
                    break
            if writable:
                text = text[os.write(terminal, text[:64]) :]
        else:
            pytest.fail(f"no end: {output.decode(errors='replace')[-3000:]}")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    return output.decode(errors="replace")


@pytest.mark.parametrize(
    ("shell", "start"),
    [
        ("bash", "bash"),
        pytest.param("zsh", "zsh", marks=pytest.mark.slow),
        pytest.param("zsh", "zsh-file", marks=pytest.mark.slow),
    ],
)
def test_a_shell_inserts_what_fits(shell, start, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    # Ctrl-A and Ctrl-E go to the start and the end of the line.
    lines = [f"{line}\t\x01show \x05" for line in LINES | STEPS]
    output = type_lines(
        COMMAND[shell], [START[start], "bindkey -e" if shell == "zsh" else "", *lines], folder
    )
    shown = re.findall(r"=>(.*?)<=", output)
    shown = [text for text in shown if "$*" not in text]
    assert [text.split("|") for text in shown] == list((LINES | STEPS).values()), output[-3000:]


@pytest.mark.slow
def test_fish_offers_what_fits_with_descriptions(folder):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    code = "rl completion fish | source; for line in $argv; echo '=>'; complete -C $line; end"
    done = subprocess.run(
        ["fish", "-N", "-c", code, *LINES],
        env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    offered = done.stdout.split("=>\n")[1:]
    assert len(offered) == len(LINES), done.stderr
    for lines, expected in zip(offered, LINES.values(), strict=True):
        assert expected[-1] in [line.partition("\t")[0] for line in lines.splitlines()], (
            lines,
            expected,
        )
    assert "stages.1.optimizer.\toptimizer of the policy." in offered[7]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_names_every_verb_and_calls_the_hidden_one(shell):
    script = completion.script(shell)
    assert all(re.search(rf"\b{verb}\b", script) for verb in cli.VERBS)
    assert f"rl _complete {shell}" in script and "_duet_config" in script
