"""Lists the headline charts: their metrics, titles and notes, in the order of the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A metric of a chart. deviation: metric whose value is drawn as a band around the mean."""

    metric: str
    label: str
    deviation: str | None = None


@dataclass(frozen=True)
class Plan:
    """A headline chart. better: "up" or "down" if the first line has a direction. stacked: areas on each other.

    share: the values lie in 0..1. quiet: a chart of nothing but zeros is named in a line instead of being drawn. log:
    the scale is logarithmic if all values are positive, however little they span.
    """

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    better: str | None = None
    share: bool = False
    stacked: bool = False
    quiet: bool = False
    log: bool = False
    unit: str = ""


ACCURACY = "eval/greedy_accuracy"
PLANS: tuple[Plan, ...] = (
    Plan(
        "reward",
        "Reward",
        "Mean of the completions of a step.",
        (Line("reward/mean", "mean", "reward/std"),),
        "up",
    ),
    Plan("parts", "Reward by function", "Mean score of each function, before its weight.", (), "up"),
    Plan(
        "pairs",
        "Pairs ranked right",
        "Share of pairs in which the chosen answer scores higher.",
        (
            Line("rewards/accuracies", "policy"),
            Line("reward_model/accuracy", "reward model"),
            Line("kto/correct_side", "answers on the right side"),
        ),
        "up",
        share=True,
    ),
    Plan(
        "evaluation",
        "Evaluation",
        "Share of held-out problems solved; band: 95% interval.",
        (Line(ACCURACY, "greedy accuracy"),),
        "up",
        share=True,
    ),
    Plan(
        "signal",
        "Groups without signal",
        "Share of groups whose rewards are all equal. They teach nothing.",
        (Line("reward/frac_zero_std", "share of groups"),),
        share=True,
    ),
    Plan(
        "kl",
        "KL to the reference",
        "Estimated divergence from the reference model, in nats per token.",
        (Line("kl/ref", "kl/ref"), Line("kl/reward", "charged in the reward")),
    ),
    Plan(
        "entropy",
        "Entropy",
        "Mean entropy of the distribution of a token, in nats. Towards 0: the policy collapses.",
        (Line("entropy", "entropy"),),
    ),
    Plan(
        "length",
        "Completion length",
        "Tokens of a completion, its stop token included.",
        (Line("completion/mean_length", "mean"), Line("completion/max_length", "longest")),
        unit="tokens",
    ),
    Plan(
        "truncated",
        "Truncated completions",
        "Share that was cut at max_new_tokens.",
        (Line("completion/truncated_ratio", "share"),),
        "down",
        share=True,
        quiet=True,
    ),
    Plan(
        "clipped",
        "Clipped tokens",
        "Share of tokens whose probability ratio the loss clipped.",
        (
            Line("clip_ratio/region_mean", "both"),
            Line("clip_ratio/high_mean", "high"),
            Line("clip_ratio/low_mean", "low"),
        ),
        share=True,
        quiet=True,
    ),
    Plan(
        "mismatch",
        "Generator against trainer",
        "Absolute difference of the log-probabilities of sampled tokens, for the same weights.",
        (Line("sampler/logp_diff_mean", "mean"), Line("sampler/logp_diff_max", "largest")),
        "down",
        log=True,
    ),
    Plan(
        "gradient",
        "Gradient norm",
        "Before clipping.",
        (Line("optim/grad_norm", "policy"), Line("value/optim/grad_norm", "critic")),
    ),
    Plan(
        "rate",
        "Learning rate",
        "Of the updates of a step, by the formula in docs/configuration.md.",
        (Line("optim/lr", "policy"), Line("value/optim/lr", "critic")),
    ),
    Plan(
        "loss",
        "Loss",
        "Near 0 by construction under GRPO and PPO, where it means little.",
        (Line("loss", "loss"), Line("value/loss", "critic")),
        "down",
    ),
    Plan(
        "staleness",
        "Staleness",
        "Updates between the weights that sampled a token and those that train on it.",
        (Line("async/staleness_mean", "mean"), Line("async/staleness_max", "largest")),
        quiet=True,
        unit="updates",
    ),
    Plan(
        "faults",
        "Reward faults",
        "Scores that are missing because a function failed or ran out of time.",
        (Line("reward/faults", "faults"), Line("reward/timeouts", "timeouts"), Line("reward/retried", "retried")),
        "down",
        quiet=True,
    ),
    Plan(
        "media",
        "Pictures and sounds",
        "Of the prompts of a step, with repeats, and those that a tower encoded in it.",
        (Line("media/pictures", "in prompts"), Line("media/encoded", "encoded")),
    ),
    Plan(
        "media-seconds",
        "Seconds for pictures and sounds",
        "Encoding by the towers, and waiting for files to be decoded.",
        (Line("media/encode_seconds", "encoding"), Line("media/wait_seconds", "waiting")),
        "down",
        unit="s",
    ),
    Plan(
        "seconds",
        "Seconds of a step",
        "By part, on each other. Idle: the devices wait for the host.",
        (
            Line("time/sample", "sampling"),
            Line("time/update", "updates"),
            Line("time/logprob", "log-probabilities"),
            Line("time/reward", "waiting for rewards"),
            Line("time/reward_models", "reward models"),
            Line("time/sync", "resharding"),
            Line("time/idle", "idle"),
        ),
        "down",
        stacked=True,
        unit="s",
    ),
    Plan(
        "speed",
        "Tokens per second",
        "Per device.",
        (
            Line("perf/step_tokens_per_s", "full step"),
            Line("perf/sample_tokens_per_s", "sampling"),
            Line("perf/train_tokens_per_s", "updates"),
        ),
        "up",
        unit="tokens/s",
    ),
    Plan(
        "mfu",
        "Model FLOPs utilisation",
        "Share of the device's bfloat16 rate.",
        (
            Line("perf/mfu_step", "full step"),
            Line("perf/mfu_train", "updates"),
            Line("perf/mfu_sample", "sampling"),
            Line("perf/mfu_logprob", "log-probabilities"),
        ),
        "up",
        share=True,
    ),
    Plan("memory", "Memory", "As recorded by the run.", ()),
)
HEADLINES = tuple(dict.fromkeys(plan.lines[0].metric for plan in PLANS if plan.lines)) + ("time/step",)
BETTER = {line.metric: plan.better for plan in PLANS for line in plan.lines if plan.better} | {"time/step": "down"}
