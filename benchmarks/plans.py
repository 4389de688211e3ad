"""Memory of an sft update on TPU slices, as `rl plan` has it, beside MaxText's train step.

The same model, slice, tokens of a chip, dtypes of weights and moments, and full recomputation. MaxText's numbers are of its own
`train_compile` (flash attention, pure FSDP), compiled by libtpu 0.0.51 under jax 0.10.2.

    pip install libtpu          # a compilation takes 1 to 6 minutes on two cores
    python benchmarks/plans.py [llama3.1-8b ...]
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

FLOAT32 = {"dtype": "bfloat16", "param_dtype": "float32"}
# (model and how it is computed, slice, mesh, tokens of a chip, dtype of moments) -> MaxText's GiB of arguments, temporaries, peak.
CASES = (
    (({"source": "llama3.1-8b"} | FLOAT32), "v5e:4x4", {"fsdp": 16}, 2048, "float32", (5.61, 3.75, 9.32)),
    (({"source": "llama3.1-8b"} | FLOAT32), "v6e:4x4", {"fsdp": 16}, 16384, "float32", (5.61, 14.19, 19.61)),
    (({"source": "deepseek-v2-lite"} | FLOAT32), "v6e:4x4", {"fsdp": 16}, 2048, "float32", (10.97, 7.53, 18.43)),
    (
        {"source": "deepseek-v3", "dtype": "bfloat16", "param_dtype": "bfloat16", "expert_parallel": "all_to_all"},
        *("v5p:4x4x8", {"fsdp": 2, "expert": 64}, 4096, "bfloat16", (29.30, 41.54, 70.66)),
    ),
)


def main() -> None:
    wanted = set(sys.argv[1:]) or {case[0]["source"] for case in CASES}
    print("| model | slice | mesh | tokens of a chip | arguments | temporaries | peak | MaxText | exchanged, GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, topology, mesh, tokens, state_dtype, theirs in CASES:
        if model["source"] not in wanted:
            continue
        update = planned(model, topology, mesh, tokens, state_dtype)
        ours = " | ".join(f"{update[part] / 2**30:.2f}" for part in ("arguments", "temporaries", "peak"))
        exchanged = sum(size for size, _ in update["exchanged"].values()) / 2**30
        cut = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
        beside = " / ".join(f"{number:.2f}" for number in theirs)
        print(f"| {model['source']} | {topology} | {cut} | {tokens:,} | {ours} | {beside} | {exchanged:.0f} |", flush=True)


def planned(model: dict, topology: str, mesh: dict[str, int], tokens: int, state_dtype: str) -> dict:
    """What `rl plan` says of the update: one row of `tokens` for each chip."""
    chips = math.prod(mesh.values())
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "run": {"dir": f"{directory}/run"},
            "platform": "tpu",
            "model": model | {"remat": "full"},
            "tokenizer": "bytes",
            "max_length": tokens,
            "mesh": mesh,
            "data": {"task": "arithmetic"},
            "stages": [{"algorithm": "sft", "steps": 10, "prompts_per_step": chips, "optimizer": {"state_dtype": state_dtype}}],
        }
        file, found = Path(directory, "plan.yml"), Path(directory, "plan.json")
        file.write_text(yaml.safe_dump(config))
        command = [Path(sys.executable).with_name("rl"), "plan", str(file), "--topology", topology, "--json", str(found)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not found.exists():
            raise SystemExit(f"{topology}, {model['source']}: exit code {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}")
        programs = json.loads(found.read_text())["programs"]
        return next(each for each in programs if each["name"] == "sft: update")


if __name__ == "__main__":
    main()
