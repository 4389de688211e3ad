"""Measures tokens per second of generation with drafted tokens against plain decoding with the same
weights.

A small Qwen3-shaped model with one prediction module learns lines such as `57+68=125` for some SFT
steps, the module along with it (loss weight 0.3), so that its drafts are as good as those of a
module that was trained with its model. Then both ways of decoding complete the same prompts with 64
tokens each, in turns; nothing ends a completion early, compilation does not count.

Columns at the end of a line: drafts accepted a step (of those drafted), the share of tokens on
which both agree (rounding can part them), and for drawn tokens, over the completions themselves:
how often one draft must be accepted when draft and token are drawn by the same number
(rollout/engine/speculative.py), and `best`, which no rule can exceed: the mean of sum_x min(p(x),
q(x)).

A step with drafts reads the weights as often as one without, so on hardware that waits for memory
it costs little more and the ratio nears 1 + accepted. On a CPU products of more rows cost more, and
a small model pays for the module's own passes: the ratio is what is left.

    python benchmarks/speculative.py [--models 1m 25m] [--repeats 3] [--steps 400] [--batches 1 16]
    [--drafts 1 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from models import MODELS
from side_by_side import Row, arguments, in_turns, parse, table

NEW_TOKENS = 64
ROWS = 32
LENGTH = 64


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument(
        "--steps", type=int, default=400, help="SFT steps before anything is measured"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 2])
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        model = trained(name, options.steps)
        for batch in options.batches:
            for drafts in options.drafts:
                rows += [
                    measure(f"{name} batch {batch}", model, batch, drafts, t, options.repeats)
                    for t in (0.0, 1.0)
                ]
    print(table(rows, "tokens/s", rate=True))
    return rows


def lines(count: int, seed: int) -> list[int]:
    """Bytes of so many sums."""
    import numpy as np

    pairs = np.random.default_rng(seed).integers(0, 100, (count, 2))
    return list("".join(f"{a}+{b}={a + b}\n" for a, b in pairs).encode())


def trained(name: str, steps: int):
    """Trains a model of that size with one module for `steps` updates on rows of sums."""
    import rl.algorithms
    from policy import create, families
    from policy.config import Runtime
    from rl.config.stage import StageOptions
    from rl.training.batch import padded_batch
    from rl.training.trainer import Trainer

    section = {"duet": {"multi_token_prediction": {"depth": 1}}}
    model = create(families.read(MODELS[name] | section), runtime=Runtime(remat="none", scan=False))
    optimizer = {"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 20}
    stage = {
        "algorithm": "sft",
        "steps": steps,
        "prompts_per_step": ROWS,
        "mtp": {"coef": 0.3},
        "optimizer": optimizer,
    }
    trainer = Trainer(model.graph, StageOptions.model_validate(stage), rl.algorithms.get("sft"))
    state = trainer.start(model.params, seed=0)
    metrics = {}
    for step in range(steps):
        rows = [lines(LENGTH // 4, seed=step * ROWS + row)[:LENGTH] for row in range(ROWS)]
        state, metrics = trainer.update(
            state, padded_batch([(row, [1] * LENGTH) for row in rows], LENGTH)
        )
    model.params = state.policy.params
    shown = (f"{key} {float(metrics[key]):.3f}" for key in ("nll", "mtp/loss", "mtp/acceptance"))
    print(f"{name} after {steps} steps:", *shown)
    return model


def measure(name: str, model, batch: int, drafts: int, temperature: float, repeats: int) -> Row:
    """Measures both programs in turns."""
    import numpy as np

    from rollout import Generator, GeneratorOptions, SamplingParams

    prompts = [lines(2, seed=10**6 + row) for row in range(batch)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=temperature)

    def decoder(count: int):
        options = GeneratorOptions(speculative=count, tokens_per_dispatch=NEW_TOKENS // (count + 1))
        generator = Generator(
            model, max_length=max(map(len, prompts)) + NEW_TOKENS, slots=batch, options=options
        )
        return lambda: [group[0] for group in generator.generate(prompts, params)]

    with_drafts = decoder(drafts)
    plain = decoder(0)
    made = with_drafts()
    same = np.mean(
        [
            a == b
            for x, y in zip(made, plain(), strict=True)
            for a, b in zip(x.tokens, y.tokens, strict=True)
        ]
    )
    note = (
        f"accepted {batch * NEW_TOKENS / sum(c.steps for c in made) - 1:.2f} of {drafts}, same "
        f"{same:.0%}"
    )
    if temperature:
        coupled, best = acceptance(model, prompts, made, temperature)
        note += f", one number {coupled:.2f}, best {best:.2f}"
    seconds = in_turns(with_drafts, plain, repeats)
    kind = "drawn" if temperature else "greedy"
    return Row(f"{name} {kind} drafts {drafts}", "plain", batch * NEW_TOKENS, *seconds, note=note)


def acceptance(model, prompts, made, temperature: float) -> tuple[float, float]:
    """Returns (how often one number gives decoder and module the same token, mean of sum_x
    min(p(x), q(x)))."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from policy import modes
    from policy.heads import head
    from policy.heads.multi_token_prediction import predict

    width = max(map(len, prompts)) + NEW_TOKENS
    tokens = np.zeros((len(made), width), np.int32)
    written = np.zeros((len(made), width), bool)
    for row, (prompt, completion) in enumerate(zip(prompts, made, strict=True)):
        end = len(prompt) + NEW_TOKENS
        tokens[row, :end], written[row, len(prompt) : end] = [*prompt, *completion.tokens], True

    @jax.jit
    def both(params):
        """p and q of the tokens from the third on, [B, T - 2, V]."""
        decoder = model.graph.decoder(params)
        runtime = model.graph.runtime
        hidden, _, aux = decoder(tokens, modes.make_step(jnp.asarray(tokens)), None, runtime)
        ahead = jnp.asarray(tokens[:, 1:])
        normed = predict(
            decoder,
            1,
            aux.mtp_input[:, :-1],
            replace(modes.make_step(ahead), tokens=ahead),
            None,
            runtime,
        )[1]
        return tuple(
            jax.nn.softmax(head.logits(h, decoder.head_weight) / temperature)
            for h in (hidden[:, 1:-1], normed[:, :-1])
        )

    p, q = (np.asarray(a, np.float64)[written[:, 2:]] for a in both(model.params))
    above = np.minimum(p.cumsum(1), q.cumsum(1))
    below = np.maximum(p.cumsum(1) - p, q.cumsum(1) - q)
    return float(np.maximum(0, above - below).sum(1).mean()), float(np.minimum(p, q).sum(1).mean())


if __name__ == "__main__":
    main()
