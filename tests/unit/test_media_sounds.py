"""Sounds from WAV and other files, against the standard library, soundfile and scipy."""

import io
import wave

import numpy as np
import pytest
import scipy.signal
import soundfile

from rollout.media import sound
from rollout.media.processor import MediaError
from rollout.media.reference import refer

WAVE = (np.sin(np.arange(400) / 7) * np.linspace(-0.9, 0.9, 400)).astype(np.float32)
STEREO = np.stack([WAVE, -WAVE / 2], axis=1)


def written(samples, kind="PCM_16", form="WAV", rate=8000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=kind, format=form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
@pytest.mark.parametrize("kind", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_wav_files_are_read_as_soundfile_reads_them(kind, form):
    content = written(STEREO, kind, form)
    expected, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    decoded = sound.decode(content)
    assert sound.size(content) == (400, 8000) and decoded[1] == rate
    np.testing.assert_allclose(decoded[0], expected.mean(axis=1), atol=1e-7)


def test_a_file_of_the_standard_library_is_read(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    reference = refer("audio", "a.wav", tmp_path)
    assert reference.size == (3, 16000)
    assert reference.decode().tolist() == [0.0, 0.5, -1.0]


def test_other_files_are_read_by_soundfile():
    content = written(STEREO, "PCM_16", "FLAC")
    assert sound.size(content) == (400, 8000)
    np.testing.assert_allclose(sound.decode(content)[0], STEREO.mean(axis=1), atol=1e-4)


def test_a_wav_file_written_as_a_stream_ends_with_the_file():
    content = bytearray(written(WAVE))
    content[40:44] = b"\xff\xff\xff\xff"
    assert sound.size(bytes(content)) == (400, 8000)


def test_arrays_are_sounds(tmp_path):
    expected = STEREO.mean(axis=1)
    for array in (STEREO, STEREO.T, STEREO.T.tolist()):
        reference = refer("audio", {"array": array, "sampling_rate": 8000, "path": None}, tmp_path)
        assert reference.size == (400, 8000)
        np.testing.assert_allclose(reference.decode(), expected, atol=1e-7)
    slower = refer("audio", {"array": STEREO, "sampling_rate": 4000}, tmp_path)
    assert slower.digest != reference.digest


@pytest.mark.parametrize(
    "rate, target", [(8000, 16000), (44100, 16000), (22050, 24000), (48000, 16000), (16000, 16000)]
)
def test_resampling_is_that_of_scipy(rate, target):
    resampled = sound.resample(WAVE, rate, target)
    expected = scipy.signal.resample_poly(WAVE.astype(np.float64), target, rate)
    assert len(resampled) == sound.resampled_length(len(WAVE), rate, target)
    np.testing.assert_allclose(resampled, expected, atol=1e-6)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"RIFF\0\0\0\0WAVE", "broken WAV file: it has no data"),
        (
            written(WAVE)[:300],
            "broken WAV file: 800 bytes of samples in its header, 256 in the file",
        ),
        (written(WAVE[:0]), "the sound has no samples"),
        (written(WAVE, "ULAW"), "a WAV file of format 7 with 8 bits is not supported"),
        (b"no sound", r"not a sound that soundfile reads \(8 bytes\)"),
        (written(np.array([0.0, np.nan, 1.0], np.float32), "FLOAT"), "samples that are not finite"),
    ],
    ids=[
        "no data",
        "cut",
        "no samples",
        "u-law",
        "no sound",
        "not finite",
    ],  # a file of floats holds its second
)
def test_broken_files_are_refused(content, message):
    with pytest.raises(MediaError, match=message):
        sound.decode(content)


@pytest.mark.parametrize(
    "value, message",
    [
        ({"array": WAVE}, "an array of a sound needs its `sampling_rate` in Hz"),
        ({"array": ["a"], "sampling_rate": 8000}, "must be an array of float samples"),
        ({"array": np.zeros((50, 50)), "sampling_rate": 8000}, "at most 32 channels"),
        ("https://example.org/a.wav", "download the sound and give its path"),
        ({"data": "%", "format": "wav"}, "not valid base64"),
    ],
)
def test_other_values_are_refused(tmp_path, value, message):
    with pytest.raises(MediaError, match=message):
        refer("audio", value, tmp_path)
