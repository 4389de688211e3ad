"""Advantages, loss and gradients of one step are those of TRL's own trainers, on the same model,
completions and rewards.
"""

import importlib.util

import numpy as np
import pytest
from oracles import oracle, reload, saved

import policy
import rl.algorithms

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL is the oracle: pip install 'duet-rl[test]'",
    ),
]
GROUP, EOS, LIMIT = 4, 2, 16
SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
REWARDS = np.array([1.0, 0.0, 0.5, 0.0, 0.3, 0.3, 0.9, 0.1])
GAPS = np.array([1.0, np.nan, 0.5, 0.0, np.nan, np.nan, 0.9, np.nan])

# name: (algorithm, its options, TRL's trainer, its settings, what else differs from the plain case)
CASES = {
    "grpo": ("grpo", {"aggregation": "sequence"}, "GRPO", {"loss_type": "grpo"}, {}),
    "token": ("grpo", {}, "GRPO", {"loss_type": "dapo"}, {}),
    "one micro-batch": ("grpo", {}, "GRPO", {"loss_type": "bnpo"}, {}),
    "dr_grpo": ("dr_grpo", {}, "GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "dapo": ("dapo", {}, "GRPO", {"loss_type": "dapo", "epsilon_high": 0.28}, {}),
    "gspo": (
        "gspo",
        {},
        "GRPO",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        {},
    ),
    "cispo": ("cispo", {}, "GRPO", {"loss_type": "cispo", "epsilon_high": 5.0}, {}),
    "sapo": ("sapo", {}, "GRPO", {"loss_type": "sapo"}, {}),
    "luspo": (
        "luspo",
        {"epsilon": 0.1, "epsilon_high": 0.2},
        "GRPO",
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.1,
            "epsilon_high": 0.2,
        },
        {},
    ),
    "vespo": ("vespo", {}, "GRPO", {"loss_type": "vespo"}, {}),
    "gmpo": ("gmpo", {}, "GMPO", {"epsilon": 0.4, "epsilon_high": 0.4}, {}),
    "two-sided": ("grpo", {"delta": 1.3}, "GRPO", {"loss_type": "dapo", "delta": 1.3}, {}),
    "batch scale": (
        "grpo",
        {"scale": "batch"},
        "GRPO",
        {"loss_type": "dapo", "scale_rewards": "batch"},
        {},
    ),
    "gaps": ("grpo", {}, "GRPO", {"loss_type": "dapo"}, {"rewards": GAPS}),
    "several rewards": (
        "grpo",
        {"combine": "normalize_then_sum"},
        "GRPO",
        {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
        {"rewards": np.stack([REWARDS, 10 * GAPS], axis=1), "weights": [1.0, 0.5]},
    ),
    "unbiased kl": (
        "grpo",
        {"kl_coef": 0.04, "kl": "unbiased"},
        "GRPO",
        {"loss_type": "dapo", "beta": 0.04},
        {},
    ),
    "k3": (
        "grpo",
        {"kl_coef": 0.04, "aggregation": "sequence"},
        "GRPO",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {},
    ),
    "truncated": (
        "grpo",
        {"mask_truncated": True, "aggregation": "sequence"},
        "GRPO",
        {"loss_type": "grpo", "mask_truncated_completions": True},
        {},
    ),
    "top entropy": (
        "grpo",
        {"top_entropy": 0.4},
        "GRPO",
        {"loss_type": "dapo", "top_entropy_quantile": 0.4},
        {},
    ),
    "entropy bonus": (
        "grpo",
        {"entropy_coef": 0.1},
        "GRPO",
        {"loss_type": "dapo", "entropy_coef": 0.1},
        {},
    ),
    "off policy": (
        "grpo",
        {"off_policy_delta": 0.02},
        "GRPO",
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
        {},
    ),
    "rloo": ("rloo", {}, "RLOO", {"beta": 0.0}, {}),
    "rloo in the rewards": (
        "rloo",
        {"kl_reward_coef": 0.05},
        "RLOO",
        {"beta": 0.05},
        {"rewards": GAPS},
    ),
    "rloo normalised": (
        "rloo",
        {"normalize_advantages": True},
        "RLOO",
        {"beta": 0.0, "normalize_advantages": True},
        {},
    ),
}
for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    for name in ("grpo", "vespo"):
        CASES[f"{name} {mode}"] = (
            name,
            {"correction": mode, "correction_max": 1.1},
            "GRPO",
            {"loss_type": "dapo" if name == "grpo" else "vespo"},
            {"mode": mode},
        )


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model, and one near it for a reference."""
    result = []
    for seed in (0, 1):
        model = oracle("Llama", seed=0, **SIZES)
        if seed:
            import torch

            torch.manual_seed(5)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.05 * weight.std() * torch.randn_like(weight))
        result.append(saved(model, tmp_path_factory.mktemp("trl") / str(seed)))
    return result


def completions(rewards):
    """Two prompts of four completions of 1 to 9 tokens, most of which end."""
    from trl_trainers import Given

    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 259, length).tolist() for length in (3, 5) for _ in range(GROUP)]
    made = [
        rng.integers(3, 259, length).tolist() + [EOS] * ended
        for length, ended in zip([4, 1, 9, 6, 2, 7, 3, 5], [1, 1, 0, 1, 1, 0, 1, 1], strict=True)
    ]
    return Given(
        prompts, made, [[0.0] * len(c) for c in made], rewards.reshape(len(made), -1), GROUP
    )


def noise(given, scale, seed):
    rng = np.random.default_rng(seed)
    return given.spread([rng.normal(0, scale, len(c)) for c in given.completions])


def theirs(case, directories, given):
    """(advantages [N], old log-probabilities [N, T'] of ours' rows, loss, gradients)."""
    import torch
    import trl_trainers

    _, _, kind, settings, more = CASES[case]
    weights, reference = more.get("weights"), directories[1] if settings.get("beta") else None
    trainer = trl_trainers.trainer(
        kind, directories[0], given, reference=reference, weights=weights, **settings
    )
    if "mode" in more:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = more["mode"]
        trainer.vllm_importance_sampling_clip_min = None if "mask" in more["mode"] else 0.0
        trainer.vllm_importance_sampling_clip_max = 1.1
    inputs = trl_trainers.inputs_of(trainer)
    mask = (
        inputs["completion_mask"].bool() if "mask_truncated_completions" not in settings else None
    )
    if mask is None:
        lengths = [len(c) for c in given.completions]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    if "mode" not in more:
        inputs.pop("sampling_per_token_logps", None)
        moved = torch.zeros(mask.shape)
        moved[mask] = torch.tensor(noise(given, 0.2, seed=7)[given.rows[2] != 0])
        if kind == "RLOO":
            inputs["old_logps"] = inputs["old_logps"] + moved.sum(1)
        else:
            with torch.no_grad():
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                attended = torch.cat([inputs["prompt_mask"], mask.long()], 1)
                old = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attended, mask.shape[1]
                )[0]
            inputs["old_per_token_logps"] = old + moved
    loss, gradients = trl_trainers.gradients(trainer, inputs)
    return inputs["advantages"].numpy(), loss, gradients


def ours(case, directories, given, out):
    import jax

    from policy.modes import make_step

    name, options, kind, _, more = CASES[case]
    algorithm, model = rl.algorithms.get(name, **options), policy.load(directories[0])
    tokens, segments, mask = given.rows
    step = make_step(tokens, segments=segments)

    def logprobs(params, model=model):
        return model.graph.logprobs(params, tokens, step, 1.0)[:2]

    here, entropy = (np.asarray(a) for a in jax.jit(logprobs)(model.params))
    old = here if "mode" in more else here + noise(given, 0.2, seed=7)
    P = len(tokens) // GROUP
    rewards = given.rewards.reshape(P, GROUP, -1)
    extra = {"weights": more["weights"]} if "each_reward" in algorithm.inputs else {}
    reference = None
    if "ref_logp" in algorithm.inputs:
        other = policy.load(directories[1])
        reference = np.asarray(jax.jit(lambda params: logprobs(params, other)[0])(other.params))
        if "token_kl" in algorithm.inputs:
            extra = {
                "token_kl": (here - reference).reshape(P, GROUP, -1),
                "mask": mask.reshape(P, GROUP, -1),
            }
    elif "completion_mask" in algorithm.inputs:
        extra = {"mask": mask.reshape(P, GROUP, -1)}
    advantages = algorithm.advantages(
        rewards if "weights" in extra else rewards[..., 0], mask.sum(1).reshape(P, GROUP), **extra
    )
    if getattr(algorithm, "mask_truncated", False):
        mask = mask * np.array([[c[-1] == EOS] for c in given.completions])
    inputs = {
        "mask": mask.astype(np.float32),
        "old_logp": old,
        "entropy": entropy,
        "advantages": advantages.reshape(-1).astype(np.float32),
        "max_length": LIMIT,
    }
    if algorithm.kl_coef:
        inputs["ref_logp"] = reference
    if "mode" in more:
        inputs["sampler_logp"] = given.spread(given.sampler_logp)
    batch = algorithm.with_totals(rl.algorithms.PolicyInputs(**inputs))

    def loss(params):
        from dataclasses import replace

        logp, entropy = logprobs(params)
        return algorithm.loss(replace(batch, logp=logp, entropy=entropy))[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(model.params)
    policy.save(policy.Model(model.graph, gradient), out)
    return (
        advantages.reshape(-1),
        float(value),
        {name: p.detach().numpy() for name, p in reload("Llama", out).named_parameters()},
    )


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_trl(case, directories, tmp_path):
    given = completions(CASES[case][4].get("rewards", REWARDS))
    if "mode" in CASES[case][4]:
        import dataclasses

        import jax

        from policy.modes import make_step

        model, (tokens, segments, mask) = policy.load(directories[0]), given.rows
        here = np.asarray(
            jax.jit(
                lambda p: model.graph.logprobs(
                    p, tokens, make_step(tokens, segments=segments), 1.0
                )[0]
            )(model.params)
        )
        sampled = here + noise(given, 0.1, seed=8)
        given = dataclasses.replace(
            given, sampler_logp=[row[m != 0].tolist() for row, m in zip(sampled, mask, strict=True)]
        )
    advantages, loss, gradients = theirs(case, directories, given)
    result, value, slopes = ours(case, directories, given, tmp_path / "gradients")
    np.testing.assert_allclose(result, advantages, atol=1e-5)
    np.testing.assert_allclose(value, loss, atol=1e-5)
    assert slopes.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            slopes[name], gradient, atol=1e-4 * np.abs(gradient).max(), rtol=0, err_msg=name
        )
    assert any(gradient.any() for gradient in gradients.values())
