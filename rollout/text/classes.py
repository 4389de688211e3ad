"""Token classes of the n-gram table: tokens that spell the same word (Engram, arXiv 2601.07372,
section 2.2)."""

from __future__ import annotations

import numpy as np

from rollout.text.interface import Tokenizer

_LONE_SPACE = "\ue000"  # from the private use area, so that it occurs in no text


def token_classes(tokenizer: Tokenizer, size: int) -> tuple[np.ndarray, int]:
    """Returns (int32[size]: the class of each token id, number of classes). Classes are numbered by
    their first tokens.

    Two tokens have the same class if their texts are equal after normalisation: NFKC and NFD, no
    accents, lower case, each run of white space as one space, stripped unless it is a single space.
    A token that is part of a character has a class of its own. A text that normalises to nothing is
    compared as it is. Ids past the tokenizer's have the class of id 0.
    """
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    classes = np.zeros(size, np.int32)
    for token in range(min(size, len(tokenizer))):
        text = tokenizer.decode([token], skip_special_tokens=False)
        broken = "\ufffd" in text
        spelling = (
            tokenizer.convert_ids_to_tokens(token)
            if broken
            else normalizer.normalize_str(text) or text
        )
        classes[token] = numbers.setdefault(spelling, len(numbers))
    return classes, len(numbers)


def _normalizer():
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
