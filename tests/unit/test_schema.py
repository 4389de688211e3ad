"""The JSON Schemas in configs/: they are what the code makes, accept what loads, and refuse what
does not load."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from rl.commands import cli
from rl.config import yaml_tree
from rl.config.editors import documents, files
from rl.errors import ConfigError
from rl.run.load import load

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "configs/tasks"  # test_eval_tasks.py checks these
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yml") if path.parent != TASKS)
SNIPPETS = [
    pytest.param(text, id=f"{path.name}-{number}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, text in enumerate(
        re.findall(r"^```yaml\n(.*?)^```$", path.read_text(), re.M | re.S)
    )
    if "\nscores:" not in text  # a task file
]
# A configuration with an entry in every section that the edits below change.
BASE = yaml.safe_load("""
run: {checkpoint_every: 10}
seed: 1
platform: cpu
model: {source: tiny-deepseek, dtype: float32}
tokenizer: {source: bytes}
mesh: {fsdp: 1, rules: {embed: [fsdp]}}
generator: {slots: 4, cache: contiguous}
max_length: 512
data: {task: arithmetic, options: {operations: ["+"], max_operand: 9}}
rewards: {functions: [exact_answer, {name: length, weight: 0.1, options: {penalty: 0.01}}], timeout_s: 5}
evaluation: {data: {task: arithmetic}, every: 5, samples: 2, k: [1, 2]}
stages:
  - algorithm: {name: sft, loss_type: nll}
    steps: 2
    until: {metric: loss, at_most: 0.5}
    optimizer: {learning_rate: 0.001, schedule: constant}
  - algorithm: {name: grpo, epsilon: 0.2, kl: k3}
    steps: 2
    sampling: {max_new_tokens: 8, temperature: 1.0}
  - algorithm: {name: ppo, lam: 0.9}
    steps: 2
    critic: {learning_rate: 0.001}
