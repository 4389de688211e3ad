"""Classes of tokens that are one word in different spellings, for memories of n-grams (arXiv 2601.07372, section 2.2)."""

from __future__ import annotations

import numpy as np

_LONE_SPACE = "\ue000"  # of the private use area, so that no text holds it


def token_classes(tokenizer, size: int) -> tuple[np.ndarray, int]:
    """(int32[size]: the class of each token id, number of classes), in the order of their first tokens.

    Two tokens are of one class when their texts agree after NFKC and NFD, without accents, in lower case, with runs of white space
    as one space, and stripped, unless nothing but a space is left. A token that is no whole text (part of a character) stands
    for itself, and a text of which nothing is left for its own spelling. Ids past the tokenizer's are of the class of id 0.
    """
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    found = np.zeros(size, np.int32)
    for token in range(min(size, len(tokenizer))):
        text = tokenizer.decode([token], skip_special_tokens=False)
        broken = "\ufffd" in text
        spelling = tokenizer.convert_ids_to_tokens(token) if broken else normalizer.normalize_str(text) or text
        found[token] = numbers.setdefault(spelling, len(numbers))
    return found, len(numbers)


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
