"""The filter language, the index of samples and `rl samples`: on files that grow, rotate and are
truncated."""

import contextlib
import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rl.commands import cli
from rl.errors import ConfigError
from rl.records.samples import CLIPPED_LOW, STOP, TOKEN, TRAINED, SampleLog
from rl.views.viewer import index as index_module
from rl.views.viewer import query, records, search
from rl.views.viewer.index import INDEX, Index

EVIL = '</script><img src=x onerror="document.title=1">\x1b[2J'
PROMPT, COMPLETION = "What is 2 + 2?", "It is 4."


def sample(step: int, number: int = 0, **more) -> dict:
    """A line as a run writes it: prompt `step`, completion `number` of it."""
    reward = (step + number) % 2
    record = {"stage": "grpo", "step": step, "prompt_id": step, "sample": number, "version": step}
    record |= {"prompt": PROMPT, "completion": COMPLETION, "tokens": [7, 8, 2], "finish": "stop"}
    record |= {
        "rewards": {"format": 1.0, "correct": float(reward)},
        "reward": reward + 1.0,
        "advantage": reward - 0.5,
    }
    return record | {"columns": {"answer": "4"}} | more | {"n_prompt": 2, "n": 3}


def tokens(gap: float = 0.001) -> np.ndarray:
    own = np.zeros(5, TOKEN)
    own["id"], own["turn"] = [5, 6, 7, 8, 2], [0, 0, 1, 1, 1]
    own["logp"], own["gap"], own["entropy"], own["advantage"] = -0.5, 0, 1.0, 0.5
    own["logp"][:2], own["gap"][:2], own["gap"][3] = np.nan, np.nan, -gap
    own["flags"] = [0, 0, TRAINED, TRAINED | CLIPPED_LOW, TRAINED | STOP]
    return own


def write(log: SampleLog, steps, count: int = 2, **more) -> None:
    for step in steps:
        log.write(
            [sample(step, number, **more) for number in range(count)], [tokens(step / 1000)] * count
        )


@pytest.fixture
def run(tmp_path):
    """A run of 9 steps with two completions each, in three segments; the last step is special."""
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "config.yml").write_text(
        "tokenizer: {source: characters, alphabet: '0123456789+= '}\n"
    )
    log = SampleLog(tmp_path, limit=1)
    for steps in (range(1, 4), range(4, 7)):
        write(log, steps)
        log.rotate()
    write(log, (7, 8))
    odd = sample(
        9,
        0,
        completion=EVIL,
        reward_log={"format": "no fence"},
        reward=None,
        advantage=None,
        faults={"correct": "timeout"},
        finish="length",
    )
    odd["rewards"] = {"format": 0.0, "correct": None}
    greedy = sample(
        9, 0, prompt_id=1 << 30, prompt="held out", eval=True, advantage=None, columns={}
    )
    log.write([odd, greedy], [tokens(), tokens()])
    log.close()
    return tmp_path


def steps(index: Index, text: str, sort=None) -> list[int]:
    return [
        place.record()["step"] for place in search.places(index, search.search(index, text, sort))
    ]


def opened(run: Path) -> Index:
    index = Index(run)
    assert index.refresh()
    return index


FILTERS = {
    "": 18,
    "step:2-4": 6,
    "step:8-": 4,
    "adv=-0.5": 8,
    "adv:-0.6--0.4": 8,
    "step!=9": 16,
    "-step:9": 16,
    "reward<1.5 step<=2": 2,
    "reward.correct=1": 9,
    "reward.correct<=0.5": 8,
    "adv>0": 8,
    "gap>0.0065": 4,
    "gap:0.0065-0.0075": 2,
    "len=3": 18,
    "finish:length": 1,
    "finish!=length": 17,
    "fault": 1,
    "fault:timeout": 1,
    "fault:raised": 0,
    "eval": 1,
    "-eval": 17,
    "unscored": 1,
    "reward!=99": 17,  # a sample without a reward meets no comparison
    "-reward=99": 18,
    "signal step:1": 2,
    "prompt:3": 2,
    "stage:grpo sample:1": 8,
    "fence": 1,
    '"IT IS 4."': 17,
    '"prompt"': 0,  # a key of every line, and no text of any
    "tokens": 0,
    "stop": 0,
    "held": 1,
    '-"It is"': 1,
    '"onerror=\\"document"': 1,
    "/^It is \\d/": 17,
    "/^it IS \\d/": 0,
    "/^it IS \\d/i": 17,
    '/^<.script>.*"document/': 1,
    "reward>1 /^What/ step:1-3": 3,
}


