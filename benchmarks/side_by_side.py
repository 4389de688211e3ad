"""Measures programs that do the same work in turns: A B A B ... Other load on the machine affects
both equally, so their ratio says more than two separate measurements.

Import this before jax: the benchmarks are about the CPU, as the torch of the test extra is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@dataclass(frozen=True)
class Row:
    """Seconds of each turn of two programs, and the units of work (tokens, steps) of one turn."""

    name: str
    peer: str
    work: float
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    note: str = ""

    @property
    def ratio(self) -> float:
        """Returns the median seconds of the peer over median seconds of Duet; above 1 Duet is
        faster."""
        return statistics.median(self.theirs) / statistics.median(self.ours)


def in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[tuple, tuple]:
    """Seconds of `repeats` turns of each, one after the other; both ran once before, for
    compilation and caches.

    A program must return only when its results are there.
    """
    ours(), theirs()
    seconds = [(_seconds(ours), _seconds(theirs)) for _ in range(repeats)]
    return tuple(zip(*seconds, strict=True))


def _seconds(program: Callable[[], object]) -> float:
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


@contextmanager
def process(steps: Callable, threads: int | None, *given):
    """Yields a function that makes a new process take one step and returns its report.

    steps: a function of a module, called with `given` and a Turns; it takes one step a turn.
    threads: of torch in that process; None: its own choice.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=_serve, args=(steps, threads, given, far))
    child.start()
    far.close()

    def turn() -> dict:
        near.send("step")
        return near.recv()

    try:
        yield turn
    finally:
        near.close()
        child.join(60)
        child.kill()


def _serve(steps: Callable, threads: int | None, given: tuple, pipe) -> None:
    """Takes one step per request of the parent process."""
    if threads:
        import torch

        torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError):  # the others have failed
        steps(*given, Turns(pipe))


class Turns:
    """What a process is told, and tells."""

    def __init__(self, pipe):
        self._pipe = pipe

    def wait(self) -> None:
        self._pipe.recv()
        self._processor = time.process_time()
        self._began = time.perf_counter()

    def done(self, more: dict) -> None:
        """Reports the end of a step: its seconds, those of processors in this process, and the peak
        memory of the process so far. more: more numbers, and `step` if it took less time than since
        `wait`."""
        seconds = time.perf_counter() - self._began
        processor = time.process_time() - self._processor
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._pipe.send({"step": seconds, "processor": processor, "memory": memory} | more)


def table(rows: Sequence[Row], unit: str, *, rate: bool) -> str:
    """Formats one line per row: median and best turn of both programs, and the ratio of the
    medians.

    `rate`: work per second (higher is better); otherwise seconds per unit of work (lower is
    better).
    """

    def shown(seconds: float, row: Row) -> str:
        return f"{row.work / seconds:,.0f}" if rate else f"{seconds / row.work:.3f}"

    head = ("what", f"Duet {unit}", "(best)", f"peer {unit}", "(best)", "ratio", "peer", "")
    lines = [
        (
            row.name,
            shown(statistics.median(row.ours), row),
            shown(min(row.ours), row),
            shown(statistics.median(row.theirs), row),
            shown(min(row.theirs), row),
            f"{row.ratio:.2f}",
            row.peer,
            row.note,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    left = (0, 6, 7)
    return "\n".join(
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *lines]
    )


# TRL on the CPU in float32, recomputing nothing; nothing is written or shown.
TRL_QUIETLY = {
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def trl_settings(directory: str, **given):
    """Settings of TRL's GRPOTrainer for strictly on-policy steps in float32 on the CPU, averaged
    over tokens, without a KL term, of which nothing is written or shown."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=directory,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        **TRL_QUIETLY,
        **given,
    )


def arguments(description: str, sizes: Sequence[str], repeats: int) -> argparse.ArgumentParser:
    """Adds the arguments of every benchmark: models and number of turns."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=sizes, default=list(sizes), help="default: all"
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"turns of each program (default {repeats})"
    )
    parser.add_argument(
        "--torch-threads", type=int, help="default: torch's own choice, one for each core"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options and sets torch's threads; warns if other programs are at work.

    The threads of torch wait for each other at every operation: where one of them shares its core
    with another program the peer was measured 50 times slower with two threads than with one, and
    the ratio says nothing.
    """
    options = parser.parse_args(argv)
    if options.torch_threads:
        import torch

        torch.set_num_threads(options.torch_threads)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"load average {load:.1f}: other programs are at work and slow torch more than Duet; "
            "try --torch-threads 1"
        )
    return options
