"""No slot is lost or given twice, whatever arrives and ends when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.scheduler import Request, Scheduler

EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6)),
    st.tuples(st.just("admit"), st.integers(1, 4)),
    st.tuples(st.just("release"), st.integers(0, 10_000)),
)


def group(index, samples):
    return [Request(index, sample, (1, 2), index) for sample in range(samples)]


@settings(max_examples=300, deadline=None)
@given(slots=st.integers(1, 6), events=st.lists(EVENTS, max_size=40))
def test_every_request_runs_once_in_a_slot_of_its_own(slots, events):
    scheduler, added, started, ended = Scheduler(slots), [], [], []
    running: dict[int, Request] = {}

    def admit(prompts):
        admitted = scheduler.admit(prompts)
        assert not admitted.keys() & running.keys(), "a slot was given while in use"
        assert admitted.keys() <= set(range(slots))
        assert len({request.index for request in admitted.values()}) <= prompts
        running.update(admitted)
        started.extend(admitted.values())
        assert scheduler.running == running
        if len(running) < slots and scheduler.waiting:
            assert len({request.index for request in admitted.values()}) == prompts, "a slot stayed empty"

    def release(slot):
        request = scheduler.release(slot)
        assert request is running.pop(slot)
        ended.append(request)

    for event, number in events:
        if event == "add":
            new = group(len(added), number)
            added.extend(new)
            scheduler.add(new)
        elif event == "admit":
            admit(number)
        elif running:
            release(sorted(running)[number % len(running)])
        assert scheduler.busy == bool(scheduler.waiting or running)
        assert [*started, *scheduler.waiting] == added, "first come, first served"
    while scheduler.busy:
        admit(1)
        release(max(running))
    assert sorted(map(id, ended)) == sorted(map(id, added))
    scheduler.add(group(-1, slots))
    assert sorted(scheduler.admit(1)) == list(range(slots)), "a slot was lost"


def test_a_group_is_split_over_admissions_but_its_prompt_is_counted_once():
    scheduler = Scheduler(3)
    scheduler.add([*group(0, 2), *group(1, 3)])
    assert [(r.index, r.sample) for r in scheduler.admit(1).values()] == [(0, 0), (0, 1)]
    assert [(r.index, r.sample) for r in scheduler.admit(1).values()] == [(1, 0)]
    assert scheduler.admit(4) == {}
    scheduler.release(0)
    assert [(slot, r.index, r.sample) for slot, r in scheduler.admit(4).items()] == [(0, 1, 1)]
