"""Measures tokens per second of one SFT update against the same update in torch, with transformers
and the same weights.

Both: the same rows of random tokens in float32, the mean negative log-probability of every token
but the first of a row, gradients clipped at norm 1, one step of AdamW without weight decay. Duet
runs `rl.training.trainer.Trainer.update`, the very program of a run, with nothing recomputed and
the layers unrolled; `--remat full --scan` is what a run does by default, where memory counts for
more than speed. torch runs eagerly, its AdamW fused where it can be. Compilation does not count.
The losses of the first update stand behind each row: they are the same number.

The floor is the arithmetic: 6 operations for each weight and token, the embedding's own apart. A
row of 128 tokens of 25m is 17 GFLOP, 0.11 s on a core that does 150 GFLOP/s.

    python benchmarks/train.py [--models 1m 25m] [--repeats 3] [--torch-threads 1] [--rows 16]
    [--length 128]
                               [--remat none] [--scan]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models import MODELS, pair
from side_by_side import Row, arguments, in_turns, parse, table

RATE = 1e-4


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--remat", default="none", choices=["none", "minimal", "full"])
    parser.add_argument("--scan", action="store_true")
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        with pair(name, remat=options.remat, scan=options.scan) as models:
            rows.append(measure(name, models, (options.rows, options.length), options.repeats))
    print(table(rows, "tokens/s", rate=True))
    return rows


def measure(name: str, models: tuple, shape: tuple[int, int], repeats: int) -> Row:
    """Measures both programs in turns."""
    import numpy as np

    ours, theirs = models
    tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, shape)
    duet = duet_update(ours, tokens)
    torch = torch_update(theirs, tokens)
    note = f"first losses {duet():.4f} {torch():.4f}"
    seconds = in_turns(duet, torch, repeats)
    return Row(f"{name} {shape[0]} x {shape[1]}", "torch", tokens.size, *seconds, note=note)


def duet_update(model, tokens) -> Callable[[], float]:
    """Makes one update of a supervised stage and returns its loss."""
    import rl.algorithms
    from rl.config.stage import StageOptions
    from rl.training.batch import padded_batch
    from rl.training.trainer import Trainer

    stage = StageOptions.model_validate(
        {"algorithm": "sft", "steps": 1000, "optimizer": {"learning_rate": RATE}}
    )
    trainer = Trainer(model.graph, stage, rl.algorithms.get("sft"))
    state = trainer.start(model.params, seed=0)
    batch = padded_batch(
        [(row, [0] + [1] * (len(row) - 1)) for row in tokens.tolist()], tokens.shape[1]
    )

    def update() -> float:
        nonlocal state
        state, metrics = trainer.update(state, batch)
        model.params = state.policy.params
        return float(metrics["loss"])

    return update


def torch_update(model, tokens) -> Callable[[], float]:
    """Makes the same update with transformers' own loss, which shifts the labels."""
    import torch

    ids = torch.from_numpy(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()

    def update() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return update


if __name__ == "__main__":
    main()
