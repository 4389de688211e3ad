"""A run whose prompts have pictures and a sound, written as stages write it: drawn pictures, no
files, no model."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import trajectories

from policy.media import Item
from rewards import Scores
from rl.config.run import RunConfig
from rl.records.events import Events
from rl.stages.sampling.records import references, sample_lines, token_records
from rollout import Completion
from rollout.collect import ReadyScores, Rollouts
from rollout.media.expand import Expanded
from rollout.media.reference import Reference, refer

COLOURS = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (38, 92, 196),
    "yellow": (240, 200, 30),
}
MARKER = 5  # the token that stands for a row of a picture


def disc(colour, height=32, width=32) -> np.ndarray:
    """A disc on a pale ground, uint8[height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    inside = ((y - height / 2) / height) ** 2 + ((x - width / 2) / width) ** 2 < 0.11
    return np.where(inside[..., None], np.uint8(colour), np.uint8((235, 235, 228))).astype(np.uint8)


def landscape(height=480, width=640) -> np.ndarray:
    """A sky, a sun and hills, uint8[height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    sky = np.stack([90 + 120 * y / height, 150 + 70 * y / height, np.full(y.shape, 235)], axis=-1)
    sky[((y - 0.25 * height) ** 2 + (x - 0.7 * width) ** 2) < (0.1 * height) ** 2] = (255, 220, 90)
    sky[y > height * (0.7 + 0.08 * np.sin(x * 9 / width))] = (60, 120, 70)
    return sky.astype(np.uint8)


def picture(pixels: np.ndarray) -> Reference:
    return refer("image", pixels, Path())


def sound(seconds=2.5, rate=16_000) -> Reference:
    wave = np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate).astype(np.float32)
    return refer("audio", {"array": wave, "sampling_rate": rate}, Path())


def expanded(*contents: tuple[Reference, tuple[int, ...]]) -> Expanded:
    """What `expand` makes of a prompt: each content with the rows of its items; of several, they
    are tiles."""
    items = []
    for reference, rows in contents:
        for number, count in enumerate(rows):
            digest = reference.digest if len(rows) == 1 else f"{reference.digest}-{number}"
            items.append(Item(reference.kind, digest, (count, 1), count))
    tokens = np.asarray([1, *(MARKER for item in items for _ in range(item.rows)), 2], np.int32)
    references = tuple(reference for reference, _ in contents)
    return Expanded(tokens, np.full(len(tokens), -1), None, None, tuple(items), tokens, references)


def problem(prompt, expanded: Expanded | None, **columns) -> SimpleNamespace:
    ids = [1, 7, 2] if expanded is None else expanded.tokens.tolist()
    return SimpleNamespace(
        example=SimpleNamespace(prompt=prompt, columns=columns, source=None),
        ids=ids,
        expanded=expanded,
    )


def question(colour: str) -> SimpleNamespace:
    """A message of the system, and a question of the user about one disc."""
    user = [{"type": "image"}, {"type": "text", "text": "Which colour has the disc?"}]
    prompt = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": user},
    ]
    return problem(prompt, expanded((picture(disc(COLOURS[colour])), (16,))), answer=colour)


def several() -> SimpleNamespace:
    """A picture of three tiles, text, a sound, text, an extreme picture: parts between texts."""
    user = [
        {"type": "text", "text": "Here is a place:"},
        {"type": "image"},
        {"type": "text", "text": "and here its sound:"},
        {"type": "audio"},
        {"type": "text", "text": "What connects them, and what is on this strip?"},
        {"type": "image"},
    ]
    media = expanded(
        (picture(landscape()), (64, 64, 64)), (sound(), (63,)), (picture(landscape(4, 5000)), (20,))
    )
    return problem([{"role": "user", "content": user}], media, answer="hills")


def step(problems, first_id: int, count: int = 2) -> tuple[Rollouts, Scores]:
    """Completions of problems, every second one right, and their scores."""
    answers = [each.example.columns["answer"] for each in problems]
    texts = [
        [answer if n % 2 == 0 else "I cannot see it." for n in range(count)] for answer in answers
    ]
    completions = [
        [Completion([9, 3], [-0.5, -0.25], "stop", text) for text in group] for group in texts
    ]
    right = np.asarray([[float(n % 2 == 0) for n in range(count)] for _ in answers])
    scores = Scores(right.reshape(-1, 1), right.reshape(-1), ("exact_answer",), [], {})
    ids = list(range(first_id, first_id + len(problems)))
    versions = [first_id] * len(problems)
    return trajectories.rollouts(
        problems, ids, completions, ReadyScores(scores), {}, versions
    ), scores


def config(directory: Path, **run) -> RunConfig:
    stages = [{"algorithm": "grpo", "steps": 20}]
    return RunConfig.model_validate(
        {"model": "tiny", "stages": stages, "run": {"dir": str(directory)} | run}
    )


def write(directory: Path, steps: int = 3) -> Path:
    """Writes events, samples and thumbnails. A step has the four colours, and the prompt of
    `several`."""
    events = Events(config(directory), directory)
    (directory / "config.yml").write_text(
        "model: {source: tiny}\nstages: [{algorithm: {name: grpo}, steps: 20}]\n"
    )
    events.start_stage("grpo", steps)
    for number in range(1, steps + 1):
        problems = [*map(question, COLOURS), several()]
        sampled, scores = step(problems, 5 * number)
        lines = sample_lines(sampled, scores, "grpo", number, scores.total - 0.5)
        events.samples(lines, token_records(sampled), references(sampled))
        metrics = {
            "reward/mean": 0.5,
            "media/pictures": 6.0,
            "media/encoded": 6.0 / number,
            "media/rows": 339.0,
        }
        events.step(
            "grpo",
            number,
            metrics | {"media/encode_seconds": 0.1 / number, "media/wait_seconds": 0.01},
        )
    events.close()
    return directory
