"""Measures how full packed rows are, and what attention of a long packed row costs.

    python benchmarks/packing.py [--steps 30] [--sizes 8 32 128]
    python benchmarks/packing.py --attention [--length 2048] [--sequences 1 2 4 8 16]
        [--blocks 48 64] [--heads 9 3 64]

    python benchmarks/packing.py --updates DIRECTORY [--shapes 2x128 1x768 1x1536] [--tokens 3072]

The first prints `perf/packed_share` of updates of every kind of stage: the mean over the steps, the
least of a step, and how many shapes of rows, so programs, the steps meet. No model runs: lengths
alone decide how a batch is packed. Lengths are lognormal, or those of the bytes of
configs/data/word_problems.jsonl. The rows of a size are so many sequences, pairs or, with shared
prompts, groups of four completions.

The second prints the pairs of blocks of a packed row and the milliseconds of its attention, forward
and backward, by blocks of each size of `--blocks` and by the dense form: one row of `--length`
tokens that holds so many sequences. `--heads`: of queries, of keys, and the numbers of a head, by
default those of SmolLM2-135M. Each size and the dense form are measured in turns; the least counts.

The third prints the seconds of an SFT update of `--tokens` tokens of the model of a Hugging Face
directory, by the rows of a micro-batch and their length, measured in turns: as many sequences of
128 tokens as a row has room for.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from side_by_side import arguments, in_turns, parse

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "configs" / "data" / "word_problems.jsonl"
SAMPLES = 4
LIMIT = 512


class Kind(NamedTuple):
    """A kind of stage: its algorithm, whether completions of a prompt share it, and the sequences
    of a row, a pair's or a group's."""

    name: str
    algorithm: str
    shared: bool = False
    group: int = 1


KINDS = (
    Kind("sft", "sft"),
    Kind("distill", "distill"),
    Kind("dpo", "dpo", shared=True, group=2),
    Kind("dpo, never", "dpo", group=2),
    Kind("reward_model", "reward_model", shared=True, group=2),
    Kind("grpo", "grpo", shared=True, group=SAMPLES),
    Kind("grpo, never", "grpo"),
    Kind("ppo", "ppo"),
)


class Share(NamedTuple):
    """The shares of real tokens of the steps, and the shapes that they met."""

    shares: list[float]
    shapes: set[tuple[int, int, int]]


Lengths = Callable[..., tuple[list[int], list[int]]]


def lognormal(rng, count: int, limit: int = LIMIT, mean: float = 0.4, sigma: float = 0.6):
    """Draws (tokens of prompts, of answers); together at most `limit`, 0.4 of it on average."""
    import numpy as np

    tokens = np.exp(rng.normal(np.log(mean * limit), sigma, count)).clip(8, limit).astype(int)
    prompts = np.maximum(1, (tokens * rng.uniform(0.2, 0.6, count)).astype(int))
    return prompts.tolist(), (tokens - prompts).tolist()


def word_problems(rng, count: int):
    """Draws (bytes of questions, of solutions)."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    chosen = [rows[i] for i in rng.integers(0, len(rows), count)]
    return [len(r["question"]) for r in chosen], [len(r["solution"]) for r in chosen]


LENGTHS: dict[str, Lengths] = {"lognormal": lognormal, "word problems": word_problems}


