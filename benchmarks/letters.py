"""The reward of benchmarks/grpo.py: cheap, and different for different completions."""

EXAMPLES = [
    {"prompt": "", "completion": "ab12", "score": 0.5},
    {"prompt": "", "completion": "", "score": 0.0},
]


def letters(prompts, completions, **_):
    """Returns the share of letters in the completion."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
