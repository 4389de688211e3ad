"""Compares the letter of the option that the completion chooses with the `answer` column."""

import re

from rewards.registry import reward
from rewards.text import boxed, text_of

EXAMPLES = [
    {"prompt": "A or B?", "completion": "so the answer is (B).", "answer": "B", "score": 1.0},
    {"prompt": "A or B?", "completion": "Answer: A", "answer": "B", "score": 0.0},
    {"prompt": "A or B?", "completion": "**Answer:** B", "answer": "B", "score": 1.0},
    {"prompt": "A or B?", "completion": "Thus \\boxed{\\text{B}}.", "answer": "B", "score": 1.0},
    {"prompt": "A or B?", "completion": "B", "answer": "B", "score": 1.0},
    {
        "prompt": "A or B?",
        "completion": "The answer is A. No, the answer is B.",
        "answer": "B",
        "score": 1.0,
    },
    {"prompt": "A or B?", "completion": "A good question", "answer": "A", "score": 0.0},
    {
        "prompt": "A or B?",
        "completion": "Answer: B",
        "answer": "B",
        "options": {"form": "answer is (X)"},
        "score": 0.0,
    },
    {"prompt": "An open question", "completion": "A", "answer": None, "score": None},
]

FORMS = ("any", "answer is (X)")
_OPEN = r"[\s*_$({\[\\\"'`]*"
_TEXT = r"(?:(?:text|textbf|mathrm|mathbf|boxed)\s*\{[\s({\[]*)?"
_LETTER = r"([A-Z])(?![A-Za-z0-9]|'[a-z])"
# "The answer is I think B" names B, and "the answer is I" the option I.
_SPEAKER = r"(?:am|believe|can|cannot|do|don|guess|have|suppose|think|will|would)\b"
_OPINION = r"(?:I\s+(?:believe|guess|suppose|think)\s+)?"
_NAMED = re.compile(
    rf"\b(?i:answer|choice|option)(?i:\s+is)?(?:\s*[*_]+)?\s*(?::|(?i:(?<=is)|(?<=is\*\*))){_OPEN}"
    rf"{_OPINION}(?i:option\s+)?{_TEXT}(?!I\s+{_SPEAKER}){_LETTER}"
)
_STRICT = re.compile(r"answer is \(?([A-J])")
_ALONE = re.compile(rf"^[\s*_$(\[]*{_LETTER}(?=[\s*_$).:\]]|$)[\s*_$).:\]]*$", re.MULTILINE)
_LEADING = re.compile(r"^[\s*_(\[]*([A-Z])[).:\]]")


def choice(text: str, form: str = "any") -> str | None:
    """Returns the letter of the option that a text chooses, or None.

    form: "answer is (X)" reads the letter A to J after the first "answer is" that has one, with or
    without the bracket, as the published check of MMLU-Pro does. "any" tries in this order: the
    last "answer is X", "Answer: X" or "the correct option is X"; the last box, even if it has no
    letter or several, which choose none; the last line that is a letter alone; a letter at the
    start with a bracket, full stop or colon after it, as in "B) 12".
    """
    if form == "answer is (X)":
        match = _STRICT.search(text)
        return match[1] if match else None
    if matches := _NAMED.findall(text):
        return matches[-1]
    inside = boxed(text)
    if inside is not None:
        letters = re.findall(rf"(?<![A-Za-z\\]){_LETTER}", inside)
        return letters[0] if len(letters) == 1 else None
    if matches := _ALONE.findall(text):
        return matches[-1]
    match = _LEADING.match(text)
    return match[1] if match else None


def _check(form: str = "any", **_) -> None:
    if form not in FORMS:
        raise ValueError(f"form is one of {', '.join(map(repr, FORMS))}, not {form!r}")


@reward(check=_check, answer=choice)
def choice_answer(
    prompts: list, completions: list, answer: list, form: str = "any"
) -> list[float | None]:
    """Returns 1.0 if the completion chooses the option with the letter `answer`, else 0.0; None
    where `answer` is None.

    answer: a letter, A to Z. form: how a completion names its choice, as in `choice`.
    """
    return [
        None if right is None else float(choice(text_of(completion), form) == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]
