"""Loss, KL and gradients of labelled answers are those of TRL's KTOTrainer, on the same models and
answers."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from oracles import oracle, reload, saved

import policy
import rl.algorithms
from policy.modes import make_step
from rl.data.encoded import Row
from rl.stages.unpaired import batch_of, sequences_of, with_kl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL is the oracle: pip install 'duet-rl[test]'",
    ),
]
SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
LENGTHS = [(3, 4), (2, 2), (4, 3), (1, 5)]  # of each row: prompt, answer
LABELS = [1.0, 0.0, 0.0, 1.0]
OPTIONS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}


def answers():
    """(row, label) of each row."""
    rng, rows = np.random.default_rng(3), []
    for (p, n), label in zip(LENGTHS, LABELS, strict=True):
        rows.append((Row(rng.integers(3, 259, p + n).tolist(), [0] * p + [1] * n), label))
    return rows


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model, and one near it for a reference."""
    import torch

    folder = tmp_path_factory.mktemp("kto")
    first = saved(oracle("Llama", seed=0, **SIZES), folder / "0")
    other = reload("Llama", first)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight))
    return first, saved(other, folder / "1")


def theirs_of(rows):
    """The same as TRL's collator gives them, the answers rotated by one for the KL."""
    import torch

    def padded(sequences):
        width = max(len(ids) for ids, *_ in sequences)
        stacked = [
            [[*a, *[0] * (width - len(a))] for a in (ids, mask, [1] * len(ids))]
            for ids, mask, *_ in sequences
        ]
        return torch.tensor(stacked).unbind(1)

    prompts = [row.ids[: row.mask.index(1)] for row, _ in rows]
    completions = [row.ids[row.mask.index(1) :] for row, _ in rows]
    rotated = [completions[-1], *completions[:-1]]
    mismatched = [
        (p + c, [0] * len(p) + [1] * len(c)) for p, c in zip(prompts, rotated, strict=True)
    ]
    own, other = padded([row for row, _ in rows]), padded(mismatched)
    names = ("input_ids", "completion_mask", "attention_mask")
    batch = dict(zip(names, own, strict=True)) | {
        f"KL_{n}": a for n, a in zip(names, other, strict=True)
    }
    return batch | {"label": torch.tensor([label > 0 for _, label in rows])}


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_loss_and_gradients_are_those_of_trl(loss_type, directories, tmp_path):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    from rollout.text.tokenizer import byte_level

    near, far = directories if loss_type == "kto" else directories[::-1]
    settings = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        "disable_dropout": True,
    }
    row = {"prompt": "1+1=", "completion": "2", "label": True}
    trainer = KTOTrainer(
        model=reload("Llama", near),
        ref_model=reload("Llama", far),
        args=KTOConfig(
            output_dir=str(tmp_path),
            loss_type=loss_type,
            per_device_train_batch_size=4,
            **settings,
            **OPTIONS,
        ),
        train_dataset=Dataset.from_list([row] * 4),
        processing_class=byte_level(),
    )
    rows = answers()
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, theirs_of(rows), False)
    loss.backward()
    expected = {
        name: p.grad.numpy() for name, p in trainer.model.named_parameters() if p.grad is not None
    }

    algorithm = rl.algorithms.get("kto", loss_type=loss_type, **OPTIONS)
    model, reference = (policy.load(directory) for directory in (near, far))
    rotated = sequences_of([row for row, _ in rows], 16, 4 if loss_type == "kto" else None)
    batch = batch_of(rotated, [label for _, label in rows], 16)

    def logprobs(model, params, batch):
        step = make_step(batch.tokens, segments=batch.segments)
        return model.graph.logprobs(params, batch.tokens, step, 1.0)[0]

    old, ref = (np.asarray(logprobs(each, each.params, batch)) for each in (model, reference))
    batch = batch.replace(old_logp=old, ref_logp=ref)
    if loss_type == "kto":
        batch = with_kl(batch)
    inputs = algorithm.with_totals(
        rl.algorithms.PolicyInputs(
            mask=batch.mask, segments=batch.segments, ref_logp=ref, extra=batch.extra
        )
    )

    def ours(params):
        return algorithm.loss(dataclasses.replace(inputs, logp=logprobs(model, params, batch)))

    (value, metrics), slopes = jax.value_and_grad(ours, has_aux=True)(model.params)
    np.testing.assert_allclose(value, loss.item(), atol=1e-5)
    kl = trainer._metrics["train"]["kl"][-1]
    np.testing.assert_allclose(metrics["kto/kl"], kl, atol=1e-5)
    assert (kl > 0) == (loss_type == "kto"), "the estimate is clamped: the test would not see it"
    head = "lm_head.weight" if "lm_head.weight" in expected else "model.embed_tokens.weight"
    gradient = next(
        np.asarray(slope) for path, slope in slopes.items() if path.startswith("lm_head")
    )
    gradient = gradient if gradient.shape == expected[head].shape else gradient.T
    np.testing.assert_allclose(gradient, expected[head], atol=1e-4 * np.abs(expected[head]).max())
