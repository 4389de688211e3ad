"""Calls a reward function of verl, `compute_score`, on the columns of verl's datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rewards import plugins
from rewards.foreign.functions import awaited
from rewards.registry import reward
from rewards.text import text_of

_TRUTH = {"data_source": "lighteval/MATH", "reward_model": {"style": "rule", "ground_truth": "4"}}
EXAMPLES = [
    {"prompt": "2 + 2?", "completion": "so \\boxed{4}", "score": 1.0, **_TRUTH},
    {"prompt": "2 + 2?", "completion": "so \\boxed{5}", "score": 0.0, **_TRUTH},
    {
        "prompt": "2 + 2?",
        "completion": "5, no, #### 4",
        "options": {"score": "numeric_answer"},
        "score": 1.0,
        **_TRUTH,
    },
]


def _check(score: str = "math", **_) -> None:
    plugins.load(score, "score")


@reward("verl", check=_check)
async def compute_score(
    prompts: list,
    completions: list,
    data_source: list,
    reward_model: list,
    extra_info: list | None = None,
    score: str = "math",
    options: dict | None = None,
) -> list[float | tuple[float, str] | None]:
    """Returns the scores of `score`, of the columns `data_source`, `reward_model` and `extra_info`.

    extra_info: column that may be absent.
    score: a function with the arguments `data_source, solution_str, ground_truth, extra_info` of
    verl (file.py:compute_score), or a reward of Duet, which gets the ground truth as `answer`.
    options: further keyword arguments of the function (verl's reward_kwargs).
    A function of verl returns a number, or a dict with `score`; its other entries go to the log.
    """
    function = plugins.load(score, "score")
    truths = [row.get("ground_truth") for row in reward_model]
    more = dict(options or {})
    if "solution_str" not in inspect.signature(function).parameters:
        return await awaited(
            function(prompts=prompts, completions=completions, answer=truths, **more)
        )
    infos = extra_info or [None] * len(completions)
    return [
        await _scored(function, source, completion, truth, info, more)
        for source, completion, truth, info in zip(
            data_source, completions, truths, infos, strict=True
        )
    ]


async def _scored(
    function: Callable[..., Any], source: Any, completion: Any, truth: Any, info: Any, more: dict
) -> float | tuple[float, str]:
    result = await awaited(
        function(
            data_source=source,
            solution_str=text_of(completion),
            ground_truth=truth,
            extra_info=info,
            **more,
        )
    )
    if not isinstance(result, dict):
        return float(result)
    rest = {key: value for key, value in result.items() if key != "score"}
    return (float(result["score"]), str(rest)) if rest else float(result["score"])
