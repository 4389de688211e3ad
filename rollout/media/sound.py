"""Sounds: the length from the header, samples of one channel, and resampling.

WAV files need numpy only. Other files need soundfile, and another rate than that of the processor
needs scipy.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass

import numpy as np

from rollout.media.processor import MediaError, require

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # format tags of WAV files
_UNKNOWN_LENGTHS = (0, 0xFFFFFFFF)  # of the data in a file that was written as a stream


def size(content: bytes) -> tuple[int, int]:
    """Returns (samples of a channel, rate in Hz) from the header. Raises MediaError for a file that
    cannot be read."""
    if _is_wav(content):
        wav = _header(content)
        samples = len(wav.data) // wav.frame
        rate = wav.rate
    else:
        with _soundfile(content) as file:
            samples = file.frames
            rate = file.samplerate
    if samples <= 0:
        raise MediaError("the sound has no samples")
    return samples, rate


def decode(content: bytes) -> tuple[np.ndarray, int]:
    """Returns (float32[samples] in -1..1, the mean of the channels; rate in Hz). Raises MediaError
    as `size`."""
    samples, rate = size(content)
    if _is_wav(content):
        wave = _samples(_header(content))
    else:
        with _soundfile(content) as file:
            wave = file.read(dtype="float32", always_2d=True)
    if len(wave) != samples:
        raise MediaError(f"the sound has {len(wave)} samples, its header says {samples}")
    return from_array(wave), rate


def from_array(wave: np.ndarray) -> np.ndarray:
    """Converts samples to float32[samples], the mean of the channels.

    wave: float or int16, [samples], [samples, channels] or [channels, samples] with at most 32
    channels.
    Raises MediaError for another array, and for numbers that are not finite.
    """
    if wave.dtype == np.int16:
        wave = wave.astype(np.float32) / 32768
    if wave.ndim not in (1, 2) or not wave.size or not np.issubdtype(wave.dtype, np.floating):
        raise MediaError(
            f"a sound must be an array of float samples, is {wave.dtype}{list(wave.shape)}"
        )
    if wave.ndim == 2:
        channels = 1 if wave.shape[1] <= wave.shape[0] else 0
        if wave.shape[channels] > 32:
            raise MediaError(f"a sound has at most 32 channels, its shape is {list(wave.shape)}")
        wave = wave.mean(axis=channels)
    if not np.isfinite(wave).all():
        raise MediaError("the sound has samples that are not finite")
    return wave.astype(np.float32)


def resampled_length(samples: int, rate: int, target: int) -> int:
    """Returns the number of samples after `resample`."""
    common = math.gcd(rate, target)
    return -(-samples * (target // common) // (rate // common))


def resample(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Returns float32[resampled_length] at `target` Hz, by a polyphase filter of scipy. Same rate:
    unchanged."""
    if rate == target:
        return wave
    signal = require(
        "scipy.signal", "audio", f"resampling a sound from {rate} to {target} Hz needs scipy"
    )
    common = math.gcd(rate, target)
    return signal.resample_poly(wave.astype(np.float64), target // common, rate // common).astype(
        np.float32
    )


@dataclass(frozen=True)
class _Wav:
    """Header and data of a WAV file: format tag, bits of a sample, channels, rate in Hz, bytes of
    the samples."""

    tag: int
    bits: int
    channels: int
    rate: int
    data: memoryview

    @property
    def frame(self) -> int:
        """Returns the bytes of one sample of all channels."""
        return self.channels * self.bits // 8


def _is_wav(content: bytes) -> bool:
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def _header(content: bytes) -> _Wav:
    view = memoryview(content)
    place = 12
    form = None
    while place + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, place)
        body = view[place + 8 :]
        if name == b"fmt " and length >= 16 and len(body) >= length:
            form = struct.unpack_from("<HHIIHH", body)
            if form[0] == _EXTENSIBLE and length >= 26:
                form = struct.unpack_from("<H", body, 24) + form[1:]
        elif name == b"data":
            return _with_data(form, body, length)
        place += 8 + length + length % 2
    raise MediaError("broken WAV file: it has no data")


def _with_data(form: tuple[int, ...] | None, body: memoryview, length: int) -> _Wav:
    if form is None:
        raise MediaError("broken WAV file: it has no header before its data")
    tag, channels, rate, _, _, bits = form
    if (tag, bits) not in {
        (_PCM, 8),
        (_PCM, 16),
        (_PCM, 24),
        (_PCM, 32),
        (_FLOAT, 32),
        (_FLOAT, 64),
    }:
        raise MediaError(
            f"a WAV file of format {tag} with {bits} bits is not supported; save it as 16-bit PCM"
        )
    if not channels or not rate:
        raise MediaError(f"broken WAV file: {channels} channels at {rate} Hz")
    if length in _UNKNOWN_LENGTHS:
        length = len(body)
    if length > len(body):
        raise MediaError(
            f"broken WAV file: {length} bytes of samples in its header, {len(body)} in the file"
        )
    return _Wav(tag, bits, channels, rate, body[:length])


def _samples(wav: _Wav) -> np.ndarray:
    """Returns the decoded samples, float[samples, channels], in -1..1."""
    data = wav.data[: len(wav.data) // wav.frame * wav.frame]
    if wav.tag == _FLOAT:
        wave = np.frombuffer(data, f"<f{wav.bits // 8}")
    elif wav.bits == 8:
        wave = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif wav.bits == 24:  # three bytes become the upper ones of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        wave = wide.view("<i4")[:, 0] / 2.0**31
    else:
        wave = np.frombuffer(data, f"<i{wav.bits // 8}") / 2.0 ** (wav.bits - 1)
    return wave.reshape(-1, wav.channels)


def _soundfile(content: bytes):
    module = require("soundfile", "audio", "sounds other than WAV files need soundfile")
    try:
        return module.SoundFile(io.BytesIO(content))
    except Exception as error:  # of libsndfile
        raise MediaError(
            f"not a sound that soundfile reads ({len(content)} bytes): {error}"
        ) from None
