"""What README.md and docs/ show: every snippet is run, loaded or listed here as one that is not;
references are complete.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import rewards
import rewards.registry
import rl.algorithms
from rl.commands import cli
from rl.config import files, reference
from rl.config.data import datasets_of
from rl.data import datasets
from rl.data.encoded import Row
from rl.data.media import read_processors
from rl.data.shard import Shard
from rl.data.tokenizer import read_tokenizer
from rl.evaluation import task
from rl.run.load import load
from rl.stages.context import Progress
from rl.stages.stage import StageKind
from rl.tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<key>file|needs): (?P<value>\S+) "
    r"-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
# Sections of a run; a snippet that leaves one out is checked with these.
BASE = {
    "model": "tiny-deepseek",
    "tokenizer": "bytes",
    "data": {"task": "arithmetic"},
    "rewards": {"functions": ["exact_answer"]},
    "stages": [{"algorithm": "grpo", "steps": 1}],
}
# Lines of bash that take long or need a model; the tests of full runs and of the verbs cover them.
NOT_RUN = {
    "pip install -e '.[serve,constraints]'",
    "rl serve runs/first",  # test_serve_verb.py
    "rl serve models/smollm2 --slots 8",
    "rl serve models/smollm2 --adapter sql=adapters/sql --adapter chat=adapters/chat",
    "rl export runs/quickstart out/quickstart",  # test_export_verb.py
    "rl export runs/quickstart out/step100 --step grpo:100 --dtype bfloat16",
    "pip install 'duet-rl[gguf]'",
    "rl export runs/first out/first --gguf q8_0",
    "rl export runs/first out/first --push org/first --private",
    "rl export Qwen/Qwen3-0.6B out/qwen --dtype bfloat16",
    "rl view runs/quickstart",  # test_view.py and test_viewer.py run these verbs
    "rl samples runs/quickstart 'step:100-200 reward<0.5' --sort gap",
    "rl samples runs/quickstart 'stage:grpo step:100-120' --rescore exact_answer",
    "pip install -e . && rl-train configs/quickstart.yml",
    "pip install -e '.[test]' && pytest -n auto",
    "rl-train configs/sft_then_grpo.yml configs/tiny.yml",
    "rl-train configs/quickstart.yml stages.1.steps=100 run.dir=runs/try",
    "rl-train runs/try",
    "pip install 'duet-rl[gcs]'",  # test_mirror.py and test_remote_runs.py use remote folders
    "gcloud auth application-default login",
    "rl doctor --remote gs://my-bucket/runs/first",
    "rl report gs://my-bucket/runs/first --open",  # test_remote_views.py
    "rl doctor gs://my-bucket/runs/first",
    "rl fetch gs://my-bucket/runs/first runs/copy --weights",
    "rl chat runs/copy",
    "rl-train configs/my_run.yml model=gs://my-bucket/models/base "
    "data=gs://my-bucket/rows/train.jsonl",
    "rl generate gs://my-bucket/models/base --prompts prompts.txt",
    "rl-train configs/quickstart.yml run.dir=runs/first run.remote=gs://my-bucket/runs/first",
    "rl-train configs/quickstart.yml run.dir=runs/first",
    "rl-train runs/first",
    "rl-train runs/first stages.0.steps=80 stages.0.optimizer.learning_rate=5e-6",
    "rl-train --check runs/first stages.0.steps=80",
    "rl-train resume=runs/first",
    "printf '57+68=\\n' > prompts.txt",
    "rl generate runs/quickstart --prompts prompts.txt --samples 4 --output completions.jsonl",
    "rl chat path/to/model",
    "rl schema > duet.schema.json",
    "rl schema --partial > duet.partial.schema.json",
    "rl plan configs/quickstart.yml mesh.fsdp=4 mesh.tensor=2 --topology cpu:8",
    # test_teacher_runs.py plans one
    "rl plan configs/distill_quickstart.yml teacher=tiny-deepseek --topology cpu:1",
    "rl plan configs/quickstart.yml --topology cpu:2 --search --memory 2 --candidates 1",
    "rl-train configs/quickstart.yml run.dir=runs/quickstart",
    "rl report runs/quickstart",
    "rl report runs/quickstart --open",
    "rl --version",
    "rl-train configs/quickstart.yml",
    "rl-train configs/quickstart_v32.yml",
    "rl-train configs/distill_teacher.yml",
    "rl-train configs/vlm_quickstart.yml",  # test_picture_runs.py
    "rl-train configs/distill_quickstart.yml",
    "rl-train configs/opd_quickstart.yml",
    "rl-train configs/opd_quickstart.yml stages.1.algorithm=opd run.dir=runs/opd",
    "rl-train configs/distill_quickstart.yml teacher.files=runs/teacher_files",
    "rl rollout configs/quickstart.yml model=runs/sft/export run.dir=runs/sampled",
    "rl teach configs/distill_quickstart.yml --top 16 --output runs/teacher_files",
    "rl-train configs/ppo_qwen3.yml configs/tiny.yml",
    "rl-train configs/grpo_smollm2.yml configs/tiny.yml",
    "rl-train configs/grpo_llama3_8b.yml configs/tiny.yml",
    "rl-train configs/grpo_qwen3_30b_a3b.yml configs/tiny.yml",
    "rl-train configs/ppo_gemma3_27b.yml configs/tiny.yml",
    "rl-train configs/grpo_deepseek.yml configs/tiny.yml",
    "rl-train configs/lora_llama3_8b.yml configs/tiny.yml",
    "rl-train configs/qlora_qwen3_30b_a3b.yml configs/tiny.yml",
    "rl-train configs/lora_deepseek.yml configs/tiny.yml",
    "rl-train my_run.yml",
    "rl generate runs/quickstart --prompts prompts.txt",
    "chromium --headless --hide-scrollbars --window-size=1280,1110 "
    "--screenshot=docs/pictures/report.png runs/quickstart/report.html",
    # test_eval.py runs the verb
    "rl eval runs/a --data test.jsonl --reward numeric_answer",
    "rl eval runs/a --task help",
    "rl compare evals/before evals/after --text",  # test_eval_views.py
    "rl eval runs/a --task gsm8k,math500 --limit 200",
    "rl eval runs/a --task gsm8k --data gsm8k",
    "rl eval runs/a --task capitals.yml",
    "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k",
    "rl compare runs/a runs/b",
    "rl compare runs/a runs/b --text",
    "until rl-train configs/quickstart.yml run.dir=runs/first; [ $? -ne 75 ]; do sleep 1; done",
}
NOT_CODE = {"lua", "toml", "jinja", "text", "mermaid"}


@dataclass(frozen=True)
class Snippet:
    language: str
    text: str
    file: str | None
    needs: str | None


def snippets(document: Path) -> list[Snippet]:
    result = []
    for match in FENCE.finditer(document.read_text()):
        options = {match["key"]: match["value"]} if match["key"] else {}
        result.append(
            Snippet(match["language"], match["text"], options.get("file"), options.get("needs"))
        )
    return result


def documents_with(language: str, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """The documents that show snippets of a language."""
    shown = [
        path
        for path in DOCUMENTS
        if any(snippet.language == language for snippet in snippets(path))
    ]
    cases = [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name in slow))
        for path in shown
    ]
    return pytest.mark.parametrize("document", cases, indirect=True)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def document(request, tmp_path, monkeypatch):
    """Snippets of a document; the working directory holds the files that it shows."""
    monkeypatch.chdir(tmp_path)
    result = snippets(request.param)
    for snippet in result:
        if snippet.file:
            Path(snippet.file).write_text(snippet.text)
    return result


def command(*arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_snippet_is_of_a_kind_that_is_checked(document):
    for snippet in document:
        assert snippet.language in {"python", "yaml", "bash", "json", *NOT_CODE}, snippet
        assert snippet.language != "json" or snippet.file, (
            "a JSON snippet is data that a configuration reads"
        )


@documents_with("yaml")
def test_no_text_of_a_configuration_is_cut_at_a_comment(document, tmp_path):
    for number, snippet in enumerate(s for s in document if s.language == "yaml"):
        file = tmp_path / f"{number}.yml"
        file.write_text(snippet.text)
        assert files.cut_texts([file]) == []


@documents_with("yaml")
def test_configurations_load_and_their_data_too(document, tmp_path):
    for number, snippet in enumerate(s for s in document if s.language == "yaml"):
        if snippet.needs and importlib.util.find_spec(snippet.needs) is None:
            continue
        file = tmp_path / f"{number}.yml"
        file.write_text(snippet.text)
        if "scores" in yaml.safe_load(snippet.text):
            task.read(str(file))
            continue
        rest = tmp_path / f"{number}-rest.yml"
        rest.write_text(
            yaml.safe_dump({k: v for k, v in BASE.items() if k not in yaml.safe_load(snippet.text)})
        )
        config = load([file, rest])
        for stage in config.stages:
            for each in datasets_of(stage.data):
                datasets.load(
                    each,
                    pairs=rl.algorithms.get(stage.algorithm.name).stage
                    in ("preference", "reward_model"),
                )
        for data in datasets_of(config.data):
            if data.path is not None and not Path(data.path).exists():
                continue
            expected = {
                key
                for f in config.rewards.functions
                for key in rewards.registry.parameters(rewards.load(f.name), "").required
            }
            shown = data.task in ("pictures", "tones")  # a model that reads them
            processors = read_processors(config, read_tokenizer(config)[0]) if shown else None
            given = datasets.load(data, processors=processors).columns | set(rewards.registry.GIVEN)
            assert expected - {key for f in config.rewards.functions for key in f.options} <= given


def test_the_kind_of_stage_in_the_docs_makes_batches():
    text = (ROOT / "docs" / "extending.md").read_text()
    (code,) = re.findall(
        r"^```python\n(from rl.stages import supervised\n.*?)^```$", text, re.M | re.S
    )
    defined = {}
    exec(code, defined)
    stage = defined["Stage"].__new__(defined["Stage"])
    stage.index = 0
    stage.config = SimpleNamespace(seed=0, max_length=16)
    stage.options = SimpleNamespace(prompts_per_step=4, curriculum=None)
    stage.context = SimpleNamespace(progress=Progress(), tables=None)
    rows = [Row([1] * n, [1] * n) for n in (5, 2, 4, 3)]
    sources = [f"of length {len(row.ids)}" for row in rows]
    stage.rows = Shard(rows, len(rows), sources=sources)
    batch, expanded_at = stage.batch()
    assert batch.mask.sum(axis=1).tolist() == [2, 3, 4, 5] and len(expanded_at) == 4
    assert stage.example_order.sources_of(stage.example_numbers) == [
        f"of length {n}" for n in (2, 3, 4, 5)
    ]
    assert stage.context.progress.examples_drawn == 4


def test_the_methods_of_stages_in_the_docs_exist():
    section = (ROOT / "docs" / "extending.md").read_text().partition("## A kind of stage\n")[2]
    table = section.partition("\nA kind that differs")[0]
    names = re.findall(r"`(\w+)\(", table)
    assert len(names) > 10
    assert [name for name in names if not hasattr(StageKind, name)] == []


@documents_with("python", slow=("extending.md", "generator.md", "hook.md"))
def test_python_runs(document):
    for number, snippet in enumerate(s for s in document if s.language == "python"):
        if snippet.needs == "server":  # test_serve.py runs it
            continue
        file = Path(snippet.file or f"snippet_{number}.py")
        file.write_text(snippet.text)
        command(str(file))


@documents_with("bash")
def test_commands_work(document, tmp_path, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for snippet in document:
        for line in snippet.text.splitlines() if snippet.language == "bash" else ():
            bare = re.split(r"\s+# ", line)[0].strip()
            if not bare or bare in NOT_RUN:
                continue
            program, *arguments = shlex.split(bare)
            assert (program, *arguments[:1]) in {
                ("rl-train", "--check"),
                ("rl", "reward"),
                ("rl", "inspect"),
                ("rl", "import"),
                ("rl", "launch"),
            }, f"list it in NOT_RUN: {bare}"
            if arguments[0] == "reward":  # several documents register rewards of one name
                command(
                    "-c",
                    "import sys; from rl.commands import cli; sys.exit(cli.main())",
                    *arguments,
                )
            else:
                main = cli.train_main if program == "rl-train" else cli.main
                assert main(arguments) == 0, (bare, capsys.readouterr())


def test_lines_that_are_not_run_stand_somewhere():
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    assert all(line in text for line in NOT_RUN)


def test_the_reference_of_the_configuration_is_what_the_schema_says():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.markdown(), (
        "python -m rl.config.reference > docs/configuration.md"
    )


def test_every_key_of_the_configuration_is_described():
    rows = [line for line in reference.markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if not row.rstrip("|").rpartition("|")[2].strip()]


def test_every_built_in_reward_stands_in_the_document_with_its_options():
    table = {
        row.split("`")[1]: row
        for row in (ROOT / "docs/rewards.md").read_text().splitlines()
        if row.startswith("| `")
    }
    builtins = rewards.registry.builtin_names()
    assert len(builtins) >= 8
    for name in builtins:
        registry = rewards.registry
        arguments = set(registry.parameters(rewards.load(name), name).names) - {
            *registry.TEXTS,
            *registry.GIVEN,
        }
        assert arguments <= set(re.findall(r"`(\w+)`", table[name])), name


def test_every_option_of_the_own_task_stands_in_the_document():
    text = (ROOT / "docs/data.md").read_text()
    assert all(f"`{field.name}`" in text for field in fields(arithmetic.Options))
