import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from oracles import write_weight_file

from policy.huggingface import sources
from rl.commands import cli, environment, train
from rl.config.data import refuse_secrets
from rl.errors import ConfigError, DataError, Interrupted
from rl.records import manifest
from rl.run.folder import RunFolder
from rl.run.load import load

ROOT = Path(cli.__file__).parents[2]
HEAVY = ("jax", "pydantic", "transformers", "datasets", "numpy", "yaml", "rich", "wandb", "tokamax")


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command", ["train_main(['--help'])", "main(['--help'])", "main(['train', '--help'])"]
)
def test_help_imports_nothing_heavy(command):
    code = f"""
import re
import shlex
import sys
from rl.commands import cli
try:
    cli.{command}
except SystemExit as end:
    print("code", end.code, "loaded", [name for name in {HEAVY} if name in sys.modules])
"""
    done = python(code)
    assert "usage: rl" in done.stdout and "code 0 loaded []" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["schema"], set()),
        (["completion", "zsh"], set()),
        (["_complete", "bash", "rl-train", "configs/quickstart.yml", "stages.1.opt"], {"yaml"}),
        (["reward", "test", "exact_answer"], {"numpy", "rich"}),
        (
            ["train", "--check", "configs/quickstart.yml"],
            {"numpy", "pydantic", "transformers", "yaml"},
        ),
        *(([verb, "--help"], set()) for verb in cli.VERBS),
    ],
    ids=lambda one: " ".join(one[:2]) if isinstance(one, list) else "",
)
def test_a_verb_imports_only_what_it_needs(arguments, needed):
    code = f"""
import re
import shlex
import sys
from rl.commands import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("loaded", code or 0, *[name for name in {HEAVY} if name in sys.modules])
"""
    done = python(code, *arguments)
    loaded = done.stdout.splitlines()[-1].split()
    assert loaded[:2] == ["loaded", "0"], done.stdout + done.stderr
    assert set(loaded[2:]) <= needed


def test_arguments_with_an_equals_sign_are_overrides_unless_a_file_has_that_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a=b.yml").write_text("")
    files, overrides = train.split_arguments(
        ["x.yml", "a=b.yml", "stages.1.steps=3", "runs/a", "data.path=/x=y"]
    )
    assert files == ["x.yml", "a=b.yml", "runs/a"]
    assert overrides == ["stages.1.steps=3", "data.path=/x=y"]
    # longer than a file's name can be
    long = f"model.overrides={{{', '.join(f'key_{i}: {i}' for i in range(50))}}}"
    assert train.split_arguments([long]) == ([], [long])


OPTIONS = [
    (["x.yml", "--steps", "3"], "unrecognized arguments: --steps 3; write stages.0.steps=3\n"),
    (["--steps", "3", "x.yml"], "; write stages.0.steps=3\n"),
    (
        ["x.yml", "--learning-rate=1e-3", "--seed"],
        "; write stages.0.optimizer.learning_rate=1e-3 seed=VALUE\n",
    ),
    (["x.yml", "--lr", "1e-3", "--check"], "; write stages.0.optimizer.learning_rate=1e-3\n"),
    (["x.yml", "--run.dir", "runs/a"], "; write run.dir=runs/a\n"),
    (["x.yml", "--stages.1.steps=3"], "; write stages.1.steps=3\n"),
    (["x.yml", "--kl_coef", "-0.5"], "; write stages.0.algorithm.kl_coef=-0.5\n"),
    (["x.yml", "--nothing", "3"], "unrecognized arguments: --nothing 3\n"),
]


@pytest.mark.parametrize(("arguments", "end"), OPTIONS)
def test_an_option_that_is_a_configuration_key_is_refused_with_the_override(arguments, end, capsys):
    plan = ["plan", *arguments, "--topology", "cpu:1"]
    for command in (
        lambda: cli.train_main(arguments),
        lambda: cli.main(["train", *arguments]),
        lambda: cli.main(plan),
    ):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2
        assert capsys.readouterr().err.replace(" --check;", ";").endswith(end)


