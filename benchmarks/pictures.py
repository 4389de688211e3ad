"""Measures what pictures cost: an update on rows with pictures next to the same update on rows of
text of the same length, and encoding each picture once a step next to once a sample.

The floor of an update with pictures is the update on text: the rows of a table stand in the place
of embeddings. A picture that G samples show costs its encoding once; "once a sample" encodes it G
times, as frameworks do that prepare each sample by itself. Programs are compiled before.

    python benchmarks/pictures.py [--prompts 16] [--samples 8] [--side 64] [--text 64] [--repeats 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from side_by_side import in_turns

MODEL = "tiny-vl"


def main(argv: Sequence[str] | None = None) -> dict[str, Sequence[float]]:
    """Runs the benchmark from the command line. Returns the seconds of each program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="rows that show the same picture")
    parser.add_argument("--side", type=int, default=64, help="of a picture, in pixels")
    parser.add_argument("--text", type=int, default=64, help="tokens of text of a row")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)

    import jax

    import policy
    from policy.config import Runtime
    from policy.execution.encoding import MediaEncoder
    from policy.huggingface import sources

    config = sources.preset(MODEL, {"max_position_embeddings": 4096}, media=True)
    model = policy.create(config, runtime=Runtime(remat="none"))
    shown = pictures(config.image, options.prompts, options.side)
    rows = next(iter(shown)).rows
    encoder = MediaEncoder(model.graph)
    M = 1 << (options.prompts * rows - 1).bit_length()

    def encode(times: int) -> Callable[[], Any]:
        inputs = {}
        first = {}
        for copy in range(times):
            for number, (item, values) in enumerate(shown.items()):
                own = replace(item, digest=f"{item.digest}.{copy}")
                inputs[own] = values
                first[own] = number * rows
        return lambda: jax.block_until_ready(
            encoder.write(model.params, encoder.empty(M), encoder.padded(inputs, first, M))
        )

    table = encode(1)()
    updates = update(model, options, rows, table), update(model, options, rows, None)
    seconds = dict(
        zip(("update, pictures", "update, text"), in_turns(*updates, options.repeats), strict=True)
    )
    encoded = in_turns(encode(options.samples), encode(1), options.repeats)
    seconds |= dict(zip(("encode once a sample", "encode once a step"), encoded, strict=True))
    show(seconds, options, rows)
    return seconds


def pictures(spec: Any, count: int, side: int) -> dict[Any, np.ndarray]:
    """Returns pictures of noise."""
    from policy.media import Item

    rng = np.random.default_rng(0)
    cells = side // spec.patch
    rows = spec.rows_of((cells, cells))
    values = rng.normal(size=(count, cells * cells, spec.input_width)).astype(np.float32)
    return {
        Item("image", str(number), (cells, cells), rows): each for number, each in enumerate(values)
    }


def update(model: Any, options: argparse.Namespace, rows: int, table: Any) -> Callable[[], Any]:
    """Returns an update on `samples` rows for each prompt: the embeddings of a picture, or as many
    tokens (table None), and then text."""
    import jax

    import rl.algorithms
    from policy.cache.media import Media
    from rl.config.stage import StageOptions
    from rl.training.batch import padded_batch
    from rl.training.trainer import Trainer

    rng = np.random.default_rng(1)
    N = options.prompts * options.samples
    T = rows + options.text
    tokens = rng.integers(0, model.config.vocab_size, (N, T))
    batch = padded_batch([(ids.tolist(), [0] * rows + [1] * options.text) for ids in tokens], T)
    if table is not None:
        index = np.full((N, T), -1, np.int32)
        index[:, :rows] = np.repeat(np.arange(options.prompts), options.samples)[
            :, None
        ] * rows + np.arange(rows)
        turns = np.repeat(
            np.broadcast_to(np.arange(T, dtype=np.int32), (N, T))[..., None], 3, axis=2
        )
        batch = batch.replace(media=Media(index=index, turns=turns))
    stage = StageOptions.model_validate({"algorithm": "sft", "steps": 100})
    trainer = Trainer(model.graph, stage, rl.algorithms.get("sft"))
    state = trainer.start({path: jax.numpy.copy(array) for path, array in model.params.items()}, 0)

    def step() -> Any:
        nonlocal state
        state, metrics = trainer.update(state, batch, table=table)
        return float(metrics["loss"])

    return step


def show(seconds: dict[str, Sequence[float]], options: argparse.Namespace, rows: int) -> None:
    """Prints the medians and the two ratios."""
    shape = (
        f"{options.prompts} pictures of {rows} rows, {options.samples} samples of each, "
        f"{options.text} tokens of text"
    )
    print(f"{MODEL}: {shape}")
    for name, each in seconds.items():
        print(f"{name:22} {median(each):8.4f} s")
    for one, other in (
        ("update, pictures", "update, text"),
        ("encode once a sample", "encode once a step"),
    ):
        print(f"{one} / {other}: {median(seconds[one]) / median(seconds[other]):.2f}")


if __name__ == "__main__":
    main()
