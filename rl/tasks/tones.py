"""Plays short notes and asks for their names, for models that read sounds. Needs numpy only.

A note is one of the 12 of an octave, in equal temperament with A at 440 Hz. Octave, loudness and
phase vary, its pitch is up to some cents off, and there is noise. Whatever varies comes from the
bytes of a hash (SHAKE-128) of the number of the note, and samples have 16 bits, so that sounds are
equal on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl.tasks import Split, TaskProblem, hash_share, is_held_out

NOTES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
_FULL = 32767  # largest sample of 16 bits
_C4 = 440.0 * 2 ** (-9 / 12)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the notes. Raises ValueError for invalid ones."""

    seconds: float = 0.64
    """Length of a sound, 0.1 to 30 s."""
    rate: int = 8000
    """Samples per second, 4000 to 48000."""
    octaves: int = 3
    """Octaves that a note is drawn from, 1 to 7."""
    first_octave: int = 5
    """The lowest of them, 1 to 7; octave 5 begins with the C of 523 Hz."""
    cents: int = 10
    """Most hundredths of a semitone by which a note is off its pitch, 0 to 40."""
    noise: float = 0.1
    """Largest noise, as a share of the largest sample, 0 to 0.5."""
    problems: int = 2000
    """Sounds in both splits together, 10 to 100000. One of 0.64 s at 8 kHz takes 20 KB of
    memory."""
    eval_share: float = 0.1
    """Share of the sounds for evaluation, chosen by a hash of the note and how it is played."""

    def __post_init__(self):
        bounds = (
            ("rate", 4000, 48000),
            ("octaves", 1, 7),
            ("first_octave", 1, 7),
            ("cents", 0, 40),
        )
        for name, least, most in (*bounds, ("problems", 10, 100_000)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"`{name}` must be an integer from {least} to {most}, got {value!r}"
                )
        for name, least, most in (("seconds", 0.1, 30.0), ("noise", 0.0, 0.5)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"`{name}` must be a number from {least} to {most}, got {value!r}")
        if not isinstance(self.eval_share, (int, float)) or not 0 < self.eval_share < 1:
            raise ValueError(f"`eval_share` must lie between 0 and 1, got {self.eval_share!r}")
        highest = _C4 * 2 ** (self.first_octave + self.octaves - 4 - (1 - self.cents / 100) / 12)
        if highest > self.rate / 2:
            raise ValueError(
                f"`octaves`: notes up to {highest:.0f} Hz need a `rate` of at least "
                f"{math.ceil(2 * highest)}, got "
                f"{self.rate}; lower `octaves` or `first_octave`, or raise `rate`"
            )


def problems(options: Options, split: Split) -> list[TaskProblem]:
    """Returns the problems of a split: the column `audio` holds {"array": float32[samples],
    "sampling_rate": Hz}, `answer` the name of the note.

    The hash orders the evaluation's, so that the first n are a random sample.
    """
    chosen = [
        each
        for each in _notes(options)
        if is_held_out(each[0], options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        chosen.sort(key=lambda each: (hash_share(each[0]), each[0]))
    return [
        TaskProblem(
            "note?", note, {"answer": note, "audio": {"array": wave, "sampling_rate": options.rate}}
        )
        for _, note, wave in chosen
    ]


def _notes(options: Options) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (text that identifies the sound, name of the note, float32[samples]), each sound
    once."""
    samples = round(options.seconds * options.rate)
    seconds = np.arange(samples) / options.rate
    seen = set()
    for number in range(options.problems):
        stream = hashlib.shake_128(f"tones {number}".encode()).digest(20 + 2 * samples)
        note, octave, cents, phase, loudness = np.frombuffer(stream[:20], "<u4").tolist()
        note = note % len(NOTES)
        octave = octave % options.octaves + options.first_octave
        cents = cents % (2 * options.cents + 1) - options.cents
        phase = phase % 360
        loudness = 20 + loudness % 41
        identity = f"{NOTES[note]}{octave} {cents} cents, phase {phase}, loudness {loudness}"
        if identity in seen:
            continue
        seen.add(identity)
        frequency = _C4 * 2 ** (octave - 4 + (note + cents / 100) / 12)
        tone = np.sin(2 * math.pi * (frequency * seconds + phase / 360)) * (loudness / 100)
        noise = np.frombuffer(stream[20:], "<i2") / _FULL * options.noise
        # Rounded to 16 bits, last bits of a machine's sine are gone.
        wave = np.round(np.clip(tone + noise, -1, 1) * _FULL).astype(np.float32) / np.float32(
            _FULL + 1
        )
        yield identity, NOTES[note], wave
