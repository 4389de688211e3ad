"""The record of completions: segments, tokens, and what is left after a cut."""

import errno
import json
import os

import numpy as np
import pytest

from rl.config.run import SampleRecords
from rl.records import samples
from rl.records.run_files import SAMPLES, TOKENS, sample_files
from rl.records.samples import TOKEN, SampleLog

LINE_BYTES = 75


def row(step, sample=0):
    return {
        "stage": "grpo",
        "step": step,
        "prompt_id": step,
        "sample": sample,
        "n_prompt": 2,
        "n": 1 + step % 3,
    }


def tokens_of(record):
    result = np.zeros(record["n_prompt"] + record["n"], TOKEN)
    result["id"], result["logp"], result["flags"] = (
        record["step"],
        -record["sample"],
        samples.TRAINED,
    )
    return result


def write(log, steps):
    for step in steps:
        log.write([row(step, n) for n in range(2)], [tokens_of(row(step, n)) for n in range(2)])
        log.rotate()


def check(directory, steps):
    """Every sample of these steps is there once, in order, with its tokens."""
    assert [(r["step"], r["sample"]) for r in samples.read(directory)] == [
        (s, n) for s in steps for n in range(2)
    ]
    for path in sample_files(directory):
        for record in map(json.loads, path.open()):
            np.testing.assert_array_equal(samples.read_tokens(path, record), tokens_of(record))


def test_lines_wait_for_their_tokens(tmp_path, monkeypatch):
    """On a disk with room for the lines but not for the tokens."""
    log = SampleLog(tmp_path)
    write(log, (1,))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._tokens, "_flush", full)
    write(log, (2, 3))
    assert log.waiting
    check(tmp_path, (1,))
    monkeypatch.undo()
    write(log, (4,))
    log.sync()
    check(tmp_path, (1, 2, 3, 4))
    assert not log.waiting


def keep_until(step):
    return lambda record: record["step"] <= step


def test_a_token_has_16_bytes():
    assert TOKEN.itemsize == 16


def test_full_files_move_on_and_each_keeps_its_tokens(tmp_path):
    log = SampleLog(tmp_path, limit=3 * 2 * LINE_BYTES)
    write(log, range(1, 11))
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names[:2] == ["000000-grpo-00001.bin", "000000-grpo-00001.jsonl"] and len(names) >= 6
    check(tmp_path, range(1, 11))
    log.close()
    write(SampleLog(tmp_path, limit=3 * 2 * LINE_BYTES), range(11, 20))
    check(tmp_path, range(1, 20))


@pytest.mark.parametrize("last", [19, 18, 12, 3, 0])
def test_a_cut_takes_lines_and_tokens_of_all_files_after_it(tmp_path, last):
    log = SampleLog(tmp_path, limit=3 * 2 * LINE_BYTES)
    write(log, range(1, 20))
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(b'{"stage": "gr')
    log.truncate_after(keep_until(last))
    check(tmp_path, range(1, last + 1))
    write(log, range(last + 1, 22))
    check(tmp_path, range(1, 22))


def test_a_cut_reads_only_the_newest_file(tmp_path):
    log = SampleLog(tmp_path, limit=3 * 2 * LINE_BYTES)
    write(log, range(1, 12))
    (oldest, *_, newest) = sample_files(tmp_path)
    oldest.write_bytes(b"damaged\n" * 4)
    assert newest.name == SAMPLES and newest.stat().st_size
    log.truncate_after(keep_until(11))
    with pytest.raises(ValueError, match=f"{oldest.name}:1: damaged line"):
        list(samples.read(tmp_path))


def test_a_damaged_line_on_the_way_is_an_error_with_its_place(tmp_path):
    log = SampleLog(tmp_path)
    write(log, range(1, 4))
    lines = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(b"".join([*lines[:3], b"{]\n", *lines[4:]]))
    with pytest.raises(ValueError, match=r"samples.jsonl:4: damaged line"):
        log.truncate_after(keep_until(1))


