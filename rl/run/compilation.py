"""Compiles the generator's programs before the first step of a run."""

from __future__ import annotations

from policy.mesh import processes
from rl.errors import ConfigError
from rl.run.state import Run
from rl.stages.sampling.rollouts import sampling_params


def compile_generator(run: Run) -> None:
    """Compiles the generator's programs for all prompts and sampling parameters of the run, once.

    Raises ConfigError for a cache that cannot be allocated.
    """
    generator, problems = run.generator, [each for stage in run.stages for each in stage.prompts()] + run.held_out
    longest = max(processes.all_gather_object(max((len(problem.ids) for problem in problems), default=0)))
    if not longest or generator.compiled_ahead:
        return
    try:
        pool = generator.engine.runner.page_budget
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pool is not None:
        run.events.note(f"the generator's cache: {pool}")
    run.events.note("compiling the programs of the generator, once for all steps ...")
    every = [sampling_params(stage.options.sampling, run.stop_ids) for stage in run.stages]
    with run.timeline.span("compiling the generator") as span:
        count, strict = 0, run.config.generator.strict_shapes
        if run.media is not None:
            count = run.media.compile_ahead(run.model.params)
        count += generator.compile_ahead(longest, every, (run.media.M,) if run.media else (), strict=strict)
    run.events.note(f"the generator has {count} programs; they were compiled in {span.seconds:.1f} s")
