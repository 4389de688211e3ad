"""The sequences whose log-probabilities an export compares before it appears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.records import samples

if TYPE_CHECKING:
    from policy.model import Model

COUNT = 4
LENGTH = 64
"""Most tokens of a sequence."""
_TEXTS = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "What is 17 * 23? Think step by step: 17 * 20 = 340, 17 * 3 = 51, so the answer is 391.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
    "Es war einmal ein K\u00f6nig, der hatte drei S\u00f6hne. \u6625\u7720\u4e0d\u89c9\u6653",
)


def of_run(run: Path, model: Model, tokenizer: Any) -> list[list[int]]:
    """Returns COUNT sequences: the first samples of different prompts that the run has kept, with
    their prompts, and texts of this file where it kept fewer."""
    kept = _kept(run, model.config.vocab_size, tokenizer)
    return [*kept, *of_tokenizer(model, tokenizer)[len(kept) :]]


def of_tokenizer(model: Model, tokenizer: Any) -> list[list[int]]:
    """Returns COUNT texts as token ids; without a tokenizer, sequences of small ids."""
    encode = tokenizer.encode if tokenizer is not None else lambda text: ()
    size = model.config.vocab_size
    return [_fitting(encode(text), size, number) for number, text in enumerate(_TEXTS)]


def _kept(run: Path, vocabulary: int, tokenizer: Any) -> list[list[int]]:
    """Returns at most COUNT samples of different prompts; none if the files cannot be read."""
    result: dict[str, list[int]] = {}
    try:
        for sample in samples.read(run):
            prompt = sample["prompt"]
            if not isinstance(prompt, str):
                continue
            ids = [*tokenizer.encode(prompt, add_special_tokens=False)[-LENGTH // 2 :]]
            ids = [each for each in [*ids, *sample["tokens"]] if each < vocabulary][:LENGTH]
            if len(ids) > 1:
                result.setdefault(prompt, ids)
            if len(result) == COUNT:
                break
    except (OSError, ValueError, KeyError, TypeError):
        return list(result.values())
    return list(result.values())


def _fitting(ids: Sequence[int], vocabulary: int, number: int) -> list[int]:
    """Returns the ids that the model has an embedding for. Of a text with fewer than two, numbers
    that differ from text to text."""
    fitting = [each for each in ids if each < vocabulary][:LENGTH]
    return fitting if len(fitting) > 1 else [(number + i) % vocabulary for i in range(8)]
