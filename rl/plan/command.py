"""The command `rl plan`: shows the results of child processes that compile."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import rl.stages
from rl.accounting import chips
from rl.config.run import RunConfig
from rl.plan.children import Target, describe_target, start_compiling, with_chosen_remat
from rl.plan.compiled import GIB, ProgramReport
from rl.plan.hlo import BETWEEN
from rl.plan.search import as_yaml, best, search
from rl.plan.suggest import Suggestions, suggestions
from rl.training.learning_rate import drawn, stage_rates


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """topology: a name. memory: GiB per device in place of the chip's. most: changes to compile.
    file: for JSON."""

    topology: str
    memory: float | None = None
    most: int = 6
    file: Path | None = None


def plan(config: RunConfig, options: PlanFlags) -> int:
    """Prints the plan, and settings that help if a program does not fit. Returns 0 if every program
    fits, else 1.

    Raises ConfigError for an unknown topology or a configuration that cannot run there,
    ResourceError for a slice that this machine cannot describe.
    """
    print(
        f"{options.topology}: compiling the programs of {', '.join(config.stage_names)}", flush=True
    )
    config, note = with_chosen_remat(config, options.topology, options.memory)
    if note is not None:
        print(f"  {note}", flush=True)
    target, compiled = start_compiling(config, options.topology, options.memory)
    if config.model.kept_logits_mib is None and config.model.num_vocab_tiling is None:
        print(f"  model.kept_logits_mib is {target.kept_logits_mib}", flush=True)
    reports = []
    for report in compiled:
        print(f"  {report.name}: {report.seconds:.0f} s", flush=True)
        reports.append(report)
    print(table(reports, target.chip))
    print(_learning_rates(config), flush=True)
    too_large = [each.name for each in reports if not target.fits(each)]
    helpful = []
    if too_large:
        assert target.memory is not None  # with unknown memory every program fits
        print(_missing([each for each in reports if not target.fits(each)], target), flush=True)
        result = suggestions(config, target, reports, options.most, _tell)
        helpful = result.fitting
        print(_suggested(result, target.memory))
    elif target.memory is not None:
        print(
            f"fits: at most {max(each.needs for each in reports) / GIB:.1f} of "
            f"{target.memory / GIB:g} GiB per device"
        )
    if options.file is not None:
        settings = [
            {"settings": change.settings, "changes_results": change.results, "needs": attempt.needs}
            for change, attempt in helpful
        ]
        programs = [dataclasses.asdict(each) for each in reports]
        _write(
            options.file,
            {"topology": options.topology, "programs": programs, "suggestions": settings},
        )
    return 1 if too_large else 0


def plan_search(config: RunConfig, options: PlanFlags) -> int:
    """Prints mesh, micro-batch and remat policy of the shortest step. Returns 0 if one fits, else
    1."""
    target = describe_target(options.topology, options.memory)
    print(
        f"{options.topology}: {target.count} devices; estimating meshes, micro-batches and remat "
        "policies",
        flush=True,
    )
    result = search(config, target, options.most, _tell)

    def seconds(reports: Sequence[ProgramReport]) -> float:
        return sum(each.times * bound(each, target.chip or chips.CPU) for each in reports)

    good = best(result.tried, seconds)
    tried = [*good, *(each for each in result.tried if not each[1].fits)]
    print(
        f"{result.looked_at} choices, {result.pruned} of them too large by arguments alone; "
        f"{len(tried)} were compiled:"
    )
    lines = [["at least", "estimated", "needs", "settings"]]
    for choice, attempt in tried:
        least = f"{seconds(attempt.reports):.3g} s" if attempt.fits else "-"
        needs = attempt.wrong or _bytes(attempt.needs) + ("" if attempt.fits else ": too much")
        lines.append([least, f"{choice.costs.seconds:.3g} s", needs, str(choice.change)])
    print(_aligned(lines, left=(3,)))
    if good:
        print(
            "\nthe quickest, as a file to merge over the "
            f"configuration:\n\n{as_yaml(good[0][0].change)}",
            end="",
        )
    else:
        assert target.memory is not None  # the search refuses unknown memory
        print(
            f"none of those compiled fits {target.memory / GIB:g} GiB per device "
            f"({target.device}); what the run keeps takes {result.least / GIB:.1f} GiB per device "
            "at least; take more devices, or a higher --candidates"
        )
    if options.file is not None:
        rows = [
            {
                "settings": choice.change.settings,
                "fits": attempt.fits,
                "needs": attempt.needs,
                "seconds": seconds(attempt.reports) if attempt.fits else None,
                "estimated_seconds": choice.costs.seconds,
            }
            for choice, attempt in tried
        ]
        numbers = {"looked_at": result.looked_at, "pruned": result.pruned, "candidates": rows}
        _write(options.file, {"topology": options.topology, "memory": target.memory} | numbers)
    return 0 if good else 1


def _learning_rates(config: RunConfig) -> str:
    """Returns a line of bars for the learning rate of each optimizer of the stages."""
    lines = []
    for stage in rl.stages.create(config):
        if stage.options.steps is None:
            lines.append(
                f"  {stage.name}: {stage.options.epochs:g} epochs of rows that a plan does not "
                "read; the steps: rl-train --check"
            )
            continue
        for key in stage.optimizers:
            waits = getattr(stage.algorithm, "critic_warmup", 0) if key == "optimizer" else 0
            bars = drawn(
                stage_rates(config, stage.index, key, waits), stage.options.updates_per_step
            )
            lines.append(f"  {stage.name}{' (critic)' * (key == 'critic')}: {bars}")
    return "\n".join(["learning rates:", *lines])


def _write(file: Path, numbers: dict) -> None:
    file.write_text(json.dumps(numbers, indent=1) + "\n")


def _tell(text: str) -> None:
    print(f"  {text}", flush=True)


def _missing(too_large: Sequence[ProgramReport], target: Target) -> str:
    """Returns what each of these programs needs more than a device has, one line a program."""
    assert target.memory is not None
    lines = [f"does not fit {target.memory / GIB:g} GiB per device ({target.device}):"]
    for each in too_large:
        if math.isinf(each.needs):
            lines.append(
                f"  {each.name}: the compiler refuses it and does not say how much it needs"
            )
        else:
            more = (each.needs - target.memory) / GIB
            lines.append(
                f"  {each.name}: needs {each.needs / GIB:.1f} GiB, {more:.1f} GiB too many"
            )
    return "\n".join(lines)


def _suggested(result: Suggestions, memory: float) -> str:
    if not result.fitting:
        return (
            f"no compiled setting of speed, precision or length fits; {_strongest(result, memory)}"
        )
    note = {True: "changes what the run computes", False: ""}
    lines = [
        [f"  {change}", f"{_bytes(attempt.needs)} per device", note[change.results]]
        for change, attempt in result.fitting
    ]
    return "with these settings as overrides, those programs fit:\n" + _aligned(
        lines, left=(0, 1, 2)
    )


def _strongest(result: Suggestions, memory: float) -> str:
    """Returns the two settings that save most, and what is then still missing, by the estimate."""
    advice = "take more devices, or a higher --candidates"
    if not result.strongest or math.isinf(result.needs):
        return advice
    lines = []
    for each in result.strongest:
        saved = (result.needs - each.needs) / GIB
        missing = max(0.0, each.needs - memory) / GIB
        lines.append([f"  {each.change}", f"{saved:.1f} GiB less", f"{missing:.1f} GiB too many"])
    return f"{advice}. By the estimate these settings save most:\n" + _aligned(
        lines, left=(0, 1, 2)
    )


def table(reports: Sequence[ProgramReport], chip: chips.Chip | None) -> str:
    """Returns the table of `rl plan`: for each program its memory per device, its operations and
    bytes per call, its calls per step, and the least time that the chip takes for them (if
    `chip`)."""
    sizes = ("arguments", "temporary", "peak", "other")
    lines = [["program", *sizes, "FLOP", "moved", "ratio", "exchanged", "per step", "at least"]]
    for each in reports:
        exchanged = (
            ", ".join(
                f"{kind} {_bytes(size)}" for kind, (size, _) in sorted(each.exchanged.items())
            )
            or "-"
        )
        least = "" if chip is None else f"{each.times * bound(each, chip):.3g} s"
        if each.refused:
            peak = "refused" if math.isinf(each.peak) else _bytes(each.peak)
            unknown = ("-", "-", "-", "-")
            lines.append(
                [
                    each.name,
                    "-",
                    "-",
                    peak,
                    _bytes(each.non_argument),
                    *unknown,
                    f"x {each.times:.4g}",
                    "-",
                ]
            )
            continue
        sizes = map(_bytes, (each.arguments, each.temporaries, each.peak, each.non_argument))
        work = (f"{each.operations:.2e}", _bytes(each.moved), f"{each.moved_ratio:.2f}")
        lines.append([each.name, *sizes, *work, exchanged, f"x {each.times:.4g}", least])
    notes = [
        "Per device and per run (of a multi-step decode: per step); other: bytes that the run "
        "keeps there besides;",
        "moved: HBM traffic; ratio: moved over arguments;",
        "exchanged: the larger of input and output of a collective, of a ragged one the smaller.",
    ]
    for each in reports:
        if each.kernels:
            calls = ", ".join(
                f"{name} x {number:,.6g}" for name, number in sorted(each.kernels.items())
            )
            notes.append(f"kernels of {each.name}: {calls}")
        if each.teacher:
            work = f"{each.teacher[0]:.2e} FLOP and {_bytes(each.teacher[1])} moved"
            notes.append(f"{each.name} contains the teacher's passes, about {work} of it")
        notes += [f"{each.name}: {note}" for note in each.notes]
    if chip is not None:
        total = sum(each.times * bound(each, chip) for each in reports)
        far = any(kind.endswith(BETWEEN) for each in reports for kind in each.exchanged)
        between = f", {chip.between:g} GB/s between slices" if far else ""
        notes.append(
            f"a step takes {total:.3g} s at least; each program the longest of operations at "
            f"{chip.tflops:g} TFLOP/s, "
            f"bytes moved at {chip.bandwidth:g} GB/s and exchanged at {chip.links:g} GB/s{between}"
        )
    return "\n".join([_aligned(lines, left=(0, 8)), *notes])


def _aligned(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _bytes(size: float) -> str:
    if math.isinf(size):
        return "refused"
    if size == 0:
        return "0"
    unit = next((unit for unit in ("G", "M") if size >= 2 ** {"G": 30, "M": 20}[unit]), "K")
    return f"{size / 2 ** {'G': 30, 'M': 20, 'K': 10}[unit]:.2f} {unit}iB"


def bound(report: ProgramReport, chip: chips.Chip) -> float:
    """Returns a lower bound in seconds of one run: the slowest of compute, memory and links is
    never idle."""
    far = sum(size for kind, (size, _) in report.exchanged.items() if kind.endswith(BETWEEN))
    near = sum(size for size, _ in report.exchanged.values()) - far
    sent = (size / (rate * 1e9) for size, rate in ((near, chip.links), (far, chip.between)) if rate)
    return max(
        report.operations / (chip.tflops * 1e12), report.moved / (chip.bandwidth * 1e9), *sent
    )
