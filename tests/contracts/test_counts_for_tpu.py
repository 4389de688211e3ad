"""What a plan counts in a program for a TPU whose compiler multiplies weights piece by piece while
other chips send the next ones: each piece once. And what it counts of gathers that go on under
products, and between slices. On its own this file prints, as JSON, the operations, the bytes of
all-gathers, the loops and the fusions with such gathers of a program for a topology and so many
tokens, or with `slices` what is exchanged between two by kind."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu compiles for TPU; it is not installed",
    ),
]
LAYERS, TOKENS, HIDDEN, WIDTH = 3, 65536, 4096, 14336


def counts_of(*arguments: str) -> dict:
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | settings | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_product_in_pieces_counts_as_the_full_product():
    result = counts_of("v6e:2x4", str(TOKENS))
    assert result["loops"] > 1, "the compiler takes no product in pieces here"
    assert result["operations"] == pytest.approx(
        3 * LAYERS * 2 * TOKENS / 8 * HIDDEN * WIDTH, rel=0.02
    )
    # Pieces go around in both directions, one of them a step ahead, and are sent once more after
    # their last product.
    piece = 3 * LAYERS * HIDDEN * WIDTH * 2 / 8
    assert result["exchanged"] == pytest.approx((8 + 1) * piece, rel=0.02)


def test_a_gather_under_products_counts_once():
    """With few tokens weights are put together before their product, each while the one before is
    multiplied."""
    result = counts_of("v5e:4x4", "2048")
    assert result["fusions"], "the compiler gathers nothing under other products here"
    assert result["exchanged"] == 3 * LAYERS * HIDDEN * WIDTH * 2
    assert result["operations"] == pytest.approx(
        3 * LAYERS * 2 * 2048 / 16 * HIDDEN * WIDTH, rel=0.02
    )


def test_what_goes_between_slices_counts_apart():
    """Each chip of a slice of four sends a quarter of the gradient, and of an array of an
    all-gather its own part, LAYERS times."""
    gradient, part = 4 * HIDDEN * WIDTH / 4, 2 * LAYERS * HIDDEN * WIDTH / 8
    assert counts_of("slices") == {
        "all-reduce between slices": gradient,
        "all-gather between slices": 2 * part,
    }


def between() -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from policy.mesh.sharding import layout
    from rl.plan.hlo import BETWEEN, HloProgram

    devices = topologies.get_topology_desc("v6e:2x2", platform="tpu", num_slices=2).devices
    copies = layout({"fsdp": 4}, devices=list(devices), dcn={"data": 2}).mesh
    parts = layout({"fsdp": 4}, devices=list(devices), dcn={"fsdp": -1}).mesh

    def given(mesh, dtype, shape, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def gradient(weight, x):
        return jax.grad(lambda weight: jnp.sum(jnp.square(x @ weight)))(weight)

    def layers(x, weights):
        full = NamedSharding(parts, P())
        return jax.lax.scan(
            lambda x, w: (
                jnp.tanh(x @ jax.lax.with_sharding_constraint(w, full))[:, :HIDDEN],
                None,
            ),
            x,
            weights,
        )

    cut = given(copies, jnp.float32, (HIDDEN, WIDTH), "fsdp")
    programs = [
        jax.jit(gradient, out_shardings=cut.sharding).lower(
            cut, given(copies, jnp.float32, (64, HIDDEN), ("data", "fsdp"))
        ),
        jax.jit(layers).lower(
            given(parts, jnp.bfloat16, (64, HIDDEN), "fsdp"),
            given(parts, jnp.bfloat16, (LAYERS, HIDDEN, WIDTH), None, "fsdp"),
        ),
    ]
    result: dict[str, float] = {}
    for program in programs:
        for each in HloProgram(program.compile().as_text()).exchanged():
            if each.kind.endswith(BETWEEN):
                result[each.kind] = result.get(each.kind, 0) + each.bytes * each.times
    return result


def counted(topology: str, tokens: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from rl.plan.hlo import HloProgram

    mesh = Mesh(topologies.get_topology_desc(topology, platform="tpu").devices, "x")

    def given(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def layer(x, weights):
        up, gate, down = weights
        return jax.lax.with_sharding_constraint(
            x + (jnp.tanh(x @ up) * (x @ gate)) @ down, NamedSharding(mesh, P("x"))
        ), None

    def layers(x, up, gate, down):
        return jax.lax.scan(layer, x, (up, gate, down))[0]

    up, down = (
        given((LAYERS, HIDDEN, WIDTH), None, "x"),
        given((LAYERS, WIDTH, HIDDEN), None, None, "x"),
    )
    text = jax.jit(layers).lower(given((tokens, HIDDEN), "x"), up, up, down).compile().as_text()
    program = HloProgram(text)
    exchanged = sum(each.bytes * each.times for each in program.exchanged())
    return {
        "operations": program.operations(),
        "exchanged": exchanged,
        "loops": text.count(" while("),
        "fusions": text.count("%async_collective_fusion"),
    }


if __name__ == "__main__":
    print(
        json.dumps(between() if sys.argv[1] == "slices" else counted(sys.argv[1], int(sys.argv[2])))
    )
