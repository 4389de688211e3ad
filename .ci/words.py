#!/usr/bin/env python3
"""Lists words that have a standard term, and fails if there are any: `python .ci/words.py`.

WORDS are refused everywhere: in code, configurations, messages and documents. NAMES are ordinary
English words that are refused only as the name of a class or a function. EXCEPT lists what a file
may contain nevertheless.
"""

import re
import subprocess
import sys
from pathlib import Path

# The word -> the standard term.
WORDS: dict[str, str] = {
    "found": "what it is: result, metrics, hits, matches",
    "wanted": "requested, options, inputs",
    "whole": "contiguous, replicated, full, all",
    "beside": "shared_experts, extra_params, reserved_bytes, next to",
    "seat": "admit",
    "seats": "admit",
    "seated": "admitted",
    "reseat": "readmit",
    "unseat": "evict",
    "shelf": "pinned prefix",
    "begin_with_kept": "pinned prefix",
    "judge": "reward-model scorer",
    "judges": "reward-model scorers",
    "judged": "scored by a reward model",
    "heard": "on_calls",
    "laid": "sharded, merged, stored",
    "laid_out": "reshard_for_rollout",
    "lay_out": "reshard_for_rollout",
    "drop_layout": "release",
    "learnt": "train_on, trained on",
    "rewinds": "supports_truncation",
    "stated": "in explicit mode, named",
    "unbroken": "uninterrupted, contiguous",
    "alike": "reshard_like, equal",
    "roomy": "worst_case",
    "settled": "verified",
    "gathered": "all_gather_object, collected",
    "from_first": "broadcast",
    "agreed": "raise_on_all",
    "placed": "device_put_global, stored",
    "whence": "from where",
    "thereof": "name the thing",
    "levers": "knobs",
    "internal_metrics": "diagnostics",
    "if_given": "if_present",
    "rings": "sliding_window_cache",
}
# The name -> the standard term.
NAMES: dict[str, str] = {
    "Executables": "CompiledCache",
    "Executed": "ProgramMemoryLog",
    "Learner": "ParamState",
    "Updater": "OptimizerStep",
    "Programs": "ModelRunner",
    "Judge": "RewardModelScorer",
    "View": "ActiveBatch",
    "Flight": "InFlightDecode",
    "Made": "DecodeOutput",
    "Where": "TokenPositions",
    "Limits": "AttentionBounds",
    "How": "AttentionPlan",
    "Cut": "ExpertShards",
    "Known": "ReadyScores",
    "Lane": "WorkerThread",
    "APART": "INCOMPATIBLE",
    "sit": "make_step",
    "settle": "block_on_cpu_mesh",
    "ways": "num_row_shards",
    "typed": "with_explicit_axes",
    "inferred": "auto_axes",
    "generating": "for_inference",
    "opens": "starts_step",
    "strongest": "most_aggressive",
}
CHECKED = (".py", ".md", ".yml", ".toml", ".sh")
# This list, and what third parties wrote or what is data and not prose.
LEFT_OUT = (".ci/words.py", "CHANGELOG.md", "configs/data/")
# Words that a file must contain: it tests that keys of earlier versions are refused, or has codes
# of OpenAI's and Anthropic's APIs.
EXCEPT: dict[str, set[str]] = {
    "tests/unit/test_config.py": {"if_given", "internal_metrics", "learnt", "rings"},
    "rl/serve/errors.py": {"found"},
    "rl/serve/service.py": {"found"},
    "tests/unit/test_serve.py": {"found"},
    "rl/launch/tpu_vm.py": {"found"},
    "tests/unit/test_launch_files.py": {"found"},
}


def problems(path: str, text: str) -> list[str]:
    """Lists the refused words and names of `text`, the content of the file `path`, each with file
    and line."""
    lines: list[str] = []
    refused = WORDS.keys() - EXCEPT.get(path, set())
    for number, line in enumerate(text.splitlines(), 1):
        for word in re.findall(r"[A-Za-z]+(?:_[A-Za-z]+)*", line):
            for part in sorted({word.lower(), *word.lower().split("_")} & refused):
                lines.append(f"{path}:{number}: {word}: use {WORDS[part]}")
        for name in re.findall(r"\b(?:def|class) (\w+)", line):
            if name in NAMES:
                lines.append(f"{path}:{number}: {name}: use {NAMES[name]}")
    return lines


def main() -> int:
    """Checks every tracked file. Returns the exit code: 1 if a word was refused."""
    tracked = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines: list[str] = []
    for path in tracked:
        if path.endswith(CHECKED) and not path.startswith(LEFT_OUT) and Path(path).exists():
            lines += problems(path, Path(path).read_text())
    print("\n".join(lines) or "no refused words")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
