"""What run.json says of an attempt."""

import json

from rl.records.manifest import Manifest


def test_environment_variables_are_recorded_by_name_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    with Manifest(tmp_path):
        pass
    text = (tmp_path / "run.json").read_text()
    (attempt,) = json.loads(text)["attempts"]
    assert {"HF_TOKEN", "XLA_FLAGS"} <= set(attempt["environment"])
    assert "PATH" not in attempt["environment"]
    assert "secretsecret" not in text and "eigen" not in text
