"""Tokenizers of bytes with the special tokens and the markers of each multimodal family."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOKENS = {
    "qwen3_vl": {
        "image": "<|image_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    },
    "omni": {"image": "<|image_pad|>", "video": "<|video_pad|>", "audio": "<|audio_pad|>"}
    | {"vision_bos": "<|vision_start|>", "vision_eos": "<|vision_end|>"}
    | {"audio_bos": "<|audio_start|>", "audio_eos": "<|audio_end|>"},
    "qwen2_5_vl": {
        "image": "<|image_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    | {"video": "<|video_pad|>"},
    "gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
    "gemma4": {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>"}
    | {"boa": "<|audio>", "eoa": "<audio|>", "audio": "<|audio|>"},
    "llama4": {name: f"<|{name}|>" for name in ("image", "image_start", "image_end", "patch")}
    | {name: f"<|{name}|>" for name in ("tile_x_separator", "tile_y_separator")},
}
# What the template writes for a picture and for a sound.
WRITES = {
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", ""),
    "omni": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|audio_start|><|audio_pad|><|audio_end|>",
    ),
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", ""),
    "gemma3": ("<start_of_image>", ""),
    "gemma4": ("<|image|>", "<|audio|>"),
    "llama4": ("<|image|>", ""),
}
TEMPLATE = """\
{%- for message in messages -%}{{ '[' + message.role + ']\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}IMAGE{%- elif part.type == 'audio' -%}AUDIO{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


def tokenizer(family):
    """Builds a tokenizer of bytes that merges line breaks, and knows the special tokens of a
    family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ĊĊ", "ĊĊĊĊ"]
    vocabulary = {token: number for number, token in enumerate([*letters, *merged])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    image, audio = WRITES[family]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens={f"{name}_token": token for name, token in TOKENS[family].items()},
        chat_template=TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio),
    )
