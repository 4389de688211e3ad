"""Updates of each kind of stage with an adapter: gradients against those of the merged weights,
what moves and what stays, and the references of stages that follow each other.

G matrices of one weight, E inputs, F outputs, r rank.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import launch
import learners
import numpy as np
import pytest
from adapted import factor_gradients, merged, with_adapter

import rl.algorithms
from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters, is_adapter
from policy.config import Runtime
from policy.huggingface import sources
from policy.huggingface.peft.targets import resolved
from policy.mesh.sharding import layout
from policy.model import Graph, Model
from policy.modes import VALUE_HEAD
from rl import stages
from rl.config.stage import OptimizerOptions
from rl.errors import ConfigError
from rl.run.health import outline
from rl.run.load import load
from rl.training.media.tables import trains_towers
from rl.training.optimizer import WeightAxes, optimizer
from rl.training.reward_model import RewardModelScorer
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.teacher import ModelTeacher
from rl.training.trainer import Trainer

RANK = 4
SPEC = AdapterSpec(rank=RANK, alpha=6.0)


@functools.cache
def policy():
    """A llama of one layer with random numbers in its adapter."""
    return with_adapter(learners.dense(), SPEC)


@functools.cache
def without():
    """Its merged weights."""
    return merged(policy())


@functools.cache
def new():
    """The same with an adapter as it starts."""
    model = policy()
    base = {path: model.params[path] for path in model.graph.paths}
    return Model(model.graph, base | Adapters(model.graph).init(base, seed=0))


def gradient(learner):
    """The gradient of the first update, from the first moment of AdamW, and of what."""
    adam = learner.optimizer[0]
    assert adam.mu.keys() == adam.nu.keys()
    return {path: np.asarray(mean, np.float64) / 0.1 for path, mean in adam.mu.items()}


def close(ours, theirs):
    for path, expected in theirs.items():
        limit = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(ours[path], expected, atol=limit, rtol=0, err_msg=path)


def batch(name):
    """Rows with what a stage asks for."""
    data = learners.batch()
    if name == "kto":
        label = np.repeat([[1.0], [0.0]], 4, 0) * data.segments
        return data.replace(extra={"label": label.astype(np.float32), "kl": 0.1 * data.mask})
    return data


def begin(name, model, options):
    """A trainer and its first state, with a teacher if the stage has one."""
    if name != "distill":
        return learners.begin(model, options)
    loss = rl.algorithms.get("distill")
    teacher = ModelTeacher(FrozenModel(learners.dense().graph), loss)
    teacher.params = learners.dense().params
    trainer = Trainer(model.graph, options, loss, teacher=teacher)
    return trainer, trainer.start(jax.tree.map(jnp.copy, model.params), seed=3)


GROUPS = {"reward_model": ("reward_model",), "ppo": ("policy", "critic")}
UNCLIPPED = {"optimizer": {"clip_norm": None}, "critic": {"clip_norm": None}}
STAGES = {
    "grpo": {"name": "grpo", "kl_coef": 0.1},
    "ppo": {"name": "ppo", "value_init_std": 1.0},
    "value head": {"name": "ppo", "critic_trunk": "policy", "value_init_std": 1.0},
    **{name: {"name": name} for name in ("sft", "dpo", "kto", "raft", "reward_model", "distill")},
}


@pytest.mark.parametrize("name", STAGES)
def test_an_update_has_the_gradient_that_follows_from_the_merged_weights(name):
    options = learners.stage(STAGES[name], **UNCLIPPED)
    data = batch(name)
    graph = policy().graph
    ours, theirs = (begin(name, model, options) for model in (policy(), without()))
    ours, theirs = (trainer.update(state, data)[0] for trainer, state in (ours, theirs))
    for group in GROUPS.get(options.algorithm.name, ("policy",)):
        result = gradient(getattr(ours, group))
        expected = gradient(getattr(theirs, group))
        if name == "value head" and group == "critic":
            close(result, expected)
            continue
        of_factors = factor_gradients(policy(), expected)
        kept = {VALUE_HEAD: expected[VALUE_HEAD]} if VALUE_HEAD in expected else {}
        close(result, of_factors | kept)
        assert result.keys() == of_factors.keys() | kept.keys()
        assert set(getattr(ours, group).params) == result.keys()
        assert of_factors.keys() <= Adapters(graph).sizes.keys() and len(of_factors) >= 14


def test_factors_of_each_expert_have_the_gradient_that_follows_from_its_merged_weights():
    model = with_adapter(learners.experts(), AdapterSpec(rank=RANK, expert_rank=2), size=0.1)
    options = learners.stage(STAGES["grpo"], **UNCLIPPED)
    data = learners.batch()
    ours, theirs = (learners.begin(each, options) for each in (model, merged(model)))
    ours, theirs = (trainer.update(state, data)[0] for trainer, state in (ours, theirs))
    result = gradient(ours.policy)
    expected = factor_gradients(model, gradient(theirs.policy))
    assert result.keys() == expected.keys()
    assert sum(array.shape[1] == 8 for array in expected.values() if array.ndim == 4) == 6
    close(result, expected)


@pytest.mark.parametrize("name", ["grpo", "ppo", "reward_model"])
def test_updates_move_the_adapter_and_leave_the_very_arrays_of_the_base(name):
    trainer, state = learners.begin(new(), learners.stage(STAGES[name], **UNCLIPPED))
    base = dict(trainer.base)
    before = learners.host(base)
    norms = []
    for _ in range(3):
        state, metrics = trainer.update(state, learners.batch())
        norms.append(float(metrics["optim/update_norm"]))
        learns = [getattr(state, group).params for group in GROUPS.get(name, ("policy",))]
        for params in learns:
            assert all(np.any(a) for path, a in params.items() if path.endswith(".lora_b"))
    assert min(norms) > 0
    assert trainer.base.keys() == base.keys()
    assert all(trainer.base[path] is array for path, array in base.items())
    assert learners.same_bits(learners.host(base), before)
    assert all(trainer.policy_params(state)[path] is array for path, array in base.items())
    described = trainer.abstract()
    jax.tree.map(lambda s, a: (s.shape, s.dtype) == (a.shape, a.dtype) or 1 / 0, described, state)


def test_weights_that_learn_in_full_are_no_part_of_the_base():
    model = with_adapter(learners.dense(), dataclasses.replace(SPEC, train=("embed_tokens",)))
    trainer, state = learners.begin(model, learners.stage(STAGES["grpo"], **UNCLIPPED))
    assert "embed_tokens" not in trainer.base
    before = learners.host(trainer.policy_params(state))
    state, _ = trainer.update(state, learners.batch())
    after = learners.host(trainer.policy_params(state))
    changed = {path for path in after if not np.array_equal(after[path], before[path])}
    assert changed == {f"['{path}']" for path in trainer.adapters.sizes}


def test_the_reference_is_the_policy_as_the_stage_began_and_not_the_base():
    data = learners.batch()
    sft, state = learners.begin(new(), learners.stage(STAGES["sft"], **UNCLIPPED))
    base = dict(sft.base)
    for _ in range(3):
        state, _ = sft.update(state, data)
    after_sft = sft.policy_params(state)
    trainer, _ = learners.begin(new(), learners.stage(STAGES["grpo"], **UNCLIPPED))
    state = trainer.start(after_sft, seed=4)
    assert all(map(is_adapter, state.reference))
    reference = trainer.reference_params(state)
    assert all(reference[path] is array for path, array in base.items())
    first = trainer.logprobs(reference, data)[0]
    np.testing.assert_array_equal(first, trainer.logprobs(after_sft, data)[0])
    of_base = learners.dense().logprobs(data.tokens, segments=data.segments)[0]
    assert np.abs(first - np.asarray(of_base)).max() > 0.01
    state, _ = trainer.update(state, data)
    np.testing.assert_array_equal(first, trainer.logprobs(trainer.reference_params(state), data)[0])
    state = trainer.renew_reference(state, 1.0)
    assert learners.same_bits(learners.host(state.reference), learners.host(state.policy.params))


def quantised():
    """The policy over weights in int8."""
    graph = learners.dense().graph
    runtime = dataclasses.replace(graph.runtime, base_weights="int8")
    graph = Graph(graph.config, runtime, graph.layout)
    stored = dict(learners.dense().params)
    stored |= {path: graph.quantized_weight(path).of(stored[path]) for path in graph.quantized}
    return with_adapter(Model(graph, stored), SPEC)


@pytest.mark.parametrize("model", [policy, quantised])
def test_a_reward_model_is_written_with_its_adapter_merged(tmp_path, model):
    options = learners.stage(STAGES["reward_model"] | {"score_init_std": 1.0}, **UNCLIPPED)
    trainer = learners.trainer(model(), options)
    state = trainer.start(model().params, seed=3)
    data = learners.batch()
    if model is quantised:
        before = learners.host(state.reward_model.params)
        state, _ = trainer.update(state, data)
        assert not learners.same_bits(before, learners.host(state.reward_model.params))
    params = trainer.base | state.reward_model.params
    rows = [row[: sum(used)].tolist() for row, used in zip(data.tokens, data.segments, strict=True)]
    scorer = RewardModelScorer(trainer.model.trunk, params, 16)
    expected = scorer(rows)
    assert np.std(expected) > 0.1
    trainer.export(state, 0, tmp_path / "scores")
    read = RewardModelScorer.read(
        tmp_path / "scores", learners.QUICK, trainer.graph.layout, limit=16
    )
    np.testing.assert_allclose(read(rows), expected, atol=1e-4)


OPTIMIZERS = ("adamw", "muon", "lion", "sgd", "adafactor")


@functools.cache
def of_experts():
    """The arrays of DoRA for layers with experts."""
    model = with_adapter(learners.experts(), AdapterSpec(rank=RANK, expert_rank=2, dora=True))
    return Adapters(model.graph)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_adapters_of_layers_and_experts(name):
    adapters = of_experts()
    axes = WeightAxes(adapters.axes, adapters.matrices, adapters.trunk.layout)
    rng = np.random.default_rng(0)
    grads = {
        path: jnp.asarray(rng.normal(size=a), jnp.float32) for path, a in adapters.sizes.items()
    }
    weights = {
        path: jnp.asarray(rng.normal(size=g.shape), jnp.float32) for path, g in grads.items()
    }
    options = OptimizerOptions(name=name, learning_rate=1.0, weight_decay=0.0)
    rule = optimizer(options, lambda count: 1.0, axes, "float32")
    changes, _ = jax.jit(lambda g, w: rule.update(g, rule.init(w), w, good=True))(grads, weights)
    assert changes.keys() == adapters.sizes.keys()
    assert all(np.isfinite(change).all() and np.any(change) for change in changes.values())
    assert not any(axes.decays(path) for path in adapters.sizes if path.endswith("magnitude"))
    if name == "muon":
        for path, dims in adapters.matrices.items():
            values = np.linalg.svd(flattened(changes[path], dims), compute_uv=False)
            longer = max(flattened(changes[path], dims).shape[-2:])
            scaled = values / (0.2 * longer**0.5)
            assert scaled.min() > 0.3 and scaled.max() < 1.3, path


def flattened(array, dims):
    """Matrices [G, E, F] of an array."""
    rows, columns = dims
    front = tuple(dim for dim in range(array.ndim) if dim not in rows + columns)
    E = int(np.prod([array.shape[dim] for dim in rows]))
    F = int(np.prod([array.shape[dim] for dim in columns]))
    return np.asarray(array).transpose(front + rows + columns).reshape(-1, E, F)


STAGE = {"algorithm": "grpo", "steps": 2, "sampling": {"max_new_tokens": 6}}
MIXED = {"name": "grpo", "kl_coef": 0.1, "reference_every": 1, "reference_mix": 0.5}
OWN_MEAN = {"algorithm": MIXED | {"name": "opd", "kl_coef": 0.0}, "teacher": "reference"}


def read(*changed, adapter="{rank: 4}"):
    overrides = [f"model.adapter={adapter}", f"stages={json.dumps([STAGE | e for e in changed])}"]
    return load([launch.SMALL], ["run.dir=null", "evaluation=null", *overrides])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([{"algorithm": MIXED}], "stages.0.algorithm.reference_mix: 0.5 of the policy and the"),
        ([OWN_MEAN], "stages.0.algorithm.reference_mix: 0.5 of the policy and the rest"),
        ([{"freeze": ["embed_tokens"]}], "stages.0.freeze: the stage trains an adapter and no"),
        ([{"indexer": {"training": "sparse"}}], "stages.0.indexer.training: indexers have no"),
        ([{"mtp": {}}], "stages.0.mtp: prediction modules have no adapter; set `trains: weights`"),
        ([{"router": {"bias_rate": 0.01}}], "stages.0.router.bias_rate: a stage that trains the"),
        ([{}, {"trains": "weights"}], "stages.1.trains: an earlier stage trains an adapter"),
    ],
)
def test_what_an_adapter_cannot_have_is_refused(changed, said):
    with pytest.raises(ConfigError) as error:
        read(*changed)
    assert said in str(error.value)
    if not {"indexer", "mtp"} & changed[0].keys():  # the model has neither
        read(*({"trains": "weights"} | each for each in changed))


def test_a_stage_of_an_adapter_leaves_the_towers_as_they_are():
    graph = Graph(sources.preset("tiny-vl", media=True), Runtime(), layout({"fsdp": 1}))
    graph = graph.with_runtime(adapter=resolved(graph, AdapterSpec(rank=2)))
    config = read({"trains": "weights", "freeze": []}, {})
    assert [trains_towers(graph, stage) for stage in config.stages] == [True, False]


def test_a_rate_for_all_weights_is_said_before_a_run():
    rates = {"optimizer": {"learning_rate": 1e-6}}
    config = read(rates | {"trains": "weights"}, rates, {"optimizer": {"learning_rate": 1e-4}})
    remarks = [list(stage.remarks()) for stage in stages.create(config)]
    assert [len(each) for each in remarks] == [0, 1, 0] and "1e-06" in remarks[1][0]
    assert ["rate looks" in line for line in outline.lines(config) if "  trains " in line] == [
        False,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="the model has no adapter; set model.adapter"):
        read({"trains": "adapter"}, adapter="null")
