"""Probes a stage that samples: before the first step of a run, and for `rl inspect --probe`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from policy.mesh import processes
from policy.model import Model
from rl.config.run import RunConfig
from rl.data.encoded import Problem
from rl.data.inspect.source import random_weights
from rl.errors import ConfigError, DataError
from rl.run import build
from rl.run.health.prompt_probe import ProbeResult, probe
from rl.run.prepare import prepare
from rl.run.state import Run
from rl.stages.sampling.params import sampling_params
from rl.stages.stage import StageKind
from rl.training.batch import padded_batch
from rl.training.media.tables import StepTable
from rollout.collect import Rollouts, Source, collect

FILE = "probe.json"
DEFAULT = 32
_COMPARED = 8
"""Completions whose log-probabilities the trainer's form of the model computes too."""


def before_first_step(run: Run, stage: StageKind) -> None:
    """Probes the first stage of a run that samples, as `run.probe` says, and notes the result.

    Raises DataError for a stage that cannot learn from what it samples, where `run.probe` is a
    number. Unset, the run goes on with a warning: it probes DEFAULT prompts if its weights were
    read, and none if they are random.
    """
    asked = run.config.run.probe
    count = (0 if random_weights(run.config) else DEFAULT) if asked is None else asked
    first = next((each for each in run.stages if each.calls_generator), None)
    if not count or stage is not first:
        return
    with run.resharded(), run.timeline.span("probe", stage=stage.name):
        params = stage.sampling_params(n=stage.options.samples_per_prompt)
        collected = partial(stage.collect, counted=False)
        problems = _problems(stage, count, has_media=run.tables is not None)
        result, _ = probe(stage.name, problems, params, collected, run.tokenizer)
        result = replace(result, needs_rewards=stage.algorithm.needs_rewards)
    faults = [each.text for each in result.check()]
    if processes.first():
        text = json.dumps(result.to_json(), indent=1, ensure_ascii=False)
        (run.folder.path / FILE).write_text(text + "\n", encoding="utf-8")
        for line in [*result.lines(), *(f"warn: {fault}" for fault in faults)]:
            run.events.note(line)
    if faults and asked is not None:
        raise DataError(_refusal(stage.name, faults))


def inspect_probe(config: RunConfig, count: int, name: str | None = None) -> ProbeResult:
    """Builds the model of a configuration and probes a stage with its starting weights, without a
    run.

    count: number of prompts. name: the stage; None: the first one that samples. Raises ConfigError
    without such a stage.
    """
    prepared = prepare(config)
    try:
        stage = next(
            (
                each
                for each in prepared.stages
                if each.calls_generator and name in (None, each.name)
            ),
            None,
        )
        if stage is None:
            raise ConfigError(f"--probe: {name or 'no stage of this run'} samples nothing")
        has_media = prepared.data.has_media
        model = build.first_model(config, prepared)
        options = replace(
            build.generator_options(config), record_values=False, record_routes=False, record_kept=0
        )
        generator = build.generator(config, model, prepared.tokenizer, options)
        if stage.runner is not None and stage.runner.sources:
            raise ConfigError(
                "--probe: reward models are loaded in a run only; set run.probe, or leave them out"
            )
        source = Source(generator, stage.runner)
        params = sampling_params(
            stage.options.sampling, prepared.stop_ids, n=stage.options.samples_per_prompt
        )
        problems = _problems(stage, count, has_media)
        table = None
        prompts = None
        if has_media:
            expanded = [problem.expanded for problem in problems]
            table = build.media_tables(config, prepared, model.graph).of(model.params, expanded)
            prompts = [table.prompt(problem.ids, problem.expanded) for problem in problems]
        result, made = probe(
            stage.name,
            problems,
            params,
            lambda problems, params, ids: collect(source, problems, params, ids, prompts=prompts),
            prepared.tokenizer,
        )
        result = replace(result, needs_rewards=stage.algorithm.needs_rewards)
        return replace(result, logp_diff=_mean_logp_diff(model, made, params.temperature, table))
    finally:
        prepared.close()


def _refusal(stage: str, faults: Sequence[str]) -> str:
    return "\n".join(
        [
            f"the probe before the first step of {stage} shows that it cannot learn:",
            *faults,
            "run.probe=0 leaves it out",
        ]
    )


def _problems(stage: StageKind, count: int, has_media: bool) -> list[Problem]:
    """Returns the first `count` problems in the order of the stage, without drawing them; with
    pictures or sounds at most those of a step, because no table holds more."""
    total = stage.rows.total
    count = min(count, stage.options.prompts_per_step) if has_media else count
    return stage.rows.take(stage.example_order.take(range(min(count, total))))


def _mean_logp_diff(
    model: Model, made: Rollouts, temperature: float, table: StepTable | None = None
) -> float:
    """Returns the mean of |log-probability by the trainer - by the generator| over the tokens of
    some completions. table: the pictures and sounds of the prompts."""
    rows = made.rows
    chosen = rows[:: max(1, len(rows) // _COMPARED)][:_COMPARED]
    segments = [row.segment for row in chosen]
    longest = max(len(segment.tokens) for segment in segments)
    batch = padded_batch([(segment.tokens, segment.policy) for segment in segments], longest)
    media = None
    if table is not None:
        batch = table.add(
            batch,
            [(n, 0, made.groups[row.group].problem.expanded) for n, row in enumerate(chosen)],
        )
        assert batch.media is not None
        media = batch.media.in_table(table.table)
    logp, _ = model.logprobs(
        batch.tokens, segments=batch.segments, temperature=temperature, media=media
    )
    logp = np.asarray(logp)
    differences = [
        np.abs(
            logp[number, : len(segment.tokens)][segment.policy]
            - segment.logprobs[segment.policy].astype(np.float64)
        )
        for number, segment in enumerate(segments)
    ]
    return float(np.concatenate(differences).mean())
