"""What rl/plan/hlo.py reads out of compiled programs, against XLA's own count and against
arithmetic."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from policy.experts.expert_parallel import EXPECTED_LAST
from rl.plan.compiled import counts
from rl.plan.hlo import BETWEEN, HloProgram
from rl.plan.programs import Planned

L, M, E, F = 5, 64, 256, 320


def layer(x, weights):
    up, down = weights
    return x + jax.nn.silu(x @ up) @ down, None


def scanned(x, up, down):
    return jax.lax.scan(layer, x, (up, down))[0]


def unrolled(x, up, down):
    for one in zip(up, down, strict=True):
        x, _ = layer(x, one)
    return x


def compiled(function, *shapes):
    return (
        jax.jit(function)
        .lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
        .compile()
    )


def gradient(function):
    return jax.grad(lambda *given: jnp.sum(jnp.square(function(*given))), argnums=(0, 1, 2))


@pytest.mark.parametrize(
    "change", [lambda function: function, gradient], ids=["forward", "gradient"]
)
def test_a_loop_counts_as_often_as_it_runs(change):
    """A scan and the same layers one by one; XLA counts the latter, elementwise operations too."""
    shapes = ((M, E), (L, E, F), (L, F, E))
    loop, flat = (compiled(change(each), *shapes) for each in (scanned, unrolled))
    once = HloProgram(flat.as_text()).operations()
    assert once == pytest.approx(flat.cost_analysis()["flops"], rel=0.02)
    assert HloProgram(loop.as_text()).operations() == pytest.approx(once, rel=0.02)
    assert loop.cost_analysis()["flops"] < 0.5 * once, "XLA counts the body once"


@pytest.mark.parametrize(("step", "trips"), [(1, 8), (2, 4), (3, 3)])
def test_a_loop_whose_counter_goes_on_by_more_than_one(step, trips):
    """Also of a compiler that does not write down how often a loop runs."""

    def loop(x, weights):
        return jax.lax.while_loop(
            lambda state: state[0] < 8, lambda state: (state[0] + step, state[1] @ weights), (0, x)
        )[1]

    text = compiled(loop, (M, E), (E, E)).as_text()
    unsaid = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert unsaid != text
    assert HloProgram(text).operations() == HloProgram(unsaid).operations() == trips * 2 * M * E * E


@pytest.mark.parametrize("batch", [(), (3,), (2, 5)])
def test_products_count_two_operations_a_multiplication(batch):
    text = compiled(jnp.matmul, (*batch, 40, 56), (*batch, 56, 72)).as_text()
    count = 1
    for size in batch:
        count *= size
    assert HloProgram(text).operations() == 2 * count * 40 * 56 * 72


def test_convolutions_count_pairs_that_lie_on_numbers():
    """As XLA counts them: not what lies on padding."""

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (2,), "SAME", rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    done = compiled(convolve, (2, 17, 8), (3, 8, 16))
    assert HloProgram(done.as_text()).operations() == pytest.approx(
        done.cost_analysis()["flops"], rel=0.02
    )


def test_loops_whose_number_of_turns_is_not_known_count_as_often_as_is_said():
    def until(x, w):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x > 0, dtype=jnp.int32) < jnp.sum(x < 2, dtype=jnp.int32),
            lambda x: x + x @ w,
            x,
        )

    text = compiled(until, (M, E), (E, E)).as_text()
    assert HloProgram(text).operations() == 2 * M * E * E
    assert HloProgram(text, trip_count=3).operations() == 3 * 2 * M * E * E


def test_what_a_dispatch_does_once_is_spread_over_its_steps():
    """A loop inside that ends by what it computes, too, is not taken for one of steps."""

    def below(x, limit):
        return jnp.sum(x > 0, dtype=jnp.int32) < jnp.sum(x < limit, dtype=jnp.int32)

    def dispatch(x, w):
        def step(x):
            return jax.lax.while_loop(lambda x: below(x, 3), lambda x: x + x @ w, x)

        return jax.lax.while_loop(lambda x: below(x, 2), step, x @ w)

    planned = Planned("grpo", "decode a token", (M,), None, 0, 0, times=8, dispatch=4)
    text = compiled(dispatch, (M, E), (E, E)).as_text()
    assert counts(text, planned)["operations"] == 2 * M * E * E * (1 + 1 / 4)


@pytest.mark.parametrize("derived", [False, True])
def test_of_branches_all_count_or_the_one_that_is_said_to_be_usual(derived):
    def choose(x, w, name="either"):
        with jax.named_scope(name):
            return jax.lax.cond(
                jnp.sum(x) > 0, lambda x, w: x @ w, lambda x, w: x @ w @ w @ w, x, w
            )

    def products(name, rows):
        """Programs that differ in a name alone are one to a compilation cache: each has its own
        number of rows."""
        function = partial(choose, name=name)
        if derived:
            function = jax.grad(
                lambda x, w: jnp.sum(jnp.square(choose(x, w, name))), argnums=(0, 1)
            )
        return HloProgram(compiled(function, (rows, E), (E, E)).as_text()).operations() / (
            2 * rows * E * E
        )

    assert products(EXPECTED_LAST, M) == (3 if derived else 1)
    assert products("either", 2 * M) == (12 if derived else 4)


TEXT = """HloModule test

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[8,16]) -> f32[8,64] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %collected = f32[8,64]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}
}

