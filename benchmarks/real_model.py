#!/usr/bin/env python3
"""Measures a model with real weights next to transformers: `python benchmarks/real_model.py
models/smollm2`.

`python benchmarks/smollm2.py models/smollm2` writes such a directory. In one run it prints:

- Seconds of `rl generate` in a new process for one token, and for 20 prompts of 16 tokens: cold,
  with an empty folder of compiled programs, and warm, with the programs of the cold run.
  transformers does the same, one prompt after another.
- Tokens per second of greedy decoding at batch 1, 8 and 32, in turns, and the share of equal
  tokens.
- Seconds of a step of configs/grpo_smollm2.yml: the median after the first.

Every prompt has the same number of tokens, so that transformers pads nothing. No completion ends
early in the table of tokens per second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from side_by_side import Row, arguments, in_turns, parse, table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "grpo_smollm2.yml"
RL = [sys.executable, "-c", "import sys; from rl.commands.cli import main; sys.exit(main())"]
PEER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, prompts, new = sys.argv[1], open(sys.argv[2]).read().splitlines(), int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
with torch.inference_mode():
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")
        print(tokenizer.decode(model.generate(**tokens, do_sample=False, max_new_tokens=new)[0]))
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the three tables."""
    parser = arguments(__doc__, [], repeats=3)
    parser.add_argument("directory", help="Hugging Face directory of a text model")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="of the table of tokens per second (64)"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of GRPO; 0: none (4)")
    options = parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        for name, count, new in (("first token", 1, 1), ("20 prompts x 16 tokens", 20, 16)):
            print(processes(name, options.directory, count, new, Path(folder)), flush=True)
        if options.steps:
            print(
                f"step of GRPO: {grpo(options.directory, options.steps, Path(folder)):.1f} s",
                flush=True,
            )
    print(table(decoding(options), "tokens/s", rate=True))


def processes(name: str, directory: str, count: int, new: int, folder: Path) -> str:
    """Returns a line with the seconds of new processes: Duet cold and warm, and transformers."""
    prompts = folder / f"{count}.txt"
    prompts.write_text(
        "".join(f"What is {number} + {number}? It is\n" for number in range(10, 10 + count))
    )
    limits = ["--max-new-tokens", str(new), "--temperature", "0", "--platform", "cpu"]
    ours = [*RL, "generate", directory, "--prompts", str(prompts), *limits]
    programs = folder / f"programs-{count}"
    cold, warm = (seconds(ours, programs) for _ in range(2))
    theirs = seconds([sys.executable, "-c", PEER, directory, str(prompts), str(new)], programs)
    return f"{name}: Duet cold {cold:.1f} s, warm {warm:.1f} s; transformers {theirs:.1f} s"


def grpo(directory: str, steps: int, folder: Path) -> float:
    """Returns the median seconds of the steps of the shipped run after its first."""
    run = folder / "run"
    changes = [
        f"model.source={directory}",
        f"run.dir={run}",
        "evaluation=null",
        f"stages.0.steps={steps}",
    ]
    seconds([*RL, "train", str(CONFIG), *changes], folder / "programs-run")
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    times = [row["metrics"]["time/step"] for row in rows if "time/step" in row.get("metrics", {})]
    return statistics.median(times[1:] or times)


def seconds(command: list[str], programs: Path) -> float:
    """Runs a command, which keeps its compiled programs in a folder. Returns its seconds; ends if
    it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(programs)}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - began


def decoding(options) -> list[Row]:
    """Returns a row for each batch. The model of transformers runs with its defaults."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    import policy
    from rollout import Generator, GeneratorOptions, SamplingParams

    ours = policy.load(options.directory)
    theirs = AutoModelForCausalLM.from_pretrained(options.directory)
    new = options.new_tokens
    length = 32
    params = SamplingParams(max_new_tokens=new, temperature=0)
    rows = []
    for batch in options.batches:
        prompts = np.random.default_rng(0).integers(100, ours.config.vocab_size, (batch, length))
        choices = GeneratorOptions(tokens_per_dispatch=new)
        generator = Generator(ours, max_length=length + new, slots=batch, options=choices)
        inputs = {
            "input_ids": torch.from_numpy(prompts),
            "attention_mask": torch.ones(prompts.shape, dtype=torch.long),
        }

        def duet(generator=generator, prompts=prompts) -> np.ndarray:
            return np.asarray(
                [group[0].tokens for group in generator.generate(prompts.tolist(), params)]
            )

        def transformers(inputs=inputs) -> np.ndarray:
            with torch.inference_mode():
                tokens = theirs.generate(
                    **inputs, do_sample=False, min_new_tokens=new, max_new_tokens=new
                )
            return tokens[:, length:].numpy()

        same = np.mean(duet() == transformers())
        our_seconds, their_seconds = in_turns(duet, transformers, options.repeats)
        note = f"same {same:.0%}"
        rows.append(
            Row(f"batch {batch}", "transformers", batch * new, our_seconds, their_seconds, note)
        )
    return rows


if __name__ == "__main__":
    main()