@pytest.mark.parametrize(("text", "count"), FILTERS.items(), ids=FILTERS)
def test_filters(run, text, count):
    assert len(search.search(opened(run), text)) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd<1", "no such field.*reward"),
        ("step:abc", "'abc' is no number and no range; write step:100-200"),
        ("step:9-2", "the range is empty; write step:2-9"),
        ("step<1-2", "is no number; write step<0.5"),
        ("finish<stop", "a name has no order; write finish:stop"),
        ("reward", "compare it with something, for example reward<0.5"),
        ('step:1 "open', "character 8: a text ends with a quotation mark"),
        ("/(/", "no regular expression"),
        ("reward.corect=1", "no such reward function.*nearest: correct"),
        ("stage:sfd", "no such stage"),
    ],
)
def test_a_bad_filter_says_what_to_type(run, text, message, capsys):
    assert cli.main(["samples", str(run), text]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_newest_come_first_and_unknown_values_last(run):
    index = opened(run)
    assert steps(index, "sample:0") == [9, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert steps(index, "step:7-", "reward")[-1] == 9 and steps(index, "", "gap")[:2] == [8, 8]


def test_an_index_is_kept_and_grows(run, monkeypatch):
    opened(run).save()
    parsed = []
    monkeypatch.setattr(Index, "_append", lambda *_: parsed.append(1))
    assert opened(run).total == 18 and not parsed
    monkeypatch.undo()
    index = opened(run)
    names = [
        search.place(index, each.id)
        for each in search.places(index, search.search(index, "-step:10-"))
    ]
    log = SampleLog(run, limit=1)
    log.rotate()  # what the index knows as samples.jsonl has another name now
    write(log, (10, 11))
    assert index.refresh() and index.total == 22 and steps(index, "step:10-") == [11, 11, 10, 10]
    assert len(steps(index, "/It is/")) == 21 and steps(index, "fault") == [9]
    assert [each.record() for each in names] == [
        each.record() for each in search.places(index, search.search(index, "-step:10-"))
    ]


def test_an_index_without_time_takes_one_file_at_a_time_the_newest_first(run):
    index = Index(run)
    seen = []
    while not index.refresh(0.0):
        seen.append(steps(index, "")[-1])
    assert seen == [7, 4] and index.total == 18 and index.pending == 0


def test_weights_that_changed_within_a_sample_count_as_the_last_ones(run):
    log = SampleLog(run)
    log.write([sample(10, version=[[0, 8], [4, 9]])], [tokens()])
    log.close()
    index = opened(run)
    assert index.damaged == 0 and steps(index, "version:9 step:10") == [10]


def test_a_torn_line_waits_until_it_is_complete(run):
    index = opened(run)
    with (run / "samples.jsonl").open("a") as file:
        line = json.dumps(sample(10)) + "\n"
        file.write(line[:50])
        file.flush()
        assert index.refresh() and index.total == 18
        file.write(line[50:] + "{torn\n")
    assert (
        index.refresh()
        and index.total == 19
        and index.damaged == 1
        and steps(index, "step:10") == [10]
    )


def test_a_run_that_continues_replaces_what_it_truncated(run):
    """Also if the file is as long as before when it is read again."""
    index = opened(run)
    assert len(steps(index, '"It is"')) == 17
    index.save()
    log = SampleLog(run)
    log.truncate_after(lambda row: row["step"] <= 7)
    write(log, (8, 9), completion="Another")
    log.close()
    for each in (index, Index(run)):
        assert (
            each.refresh() and steps(each, "Another") == [9, 9, 8, 8] and steps(each, "fault") == []
        )
    log = SampleLog(run)
    log.truncate_after(lambda row: row["step"] <= 3)  # removes a segment
    assert index.refresh() and steps(index, "") == [3, 3, 2, 2, 1, 1]


def test_lines_that_change_length_for_length_are_read_again(run):
    index = opened(run)
    file = run / "samples.jsonl"
    file.write_bytes(file.read_bytes().replace(b"It is 4.", b"It is 5."))
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert index.refresh() and len(steps(index, '"is 5"')) == 5 and index.total == 18


def test_removed_segments_and_damaged_indexes(run):
    index = opened(run)
    index.save()
    for file in (run / "samples").glob("000000-*"):
        file.unlink()
    assert index.refresh() and index.total == 12
    (run / "samples" / INDEX).write_bytes(b"PK damaged")
    assert opened(run).total == 12


@pytest.mark.parametrize(
    ("own", "damaged"),
    [
        ({"at": 1 << 62}, True),
        ({"n_prompt": 1 << 62}, True),
        ({"n": (1 << 63) - 1}, True),
        ({"n_prompt": -9}, True),
        ({"at": 1 << 50}, False),
        ({"n_prompt": 1 << 50}, False),
    ],
)
def test_a_line_with_a_huge_place_of_tokens_is_no_obstacle(run, own, damaged):
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(10) | {"at": 0} | own) + "\n")
        file.write(json.dumps(sample(11) | {"at": 0}) + "\n")
    index = opened(run)
    assert index.damaged == damaged and len(steps(index, "step:10-")) == 2 - damaged
    for place in search.places(index, search.search(index, "step:10-")):
        records.full(index, place)


