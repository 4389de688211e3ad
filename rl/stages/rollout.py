"""One step of a stage: from demonstrations, from preferred pairs, or from prompts and rewards, to new weights.

N completions, P prompts of G each, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rewards import Scores
from rl.data.prepare import Stage
from rl.errors import ModelError
from rl.stages import rollouts
from rl.stages.dynamic_sampling import DynamicSampling
from rl.stages.rollouts import Rollouts
from rl.stages.update import _next, _update
from rl.training.batch import Batch
from rl.training.critic import VALUE_HEAD
from rl.training.flops import memory_share, rates
from rl.training.trainer import RunState, Trainer

if TYPE_CHECKING:
    from rl.run.state import Run


def rollout(run: Run, stage: Stage, trainer: Trainer, state: RunState, step: int) -> tuple[RunState, dict]:
    """Samples groups, scores them, and makes `updates_per_step` updates of whole groups each."""
    options, algorithm = stage.options, stage.algorithm
    done = trainer.done
    if trainer.values_while_sampling and run.generator.options.record_values:
        run.generator.value_by(state.critic.params[VALUE_HEAD])
    with laid_out(run) as laid, run.timeline.span("sampling"):
        found, metrics = _groups(run, stage)
        greedy = _greedy(run, stage, found) if algorithm.needs_greedy else None
    with run.timeline.span("batch"):
        batch = found.batch(run.config.max_length, replay=options.router_replay, values=trainer.values_while_sampling)
    if algorithm.mask_truncated:
        batch = batch.replace(mask=batch.mask * np.asarray([[c.finish != "length"] for _, c in found.flat], np.float32))

    with run.timeline.span("log-probabilities") as scoring:
        batch, inside = _scored(run, stage, trainer, state, batch, found)
    with run.timeline.span("waiting for rewards") as waiting:
        scores = found.scores.result()
    metrics |= laid | inside | {"time/logprob": scoring.seconds, "time/reward": waiting.seconds}
    sampled, layout = found.operations(trainer.operations), run.model.graph.layout
    metrics |= rates("sample", sampled, found.counts["tokens"], found.seconds, layout)
    metrics |= memory_share(found.counts["steps"] * run.generator.weight_bytes, found.seconds, layout)
    if trainer.done > done:
        metrics |= rates("logprob", trainer.done - done, batch.real, scoring.seconds, layout)

    with run.timeline.span("advantages"):
        batch = batch.without(~np.isfinite(scores.total))
        batch, per_sample, estimated = _with_advantages(run, stage, batch, found, scores, greedy)
    metrics |= estimated | {
        f"advantage/{name}": float(getattr(per_sample, name)()) for name in ("mean", "std", "min", "max")
    }
    stale = run.progress.version - batch.version[batch.mask != 0]
    metrics |= (
        {"async/staleness_mean": float(stale.mean()), "async/staleness_max": float(stale.max())} if stale.size else {}
    )

    critic_only = state.critic is not None and step <= algorithm.critic_warmup
    state, updated = _update(run, trainer, state, batch, critic_only=critic_only)
    if not critic_only and batch.mask.any():  # else there is nothing that the policy could have moved by
        run.progress.controls = algorithm.controlled_by_step(run.progress.controls, estimated, len(batch.mask))
    if not stale.any():  # weights that have moved since are another difference; `_scored` has compared the other tokens
        _check_difference(options.max_logp_diff, updated.get("sampler/logp_diff_mean"))
    if getattr(algorithm, "reference_every", 0) and step % algorithm.reference_every == 0:
        with run.timeline.span("new reference"):
            state = trainer.renew_reference(state, algorithm.reference_mix)
    with run.timeline.span("writing samples"):
        run.events.samples(rollouts.records(found, scores, per_sample, stage.name, step))
    metrics["perf/step_tflop"] = (sampled + trainer.done - done) / 1e12
    return state, rollouts.metrics(found, scores, drafted=run.config.generator.speculative > 0) | metrics | updated


@contextlib.contextmanager
def laid_out(run: Run) -> Iterator[dict[str, float]]:
    """Weights as `generator.rules` lay them out, while rollouts read them; gives the metrics of that, none without such rules."""
    if run.config.generator.rules is None:
        yield {}
        return
    with run.timeline.span("laying out weights") as span:
        run.generator.reshard_for_rollout()
    try:
        yield {"time/sync": span.seconds}
    finally:
        run.generator.release()


def _groups(run: Run, stage: Stage) -> tuple[Rollouts, dict]:
    """The groups of a step, and metrics of how they were chosen."""
    options, algorithm, progress = stage.options, stage.algorithm, run.progress
    params = rollouts.sampling_params(options.sampling, run.prepared.stop_ids, n=options.samples_per_prompt)

    def sample() -> tuple[Rollouts, list[int]]:
        rows = _next(run, stage, stage.problems.total)
        ids = range(progress.prompts, progress.prompts + len(rows))
        progress.prompts += len(rows)
        with run.timeline.span("data"):
            problems = stage.problems.take(rows)
        return rollouts.collect(run.generator, stage.runner, problems, params, ids, progress.version), rows

    if not algorithm.dynamic_batches:
        return sample()[0], {}
    sampling = DynamicSampling(algorithm.dynamic_batches, algorithm.dynamic_reward, stage.problems.take, stage.runner)
    found, left, metrics = sampling.fill(options.prompts_per_step, progress.carried, sample)
    # Routes are large: what is left over is not worth a checkpoint of them.
    progress.carried = [] if options.router_replay else left
    return found, metrics


def _greedy(run: Run, stage: Stage, found: Rollouts) -> np.ndarray:
    """float[P]: the reward of the greedy completion of each prompt."""
    params = rollouts.sampling_params(
        stage.options.sampling, run.prepared.stop_ids, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
    )
    return rollouts.collect(run.generator, stage.runner, found.problems, params, found.prompt_ids).scores.result().total


def _scored(
    run: Run, stage: Stage, trainer: Trainer, state: RunState, batch: Batch, found: Rollouts
) -> tuple[Batch, dict[str, float]]:
    """The batch with what the algorithm wants of the policy before the update, of the reference and of the critic; and metrics."""
    algorithm, exact, metrics = stage.algorithm, run.config.generator.exact, {}
    first, stale_NT = trainer.scores_first(exact=exact), _stale(batch, run.progress.version)
    current = batch  # with the log-probabilities of the policy as it is now
    if first or (stale_NT.any() and trainer.scores_stale(exact=exact)):
        old_logp, entropy = trainer.logprobs(state.policy.params, batch)
        current = batch.replace(old_logp=old_logp, entropy=entropy)
        batch = current if first else batch
        if stale_NT.any():
            _check_difference(stage.options.max_logp_diff, _difference(current, stale_NT))
    if exact:  # the generator gives the model's own, at the weights that sampled
        own = batch.sampler_logp
        batch = batch.replace(old_logp=np.where(stale_NT, algorithm.proximal(current), own) if stale_NT.any() else own)
    else:
        batch = batch.replace(old_logp=algorithm.proximal(batch))
    if state.reference is not None:
        # Another model: its routers choose themselves.
        with run.timeline.span("log-probabilities of the reference") as referring:
            batch = batch.replace(ref_logp=trainer.logprobs(state.reference, batch.replace(routes=None))[0])
        metrics["time/ref"] = referring.seconds
    if state.critic is not None:
        cut = [completion.finish == "length" for _, completion in found.flat]
        # What the generator has found ends before the last token of a completion.
        if batch.old_values is None or (algorithm.bootstrap_truncated and any(cut)):
            before, after = trainer.values(state, batch)
            batch = batch.replace(old_values=before, last_values=values_at_the_end(after, batch.mask, cut))
    return batch, metrics


def _stale(batch: Batch, version: int) -> np.ndarray:
    """Returns bool[N, T]: the tokens of the mask that a policy older than `version` sampled."""
    return (batch.mask != 0) & (batch.version != version)


def _difference(batch: Batch, stale_NT: np.ndarray) -> float | None:
    """Returns the mean of |old_logp - sampler_logp| over the tokens of the mask that are not stale; None without any."""
    fresh_NT = (batch.mask != 0) & ~stale_NT
    return float(np.abs(batch.old_logp - batch.sampler_logp)[fresh_NT].mean()) if fresh_NT.any() else None


def values_at_the_end(after_NT: np.ndarray, mask_NT: np.ndarray, cut_N) -> np.ndarray:
    """float[N]: the value after the last token of the mask where a completion was cut off, 0 where it ended by itself."""
    last_N = mask_NT.shape[1] - 1 - np.argmax(mask_NT[:, ::-1] != 0, axis=1)
    return np.where(cut_N, after_NT[np.arange(len(last_N)), last_N], 0.0)


def _with_advantages(
    run: Run, stage: Stage, batch: Batch, found: Rollouts, scores: Scores, greedy
) -> tuple[Batch, np.ndarray, dict]:
    """(the batch with advantages, their mean in each completion float[N], metrics)."""
    algorithm = stage.algorithm.at(run.progress.controls)
    if algorithm.needs_critic:
        advantages, returns, metrics = algorithm.advantages_per_token(
            scores.total, batch.old_logp, batch.ref_logp, batch.old_values, batch.mask, batch.last_values
        )
        batch = batch.replace(returns=returns.astype(np.float32), correct=algorithm.correct(scores.total, batch.mask))
    else:
        P, G = len(found.completions), stage.options.samples_per_prompt
        rewards, given, metrics = scores.total.reshape(P, G), {}, {}
        if algorithm.needs_each_reward:
            # Where a function failed there is no total, and the completion takes no part.
            rewards = np.where(np.isfinite(scores.total)[:, None], scores.rewards, np.nan).reshape(P, G, -1)
            given["weights"] = [weight for _, weight, _ in stage.runner.options.functions]
        if algorithm.needs_token_kl:
            given["mask"] = batch.mask.reshape(P, G, -1)
            if algorithm.kl_reward_coef:
                difference = np.where(batch.mask != 0, batch.old_logp - batch.ref_logp, 0.0)
                given["token_kl"] = difference.reshape(P, G, -1)
                metrics["kl/reward"] = float(difference.sum() / max(1, np.count_nonzero(batch.mask)))
        if greedy is not None:
            given["greedy"] = greedy
            metrics["reward/greedy"] = float(np.nanmean(greedy)) if np.isfinite(greedy).any() else float("nan")
        lengths = np.asarray([len(c.tokens) for _, c in found.flat]).reshape(P, G)
        advantages = algorithm.advantages(rewards, lengths, **given)
        advantages = advantages.reshape(P * G, *advantages.shape[2:])
    per_sample = advantages
    if advantages.ndim == 2:
        per_sample = advantages.sum(axis=1) / np.maximum((batch.mask != 0).sum(axis=1), 1)
    return batch.replace(advantages=advantages.astype(np.float32)), per_sample, metrics


def _check_difference(limit: float | None, found: float | None) -> None:
    if limit is not None and found is not None and not found <= limit:
        raise ModelError(
            f"the log-probabilities of generator and trainer differ by {found:.3g} a token in the mean, more than max_logp_diff "
            f"({limit:g}). Use `generator.exact: true`, `router_replay: true` or a wider dtype; the last checkpoint is from before"
        )
