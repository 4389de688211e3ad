"""Calls a reward function of OpenRLHF, `reward_func(queries, prompts, labels)`."""

from __future__ import annotations

from typing import Any

from rewards import plugins
from rewards.foreign.functions import awaited, check_of
from rewards.registry import reward
from rewards.text import text_of


@reward("openrlhf", check=check_of("file.py:reward_func"))
async def reward_func(
    prompts: list, completions: list, function: str, label: str = "label", **columns: Any
) -> list[float]:
    """Returns the rewards of `function`.

    function: a function with the arguments `queries, prompts, labels` (file.py:reward_func). A
    query is the text of a prompt with that of its completion. It returns numbers or a tensor, or a
    dict with `rewards`. label: name of the column that holds the labels.
    """
    texts = [text_of(prompt) for prompt in prompts]
    queries = [
        prompt + text_of(completion) for prompt, completion in zip(texts, completions, strict=True)
    ]
    labels = columns.get(label, [None] * len(completions))
    result = await awaited(plugins.load(function, "function")(queries, texts, labels))
    result = result["rewards"] if isinstance(result, dict) else result
    values = result.tolist() if hasattr(result, "tolist") else list(result)
    return [float(value) for value in values]
