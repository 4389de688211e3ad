"""Which stages share beginnings, in rows of which length, and what excludes it by name."""

from fractions import Fraction
from types import SimpleNamespace

import jax
import learners
import numpy as np
import pytest
import shared_prefixes

import rl.stages
from rl.commands import cli
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.stages.shapes import abstract_rows
from rl.stages.sharing import describe, sharing_of
from rl.training.packing.trees import Sharing


def config(stage: dict, **keys) -> RunConfig:
    common = {
        "algorithm": "grpo",
        "steps": 1,
        "prompts_per_step": 8,
        "sampling": {"max_new_tokens": 16},
    }
    return RunConfig.model_validate(
        {
            "model": {"source": "tiny"},
            "max_length": 64,
            "data": {"task": "arithmetic"},
            "rewards": {"functions": ["exact_answer"]},
            "stages": [common | stage],
        }
        | keys
    )


def bound(stage: dict, model=None):
    [made] = rl.stages.create(config(stage))
    made.bind((model or learners.dense()).graph)
    return made


@pytest.mark.parametrize(
    ("stage", "sharing"),
    [
        ({}, Sharing(Fraction(48 + 8 * 16, 64))),
        ({"samples_per_prompt": 2}, Sharing(Fraction(48 + 2 * 16, 64))),
        ({"micro_batch": 2}, Sharing(Fraction(48 + 4 * 16, 64))),  # two parts of four
        ({"micro_batch": 1}, Sharing(1)),
        ({"algorithm": "dpo"}, Sharing(1, together=True)),
        ({"algorithm": "reward_model"}, Sharing(1, together=True)),
        ({"shared_prefix": "never"}, None),
        ({"samples_per_prompt": 1}, None),
        ({"algorithm": "sft"}, None),
        ({"dropout": 0.1}, None),
    ],
)
def test_the_configuration_decides(stage, sharing):
    made = bound(stage)
    assert made.trainer.sharing == sharing
    line = describe(made, made.trainer.graph, made.trainer.sharing)
    assert (line is None) == (made.group is None)
    if sharing is not None:
        length = sharing.packed_length(made.row_length)
        assert f"rows of {length}" in line and (
            length > 64 or made.answers_share_prompts or "less than full length" in line
        )


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ({"samples_per_prompt": 1}, "stages.0.samples_per_prompt: 1"),
        ({"algorithm": "sft"}, "sft"),
        ({"dropout": 0.1}, "stages.0.dropout"),
    ],
)
def test_always_is_refused_with_what_excludes_it(stage, name):
    [made] = rl.stages.create(config(stage | {"shared_prefix": "always"}))
    [fault] = [each for each in made.check() if each.key[-1] == "shared_prefix"]
    assert fault.key == ("stages", 0, "shared_prefix")
    assert f"always does not go with {name}" in fault.text


def test_other_messages_still_name_the_algorithm():
    [made] = rl.stages.create(
        config({"dropout": 0.1, "shared_prefix": "always", "teacher": {"source": "tiny"}})
    )
    [text] = [each.text for each in made.check() if each.key[-1] == "teacher"]
    assert text.startswith("grpo learns from no teacher")


def test_the_command_line_refuses_it_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "run.yml"
    file.write_text(
        config({"dropout": 0.1, "shared_prefix": "always"}).model_dump_json(exclude_defaults=True)
    )
    assert cli.train_main([str(file), f"run.dir={tmp_path / 'run'}"]) == 2
    assert "shared_prefix" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_one_program_serves_all_batches_of_a_shape():
    made = bound({"samples_per_prompt": 4, "prompts_per_step": 2, "algorithm": {"name": "grpo"}})
    trainer, state, shapes = made.trainer, None, set()
    for seed in range(3):
        data = shared_prefixes.groups(
            learners.VOCAB, lengths=((5 + seed, (9, 9, 4, 7)), (3, (12, 1, 8, 2 - seed))), seed=seed
        )
        packing, micro_rows = trainer.packing_of(data)
        shapes.add((*packing.shape, micro_rows))
        if state is None:
            state = trainer.start(jax.tree.map(jax.numpy.copy, learners.dense().params), 0)
        state, metrics = trainer.update(state, data)
        assert metrics["perf/shared_prefix"] > 1.1
    assert trainer.policy_update.executable.number == len(shapes) < 3