%body (t: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %t = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %start = ((f32[8,16]{1,0}), f32[8,64]{1,0}) async-start(%x), calls=%wrapped
  %done = f32[8,64]{1,0} async-done(%start)
  %reduced = f32[8,16]{1,0} all-reduce(%x), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  %room = f32[64,16]{1,0} broadcast(%i), dimensions={}
  %n = s32[4]{0} iota(), iota_dimension=0
  %sent = f32[64,16]{1,0} ragged-all-to-all(%x, %room, %n, %n, %n, %n), channel_id=3, replica_groups={{0,1,2,3}}
  %moved-start = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%reduced), \
source_target_pairs={{0,1}}
  %moved = f32[8,16]{1,0} collective-permute-done(%moved-start)
  ROOT %next = (s32[], f32[8,16]{1,0}) tuple(%i, %moved)
}

%condition (t: (s32[], f32[8,16])) -> pred[] {
  %t = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %x = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8,16]{1,0}) while(%x), condition=%condition, body=%body
}
"""


def test_collectives_are_counted_with_their_loops_and_inside_what_wraps_them():
    result = {each.kind: each for each in HloProgram(TEXT).exchanged()}
    assert {kind: (each.bytes, each.times, each.group) for kind, each in result.items()} == {
        "all-gather": (4 * 8 * 64, 7, 4),
        "all-reduce": (4 * 8 * 16, 7, 2),
        "collective-permute": (4 * 8 * 16, 7, None),
        "ragged-all-to-all": (4 * 8 * 16, 7, 4),
    }


def test_a_loop_that_is_known_not_to_run_counts_nothing():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"0"}}'
    result = HloProgram(TEXT.replace("body=%body", known), trip_count=3).exchanged()
    assert result and not any(each.times for each in result)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
        ("mesh['a'=2,'b'=8] {'a','b':(2)4}", 8),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("{{0,1,2},{3,4,5}}", 3),
        ("{}", None),
    ],
)
def test_groups_of_a_collective_are_read_in_every_form(groups, devices):
    program = HloProgram(TEXT.replace("replica_groups={{0,1},{2,3}}", f"replica_groups={groups}"))
    assert [each.group for each in program.exchanged() if each.kind == "all-reduce"] == [devices]


def test_a_collective_that_goes_on_through_several_fusions_counts_once():
    """As libtpu writes it: each fusion holds the collective and hands its arrays on, next to what
    is computed meanwhile."""
    flags = "channel_id=9, replica_groups=[1,8]<=[8], dimensions={1}"
    fusions = f"""%begins (p: f32[8,16]) -> (f32[8,16], f32[8,128]) {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %full = f32[8,128]{{1,0}} all-gather(%p), {flags}
  ROOT %handed = (f32[8,16]{{1,0}}, f32[8,128]{{1,0}}) custom-call(%full), custom_call_target="begin"
}}

%goes_on (p: f32[8,16], q: f32[8,128], r: f32[32]) -> (f32[32], f32[8,16], f32[8,128], f32[8,128]) {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %q = f32[8,128]{{1,0}} parameter(1)
  %r = f32[32]{{0}} parameter(2)
  %full = f32[8,128]{{1,0}} all-gather(%p), {flags}
  %turned = f32[32]{{0}} negate(%r)
  ROOT %all = (f32[32]{{0}}, f32[8,16]{{1,0}}, f32[8,128]{{1,0}}, f32[8,128]{{1,0}}) tuple(%turned, %p, %q, %full)
}}

%body ("""
    calls = """  %other = f32[32]{0} broadcast(%i), dimensions={}
  %one = (f32[8,16]{1,0}, f32[8,128]{1,0}) fusion(%x), kind=kCustom, calls=%begins
  %p = f32[8,16]{1,0} get-tuple-element(%one), index=0
  %q = f32[8,128]{1,0} get-tuple-element(%one), index=1
  %two = (f32[32]{0}, f32[8,16]{1,0}, f32[8,128]{1,0}, f32[8,128]{1,0}) fusion(%p, %q, %other), \
kind=kCustom, calls=%goes_on
  %room = """
    program = HloProgram(TEXT.replace("%body (", fusions).replace("  %room = ", calls))
    collected = [(each.bytes, each.times) for each in program.exchanged() if each.group == 8]
    assert collected == [(4 * 8 * 128, 7)]
    moved = {each.name: each.bytes for each in program.moved()}
    assert moved["one"] == 7 * 4 * (8 * 16 + 8 * 16 + 8 * 128) and moved["two"] == 7 * 4 * (32 + 32)


def test_transfers_between_slices_are_a_collective_that_goes_through_the_memory_of_the_chip():
    """As libtpu writes what two slices gather; the pair counts once."""
    how = '_xla_host_transfer_rendezvous="all-gather.1_0",_xla_megascale_transfer_type="ALL_GATHER"'
    pair = f"""  %token = token[] after-all()
  %recv = (f32[16,16]{{1,0}}, u32[], token[]) recv(%token), channel_id=5, frontend_attributes={{{how}}}
  %send = (f32[8,16]{{1,0}}, u32[], token[]) send(%reduced, %token), channel_id=6, frontend_attributes={{{how}}}
  %sent = token[] send-done(%send), channel_id=6
  %received = (f32[16,16]{{1,0}}, token[]) recv-done(%recv), channel_id=5
  %room = """
    program = HloProgram(TEXT.replace("  %room = ", pair))
    assert [(e.kind, e.bytes, e.times) for e in program.exchanged() if BETWEEN in e.kind] == [
        ("all-gather between slices", 4 * 16 * 16, 7)
    ]
    bytes_ = {each.kind: each.bytes for each in program.moved()}
    assert bytes_["send"] == 7 * 4 * 8 * 16 and bytes_["recv"] == 7 * 4 * 16 * 16
    assert not {"send-done", "recv-done"} & bytes_.keys()