@pytest.mark.parametrize("also_reopened", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_moves_while_files_are_listed_keeps_its_samples(
    run, also_reopened, kept, monkeypatch
):
    """kept: the index is read from its copy. also_reopened: the run has begun a new file."""
    index = opened(run)
    if kept:
        index.save()
        index = Index(run)
    listed = index_module.sample_files

    def moved(directory):
        files = listed(directory)
        monkeypatch.setattr(index_module, "sample_files", listed)
        if also_reopened:
            SampleLog(run, limit=1).rotate()
        else:
            for name in ("tokens.bin", "samples.jsonl"):
                moved = run / "samples" / f"000002-grpo-00007{Path(name).suffix}"
                (run / name).replace(moved)
        return files

    monkeypatch.setattr(index_module, "sample_files", moved)
    monkeypatch.setattr(Index, "_append", lambda *_: pytest.fail("reads a file again"))
    assert index.refresh() and index.total == 18
    assert {each.path.parent for each in index.segments} == {run / "samples"}
    assert len(steps(index, "")) == 18


def test_an_old_list_of_files_keeps_the_samples_of_one_that_moved(run, monkeypatch):
    """As a mounted folder shows it for some seconds."""
    index = opened(run)
    with monkeypatch.context() as patch:
        old = index_module.sample_files(run)
        patch.setattr(index_module, "sample_files", lambda _: old)
        (run / "samples.jsonl").replace(run / "samples" / "000002-grpo-00007.jsonl")
        assert index.refresh() and index.total == 18
    assert index.refresh() and len(steps(index, "")) == 18


def test_tokens_of_a_new_file_are_not_those_of_lines_that_moved(run, monkeypatch):
    """The run starts new files between the reads of lines and of tokens."""
    index = Index(run)
    gaps = index_module._logp_diffs

    def rotated(path, spans):
        monkeypatch.setattr(index_module, "_logp_diffs", gaps)
        log = SampleLog(run, limit=1)
        log.rotate()
        write(log, (20, 21, 22))
        log.close()
        return gaps(path, spans)

    monkeypatch.setattr(index_module, "_logp_diffs", rotated)
    assert not index.refresh()
    assert index.refresh() and index.total == 24
    places = search.places(index, search.search(index, "step:7-8"))
    assert [round(each.numbers.logp_diff, 4) for each in places] == [0.008, 0.008, 0.007, 0.007]


def test_a_record_is_that_of_its_sample(run):
    """A run that continues may write another line, as long as the old one, in its place."""
    index = opened(run)
    [place] = search.places(index, search.search(index, "step:8 sample:1"))
    file = run / "samples.jsonl"
    lines = file.read_bytes()
    assert place.record()["step"] == 8
    for old, new in (
        (b'"prompt_id":8', b'"prompt_id":7'),
        (b'"step":8', b'"step":6'),
        (b'"sample":1', b'"sample":0'),
    ):
        assert old in lines
        file.write_bytes(lines.replace(old, new))
        with pytest.raises(ValueError, match="another sample has the place of"):
            place.record()


def test_writers_of_an_index_have_files_of_their_own(run, monkeypatch):
    """Two machines on a mounted folder may give their processes the same number."""
    index = opened(run)
    names = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: names.append(self) or replace(self, to))
    index.save()
    index.save()
    assert len(set(names)) == 2
    assert not list((run / "samples").glob(".*"))
    assert (run / "samples" / INDEX).stat().st_mode == (run / "config.yml").stat().st_mode


