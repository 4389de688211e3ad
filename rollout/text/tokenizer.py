"""Tokenizers: two that are built in code, and any Hugging Face directory.

The built-in ones are ordinary `PreTrainedTokenizerFast` objects: `save_pretrained` writes a
directory that `AutoTokenizer` loads. Code in a tokenizer's directory is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.text.interface import Tokenizer
from rollout.text.spelling import INCOMPLETE, decode_after, encode_after, is_byte

if TYPE_CHECKING:
    from tokenizers import decoders, models, pre_tokenizers

_MOST_CUT = 4  # tokens of a character that are left of a stop string, and a margin
SPECIALS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
"""Ids 0 to 7 of the built-in tokenizers."""

BUILT_IN = ("bytes", "characters")

# Turns of the assistant end with the end-of-sequence token, which stops generation; other turns end
# with <|end|>.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# In front of the template of a model that reads pictures or sounds: the text of a content with
# parts.
_PARTS = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- elif part['type'] in written -%}{{- written[part['type']] -}}
{%- else -%}{{- raise_exception('the model does not read parts of type ' + part['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""


@dataclass(frozen=True)
class MediaTokens:
    """What a built-in tokenizer needs for a model that reads pictures or sounds.

    names: attribute of the tokenizer -> special token, such as `image_token`, in the order of their
    ids.
    written: kind of a part ("image", "audio") -> the text that the chat template writes for it.
    """

    names: Mapping[str, str]
    written: Mapping[str, str]

    @property
    def chat_template(self) -> str:
        """Returns the chat template of the built-in tokenizers for messages with parts."""
        lines = CHAT_TEMPLATE.replace("message['content']", "text_of(message['content'])")
        return f"{{%- set written = {json.dumps(dict(self.written))} -%}}\n{_PARTS}{lines}"


def load_tokenizer(
    source: str | Path,
    alphabet: str | None = None,
    chat_template: str | Path | None = None,
    media: MediaTokens | None = None,
) -> Tokenizer:
    """Builds or loads a tokenizer.

    Args:
        source: `characters`, `bytes`, or a directory with a tokenizer.
        alphabet: the characters that `characters` knows.
        chat_template: file of a jinja template that replaces the tokenizer's own.
        media: special tokens of pictures and sounds, which a built-in tokenizer gets after all
        others.

    Raises:
        ValueError: the directory has no tokenizer, the tokenizer has no end-of-sequence token, or
        the source has no use for an
            alphabet, or needs one.
    """
    if (source == "characters") != (alphabet is not None):
        raise ValueError("`characters`, and no other tokenizer, needs an alphabet")
    tokenizer: Any  # transformers makes attributes of tokens at run time
    if alphabet is not None:
        tokenizer = characters(alphabet, media)
    elif source == "bytes":
        tokenizer = byte_level(media)
    else:
        tokenizer = _from_directory(Path(source))
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template: {chat_template}: {error}") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{source}: the tokenizer has no end-of-sequence token; set eos_token in its "
            "configuration"
        )
    return tokenizer


def characters(alphabet: str, media: MediaTokens | None = None) -> Tokenizer:
    """Builds a tokenizer with one token for each character of `alphabet`; any other character is
    <unk>."""
    from tokenizers import Regex, decoders, models, pre_tokenizers

    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ValueError(f"an alphabet holds each of its characters once, got {alphabet!r}")
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    # [\s\S]: a dot leaves out line breaks.
    splitter = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return _wrapped(
        models.WordLevel(vocabulary, unk_token="<unk>"), splitter, decoders.Fuse(), media
    )


def byte_level(media: MediaTokens | None = None) -> Tokenizer:
    """Builds a tokenizer with one token for each byte of UTF-8, so that decoding returns any text
    unchanged."""
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *letters])}
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrapped(models.BPE(vocabulary, []), splitter, decoders.ByteLevel(), media)


def stop_ids(tokenizer: Tokenizer, directory: str | Path | None = None) -> tuple[int, ...]:
    """Returns the tokens that end a completion: the tokenizer's end of sequence, and the ids at
    which transformers ends completions of the model in `directory`.

    Chat models list several (end of turn, end of text); a generator that knows only one of them
    does not stop at the others. Raises ModelFileError for files of the directory that cannot be
    read.
    """
    from policy.huggingface import generation_config

    ids = {
        tokenizer.eos_token_id,
        *(() if directory is None else generation_config.stop_ids(directory)),
    }
    return tuple(sorted(token for token in ids if token is not None))


def first_stop(
    tokenizer: Tokenizer, tokens: list[int], before: int, stop: tuple[str, ...], min_tokens: int = 0
) -> int | None:
    """Returns the number of tokens up to the one, after the first `before` and the first
    `min_tokens`, that completes a string of `stop`; None if none does."""
    if len(tokens) <= min_tokens or not stop:
        return None
    start = _search_start(tokenizer, tokens, before, max(len(each.encode()) for each in stop))
    start = start if start >= min_tokens else 0
    # Where the last characters of the first tokens are not complete, the search begins before them.
    skipped = (
        len(decode_after(tokenizer, tokens[:min_tokens]).rstrip(INCOMPLETE))
        if min_tokens and not start
        else 0
    )

    def has_stop(end: int) -> bool:
        text = decode_after(tokenizer, tokens[start:end])
        return any(text.find(s, max(0, skipped + 1 - len(s))) >= 0 for s in stop)

    if not has_stop(len(tokens)):
        return None
    return next(end for end in range(max(before, min_tokens) + 1, len(tokens) + 1) if has_stop(end))


def _search_start(tokenizer: Tokenizer, tokens: list[int], before: int, length: int) -> int:
    """Returns the token where the search for a string of `length` bytes begins, which ends behind
    the first `before` tokens. Each token has a byte or more, and decoders read neighbouring tokens
    of bytes at once."""
    start = max(0, before - length - _MOST_CUT)
    while start and is_byte(tokenizer, tokens[start]):
        start -= 1
    return start


def bad_word_tokens(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences that spell these words inside a text, each without blanks in
    front and with one.

    Raises ValueError for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelled in (word.lstrip(), f" {word.lstrip()}"):
            sequence = tuple(encode_after(tokenizer, spelled))
            if not sequence:
                raise ValueError(f"bad_words: the tokenizer has no tokens for {word!r}")
            sequences[sequence] = None
    return tuple(sequences)


def _wrapped(
    model: models.Model,
    splitter: pre_tokenizers.PreTokenizer,
    decoder: decoders.Decoder,
    media: MediaTokens | None,
) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(model)
    backend.pre_tokenizer = splitter
    backend.decoder = decoder
    names = {} if media is None else dict(media.names)
    backend.add_special_tokens(
        list(dict.fromkeys(names.values()))
    )  # in this order, after all others
    tokenizer: Any = PreTrainedTokenizerFast(  # which makes its attributes of tokens at run time
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[4:]),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE if media is None else media.chat_template,
        **names,
    )
    return tokenizer


def _from_directory(directory: Path):
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise ValueError(
            f"no tokenizer {directory}: give a directory or one of {', '.join(BUILT_IN)}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        # Multimodal directories of transformers 4 keep the template in a file that only processors
        # read.
        file = directory / "chat_template.json"
        if not tokenizer.chat_template and file.is_file():
            tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8-sig"))[
                "chat_template"
            ]
    except (
        Exception
    ) as error:  # transformers and tokenizers raise any class for files that they cannot read
        raise ValueError(
            f"{directory}: no tokenizer can be read from it: {type(error).__name__}: {error}"
        ) from None
    return tokenizer
