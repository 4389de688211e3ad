"""Calls a reward function of Tunix, `(prompts, completions, **columns)`, which reads texts."""

from __future__ import annotations

import inspect
from typing import Any

from rewards import plugins
from rewards.foreign.functions import check_of
from rewards.registry import reward
from rewards.text import text_of


@reward("tunix", check=check_of("file.py:check_answer"))
def reward_fn(
    prompts: list, completions: list, function: str, **columns: Any
) -> list[float | None]:
    """Returns the scores of `function`, which gets prompts and completions as texts.

    function: file.py:check_answer; or with `verl_compatible` of Tunix a function with the arguments
    `solution_str, ground_truth`, of which the second is in the column `reward_model`.
    """
    called = plugins.load(function, "function")
    texts = [text_of(completion) for completion in completions]
    parameters = inspect.signature(called).parameters
    if "ground_truth" in parameters:
        truths = [row["ground_truth"] for row in columns["reward_model"]]
        return [float(called(text, truth)) for text, truth in zip(texts, truths, strict=True)]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        columns = {name: values for name, values in columns.items() if name in parameters}
    scores = called(prompts=[text_of(prompt) for prompt in prompts], completions=texts, **columns)
    return [None if score is None else float(score) for score in scores]
