"""What Duet asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: `role`, `content` and whatever else the chat template reads of each message."""


class Tokenizer(Protocol):
    """A part of transformers' `PreTrainedTokenizerFast`, under its names."""

    @property
    def chat_template(self) -> str | dict[str, str] | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def eos_token(self) -> str:
        """The end of a sequence; `load_tokenizer` refuses tokenizers without one."""
        ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def unk_token_id(self) -> int | None: ...

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        ...

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool
    ) -> Mapping[str, Any]:
        """Returns `input_ids` and `offset_mapping`, the first and past-the-end character of each
        token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def save_pretrained(self, save_directory: str) -> object: ...

    def apply_chat_template(
        self,
        conversation: Messages,
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str: ...
