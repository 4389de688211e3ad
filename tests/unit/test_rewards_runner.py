"""The runner keeps every fault of a reward out of the run."""

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rewards import RewardError, RewardFailed, Runner, RunnerOptions, Share
from rewards.workers import threads

BAD = Path(__file__).with_name("bad_rewards.py")
ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")

FAULTS = {
    "raises": "raised",
    "exits": "raised",
    "recurses": "raised",
    "hangs": "timeout",
    "hangs_in_c": "timeout",
    "floods_and_hangs": "timeout",
    "hangs_with_children": "timeout",
    "leaves": "died",
    "kills_itself": "died",
    "crashes": "died",
    "closes_everything": "died",
    "writes_everywhere": "died",
    "takes_memory": "raised",
    "too_few": "wrong_length",
    "too_many": "wrong_length",
    "returns_nothing": "wrong_type",
    "returns_a_dict": "wrong_type",
    "returns_text": "wrong_type",
    "returns_a_list": "wrong_type",
    "returns_complex": "wrong_type",
    "returns_nan": "not_finite",
    "returns_infinity": "not_finite",
    "returns_a_huge_number": "not_finite",
}
HARMLESS = ["floods", "leaves_children", "forks_and_returns_twice", "leaves_an_alarm"]
PARENT = """
import signal, sys
from rewards import Runner, RunnerOptions
signal.signal(signal.SIGINT, lambda *_: None)  # a handler is not inherited by workers, SIG_IGN would be
runner = Runner(RunnerOptions(((sys.argv[1], 1.0, {}),), workers=1, timeout_s=900.0))
print(runner.score(["p"], ["a"], {}).total[0])
"""

INTERRUPTED = """
import random, signal
from rewards import Runner, RunnerOptions

class Interrupted(BaseException):
    pass

def interrupt(*_):
    raise Interrupted

signal.signal(signal.SIGALRM, interrupt)
runner = Runner(RunnerOptions((("exact_answer", 1.0, {}),), workers=1))
texts = ["a"] * 500
for _ in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-4, 5e-3))
        while True:
            runner.start(texts, texts, {"answer": texts}, groups=[*range(500)])
    except Interrupted:
        pass
runner.close()
print("ended")
"""


def options(*functions, timeout_s=30.0, **others):
    """RunnerOptions of specs, or (spec, weight, options)."""
    functions = tuple((f, 1.0, {}) if isinstance(f, str) else f for f in functions)
    return RunnerOptions(functions, timeout_s=timeout_s, **{"workers": 1, **others})


def written(tmp_path, text):
    path = tmp_path / "own.py"
    path.write_text(text)
    return path


@contextlib.contextmanager
def run_of(spec):
    """A run in a process group of its own, that scores one completion with a reward; killed if it
    still is there."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, spec],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def processes_marked(mark):
    """Ids of the processes that inherited this text in their environment."""
    result = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                result.append(int(entry.name))
        except OSError:
            continue
    return result


def none_left(mark, seconds=10.0):
    until = time.monotonic() + seconds
    while processes_marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not processes_marked(mark)


@pytest.fixture
def mark(monkeypatch):
    """A text in the environment of every process that the test starts."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("DUET_TEST_MARK", mark)
    return mark


@LINUX
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (k == "timeout" and n != "hangs_in_c"))
        for n, k in FAULTS.items()
    ],
)
def test_a_faulty_reward_costs_only_its_own_samples(name, mark):
    hangs = FAULTS[name] == "timeout"
    memory = 512 if name == "takes_memory" else None
    with Runner(
        options(f"{BAD}:{name}", timeout_s=0.6 if hangs else 30.0, memory_limit_mb=memory)
    ) as runner:
        scores = runner.score(["p"] * 3, ["bad", "ab", "abc"], {}, groups=[0, 0, 1])
    np.testing.assert_array_equal(scores.rewards[:, 0], [math.nan, 2.0, 3.0])
    np.testing.assert_array_equal(scores.total, [math.nan, 2.0, 3.0])
    assert [(fault.sample, fault.kind, fault.completion) for fault in scores.faults] == [
        (0, FAULTS[name], "bad")
    ]
    assert scores.metrics["reward/faults"] == 1
    assert scores.metrics["reward/timeouts"] == float(hangs)
    assert none_left(mark)