def test_a_rotation_that_was_cut_off_is_completed(tmp_path, monkeypatch):
    log, replace, moved = SampleLog(tmp_path, limit=LINE_BYTES), os.replace, []

    def killed_at_the_second(*paths):
        if moved:
            raise KeyboardInterrupt
        moved.append(replace(*paths))

    monkeypatch.setattr(os, "replace", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        write(log, [1])
    monkeypatch.undo()
    write(SampleLog(tmp_path, limit=LINE_BYTES), [2])
    check(tmp_path, [1, 2])


def test_a_deleted_segment_moves_no_lines(tmp_path):
    write(SampleLog(tmp_path, limit=LINE_BYTES), [1])
    log = SampleLog(tmp_path, limit=10 * LINE_BYTES)
    write(log, [2])
    log.close()
    [segment] = (tmp_path / "samples").glob("*.jsonl")
    segment.unlink()
    SampleLog(tmp_path).close()
    assert [each["step"] for each in samples.read(tmp_path)] == [2, 2] and not segment.exists()


@pytest.mark.parametrize(
    "act", [lambda log: log.truncate_after(keep_until(3)), lambda log: log._remove_oldest()]
)
def test_a_removal_that_was_cut_off_misplaces_nothing(tmp_path, monkeypatch, act):
    log = SampleLog(tmp_path, limit=2 * 2 * LINE_BYTES)
    write(log, range(1, 8))
    (tmp_path / SAMPLES).write_bytes(b"") if not sample_files(tmp_path)[-1].stat().st_size else None
    log._max_bytes, unlink, removed = 1, type(tmp_path).unlink, []

    def killed_at_the_second(path, missing_ok=False):
        if removed:
            raise KeyboardInterrupt
        removed.append(unlink(path, missing_ok))

    monkeypatch.setattr(type(tmp_path), "unlink", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        act(log)
    monkeypatch.undo()
    before = (tmp_path / SAMPLES).read_bytes()
    again = SampleLog(tmp_path)
    assert (tmp_path / SAMPLES).read_bytes() == before
    again.truncate_after(keep_until(1))
    assert {record["step"] for record in samples.read(tmp_path)} <= {1}


def test_the_oldest_segments_go_beyond_the_limit(tmp_path):
    log = SampleLog(tmp_path, limit=1, max_bytes=8 * LINE_BYTES)
    write(log, range(1, 10))
    left = [record["step"] for record in samples.read(tmp_path)]
    assert left[-1] == 9 and 1 not in left and len(left) < 8
    assert len(list((tmp_path / "samples").glob("*.bin"))) == len(left) // 2


def test_a_run_without_tokens_is_read_and_continued(tmp_path):
    """Older versions wrote samples.jsonl alone, and no place in tokens.bin."""
    old = [
        {"stage": "grpo", "step": step, "prompt_id": step, "sample": 0, "tokens": [1]}
        for step in (1, 2, 3)
    ]
    (tmp_path / SAMPLES).write_text("".join(json.dumps(each) + "\n" for each in old))
    log = SampleLog(tmp_path)
    log.truncate_after(keep_until(2))
    log.write([row(3)], [tokens_of(row(3))])
    result = list(samples.read(tmp_path))
    assert result == [*old[:2], {**row(3), "at": 0}]
    assert not len(samples.read_tokens(tmp_path / SAMPLES, result[0]))
    assert samples.read_tokens(tmp_path / SAMPLES, result[2])["id"].tolist() == [3, 3, 3]
    log.truncate_after(keep_until(2))
    assert list(samples.read(tmp_path)) == old[:2] and not (tmp_path / TOKENS).stat().st_size


def test_options_choose_steps_and_a_share_of_the_prompts():
    assert [step for step in range(7) if SampleRecords(every=3).keeps_step(step)] == [0, 3, 6]
    assert not any(SampleRecords(every=0).keeps_step(step) for step in range(4))
    kept = [SampleRecords(share=0.25).keeps_prompt(number) for number in range(4000)]
    assert 0.22 < np.mean(kept) < 0.28 and kept == [
        SampleRecords(share=0.25).keeps_prompt(n) for n in range(4000)
    ]
    assert all(SampleRecords().keeps_prompt(number) for number in range(100))
