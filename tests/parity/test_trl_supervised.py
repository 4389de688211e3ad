"""Supervised fine-tuning is that of TRL's SFTTrainer: the tokens that are trained on, losses and
gradients, and how rows are packed."""

import importlib.util

import numpy as np
import pytest
from oracles import oracle, reload, saved

import policy
import rl.algorithms
from rl.training.batch import padded_batch
from rl.training.packing.packing import plan_packing
from rollout.text import chat
from rollout.text.tokenizer import byte_level

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is the oracle: pip install 'duet-rl[test]'"
)
SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "pad_token_id": 0,
}
PLAIN = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": "12+34=", "completion": "46, I think"},
    {"prompt": "a", "completion": "b"},
]
# As TRL wants it: a template that marks what the assistant writes.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ "
    "m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}{% "
    "if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [["1+1?", "2", "And +1?", "3 <eos>"], ["<eos>?", "no"], ["x", "y"]]
TALK = [
    {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)
        ]
    }
    for talk in TALKS
]


def trainer(directory, rows, **settings):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    given = SFTConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    model = reload("Llama", directory).train()
    theirs = SFTTrainer(
        model=model, args=given, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    theirs.current_gradient_accumulation_steps = 1
    return (
        theirs,
        theirs.data_collator([theirs.train_dataset[i] for i in range(len(rows))]),
        tokenizer,
    )


CASES = {
    "nll": (PLAIN, {"loss_type": "nll"}, {}, "assistant"),
    "dft": (
        TALK,
        {"loss_type": "dft", "assistant_only_loss": True},
        {"loss_type": "dft"},
        "assistant",
    ),
    "all": (TALK, {"loss_type": "nll"}, {}, "all"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_loss_and_gradients(case, tmp_path):
    import jax

    from policy.modes import make_step

    rows, settings, options, trained = CASES[case]
    theirs, inputs, tokenizer = trainer(
        saved(oracle("Llama", seed=0, **SIZES), tmp_path), rows, **settings
    )
    encoded = []
    for row in rows:
        if "messages" in row:
            encoded += chat.encode_conversation(tokenizer, row["messages"], trained)
        else:
            encoded.append(
                chat.encode_completion(tokenizer, row["prompt"], row["completion"], trained)
            )
    labels = inputs["labels"].numpy()
    for (ids, mask), label in zip(encoded, labels, strict=True):
        # Every token has a label there, also the first one of a row, of which no loss is taken.
        assert [i for i, m in zip(ids, mask, strict=True) if m] == [
            i for i in label[1:] if i != -100
        ]
    loss = theirs.compute_loss(theirs.model, inputs)
    loss.backward()

    batch = padded_batch(encoded, 64)
    batch = plan_packing(batch.segments, len(rows)).batch(batch)
    assert batch.segments.max() > 1, "several documents in a row"
    model, algorithm = policy.load(tmp_path), rl.algorithms.get("sft", **options)
    step = make_step(batch.tokens, segments=batch.segments)

    def ours(params):
        logp = model.graph.logprobs(params, batch.tokens, step, 1.0)[0]
        return algorithm.loss(
            rl.algorithms.PolicyInputs(logp=logp, mask=batch.mask, segments=batch.segments)
        )[0]

    value, gradient = jax.jit(jax.value_and_grad(ours))(model.params)
    np.testing.assert_allclose(value, loss.item(), atol=1e-5)
    policy.save(policy.Model(model.graph, gradient), tmp_path / "slopes")
    slopes = dict(reload("Llama", tmp_path / "slopes").named_parameters())
    for name, weight in theirs.model.named_parameters():
        expected = weight.grad.numpy()
        np.testing.assert_allclose(
            slopes[name].detach().numpy(),
            expected,
            atol=1e-4 * np.abs(expected).max(),
            err_msg=name,
        )


def test_rows_are_packed_by_best_fit():
    from datasets import Dataset
    from trl import pack_dataset

    lengths = np.random.default_rng(0).integers(1, 33, 60)
    theirs = pack_dataset(
        Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]}), seq_length=32
    )["seq_lengths"]
    segments = (np.arange(32) < lengths[:, None]).astype(np.int32)
    ours = plan_packing(segments, len(lengths))
    # Which of two rows with equal room is taken is not said, so how full they are is compared.
    assert sorted(np.count_nonzero(row) for row in ours.segments if row.any()) == sorted(
        map(sum, theirs)
    )