def test_overrides_may_follow_an_option(capsys):
    file = str(ROOT / "configs" / "quickstart.yml")
    assert cli.train_main([file, "--check", "seed=7", "stages.1.steps=3"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 7" in shown and "steps: 3" in shown


@pytest.mark.parametrize(
    "option",
    [
        "api_key: abc",
        "OPENAI_API_KEY: abc",
        "url: 'https://me:pw123@host/v1'",
        f"service: sk-{'a' * 20}",
    ],
)
def test_a_secret_among_the_options_of_a_reward_is_refused_without_showing_it(option, capsys):
    arguments = [str(ROOT / "configs" / "quickstart.yml"), "--check"]
    reward = f"rewards={{functions: [{{name: exact_answer, options: {{{option}}}}}]}}"
    assert cli.train_main([*arguments, reward]) == 2
    said = capsys.readouterr().err
    assert "rewards.functions.0.options: `" in said and "os.environ" in said
    assert not any(secret in said for secret in ("abc", "pw123", "aaaa"))


def test_names_that_only_look_like_a_secret_are_options():
    options = {
        "stop_token": "<end>",
        "token": "#",
        "max_tokens": "8",
        "key": "answer",
        "api_key": "",
        "url": "http://h/",
    }
    assert refuse_secrets(options) == options


@pytest.mark.parametrize(
    "command", ["train_main(['--version'])", "main(['--version'])", "main([])"]
)
def test_version_and_help_start_quickly(command):
    code = f"""
import re
import shlex
import sys
from rl.commands import cli
try:
    code = cli.{command}
except SystemExit as end:
    code = end.code
print("code", code or 0, "loaded", [name for name in {HEAVY} if name in sys.modules])
"""
    done = python(code)
    expected = "usage: rl" if command == "main([])" else f"duet-rl {metadata.version('duet-rl')}\n"
    assert done.stdout.startswith(expected) and "code 0 loaded []" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such key"), 2), (DataError("row 3"), 3)]
)
def test_known_errors_are_text_and_their_exit_code(error, code, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "x.yml"]) == code
    said = capsys.readouterr().err
    assert str(error) in said and "Traceback" not in said


