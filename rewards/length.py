"""Subtracts a penalty for each token, or for each token of difference from a target."""

from rewards.registry import reward

EXAMPLES = [
    {"prompt": "", "completion": "a b", "completion_lengths": 200, "score": -0.2},
    {
        "prompt": "",
        "completion": "a b",
        "completion_lengths": 2,
        "options": {"penalty": 0.5},
        "score": -1.0,
    },
    {
        "prompt": "",
        "completion": "a b",
        "completion_lengths": 100,
        "options": {"target": 100},
        "score": 0.0,
    },
    {
        "prompt": "",
        "completion": "a b",
        "completion_lengths": 90,
        "options": {"target": 100},
        "score": -0.01,
    },
    {
        "prompt": "",
        "completion": "a b",
        "completion_lengths": 90,
        "options": {"target": 100, "only_longer": True},
        "score": 0.0,
    },
    {
        "prompt": "",
        "completion": "a b",
        "completion_lengths": 9000,
        "options": {"floor": -1.0},
        "score": -1.0,
    },
]


def _check(penalty: float = 0.001, target: int | None = None, **_) -> None:
    if penalty < 0:
        raise ValueError(
            f"penalty={penalty} would pay for length; use a number that is not negative"
        )
    if target is not None and target < 0:
        raise ValueError(f"target={target}: use a number of tokens that is not negative")


@reward(check=_check)
def length(
    prompts: list,
    completions: list,
    completion_lengths: list[int],
    penalty: float = 0.001,
    target: int | None = None,
    only_longer: bool = False,
    floor: float | None = None,
) -> list[float]:
    """Returns -penalty * tokens, or with a target -penalty * |tokens - target|, but at least
    `floor`.

    completion_lengths: tokens of each completion, its stop token included; the run passes them.
    penalty: penalty per token, not negative.
    target: number of tokens without a penalty.
    only_longer: completions shorter than the target have no penalty.
    floor: lowest score.
    """
    scores = []
    for tokens in completion_lengths:
        excess = tokens if target is None else tokens - target
        distance = max(excess, 0) if only_longer else abs(excess)
        score = -penalty * distance if distance else 0.0
        scores.append(score if floor is None else max(score, floor))
    return scores
