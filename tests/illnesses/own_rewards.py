"""Rewards that make a run ill."""


def constant(prompts, completions):
    """Pays every completion the same."""
    return [0.5] * len(completions)


def pays_for_length(prompts, completions):
    """Pays for each character."""
    return [len(text) / 40 for text in completions]


def pays_for_ones(prompts, completions):
    """Pays for the digit 1, whatever the problem is."""
    return [text.count("1") / 4 for text in completions]


def sometimes_raises(prompts, completions, answer):
    """Raises where the completion is no number: the parser of the answer is not guarded."""
    return [float(int(text) == int(right)) for text, right in zip(completions, answer, strict=True)]


def misses_a_column(prompts, completions, answer):
    """Raises for a third of the problems."""
    if int(answer[0]) % 3 == 0:
        raise KeyError("solution")
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