def test_totals_that_overflow_are_faults_of_the_largest_score(tmp_path):
    text = """
def huge(completions):
    return [{"huge": 1e308, "half": 2e38, "against": -1e308}.get(c, 1.0) for c in completions]
def other(completions):
    return [{"huge": 1e308, "half": 2e38, "against": 1e308}.get(c, 2.0) for c in completions]
"""
    own = written(tmp_path, text)
    functions = ((f"{own}:huge", 1.5, {}), (f"{own}:other", 1.0, {}))
    with Runner(options(*functions)) as runner, np.errstate(all="raise"):
        scores = runner.score(["p"] * 4, ["huge", "half", "against", "fine"], {}, groups=[0] * 4)
    np.testing.assert_array_equal(scores.total, [math.nan, math.nan, math.nan, 3.5])
    result = {
        name: [fault.sample for fault in scores.faults if fault.function == name]
        for name in ("huge", "other")
    }
    assert result == {"huge": [0, 1, 2], "other": [0, 2]} and {
        fault.kind for fault in scores.faults
    } == {"not_finite"}
    assert "2e+38, times its weight 3e+38" in scores.faults[1].traceback
    assert scores.metrics["reward/faults"] == 5 and scores.metrics["rewards/huge/mean"] == 1.0
    assert scores.metrics["rewards/other/mean"] == pytest.approx(1e38)
    with (
        Runner(options(*functions, on_error="stop")) as runner,
        pytest.raises(RewardFailed, match="huge failed .not_finite."),
    ):
        runner.score(["p"], ["huge"], {})


@LINUX
@pytest.mark.parametrize("name", HARMLESS)
def test_a_reward_that_makes_a_mess_keeps_its_scores_and_leaves_no_process(name, mark):
    with Runner(options(f"{BAD}:{name}")) as runner:
        for _ in range(2):
            scores = runner.score(["p"] * 3, ["bad", "ab", "abc"], {}, groups=[0, 0, 1])
            np.testing.assert_array_equal(scores.total, [0.5, 2.0, 3.0])
            assert scores.faults == []
    assert none_left(mark)


@LINUX
def test_workers_start_with_the_first_call_are_kept_and_end_with_the_runner(mark):
    with Runner(options("exact_answer", workers=2)) as runner:
        assert processes_marked(mark) == []
        runner.score(["p"] * 8, ["a"] * 8, {"answer": ["a"] * 8})
        runner.score(["p"] * 8, ["a"] * 8, {"answer": ["a"] * 8})
        first = set(processes_marked(mark))
        assert 2 <= len(first) <= 4  # of two workers those that had a call, each with its guard
        for _ in range(3):
            runner.score(["p"] * 8, ["a"] * 8, {"answer": ["a"] * 8})
        assert first <= set(processes_marked(mark))
    assert none_left(mark)


@LINUX
def test_a_worker_with_too_many_children_is_replaced(mark, monkeypatch):
    monkeypatch.setattr(threads, "_MOST_CHILDREN", 6)
    with Runner(options(f"{BAD}:leaves_children")) as runner:
        for _ in range(12):
            assert runner.score(["p"], ["ab"], {}).total[0] == 2.0
            assert len(processes_marked(mark)) <= 8  # worker, guard, six children
    assert none_left(mark)


def test_a_process_that_something_else_ended_costs_no_sample(tmp_path):
    text = f"""
import os, pathlib, signal
first = pathlib.Path({str(tmp_path / "first")!r})
def ended_once(completions):
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return [1.0]
"""
    with Runner(options(f"{written(tmp_path, text)}:ended_once")) as runner:
        scores = runner.score(["p"], ["a"], {})
    assert scores.total[0] == 1.0
    assert scores.faults == []
    assert scores.metrics["reward/retried"] == 1


def test_a_call_on_a_group_that_fails_is_told_once(tmp_path, caplog):
    path = written(tmp_path, "def one(completions):\n    return [1.0]\n")
    with Runner(options(f"{path}:one")) as runner:
        for _ in range(2):
            scores = runner.score(["p"] * 3, ["a", "b", "c"], {}, groups=[0, 0, 0])
    assert scores.total.tolist() == [1.0] * 3 and scores.metrics["reward/retried"] == 1
    assert scores.causes == {"one": "returned 1 values for 3 completions"}
    told = [record.getMessage() for record in caplog.records]
    assert (
        len(told) == 1
        and "returned 1 values for 3 completions" in told[0]
        and "each completion alone" in told[0]
    )


