"""Small trainers for the tests of updates: models of one or two layers, stages, and batches of
random rows of uneven length.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from oracles import TINY, configuration, random_model

import rl.algorithms
from policy import families
from policy.config import Runtime
from rl.config.stage import OPTIMIZERS, StageOptions
from rl.stages import inputs
from rl.training.batch import Batch
from rl.training.reward_model import RewardModelTrainer
from rl.training.trainer import RunState, Trainer
from rl.training.updater import UpdateArguments, UpdateCall

VOCAB = 40
QUICK = Runtime(remat="none", scan=False)  # compiles in half the time of the default
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}


@functools.cache
def dense(**how):
    """A llama of one layer."""
    return random_model(
        families.read(configuration("Llama", **SIZES)), **({"runtime": QUICK} | how)
    )


@functools.cache
def experts(**how):
    """One layer of latent attention with 8 experts, 2 of them chosen with a selection bias, and a
    shared one."""
    sizes = SIZES | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    assert TINY["DeepseekV3"]["n_routed_experts"] == 8
    return random_model(
        families.read(configuration("DeepseekV3", **sizes)), **({"runtime": QUICK} | how)
    )


@functools.cache
def indexed(**how):
    """`experts` with an indexer that leaves 3 keys to a query. With so many index heads no two keys
    score the same."""
    sizes = SIZES | {
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 3,
        "index_n_heads": 32,
    }
    return random_model(
        families.read(configuration("DeepseekV32", **sizes)), **({"runtime": QUICK} | how)
    )


def stage(algorithm="sft", **keys) -> StageOptions:
    """Options of a stage; `optimizer` and `sampling` may be given in part. AdamW's eps is large, so
    that a gradient of 0 up to rounding is not blown up to a step of the learning rate."""
    optimizer = {"learning_rate": 1e-2} | keys.pop("optimizer", {})
    if "eps" in OPTIMIZERS[optimizer.get("name", "adamw")]:
        optimizer = {"eps": 1e-3} | optimizer
    critic = {"learning_rate": 1e-2, "eps": 1e-3} | keys.pop("critic", {})
    sampling = {"max_new_tokens": 8} | keys.pop("sampling", {})
    options = {
        "algorithm": algorithm,
        "steps": 10,
        "optimizer": optimizer,
        "critic": critic,
        "sampling": sampling,
    } | keys
    return StageOptions.model_validate(options)


_trainers: dict[tuple, Trainer] = {}


def trainer(model, options: StageOptions) -> Trainer:
    """That of a stage."""
    algorithm = rl.algorithms.get(options.algorithm.name, **options.algorithm.model_extra)
    if algorithm.stage == "reward_model":
        return RewardModelTrainer(model.graph, options, algorithm)
    sampled = algorithm.stage == "online" and options.sampling.temperature
    how = {"state": inputs.state_of(algorithm.inputs), "temperature": sampled or 1.0}
    return Trainer(model.graph, options, algorithm, **how)


def begin(model, options: StageOptions, fresh: bool = False) -> tuple[Trainer, RunState]:
    """A trainer and its first state, on a copy of the model's weights. Tests with equal options
    share the compiled programs, unless they want a fresh trainer."""
    key = id(model.graph), options.model_dump_json()
    if fresh or key not in _trainers:
        _trainers[key] = trainer(model, options)
    made = _trainers[key]
    return made, made.start(
        jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), model.params), seed=3
    )


def batch(rows: int = 8, length: int = 10, group: int = 2, seed: int = 0) -> Batch:
    """Rows of 4 to `length` tokens with everything that any algorithm asks for; the last half of
    each is trained on."""
    rng = np.random.default_rng(seed)
    segments = (np.arange(length) < rng.integers(4, length + 1, (rows, 1))).astype(np.int32)
    mask = (segments * (np.arange(length) >= segments.sum(1, keepdims=True) // 2)).astype(
        np.float32
    )

    def noise(scale, shape=(rows, length)):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    return Batch(
        tokens=rng.integers(0, VOCAB, (rows, length)).astype(np.int32) * segments,
        segments=segments,
        mask=mask,
        prompt=(np.arange(rows) // group).astype(np.int32),
        sampler_logp=noise(0.3) - 4,
        old_logp=noise(0.3) - 4,
        ref_logp=noise(0.3) - 4,
        entropy=abs(noise(1.0)),
        advantages=noise(1.0, (rows,)),
        old_values=noise(0.3),
        returns=noise(1.0),
    )


def update_call(trainer, state, data, micro_rows: int, *, of_policy: bool = True) -> UpdateCall:
    """The call of the update of the policy, or of what else learns alone, on rows that are not
    packed."""
    arguments = UpdateArguments(data, trainer.loss_inputs(data))
    calls = trainer.update_calls(state, arguments, micro_rows)
    return calls[-1 if of_policy else 0]


def host(tree) -> dict[str, np.ndarray]:
    """Copies of every array of a tree by its path."""
    return {
        jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree.leaves_with_path(tree)
    }


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(one[k].tobytes() == other[k].tobytes() for k in one)
