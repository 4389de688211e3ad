"""Measures the seconds of one GRPO step (sampling, reward and update) against TRL's GRPOTrainer, if
`trl` is installed, and against a plain loop over transformers and torch.

All start from the same weights, take 8 prompts of 16 to 32 tokens, sample 8 completions of at most
64 tokens for each at temperature 1, score them with `letters` of letters.py, take advantages within
the groups, and make one strictly on-policy update in float32: token aggregation, no KL term,
gradients clipped at norm 1, AdamW, nothing recomputed.

Lengths are random: one token in 40 of the vocabulary ends a completion, the same ids for all. Of
weights as random as these each token is as likely as any other, so completions have a mean of 32
tokens whoever samples them; the means that came out are printed.

- Duet calls the parts of `rl/run/loop.py`: generator, reward workers, batch, `Trainer.update`, with
  the layers unrolled (`benchmarks/train.py` says more).
- TRL: `GRPOTrainer.train`, one step of it a turn, from the beginning of the step to its end. It
  decodes with transformers.
- The plain loop: `generate`, the reward called in the process, one forward and backward pass of the
  64 rows, one AdamW step. It is the least that a program over transformers has to do.

Each runs in a process of its own, whose peak memory is printed, and takes a step when it is its
turn. Compilation does not count: the first two steps of each are left out, and whatever Duet
compiles later is in its seconds.

With `--directory` the model is one with real weights (docs/real_weights.md), with its own tokenizer
and its own end of a completion, 4 completions of at most 16 tokens, and the update of Duet keeps
what `--remat` says.

The floor of the update is its arithmetic: 6 operations for each weight but the embedding's and each
token that is not padding, at the rate of a product of two matrices of 2048 x 2048 in the same run.
The share of it that Duet's update reaches is printed.

    python benchmarks/grpo.py [--models 1m 25m] [--repeats 5] [--peers trl plain] [--torch-threads
    1] [--directory models/smollm2] [--remat none]
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from letters import letters
from models import MODELS, add_adapter, pair, peft_adapter
from side_by_side import Row, Turns, arguments, parse, process, table, trl_settings

PROMPTS = 8
RATE = 1e-5
WARM = 2
NAMES = {"trl": "TRL", "plain": "plain loop"}
TEXTS = [f"prompt number {i}:".ljust(16 + 2 * i, ".") for i in range(PROMPTS)]


@dataclass(frozen=True)
class Work:
    """What each step computes, for every program.

    directory: of the weights. is_real: whether it has a tokenizer, which then says where
    completions end. remat: of Duet's update. rank: of an adapter that is trained in place of the
    weights, by Duet and TRL.
    """

    directory: str
    turns: int
    samples: int = 8
    new_tokens: int = 64
    is_real: bool = False
    remat: str = "none"
    rank: int | None = None

    def tokenizer(self):
        """Returns the tokenizer of the directory, or one whose tokens are bytes."""
        from rollout.text.tokenizer import byte_level, load_tokenizer

        return load_tokenizer(self.directory) if self.is_real else byte_level()

    def stop_ids(self, vocabulary: int) -> list[int]:
        """Returns the end of sequence of the tokenizer, and for random weights the last ids."""
        if self.is_real:
            return [self.tokenizer().eos_token_id]
        count = round(vocabulary / 40)
        return [2, *range(vocabulary - count + 1, vocabulary)]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=5)
    parser.add_argument("--peers", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--directory", help="a Hugging Face directory, in place of --models")
    parser.add_argument("--remat", default="none")
    options = parse(parser, argv)
    peers = [peer for peer in options.peers if peer != "trl" or importlib.util.find_spec("trl")]
    if peers != options.peers:
        print("TRL is left out: it is not installed (pip install trl)")
    turns = options.repeats + WARM
    rows = []
    if options.directory:
        work = Work(options.directory, turns, 4, 16, is_real=True, remat=options.remat)
        name = Path(options.directory).name
        rows = [measure(name, peer, work, options.torch_threads) for peer in peers]
    for name in () if options.directory else options.models:
        with tempfile.TemporaryDirectory() as directory:
            with pair(name) as (_, theirs):
                theirs.save_pretrained(directory)
            work = Work(directory, turns, remat=options.remat)
            rows += [measure(name, peer, work, options.torch_threads) for peer in peers]
    print(table(rows, "s/step", rate=False))
    return rows


def measure(name: str, peer: str, work: Work, threads: int | None) -> Row:
    """Steps of Duet and of a peer, in turns, each from the same weights in a process of its own."""
    theirs = {"plain": plain_steps, "trl": trl_steps}[peer]
    with process(duet_steps, None, work) as ours, process(theirs, threads, work) as other:
        pairs = [(ours(), other()) for _ in range(work.turns)][WARM:]
    mine, others = zip(*pairs, strict=True)
    show(name, peer, mine, others)
    return Row(
        name, NAMES[peer], 1, tuple(s["step"] for s in mine), tuple(s["step"] for s in others)
    )


def show(name: str, peer: str, mine: Sequence[dict], others: Sequence[dict]) -> None:
    def median(key, steps=mine):
        return statistics.median(step[key] for step in steps)

    update = median("update")
    share = statistics.median(step["operations"] / step["rate"] / step["update"] for step in mine)
    print(
        f"{name}: generation {median('generation'):.3f} s, update {update:.3f} s, the rest "
        f"{median('step') - median('generation') - update:.3f} s; the update reaches {share:.0%} "
        f"of the matrix-product bound ({median('rate') / 1e9:.0f} GFLOP/s) on real tokens, "
        f"{median('packed'):.0%} of those computed"
    )
    lengths = [statistics.mean(step["length"] for step in steps) for steps in (mine, others)]
    memory = [max(step["memory"] for step in steps) / 2**20 for steps in (mine, others)]
    print(
        f"  mean lengths {lengths[0]:.1f} and {lengths[1]:.1f} ({NAMES[peer]}); peak "
        f"{memory[0]:,.0f} and {memory[1]:,.0f} MiB"
    )


def grpo_stage(work: Work):
    """Returns the options of the stage, as rl.config.stage.StageOptions."""
    from rl.config.stage import StageOptions

    return StageOptions.model_validate(
        {
            "algorithm": "grpo",
            "steps": 1000,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": work.samples,
            "optimizer": {"learning_rate": RATE},
            "sampling": {"max_new_tokens": work.new_tokens},
        }
    )


class Duet:
    """The parts of Duet that a GRPO step calls."""

    def __init__(self, work: Work):
        """Loads the model, and makes its trainer and its generator."""
        import policy
        import rl.algorithms
        from policy.config import Runtime
        from rl.data.datasets import Example
        from rl.data.encoded import Problem
        from rl.stages.configured import LargestGroup
        from rl.training.batch_updates import LONGEST_ON_CPU
        from rl.training.packing.trees import Sharing
        from rl.training.trainer import Trainer
        from rollout import Generator, SamplingParams
        from rollout.text import chat

        runtime = Runtime(remat=work.remat, scan=work.is_real)
        self.model = policy.load(work.directory, runtime=runtime)
        if work.rank is not None:
            add_adapter(self.model, work.rank)
        self.work = work
        tokenizer = work.tokenizer()
        self.algorithm = rl.algorithms.get("grpo")
        self.trainer = Trainer(self.model.graph, grpo_stage(work), self.algorithm)
        self.state = self.trainer.start(self.model.params, seed=0)
        self.model.params = self.trainer.policy_params(self.state)
        self.drawn = 0
        self.problems = [
            Problem(Example(text), chat.render_prompt(tokenizer, text)) for text in TEXTS
        ]
        longest = max(len(problem.ids) for problem in self.problems)
        self.max_length = longest + work.new_tokens
        packed = LargestGroup(work.samples, longest, work.new_tokens).packed_length(
            LONGEST_ON_CPU
        )  # as a run chooses it
        self.trainer.sharing = Sharing(Fraction(packed, self.max_length))
        self.generator = Generator(
            self.model,
            max_length=self.max_length,
            slots=PROMPTS * work.samples,
            tokenizer=tokenizer,
        )
        stops = tuple(work.stop_ids(self.model.config.vocab_size))
        self.params = SamplingParams(
            n=work.samples, max_new_tokens=work.new_tokens, stop_token_ids=stops
        )

    def step(self, runner) -> dict:
        """Takes a step, with the rewards of `runner`, and returns its seconds and counts."""
        import jax

        from rl.stages.sampling.batches import to_batch
        from rollout.collect import Source, collect

        began = time.perf_counter()
        ids = range(self.drawn, self.drawn + PROMPTS)
        samples = collect(Source(self.generator, runner), self.problems, self.params, ids)
        self.generator.release()  # as a run does before its update
        self.drawn += PROMPTS
        advantages = self.algorithm.advantages(
            samples.scores.result().total.reshape(PROMPTS, self.work.samples)
        )
        batch = to_batch(samples, self.max_length).replace(
            advantages=advantages.reshape(-1).astype("float32")
        )
        before = time.perf_counter()
        self.state, metrics = self.trainer.update(self.state, batch)
        self.model.params = self.trainer.policy_params(self.state)
        jax.block_until_ready((self.state, metrics))
        ended = time.perf_counter()
        graph = self.model.graph
        weights = graph.parameters - graph.shapes["embed_tokens"].size
        return {
            "step": ended - began,
            "generation": samples.seconds,
            "update": ended - before,
            "length": float(batch.mask.sum()) / len(batch.prompt),
            "packed": metrics["perf/packed_share"],
            "operations": 6 * weights * int((batch.segments != 0).sum()),
        }


def product_rate() -> float:
    """Returns the FLOP/s of a product of two matrices of 2048 x 2048, the best of three."""
    import jax
    import jax.numpy as jnp

    matrix = jax.block_until_ready(jnp.ones((2048, 2048), jnp.float32))

    def rate() -> float:
        began = time.perf_counter()
        jax.block_until_ready(matrix @ matrix)
        return 2 * 2048**3 / (time.perf_counter() - began)

    return max(rate() for _ in range(3))


def duet_steps(work: Work, told: Turns) -> None:
    """Takes the steps of Duet."""
    from rewards import Runner, RunnerOptions

    duet = Duet(work)
    reward = f"{Path(__file__).with_name('letters.py')}:letters"
    with Runner(RunnerOptions(((reward, 1.0, {}),))) as runner:
        for _ in range(work.turns):
            told.wait()
            told.done(duet.step(runner) | {"rate": product_rate()})


def plain_steps(work: Work, told: Turns) -> None:
    """Takes the steps of the plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32)
    tokenizer = work.tokenizer()
    given = tokenizer(
        [text for text in TEXTS for _ in range(work.samples)],
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )
    start = given["input_ids"].shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    ends = torch.tensor(work.stop_ids(model.config.vocab_size))
    sampling = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": work.new_tokens,
        "eos_token_id": ends.tolist(),
        "pad_token_id": 0,
    }
    given = {key: given[key] for key in ("input_ids", "attention_mask")}

    def step() -> dict:
        with torch.inference_mode():
            rows = model.generate(**given, **sampling)
        rows = rows.clone()  # out of inference mode, so that a gradient can be taken
        written = rows[:, start:]
        ended = torch.isin(written, ends).int().cumsum(dim=1)
        mask = (
            ended - torch.isin(written, ends).int() == 0
        ).float()  # up to the first end, itself included
        texts = tokenizer.batch_decode(
            [row[m > 0] for row, m in zip(written, mask, strict=True)], skip_special_tokens=True
        )
        rewards = torch.tensor(letters(None, texts)).reshape(PROMPTS, work.samples)
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).reshape(-1, 1)
        seen = torch.cat([given["attention_mask"], mask.long()], dim=1)
        logits = model(
            rows, attention_mask=seen, use_cache=False, logits_to_keep=written.shape[1] + 1
        ).logits[:, :-1]
        logp = torch.log_softmax(logits, dim=-1).gather(-1, written[..., None])[..., 0]
        loss = -((logp - logp.detach()).exp() * advantages * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"length": float(mask.sum(dim=1).mean())}

    for _ in range(work.turns):
        told.wait()
        told.done(step())


def trl_steps(work: Work, told: Turns) -> None:
    """Takes the steps of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32)
    tokenizer = work.tokenizer()
    model.generation_config.eos_token_id = work.stop_ids(model.config.vocab_size)
    lengths: list[float] = []

    def scored(prompts, completions, completion_ids, **_):
        lengths.append(statistics.mean(map(len, completion_ids)))
        return letters(prompts, completions)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            told.wait()

        def on_step_end(self, *_, **__):
            told.done({"length": lengths[-1]})

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl_settings(
            scratch,
            max_steps=work.turns,
            per_device_train_batch_size=PROMPTS * work.samples,
            num_generations=work.samples,
            max_completion_length=work.new_tokens,
            learning_rate=RATE,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=scored,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS] * work.turns),
            processing_class=tokenizer,
            callbacks=[Steps()],
            peft_config=peft_adapter(work.rank),
        )
        trainer.train()


if __name__ == "__main__":
    main()
