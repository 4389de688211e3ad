"""A text run of a model that also reads pictures: what it exports is the complete model."""

import json
from pathlib import Path

import launch
import numpy as np
import yaml
from media_rows import model_directory
from oracles import random_model
from safetensors.numpy import load_file

import policy
from policy.huggingface import sources
from rl.commands import cli


def test_parts_that_a_run_did_not_read_are_those_of_its_source(tmp_path, capsys):
    source, out = Path(model_directory(tmp_path / "model")), tmp_path / "run" / "export"
    files = {
        file.name: file.read_bytes()
        for file in source.iterdir()
        if file.name not in ("config.json", "model.safetensors")
    }
    policy.save(random_model(sources.read_config(source, media=True)), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}})
    )
    values = yaml.safe_load(launch.SMALL.read_text()) | {
        "model": str(source),
        "tokenizer": None,
        "evaluation": None,
    }
    values["stages"] = [values["stages"][0] | {"steps": 1}]
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    assert cli.train_main([str(tmp_path / "run.yml"), f"run.dir={tmp_path / 'run'}"]) == 0, (
        capsys.readouterr().err
    )
    assert json.loads((out / "config.json").read_text()) == config
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    trained = {name for name in before if not np.array_equal(before[name], after[name])}
    assert trained and all(
        name.startswith("model.language_model.") or name == "lm_head.weight" for name in trained
    )
    assert {name: (out / name).read_bytes() for name in files} == files
    assert policy.load(out, media=True).config.image is not None
