"""Loss and gradients of pairs are those of TRL's DPOTrainer, on the same arrays and on the same
models."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import oracle, reload, saved

import policy
import rl.algorithms
from rl.algorithms._pairs import LOSSES
from rl.training.batch import padded_batch, segmented_batch

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
BETA, SMOOTHING = 0.3, 0.1
LENGTHS = [
    (3, 4, 2),
    (2, 2, 6),
    (4, 3, 3),
    (1, 1, 5),
]  # of each pair: prompt, chosen, rejected answer


def rows():
    """Chosen and rejected (ids, mask) of each pair."""
    rng, result = np.random.default_rng(3), []
    for p, w, l in LENGTHS:  # noqa: E741
        prompt = rng.integers(3, 259, p).tolist()
        result.append(
            [(prompt + rng.integers(3, 259, n).tolist(), [0] * p + [1] * n) for n in (w, l)]
        )
    return result


def theirs_of(pairs):
    """The same as TRL's collator lays them out: chosen answers first, padded on the right."""
    import torch

    batch = padded_batch([pair[k] for k in (0, 1) for pair in pairs], 16)
    tokens, mask, there = (
        torch.tensor(a).long() for a in (batch.tokens, batch.mask, batch.segments)
    )
    return {"input_ids": tokens, "completion_mask": mask, "attention_mask": there}


def neighbour(directory):
    import torch

    model = reload("Llama", directory)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model, and one near it for a reference."""
    first = saved(oracle("Llama", seed=0, **SIZES), tmp_path_factory.mktemp("pairs") / "0")
    return first, saved(neighbour(first), tmp_path_factory.mktemp("pairs") / "1")


@pytest.fixture(scope="module")
def dpo(directories, tmp_path_factory):
    import trl_trainers

    model, reference = (reload("Llama", directory) for directory in directories)
    where = {"directory": tmp_path_factory.mktemp("dpo"), "ref_model": reference}
    return trl_trainers.pair_trainer(
        "DPO", model, beta=BETA, label_smoothing=SMOOTHING, disable_dropout=True, **where
    )


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_and_its_slopes_are_those_of_trl(name, dpo, monkeypatch):
    """On given log-probabilities: TRL's loss is called with a model that returns them."""
    import jax
    import torch

    pairs = rows()
    inputs, rng = theirs_of(pairs), np.random.default_rng(1)
    mask = inputs["completion_mask"].numpy()
    logp, ref = (
        np.where(mask, rng.normal(-2, 1, mask.shape), 0).astype(np.float32) for _ in range(2)
    )
    smoothed = (
        {"label_smoothing": SMOOTHING} if name in ("robust", "exo_pair") else {}
    )  # TRL has no conservative DPO
    options = {"loss_type": name, "beta": BETA} | smoothed
    given = torch.tensor(logp[:, 1:], requires_grad=True)
    nothing = torch.zeros_like(given)
    answers = given * inputs["completion_mask"][:, 1:]  # as labels of -100 leave it
    output = SimpleNamespace(
        log_probs=answers, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    monkeypatch.setattr(dpo, "loss_types", [name, "sft"])
    monkeypatch.setattr(dpo, "loss_weights", [1.0, 0.2])
    monkeypatch.setattr(dpo, "precompute_ref_logps", True)
    reference = dict(
        zip(
            ("ref_chosen_logps", "ref_rejected_logps"),
            torch.tensor(ref.sum(1)).chunk(2),
            strict=True,
        )
    )
    loss = dpo._compute_loss(lambda **_: output, inputs | reference, False)
    loss.backward()

    algorithm = rl.algorithms.get("dpo", nll_coef=0.2, **options)
    batch = segmented_batch(pairs, 32)
    sharded = {k: place(batch, a) for k, a in (("logp", logp), ("ref_logp", ref))}
    full = algorithm.with_totals(
        rl.algorithms.PolicyInputs(
            mask=batch.mask, segments=batch.segments, ref_logp=sharded["ref_logp"]
        )
    )
    value, slope = jax.value_and_grad(
        lambda x: algorithm.loss(dataclasses.replace(full, logp=x))[0]
    )(sharded["logp"])
    np.testing.assert_allclose(value, loss.item(), atol=1e-5)
    expected = place(batch, np.pad(given.grad.numpy(), ((0, 0), (1, 0))))
    np.testing.assert_allclose(slope, expected, atol=1e-5 * np.abs(expected).max())
    assert expected.any()


def place(batch, apart):
    """[2 * pairs, T] of TRL's order in the rows of pairs."""
    out = np.zeros(batch.tokens.shape, np.float32)
    for k, half in enumerate(np.split(apart, 2), start=1):
        for row, values in enumerate(half):
            here = batch.segments[row] == k
            out[row, here] = values[: here.sum()]
    return out


def test_an_update_of_dpo_has_the_gradients_of_trl(directories, dpo, tmp_path):
    import jax

    from policy.modes import make_step

    dpo.loss_types, dpo.loss_weights = ["sigmoid", "sft"], [1.0, 0.2]
    loss = dpo._compute_loss(dpo.model, theirs_of(rows()), False)
    loss.backward()
    model, reference = (policy.load(directory) for directory in directories)
    algorithm, batch = (
        rl.algorithms.get("dpo", beta=BETA, nll_coef=0.2),
        segmented_batch(rows(), 32),
    )
    step = make_step(batch.tokens, segments=batch.segments)

    def logprobs(params):
        return model.graph.logprobs(params, batch.tokens, step, 1.0)[0]

    ref = jax.jit(logprobs)(reference.params)
    inputs = algorithm.with_totals(
        rl.algorithms.PolicyInputs(mask=batch.mask, segments=batch.segments, ref_logp=ref)
    )
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda params: algorithm.loss(dataclasses.replace(inputs, logp=logprobs(params)))[0]
        )
    )(model.params)
    np.testing.assert_allclose(value, loss.item(), atol=1e-5)
    policy.save(policy.Model(model.graph, gradient), tmp_path)
    agree(dict(reload("Llama", tmp_path).named_parameters()), dpo.model)