def _truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _of_other_tables(_: bytes) -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        version = f"PRAGMA user_version = {index_module._VERSION}"
        database.executescript(f"CREATE TABLE other (a); {version}")
        return database.serialize()


def _with_a_damaged_page(content: bytes) -> bytes:
    """Damages the samples, which are not read when the index is opened."""
    return content[: 3 * 4096] + bytes(4096) + content[4 * 4096 :]


@pytest.mark.parametrize(
    "damage", [lambda _: b"no database", _truncated, _of_other_tables, _with_a_damaged_page]
)
def test_a_damaged_index_is_reported_and_built_again(run, damage, capsys):
    opened(run).save()
    file = run / "samples" / INDEX
    file.write_bytes(damage(file.read_bytes()))
    index = opened(run)
    assert "index.sqlite: cannot be read: " in (told := capsys.readouterr().err)
    assert "the index is built again" in told
    assert index.total == 18 and steps(index, "fault") == [9]
    index.save()
    assert opened(run).total == 18 and capsys.readouterr().err == ""


def test_indexes_of_other_versions_are_replaced_without_a_word(run, capsys):
    (run / "samples" / "index.npz").write_bytes(b"PK of an older version")
    with contextlib.closing(sqlite3.connect(run / "samples" / INDEX)) as database:
        database.executescript("CREATE TABLE sample (step); PRAGMA user_version = 99")
    index = opened(run)
    index.save()
    assert index.total == 18 and opened(run).total == 18
    assert capsys.readouterr() == ("", "")


def test_another_process_that_locks_the_index_is_no_obstacle(run, monkeypatch):
    opened(run).save()
    with contextlib.closing(sqlite3.connect(run / "samples" / INDEX)) as other:
        other.execute("BEGIN EXCLUSIVE")
        parsed = []
        with monkeypatch.context() as patch:
            patch.setattr(Index, "_append", lambda *_: parsed.append(1))
            index = opened(run)
        assert index.total == 18 and not parsed
        index.save()
    assert opened(run).total == 18
    assert not list((run / "samples").glob(".*"))


