"""Lists the headline charts: their metrics, titles and notes, in the order of the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChartLine:
    """A metric of a chart. deviation: metric whose value is drawn as a band around the mean."""

    metric: str
    label: str
    deviation: str | None = None


@dataclass(frozen=True)
class ChartPlan:
    """A headline chart. better: "up" or "down" if the first line has a direction. stacked: areas on
    each other.

    share: the values lie in 0..1. quiet: a chart of nothing but zeros is named in a line instead of
    being drawn. log: the scale is logarithmic if all values are positive, however little they span.
    """

    key: str
    title: str
    note: str
    lines: tuple[ChartLine, ...]
    better: str | None = None
    share: bool = False
    stacked: bool = False
    quiet: bool = False
    log: bool = False
    unit: str = ""


ACCURACY = "eval/greedy_accuracy"
PLANS: tuple[ChartPlan, ...] = (
    ChartPlan(
        "reward",
        "Reward",
        "Mean of the completions of a step.",
        (ChartLine("reward/mean", "mean", "reward/std"),),
        "up",
    ),
    ChartPlan(
        "parts", "Reward by function", "Mean score of each function, before its weight.", (), "up"
    ),
    ChartPlan(
        "sources",
        "By source",
        "Mean reward of the completions of each source of the data; without rewards, the mean "
        "negative log-probability of its tokens.",
        (),
    ),
    ChartPlan(
        "pairs",
        "Pairs ranked right",
        "Share of pairs in which the chosen answer scores higher.",
        (
            ChartLine("rewards/accuracies", "policy"),
            ChartLine("reward_model/accuracy", "reward model"),
            ChartLine("kto/correct_side", "answers on the right side"),
            ChartLine("held_out/rewards/accuracies", "policy, held-out rows"),
            ChartLine("held_out/reward_model/accuracy", "reward model, held-out rows"),
            ChartLine("held_out/kto/correct_side", "answers on the right side, held-out rows"),
        ),
        "up",
        share=True,
    ),
    ChartPlan(
        "evaluation",
        "Evaluation",
        "Share of held-out problems solved; band: 95% interval.",
        (ChartLine(ACCURACY, "greedy accuracy"),),
        "up",
        share=True,
    ),
    ChartPlan(
        "signal",
        "Groups without signal",
        "Share of groups whose rewards are all equal. They teach nothing.",
        (ChartLine("reward/frac_zero_std", "share of groups"),),
        share=True,
    ),
    ChartPlan(
        "kl",
        "KL to the reference",
        "Estimated divergence from the reference model, in nats per token.",
        (ChartLine("kl/ref", "kl/ref"), ChartLine("kl/reward", "charged in the reward")),
    ),
    ChartPlan(
        "entropy",
        "Entropy",
        "Mean entropy of the distribution of a token, in nats. Towards 0: the policy collapses.",
        (ChartLine("entropy", "entropy"),),
    ),
    ChartPlan(
        "length",
        "Completion length",
        "Tokens of a completion, its stop token included.",
        (
            ChartLine("completion/mean_length", "mean"),
            ChartLine("completion/max_length", "longest"),
        ),
        unit="tokens",
    ),
    ChartPlan(
        "truncated",
        "Truncated completions",
        "Share that was cut at max_new_tokens.",
        (ChartLine("completion/truncated_ratio", "share"),),
        "down",
        share=True,
        quiet=True,
    ),
    ChartPlan(
        "clipped",
        "Clipped tokens",
        "Share of tokens whose probability ratio the loss clipped.",
        (
            ChartLine("clip_ratio/region_mean", "both"),
            ChartLine("clip_ratio/high_mean", "high"),
            ChartLine("clip_ratio/low_mean", "low"),
        ),
        share=True,
        quiet=True,
    ),
    ChartPlan(
        "mismatch",
        "Generator against trainer",
        "Absolute difference of the log-probabilities of sampled tokens, for the same weights.",
        (
            ChartLine("sampler/logp_diff_mean", "mean"),
            ChartLine("sampler/logp_diff_max", "largest"),
        ),
        "down",
        log=True,
    ),
    ChartPlan(
        "gradient",
        "Gradient norm",
        "Before clipping.",
        (ChartLine("optim/grad_norm", "policy"), ChartLine("value/optim/grad_norm", "critic")),
    ),
    ChartPlan(
        "rate",
        "Learning rate",
        "Of the updates of a step, by the formula in docs/configuration.md.",
        (ChartLine("optim/lr", "policy"), ChartLine("value/optim/lr", "critic")),
    ),
    ChartPlan(
        "loss",
        "Loss",
        "Near 0 by construction under GRPO and PPO, where it means little.",
        (
            ChartLine("loss", "loss"),
            ChartLine("held_out/loss", "held-out rows"),
            ChartLine("value/loss", "critic"),
        ),
        "down",
    ),
    ChartPlan(
        "staleness",
        "Staleness",
        "Updates between the weights that sampled a token and those that train on it.",
        (ChartLine("async/staleness_mean", "mean"), ChartLine("async/staleness_max", "largest")),
        quiet=True,
        unit="updates",
    ),
    ChartPlan(
        "faults",
        "Reward faults",
        "Scores that are missing because a function failed or ran out of time.",
        (
            ChartLine("reward/faults", "faults"),
            ChartLine("reward/timeouts", "timeouts"),
            ChartLine("reward/retried", "retried"),
        ),
        "down",
        quiet=True,
    ),
    ChartPlan(
        "media",
        "Pictures and sounds",
        "Of the prompts of a step, with repeats, and those that a tower encoded in it.",
        (ChartLine("media/pictures", "in prompts"), ChartLine("media/encoded", "encoded")),
    ),
    ChartPlan(
        "media-seconds",
        "Seconds for pictures and sounds",
        "Encoding by the towers, and waiting for files to be decoded.",
        (ChartLine("media/encode_seconds", "encoding"), ChartLine("media/wait_seconds", "waiting")),
        "down",
        unit="s",
    ),
    ChartPlan(
        "seconds",
        "Seconds of a step",
        "By part, on each other. Idle: the devices wait for the host.",
        (
            ChartLine("time/sample", "sampling"),
            ChartLine("time/update", "updates"),
            ChartLine("time/logprob", "log-probabilities"),
            ChartLine("time/reward", "waiting for rewards"),
            ChartLine("time/reward_models", "reward models"),
            ChartLine("time/sync", "resharding"),
            ChartLine("time/idle", "idle"),
        ),
        "down",
        stacked=True,
        unit="s",
    ),
    ChartPlan(
        "speed",
        "Tokens per second",
        "Per device.",
        (
            ChartLine("perf/step_tokens_per_s", "full step"),
            ChartLine("perf/sample_tokens_per_s", "sampling"),
            ChartLine("perf/train_tokens_per_s", "updates"),
        ),
        "up",
        unit="tokens/s",
    ),
    ChartPlan(
        "mfu",
        "Model FLOPs utilisation",
        "Share of the device's bfloat16 rate.",
        (
            ChartLine("perf/mfu_step", "full step"),
            ChartLine("perf/mfu_train", "updates"),
            ChartLine("perf/mfu_sample", "sampling"),
            ChartLine("perf/mfu_logprob", "log-probabilities"),
        ),
        "up",
        share=True,
    ),
    ChartPlan("memory", "Memory", "As recorded by the run.", ()),
)
HEADLINES = tuple(dict.fromkeys(plan.lines[0].metric for plan in PLANS if plan.lines)) + (
    "time/step",
)
BETTER = {line.metric: plan.better for plan in PLANS for line in plan.lines if plan.better} | {
    "time/step": "down"
}
