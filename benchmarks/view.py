"""CPU seconds of the viewer's index and searches, and its memory, for a run of 100,000 completions.

    python benchmarks/view.py [--samples 100000] [--words 150] [RUN]

Without RUN, the run is made by this script, as a run writes it: two rewards, groups of eight,
segments of 64 MiB. The viewer computes in one thread, so on an idle core it takes as many seconds.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from rl.records.run_files import SEGMENTS
from rl.records.samples import TOKEN, TRAINED, SampleLog
from rl.views.viewer import records, search
from rl.views.viewer.index import INDEX, Index

FILTERS = (
    *(
        "",
        "step:100-200",
        "reward<0.5 reward.format=0 len>200",
        "gap>0.05 -eval",
        "finish:length",
        "fault:timeout",
    ),
    *(
        '"carry one"',
        '"no such text"',
        "sum",
        "/carry +one/",
        "/CARRY.*(4|5)6;/i",
        '"carry one" reward<0.5 step:100-',
    ),
)
WORDS = (
    "we",
    "add",
    "the",
    "two",
    "numbers",
    "<",
    "carry",
    "one",
    "so",
    "that",
    "sum",
    "is",
    "&",
    "46;",
    '"check"',
)


def write_run(directory: Path, samples: int, words: int, seed: int = 0) -> None:
    """Writes samples.jsonl, tokens.bin and their segments."""
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    log = SampleLog(directory)
    for first in range(0, samples, 64):
        lines = []
        tokens = []
        for number in range(first, min(first + 64, samples)):
            count = draw.randrange(words, 3 * words)
            own = np.zeros(count + 20, TOKEN)
            own["id"], own["gap"][20:] = (
                numbers.integers(0, 150_000, count + 20),
                numbers.normal(0, 0.02, count),
            )
            own["logp"], own["entropy"], own["flags"][20:], own["turn"][20:] = -0.5, 1.0, TRAINED, 1
            score = float(draw.random() < 0.5)
            form = float(draw.random() < 0.9)
            record = {
                "stage": "grpo",
                "step": first // 64 + 1,
                "prompt_id": number // 8,
                "sample": number % 8,
            }
            record |= {
                "version": first // 64,
                "prompt": f"What is {draw.randrange(99)} + {draw.randrange(99)}?",
            }
            record |= {"completion": " ".join(draw.choices(WORDS, k=count * 2 // 3))}
            record |= {
                "tokens": own["id"][20:].tolist(),
                "finish": "length" if draw.random() < 0.05 else "stop",
            }
            record |= {"rewards": {"correct": score, "format": form}, "reward": score + 0.1 * form}
            record |= {
                "advantage": score - 0.5,
                "columns": {"answer": "46"},
                "n_prompt": 20,
                "n": count,
            }
            lines.append(
                record | ({"faults": {"correct": "timeout"}} if draw.random() < 0.01 else {})
            )
            tokens.append(own)
        log.write(lines, tokens)
        log.rotate()
    log.close()


def measure(directory: Path) -> None:
    """Prints CPU seconds of building, loading, searching and reading."""
    size = sum(file.stat().st_size for file in directory.glob("**/*.jsonl"))
    index = Index(directory)
    seconds = _clock()
    index.refresh(0.2)
    for place in search.places(index, search.search(index, "")[:50]):
        records.listed(index, place)
    print(f"first page, before the index is built: {seconds():.2f} s")
    index = Index(directory)
    seconds = _clock()
    index.refresh()
    print(
        f"{index.total:,} samples, {size / 1e6:,.0f} MB of lines: index read or built in "
        f"{seconds():.2f} s"
    )
    seconds = _clock()
    index.save()
    stored = (directory / SEGMENTS / INDEX).stat().st_size
    print(f"  written in {seconds():.3f} s: {stored / 1e6:,.1f} MB")
    seconds = _clock()
    Index(directory).refresh()
    print(f"  read again in {seconds():.3f} s")
    for text in FILTERS:
        seconds = _clock()
        rows = search.search(index, text)
        taken = seconds()
        seconds = _clock()
        for place in search.places(index, rows[:50]):
            records.listed(index, place)
        print(
            f"  {text or '(all)':42} {len(rows):8,} samples {taken:6.3f} s, page {seconds():6.3f} s"
        )
    print(
        f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB, mapped "
        "files included"
    )


def _clock():
    start = time.process_time()
    return lambda: time.process_time() - start


def main() -> None:
    """Measures a run, or one that it makes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=150)
    arguments = parser.parse_args()
    if arguments.run:
        measure(Path(arguments.run))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), arguments.samples, arguments.words)
        measure(Path(folder))


if __name__ == "__main__":
    main()