def agree(slopes, theirs):
    gradients = {
        name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None
    }
    assert slopes.keys() == gradients.keys()
    for name, gradient in gradients.items():
        atol = 1e-4 * np.abs(gradient).max()
        np.testing.assert_allclose(
            slopes[name].detach().numpy(), gradient, atol=atol, rtol=0, err_msg=name
        )
    assert all(gradient.any() for gradient in gradients.values())


def classifier(directory):
    """transformers' Llama with a score of one number in place of its head, without a tensor too
    many or too few."""
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """The directory of a reward model of transformers."""
    import torch
    from transformers import LlamaForSequenceClassification

    config = oracle("Llama", seed=0, **SIZES).config
    config.num_labels = 1
    torch.manual_seed(2)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return saved(model, tmp_path_factory.mktemp("scorer"))


def test_scores_are_those_of_transformers_whatever_side_is_padded(scorer):
    import jax
    import torch

    from policy.config import Runtime
    from policy.mesh.sharding import layout
    from rl.training.reward_model import RewardModelScorer

    sequences = [ids for pair in rows() for ids, _ in pair]
    width = max(map(len, sequences))
    right = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
    left = torch.tensor([[0] * (width - len(ids)) + ids for ids in sequences])
    result = RewardModelScorer.read(
        scorer, Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]), 16
    )(sequences)
    model = classifier(scorer)
    with torch.no_grad():
        for ids in (right, left):
            expected = model(ids, attention_mask=(ids != 0).long()).logits[:, 0].numpy()
            np.testing.assert_allclose(result, expected, atol=1e-5)
    assert np.std(result) > 0.1


def test_an_update_of_a_reward_model_has_the_gradients_of_trl(scorer, tmp_path):
    import jax
    import torch
    import trl_trainers

    from policy.config import Runtime
    from policy.huggingface import classification
    from policy.mesh.sharding import layout
    from policy.modes import VALUE_HEAD, make_step
    from rl.training.critic import Critic

    margin = np.array([0.5, 0.0, -1.0, 2.0], np.float32)
    trainer = trl_trainers.pair_trainer(
        "Reward", classifier(scorer), directory=tmp_path / "trl", center_rewards_coefficient=0.05
    )
    inputs = theirs_of(rows()) | {"margin": torch.tensor(margin)}
    del inputs["completion_mask"]
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    graph, params, score = classification.read(
        scorer, Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1])
    )
    critic, algorithm = Critic(graph), rl.algorithms.get("reward_model", center_coef=0.05)
    batch = segmented_batch(rows(), 32)
    step = make_step(batch.tokens, segments=batch.segments)
    given = {
        "segments": batch.segments,
        "margin": np.broadcast_to(margin[:, None], batch.mask.shape),
    }
    full = algorithm.with_totals(rl.algorithms.PolicyInputs(mask=batch.mask, **given))

    def ours(params):
        scores = critic.scores(params, batch.tokens, step)[0]
        return algorithm.loss(dataclasses.replace(full, scores=scores))

    (value, metrics), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(
        params | {VALUE_HEAD: score}
    )
    np.testing.assert_allclose(value, loss.item(), atol=1e-5)
    logged = {key: values[0] for key, values in trainer._metrics["train"].items()}
    pairs = {
        "accuracy": "accuracy",
        "margin": "margin",
        "min_reward": "score_min",
        "mean_reward": "score_mean",
        "max_reward": "score_max",
    }
    for name, own in pairs.items():
        np.testing.assert_allclose(
            metrics[f"reward_model/{own}"], logged[name], atol=1e-5, err_msg=name
        )
    slope = gradient.pop(VALUE_HEAD)
    classification.write(tmp_path / "slopes", graph, gradient, slope, 0)
    agree(dict(classifier(tmp_path / "slopes").named_parameters()), trainer.model)