def test_half_of_a_surrogate_pair_costs_no_score(tmp_path):
    """A byte-level model can write it. It has no UTF-8."""
    text = """
def prints(completions):
    print(completions[0])
    return [(1.0, "said " + completions[0])]
"""
    with Runner(options(f"{written(tmp_path, text)}:prints")) as runner:
        scores = runner.score(["p"], ["a\ud83db"], {})
    assert scores.total[0] == 1.0 and scores.faults == []
    assert scores.logs == {0: {"prints": "a\ud83db\nsaid a\ud83db"}}


def test_files_of_two_folders_have_neighbours_of_one_name(tmp_path):
    """At import, at a call, and in packages next to them."""
    for name in ("a", "b"):
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "utils.py").write_text(f"NAME = {ord(name)}\n")
        (folder / "parts" / "late.py").write_text("from utils import NAME\n")
        (folder / "own.py").write_text(
            "import utils\n"
            "def early(completions):\n    return [utils.NAME] * len(completions)\n"
            "def late(completions):\n    from parts.late import NAME\n    return [NAME] * "
            "len(completions)\n"
        )
    (tmp_path / "a" / "json.py").write_text(
        "raise ImportError('the standard library goes first')\n"
    )
    specs = [
        f"{tmp_path}/{name}/own.py:{function}" for name in "ab" for function in ("early", "late")
    ]
    with Runner(options(*specs)) as runner:
        for _ in range(2):
            scores = runner.score(["p"], ["a"], {})
            assert scores.faults == [] and scores.rewards.tolist() == [[97, 97, 98, 98]]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_reward_can_start_processes_of_its_own(tmp_path, method):
    (tmp_path / "helper.py").write_text("def length(text):\n    return len(text)\n")
    text = f"""
import multiprocessing
import helper
_pool = []
def twice(text):
    return 2.0 * helper.length(text)
def pooled(completions):
    if not _pool:
        _pool.append(multiprocessing.get_context("{method}").Pool(1))
    return [float(x) for x in _pool[0].map(twice, completions)]
def pooled_helper(completions):
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        return [float(x) for x in pool.map(helper.length, completions)]
"""
    path = written(tmp_path, text)
    with Runner(options(f"{path}:pooled", f"{path}:pooled_helper")) as runner:
        scores = runner.score(["p"] * 2, ["a", "bcd"], {}, groups=[0, 0])
    assert scores.faults == [] and scores.rewards.tolist() == [[2, 1], [6, 3]]


def test_a_missed_deadline_names_its_key(tmp_path):
    path = written(
        tmp_path, "import time\ndef hangs(completions):\n    print('here')\n    time.sleep(100)\n"
    )
    with Runner(options(f"{path}:hangs", timeout_s=0.3)) as runner:
        scores = runner.score(["p"], ["a"], {})
    assert scores.faults[0].traceback.startswith("no answer within 0.3 s (rewards.timeout_s: 0.3)")


def test_a_reward_that_uses_jax_leaves_the_accelerators_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    path = written(
        tmp_path,
        "import os\ndef f(completions):\n    return [float(os.environ['JAX_PLATFORMS'] == "
        "'cpu')]\n",
    )
    with Runner(options(f"{path}:f")) as runner:
        assert runner.score(["p"], ["a"], {}).total[0] == 1.0


@LINUX
def test_closing_in_the_middle_of_a_call_ends_it(mark, tmp_path):
    begun = tmp_path / "begun"
    text = f"""
import pathlib, time
def slow(completions):
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(1000)
"""
    runner = Runner(options(f"{written(tmp_path, text)}:slow", timeout_s=900.0))
    handle = runner.start(["p"] * 2, ["a", "b"], {})
    wait_until(begun.exists)
    runner.close()
    with pytest.raises(RewardError, match="closed"):
        handle.result()
    with pytest.raises(RewardError, match="closed"):
        runner.start(["p"], ["a"], {})
    assert none_left(mark)


