"""Sounds of Gemma 4 E2B and E4B: log-mel frames by `Gemma4AudioFeatureExtractor` of transformers,
which is numpy."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media import sound
from rollout.media.processor import Kind, MediaError, Processor, special
from rollout.text.interface import Tokenizer

CLASS = "Gemma4AudioFeatureExtractor"
_MULTIPLE = 128  # of samples, which the extractor pads to


@dataclass(frozen=True)
class Gemma4Audio(Processor):
    """Sounds as frames of log-mel values, four frames to a row.

    rate: in Hz. frame, hop: samples of a frame, and from one frame to the next. seconds: of the
    longest sound. stored: keys of the extractor as JSON.
    """

    kind: ClassVar[Kind] = "audio"

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    begin: str
    end: str
    rate: int
    frame: int
    hop: int
    seconds: int
    stored: str

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns ((frames, 1),). Raises MediaError for a sound without a full frame or of more
        than `seconds`."""
        samples = sound.resampled_length(*size, self.rate)
        if samples > self.seconds * self.rate:
            raise MediaError(
                f"a sound of {samples / self.rate:.1f} s is too long: at most {self.seconds} s; "
                "cut it"
            )
        padded = -(-samples // _MULTIPLE) * _MULTIPLE
        left = self.frame // 2  # zeros before the first sample
        frames = (padded + left - self.frame - 1) // self.hop + 1
        # Frame i counts if its last sample, i * hop + frame, is one of the sound.
        real = min(frames, -(-(samples + left - self.frame) // self.hop))
        if real <= 0:
            raise MediaError(
                f"a sound of {samples} samples is too short: at least {self.frame - left + 1}"
            )
        return ((real, 1),)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns the frames after two convolutions of stride 2."""
        return -(-shape[0] // 4)

    def text(self, size: tuple[int, int]) -> str:
        """Returns the rows between their borders."""
        return f"{self.begin}{self.row_token * self.rows(self.shapes(size)[0])}{self.end}"

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns the log-mel spectrum float32[frames, bins] of a clip, by the extractor of
        transformers. Raises MediaError if it makes another number of frames than `shapes` says."""
        (frames, _) = self.shapes((len(content), rate))[0]
        features = _extractor(self.stored)([sound.resample(content, rate, self.rate)])
        mask = features["input_features_mask"][0]
        if int(mask.sum()) != frames:
            raise MediaError(f"the extractor made {int(mask.sum())} frames instead of {frames}")
        return [np.ascontiguousarray(features["input_features"][0][:frames], np.float32)]


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> Gemma4Audio:
    """Reads the processor from its stored keys. Raises MediaError for a tokenizer without tokens of
    sounds.

    processor: the other keys of processor_config.json.
    """
    rate = stored.get("sampling_rate", 16_000)
    marker = special(tokenizer, "audio_token")
    begin = special(tokenizer, "boa_token")
    end = special(tokenizer, "eoa_token")
    return Gemma4Audio(
        marker=marker,
        row_token=marker,
        reserved=(marker, begin, end),
        begin=begin,
        end=end,
        rate=rate,
        frame=round(rate * stored.get("frame_length_ms", 20.0) / 1000),
        hop=round(rate * stored.get("hop_length_ms", 10.0) / 1000),
        seconds=processor.get("audio_seq_length", 750)
        * processor.get("audio_ms_per_token", 40)
        // 1000,
        # Noise would give the same sound other features each time.
        stored=json.dumps({**stored, "dither": 0.0}, sort_keys=True),
    )


@functools.lru_cache(maxsize=4)
def _extractor(stored: str) -> Any:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    return Gemma4AudioFeatureExtractor(**json.loads(stored))
