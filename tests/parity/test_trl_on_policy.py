"""The losses on the policy's own samples are those of TRL: `opd` of its self-distillation on the
sampled tokens, `gkd` of GKDTrainer and of its self-distillation over all tokens."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import VOCAB, batch, dense, stage

import rl.algorithms
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.teacher import ModelTeacher
from rl.training.trainer import Trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is the oracle: pip install 'duet-rl[test]'"
)


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def test_the_gradient_of_opd_is_that_of_sampled_token_self_distillation():
    """Before the first update, in float64 there."""
    import torch
    from trl.experimental.sdft import loss_utils

    rng = np.random.default_rng(0)
    z, teacher = rng.normal(size=(2, 3, 5, 7))
    tokens, mask = rng.integers(0, 7, (3, 5)), rng.random((3, 5)) < 0.7
    logits = torch.tensor(z, requires_grad=True)
    rows = loss_utils.compute_sampled_token_self_distillation_loss(
        logits, torch.tensor(teacher), torch.tensor(tokens), distillation_alpha=1.0
    )
    ((rows * torch.tensor(mask)).sum() / mask.sum()).backward()

    def at_tokens(z):
        return jnp.take_along_axis(jax.nn.log_softmax(z), tokens[..., None], -1)[..., 0]

    algorithm = rl.algorithms.get("opd")
    old = at_tokens(z.astype(np.float32))
    kl = old - at_tokens(teacher.astype(np.float32))
    rewards = np.full((1, 3), np.nan)
    advantages = algorithm.advantages(rewards, None, teacher_kl=kl[None], mask=mask[None])[0]

    def loss(z):
        inputs = rl.algorithms.PolicyInputs(
            mask=mask, logp=at_tokens(z), old_logp=old, advantages=advantages
        )
        return algorithm.loss(inputs)[0]

    gradient = jax.grad(loss)(z.astype(np.float32))
    assert logits.grad is not None
    np.testing.assert_allclose(gradient, logits.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "beta"),
    [
        ({"divergence": "reverse"}, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"divergence": "forward", "aggregation": "sequence"}, 0.0),
                ({"beta": 0.3, "temperature": 2.0}, 0.3),
            )
        ),
    ],
)
def test_an_update_of_gkd_has_the_loss_of_trl(options, beta):
    """Of the logits of both models at the temperature of sampling, unless there is another."""
    import torch
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdft import loss_utils

    sampled = 1.5
    made = stage({"name": "gkd", **options}, sampling={"temperature": sampled})
    algorithm = rl.algorithms.get("gkd", **options)
    model, data = dense(), batch()
    frozen = FrozenModel(model.graph, seed=11)
    teacher = ModelTeacher(frozen, algorithm)
    teacher.read()
    trainer = Trainer(model.graph, made, algorithm, temperature=sampled, teacher=teacher)
    params = jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), model.params)
    _, metrics = trainer.update(trainer.start(params, seed=3), data)

    tau = options.get("temperature", sampled)
    mine, theirs = (
        torch.tensor(np.array(each.logits(data.tokens, segments=data.segments))[:, :-1])
        for each in (model, type(model)(model.graph, teacher.params))
    )
    assert mine.shape[-1] == VOCAB
    mask = torch.tensor(data.mask[:, 1:] * (data.segments[:, 1:] != 0))
    rows = loss_utils.compute_full_logit_self_distillation_loss(
        mine / tau, theirs / tau, distillation_alpha=beta
    )
    by_token = float((rows * mask).sum() / mask.sum())
    labels = torch.where(mask > 0, 0, -100)
    gkd = GKDTrainer.generalized_jsd_loss(mine, theirs, labels=labels, beta=beta, temperature=tau)
    assert by_token == pytest.approx(gkd.item(), rel=1e-5)
    loss = by_token
    if "aggregation" in options:
        loss = float(((rows * mask).sum(1) / mask.sum(1).clamp(min=1)).mean())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-5)
