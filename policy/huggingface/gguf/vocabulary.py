"""The tokenizer of a model as the fields of a GGUF file, in both directions.

Two kinds are known: byte-level BPE (`gpt2` in files) and BPE with byte fallback over texts whose
spaces are U+2581 (`llama`, the kind of sentencepiece).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from policy.huggingface.file_error import ModelFileError

SPACE = "\u2581"


class TokenType(IntEnum):
    """What a token is, as GGUF counts."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _split(pattern: str) -> dict[str, Any]:
    """Returns a pre-tokenizer that cuts a text by a regular expression."""
    cut = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [cut, _byte_level(False)]}


def _byte_level(by_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": by_regex,
    }


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}{_END}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_END}"
)
# Words by case: upper-case letters and then lower-case ones, one of both at least.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
)
_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(True),
    "default": _byte_level(True),
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(True)]},
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "qwen35": _split(_QWEN35),
    "gpt-4o": _split(_GPT4O),
}
"""How a text is cut before merges, by the name in files."""
_SAME_AS = {
    **dict.fromkeys(("llama3", "llama-v3", "lfm2", "falcon3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
    "minimax-m2": "gpt-4o",
}
_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a completion: end of sequence, of a turn, of a message."""


@dataclass(frozen=True)
class Vocabulary:
    """The fields of a tokenizer.

    kind: "gpt2" or "llama". pre: name of the pre-tokenizer. tokens, types: by id. merges: pairs,
    the first to be merged first. ids: of special tokens, by key of GGUF. adds_bos: whether every
    text begins with the beginning of sequence. prefix_space: whether a space is put before every
    text. chat_template: None: the model has none.
    """

    kind: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[TokenType]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int] = field(default_factory=dict)
    adds_bos: bool = False
    prefix_space: bool = False
    chat_template: str | None = None

    def add_to(self, writer: Any, size: int) -> None:
        """Adds the fields to a writer of the package gguf, with tokens up to `size`. Raises
        ModelFileError for a special token that the model has no embedding for."""
        missing = size - len(self.tokens)
        tokens = [*self.tokens, *(f"[PAD{len(self.tokens) + i}]" for i in range(missing))][:size]
        types = [*self.types, *[TokenType.UNUSED] * missing][:size]
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types([int(each) for each in types])
        if self.kind == "llama":
            writer.add_add_space_prefix(self.prefix_space)
        if self.kind == "llama" or not self.merges:
            writer.add_token_scores([-float(number) for number in range(len(tokens))])
        kept = set(tokens)
        merges = [f"{a} {b}" for a, b in self.merges if {a, b, a + b} <= kept]
        if merges:
            writer.add_token_merges(merges)
        for key, number in self.ids.items():
            if number >= size:
                raise ModelFileError(
                    f"tokenizer: {key} is {number}, and the model has embeddings for {size} tokens"
                )
            writer.add_uint32(f"tokenizer.ggml.{key}", number)
        writer.add_add_bos_token(self.adds_bos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def of_tokenizer(
    tokenizer: Mapping[str, Any],
    special: Mapping[str, str | None],
    stops: Sequence[int],
    chat_template: str | None,
) -> Vocabulary:
    """Returns the fields of a tokenizer.

    Args:
        tokenizer: the content of tokenizer.json.
        special: tokens by name (`bos_token`, ...), as tokenizer_config.json has them.
        stops: ids that end a completion, in the order of STOP_KEYS; files have no keys for more.
        chat_template: None: the model has none.

    Raises ModelFileError for a tokenizer of another kind.
    """
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise ModelFileError(
            f"tokenizer.json: GGUF is written for tokenizers of the type BPE, not {model.get('type')}"
        )
    kind, pre = _kind(tokenizer)
    numbers = dict(model["vocab"]) | {
        each["content"]: each["id"] for each in tokenizer["added_tokens"]
    }
    size = max(numbers.values()) + 1
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [TokenType.UNUSED] * size
    for token, number in numbers.items():
        tokens[number] = token
        is_byte = kind == "llama" and len(token) == 6 and token.startswith("<0x")
        types[number] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for each in tokenizer["added_tokens"]:
        control = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
        types[each["id"]] = control
    if kind == "llama" and model.get("unk_token") in numbers:
        types[numbers[model["unk_token"]]] = TokenType.UNKNOWN
    ids = {
        key: numbers[token]
        for name, key in _ID_KEYS.items()
        if (token := special.get(name)) is not None and token in numbers
    }
    ids |= dict(zip(STOP_KEYS, stops, strict=False))
    merges = [
        (each[0], each[1]) if isinstance(each, list) else tuple(each.split(" ", 1))
        for each in model["merges"]
    ]
    return Vocabulary(
        kind,
        pre,
        tokens,
        types,
        merges,
        ids,
        _adds_bos(tokenizer, special.get("bos_token")),
        _has_prefix_space(tokenizer),
        chat_template,
    )


def _kind(tokenizer: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (kind, name of the pre-tokenizer). Raises ModelFileError for others."""
    model = tokenizer["model"]
    if model.get("byte_fallback"):
        return "llama", "default"
    cut = tokenizer.get("pre_tokenizer")
    for name, known in PRE_TOKENIZERS.items():
        if _plain(cut) == _plain(known):
            _check_normalizer(tokenizer, name)
            return "gpt2", name
    if not model["merges"] and _plain(cut) == _plain(_byte_level(False)):
        return "gpt2", "gpt-2"  # single bytes, however a text is cut
    raise ModelFileError(
        "tokenizer.json: its pre-tokenizer has no name in GGUF that Duet knows "
        f"({', '.join(PRE_TOKENIZERS)})"
    )


def _check_normalizer(tokenizer: Mapping[str, Any], pre: str) -> None:
    """Raises ModelFileError for a normalizer with which texts would be other tokens: a file has the
    name of the pre-tokenizer alone."""
    normalizer = tokenizer.get("normalizer")
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
        normalizer = steps[0] if len(steps) == 1 else steps or None
    if normalizer != _normalizer(pre):
        raise ModelFileError(
            f"tokenizer.json: GGUF has no key for its normalizer, {json.dumps(normalizer)}"
        )


def _plain(cut: Any) -> Any:
    """Returns a pre-tokenizer without what changes no token."""
    if isinstance(cut, dict):
        return {
            key: _plain(value)
            for key, value in cut.items()
            if key not in ("trim_offsets", "invert") and value is not None
        }
    return [_plain(each) for each in cut] if isinstance(cut, list) else cut


def _adds_bos(tokenizer: Mapping[str, Any], bos: str | None) -> bool:
    """Whether the post-processor of a tokenizer begins each text with this token."""
    processors = [tokenizer.get("post_processor") or {}]
    processors += processors[0].get("processors", [])
    starts = (each.get("single") for each in processors if each.get("single"))
    return bos is not None and any(
        start[0].get("SpecialToken", {}).get("id") == bos for start in starts
    )


def _has_prefix_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a text begins with a space that it did not have."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = [normalizer, *normalizer.get("normalizers", [])]
    cut = tokenizer.get("pre_tokenizer") or {}
    by_cut = cut.get("type") == "Metaspace" and cut.get("prepend_scheme", "always") != "never"
    return by_cut or any(step.get("type") == "Prepend" for step in steps)


def tokenizer_json(fields: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Returns the content of tokenizer.json for the fields of a file, by key after
    "tokenizer.ggml.". Raises ModelFileError for a tokenizer of another kind."""
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"{path}: tokenizer.ggml.model: {kind} is not read; gpt2 and llama are"
        )
    tokens = list(fields["tokens"])
    types = list(fields.get("token_type") or [TokenType.NORMAL] * len(tokens))
    added = [
        _added(number, token, special=kind_of == TokenType.CONTROL)
        for number, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
        if kind_of in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    unused = {n for n, each in enumerate(types) if each == TokenType.UNUSED}
    vocabulary = {token: n for n, token in enumerate(tokens) if n not in unused}
    merges = _merges(fields, vocabulary, path)
    parts = _byte_level_parts(fields, path) if kind == "gpt2" else _fallback_parts(fields)
    unknown = fields.get("unknown_token_id")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[unknown] if kind == "llama" and unknown is not None else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": kind == "llama",
        "byte_fallback": kind == "llama",
        "ignore_merges": kind == "gpt2" and _pre(fields) == "llama-bpe",
        "vocab": vocabulary,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": _post_processor(fields, tokens, kind),
        "model": model,
    }


def _added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _pre(fields: Mapping[str, Any]) -> str:
    name = str(fields.get("pre") or "default")
    return _SAME_AS.get(name, name)


def _normalizer(pre: str) -> dict[str, Any] | None:
    """Returns the normalizer that goes with the name of a pre-tokenizer."""
    return {"type": "NFC"} if pre in ("qwen2", "qwen35") else None


def _byte_level_parts(fields: Mapping[str, Any], path: object) -> dict[str, Any]:
    name = _pre(fields)
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{path}: tokenizer.ggml.pre: {name} is not read; {', '.join(PRE_TOKENIZERS)} are. Name "
            "the tokenizer of the original model: tokenizer=org/name"
        )
    return {
        "normalizer": _normalizer(name),
        "pre_tokenizer": PRE_TOKENIZERS[name],
        "decoder": _byte_level(True),
    }


def _fallback_parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    prefix = bool(fields.get("add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _post_processor(
    fields: Mapping[str, Any], tokens: Sequence[str], kind: str | None
) -> dict[str, Any] | None:
    """Returns what begins a text with the beginning of sequence, where the file says so."""
    bos = fields.get("bos_token_id")
    if bos is None or not fields.get("add_bos_token", kind == "llama"):
        return None
    token = tokens[bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _merges(
    fields: Mapping[str, Any], vocabulary: Mapping[str, int], path: object
) -> list[list[str]]:
    """Returns the merges of a file, or those that its scores imply: every pair of tokens whose
    concatenation is a token, the one with the highest score first."""
    if "merges" in fields:
        return [each.split(" ", 1) for each in fields["merges"]]
    scores = fields.get("scores")
    if scores is None:
        raise ModelFileError(f"{path}: the tokenizer has neither merges nor scores")
    pairs = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return [[left, right] for *_, left, right in sorted(pairs)]
