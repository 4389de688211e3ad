"""Sounds of Qwen3-Omni: the log-mel frames of Whisper (arXiv 2212.04356), in numpy.

`WhisperFeatureExtractor` of transformers computes with torch where torch is installed, and rounds
differently without. These frames do not depend on it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media import sound
from rollout.media.processor import Kind, MediaError, Processor, special
from rollout.text.interface import Tokenizer

CLASS = "WhisperFeatureExtractor"
_CHUNK = 100  # frames of a chunk of the tower
_CHUNK_ROWS = 13  # rows of a full chunk
_DECADES = 8.0  # below the loudest value, where log-mel values are cut


@dataclass(frozen=True)
class QwenAudio(Processor):
    """Sounds as frames of `bins` log-mel values.

    rate: in Hz. fft, hop: samples of a frame, and from one frame to the next.
    """

    kind: ClassVar[Kind] = "audio"

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    rate: int
    bins: int
    fft: int
    hop: int

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns ((frames, 1),). Raises MediaError for a sound that is shorter than half a
        window."""
        samples = sound.resampled_length(*size, self.rate)
        if samples <= self.fft // 2:
            raise MediaError(
                f"a sound of {samples} samples is too short: at least {self.fft // 2 + 1} at "
                f"{self.rate} Hz"
            )
        return ((samples // self.hop, 1),)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns 13 for each full chunk of 100 frames, and what three convolutions of stride 2
        leave of the rest."""
        full, rest = divmod(shape[0], _CHUNK)
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return full * _CHUNK_ROWS + rest

    def text(self, size: tuple[int, int]) -> str:
        """Returns the row token, once for each row."""
        return self.row_token * self.rows(self.shapes(size)[0])

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns the log-mel spectrum float32[frames, bins] of a clip, as WhisperFeatureExtractor
        of transformers."""
        (frames, _) = self.shapes((len(content), rate))[0]
        wave = sound.resample(content, rate, self.rate).astype(np.float64)
        padded = np.pad(wave, self.fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.fft)[:: self.hop][:frames]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.fft) / self.fft)
        power = np.abs(np.fft.rfft(windows * hann)) ** 2
        log = np.log10(np.maximum(power @ _filters(self.fft, self.bins, self.rate), 1e-10))
        return [((np.maximum(log, log.max() - _DECADES) + 4) / 4).astype(np.float32)]


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> QwenAudio:
    """Reads the processor from its stored keys.

    processor: the other keys of processor_config.json.
    """
    pad = special(tokenizer, "audio_token", "<|audio_pad|>")
    start = special(tokenizer, "audio_bos_token", "<|audio_start|>")
    end = special(tokenizer, "audio_eos_token", "<|audio_end|>")
    return QwenAudio(
        marker=pad,
        row_token=pad,
        reserved=(pad, start, end),
        rate=stored.get("sampling_rate", 16_000),
        bins=stored.get("feature_size", 80),
        fft=stored.get("n_fft", 400),
        hop=stored.get("hop_length", 160),
    )


@functools.lru_cache(maxsize=4)
def _filters(fft: int, bins: int, rate: int) -> np.ndarray:
    """Returns float64[fft // 2 + 1, bins]: the triangular filters of Slaney's mel scale up to 8
    kHz."""
    from transformers.audio_utils import mel_filter_bank

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # below 16 kHz, filters above half the rate are empty
        return mel_filter_bank(
            num_frequency_bins=fft // 2 + 1,
            num_mel_filters=bins,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=rate,
            norm="slaney",
            mel_scale="slaney",
        )
