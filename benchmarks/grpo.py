"""Seconds of one GRPO step, sampling, reward and update together, beside TRL's GRPOTrainer where `trl` is installed, and
beside a plain loop over transformers and torch.

All start from the same weights, take 8 prompts of the same length, sample 8 completions of 16 tokens for each at temperature 1
(nothing ends one early), score them with `letters` of letters.py, take advantages within the groups, and make one
strictly on-policy update in float32: token aggregation, no KL term, gradients clipped at norm 1, AdamW.

- Duet calls the parts of `rl/loop.py`: generator, reward workers, batch, `Trainer.update`, with nothing recomputed and the
  layers unrolled (`benchmarks/train.py` says more).
- TRL: `GRPOTrainer.train`, one step of it a turn, from the beginning of the step to its end; Duet's turn comes between two
  of its steps. It decodes with transformers.
- The plain loop: `generate`, the reward called in the process, one forward and backward pass of the 64 rows, one AdamW step.
  It is the least that a program over transformers has to do.

The floor is the sum of what generate.py measures for 64 completions of 16 tokens and train.py for 64 rows of 32 tokens.

    python benchmarks/grpo.py [--models 1m 25m] [--repeats 3] [--torch-threads 1]
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from letters import letters
from models import MODELS, pair
from side_by_side import Row, arguments, in_turns, parse, table

PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 16
RATE = 1e-5
TEXTS = [f"prompt number {i}:" for i in range(PROMPTS)]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    options = parse(arguments(__doc__, list(MODELS), repeats=3), argv)
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print("TRL is left out: it is not installed (pip install trl)")
    rows = []
    for name in options.models:
        rows.append(measure(name, "plain loop", options.repeats))
        if has_trl:
            rows.append(measure(name, "TRL", options.repeats))
    print(table(rows, "s/step", rate=False))
    return rows


def measure(name: str, peer: str, repeats: int) -> Row:
    """Each peer from fresh weights, for an update changes them in place."""
    from rewards import Runner, RunnerOptions
    from rollout.tokenizer import byte_level

    reward = f"{Path(__file__).with_name('letters.py')}:letters"
    tokenizer = byte_level()
    with pair(name) as (ours, theirs), Runner(RunnerOptions(((reward, 1.0, {}),))) as runner:
        duet = duet_step(ours, tokenizer, runner)
        if peer == "TRL":
            seconds = turns_with_trl(duet, theirs, tokenizer, repeats)
        else:
            seconds = in_turns(duet, plain_step(theirs, tokenizer), repeats)
    return Row(name, peer, 1, *seconds)


def duet_step(model, tokenizer, runner) -> Callable[[], None]:
    import jax

    import rl.algorithms
    from rl import rollouts
    from rl.config import StageOptions
    from rl.data import Example
    from rl.trainer import Trainer
    from rollout import Generator, SamplingParams, chat

    stage = StageOptions.model_validate(
        {
            "algorithm": "grpo",
            "steps": 1000,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "optimizer": {"learning_rate": RATE},
            "sampling": {"max_new_tokens": NEW_TOKENS},
        }
    )
    algorithm = rl.algorithms.get("grpo")
    trainer = Trainer(model.graph, stage, algorithm)
    state = trainer.start(model.params, seed=0)
    problems = [rollouts.Problem(Example(text), chat.render_prompt(tokenizer, text)) for text in TEXTS]
    max_length = max(len(problem.ids) for problem in problems) + NEW_TOKENS
    generator = Generator(model, max_length=max_length, slots=PROMPTS * SAMPLES, tokenizer=tokenizer)
    params = SamplingParams(n=SAMPLES, max_new_tokens=NEW_TOKENS)
    count = 0

    def step() -> None:
        nonlocal state, count
        found = rollouts.collect(generator, runner, problems, params, range(count, count + PROMPTS))
        count += PROMPTS
        advantages = algorithm.advantages(found.scores.result().total.reshape(PROMPTS, SAMPLES))
        batch = found.batch(max_length).replace(advantages=advantages.reshape(-1).astype("float32"))
        state, metrics = trainer.update(state, batch)
        model.params = state.policy.params
        jax.block_until_ready((state, metrics))

    return step


def plain_step(model, tokenizer) -> Callable[[], None]:
    import torch

    given = tokenizer([text for text in TEXTS for _ in range(SAMPLES)], return_tensors="pt")
    start = given["input_ids"].shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    sampling = {"do_sample": True, "top_k": 0, "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    given = {key: given[key] for key in ("input_ids", "attention_mask")}

    def step() -> None:
        with torch.inference_mode():
            rows = model.generate(**given, **sampling)
        rows = rows.clone()  # out of inference mode, so that a gradient can be taken
        texts = tokenizer.batch_decode(rows[:, start:], skip_special_tokens=True)
        rewards = torch.tensor(letters(None, texts)).reshape(PROMPTS, SAMPLES)
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).reshape(-1, 1)
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1]
        logp = torch.log_softmax(logits, dim=-1).gather(-1, rows[:, start:, None])[..., 0]
        loss = -((logp - logp.detach()).exp() * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def turns_with_trl(duet: Callable[[], None], model, tokenizer, repeats: int) -> tuple[tuple, tuple]:
    """Seconds of each step of TRL but the first, and of Duet between them."""
    import tempfile

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[tuple[float, float]] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            theirs, began = time.perf_counter() - self.began, time.perf_counter()
            duet()
            seconds.append((time.perf_counter() - began, theirs))

    with tempfile.TemporaryDirectory() as directory:
        settings = GRPOConfig(
            output_dir=directory,
            max_steps=repeats + 1,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
            temperature=1.0,
            beta=0.0,
            learning_rate=RATE,
            max_grad_norm=1.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=letters,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS] * (repeats + 1)),
            processing_class=tokenizer,
            callbacks=[Turns()],
        )
        duet()
        trainer.train()
    return tuple(zip(*seconds[1:], strict=True))


if __name__ == "__main__":
    main()
