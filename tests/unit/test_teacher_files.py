"""Files of a teacher's likeliest tokens: what is written is read, and rows of other tokens are
refused."""

import json

import numpy as np
import pytest

from rl.data.teacher_files import LEAST_REST, TeacherFacts, TeacherFiles, TeacherWriter
from rl.errors import ConfigError, DataError

K, ROWS = 3, [([5, 6, 7, 2], [0, 0, 1, 1]), ([8, 9], [0, 1]), ([4, 4, 4, 4, 2], [0, 1, 0, 1, 1])]


def facts(**changes) -> TeacherFacts:
    values = {
        "source": "m",
        "model_sha256": "a",
        "vocabulary_sha256": "b",
        "stops": [2],
        "k": K,
        "vocab": 12,
    }
    return TeacherFacts(
        **values | {"dtype": "float32", "rows": len(ROWS), "rows_per_part": 2} | changes
    )


def numbers(seed=0):
    """(log-probabilities, ids, logarithms of the rest) of the rows: of full distributions over 12
    tokens."""
    rng = np.random.default_rng(seed)
    result = []
    for _, mask in ROWS:
        z = rng.normal(size=(sum(mask), 12))
        logp = z - np.log(np.exp(z).sum(1, keepdims=True))
        ids = np.argsort(-logp, axis=1)
        logp = np.take_along_axis(logp, ids, 1).astype(np.float32)
        result.append((logp[:, :K], ids[:, :K], np.log(np.exp(logp[:, K:]).sum(1))))
    return [list(each) for each in zip(*result, strict=True)]


def written(directory, **changes):
    writer = TeacherWriter(directory, facts(**changes))
    for number, rows in writer.missing(ROWS):
        start = number * writer.facts.rows_per_part
        writer.write(number, rows, *(each[start : start + len(rows)] for each in numbers()))
    writer.finish()
    return TeacherFiles(directory)


def test_a_round_trip_gives_every_number_back(tmp_path):
    files = written(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "part-00000.safetensors",
        "part-00001.safetensors",
        "teacher.json",
    ]
    for number, (logp, ids, rest) in enumerate(zip(*numbers(), strict=True)):
        read = files.take(number, K)
        np.testing.assert_array_equal(read.ids, ids)
        np.testing.assert_array_equal(read.logp, logp)
        np.testing.assert_allclose(read.rest, rest, rtol=1e-6)
        fewer = files.take(number, 1)  # the others join the rest
        np.testing.assert_allclose(np.exp(fewer.logp[:, 0]) + np.exp(fewer.rest), 1.0, rtol=1e-6)
    mask = np.zeros((2, 6), np.float32)
    mask[0, :5], mask[1, :2] = ROWS[2][1], ROWS[1][1]
    arrays = files.arrays([2, 1], mask, None)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: shape.shape for name, shape in files.shapes((2, 6), None).items()
    }
    np.testing.assert_array_equal(
        arrays["teacher_ids"][mask != 0], np.concatenate([numbers()[1][n] for n in (2, 1)])
    )
    assert not arrays["teacher_top"][mask == 0].any()


def test_half_precision_is_within_its_rounding_and_all_tokens_leave_no_rest(tmp_path):
    files = written(tmp_path, dtype="float16")
    for number, logp in enumerate(numbers()[0]):
        np.testing.assert_allclose(files.take(number, K).logp, logp, atol=5e-4 * np.abs(logp).max())
    writer = TeacherWriter(tmp_path / "all", facts(rows=1))
    writer.write(
        0, ROWS[1:2], [np.log([[0.5, 0.25, 0.25]])], [np.array([[3, 1, 2]])], [np.array([-np.inf])]
    )
    writer.finish()
    np.testing.assert_allclose(TeacherFiles(tmp_path / "all").take(0, 3).rest, [LEAST_REST])


def test_rows_with_other_tokens_or_masks_are_refused(tmp_path):
    files = written(tmp_path)
    files.check_rows(dict(enumerate(ROWS)), 3)
    files.check_rows({2: ROWS[2]}, 3)  # of one of several processes
    for row in (([8, 10], [0, 1]), ([8, 9], [1, 1]), ROWS[0]):
        with pytest.raises(DataError, match="row 1 of the data has other tokens"):
            files.check_rows({1: row}, 3)
    with pytest.raises(DataError, match="the data has 4 rows, .* holds 3"):
        files.check_rows({}, 4)


def test_a_stopped_writer_goes_on_and_another_one_is_refused(tmp_path):
    complete = written(tmp_path / "complete")
    first = TeacherWriter(tmp_path / "out", facts())
    first.write(0, ROWS[:2], *(each[:2] for each in numbers()))
    with pytest.raises(ConfigError, match="did not end: run the same command again"):
        TeacherFiles(tmp_path / "out")
    with pytest.raises(ConfigError, match="begun with another teacher, data or options"):
        TeacherWriter(tmp_path / "out", facts(model_sha256="other"))
    (tmp_path / "out" / "part-00001.tmp").write_bytes(b"half of a part")
    second = TeacherWriter(tmp_path / "out", facts())
    assert [number for number, _ in second.missing(ROWS)] == [1]
    second.write(1, ROWS[2:], *(each[2:] for each in numbers()))
    second.finish()
    for part in ("part-00000.safetensors", "part-00001.safetensors", "teacher.json"):
        assert (tmp_path / "out" / part).read_bytes() == (complete.directory / part).read_bytes()
    with pytest.raises(ConfigError, match="holds the finished files of a teacher"):
        TeacherWriter(tmp_path / "out", facts())
    begun = TeacherWriter(tmp_path / "again", facts())
    begun.write(0, ROWS[1:], *(each[1:] for each in numbers()))
    with pytest.raises(ConfigError, match=r"part-00000.safetensors holds other rows"):
        list(begun.missing(ROWS))


def test_damaged_files_are_named(tmp_path):
    files = written(tmp_path)
    part = tmp_path / "part-00000.safetensors"
    content = bytearray(part.read_bytes())
    place = content.index(np.ascontiguousarray(numbers()[0][1][0]).tobytes())
    content[place] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match="part-00000.safetensors: row 1 is damaged"):
        TeacherFiles(tmp_path).take(1, K)
    TeacherFiles(tmp_path).take(0, K)
    part.write_bytes(content[:40])
    with pytest.raises(DataError, match="part-00000.safetensors: .*run `rl teach` again"):
        TeacherFiles(tmp_path).take(0, K)
    stored = json.loads((tmp_path / "teacher.json").read_text())
    (tmp_path / "teacher.json").write_text(json.dumps(stored | {"format": 99}))
    with pytest.raises(ConfigError, match="format 99, this version reads 1"):
        TeacherFiles(tmp_path)
    (tmp_path / "teacher.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged, or of another version"):
        TeacherFiles(tmp_path)
    assert files.facts.k == K
