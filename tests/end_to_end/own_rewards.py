"""Rewards of the runs in these tests."""

import os
import time


def digits(prompts, completions):
    """Share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def counted(prompts, completions):
    """As `digits`; every completion leaves a line in the file that the environment names: the
    process that asks for its score.
    """
    with open(os.environ["COUNTED"], "a") as file:
        file.write(f"{os.getppid()}\n" * len(completions))
    return digits(prompts, completions)


def seldom(prompts, completions):
    """1 where nearly all are digits, so that the rewards of many groups are all equal."""
    return [float(score > 0.8) for score in digits(prompts, completions)]


def faulty(prompts, completions, problem):
    """By the first operand of the problem: raises, hangs, gives NaN, or works."""
    kind = int(problem[0].split("+")[0]) % 4
    if kind == 0:
        raise KeyError("no such problem")
    if kind == 1:
        time.sleep(60)
    return [float("nan")] * len(completions) if kind == 2 else digits(prompts, completions)


def always_raises(prompts, completions):
    raise ZeroDivisionError("this one never works")


def needs_a_column(prompts, completions, difficulty):
    return [float(d) for d in difficulty]
