"""Names the metrics that a stage can have, for configurations that name one. Free of jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rewards.registry import RewardError, locate
from rewards.suggest import nearest
from rl.config.data import DataOptions, NamedDataOptions, datasets_of
from rl.stages.configured import ConfiguredStage

NAMES = (
    "eval/greedy_accuracy",
    "eval/problems",
    "eval/unscored",
    "eval/samples",
    "eval/reward_mean",
    "eval/pass@<k>",
    "eval/maj@<k>",
    "eval/unscored_samples",
    "eval/<source>/<metric>",
    "held_out/<metric>",
    "reward/mean",
    "reward/std",
    "reward/frac_zero_std",
    "reward/unscored",
    "reward/faults",
    "reward/greedy",
    "reward/timeouts",
    "reward/not_applicable",
    "reward/retried",
    "rewards/<name>/mean",
    "rewards/<name>/std",
    "advantage/mean",
    "advantage/std",
    "advantage/min",
    "advantage/max",
    "completion/mean_length",
    "completion/min_length",
    "completion/max_length",
    "completion/truncated_ratio",
    "completion/mean_terminated_length",
    "completion/min_terminated_length",
    "completion/max_terminated_length",
    "dynamic/batches",
    "dynamic/kept_share",
    "dynamic/carried",
    "dynamic/without_difference",
    "dynamic/reward_mean",
    "async/staleness_mean",
    "async/staleness_max",
    "data/epoch",
    "source/<source>/rows",
    "source/<source>/epoch",
    "source/<source>/reward_mean",
    "source/<source>/frac_zero_std",
    "source/<source>/mean_length",
    "source/<source>/nll",
    "batch/trained_share",
    "media/pictures",
    "media/rows",
    "media/distinct",
    "media/encoded",
    "media/encode_seconds",
    "media/wait_seconds",
    "speculative/accepted_per_step",
    "generator/replaced_share",
    "loss",
    "policy_loss",
    "nll",
    "entropy",
    "entropy_coef",
    "entropy_bonus_applied",
    "kl/approx_update",
    "kl/ref",
    "kl/ref_clamped",
    "kl/reward",
    "kl/coef",
    "positive_nll",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "vespo/phi_mean",
    "dppo/masked_ratio",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "clip_ratio/dual_mean",
    "clip_ratio/log_ratio_clamped",
    "sequences/empty",
    "distill/forward_kl",
    "distill/reverse_kl",
    "distill/jsd",
    "distill/scored",
    "distill/agreement",
    "distill/student_entropy",
    "distill/teacher_entropy",
    "distill/student_mass",
    "distill/teacher_mass",
    "distill/outside",
    "distill/features",
    "distill/projections/optim/lr",
    "distill/projections/optim/grad_norm",
    "distill/projections/optim/update_norm",
    "distill/projections/optim/skipped",
    "distill/alpha",
    "distill/temperature",
    "distill/features_coef",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "kto/desirable_share",
    "kto/reward_desirable",
    "kto/reward_undesirable",
    "kto/correct_side",
    "kto/kl",
    "reward_model/accuracy",
    "reward_model/margin",
    "reward_model/score_mean",
    "reward_model/score_min",
    "reward_model/score_max",
    "sampler/logp_diff_mean",
    "sampler/logp_diff_max",
    "sampler/mult_prob_error",
    "sampler/kl",
    "sampler/k3_kl",
    "sampler/is_ratio_mean",
    "sampler/is_ratio_square_mean",
    "sampler/is_ratio_min",
    "sampler/is_ratio_max",
    "sampler/is_oob_ratio",
    "sampler/rejected_ratio",
    "sampler/ess",
    "sampler/kept_mean",
    "sampler/kept_overflow",
    "optim/lr",
    "optim/grad_norm",
    "optim/update_norm",
    "optim/skipped",
    "mtp/loss",
    "mtp/acceptance",
    "mtp/grad_norm",
    "moe/max_load",
    "moe/balance",
    "moe/dropped",
    "moe/replayed",
    "moe/replay_disagreement",
    "indexer/kl",
    "indexer/recall",
    "activation/mean/<layer>",
    "activation/std/<layer>",
    "activation/zeros/<layer>",
    "grad_norm/<part>",
    "value/loss",
    "value/clip_frac",
    "value/mean",
    "value/return_mean",
    "value/explained_variance",
    "value/optim/lr",
    "value/optim/grad_norm",
    "value/optim/update_norm",
    "value/optim/skipped",
    "value/moe/max_load",
    "value/moe/balance",
    "time/step",
    "time/sync",
    "time/sample",
    "time/reward",
    "time/reward_models",
    "time/reward_calls",
    "time/reward_p50_s",
    "time/reward_p99_s",
    "time/logprob",
    "time/ref",
    "time/teacher",
    "time/update",
    "time/idle",
    "time/eval",
    "time/held_out",
    "generator/useful_rows",
    "generator/prompt_tokens_read",
    "generator/preempted",
    "perf/host_memory_share",
    "perf/device_memory_share",
    "perf/shared_prefix",
    "perf/packed_share",
    "perf/step_tokens",
    "perf/sample_tokens_per_s",
    "perf/logprob_tokens_per_s",
    "perf/train_tokens_per_s",
    "perf/step_tokens_per_s",
    "perf/step_tflop",
    "perf/sample_tflops_per_s",
    "perf/logprob_tflops_per_s",
    "perf/train_tflops_per_s",
    "perf/step_tflops_per_s",
    "perf/mfu_sample",
    "perf/mfu_logprob",
    "perf/sample_hbm_utilisation",
    "perf/mfu_train",
    "perf/mfu_step",
)
"""The names of docs/metrics.md. In `rewards/<name>/mean`, `<name>` is a reward function; k, layer
and part as there."""

_OF_EVALUATED_SOURCES = (
    "greedy_accuracy",
    "reward_mean",
    "problems",
    "unscored",
    "unscored_samples",
)
"""Metrics of an evaluation that each source has, besides pass@k and maj@k."""

_OF_LOSSES = {
    "supervised": r"loss|nll|entropy",
    "preference": r"loss|nll|entropy|rewards/(chosen|rejected|margins|accuracies)|logps/.+",
    "unpaired": r"loss|entropy|kto/.+",
    "reward_model": r"loss|reward_model/.+",
}
"""Kind of a stage -> pattern of the metrics of its loss, which rows of `held_out` have, too."""


class _Condition(NamedTuple):
    """Metrics that not every stage has: the pattern of their names, whether a stage has them, and
    why it has not."""

    pattern: str
    holds: Callable[[ConfiguredStage], Any]
    reason: str


_CONDITIONS = (
    _Condition(
        "eval/|time/eval$", lambda stage: stage.config.evaluation, "no `evaluation` is configured"
    ),
    _Condition(
        "eval/|time/eval$", lambda stage: stage.trains_policy, "this stage is not evaluated"
    ),
    _Condition(
        "eval/(samples|pass@|maj@)",
        lambda stage: stage.config.evaluation.samples,
        "`evaluation.samples` is 0",
    ),
    _Condition(
        "(reward|advantage|completion|dynamic|async|sampler|clip_ratio)/|rewards/.+/|time/sample$",
        lambda stage: stage.trains_on_rollouts,
        "this stage samples no completions",
    ),
    _Condition(
        "(async|dynamic|generator|speculative)/|reward/(faults|timeouts|not_applicable|retried)$|"
        "data/epoch$|source/.+/epoch$|time/reward_|perf/(sample_|mfu_sample$)",
        lambda stage: not stage.trains_on_rollouts or stage.calls_generator,
        "it samples nothing, and takes recorded samples (`rollouts`)",
    ),
    _Condition("source/", lambda stage: stage.has_sources, "its data have one source"),
    _Condition(
        "source/.+/epoch$", lambda stage: len(stage.datasets) > 1, "its data are one dataset"
    ),
    _Condition(
        "source/.+/epoch$", lambda stage: not stage.options.curriculum, "it has a curriculum"
    ),
    _Condition(
        "source/.+/(reward_mean|frac_zero_std|mean_length)$",
        lambda stage: stage.trains_on_rollouts,
        "this stage samples no completions",
    ),
    _Condition(
        "source/.+/nll$",
        lambda stage: stage.algorithm.stage == "supervised",
        "only sft and distill have it",
    ),
    _Condition(
        "held_out/|time/held_out$", lambda stage: stage.options.held_out, "`held_out` is null"
    ),
    _Condition(
        "reward/|rewards/<name>/|time/reward|source/.+/(reward_mean|frac_zero_std)$",
        lambda stage: stage.rewards or not stage.trains_on_rollouts,
        "no `rewards` are configured",
    ),
    _Condition("distill/", lambda stage: stage.teacher, "its algorithm has no teacher"),
    _Condition(
        "dynamic/",
        lambda stage: stage.algorithm.dynamic_batches,
        "`algorithm.dynamic_batches` is 0",
    ),
    _Condition(
        "sampler/kept_", lambda stage: stage.max_kept, "no ids that filters leave are recorded"
    ),
    _Condition("value/", lambda stage: "values" in stage.inputs, "its algorithm has no critic"),
    _Condition("mtp/", lambda stage: stage.options.mtp, "`mtp` is null"),
    _Condition(
        "indexer/",
        lambda stage: stage.options.indexer.training != "off",
        "`indexer.training` is off",
    ),
    _Condition(
        "activation/|grad_norm/", lambda stage: stage.options.diagnostics, "`diagnostics` is false"
    ),
    _Condition(
        "rewards/(chosen|rejected|margins|accuracies)$|logps/",
        lambda stage: stage.algorithm.stage == "preference",
        "its algorithm compares no answers of a pair",
    ),
    _Condition(
        "(kto|reward_model|vespo|dppo)/",
        lambda stage: None,  # `_of_algorithm` tells
        "another algorithm has it",
    ),
)


def problem(stage: ConfiguredStage, metric: str) -> str | None:
    """Returns what is wrong with the name of a metric that a stage is to have, with the nearest
    name, or None."""
    if any(re.fullmatch(pattern, metric) for pattern in _patterns(stage)):
        return None
    if _general(metric) in NAMES and (reason := _excluded(stage, metric)):
        return f"{stage.name} never has the metric {metric}: {reason}"
    return f"no metric {metric!r}{nearest(metric, dict.fromkeys(_examples(stage)))}"


def reward_names(stage: ConfiguredStage) -> list[str]:
    """Returns the names of the reward functions of a stage, as metrics have them; without those
    that do not load."""
    names = []
    for function in stage.rewards.functions if stage.rewards else ():
        try:
            names.append(locate(function.name).name)
        except RewardError:
            continue
    return names


def _sources(datasets: Sequence[DataOptions]) -> list[str]:
    """Returns the names of the sources of these datasets; <source> for those of a column."""
    names = []
    for each in datasets:
        if each.columns.source is not None:
            names.append("<source>")
        elif isinstance(each, NamedDataOptions):
            names.append(each.label)
    return names


def _excluded(stage: ConfiguredStage, metric: str) -> str | None:
    """Returns why a stage never has a metric, or None."""
    for condition in _CONDITIONS:
        if re.match(condition.pattern, metric):
            own = metric.startswith(f"{stage.algorithm.name}/")
            if not own and not condition.holds(stage):
                return condition.reason
    return None


def _general(metric: str) -> str:
    """Returns a name as NAMES has it: one for all functions, layers, parts and k."""
    name = re.sub(r"^rewards/[^/]+/", "rewards/<name>/", metric)
    name = re.sub(r"^(activation/\w+)/\w+$", r"\1/<layer>", name)
    name = re.sub(r"^held_out/.+$", "held_out/<metric>", name)
    name = re.sub(r"^source/[^/]+/", "source/<source>/", name)
    return re.sub(r"@\d+$", "@<k>", re.sub(r"^grad_norm/\w+$", "grad_norm/<part>", name))


def _patterns(stage: ConfiguredStage) -> Iterator[str]:
    """Yields patterns of the names that a stage can have."""
    for name in _examples(stage):
        pattern = re.escape(name).replace("<layer>", r"\w+").replace("<part>", r"\w+")
        yield pattern.replace("<source>", "[^/]+")
    evaluation = stage.config.evaluation
    for name in evaluation.metrics if evaluation and stage.trains_policy else ():
        yield f"eval/{re.escape(name.rpartition(':')[2])}(/.+)?"


def _examples(stage: ConfiguredStage) -> Iterator[str]:
    """Yields the names that a stage can have, with `<layer>`, `<part>`, and `<source>` where a
    column of the rows names it."""
    yield from getattr(stage.algorithm, "metric_names", ())
    evaluation = stage.config.evaluation
    for name in NAMES:
        if _excluded(stage, name):
            continue
        if name == "eval/pass@<k>":
            yield from (f"eval/pass@{k}" for k in (evaluation.k if evaluation else ()))
        elif name == "eval/maj@<k>":
            yield from (f"eval/maj@{k}" for k in (evaluation.maj if evaluation else ()))
        elif name == "eval/<source>/<metric>":
            assert evaluation is not None  # `_excluded` leaves the name out without evaluations
            metrics = [f"pass@{k}" for k in evaluation.k] if evaluation.samples else []
            metrics += [f"maj@{k}" for k in evaluation.maj]
            for source in _sources(datasets_of(evaluation.data)):
                yield from (f"eval/{source}/{each}" for each in (*_OF_EVALUATED_SOURCES, *metrics))
        elif name == "held_out/<metric>":
            assert stage.options.held_out is not None
            held_out = datasets_of(stage.options.held_out.data)
            losses = [
                each for each in NAMES if re.fullmatch(_OF_LOSSES[stage.algorithm.stage], each)
            ]
            yield from (f"held_out/{each}" for each in losses)
            for source in _sources(held_out):
                yield from (f"held_out/{source}/{each}" for each in losses)
        elif name.startswith("source/"):
            yield from (name.replace("<source>", each) for each in _sources(stage.datasets))
        elif "<name>" in name:
            yield from (name.replace("<name>", reward) for reward in reward_names(stage))
        else:
            yield name
    for name in evaluation.metrics if evaluation and stage.trains_policy else ():
        yield f"eval/{name.rpartition(':')[2]}"
