"""Compiles the generator's programs: before the first step of a run, or in the background during
the first steps."""

from __future__ import annotations

from policy.mesh import processes
from rl.errors import ConfigError
from rl.run.state import Run
from rl.stages.sampling.evaluation import params_of
from rl.stages.sampling.params import greedy_params, sampling_params


def compile_generator(run: Run) -> None:
    """Compiles the generator's programs for all prompts and sampling parameters of the run, once.
    They are compiled in the background, and a step waits for the programs that it needs; under
    `generator.strict_shapes`, before the first step. The programs of towers, of `generator.exact`
    and of the copy of weights for `generator.rules` are compiled before it in either case.

    Raises ConfigError for a cache that cannot be allocated.
    """
    generator = run.generator
    problems = [each for stage in run.stages for each in stage.problems()] + run.evaluation_problems
    longest = max(
        processes.all_gather_object(max((len(problem.ids) for problem in problems), default=0))
    )
    if not longest or generator.compiled_ahead:
        return
    try:
        pool = generator.engine.runner.page_budget
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pool is not None:
        run.events.note(f"the generator's cache: {pool}")
    every = [sampling_params(stage.options.sampling, run.stop_ids) for stage in run.stages]
    compared = [stage for stage in run.stages if "greedy_reward" in stage.inputs]
    greedy = [greedy_params(stage.options.sampling, run.stop_ids) for stage in compared]
    if run.config.evaluation is not None:
        every += [params for each in every for params in params_of(run.config.evaluation, each)]
    every += greedy
    media_rows = (run.tables.M,) if run.tables else ()
    if not run.config.generator.strict_shapes:
        if run.tables:
            run.tables.compile_ahead(run.model.params)
        count = generator.compile_in_background(longest, every, media_rows)
        run.events.note(
            f"compiling the {count} programs of the generator in the background, starting with "
            "those of the first dispatch"
        )
        return
    run.events.note("compiling the programs of the generator, once for all steps ...")
    with run.timeline.span("compiling the generator") as span:
        count = run.tables.compile_ahead(run.model.params) if run.tables else 0
        count += generator.compile_ahead(longest, every, media_rows, strict=True)
    run.events.note(
        f"the generator has {count} programs; they were compiled in {span.seconds:.1f} s"
    )


class BackgroundNotes:
    """Notes about programs that are still to be compiled in the background."""

    def __init__(self) -> None:
        self._left = 0

    def after_step(self, left: int) -> str | None:
        """Returns a note if some programs are left after the first step, and one when all are
        compiled."""
        before = self._left
        self._left = left
        if left and not before:
            return f"{left} programs of the generator are still to be compiled, in the background"
        return "no program of the generator is left to compile" if before and not left else None
