"""Rows of data with pictures for tests, and the directory of a tiny multimodal model without
weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from media_oracles import IDS, SECTIONS, TEXT
from media_tokenizers import tokenizer
from oracles import write_weight_file
from PIL import Image
from towers import GRID

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
TEMPLATE = """\
{%- for message in messages -%}{{ '[' + message.role + ']' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<eos>' }}{% endgeneration %}{{ '\\n' }}
{%- elif message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


def pixels(shade: int, size: tuple[int, int] = (16, 24)) -> np.ndarray:
    """A picture of one colour; size: (height, width)."""
    return np.full((*size, 3), (shade, 255 - shade, 128), np.uint8)


def png(shade: int, size: tuple[int, int] = (16, 24)) -> bytes:
    """The PNG file of such a picture."""
    file = io.BytesIO()
    Image.fromarray(pixels(shade, size)).save(file, "PNG")
    return file.getvalue()


def model_directory(folder: Path, processor: bool = True) -> str:
    """Writes configuration, tokenizer and, by default, processor of a tiny Qwen3-VL. Returns the
    path."""
    folder.mkdir()
    text = TEXT | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "rope_parameters": SECTIONS,
        "vocab_size": 300,
    }
    config = IDS | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text | {"model_type": "qwen3_vl_text"},
        "vision_config": GRID | {"model_type": "qwen3_vl"},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_weight_file(folder)
    tokens = tokenizer("qwen3_vl")
    tokens.chat_template = TEMPLATE
    tokens.save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return str(folder)


def run_config(model: str | dict, data: dict, stages: list[dict] | None = None, **more):
    """The configuration of a run of a model on these data: by default one stage of GRPO."""
    from rl.config.run import RunConfig

    stages = stages or [
        {"algorithm": {"name": "grpo"}, "steps": 1, "sampling": {"max_new_tokens": 8}}
    ]
    values = {"model": model, "data": data, "stages": stages, "max_length": 256} | more
    return RunConfig.model_validate(values)