def batches(kind: Kind, lengths: Lengths, size: int, steps: int) -> Iterator:
    """Yields the batches of the steps. Answers of a pair or a group begin with one prompt."""
    import numpy as np

    from rl.training.batch import segmented_batch

    rng = np.random.default_rng(0)
    pairs = kind.algorithm in ("dpo", "reward_model")
    for _ in range(steps):
        prompts, answers = lengths(rng, size * kind.group)
        rows = []
        for i, own in enumerate(answers):
            # Prompts are as long as that of the first of their group.
            prompt = prompts[i - i % kind.group]
            tokens = [1 + i // kind.group] * prompt + rng.integers(1000, 2000, max(1, own)).tolist()
            rows.append((tokens[:LIMIT], ([0] * prompt + [1] * max(1, own))[:LIMIT]))
        if pairs:
            yield segmented_batch(list(zip(rows[::2], rows[1::2], strict=True)), 2 * LIMIT)
            continue
        batch = segmented_batch([(row,) for row in rows], LIMIT)
        yield batch.replace(prompt=np.arange(len(rows), dtype=np.int32) // kind.group)


@cache
def tiny():
    """Returns the graph of the tiny model."""
    import policy

    return policy.create("tiny-deepseek").graph


def stage(kind: Kind, size: int):
    """Returns the stage of a configuration with the tiny model. Nothing compiles."""
    import rl.stages
    from rl.config.run import RunConfig

    online = kind.algorithm in ("grpo", "ppo")
    options = {
        "algorithm": kind.algorithm,
        "steps": 1,
        "prompts_per_step": size,
        "samples_per_prompt": kind.group if online else 1,
        "sampling": {"max_new_tokens": LIMIT // 2},
        "shared_prefix": "auto" if kind.shared else "never",
    }
    if kind.algorithm == "distill":
        options["teacher"] = {"source": "tiny-deepseek"}
    config = RunConfig.model_validate(
        {
            "model": {"source": "tiny-deepseek"},
            "platform": "cpu",
            "max_length": LIMIT,
            "data": {"task": "arithmetic"},
            "rewards": {"functions": ["exact_answer"]},
            "stages": [options],
        }
    )
    [made] = rl.stages.create(config)
    made.bind(tiny())
    return made


def measure(kind: Kind, lengths: Lengths, size: int, steps: int) -> Share:
    """Packs the batches of the steps as their updates do."""
    trainer = stage(kind, size).trainer
    share = Share([], set())
    for batch in batches(kind, lengths, size, steps):
        packing, rows = trainer.packing_of_update(batch)
        share.shares.append(packing.metrics(rows, kind.shared)["perf/packed_share"])
        share.shapes.add((*packing.shape, rows))
    return share


def attention(heads: Sequence[int], length: int, sequences: int, size: int, repeats: int) -> str:
    """Returns a line of pairs of blocks and of seconds.

    heads: of queries, of keys, and the numbers of a head. size: tokens of a block. The lengths of
    the sequences are lognormal, so that they end inside of blocks.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from policy.attention import block_attention
    from policy.attention.block_attention import BlockSpec
    from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
    from policy.cache.layer_cache import own_tokens
    from policy.modes import make_step

    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.lognormal(0, 0.3, sequences))
    segments = 1 + np.searchsorted(length * ends / ends[-1], np.arange(length), side="right")
    step = make_step(jnp.zeros((1, length)), segments=jnp.asarray(segments[None], jnp.int32))
    mask = Mask(step, own_tokens(step, {}))
    spec = BlockSpec(size, AttentionBounds())
    H, K, D = heads
    q, k, v, given = (
        jnp.asarray(rng.normal(size=(1, heads, length, D)), jnp.float32) for heads in (H, K, K, H)
    )

    def gradient(attend_to: Callable) -> Callable[[], object]:
        def loss(q, k, v):
            return jnp.sum(attend_to(q, k, v) * given)

        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return lambda: jax.block_until_ready(run(q / D**0.5, k, v))

    blocks = gradient(
        partial(block_attention.block_attention, spec, queries=mask.queries[:2], keys=mask.keys)
    )
    dense = gradient(lambda q, k, v: attend(q, k, v, mask, 512))
    ours, theirs = in_turns(blocks, dense, repeats)
    queries, keys = (
        tuple(jnp.pad(a, ((0, 0), (0, -length % size))) for a in tokens)
        for tokens in (mask.queries[:2], mask.keys)
    )
    listed = block_attention.pairs(spec, queries, keys)
    n = -(-length // size)
    blocks_ms, dense_ms = (1e3 * min(seconds) for seconds in (ours, theirs))
    return (
        f"{sequences:9d} {length // sequences:7d} {size:6d} "
        f"{int(listed.number):6d} of {n * (n + 1) // 2:<6d}"
        f"{blocks_ms:9.1f} {dense_ms:9.1f} {dense_ms / blocks_ms:7.1f}"
    )


def updates(directory: str, tokens: int, shapes: Sequence[tuple[int, int]], repeats: int) -> None:
    """Prints a line for each turn: the shape of a micro-batch, and the seconds of the update."""
    import jax
    import numpy as np

    import policy
    import rl.algorithms
    from rl.config.stage import StageOptions
    from rl.training.batch import segmented_batch
    from rl.training.trainer import Trainer
    from rl.training.updater import UpdateArguments

    model = policy.load(directory, dtype="float32")
    options = StageOptions.model_validate({"algorithm": "sft", "steps": 1000})
    trainer = Trainer(model.graph, options, rl.algorithms.get("sft"))
    state = trainer.start(model.params, seed=0)
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    for turn in range(1 + repeats):  # the first compiles
        for rows, length in shapes:
            sequences = [
                [(rng.integers(0, vocab, 128).tolist(), [0] + [1] * 127)] * (length // 128)
                for _ in range(tokens // length)
            ]
            batch = segmented_batch(sequences, length)
            batch = batch.replace(prompt=np.zeros(batch.tokens.shape, np.int32))
            arguments = UpdateArguments(batch, trainer.loss_inputs(batch))
            [call] = trainer.update_calls(state, arguments, rows)
            began = time.perf_counter()
            learners = jax.block_until_ready(call.run().learners)
            seconds = time.perf_counter() - began
            state = state.with_learners(learners)
            if turn:
                print(f"{rows} x {length}: {seconds:.2f} s", flush=True)


def shape_of(text: str) -> tuple[int, int]:
    """Reads ROWSxLENGTH."""
    rows, length = map(int, text.split("x"))
    return rows, length


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, str, int], Share]:
    """Prints a table."""
    parser = arguments(__doc__, [], repeats=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--blocks", type=int, nargs="+", default=[48, 64])
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64])
    parser.add_argument("--updates", metavar="DIRECTORY")
    parser.add_argument(
        "--shapes", type=shape_of, nargs="+", default=[(2, 128), (1, 768), (1, 1536)]
    )
    parser.add_argument("--tokens", type=int, default=3072)
    options = parse(parser, argv)
    result: dict[tuple[str, str, int], Share] = {}
    if options.updates:
        updates(options.updates, options.tokens, options.shapes, options.repeats)
        return result
    if options.attention:
        print(
            f"{'sequences':>9s} {'tokens':>7s} {'block':>6s} {'pairs':>10s}  {'blocks ms':>12s} "
            "dense ms   ratio"
        )
        for sequences in options.sequences:
            for size in options.blocks:
                line = attention(options.heads, options.length, sequences, size, options.repeats)
                print(line, flush=True)
        return result
    print(f"{'lengths':14s} {'stage':13s} {'rows':>5s} {'mean':>6s} {'least':>6s} {'shapes':>6s}")
    for name, lengths in LENGTHS.items():
        for kind in KINDS:
            for size in options.sizes:
                share = measure(kind, lengths, size, options.steps)
                result[name, kind.name, size] = share
                print(
                    f"{name:14s} {kind.name:13s} {size:5d} {statistics.mean(share.shares):6.3f} "
                    f"{min(share.shares):6.3f} {len(share.shapes):6d}",
                    flush=True,
                )
    return result


if __name__ == "__main__":
    main()