@LINUX
@pytest.mark.parametrize("body", ["time.sleep(1000)", "re.fullmatch('(a+)+', 'a' * 60 + 'b')"])
def test_workers_and_their_children_end_when_the_run_is_killed(mark, tmp_path, body):
    begun = tmp_path / "begun"
    text = f"""
import pathlib, re, subprocess, time
def stuck(completions):
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path({str(begun)!r}).touch()
    {body}
"""
    with run_of(f"{written(tmp_path, text)}:stuck") as run:
        wait_until(begun.exists)
        wait_until(
            lambda: len(processes_marked(mark)) >= 5
        )  # the run, a worker, its guard, two children
        run.kill()
    assert none_left(mark)


def test_ctrl_c_does_not_reach_the_workers(tmp_path):
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    text = f"""
import pathlib, time
def waits(completions):
    pathlib.Path({str(begun)!r}).touch()
    while not pathlib.Path({str(go_on)!r}).exists():
        time.sleep(0.01)
    return [7.0]
"""
    with run_of(f"{written(tmp_path, text)}:waits") as run:
        wait_until(begun.exists)
        os.killpg(
            run.pid, signal.SIGINT
        )  # what a terminal does: the signal goes to the group in the foreground
        go_on.touch()
        assert run.communicate()[0].strip() == "7.0"


def test_an_interruption_while_calls_are_queued_does_not_block_the_end():
    """Ctrl-C in the middle of `queue.Queue.put` left its lock taken, and the run did not end."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "ended\n", run.stderr[-2000:]


def test_calls_are_told_with_their_times(tmp_path):
    text = """
import time
def slow(completions):
    time.sleep(0.05)
    if completions == ["b", "c"]:
        raise ValueError
    return [1.0] * len(completions)
"""
    with Runner(options(f"{written(tmp_path, text)}:slow", workers=2)) as runner:
        told_calls: list = []
        before = time.time()
        runner.start(
            ["p"] * 3, ["a", "b", "c"], {}, groups=[0, 1, 1], on_calls=told_calls.extend
        ).result()
        after = time.time()
    assert sorted(call.completions for call in told_calls) == [
        1,
        1,
        1,
        2,
    ]  # a group that failed is tried one by one
    assert {call.function for call in told_calls} == {"slow"} and {
        call.worker for call in told_calls
    } <= {0, 1}
    for call in told_calls:
        assert (
            before <= call.began
            and call.seconds >= 0.05
            and call.began + call.seconds <= after + 0.01
        )
    for worker in (0, 1):
        mine = sorted((call.began, call.seconds) for call in told_calls if call.worker == worker)
        assert all(
            a + seconds <= b + 0.01 for (a, seconds), (b, _) in zip(mine, mine[1:], strict=False)
        )


def test_scores_do_not_depend_on_which_worker_is_first(tmp_path):
    text = """
import time
def slow(prompts, completions):
    time.sleep(0.03 * (int(completions[0]) % 3 == 0))
    return [float("nan") if text == "5" else float(text) for text in completions]
def one(completions):
    return [1] * len(completions)
"""
    path = written(tmp_path, text)
    texts = [str(number) for number in range(24)]
    groups = [number // 2 for number in range(24)]
    results = []
    for workers in (1, 4):
        with Runner(options(f"{path}:slow", (f"{path}:one", 0.5, {}), workers=workers)) as runner:
            results.append(runner.score(texts, texts, {}, groups))
    np.testing.assert_array_equal(results[0].rewards, results[1].rewards)
    np.testing.assert_array_equal(results[0].total, results[1].total)
    assert results[0].faults == results[1].faults
    assert [fault.sample for fault in results[0].faults] == [5]
    expected = np.arange(24) + 0.5
    expected[5] = math.nan
    np.testing.assert_array_equal(results[0].total, expected)


def test_batches_overlap_and_may_be_collected_in_any_order():
    with Runner(options("exact_answer", workers=2)) as runner:
        first = runner.start(["p"] * 3, ["a", "b", "c"], {"answer": ["a", "a", "c"]})
        second = runner.start(["p"] * 2, ["x", "y"], {"answer": ["y", "y"]}, groups=[7, 7])
        np.testing.assert_array_equal(second.result().total, [0, 1])
        np.testing.assert_array_equal(first.result().total, [1, 0, 1])
        assert first.done()
        assert first.result() is first.result()


def test_completions_that_come_one_by_one_are_scored_when_their_group_is_there(tmp_path):
    text = """
import json, pathlib
def seen(prompts, completions, completion_lengths, label, log):
    with open(log, "a") as file:
        file.write(json.dumps([prompts, completions, completion_lengths, label]) + "\\n")
    return [float(len(c)) for c in completions]
