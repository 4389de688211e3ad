"""`stages.N.freeze`: which weights its names mean, and what updates do to them."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import learners
import numpy as np
import optax
import pytest
from learners import SIZES, batch, begin, host, stage
from oracles import configuration, random_model

import rl.stages
from policy import families
from policy.config import Runtime
from policy.huggingface import sources
from policy.mesh.sharding import layout
from policy.model import Graph, Model
from policy.ops.host_memory import on_a_device
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.stages import shapes
from rl.training.trainable import check_freeze, frozen_weights, trained_paths

LAYER = "stacks.0.layers.0."
EXPERTS = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 2, "first_k_dense_replace": 0}


def two_layers(name="Llama", **sizes):
    config = families.read(configuration(name, **(SIZES | {"num_hidden_layers": 2} | sizes)))
    return random_model(config, runtime=learners.QUICK)


def graph(name="Llama", **sizes) -> Graph:
    return on_one_device(families.read(configuration(name, **sizes)))


def on_one_device(config) -> Graph:
    return Graph(config, learners.QUICK, layout({"fsdp": 1}, devices=jax.devices()[:1]))


def frozen(graph, *names):
    """{path: None of a full array, else the indices of the parts}"""
    chosen = frozen_weights(graph, stage(freeze=list(names)))
    parts = {path: np.argwhere(part).squeeze().tolist() for path, part in chosen.parts.items()}
    return dict.fromkeys(chosen.paths) | parts


@pytest.mark.parametrize(
    ("names", "end", "layers"),
    [
        (["model.layers.0."], "", 0),
        (["layers.1"], "", 1),
        (["model.language_model.layers.1.mlp"], "feed_forward.", 1),
        ([r"model\.layers\.([0-9]|1[01])\.mlp"], "feed_forward.", None),
        ([r"layers\.0\..*(up|gate)_proj", r"layers\.1\.mlp\.up"], "feed_forward.up_proj", None),
        (["stacks.0.layers.0.mixer"], "mixer.", None),
    ],
)
def test_names_of_files_and_paths_mean_weights(names, end, layers):
    model = graph(num_hidden_layers=2)
    chosen = frozen(model, *names)
    expected = {path for path in model.paths if path.startswith(LAYER + end)}
    assert expected and {path: chosen[path] for path in expected} == dict.fromkeys(expected, layers)
    assert chosen.keys() - expected == (
        {LAYER + "feed_forward.gate_proj"} if len(names) > 1 else set()
    )


def test_a_name_of_words_is_no_number_with_further_digits():
    model = graph(num_hidden_layers=12)
    assert set(frozen(model, "model.layers.1").values()) == {1}
    assert set(map(str, frozen(model, "model.layers.1.*").values())) == {"[1, 10, 11]"}


def test_paths_come_first():
    """A name that begins a path means what it meant before: `norm` is the last norm alone."""
    model = graph("Qwen3Next")
    assert any(path.endswith("mixer.norm.weight") for path in model.paths)
    assert frozen(model, "norm") == {"norm.weight": None}
    assert frozen(model, r"\.norm\.").keys() > {"norm.weight"}


def test_a_tensor_of_several_weights_and_one_of_several_are_frozen_by_their_name():
    joined = graph("Phi3", num_hidden_layers=2)
    ends = {path.rpartition(".")[2] for path in frozen(joined, "layers.1.self_attn.qkv_proj")}
    assert ends == {"q_proj", "k_proj", "v_proj"}
    experts = graph("Qwen3Moe")
    one = frozen(experts, r"layers\.1\.mlp\.experts\.[02]\.down_proj")
    assert list(one.values()) == [[[1, 0], [1, 2]]]
    spelled_otherwise = frozen(experts, "mlp.experts.gate_up_proj")
    assert {path.rpartition(".")[2] for path in spelled_otherwise} == {
        "expert_gate_proj",
        "expert_up_proj",
    }
    assert set(spelled_otherwise.values()) == {None}


def test_names_of_towers_are_those_of_the_files():
    model = on_one_device(sources.preset("tiny-vl", media=True))
    tower = {path for path in model.paths if path.startswith("image.")}
    assert frozen(model, "model.visual").keys() == tower == frozen(model, "image").keys()
    assert frozen(model, "language_model").keys() == set(model.paths) - tower - {"lm_head"}
    assert frozen_weights(model, stage()).paths == tower


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.2."], r"'model.layers.2.', .* \(nearest: .*model.layers.1"),
        (["mlp.down"], r"nearest: .*mlp.down_proj.weight"),
        (["model.layers.0", r"embed_tokns"], r"begins with 'embed_tokns', .*nearest: embed_tokens"),
        (["model", "lm_head"], "no weight is left to train"),
    ],
)
def test_names_without_weights_are_refused(names, message):
    model = graph(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="stages.1.freeze: ") as error:
        check_freeze(model, [stage(), stage(freeze=names)])
    assert re.search(message, str(error.value))
    assert check_freeze(model, [stage(freeze=["visual", "image.blocks", "embed_tokens"])]) is model


def test_names_of_a_stage_of_a_reward_model_are_those_of_its_trunk():
    tied = graph(num_hidden_layers=2, tie_word_embeddings=True)
    everything = stage("reward_model", freeze=["model"])
    assert check_freeze(tied, [everything]) is tied  # the score head learns
    with pytest.raises(ConfigError, match="no weight is left to train"):
        check_freeze(tied, [stage(freeze=["model"])])
    model = graph(num_hidden_layers=2)
    for names in (["lm_head"], ["model", "lm_head"]):
        with pytest.raises(ConfigError, match="'lm_head' is no part of a reward model"):
            check_freeze(model, [stage("reward_model", freeze=names)])
    with pytest.raises(ConfigError, match=r"stages.0.freeze: .* 'model.layers.2.'"):
        check_freeze(model, [stage("reward_model", freeze=["model.layers.2."])])
    assert check_freeze(model, [stage("reward_model", freeze=["image", "embed_tokens"])]) is model


def test_a_plan_of_a_reward_model_counts_no_parts_of_towers():
    model = Model(on_one_device(sources.preset("tiny-vl", media=True)), {})
    options = stage("reward_model", freeze=["visual.blocks.0"])
    trainer = learners.trainer(model, options)
    learner = trainer.abstract().reward_model
    kind = SimpleNamespace(trainer=trainer, options=options, trains_policy=False, group=None)
    call = SimpleNamespace(
        update=trainer.reward_model_update, learners={trainer.reward_model_update.main: learner}
    )
    assert frozen_weights(model.graph, options).parts  # of the towers of the policy
    assert not any("freeze takes parts" in each for each in shapes.update_notes(kind, call))


@pytest.mark.parametrize(("freeze", "said"), [(None, 0), (["embed_tokens"], 1), (["image"], 0)])
def test_a_plan_says_that_it_leaves_out_the_towers_that_a_stage_trains(freeze, said):
    model = Model(on_one_device(sources.preset("tiny-vl", media=True)), {})
    options = stage(freeze=freeze)
    trainer = learners.trainer(model, options)
    learners_ = {trainer.policy_update.main: trainer.abstract().policy}
    call = SimpleNamespace(update=trainer.policy_update, learners=learners_)
    kind = SimpleNamespace(trainer=trainer, options=options, trains_policy=True, group=None)
    notes = shapes.update_notes(kind, call)
    assert sum("the stage trains towers" in each for each in notes) == said


@pytest.mark.parametrize(
    ("source", "freeze", "said"),
    [
        ("tiny-vl", ["embed_tokens"], 1),
        ("tiny-vl", ["embed_tokens", "visual.blocks"], 0),
        ("tiny-vl", [], 0),
        ("tiny-deepseek", ["embed_tokens"], 0),
    ],
)
def test_a_list_without_the_towers_of_the_default_is_said(source, freeze, said):
    config = {"model": source, "stages": [{"algorithm": "sft", "steps": 1, "freeze": freeze}]}
    (made,) = rl.stages.create(RunConfig.model_validate(config))
    remarks = [each for each in made.remarks() if "freeze names no tower" in each]
    assert len(remarks) == said


def test_an_invalid_expression_is_refused_with_the_configuration():
    with pytest.raises(ValueError, match=r"'layers.\(0' is no regular expression: missing \)"):
        stage(freeze=["layers.(0"])


def test_parts_of_arrays_in_host_memory_are_refused():
    model = graph(num_hidden_layers=2)
    options = stage(freeze=["model.layers.0"], optimizer={"host_memory": True})
    with pytest.raises(ConfigError, match="takes 1 of the 2 tensors of stacks.*host memory"):
        check_freeze(model, [options])
    check_freeze(model, [options.model_copy(update={"freeze": ["model.layers"]})])


def by_hand(model, data, learned, options, updates):
    """(weights, norms): AdamW on a gradient of `learned` alone: path -> layers, or None for all."""
    rest = dict(model.params)

    def joined(weights):
        return rest | {
            path: array if layers is None else rest[path].at[layers].set(array)
            for (path, layers), array in zip(learned.items(), weights, strict=True)
        }

    def loss(weights):
        logp, _ = Model(model.graph, joined(weights)).logprobs(data.tokens, segments=data.segments)
        return -jnp.sum(logp * data.mask) / jnp.sum(data.mask)

    weights = [
        rest[path] if layers is None else rest[path][layers] for path, layers in learned.items()
    ]
    stacked = [path.startswith("stacks") for path in learned]
    transform = optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(
            options.learning_rate,
            b1=options.beta1,
            b2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            mask=[a.ndim - s > 1 for a, s in zip(weights, stacked, strict=True)],
        ),
    )
    state, norms = transform.init(weights), []
    gradient = jax.jit(jax.grad(loss))
    for _ in range(updates):
        slopes = gradient(weights)
        norms.append(float(optax.tree.norm(slopes)))
        changes, state = transform.update(slopes, state, weights)
        weights = optax.apply_updates(weights, changes)
    return joined(weights), norms


@pytest.mark.parametrize(
    "param_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_frozen_layers_stay_and_the_others_learn_as_if_alone(param_dtype):
    """Layer 0 of two, the embedding and the last norm are frozen, with clipping and weight decay;
    a frozen -0.0 keeps its sign."""
    model, data = two_layers(), batch()
    runtime = dataclasses.replace(learners.QUICK, param_dtype=param_dtype)
    model = Model(Graph(model.config, runtime, model.graph.layout), dict(model.params))
    path = LAYER + "feed_forward.up_proj"
    model.params[path] = model.params[path].at[:, 0, 0].set(-0.0)
    model.params = {p: a.astype(param_dtype) for p, a in model.params.items()}
    optimizer = {"clip_norm": 0.05, "weight_decay": 0.3, "learning_rate": 0.05}
    options = stage(freeze=["model.layers.0.", "embed_tokens", r"model\.norm"], optimizer=optimizer)
    learned = {p: np.array([1]) if p.startswith("stacks") else None for p in model.graph.paths}
    for name in ("embed_tokens", "norm.weight"):
        del learned[name]

    trainer, state = begin(model, options, fresh=True)
    assert not any("embed_tokens" in key for key in host(state.policy.optimizer))
    norms = []
    for _ in range(2):
        state, metrics = trainer.update(state, data)
        norms.append(float(metrics["optim/grad_norm"]))
    after = {p: np.array(a) for p, a in state.policy.params.items()}
    for name, array in after.items():
        layers = learned.get(name, np.array([], int))
        still = np.array(model.params[name])
        if layers is None:
            assert (array != still).any(), name
            continue
        untouched = np.delete(np.arange(len(array)), layers)
        assert array[untouched].tobytes() == still[untouched].tobytes(), name
        assert all((array[n] != still[n]).any() for n in layers), name
    assert np.signbit(after[path][0, 0, 0].astype(np.float32))
    if param_dtype == "float32":
        expected, by_hand_norms = by_hand(model, data, learned, options.optimizer, 2)
        np.testing.assert_allclose(norms, by_hand_norms, rtol=1e-5)
        for name, array in after.items():
            np.testing.assert_allclose(array, expected[name], atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "lion", "sgd", "adafactor"])
def test_frozen_layers_stay_with_every_optimizer(name):
    model = two_layers()
    options = stage(freeze=["layers.1"], optimizer={"name": name, "weight_decay": 0.3})
    trainer, state = begin(model, options, fresh=True)
    for _ in range(2):
        state, _ = trainer.update(state, batch())
    for path, array in state.policy.params.items():
        before = np.array(model.params[path])
        after = np.array(array)
        if path.startswith("stacks"):
            assert after[1].tobytes() == before[1].tobytes(), path
            assert (after[0] != before[0]).any(), path
        else:
            assert (after != before).any(), path


@pytest.mark.slow
def test_biases_and_experts_of_frozen_layers_stay():
    """The selection biases of layer 0 and one expert of layer 1 stay; those of layer 1 follow the
    counts."""
    model, data = two_layers("DeepseekV3", **EXPERTS), batch()
    names = ["model.layers.0", r"layers\.1\.mlp\.experts\.3\."]
    options = stage(freeze=names, router={"bias_rate": 0.05}, optimizer={"weight_decay": 0.3})
    trainer, state = begin(model, options)
    before = {path: np.array(array) for path, array in state.policy.params.items()}
    state, metrics = trainer.update(state, data)
    after = {path: np.array(array) for path, array in state.policy.params.items()}
    bias = LAYER + "feed_forward.router.correction_bias"
    assert after[bias][0].tobytes() == before[bias][0].tobytes()
    assert (after[bias][1] != before[bias][1]).any()
    for path in (path for path in after if path.startswith("stacks")):
        moved = after[path] != before[path]
        assert not moved[0].any() and moved[1].any(), path
        if "expert_" in path:
            assert not moved[1, 3].any() and moved[1, :3].any(), path
    assert metrics["optim/grad_norm"] > 0


def test_moments_of_frozen_arrays_are_not_kept_and_a_plan_says_what_parts_keep():
    model = two_layers()
    graph = model.graph

    def moments(*names):
        return learners.trainer(model, stage(freeze=list(names))).abstract().policy.optimizer

    embedding = np.prod(graph.shapes["embed_tokens"].shape)
    left = on_a_device(moments()) - on_a_device(moments("embed_tokens"))
    assert left == 2 * 4 * embedding  # two moments in float32
    parts = stage(freeze=["model.layers.0"])
    kept = moments("model.layers.0")
    assert on_a_device(kept) == on_a_device(moments())
    layer = sum(np.prod(a.shape[1:]) for p, a in graph.shapes.items() if p.startswith("stacks"))
    note = frozen_weights(graph, parts).note(kept)
    assert f"parts of {sum(p.startswith('stacks') for p in graph.paths)} stacked arrays" in note
    assert f"1 of the 2 tensors of {LAYER}" in note
    assert f"{2 * 4 * layer / 2**20:.1f} MiB of moments per device" in note
    assert frozen_weights(graph, stage(freeze=["model.layers"])).note(kept) is None


def test_a_reward_model_is_frozen_by_the_same_names_and_a_critic_is_not():
    model = learners.dense()
    names = ["embed_tokens", "self_attn"]
    reward_model = learners.trainer(
        model, stage("reward_model", freeze=names)
    ).reward_model_update.main_step
    learned = trained_paths(reward_model.model.axes, Runtime(), reward_model._frozen)
    assert "embed_tokens" not in learned and LAYER + "mixer.q_proj" not in learned
    assert LAYER + "feed_forward.up_proj" in learned
    trainer = learners.trainer(model, stage("ppo", freeze=names))
    assert (
        not trainer.critic_update.main_step._frozen.paths
        and "embed_tokens" in trainer.policy_update.main_step._frozen.paths
    )
