"""Writes an export as one GGUF file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from policy.adapters.learning import has_adapter
from policy.huggingface.file_error import ModelFileError
from rl.data import models
from rl.errors import ConfigError
from rl.export.request import GgufType
from rl.stages.export import adapter, proof
from rl.stages.export.card import Listing
from rl.stages.export.exportable import Exportable
from rl.stages.export.policy import write_card

if TYPE_CHECKING:
    from policy.huggingface.gguf.vocabulary import Vocabulary
    from policy.huggingface.reload import Proof


def check(exported: Exportable) -> None:
    """Raises ConfigError for a model that is not written as GGUF."""
    from policy.huggingface.gguf import writer

    try:
        writer.check(exported.model)
    except ModelFileError as error:
        raise ConfigError(f"--gguf: {error}") from None


def write(exported: Exportable, directory: Path, kind: GgufType, name: str) -> list[Proof]:
    """Writes NAME-KIND.gguf: the weights, with an adapter merged into them, and the tokenizer.
    Reads the file back. Raises ConfigError for a tokenizer that GGUF does not know, ModelError for
    a file that is not what was written."""
    from policy.huggingface.gguf import writer

    model = exported.model
    if has_adapter(model.params):
        model = adapter.merged_model(exported)
    file = directory / f"{name}-{kind.upper()}.gguf"
    try:
        writer.write(file, model, kind, vocabulary_of(exported), name)
    except ModelFileError as error:
        raise ConfigError(f"--gguf: {error}") from None
    sentence = f"{file.name}: the weights in {kind}, as one GGUF file."
    write_card(exported, directory, sentence, Listing("gguf"))
    return proof.check_gguf(exported, model, file, kind)


def vocabulary_of(exported: Exportable) -> Vocabulary:
    """Returns the fields of the tokenizer of an export. A note names the stops that a file has no
    keys for, another one a tokenizer that llama.cpp does not read. Raises ModelFileError."""
    from policy.huggingface.gguf.vocabulary import STOP_KEYS, of_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        exported.write_texts(texts, with_towers=False)
        file = texts / models.TOKENIZER_FILES[0]
        if not file.is_file():
            raise ModelFileError(
                "the model has no tokenizer.json, from which GGUF takes the tokens"
            )
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        config = texts / models.TOKENIZER_FILES[1]
        keys = json.loads(config.read_text(encoding="utf-8-sig")) if config.is_file() else {}
        template = _template(texts, keys.get("chat_template"))
    stops = exported.generation().get("eos_token_id")
    ids = stops if isinstance(stops, list) else [] if stops is None else [stops]
    size = exported.model.config.vocab_size
    drawn = [each for each in ids if each < size]  # no other token can end a completion
    if left_out := drawn[len(STOP_KEYS) :]:
        exported.note(
            f"export: a GGUF file has keys for {len(STOP_KEYS)} tokens that end a completion; in "
            f"programs that read it, these tokens do not: {', '.join(map(str, left_out))}"
        )
    result = of_tokenizer(tokenizer, _special(keys), drawn, template)
    if result.kind == "gpt2" and not result.merges:
        exported.note(
            "export: the tokenizer has no merges; transformers and Duet read the file, llama.cpp "
            "refuses it"
        )
    return result


def _special(keys: dict) -> dict[str, str | None]:
    """Returns the special tokens of tokenizer_config.json by name."""
    result = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = keys.get(name)
        result[name] = token.get("content") if isinstance(token, dict) else token
    return result


def _template(texts: Path, template: object) -> str | None:
    file = texts / models.TEMPLATE_FILES[0]
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return template if isinstance(template, str) else None