"""
    log = tmp_path / "calls"
    with Runner(
        options((f"{written(tmp_path, text)}:seen", 1.0, {"log": str(log)}), workers=1)
    ) as runner:
        columns = {"label": ["x", "x", "y", "y"], "completion_lengths": [0] * 4}
        handle = runner.open(["p", "p", "q", "q"], columns, groups=[0, 0, 1, 1])
        for sample, completion in ((2, "ccc"), (0, "a"), (3, "dddd")):
            handle.add(sample, completion, completion_lengths=10 + sample, truncated=True)
        deadline = time.monotonic() + 30
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not handle.done(), "a group is scored before it is complete"
        handle.add(1, "bb", completion_lengths=11)
        np.testing.assert_array_equal(handle.result().total, [1, 2, 3, 4])
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert calls == [
        [["q", "q"], ["ccc", "dddd"], [12, 13], ["y", "y"]],
        [["p", "p"], ["a", "bb"], [10, 11], ["x", "x"]],
    ]
    assert handle.result().metrics["time/reward_calls"] > 0


def test_shared_out_over_processes_each_group_is_scored_once_and_all_know_all(tmp_path):
    own = """
import os
def lengths(completions, log):
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {' '.join(completions)}\\n")
    if completions == ["bad"]:
        raise ValueError("no")
    return [float(len(text)) for text in completions]
"""
    spec = f"{written(tmp_path, own)}:lengths"
    completions, groups, log = ["a", "bb", "ccc", "dddd", "bad"], [0, 0, 1, 2, 3], tmp_path / "log"
    told, all_told = [None, None], threading.Barrier(2)

    def process(index: int):
        def gather(value):
            told[index] = value
            all_told.wait(60)
            return list(told)

        with Runner(options((spec, 1.0, {"log": str(log)})), Share(index, 2, gather)) as runner:
            return runner.start(
                ["p"] * 5, completions, {}, groups, on_calls=told_calls[index].extend
            ).result()

    told_calls = [], []
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(process, range(2))
    assert told_calls[0] == told_calls[1]
    made = [(call.function, call.worker, call.completions) for call in told_calls[0]]
    assert made[:2] == [(name := first.names[0], 0, 2), (name, 0, 1)] and {
        worker for _, worker, _ in made[2:]
    } == {1}
    for scores in (first, second):
        np.testing.assert_array_equal(scores.total, [1, 2, 3, 4, math.nan])
        assert [fault.completion for fault in scores.faults] == ["bad"]
    assert first.metrics == second.metrics and first.metrics["reward/faults"] == 1
    called = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(texts for _, texts in called) == ["a bb", "bad", "ccc", "dddd"]
    workers = dict(reversed(one) for one in called)
    assert workers["a bb"] == workers["dddd"] != workers["ccc"] == workers["bad"]


def test_one_call_gets_one_group_in_order(tmp_path):
    text = """
def rank(prompts, completions, number):
    assert len(set(prompts)) == 1
    return [10 * len(completions) + position + value for position, value in enumerate(number)]
"""
    prompts, columns = ["p", "q", "p", "r", "q"], {"number": [0.0, 0.25, 0.5, 0.0, 0.75]}
    with Runner(options(f"{written(tmp_path, text)}:rank", workers=2)) as runner:
        grouped = runner.score(prompts, list("abcde"), columns, groups=[4, 2, 4, 9, 2])
        alone = runner.score(prompts, list("abcde"), columns)
    np.testing.assert_array_equal(grouped.total, [20.0, 20.25, 21.5, 10.0, 21.75])
    np.testing.assert_array_equal(alone.total, [10.0, 10.25, 10.5, 10.0, 10.75])


def test_a_total_is_the_weighted_sum_of_what_applies(tmp_path):
    text = """
def some(completions):
    return [None if text in "ab" else 2 for text in completions]
def other(completions):
    return [None if text == "b" else True for text in completions]
def faulty(completions):
    return [float("inf") if text == "d" else None for text in completions]