def test_without_a_place_to_write_the_index_stays_in_memory(run, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError("read-only file system")

    for name in ("write_bytes", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            index = opened(run)
            index.save()
            assert len(steps(index, "/It is/")) == 17
        assert {file.suffix for file in (run / "samples").iterdir()} == {".jsonl", ".bin"}
    assert capsys.readouterr().err == ""


def test_two_viewers_follow_a_run_that_grows(run):
    first, second = opened(run), opened(run)
    log = SampleLog(run, limit=1)
    for step in range(10, 14):
        write(log, (step,))
        if step == 11:
            log.rotate()
        assert first.refresh() and steps(first, f"step:{step}") == [step, step]
        assert steps(first, f'"It is" step:{step}') == [step, step]
        first.save()
        if step % 2:
            assert second.refresh() and steps(second, f"step:{step - 1}-") == [
                *(step, step),
                *(step - 1, step - 1),
            ]
            second.save()
    log.close()
    everything = sorted([*range(1, 14), *range(1, 14)], reverse=True)
    for index in (first, second, opened(run)):
        assert steps(index, "") == everything


def test_numbers_that_are_no_plain_numbers(run):
    log = SampleLog(run)
    third = float(np.float32(1 / 3))
    log.write([sample(10, finish="\ud800", rewards={"format": third})], [tokens()])
    log.close()
    surrogates = {chr(0xD800): 1, chr(0xD801): 2}
    lines = [
        {"step": 11, "reward": math.nan, "advantage": math.inf},
        {"step": 12, "reward": math.inf, "advantage": 1e300, "rewards": surrogates},
        {"step": 13, "reward": "high", "rewards": {"format": True, "'": 2}},
        {"step": 1 << 70},
    ]
    with (run / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(sample(1) | own) + "\n" for own in lines)
    index = opened(run)
    assert index.total == 22 and index.damaged == 1
    assert steps(index, "step:10-", "reward") == [10, 13, 12, 11]
    assert steps(index, "step:10- unscored") == [13, 11]
    assert steps(index, "step:10- -reward>0") == [13, 11]
    assert steps(index, "reward>1e308") == [12] and steps(index, "step:11- signal") == [13]
    assert steps(index, "reward.format=0.33333334") == [10]  # as float32 has them
    assert steps(index, "finish:\ud801") == [10] and steps(index, "finish:'OR'1'='1") == []
    shown = records.short(index, search.places(index, search.search(index, "step:13"))[0])
    assert shown["reward"] is None and shown["rewards"] == {"format": 1.0, "'": 2.0}


def test_old_runs_without_tokens(tmp_path):
    (tmp_path / "samples.jsonl").write_text(
        json.dumps(
            {
                "stage": "grpo",
                "step": 1,
                "prompt": [{"role": "user", "content": "hi"}],
                "completion": "a",
                "tokens": [1, 2],
            }
        )
        + "\n"
    )
    index = opened(tmp_path)
    [place] = search.places(index, search.search(index, "/^hi$/ len=2"))
    from rl.views.viewer.tokens import TokenTexts

    shown = records.with_texts(records.full(index, place), TokenTexts(tmp_path))
    assert shown["tokens"] == {"id": [1, 2], "text": None} and shown["reward"] is None


def test_a_group_and_the_same_row_at_other_steps(run):
    index = opened(run)
    place = search.places(index, search.search(index, "step:4 sample:1"))[0]
    assert [
        (each.record()["step"], each.record()["sample"]) for each in records.group(index, place)
    ] == [
        (4, 0),
        (4, 1),
    ]
    assert [each.record()["step"] for each in records.others(index, place)] == [
        9,
        8,
        8,
        7,
        7,
        6,
        6,
        5,
        5,
        3,
        3,
        2,
        2,
        1,
        1,
    ]


def test_the_list_on_a_terminal(run, capsys):
    assert cli.main(["samples", str(run), "step:8-", "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert "4 of 18 samples, 3 shown" in out and "timeout" in out and "\x1b" not in out
    assert cli.main(["samples", str(run), "fault"]) == 0  # a single match is shown in full
    out = capsys.readouterr().out
    assert (
        "onerror" in out
        and "no fence" in out
        and "\u241b[2J" in out
        and "faults: correct: timeout" in out
    )
    assert cli.main(["samples", str(run), "step:7 sample:0", "--tokens"]) == 0
    assert "clipped low" in (out := capsys.readouterr().out) and "-0.007" in out


def _on_terminal(columns, kind, *arguments):
    """Returns the lines that a command writes to a terminal of `columns` columns."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    code = f"import sys; from rl.commands import cli; sys.exit(cli.main({list(arguments)!r}))"
    environment = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")
    }
    done = subprocess.Popen(
        [sys.executable, "-c", code], stdout=end, env=environment | {"TERM": kind}
    )
    os.close(end)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(main, 65536):
            written += part
    os.close(main)
    assert done.wait() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_the_list_is_as_wide_as_its_terminal(run, kind):
    lines = _on_terminal(131, kind, "samples", str(run), "--limit", "3")
    assert max(len(line) for line in lines) == 131


def test_the_list_is_not_cut_where_no_terminal_is(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = run / "samples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[-1]["completion"] = "word " * 500 + "end"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["samples", str(run), "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert "word end\n" in out and " \n" not in out and "..." not in out


def test_json_lines_of_samples(run, capsys):
    assert (
        cli.main(["samples", str(run), "--json", "--tokens", "--limit", "2", "--sort", "gap"]) == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [8, 8] and abs(lines[0]["gap"] - 0.008) < 1e-4
    assert lines[0]["tokens"]["id"] == [5, 6, 7, 8, 2] and lines[0]["tokens"]["logp"][:3] == [
        None,
        None,
        -0.5,
    ]


def test_changed_rewards_are_run_over_samples(run, capsys):
    (run / "mine.py").write_text(
        "def short(completions, answer, completion_lengths, truncated):\n"
        "    assert len(set(completions)) == 1, 'a group in one call'\n"
        "    return [(1.0 + (a == '4') - t, f'{n} tokens') for a, n, t in zip(answer, "
        "completion_lengths, truncated)]\n"
    )
    arguments = ["samples", str(run), "--rescore", f"{run}/mine.py:short", "--json", "-eval"]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["changed"], result["up"], result["down"]) == (17, 9, 8, 0)
    assert result["functions"]["correct"]["before"] == 0.5 and result["functions"]["short"][
        "after"
    ] == pytest.approx(33 / 17)
    assert result["groups_with_signal"] == {"before": 8, "after": 0} and result["unscored"] == {
        "before": 1,
        "after": 0,
    }
    assert result["changes"][0]["before"] is None and result["changes"][0]["reward_log"] == {
        "short": "3 tokens"
    }
    assert (
        cli.main([*arguments[:4], "-eval"]) == 0
        and "9 changed (8 up, 0 down)" in capsys.readouterr().out
    )
    assert cli.main(["samples", str(run), "--rescore", "numeric_anser"]) == 2
    assert "numeric_answer" in capsys.readouterr().err


def test_rescore_hands_completions_over_in_the_form_of_their_prompts(tmp_path, capsys):
    """As in training: a message of the assistant after messages."""
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "config.yml").write_text(
        "tokenizer: {source: characters, alphabet: '0123456789+= '}\n"
    )
    log = SampleLog(tmp_path, limit=1)
    write(log, (1,), prompt=[{"role": "user", "content": PROMPT}])
    log.close()
    code = (
        "def said(prompts, completions):\n    return [float(c[-1]['content'] == 'It is 4.') "
        "for c in completions]\n"
    )
    (tmp_path / "mine.py").write_text(code)
    assert (
        cli.main(["samples", str(tmp_path), "--rescore", f"{tmp_path}/mine.py:said", "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)["functions"]["said"]
    assert said["after"] == 1.0 and said["faults"] == 0


def test_no_run_and_no_samples(tmp_path, run, capsys):
    assert cli.main(["samples", str(tmp_path / "none")]) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "events.jsonl").write_text("")
    assert cli.main(["samples", str(empty)]) == 2 and "no samples" in capsys.readouterr().err
    assert cli.main(["samples", str(run), "--limit", "0"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["samples", str(run), "--limits", "3"])


def test_samples_start_without_heavy_packages(run):
    code = f"""
import sys
from rl.commands import cli
cli.main(["samples", {str(run)!r}, "--json", "--limit", "1"])
print([name for name in ("jax", "transformers", "datasets", "wandb", "pydantic", "starlette") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_filters_are_config_errors():
    with pytest.raises(ConfigError):
        query.parse("step:")
    assert query.parse('"http://x" a-b') == (query.Text("http://x"), query.Text("a-b"))
