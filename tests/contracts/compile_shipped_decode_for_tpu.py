"""Compiles the decoding of a shipped configuration for its TPU slice, and prints what a token moves
as JSON.

    python compile_shipped_decode_for_tpu.py grpo_deepseek v5p:8x8x4

Prints {"moved", "arguments", "temporary": bytes; "kernels": calls by name; "most": the instructions
that move most}. All are per chip and decoded token, by the counting of `rl plan`. Needs libtpu.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tpu_compiler import program_text  # isort: split

from policy.programs.compiled_cache import Memory
from rl.accounting.program_names import ProgramName
from rl.plan.compiled import counts
from rl.plan.hlo import HloProgram
from rl.plan.programs import programs
from rl.plan.slices import Topology
from rl.run import build
from rl.run.load import load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def main(name: str, slice_name: str) -> dict:
    topology = Topology.read(slice_name)
    devices = topology.devices()
    config = load([CONFIGS / f"{name}.yml"])
    planned = programs(config, build.on_mesh(config, devices), topology.memory(devices[0]))
    decode = next(each for each in planned if each.kind == ProgramName.DECODE)
    memory = Memory.of(decode.lower().compile(), topology.platform)
    assert memory is not None
    text = program_text()
    counted, steps = counts(text, decode), decode.dispatch
    program = HloProgram(text, decode.kernels, decode.trip_count * steps, decode.occupancy)
    most = sorted(program.moved(), key=lambda each: -each.bytes)[:15]
    return {
        "moved": counted["moved"],
        "arguments": memory.arguments,
        "temporary": memory.temporaries,
        "kernels": counted["kernels"],
        "most": [(each.name, each.times / steps, each.bytes / steps) for each in most],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
