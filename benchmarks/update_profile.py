"""Says where the seconds of a compiled update on a CPU go: milliseconds by kind of work.

One row of random tokens, an SFT update with AdamW in float32, layers scanned. A profile of one
update has an event for every operation of the optimised program; the metadata of the operation says
what it belongs to. Events of loops are left out, as those inside them count.

- products: of weights, with their gradients. Their share of the rate of a product of 2048 x 2048
  in the same process is printed.
- attention: the loops over blocks of tokens inside of a layer.
- slices: one layer's weights, kept values or gradients out of or into the stack of all layers.
- fills: zeros for sums and for stacks.
- copies: of arrays, and transposes.
- optimizer: everything outside of the loop over micro-batches.
- elementwise: the rest of the layers and of the head.

    python benchmarks/update_profile.py models/smollm2 [--length 576] [--remat minimal_flash]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grpo import product_rate  # before jax: the CPU

KINDS = ("products", "attention", "slices", "fills", "copies", "optimizer", "elementwise")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
SOURCE = re.compile(r'op_name="([^"]*)"')
LOOPS = ("while", "call", "conditional")


def main(argv: Sequence[str] | None = None) -> Counter[str]:
    """Runs the benchmark from the command line and returns milliseconds by kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="Hugging Face directory of a text model")
    parser.add_argument("--length", type=int, default=576, help="tokens of the row")
    parser.add_argument("--sequences", type=int, default=8, help="of the row, of equal lengths")
    parser.add_argument("--remat", default="minimal_flash")
    options = parser.parse_args(argv)
    update = Update(options.directory, options.length, options.sequences, options.remat)
    update.run()
    seconds = min(update.run() for _ in range(3))
    spent = update.profile()
    rate = product_rate()
    share = update.operations / rate / (spent["products"] / 1e3)
    print(
        f"{options.length} tokens, {options.remat}: {seconds:.3f} s; products of weights at "
        f"{share:.0%} of {rate / 1e9:.0f} GFLOP/s"
    )
    for kind in KINDS:
        print(f"{kind:12} {spent[kind]:8.0f} ms  {spent[kind] / sum(spent.values()):4.0%}")
    return spent


class Update:
    """An SFT update of a model, compiled."""

    def __init__(self, directory: str, length: int, sequences: int, remat: str):
        """Loads the model and compiles its update.

        Args:
          directory: of the weights.
          length: tokens of the row.
          sequences: of the row.
          remat: a policy of policy/remat.py.
        """
        import numpy as np

        import policy
        import rl.algorithms
        from policy.config import Runtime
        from rl.config.stage import StageOptions
        from rl.training.batch import Batch
        from rl.training.trainer import Trainer
        from rl.training.updater import UpdateArguments

        model = policy.load(directory, runtime=Runtime(remat=remat, skip_blocks=True))
        stage = StageOptions.model_validate({"algorithm": "sft", "steps": 1000})
        trainer = Trainer(model.graph, stage, rl.algorithms.get("sft"))
        rng = np.random.default_rng(0)
        batch = Batch(
            tokens=rng.integers(10, model.config.vocab_size, (1, length)).astype(np.int32),
            segments=(1 + np.arange(length) * sequences // length)[None].astype(np.int32),
            mask=np.ones((1, length), np.float32),
            prompt=np.zeros(1, np.int32),
        )
        state = trainer.start(model.params, seed=0)
        call = trainer.update_calls(state, UpdateArguments(batch, trainer.loss_inputs(batch)), 1)[
            -1
        ]
        self._learners = call.learners
        self._arguments = call.arguments
        self._program = call.lower().compile()
        head = 0 if model.config.tied_head else model.graph.shapes["embed_tokens"].size
        self.operations = 6 * (model.graph.parameters - head) * length

    def run(self) -> float:
        """Makes one update; returns its seconds."""
        import jax

        began = time.perf_counter()
        output = jax.block_until_ready(self._program(self._learners, self._arguments))
        self._learners = output.learners
        return time.perf_counter() - began

    def profile(self) -> Counter[str]:
        """Returns milliseconds by kind of one update."""
        import jax

        text = self._program.as_text()
        assert text is not None
        named = sources(text)
        spent: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                self.run()
            file = max(Path(directory).rglob("*.xplane.pb"))
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for event in (event for line in plane.lines for event in line.events):
                    if event.name in named and not event.name.startswith(LOOPS):
                        spent[kind(event.name, named[event.name])] += event.duration_ns / 1e6
        return spent


def sources(text: str) -> dict[str, str]:
    """Returns the path of what was traced for each operation of a program. One without a path has
    that of the operation before it in the same computation."""
    result = {}
    source = ""
    for line in text.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            source = ""
            continue
        if own := SOURCE.search(line):
            source = own[1]
        result[instruction[1]] = source
    return result


def kind(name: str, source: str) -> str:
    """Returns what an operation of the optimised program belongs to.

    name: of the operation. source: the path of what was traced.
    """
    if re.search(r"closed_call(/checkpoint)?/while", source):
        return "attention"
    if name.startswith("wrapped_broadcast"):
        return "fills"
    if "copy" in name or "transpose" in name:
        return "copies"
    if "slice" in name:
        return "slices"
    if name.startswith("dot") or "dot_general" in source:
        return "products"
    return "elementwise" if "while" in source else "optimizer"


if __name__ == "__main__":
    main()
