"""Checks the instructions of an IFEval prompt (arXiv 2311.07911)."""

import importlib.util
from collections.abc import Iterator, Mapping

from rewards.benchmarks import ifeval_rules
from rewards.registry import reward
from rewards.text import text_of

_NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
_BOTH = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
}
EXAMPLES = [
    {"prompt": "No commas.", "completion": "One two.", **_NO_COMMA, "score": 1.0},
    {"prompt": "No commas.", "completion": "One, two.", **_NO_COMMA, "score": 0.0},
    {"prompt": "Both.", "completion": "One two.", **_BOTH, "score": 0.0},
    {
        "prompt": "Both.",
        "completion": "One two.",
        **_BOTH,
        "options": {"level": "instruction"},
        "score": 0.5,
    },
    {
        "prompt": "Both.",
        "completion": 'Here, it is:\n"One two."',
        **_BOTH,
        "options": {"mode": "loose"},
        "score": 1.0,
    },
    {"prompt": "A row of other data", "completion": "x", "instruction_id_list": None,
     "kwargs": None, "score": None},
]  # fmt: skip

LEVELS = ("prompt", "instruction")
MODES = ("strict", "loose")


def _check(level: str = "prompt", mode: str = "strict", **_) -> None:
    if level not in LEVELS:
        raise ValueError(f"level is 'prompt' or 'instruction', not {level!r}")
    if mode not in MODES:
        raise ValueError(f"mode is 'strict' or 'loose', not {mode!r}")
    if importlib.util.find_spec("langdetect") is None:
        raise ValueError("langdetect is not installed: pip install 'duet-rl[eval]'")


def _prepare() -> None:
    ifeval_rules.language("This loads the profiles of all languages.")


@reward(check=_check, prepare=_prepare)
def ifeval(
    prompts: list,
    completions: list,
    instruction_id_list: list,
    kwargs: list,
    level: str = "prompt",
    mode: str = "strict",
) -> list[float | None]:
    """Returns 1.0 if the completion follows all instructions of its prompt, else 0.0; None where
    there are none.

    instruction_id_list: names of instructions, as `keywords:existence`. kwargs: the arguments of
    each, in the same order; null counts as absent.
    level: "instruction" returns the share of the instructions that are followed. mode: "loose" also
    accepts the text without its first line, its last line or both, each also without asterisks.
    A text up to `</think>` does not count. Raises ValueError for an instruction that IFEval does
    not have.
    """
    scores: list[float | None] = []
    for completion, names, arguments in zip(completions, instruction_id_list, kwargs, strict=True):
        if not names:
            scores.append(None)
            continue
        text = text_of(completion).rpartition("</think>")[2]
        followed = [
            _follows(name, text, given or {}, mode)
            for name, given in zip(names, arguments, strict=True)
        ]
        share = sum(followed) / len(followed)
        scores.append(share if level == "instruction" else float(all(followed)))
    return scores


def _follows(name: str, text: str, given: Mapping[str, object], mode: str) -> bool:
    texts = [text] if mode == "strict" else _variants(text)
    return any(ifeval_rules.follows(name, each, given) for each in texts)


def _variants(text: str) -> Iterator[str]:
    """Yields the texts that the loose mode accepts."""
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    yield from parts
    yield from (part.replace("*", "") for part in parts)
