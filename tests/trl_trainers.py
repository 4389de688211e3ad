"""TRL's own trainers on given completions, for tests: nothing is sampled, what they compute from
there on is theirs.

P prompts, G completions of each, T tokens of the longest completion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Given:
    """The completions of a step, groups together, as both sides take them. `sampler_logp` is of
    each token; `rewards` float[P * G, F], NaN: no score."""

    prompts: list[list[int]]
    completions: list[list[int]]
    sampler_logp: list[list[float]]
    rewards: np.ndarray
    group: int

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, segments, mask) int[P * G, T'], prompts and completions one after the other,
        padded on the right."""
        pairs = list(zip(self.prompts, self.completions, strict=True))
        width = max(len(p) + len(c) for p, c in pairs)
        tokens, segments, mask = (np.zeros((len(pairs), width), np.int32) for _ in range(3))
        for row, (p, c) in enumerate(pairs):
            tokens[row, : len(p) + len(c)], segments[row, : len(p) + len(c)] = p + c, 1
            mask[row, len(p) : len(p) + len(c)] = 1
        return tokens, segments, mask

    def spread(self, per_completion) -> np.ndarray:
        """Numbers of each completion's tokens, in float32[P * G, T'], 0 elsewhere."""
        mask = self.rows[2]
        out = np.zeros(mask.shape, np.float32)
        for row, values in enumerate(per_completion):
            out[row, mask[row] != 0] = values
        return out


def trainer(kind: str, directory, given: Given, *, reference=None, weights=None, **settings):
    """TRL's trainer `kind` ("GRPO", "RLOO", "GMPO") for the model in `directory`, that takes
    `given` in the place of sampling. `reference`: directory of the reference model, where the
    settings ask for one."""
    import importlib

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from rollout.text.tokenizer import byte_level

    module = importlib.import_module("trl.experimental.gmpo" if kind == "GMPO" else "trl")
    rows = len(given.prompts)
    arguments = getattr(module, f"{kind}Config")(
        output_dir=str(directory),
        per_device_train_batch_size=rows,
        num_generations=given.group,
        max_completion_length=16,
        temperature=1.0,
        reward_weights=weights,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    functions = [_scores(given.rewards[:, f]) for f in range(given.rewards.shape[1])]
    names = [f"reward_{f}" for f in range(len(functions))]
    for function, name in zip(functions, names, strict=True):
        function.__name__ = name
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = getattr(module, f"{kind}Trainer")(
        model=model,
        reward_funcs=functions,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * rows),
        processing_class=byte_level(),
    )
    if reference is not None:
        theirs.ref_model.load_state_dict(
            AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).state_dict()
        )

    turn = given.completions if kind == "RLOO" else (given.completions, given.sampler_logp)
    theirs._tokenize_prompts = lambda prompts: (given.prompts, None, {})
    theirs._generate_single_turn = lambda *_, **__: turn
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    return theirs


def inputs_of(theirs) -> dict:
    """What the trainer makes of the completions: masks, log-probabilities, advantages."""
    return theirs._generate_and_score_completions([{"prompt": "1+1="}] * len(theirs.train_dataset))


def gradients(theirs, inputs: dict) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient of each weight)."""
    loss = theirs._compute_loss(theirs.model, inputs)
    loss.backward()
    return loss.item(), {
        name: p.grad.numpy() for name, p in theirs.model.named_parameters() if p.grad is not None
    }


def _scores(column: np.ndarray):
    def function(completions, **_):
        return [None if np.isnan(score) else float(score) for score in column]

    return function


def pair_trainer(kind: str, model, **settings):
    """TRL's trainer "DPO" or "Reward" for a model of transformers; its losses are then called on
    inputs that the test makes. For DPO `ref_model` is one of the settings' neighbours."""
    import trl
    from datasets import Dataset

    from rollout.text.tokenizer import byte_level

    reference = {"ref_model": settings.pop("ref_model")} if kind == "DPO" else {}
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(settings.pop("directory")),
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    theirs = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]),
        processing_class=byte_level(),
        **reference,
    )
    theirs.model.train()
    return theirs
