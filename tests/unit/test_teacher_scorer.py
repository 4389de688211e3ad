"""Log-probabilities of completions under a teacher, against its logits in numpy."""

import functools

import numpy as np
import pytest
from learners import VOCAB, batch, dense, stage
from oracles import configuration, random_model

import rl.algorithms
from policy import families
from rl.training.packing.trees import Sharing
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.scorer import LACKING, TeacherScorer
from rl.training.trainer import Trainer

TAU = 1.7


@functools.cache
def padded(vocabulary):
    """A llama of another width with so many ids."""
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    }
    return random_model(
        families.read(configuration("Llama", **sizes)), runtime=dense().graph.runtime
    )


def trainer(temperature=TAU):
    options = stage("opd", sampling={"temperature": temperature})
    return Trainer(dense().graph, options, rl.algorithms.get("opd"), temperature=temperature)


def scored(model, data, made):
    scorer = TeacherScorer("teacher", FrozenModel(model.graph), TAU, VOCAB)
    scorer.params = model.params
    return scorer(data, *made.packing_of(data))


def expected(model, data, vocabulary):
    """From the teacher's logits, over the first ids alone."""
    z = np.asarray(model.logits(data.tokens, segments=data.segments), np.float64)
    z = z[:, :-1, :vocabulary] / TAU
    logp = z - z.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    read = np.minimum(data.tokens[:, 1:], vocabulary - 1)
    at = np.take_along_axis(logp, read[..., None], -1)[..., 0]
    return np.where(data.segments[:, 1:] != 0, at, 0.0)


@pytest.mark.parametrize("vocabulary", [VOCAB, VOCAB + 8])
def test_they_are_those_of_its_logits_over_the_ids_of_both(vocabulary):
    data, model = batch(), padded(vocabulary)
    logp = scored(model, data, trainer())
    np.testing.assert_allclose(logp[:, 1:], expected(model, data, VOCAB), atol=2e-5)
    assert not logp[:, 0].any()


def test_an_id_that_the_teacher_lacks_has_a_low_constant():
    few = 32
    data, model = batch(), padded(few)
    known = data.replace(tokens=np.minimum(data.tokens, few - 1))
    logp = scored(model, data, trainer())
    lacking = data.tokens >= few
    assert lacking[:, 1:].any()
    assert np.isfinite(logp).all() and (logp[lacking] == LACKING).all()
    np.testing.assert_allclose(
        logp[:, 1:][~lacking[:, 1:]], expected(model, known, few)[~lacking[:, 1:]], atol=2e-5
    )


def test_the_policy_as_its_own_teacher_differs_by_nothing():
    """Also from packed rows and trees."""
    data, made = batch(rows=6, group=3), trainer()
    own, _ = made.logprobs(dense().params, data)
    np.testing.assert_allclose(scored(dense(), data, made), own, atol=1e-6)
    same = data.replace(
        tokens=np.where(np.arange(10) < 3, data.tokens[np.array([0, 0, 0, 3, 3, 3])], data.tokens)
    )
    made.sharing = Sharing(2)
    assert made.packing_of(same)[0].tree is not None
    alone, _ = dense().logprobs(same.tokens, segments=same.segments, temperature=TAU)
    np.testing.assert_allclose(scored(dense(), same, made), alone, atol=2e-5)
