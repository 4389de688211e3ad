"""Scores an answer with the scorer of its reasoning-gym task (package reasoning-gym, extra
`tasks`)."""

import functools
import importlib
import importlib.util
import json
from collections.abc import Callable

from rewards.registry import reward
from rewards.text import answer_span, text_of

_ENTRY = json.dumps({"question": "1 + 1 = ?", "answer": "2", "metadata": {}})
EXAMPLES = [
    {
        "prompt": "1 + 1 = ?",
        "completion": "2",
        "task": "basic_arithmetic",
        "entry": _ENTRY,
        "score": 1.0,
    },
    {
        "prompt": "1 + 1 = ?",
        "completion": "<think>1, 2</think><answer>2</answer>",
        "task": "basic_arithmetic",
        "entry": _ENTRY,
        "score": 1.0,
    },
    {
        "prompt": "1 + 1 = ?",
        "completion": "3",
        "task": "basic_arithmetic",
        "entry": _ENTRY,
        "score": 0.0,
    },
]


def _check(**_) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("reasoning-gym is not installed: pip install 'duet-rl[tasks]'")


def _prepare() -> None:
    importlib.import_module("reasoning_gym")  # slow; outside the deadline of the first call


@functools.lru_cache(maxsize=256)
def _scorer(task: str) -> Callable[..., float]:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(task)


@reward(check=_check, prepare=_prepare)
def reasoning_gym(
    prompts: list, completions: list, task: list[str], entry: list[str], pattern: str | None = None
) -> list[float]:
    """Returns the task's `score_answer`, 0 to 1, of the answer in the completion.

    task: column with the name of the task.
    entry: column with the problem, as the task's JSON text.
    pattern: regular expression whose group 1 is the answer. Without a pattern, the answer is the
    inside of the last
        `<answer>...</answer>`, else the text after the last `####`, else the full completion.
    """
    scores = []
    for completion, name, problem in zip(completions, task, entry, strict=True):
        answer = answer_span(text_of(completion), pattern)
        score = _scorer(name)(
            answer=None if answer is None else answer.strip(), entry=json.loads(problem)
        )
        scores.append(float(score))
    return scores