"""
    path = written(tmp_path, text)
    functions = ((f"{path}:some", 0.5, {}), (f"{path}:other", -2, {}), (f"{path}:faulty", 1.0, {}))
    with Runner(options(*functions)) as runner:
        scores = runner.score(["p"] * 4, list("abcd"), {}, groups=[0] * 4)
    nan = math.nan
    assert scores.names == ("some", "other", "faulty")
    assert scores.rewards.dtype == np.float64
    np.testing.assert_array_equal(
        scores.rewards, [[nan, 1, nan], [nan, nan, nan], [2, 1, nan], [2, 1, nan]]
    )
    np.testing.assert_array_equal(scores.total, [-2.0, nan, -1.0, nan])
    assert (scores.metrics["rewards/some/mean"], scores.metrics["rewards/some/std"]) == (2.0, 0.0)
    assert "rewards/faulty/mean" not in scores.metrics
    assert (scores.metrics["reward/not_applicable"], scores.metrics["reward/faults"]) == (6, 1)
    assert scores.metrics["time/reward_p50_s"] <= scores.metrics["time/reward_p99_s"]


def test_equal_names_are_told_apart():
    functions = [("regex_format", 1.0, {"pattern": pattern}) for pattern in ("a", "b")]
    with Runner(options(*functions)) as runner:
        scores = runner.score(["p"], ["b"], {})
    assert scores.names == ("regex_format", "regex_format-2")
    np.testing.assert_array_equal(scores.rewards, [[0.0, 1.0]])


def test_functions_receive_the_columns_they_name_and_options_win(tmp_path):
    text = """
def names(completions, number, scale=1, max_new_tokens=None, truncated=None, completion_lengths=None):
    assert truncated == [False, True] and completion_lengths == [3, 4]
    return [scale * n + max_new_tokens for n in number]
def takes_all(prompts, completions, **columns):
    assert sorted(columns) == ["completion_lengths", "max_new_tokens", "number", "scale", "truncated"]
    return columns["number"]
def takes_none(completions):
    return [1, 1]
"""
    path = written(tmp_path, text)
    columns = {
        "number": np.arange(2),
        "scale": [5, 6],
        "completion_lengths": np.array([3, 4]),
        "truncated": np.array([False, True]),
        "max_new_tokens": 8,
    }
    functions = [(f"{path}:names", 1.0, {"scale": 100}), f"{path}:takes_all", f"{path}:takes_none"]
    with Runner(options(*functions)) as runner:
        scores = runner.score(["p", "q"], ["a", "b"], columns, groups=[0, 0])
    assert scores.faults == []
    np.testing.assert_array_equal(scores.rewards, [[8, 0, 1], [108, 1, 1]])


def test_messages_async_functions_and_arrays_work(tmp_path):
    text = """
import asyncio
import numpy as np
from rewards import text_of
turn = asyncio.Event()
async def length(text):
    await turn.wait()
    return len(text)
async def waits(prompts, completions):
    asyncio.get_running_loop().call_soon(turn.set)
    return np.array(await asyncio.gather(*[length(text_of(c)) for c in completions]), np.float32)
"""
    prompts = [[{"role": "user", "content": "hi"}]] * 2
    completions = [
        [{"role": "assistant", "content": "abc"}],
        [{"role": "assistant", "content": ""}],
    ]
    with Runner(options(f"{written(tmp_path, text)}:waits")) as runner:
        for _ in range(2):  # the second time on the same event loop
            np.testing.assert_array_equal(
                runner.score(prompts, completions, {}, [0, 0]).total, [3.0, 0.0]
            )


def test_data_that_cannot_be_passed_on_is_named(tmp_path, caplog):
    text = """
def names(completions, when):
    return [1.0] * len(completions)
def takes_all(completions, **columns):
    return [float("when" in columns)] * len(completions)