def test_an_interrupted_run_says_so_with_exit_code_75_and_a_bug_keeps_its_traceback(
    monkeypatch, capsys
):
    def interrupted(arguments):
        raise Interrupted("saved; continue with rl-train runs/a")

    monkeypatch.setattr(train, "run", interrupted)
    assert cli.train_main(["x.yml"]) == 75
    assert capsys.readouterr().err.startswith("interrupted: saved")

    def bug(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(train, "run", bug)
    with pytest.raises(ZeroDivisionError):
        cli.train_main(["x.yml"])


def test_ctrl_c_before_anything_was_saved_ends_with_130(monkeypatch):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", stop)
    assert cli.train_main(["x.yml"]) == 130


def test_checking_a_configuration_imports_no_jax(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        sources.preset("tiny-deepseek", {"vocab_size": 320}).hf
    )
    write_weight_file(tmp_path / "model")
    (tmp_path / "run.yml").write_text(
        "model: model\ntokenizer: bytes\ndata: {task: arithmetic}\n"
        "rewards: {functions: [exact_answer]}\nstages: [{algorithm: grpo, steps: 1}]\n"
    )
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
from rl.commands import cli
code = cli.train_main(["--check", "run.yml"])
print("code", code, "loaded", [name for name in ("jax", "flax", "datasets") if name in sys.modules])
"""
    done = python(code)
    assert "code 0 loaded []" in done.stdout, done.stdout + done.stderr


def test_a_check_reads_the_first_rows_of_the_data(tmp_path, capsys):
    """In the first hundred rows: a column that is missing, one that a reward needs, a row without a
    prompt."""
    file, config = tmp_path / "rows.jsonl", tmp_path / "run.yml"
    config.write_text(
        f"model: tiny-deepseek\ntokenizer: bytes\nmax_length: 64\ndata: {{path: {file}}}\n"
        "rewards: {functions: [exact_answer]}\n"
        "stages: [{algorithm: grpo, steps: 1, sampling: {max_new_tokens: 8}}]\n"
    )

    def check(*rows):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = cli.train_main(["--check", str(config)])
        said = capsys.readouterr()
        return code, said.out + said.err

    good = {"prompt": "1+1=", "answer": "2"}
    assert check(good)[0] == 0 and not (tmp_path / "runs").exists()
    assert check({"question": "1+1="})[0] == 3
    code, said = check({"prompt": "1+1="})
    assert code == 3 and "rows.jsonl:1" in said and "answer" in said
    code, said = check(good, {"prompt": "", "answer": "2"})
    assert code == 3 and "rows.jsonl:2" in said
    assert check(*[good] * 100, {"prompt": 7})[0] == 0, (
        "the rows after the first hundred are for `rl inspect`"
    )


def test_the_platform_is_chosen_before_jax_is_imported(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "left alone")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    environment.choose_platform("auto")
    assert os.environ["JAX_PLATFORMS"] == "left alone"
    environment.choose_platform("cpu")
    assert os.environ["JAX_PLATFORMS"] == "cpu" and "jax" not in sys.modules


def test_forced_devices_have_threads_for_two_collectives(monkeypatch):
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    environment.choose_platform("auto")
    assert os.environ["PJRT_NPROC"] == "32"


def test_a_reward_is_tried_on_its_examples_without_jax():
    code = """
import re
import shlex
import sys
from rl.commands import cli
code = cli.main(["reward", "test", sys.argv[1]])
print("code", code, "loaded", [name for name in ("jax", "transformers", "pydantic") if name in sys.modules])
"""
    done = python(code, "numeric_answer")
    assert "code 0 loaded []" in done.stdout, done.stdout + done.stderr
    done = python(code, "numeric_answr")
    assert "code 2 loaded []" in done.stdout and "numeric_answer" in done.stdout + done.stderr


KEPT = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_COMPILATION_CACHE_MAX_SIZE",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)


def test_programs_are_kept_below_a_limit_and_a_kill_between_two_files_is_mended(
    monkeypatch, tmp_path
):
    """jax's own cache then keeps another program, which it refuses next to one without a time."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in KEPT:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    (tmp_path / "cut_off-cache").write_bytes(b"program")
    environment.use_program_cache(str(tmp_path))
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    monkeypatch.undo()
    from jax._src.lru_cache import LRUCache

    kept = LRUCache(str(tmp_path), max_size=1000)
    kept.put("another", b"program")
    assert kept.get("another") == kept.get("cut_off") == b"program"


def test_a_folder_that_the_environment_names_gets_no_limit(monkeypatch, tmp_path):
    """Programs without a limit write no times there, and with one jax would keep nothing next to
    theirs."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in KEPT[1:]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(KEPT[0], str(tmp_path))
    environment.use_program_cache("elsewhere")
    assert KEPT[1] not in os.environ and os.environ[KEPT[0]] == str(tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device", "x/y"), RuntimeError("os error: Disk quota exceeded")],
)
def test_a_full_disk_anywhere_in_a_run_is_exit_code_5(tmp_path, monkeypatch, capsys, error):
    from rl.run import loop

    def full(_):
        raise error

    monkeypatch.setattr(loop, "run", full)
    assert cli.train_main([str(ROOT / "configs" / "quickstart.yml"), f"run.dir={tmp_path}"]) == 5
    said = capsys.readouterr().err
    assert (
        said.startswith("not enough resources: ")
        and f"rl-train {tmp_path}" in said
        and "Traceback" not in said
    )
    assert manifest.exit_code(error) == 5 and manifest.exit_code(BrokenPipeError()) == 141
    error = KeyError("a bug")
    assert manifest.exit_code(error) == 1
    with pytest.raises(KeyError):
        cli.train_main([str(ROOT / "configs" / "quickstart.yml"), f"run.dir={tmp_path}"])


def test_a_run_without_a_folder_gets_the_first_number_that_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [str(ROOT / "configs" / name) for name in ("sft_then_grpo.yml", "tiny.yml")]
    assert train.new_directory(given) == "runs/sft_then_grpo-1" and not (tmp_path / "runs").exists()
    for name in ("sft_then_grpo-1", "sft_then_grpo-9", "sft_then_grpo-old", "other-12"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert train.new_directory(given) == "runs/sft_then_grpo-10"
    assert train.new_directory(["tiny"]) == "runs/tiny-1"
    assert load(given).run.dir is None


def test_several_processes_need_a_folder(capsys):
    given = [str(ROOT / "configs" / name) for name in ("sft_then_grpo.yml", "tiny.yml")]
    arguments = [*given, "--processes", "2", "--process", "1", "--coordinator", "localhost:1"]
    assert cli.train_main(arguments) == 2
    assert "run.dir: several processes need one folder" in capsys.readouterr().err


def test_commands_to_type_quote_folders_with_blanks(tmp_path, capsys):
    command = re.compile(r"\b(?:rl-train|rl [a-z]+(?: test)?) \{(?!quoted\(|word\b)")
    for file in (ROOT / "rl").rglob("*.py"):
        assert not command.search(file.read_text()), file
    with pytest.raises(SystemExit):
        cli.main(["train", "configs/quickstart.yml", "--data.system", "be brief"])
    assert "write 'data.system=be brief'" in capsys.readouterr().err


def test_a_run_in_a_folder_with_blanks_is_continued_by_the_command_that_is_printed(tmp_path):
    folder = tmp_path / "my run #1"
    folder.mkdir()
    (folder / "config.yml").write_text((ROOT / "configs/quickstart.yml").read_text())
    (folder / "events.jsonl").write_text("{}\n")
    config = load([ROOT / "configs/quickstart.yml"], [f"run.dir={folder}", "seed=3"])
    with pytest.raises(ConfigError) as caught, RunFolder(config):
        pass
    command = re.search("`(rl-train .*)`", str(caught.value))
    assert command and shlex.split(command[1]) == ["rl-train", str(folder)]


def test_paths_of_verbs_may_be_in_the_home_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for arguments in (
        ["generate", "~/model", "--prompts=~/prompts.txt"],
        ["report", "~/run"],
        ["samples", "~/run"],
        ["compare", "~/run", "~/other"],
        ["explain", "~/run"],
        ["inspect", "~/run.yml"],
        ["train", "resume=~/run"],
    ):
        assert cli.main(arguments) in (2, 3, 4)
        assert f"{tmp_path}/" in capsys.readouterr().err, arguments


def test_check_refuses_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "taken"
    file.write_text("")
    quickstart = str(ROOT / "configs" / "quickstart.yml")
    assert cli.train_main(["--check", quickstart, f"run.dir={file}/run"]) == 2
    assert f"{file} is a file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    assert cli.train_main(["--check", quickstart, f"run.dir={tmp_path}/new/run"]) == 2
    assert f"no permission to write in {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
