"""Completes problems outside of a run's steps: for `rl generate` and `rl eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rl.errors import DataError

if TYPE_CHECKING:
    from rl.data.encoded import Problem
    from rollout import Completion, Generator, SamplingParams
    from rollout.media.processors import Processors


def completions(
    generator: Generator,
    problems: Sequence[Problem],
    params: SamplingParams,
    processors: Processors | None,
    ids: Sequence[int] | None = None,
) -> Iterator[tuple[int, int, Completion]]:
    """Yields (place of the problem, sample, completion).

    Problems with pictures or sounds are completed in blocks, so that the table of one block is on
    the devices at a time. ids: numbers of the problems, from which the random draws follow; None:
    their places. Raises DataError for a prompt or a picture that cannot be read.
    """
    ids = range(len(problems)) if ids is None else ids
    if not any(problem.expanded for problem in problems):
        blocks = [problems]
        tables = None
    else:
        from rl.training.media.tables import MediaTables

        size = 4 * generator.slots
        blocks = [problems[i : i + size] for i in range(0, len(problems), size)]
        assert processors is not None  # prompts with pictures or sounds come with processors
        tables = MediaTables.of_blocks(generator.model.graph, processors, blocks)
    start = 0
    try:
        for block in blocks:
            prompts: list[Any] = [problem.ids for problem in block]
            if tables is not None:
                table = tables.of(generator.model.params, [problem.expanded for problem in block])
                prompts = [table.prompt(problem.ids, problem.expanded) for problem in block]
            for place, sample, completion in generator.stream(
                prompts, params, ids[start : start + len(block)]
            ):
                yield start + place, sample, completion
            start += len(block)
    except ValueError as error:
        raise DataError(f"{problems[0].example.where.rpartition(':')[0]}: {error}") from None
    finally:
        if tables is not None:
            tables.loader.close()
