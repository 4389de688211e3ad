"""Which tests share a process, and that each runs always or in exactly one of the parts."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import grouping
import pytest
from oracles import KINDS, REPRESENTATIVE, by_kind

ROOT = Path(__file__).resolve().parents[2]


def item(path: str, *marks, fixtures=(), **parameters):
    """A test of a file below tests/, as pytest collects it."""
    kept = {mark.name: mark for mark in marks}
    result = SimpleNamespace(path=Path(path), fixturenames=fixtures, get_closest_marker=kept.get)
    result.nodeid = f"tests/{path}::test[{'-'.join(map(str, parameters.values()))}]"
    if parameters:
        result.callspec = SimpleNamespace(params=parameters)
    return result


def test_tests_of_one_model_one_run_or_one_file_share_a_process():
    one = item("parity/test_logits.py", kind="Llama"), item("parity/test_save.py", name="Llama")
    other = (
        item("parity/test_logits.py", kind="Gemma"),
        item("contracts/test_families.py", kind="Llama"),
    )
    assert grouping.group(one[0]) == grouping.group(one[1])
    assert len({grouping.group(each) for each in (*one, *other)}) == 3
    runs = [
        item(f"end_to_end/test_{name}.py", fixtures=["uninterrupted"]) for name in ("runs", "kill")
    ]
    assert len({grouping.group(each) for each in runs}) == 1
    units = (
        item("unit/test_a.py", number=1),
        item("unit/test_a.py", number=2),
        item("unit/test_a.py", kind="Llama"),
    )
    assert grouping.group(units[0]) == grouping.group(units[1]) != grouping.group(units[2])
    alone = item("end_to_end/test_a.py", number=1), item("end_to_end/test_a.py", number=2)
    assert grouping.group(alone[0]) != grouping.group(alone[1])
    assert (
        grouping.group(item("contracts/test_a.py", pytest.mark.xdist_group("mine").mark)) == "mine"
    )


def test_workers_begin_with_runs_and_meshes_and_go_on_with_the_largest_groups():
    small, run, mesh = (
        item("unit/test_a.py"),
        item("end_to_end/test_a.py"),
        item("contracts/test_meshes.py"),
    )
    large = [item("unit/test_b.py", number=n) for n in range(3)]
    assert grouping.in_order([small, *large, mesh, run]) == [mesh, run, *large, small]


@pytest.mark.parametrize("mark", [pytest.mark.slow, pytest.mark.every_family])
def test_what_is_left_out_is_in_one_of_the_parts_and_the_rest_in_none(mark):
    result = Counter(
        grouping.part(item("unit/test_a.py", mark.mark, number=n), 3) for n in range(300)
    )
    assert set(result) == {0, 1, 2} and min(result.values()) > 60
    assert grouping.part(item("unit/test_a.py", number=1), 3) is None
    kinds = {
        grouping.part(item(f"parity/test_{file}.py", mark.mark, kind="Gemma"), 3)
        for file in ("logits", "save", "rows")
    }
    assert len(kinds) == 1, "tests that share a model are in one part"


def test_representative_kinds_run_always():
    marked = {each.values[0] for each in by_kind() if each.marks}
    assert marked | set(REPRESENTATIVE) == set(KINDS) and not marked & set(REPRESENTATIVE)


def collected(*arguments: str) -> list[str]:
    """Lines that pytest prints of the tests of one file."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        *arguments,
        "tests/unit/test_sliding_window_cache.py",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_list_of_what_runs_where_is_that_of_what_is_collected():
    listed = [line.split("  ", 1) for line in collected("--where") if "::" in line]
    for place, *how in (["always"], ["part 2/3", "--part", "2/3"]):
        expected = sorted(test for where, test in listed if where == place)
        assert (
            sorted(line for line in collected("--collect-only", *how) if "::" in line) == expected
        )
        assert expected