if_present: {rewards: {workers: 1}}
""")
DELETE = object()
# (dotted key, its value), each refused by the schema and by loading.
WRONG = [
    ("max_lenght", 64),
    ("learning_rate", 1e-3),
    ("algorithm", "grpo"),
    ("seed", "zero"),
    ("seed", -1),
    ("seed", 1.5),
    ("platform", "cuda"),
    ("model", DELETE),
    ("model.sourse", "tiny-deepseek"),
    ("model.dtype", "float23"),
    ("model.remat", "everything"),
    ("model.scan", "yes"),
    ("tokenizer.chat_templates", "file.jinja"),
    ("run.dir", 3),
    ("run.checkpoint_every", -5),
    ("run.keep_checkpoints", 0),
    ("run.wandb.mode", "on"),
    ("profile.steps", [1]),
    ("mesh.fdsp", 2),
    ("mesh.tensor", 0),
    ("mesh.stage", 2),
    ("mesh.rules.embd", ["fsdp"]),
    ("mesh.rules.embed", ["fdsp"]),
    ("generator.rules", "stationery"),
    ("generator.temperature", 1.0),
    ("generator.cache", "pages"),
    ("data.path", "problems.jsonl"),
    ("data.options.operatoins", ["+"]),
    ("data.columns.answer", "answer"),
    ("rewards.functions", []),
    ("rewards.functions.0", "exact_anser"),
    ("rewards.functions.1.wieght", 1.0),
    ("rewards.functions.1.options.penalti", 0.1),
    ("rewards.on_error", "ignore"),
    ("evaluation.data", DELETE),
    ("evaluation.data", None),
    ("evaluation.k", [0]),
    ("evaluation.metrics", ["accuracy"]),
    ("stages", []),
    ("stages.0.steps", DELETE),
    ("stages.0.step", 3),
    ("stages.0.algorithm", "sfft"),
    ("stages.0.algorithm.epsilon", 0.2),
    ("stages.0.algorithm.train_on", "user"),
    ("stages.0.until.at_least", 0.4),
    ("stages.0.optimizer.lr", 1e-3),
    ("stages.0.optimizer.learning_rate", 0),
    ("stages.0.optimizer.schedule", "cosin"),
    ("stages.0.prompts_per_step", 1.5),
    ("stages.1.algorithm.lam", 0.9),
    ("stages.1.algorithm.epsilon", -0.1),
    ("stages.1.algorithm.kl", "k4"),
    ("stages.1.algorithm", {"epsilon": 0.2}),
    ("stages.1.algorithm", {"preset": "dappo"}),
    ("stages.1.algorithm", {"preset": ["dapo"]}),
    ("stages.1.algorithm", {"preset": "dapo", "lam": 0.9}),
    ("stages.1.sampling.top_p", 1.1),
    ("stages.1.max_length", 64),
    ("stages.2.algorithm.lam", "0.9"),
    ("stages.2.critic.velocity", 0.9),
    ("every_stage.stpes", 2),
    ("every_stage.sampling.max_new_tokens", 0),
    ("if_present.evaluaton", {"problems": 4}),
    ("if_present.rewards.worker", 1),
]
# The same for what loads.
RIGHT = [
    ("model", "tiny-deepseek"),
    ("model.hyper_connections", {}),
    ("tokenizer", "bytes"),
    ("run", None),
    ("run.wandb", {}),
    ("run.program_cache", None),
    ("mesh.rules", None),
    ("mesh.fsdp", -1),
    ("mesh.stage", 1),
    ("generator.rules", "stationary"),
    ("generator.rules", {"embed": []}),
    ("max_length", 512.0),
    ("data", str(ROOT / "configs/data/word_problems.jsonl")),
    ("data.options", None),
    (
        "rewards.functions.0",
        {"name": "exact_answer", "options": {"answer": ["1"], "ignore_case": True}},
    ),
    ("rewards.functions.0", f"{ROOT}/tests/unit/bad_rewards.py:raises"),
    ("evaluation", None),
    ("stages.0.algorithm", "sft"),
    ("stages.0.optimizer", None),
    ("stages.1.algorithm", {"preset": "dapo"}),
    ("stages.1.algorithm", {"preset": "dapo", "epsilon": 0.1}),
    ("stages.1.algorithm.correction", None),
    ("stages.1.algorithm.dynamic_batches", 2.0),
    ("stages.1.micro_batch", None),
    ("every_stage", {"steps": 1, "optimizer": {"beta2": 0.9}}),
    ("every_stage.data", "configs/data/word_problems.jsonl"),
    ("if_present", None),
]


FILES = (files.RUN, files.PARTIAL, files.PRESET, files.MODEL)


def retrieved(uri: str) -> Resource:
    """Reads what a schema refers to: the file of this name in configs/."""
    place = uri.removeprefix((ROOT / "configs").as_uri()).removeprefix("/")
    return Resource.from_contents(json.loads((ROOT / "configs" / place).read_text()))


@pytest.fixture(scope="module")
def validators():
    """Name of a shipped schema -> its validator, which reads the definitions by their relative
    path."""
    result = {}
    registry = Registry(retrieve=retrieved)
    for name in FILES:
        uri = (ROOT / "configs" / name).as_uri()
        jsonschema.Draft7Validator.check_schema(retrieved(uri).contents)
        result[name] = jsonschema.Draft7Validator({"$ref": uri}, registry=registry)
    jsonschema.Draft7Validator.check_schema(retrieved(files.DEFINITIONS).contents)
    return result


def parsed(text: str):
    return yaml_tree.plain(yaml_tree.parse(text, str))


def edited(path: str, value):
    """Returns BASE with another value, or without the key, at a dotted path. Sections on the way
    are made."""
    config = copy.deepcopy(BASE)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = config
    for part in parents:
        place = place[part] if isinstance(part, int) else place.setdefault(part, {})
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return config


def problems(validator, value) -> list[str]:
    return [
        f"{list(error.absolute_path)}: {error.message[:300]}"
        for error in validator.iter_errors(value)
    ]


def test_the_shipped_schemas_are_what_the_code_makes():
    made = {name: files.text_of(document) for name, document in documents.documents().items()}
    shipped = {path.name: path.read_text() for path in (ROOT / "configs").glob("*.json")}
    assert made == shipped, "python -m rl.config.editors.documents"


@pytest.mark.parametrize("name", FILES)
def test_a_printed_schema_needs_no_other_file(name, capsys):
    flag = {files.PARTIAL: ["--partial"], files.PRESET: ["--preset"], files.MODEL: ["--model"]}
    assert cli.main(["schema", *flag.get(name, [])]) == 0
    printed = capsys.readouterr().out
    references = {*re.findall(r'"\$ref": "([^"]*)"', printed)}
    schema = json.loads(printed)
    assert references and all(each.startswith("#/$defs/") for each in references)
    assert {each.removeprefix("#/$defs/") for each in references} == schema["$defs"].keys()
    assert schema["$comment"] == files.COMMENT


def test_a_schema_behind_an_address_finds_its_definitions():
    folder = "https://example.org/duet/configs"
    registry = Registry(retrieve=lambda uri: retrieved(uri.removeprefix(folder)))
    validator = jsonschema.Draft7Validator({"$ref": f"{folder}/{files.RUN}"}, registry=registry)
    assert problems(validator, BASE) == []
    assert problems(validator, edited("stages.0.optimizer.lr", 1e-3))


def test_every_stage_may_set_what_each_stage_must_have(validators):
    config = edited("every_stage", {"algorithm": "sft", "steps": 2})
    config["stages"] = [{}, {"steps": 3}]
    assert problems(validators[files.RUN], config) == []
    for name in ("algorithm", "steps"):
        config = edited("every_stage", {"algorithm": "sft", "steps": 2})
        config["stages"] = [{}]
        del config["every_stage"][name]
        assert problems(validators[files.RUN], config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_file_names_its_schema_and_follows_it(path, validators):
    first = path.read_text().splitlines()[0]
    place = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert place.is_file() and place.parent.resolve() == ROOT / "configs"
    expected = {"models": files.MODEL, "presets": files.PRESET}.get(path.parent.name)
    if expected is None:
        expected = files.PARTIAL if path.name in ("tiny.yml", "tiny_vl.yml") else files.RUN
    assert place.name == expected
    assert problems(validators[expected], parsed(path.read_text())) == []


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_snippet_of_the_documents_follows_the_schema(text, validators):
    assert problems(validators[files.PARTIAL], parsed(text)) == []
    rest = {key: BASE[key] for key in ("model", "stages") if key not in parsed(text)}
    assert problems(validators[files.RUN], parsed(text) | rest) == []


def test_a_saved_configuration_follows_the_schema(validators, tmp_path):
    from rl.config.files import resolved_yaml

    (tmp_path / "run.yml").write_text(yaml.safe_dump(BASE))
    assert (
        problems(validators[files.RUN], parsed(resolved_yaml(load([tmp_path / "run.yml"])))) == []
    )


def test_the_edits_differ():
    assert len(WRONG) >= 40 and len({repr(edit) for edit in WRONG}) == len(WRONG)


@pytest.mark.parametrize(
    ("path", "value"), WRONG, ids=lambda one: "deleted" if one is DELETE else str(one)[:40]
)
def test_what_the_schema_refuses_is_refused_when_loaded(path, value, validators, tmp_path):
    text = yaml.safe_dump(edited(path, value))
    assert problems(validators[files.RUN], parsed(text))
    if (
        value is not DELETE
        and path != "stages.1.algorithm"
        and path not in ("data.path", "stages.0.until.at_least")
    ):
        assert problems(validators[files.PARTIAL], parsed(text)), (
            "a part of a run may leave keys out only"
        )
    (tmp_path / "run.yml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(path.rpartition(".")[2])):
        load([tmp_path / "run.yml"])


@pytest.mark.parametrize(("path", "value"), [("seed", 1), *RIGHT], ids=lambda one: str(one)[:40])
def test_what_loads_follows_the_schema(path, value, validators, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = yaml.safe_dump(edited(path, value))
    (tmp_path / "run.yml").write_text(text)
    load([tmp_path / "run.yml"])
    for name in (files.RUN, files.PARTIAL):
        assert problems(validators[name], parsed(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "stages: {1: {steps: 3, algorithm: {kl_coef: 0.1}}}",
        "stages: {0: {algorithm: sft}}",
        "rewards: {functions: {0: {weight: 2}}}",
        "evaluation: {k: {1: 2}}",
        "model: {dtype: bfloat16}",
        "data: {limit: 3}",
    ],
)
def test_a_part_of_a_run_follows_its_schema_only(text, validators, tmp_path):
    (tmp_path / "run.yml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "part.yml").write_text(text)
    load([tmp_path / "run.yml", tmp_path / "part.yml"])
    assert problems(validators[files.PARTIAL], parsed(text)) == []
    assert problems(validators[files.RUN], parsed(text))


def test_every_key_has_a_description_and_shows_its_default():
    def properties(schema):
        if isinstance(schema, dict):
            for key, value in schema.get("properties", {}).items():
                if "anyOf" in value or "allOf" in value or "type" in value or "enum" in value:
                    yield key, value
            for value in schema.values():
                yield from properties(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from properties(value)

    definitions = files.read(files.RUN)["$defs"]
    sections = {}
    for name, part in definitions.items():
        if name.endswith("Options"):  # with a short form the section is the last of the forms
            sections[name] = part["anyOf"][-1] if "anyOf" in part else part
    assert len(sections) > 15
    described = [
        pair
        for part in sections.values()
        for pair in properties({"properties": part["properties"]})
    ]
    assert [key for key, value in described if not value.get("description")] == []
    rate = sections["OptimizerOptions"]["properties"]["learning_rate"]
    assert rate["default"] == 1e-5 and rate["description"].endswith("Default: 1e-05.")
    grpo = definitions["algorithm-grpo"]["properties"]
    assert grpo["name"]["description"].startswith("Group relative policy optimisation")
    assert "$ref" in grpo["kl_coef"] and definitions["option-kl_coef"]["default"] == 0.0
