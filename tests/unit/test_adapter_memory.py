"""What a stage with an adapter keeps in memory, from the shapes of presets: the sizes that the
literature and a calculator give. No array is made."""

import re

import jax
import pytest

from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
from policy.config import Runtime
from policy.huggingface import sources
from policy.huggingface.peft.targets import resolved
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.ops.host_memory import on_a_device
from rl.accounting.chips import Chip
from rl.plan.estimate import Estimator
from rl.plan.programs import programs, stages
from rl.run import build
from rl.run.load import load
from rl.run.resume import remat

GIB = 2**30
# Bytes of a number of an adapter: itself, two moments and a gradient, all in float32.
LEARNING = 16
REFERENCE = 4
BASES = {
    "llama3.1-8b": (15.0, 8.5, 5.6),
    "qwen3-30b-a3b": (56.9, 29.1, 16.9),
    "deepseek-v3": (1250, 627, 354),
}
TYPES = (None, "int8", "nf4")
# Numbers of an adapter of rank 1 in all linear layers, with factors of experts each or shared.
NUMBERS = {
    ("llama3.1-8b", "each"): 2_621_440,
    ("qwen3-30b-a3b", "each"): 52_740_096,
    ("qwen3-30b-a3b", "shared"): 15_286_272,
    ("deepseek-v3", "each"): 418_414_400,
    ("deepseek-v3", "shared"): 100_370_240,
}


def graph(preset: str, base_weights=None) -> Graph:
    block = 64 if base_weights == "nf4" else None
    runtime = Runtime(param_dtype="bfloat16", base_weights=base_weights, base_block=block)
    return Graph(sources.preset(preset), runtime, layout(devices=jax.devices()[:1]))


@pytest.mark.parametrize("preset", BASES)
def test_base_weights_take_the_bytes_of_their_type(preset):
    sizes = [on_a_device(graph(preset, each).abstract) / GIB for each in TYPES]
    assert sizes == pytest.approx(BASES[preset], rel=0.01)


@pytest.mark.parametrize(("preset", "experts"), NUMBERS)
def test_a_rank_of_an_adapter_has_the_numbers_of_its_factors(preset, experts):
    decoder = graph(preset)

    def numbers(rank):
        spec = AdapterSpec(rank=rank, expert_rank=rank, experts=experts)
        return Adapters(decoder.with_runtime(adapter=resolved(decoder, spec))).parameters

    each = NUMBERS[preset, experts]
    assert [numbers(rank) for rank in (1, 8)] == [each, 8 * each]


def planned_stage(tmp_path, rank, trains, base_weights="null"):
    """A stage with a reference model over llama3.1-8b on one device, its update, its memory as
    remat counts it, and the costs that an estimate gives."""
    file = tmp_path / "run.yml"
    file.write_text(f"run: {{dir: {tmp_path / 'run'}}}\n")
    more = f"prompts_per_step: 1, micro_batch: 1, sampling: {{max_new_tokens: 8}}, trains: {trains}"
    stage = f"{{algorithm: {{name: grpo, kl_coef: 0.1}}, steps: 1, {more}}}"
    adapter = f"{{rank: {rank}, alpha: 16}}"
    computed = f"dtype: bfloat16, param_dtype: bfloat16, base_weights: {base_weights}, remat: full"
    model = f"{{source: llama3.1-8b, {computed}, adapter: {adapter}}}"
    given = ["tokenizer=bytes", "data.task=arithmetic", "rewards.functions=[exact_answer]"]
    given += [f"model={model}", f"stages=[{stage}]", "mesh={fsdp: 1}", "max_length=64"]
    config = load([file], given)
    mesh = build.on_mesh(config, jax.devices()[:1])
    ((stage, _),) = stages(config, mesh, None)
    (update,) = (each for each in programs(config, mesh, None) if each.kind == "update")
    (memory,) = remat.updates(config, stage.graph, None)
    chip = Chip("busy", tflops=1e-3, memory=1.0, bandwidth=1e6, links=0.0)
    cost = Estimator(jax.devices()[:1], chip, None)(config)["grpo: update"]
    return stage, update, memory, cost


@pytest.mark.parametrize(("rank", "gib"), [(8, 0.31), (32, 1.25)])
def test_a_stage_keeps_its_base_once_and_moments_of_the_adapter_alone(tmp_path, rank, gib):
    """With a KL penalty also a reference, of adapter arrays. The gradient of an update is that of
    the adapter."""
    stage, update, memory, cost = planned_stage(tmp_path, rank, "adapter")
    numbers = rank * NUMBERS["llama3.1-8b", "each"]
    assert LEARNING * numbers / GIB == pytest.approx(gib, abs=0.005)
    assert on_a_device(stage.stage.trainer.base) / GIB == pytest.approx(15.0, rel=0.01)
    assert update.gradient == 4 * numbers
    state = on_a_device((stage.state.policy, stage.state.reference))
    assert state + update.gradient == pytest.approx((LEARNING + REFERENCE) * numbers, abs=64)
    assert update.stepped == pytest.approx(12 * numbers, abs=64)
    _, _, full, other = planned_stage(tmp_path, rank, "weights")
    weights = stage.graph.parameters
    # Weights that learn have a reference in their own type, a copy in float32, two moments and two
    # gradients.
    saved = (2 + 4 + 8 + 8) * weights
    of_adapter = (4 + 4 + 8 + 8) * numbers
    assert full.fixed - memory.fixed == pytest.approx(saved - of_adapter, rel=1e-6)
    assert other.temporaries - cost.temporaries == 4 * (weights - numbers)
    # With remat: full a further forward pass. Products take longest.
    assert cost.seconds / other.seconds == pytest.approx(3 / 4, rel=0.03)


@pytest.mark.parametrize(("base_weights", "stored"), [("null", "bf16"), ("nf4", "ui4")])
def test_an_update_holds_the_weights_of_all_layers_as_they_are_stored(
    tmp_path, base_weights, stored
):
    """No gradient, moment or sum with the adapter has their size, and what is dequantised is one
    layer. Read from the traced program."""
    _, update, _, _ = planned_stage(tmp_path, 8, "adapter", base_weights)
    text = update.lower().as_text()
    layer = r"(?:4096x14336|14336x4096)"
    assert {*re.findall(rf"tensor<32x{layer}x(\w+)>", text)} == {stored}
    floats = {*re.findall(rf"tensor<{layer}x(\w+)>", text)} - {stored}
    assert floats if base_weights == "nf4" else not floats
