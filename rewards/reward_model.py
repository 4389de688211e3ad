"""Returns the score of a trained reward model. The run computes it on its devices after all
completions are sampled."""

from rewards.registry import reward

EXAMPLES = [
    {"prompt": "", "completion": "a", "reward_model_scores": {"runs/rm/export": 1.5}, "score": 1.5},
    {
        "prompt": "",
        "completion": "b",
        "reward_model_scores": {"runs/rm/export": -0.25, "other": 3.0},
        "score": -0.25,
    },
    {
        "prompt": "",
        "completion": "c",
        "reward_model_scores": {"other": 3.0},
        "score": 3.0,
        "options": {"source": "other"},
    },
]
for example in EXAMPLES:
    example.setdefault("options", {"source": "runs/rm/export"})


@reward
def reward_model(
    prompts: list, completions: list, reward_model_scores: list[dict[str, float]], source: str
) -> list[float]:
    """Returns the scores of the model `source`.

    reward_model_scores: for each completion, source -> score; the run passes them.
    source: a sequence classification model with one label: its directory, its name on the Hugging
    Face hub (org/name),
        or an earlier stage `reward_model` of the run.
    """
    return [scores[source] for scores in reward_model_scores]