"""
    path = written(tmp_path, text)
    when = {"when": ["now", {1, 2}]}
    with Runner(options(f"{path}:names")) as runner:
        with pytest.raises(RewardError, match=r"when\[1\] is a set"):
            runner.score(["p"] * 2, ["a", "b"], when)
        with pytest.raises(
            RewardError, match="'when' must be a list with one value for each of the 2 prompts"
        ):
            runner.score(["p"] * 2, ["a", "b"], {"when": ["now"]})
        with pytest.raises(RewardError, match=r"it needs 'when'.*columns: then"):
            runner.score(["p"] * 2, ["a", "b"], {"then": [1, 2]})
        with pytest.raises(RewardError, match="2 prompts, but 1 groups"):
            runner.score(["p"] * 2, ["a", "b"], {"when": ["now", "then"]}, groups=[0])
    with (
        Runner(options(f"{path}:takes_all")) as runner,
        caplog.at_level(logging.WARNING, "duet.rewards"),
    ):
        assert runner.score(["p"] * 2, ["a", "b"], when).total.tolist() == [0.0, 0.0]
    assert "do not receive column 'when'" in caplog.text


def test_on_error_stop_raises_with_the_sample_and_the_traceback():
    with (
        Runner(options(f"{BAD}:raises", on_error="stop")) as runner,
        pytest.raises(
            RewardFailed,
            match=r"(?s)raised.*completion: 'bad'.*in raises\n.*KeyError: 'no such thing'",
        ),
    ):
        runner.score(["p"] * 2, ["ab", "bad"], {}, groups=[0, 0])


def test_only_the_first_tracebacks_are_shown(caplog):
    with (
        Runner(options(f"{BAD}:raises")) as runner,
        caplog.at_level(logging.WARNING, "duet.rewards"),
    ):
        for _ in range(3):
            scores = runner.score(["p"] * 2, ["bad", "bad"], {})
            assert scores.metrics["reward/faults"] == 2
    assert caplog.text.count("KeyError: 'no such thing'") == 3
    assert caplog.text.count("completion: 'bad'") == 3


def test_the_last_output_of_a_worker_that_ended_is_shown():
    with Runner(options(f"{BAD}:leaves")) as runner:
        fault = runner.score(["p"], ["bad"], {}).faults[0]
    assert "exit code 3" in fault.traceback
    assert "last words" in fault.traceback


def test_a_function_that_no_worker_can_import_is_a_fault(tmp_path):
    path = written(tmp_path, "def fine(completions):\n    return [1.0]\n")
    with Runner(options(f"{path}:fine")) as runner:
        path.write_text("raise OSError('gone')  # what a user does who edits the file of a run\n")
        fault = runner.score(["p"], ["a"], {}).faults[0]
    assert fault.kind == "load"
    assert "gone" in fault.traceback


def test_a_reward_sees_the_text_exactly(tmp_path):
    text = """
import json
def same(completions, expected):
    return [float(text == json.loads(right)) for text, right in zip(completions, expected)]
"""
    texts = ["a\x00b\n\r\t", "\u2028 \U0001f600", "\ud800 alone", "x" * 300_000]
    with Runner(options(f"{written(tmp_path, text)}:same")) as runner:
        scores = runner.score(
            ["p"] * 4, texts, {"expected": [json.dumps(text) for text in texts]}, groups=[0] * 4
        )
    np.testing.assert_array_equal(scores.total, [1.0] * 4)


def test_bad_options_are_refused():
    for wrong, words in [
        ({"functions": ()}, "no reward"),
        ({"workers": 0}, "workers=0"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"on_error": "ignore"}, "on_error"),
    ]:
        with pytest.raises(RewardError, match=words):
            RunnerOptions(**{"functions": (("exact_answer", 1.0, {}),), **wrong})
    with pytest.raises(RewardError, match="weight nan"):
        Runner(options(("exact_answer", math.nan, {})))
    with pytest.raises(RewardError, match="no option 'patern' .nearest: pattern;"):
        Runner(options(("exact_answer", 1.0, {"patern": "x"})))


def test_no_completions_give_no_scores():
    with Runner(options("exact_answer")) as runner:
        scores = runner.score([], [], {"answer": []})
    assert scores.rewards.shape == (0, 1)
    assert scores.total.shape == (0,)


def test_what_a_function_prints_or_returns_with_a_score_is_kept(tmp_path):
    file = tmp_path / "explains.py"
    file.write_text(
        "def explains(prompts, completions):\n"
        "    print('a call of', len(completions))\n"
        "    return [(1.5, 'short'), 2, (None, 'not mine'), (0.5, 'x' * 5000)]\n"
    )
    with Runner(RunnerOptions(((f"{file}:explains", 1.0, {}),), workers=1)) as runner:
        scores = runner.score(["p"] * 4, ["a", "b", "c", "d"], {}, [0] * 4)
    assert (
        scores.rewards[:, 0].tolist()[:2] == [1.5, 2.0]
        and np.isnan(scores.rewards[2, 0])
        and not scores.faults
    )
    logs = {sample: log["explains"] for sample, log in scores.logs.items()}
    assert logs == {0: "a call of 4\nshort", 2: "not mine", 3: "x" * 2048}