def test_operations_are_those_of_what_is_computed():
    """Each completion attends to its prompt, whose own operations count once."""
    (plain, state), (trees, _) = shared_prefixes.pair(learners.dense(), learners.stage("grpo"))
    data = shared_prefixes.groups(learners.VOCAB, lengths=((8, (6, 6, 6, 6)), (4, (2, 2))))
    for trainer in (plain, trees):
        trainer.logprobs(state.policy.params, data)
    forward = plain.flops.forward
    assert plain.total_flops == pytest.approx(
        4 * forward(np.array([14])) + 2 * forward(np.array([6]))
    )
    alone = 3 * forward(np.array([8])) + forward(np.array([4]))
    assert trees.total_flops == pytest.approx(plain.total_flops - alone)


def test_a_batch_of_which_nothing_is_shared_is_packed_as_without_trees():
    (plain, _), (trees, _) = shared_prefixes.pair(learners.dense(), learners.stage("grpo"))
    data = shared_prefixes.groups(learners.VOCAB).replace(prompt=np.arange(12, dtype=np.int32))
    packing, rows = trees.packing_of(data)
    expected, expected_rows = plain.packing_of(data)
    assert packing.tree is None and rows == expected_rows
    np.testing.assert_array_equal(packing.segments, expected.segments)
    assert packing.metrics(rows, shared=True)["perf/shared_prefix"] == 1


def test_a_plan_counts_the_micro_batches_that_a_run_makes():
    """Eight groups of eight, each in two rows of four completions. A plan takes micro-batches of all
    the tokens that two rows may have; the program has room for a row for two completions."""
    made = bound({"micro_batch": 2})
    rows = abstract_rows(made, 1)
    assert rows == ((32, 2 * 64), 1, 16)
    data = shared_prefixes.groups(learners.VOCAB, lengths=((48, (16,) * 8),) * 8, T=64)
    packing, R = made.trainer.packing_of(data)
    assert packing.shape[1] == 48 + 4 * 16 and (R, packing.filled_rows) == rows[1:]


def on(platform: str, dtype: str) -> SimpleNamespace:
    """What a device and a type say of a graph."""
    layout, runtime = (
        SimpleNamespace(platform=platform, num_row_shards=1),
        SimpleNamespace(batch_split=False, dtype=dtype),
    )
    return SimpleNamespace(layout=layout, runtime=runtime, config=learners.dense().config)


PARTS = Sharing(Fraction(2784 + 4 * 1312, 4096), longest=8192)


@pytest.mark.parametrize(
    ("platform", "max_length", "auto", "always", "line"),
    [
        # Two parts of four completions, each with the prompt.
        ("tpu", 4096, PARTS, PARTS, f"{2 * 2784 + 8 * 1312} of {8 * 4096} tokens computed"),
        (
            "tpu",
            16384,
            None,
            "tokens in bfloat16 on a TPU, whose kernel takes 8192",
            "off: rows of 16384 tokens in bfloat16 on a TPU",
        ),
        ("gpu", 64, None, Sharing(Fraction(48 + 8 * 16, 64)), "off: bfloat16 on a GPU"),
    ],
)
def test_devices_whose_attention_excludes_it(platform, max_length, auto, always, line):
    for value, expected in (("auto", auto), ("always", always)):
        more = {"samples_per_prompt": 8, "shared_prefix": value}
        if platform == "tpu" and max_length == 4096:
            more["sampling"] = {"max_new_tokens": 1312}
        [stage] = rl.stages.create(config(more, max_length=max_length))
        if isinstance(expected, str):
            with pytest.raises(ConfigError, match=expected):
                sharing_of(stage, on(platform, "bfloat16"))
        else:
            assert sharing_of(stage, on(platform, "bfloat16")) == expected
            if value == "auto":
                assert line in describe(stage, on(platform, "bfloat16"), expected)
