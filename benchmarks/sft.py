"""Measures an SFT step against TRL's SFTTrainer and a plain loop over transformers and torch, on
rows of different lengths, as people have them.

All start from the same weights and take the same 8 rows a step, of 100 to 512 random tokens, all
but the first trained on: mean over tokens, float32, gradients clipped at norm 1, AdamW without
weight decay. The peers pad the rows of a step to the longest, Duet packs them (`perf/packed_share`
is printed). Tokens per second count real tokens. Each program runs in a process of its own, whose
peak memory is printed, and takes a step when it is its turn; compilation does not count.

`body` is the forward and backward pass of 512 tokens without the head, in turns in one process; the
gradients are those of all weights and of the embeddings' output. torch runs eagerly.

    python benchmarks/sft.py models/smollm2 [--repeats 5] [--peers trl plain] [--torch-threads 2]
    [--remat minimal_flash] [--rows 8] [--longest 512] [--body]
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from models import add_adapter, peft_adapter
from side_by_side import TRL_QUIETLY, Row, Turns, arguments, in_turns, parse, process, table

RATE = 1e-5
WARM = 2
SHORTEST = 100
NAMES = {"trl": "TRL", "plain": "plain loop"}


@dataclass(frozen=True)
class Work:
    """What each step computes, for every program.

    remat: of Duet. rows: of a step. rank: of an adapter that is trained in place of the weights, by
    Duet and TRL.
    """

    directory: str
    turns: int
    rows: int
    longest: int
    remat: str
    rank: int | None = None

    def steps(self, vocabulary: int) -> list[list[list[int]]]:
        """Returns the rows of each turn as token ids. Each step has the same number of tokens."""
        rng = np.random.default_rng(0)
        lengths = np.linspace(SHORTEST, self.longest, self.rows).astype(int)
        return [
            [rng.integers(10, vocabulary, length).tolist() for length in rng.permutation(lengths)]
            for _ in range(self.turns)
        ]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, [], repeats=5)
    parser.add_argument("directory", help="Hugging Face directory of a text model")
    parser.add_argument("--peers", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--remat", default="minimal_flash")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--body", action="store_true", help="measure the body as well")
    options = parse(parser, argv)
    peers = [peer for peer in options.peers if peer != "trl" or importlib.util.find_spec("trl")]
    if peers != options.peers:
        print("TRL is left out: it is not installed (pip install trl)")
    work = Work(
        options.directory, options.repeats + WARM, options.rows, options.longest, options.remat
    )
    rows = [measure(peer, work, options.torch_threads) for peer in peers]
    if options.body:
        rows.append(body(work, options.repeats))
    print(table(rows, "tokens/s", rate=True))
    return rows


def measure(peer: str, work: Work, threads: int | None) -> Row:
    """Steps of Duet and of a peer, in turns."""
    theirs = {"plain": plain_steps, "trl": trl_steps}[peer]
    with process(duet_steps, None, work) as ours, process(theirs, threads, work) as other:
        pairs = [(ours(), other()) for _ in range(work.turns)][WARM:]
    mine, others = zip(*pairs, strict=True)
    memory = [max(step["memory"] for step in steps) / 2**20 for steps in (mine, others)]
    packed = statistics.median(step["packed"] for step in mine)
    note = f"packed {packed:.2f}, peak {memory[0]:,.0f} and {memory[1]:,.0f} MiB"
    seconds = [tuple(step["step"] for step in steps) for steps in (mine, others)]
    return Row(f"SFT, {work.rows} rows", NAMES[peer], mine[0]["tokens"], *seconds, note=note)


def duet_steps(work: Work, told: Turns) -> None:
    """Takes the steps of Duet."""
    import jax

    import policy
    import rl.algorithms
    from policy.config import Runtime
    from rl.config.stage import StageOptions
    from rl.training.batch import padded_batch
    from rl.training.trainer import Trainer

    model = policy.load(work.directory, runtime=Runtime(remat=work.remat))
    if work.rank is not None:
        add_adapter(model, work.rank)
    stage = {"algorithm": "sft", "steps": 1000, "optimizer": {"learning_rate": RATE}}
    trainer = Trainer(model.graph, StageOptions.model_validate(stage), rl.algorithms.get("sft"))
    state = trainer.start(model.params, seed=0)
    model.params = trainer.policy_params(state)
    for rows in work.steps(model.config.vocab_size):
        told.wait()
        batch = padded_batch([(row, [0] + [1] * (len(row) - 1)) for row in rows], work.longest)
        state, metrics = trainer.update(state, batch)
        model.params = trainer.policy_params(state)
        jax.block_until_ready(state)
        tokens = sum(map(len, rows))
        told.done({"packed": metrics["perf/packed_share"], "tokens": tokens})


def plain_steps(work: Work, told: Turns) -> None:
    """Takes the steps of a plain loop: one forward and backward pass of the padded rows."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()
    for rows in work.steps(model.config.vocab_size):
        told.wait()
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        labels = ids.masked_fill(seen == 0, -100)
        loss = model(input_ids=ids, attention_mask=seen, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told.done({})


def trl_steps(work: Work, told: Turns) -> None:
    """Takes the steps of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32)
    rows = [row for rows in work.steps(model.config.vocab_size) for row in rows]

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            told.wait()

        def on_step_end(self, *_, **__):
            told.done({})

    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            max_steps=work.turns,
            per_device_train_batch_size=work.rows,
            max_length=work.longest,
            learning_rate=RATE,
            weight_decay=0.0,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            **TRL_QUIETLY,
        )
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(work.directory),
            callbacks=[Steps()],
            peft_config=peft_adapter(work.rank),
        )
        trainer.train()


def body(work: Work, repeats: int) -> Row:
    """Forward and backward pass of `longest` tokens from embeddings to the hidden states before the
    head."""
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import AutoModelForCausalLM

    import policy
    from policy.config import Runtime
    from policy.modes import make_step

    ours = policy.load(work.directory, runtime=Runtime(remat=work.remat))
    theirs = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32).model
    theirs.train()
    ids = np.random.default_rng(0).integers(10, ours.config.vocab_size, (1, work.longest))
    tokens = jnp.asarray(ids, jnp.int32)
    step = make_step(jnp.ones_like(tokens))
    graph = ours.graph

    def total(params):
        hidden, _, _ = graph.decoder(params)(tokens, step, None, graph.runtime)
        return hidden.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))

    def duet() -> None:
        jax.block_until_ready(gradient(ours.params))

    def eager() -> None:
        theirs.zero_grad()
        theirs(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state.sum().backward()

    seconds = in_turns(duet, eager, repeats)
    return Row(f"body, {work.longest} tokens", "torch", work.longest, *seconds)


if __name__ == "__main__":
    main()
