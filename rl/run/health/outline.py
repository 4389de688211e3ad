"""Explains a configuration: the loss of each stage with its numbers, batch arithmetic, and what
differs from the defaults.

Imports no jax.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import rl.algorithms
from policy.adapter_spec import FULL_TRAINING_RATE
from rl.algorithms._protocols import TrainedLoss
from rl.config import changes
from rl.config.run import RunConfig
from rl.config.stage import StageOptions
from rl.data.inspect.source import random_weights
from rl.stages import algorithm_of, kind_of

_AGGREGATION = {
    "token": "mean over all tokens of the update",
    "sequence": "mean over the completions of their token means",
    "sequence_sum": "mean over the completions of their token sums",
    "constant": "sum over all tokens / (completions x max_length)",
    "prompt": "mean over the prompts of their token means",
}
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
"""Names of optimizers that are written in capitals."""
_SCALE = {
    "group": "(r - mean of the group) / (std of the group + {std_eps:g})",
    "batch": "(r - mean of the group) / (std of the batch + {std_eps:g})",
    "none": "r - mean of the group",
    "others": "(r - mean of the others) / (std of the others + {std_eps:g})",
}
_KL = {"k1": "-d", "k2": "d^2 / 2", "k3": "exp(d) - d - 1", "unbiased": "R (exp(d) - d - 1)"}


_DIVERGENCE = {
    "forward": "KL(q || p)",
    "reverse": "KL(p || q)",
    "jsd": "the Jensen-Shannon divergence of q and p with weight {beta:g} of q",
}


def lines(config: RunConfig) -> Iterator[str]:
    """Yields the explanation of a configuration."""
    weights = (
        f"random weights (seed {config.seed})"
        if random_weights(config)
        else "the weights of this model"
    )
    yield f"model {config.model.source}: starts from {weights}; computes in {config.model.dtype}"
    yield (
        "random: order of the data, every sampled token, and new weights; all follow from seed "
        f"{config.seed}"
    )
    for index in range(len(config.stages)):
        yield from _stage(config, index)
    for change in config.changes:
        yield from changes.notes(config, *change.place)


def _stage(config: RunConfig, index: int) -> Iterator[str]:
    stage = config.stages[index]
    name = config.stage_names[index]
    algorithm = algorithm_of(stage)
    samples = kind_of(stage).trains_on_rollouts
    sequences = stage.prompts_per_step * (stage.samples_per_prompt if samples else 1)
    unit = "completions" if samples else "rows"
    yield f"== {name}: {_first_sentence(algorithm)}"
    factors = (
        f"{stage.prompts_per_step} prompts x {stage.samples_per_prompt} samples = "
        if samples
        else ""
    )
    per_update = sequences // stage.updates_per_step
    updates = (
        f"{stage.updates_per_step} update{'s' * (stage.updates_per_step > 1)} of {per_update:,}"
    )
    yield (
        f"  step     {factors}{sequences:,} {unit}, {updates}; at most "
        f"{sequences * config.max_length:,} tokens"
    )
    until = f", or until {stage.until.metric} reaches its bound" if stage.until else ""
    yield f"  in all   {_in_all(stage, sequences, unit, samples)}{until}"
    if settings := config.rewards_of(stage) if samples else None:
        yield (
            "  reward   r = "
            f"{' + '.join(f'{each.weight:g} {each.name}' for each in settings.functions)}"
        )
    yield from (
        f"  {text}" for text in _loss(algorithm, stage.sampling.temperature if samples else 1.0)
    )
    optimizer = stage.optimizer
    warm = (
        f", over the first {optimizer.warmup_steps} updates from 0"
        if optimizer.warmup_steps
        else ""
    )
    clip = f"; gradients are clipped to norm {optimizer.clip_norm:g}" if optimizer.clip_norm else ""
    name = _OPTIMIZERS.get(optimizer.name, optimizer.name.capitalize())
    yield f"  {name:8} learning rate {optimizer.learning_rate:g}, {optimizer.schedule}{warm}{clip}"
    yield from _adapter(config, stage)
    changed = ", ".join(_changed(algorithm))
    yield f"  changed  {changed or 'nothing: every option of the algorithm has its default'}"


def _adapter(config: RunConfig, stage: StageOptions) -> Iterator[str]:
    """Yields what of the policy learns, where the model has an adapter."""
    adapter = config.model.adapter
    if adapter is None:
        return
    if stage.trains == "weights":
        yield "  trains   the weights, before they have an adapter"
        return
    kind = "DoRA" if adapter.dora else "LoRA"
    small = stage.optimizer.name == "adamw" and stage.optimizer.learning_rate <= FULL_TRAINING_RATE
    usual = "; the rate looks like one for all weights (docs/adapters.md)" if small else ""
    yield f"  trains   the adapter ({kind}, rank {adapter.rank}), and no weights{usual}"


def _in_all(stage: StageOptions, sequences: int, unit: str, samples: bool) -> str:
    if stage.steps is None:
        return f"{stage.epochs:g} epochs of the rows (`rl-train --check` says the steps)"
    total = stage.steps * sequences
    sampled = (
        f", at most {total * stage.sampling.max_new_tokens:,} sampled tokens" if samples else ""
    )
    return f"{stage.steps:,} steps, {total:,} {unit}{sampled}"


def _advantage(algorithm: Any) -> Iterator[str]:
    """Yields the advantage of a token of a policy gradient, as formulas."""
    of_rewards = True
    name = "A"
    if algorithm.name == "opd":
        of_rewards = algorithm.reward_coef > 0
        name = "A_r"
        rewards = f" + {algorithm.reward_coef:g} A_r" if of_rewards else ""
        yield f"A = {algorithm.teacher_coef:g} (log q - old log p){rewards}, q: the teacher"
    if of_rewards and algorithm.combine == "sum":
        yield f"{name} = {_SCALE[algorithm.scale].format(std_eps=algorithm.std_eps)}"


def _loss(algorithm: Any, temperature: float) -> Iterator[str]:
    """Yields the loss as a formula where it is the standard one, otherwise the description of the
    algorithm's options.
    """
    if algorithm.name == "sft" and algorithm.loss_type == "nll":
        yield "loss     L = mean of -log p(token) over the tokens that are trained on"
        return
    if algorithm.name == "dpo" and algorithm.loss_type == "sigmoid":
        smooth = algorithm.label_smoothing
        yield "loss     L = " + (
            f"-{1 - smooth:g} log sigmoid(m) - {smooth:g} log sigmoid(-m)"
            if smooth
            else "-log sigmoid(m)"
        )
        yield (
            f"         m = {algorithm.beta:g} (w - l); w, l: log p - log p_ref of the chosen "
            "and the rejected answer"
        )
        return
    if algorithm.name == "gkd":
        tau = temperature if algorithm.temperature is None else algorithm.temperature
        yield (
            f"loss     L = {_DIVERGENCE[algorithm.divergence].format(beta=algorithm.beta)}, "
            f"{_AGGREGATION[algorithm.aggregation]}"
        )
        yield f"         p: the policy, q: the teacher, at temperature {tau:g}"
        return
    if algorithm.name not in ("grpo", "dapo", "dr_grpo", "opd"):
        options = [
            f"{each.name}: {getattr(algorithm, each.name)}"
            for each in dataclasses.fields(algorithm)
        ]
        yield f"loss     see docs/algorithms.md, with {', '.join(options)}"
        return
    low = algorithm.epsilon
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    kl = f" + {algorithm.kl_coef:g} KL" if algorithm.kl_coef else ""
    entropy = f" - {algorithm.entropy_coef:g} H" if algorithm.entropy_coef else ""
    mean = _AGGREGATION[algorithm.aggregation]
    yield f"loss     L = -min(R A, clip(R, {1 - low:g}, {1 + high:g}) A){kl}{entropy}, {mean}"
    ratio = "of a token" if algorithm.ratio == "token" else f"({algorithm.ratio})"
    yield f"         R = exp(log p - old log p) {ratio}, at temperature {temperature:g}"
    yield from (f"         {text}" for text in _advantage(algorithm))
    if algorithm.kl_coef:
        yield f"         KL = {_KL[algorithm.kl]}, d = log p_ref - log p"
    others = (
        "delta",
        "dual_clip",
        "correction",
        "rejection",
        "off_policy_delta",
        "entropy_target",
        "top_entropy",
    )
    if used := [
        f"{key}: {getattr(algorithm, key)}" for key in others if getattr(algorithm, key) is not None
    ]:
        yield f"         also {', '.join(used)} (docs/algorithms.md)"


def _changed(algorithm: TrainedLoss) -> list[str]:
    """Returns the options that differ from the algorithm's defaults."""
    default = rl.algorithms.get(algorithm.name)
    pairs = (
        (each.name, getattr(algorithm, each.name), getattr(default, each.name))
        for each in dataclasses.fields(default)
    )
    return [f"{name} {value} (default {usual})" for name, value, usual in pairs if value != usual]


def _first_sentence(algorithm: TrainedLoss) -> str:
    text = inspect.getdoc(inspect.getmodule(type(algorithm))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")
