"""Soft overlong punishment: a penalty that grows over the last tokens before the limit (DAPO,
arXiv:2503.14476)."""

from rewards.registry import reward

EXAMPLES = [
    {"prompt": "", "completion": "", "completion_lengths": 80, "max_new_tokens": 100, "score": 0.0},
    {
        "prompt": "",
        "completion": "",
        "completion_lengths": 85,
        "max_new_tokens": 100,
        "score": -0.25,
    },
    {
        "prompt": "",
        "completion": "",
        "completion_lengths": 100,
        "max_new_tokens": 100,
        "score": -1.0,
    },
    {
        "prompt": "",
        "completion": "",
        "completion_lengths": 15,
        "options": {"limit": 20, "cache": 10},
        "score": -0.5,
    },
    {
        "prompt": "",
        "completion": "",
        "completion_lengths": 21,
        "options": {"limit": 20, "cache": 10},
        "score": -1.0,
    },
]


def _check(limit: int | None = None, cache: int | None = None, **_) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: give the longest completion, in tokens")
    if cache is not None and (cache < 1 or (limit is not None and cache > limit)):
        raise ValueError(f"cache={cache}: give a number of tokens from 1 to the limit")


@reward(check=_check)
def soft_overlong(
    prompts: list,
    completions: list,
    completion_lengths: list[int],
    max_new_tokens: int | None = None,
    limit: int | None = None,
    cache: int | None = None,
) -> list[float]:
    """Returns 0 up to limit - cache tokens, falls linearly to -1 at the limit, and stays at -1
    beyond it.

    completion_lengths: tokens of each completion; max_new_tokens: most tokens of a completion; the
    run passes both. limit: tokens, default max_new_tokens.
    cache: tokens over which the score falls, default a fifth of the limit (4096 of 20480 in the
    paper), at least 1.
    """
    most = max_new_tokens if limit is None else limit
    if most is None:
        raise ValueError(
            "soft_overlong needs the option `limit` if the run passes no max_new_tokens"
        )
    span = max(most // 5, 1) if cache is None else cache
    return [max(-1.0, min(0.0, (most - span - tokens) / span)) for tokens in completion_lengths]
