"""lm-eval against `rl serve`: its numbers are those of the model itself."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.special
from served import KEY, save_model, serving

import policy
from rollout.text.tokenizer import load_tokenizer

# LM_EVAL names a folder with lm-eval, where it is not installed.
FOLDER = os.environ.get("LM_EVAL")
ROWS = [
    {"question": "one", "choices": ["ab", "c"], "answer": 0},
    {"question": "two and", "choices": ["x", "yz"], "answer": 1},
    {"question": "three", "choices": ["q", "rst"], "answer": 1},
]
CHOICE = """\
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_lm_eval_sums_the_log_probabilities_of_the_model(tmp_path):
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), FOLDER)))
    environment = os.environ | {"PYTHONPATH": path, "OPENAI_API_KEY": KEY}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    known = [sys.executable, "-c", "import lm_eval, tenacity"]
    if subprocess.run(known, env=environment, capture_output=True).returncode:
        pytest.skip("lm-eval is not installed")
    directory = tmp_path / "tiny"
    save_model(directory)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tasks / "own.yaml").write_text(CHOICE.format(rows=rows))
    with serving(directory) as server:
        options = f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=remote"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", f"{options},auth_token={KEY},max_length=127"]
        command += ["--tasks", "own_choice", "--include_path", str(tasks), "--log_samples"]
        command += ["--output_path", str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    model = policy.load(directory)
    tokenizer = load_tokenizer(directory)
    assert len(samples) == len(ROWS)
    for sample in samples:
        row = ROWS[sample["doc_id"]]
        for choice, answer in zip(row["choices"], sample["filtered_resps"], strict=True):
            context, both = (
                tokenizer.encode(text, add_special_tokens=False)
                for text in (row["question"], f"{row['question']} {choice}")
            )
            logits = np.asarray(model.logits(np.asarray([both], np.int32)))[0].astype(np.float64)
            logprobs = logits - scipy.special.logsumexp(logits, axis=-1, keepdims=True)
            expected = sum(logprobs[t - 1, both[t]] for t in range(len(context), len(both)))
            assert float(answer[0]) == pytest.approx(expected, abs=1e-3)
