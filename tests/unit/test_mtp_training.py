"""Training of prediction modules: the loss against numpy, and what it moves."""

import functools

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from oracles import configuration, random_model

from policy import families
from policy.modes import make_step
from rl.training.auxiliary_losses import auxiliary_loss, totals
from rl.training.updates import optimizer_step

DEPTH = 2


@functools.cache
def model(kind="Llama", depth=1):
    keys = learners.SIZES | {"duet": {"multi_token_prediction": {"depth": depth}}}
    if kind == "DeepseekV3":
        keys |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    return random_model(families.read(configuration(kind, **keys)), runtime=learners.QUICK)


def updated(options, *which, **batch):
    """(weights before, weights after, metrics) of one update."""
    trainer, state = learners.begin(model(*which), options)
    before = learners.host(state.policy.params)
    state, metrics = trainer.update(state, learners.batch(**batch))
    return before, learners.host(state.policy.params), {k: float(v) for k, v in metrics.items()}


def moved(before, after):
    return {path for path in before if not np.array_equal(before[path], after[path])}


def of_modules(paths):
    return {path for path in paths if "'mtp." in path}


def test_the_loss_is_the_mean_over_modules_of_the_means_over_trained_tokens():
    rng, options = np.random.default_rng(0), learners.stage(mtp={"coef": 0.25})
    batch = learners.batch(rows=3, length=10)
    segments = np.array([[1] * 4 + [2] * 6, [1] * 2 + [2] * 3 + [0] * 5, [0] * 10], np.int32)
    batch = batch.replace(
        segments=segments,
        mask=((segments > 0) & (rng.random(segments.shape) < 0.8)).astype(np.float32),
    )
    graph, params = model(depth=DEPTH).graph.with_runtime(mtp="joint"), model(depth=DEPTH).params
    aux = jax.jit(
        lambda p: graph.logprobs(
            p, batch.tokens, make_step(jnp.asarray(batch.tokens), None, segments), 1.0
        )[2]
    )(params)
    losses, agreement = [], []
    for d in range(1, DEPTH + 1):
        terms = [
            (-float(aux.predictions.logp[d - 1, b, t]), float(aux.predictions.agrees[d - 1, b, t]))
            for b in range(3)
            for t in range(d + 1, 10)
            if batch.mask[b, t] and len(set(segments[b, t - d - 1 : t + 1])) == 1
        ]
        assert len(terms) > 1
        losses.append(np.mean([term for term, _ in terms]))
        agreement.append(np.mean([agrees for _, agrees in terms]))
    loss, metrics = auxiliary_loss(options, aux, batch, totals(batch))
    assert float(loss) == pytest.approx(0.25 * np.mean(losses), rel=1e-6)
    assert float(metrics["mtp/loss"]) == pytest.approx(np.mean(losses), rel=1e-6)
    assert float(metrics["mtp/acceptance"]) == pytest.approx(np.mean(agreement), abs=1e-6)


@pytest.mark.slow
def test_micro_batches_add_up():
    _, one, metrics = updated(learners.stage(mtp={}))
    _, other, parts = updated(learners.stage(mtp={}, micro_batch=2))
    for path in one:
        np.testing.assert_allclose(other[path], one[path], atol=1e-5, err_msg=path)
    for name in ("mtp/loss", "mtp/acceptance", "mtp/grad_norm", "loss"):
        assert parts[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    assert metrics["mtp/grad_norm"] > 0


def test_without_the_section_the_modules_stay():
    before, after, metrics = updated(learners.stage(**CLIPPED))
    assert not of_modules(moved(before, after)) and "mtp/loss" not in metrics


# Far below the norm of the gradients: clipping joins the steps of all weights that are clipped
# together.
CLIPPED = {"optimizer": {"clip_norm": 1e-2, "weight_decay": 0.1}}


def check_detached(*which):
    before, alone, _ = updated(learners.stage(**CLIPPED), *which)
    _, extra, metrics = updated(learners.stage(**CLIPPED, mtp={"detach": True}), *which)
    for path in before.keys() - of_modules(before):
        np.testing.assert_allclose(extra[path], alone[path], atol=1e-7, err_msg=path)
    assert of_modules(moved(before, extra)) == of_modules(before) and metrics["mtp/grad_norm"] > 0
    return before, alone, extra


def test_an_infinite_gradient_of_detached_modules_skips_the_update():
    for square, finite in ((1.0, True), (np.inf, False), (np.nan, False)):
        squares = {"embed_tokens": jnp.float32(1.0), "mtp.layer.norm": jnp.float32(square)}
        clipping = optimizer_step._clipping(squares, 1.0, detach=True)
        assert bool(clipping.is_finite(jnp.float32(0.0))) is finite and clipping.norm == 1.0


@pytest.mark.slow
def test_detached_modules_learn_and_the_policy_feels_nothing():
    check_detached()


@pytest.mark.slow
def test_the_loss_of_the_modules_falls():
    trainer, state = learners.begin(model(), learners.stage(mtp={}))
    losses = []
    for _ in range(12):
        state, metrics = trainer.update(state, learners.batch())
        losses.append(float(metrics["mtp/loss"]))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_selection_biases_of_the_modules_move_by_their_own_counts():
    path = "['mtp.layer.feed_forward.router.correction_bias']"
    before, alone, extra = check_detached("DeepseekV3", DEPTH)
    result = next(key for key in before if path in key)
    steps = np.round((extra[result] - before[result]) / 1e-3, 2)
    assert (
        steps.shape == (DEPTH, 8)
        and set(np.unique(steps)) <= {-1.0, 0.0, 1.0}
        and np.abs(steps).any()
    )
    assert not np.array_equal(steps[0], steps[1])
    np.testing.assert_array_equal(alone[result], before[result])


@pytest.mark.slow
def test_states_before_the_final_norm_and_modules_without_a_norm_of_their_own():
    """A norm of a normed state is that state where the first one's weights are 1; where they are
    not, the forms differ.
    """
    rows = learners.batch(rows=2).tokens
    sections = {"post_norm": {}, "pre_norm": {"input": "pre_norm", "final_norm": False}}

    def logps(name, weight):
        section = {"duet": {"multi_token_prediction": {"depth": 1} | sections[name]}}
        made = random_model(
            families.read(configuration("Llama", **learners.SIZES, **section)),
            runtime=learners.QUICK,
        )
        params = {path: model().params[path] for path in made.params}
        params |= {
            path: jnp.full_like(params[path], weight)
            for path in ("norm.weight", "mtp.post_norm.weight")
            if path in params
        }
        graph = made.graph.with_runtime(mtp="joint")
        return jax.jit(
            lambda p: graph.logprobs(p, rows, make_step(jnp.asarray(rows)), 1.0)[2].predictions.logp
        )(params)

    np.testing.assert_allclose(logps("pre_norm", 1.0), logps("post_norm", 1.0), atol=1e-4)
    uneven = np.linspace(0.5, 2.0, learners.SIZES["hidden_size"])
    assert np.abs(logps("pre_norm", uneven) - logps("post_norm", uneven)).max() > 0.01
