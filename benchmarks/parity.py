"""Prints the largest difference of float32 logits between Duet and `transformers`, for every
family, over all tiny models of tests/tiny.

    python benchmarks/parity.py [KIND ...]

Weights are random and every constant tensor is perturbed; each model sees two rows of 12 and of 70
tokens. Prints one line for each kind: its oracle, the number of models, and the largest difference
at either length. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import tiny  # noqa: E402
from oracles import KINDS, oracle, reference_logits, saved, tokens  # noqa: E402

import policy  # noqa: E402
from policy import families  # noqa: E402

LENGTHS = (12, 70)


def differences(kind: str, keys: dict) -> list[float]:
    """Returns the largest difference at each of LENGTHS."""
    theirs = oracle(kind, **keys)
    with tempfile.TemporaryDirectory() as directory:
        ours = policy.load(saved(theirs, directory))
    rows = (tokens(2, length) for length in LENGTHS)
    return [
        float(np.abs(np.asarray(ours.logits(row)) - reference_logits(theirs, row)).max())
        for row in rows
    ]


def models(kind: str) -> list[dict]:
    """Returns the configurations of this kind: the standard one and the variants."""
    return [
        KINDS[kind].standard,
        *(keys for name, keys in (tiny.VARIANTS | tiny.WIDE).values() if name == kind),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}; all by default"
    )
    chosen = parser.parse_args(arguments).kinds
    if unknown := set(chosen) - set(KINDS):
        parser.error(f"unknown kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    jax.config.update("jax_platforms", "cpu")
    print("| family | oracle | models | 12 tokens | 70 tokens |\n|---|---|---|---|---|")
    for kind in chosen or KINDS:
        largest = np.array([differences(kind, keys) for keys in models(kind)]).max(axis=0)
        named = KINDS[kind].model or f"{kind}ForCausalLM"
        family = families.find({"architectures": [named]}).__name__.rpartition(".")[2]
        print(
            f"| {family} | {named} | {len(models(kind))} | {largest[0]:.1e} | {largest[1]:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
