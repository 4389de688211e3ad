"""Contents that are decoded in threads: once each, within a bound of bytes, and errors that name
file and row."""

import threading

import numpy as np
import pytest
from media_rows import PROCESSOR, pixels, png
from media_tokenizers import tokenizer

from rollout.media.families import qwen
from rollout.media.loader import Loader
from rollout.media.processor import MediaError
from rollout.media.processors import Processors
from rollout.media.reference import Reference, refer


@pytest.fixture(scope="module")
def processors():
    return Processors(qwen.read(PROCESSOR, {}, tokenizer("qwen3_vl")), None)


@pytest.fixture
def decoded(monkeypatch):
    """The digests that have been decoded, and the threads that did it."""
    calls, decode = [], Reference.decode

    def counted(self):
        calls.append((self.digest, threading.current_thread().name))
        return decode(self)

    monkeypatch.setattr(Reference, "decode", counted)
    return calls


def test_inputs_are_those_of_the_processor(processors, tmp_path):
    (tmp_path / "a.png").write_bytes(png(3))
    references = [
        refer("image", "a.png", tmp_path),
        refer("image", pixels(200, (24, 16)), tmp_path),
    ]
    with Loader(processors) as loader:
        inputs = loader.inputs(references)
        assert loader.waited > 0
    for reference in references:
        [(item, expected)] = reference.inputs(processors.image).items()
        assert processors.image.items(reference.digest, reference.size) == (item,)
        np.testing.assert_array_equal(inputs[item], expected)


def test_equal_contents_are_decoded_once_and_in_other_threads(processors, tmp_path, decoded):
    references = [
        refer("image", png(shade), tmp_path, f"row {n}") for n, shade in enumerate((1, 2, 1, 2, 3))
    ]
    with Loader(processors, threads=2) as loader:
        loader.prefetch(references)
        assert len(loader.inputs(references)) == 3
        loader.prefetch(references)
        loader.inputs(references[:2])
    assert sorted(digest for digest, _ in decoded) == sorted({each.digest for each in references})
    assert all(name.startswith("media") for _, name in decoded)


def test_the_contents_used_longest_ago_leave_a_full_cache(processors, tmp_path, decoded):
    one, two, three = (refer("image", png(shade), tmp_path) for shade in (1, 2, 3))
    [values] = one.inputs(processors.image).values()
    decoded.clear()
    with Loader(processors, cached_bytes=2 * values.nbytes) as loader:
        for each in (one, two, one, three, one, two):  # three takes the place of two
            assert len(loader.inputs([each])) == 1
        assert len(loader.inputs([one, two, three])) == 3  # more than the cache holds
    assert [digest for digest, _ in decoded[:4]] == [
        one.digest,
        two.digest,
        three.digest,
        two.digest,
    ]


def test_an_error_names_file_and_row_and_is_tried_again(processors, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png(9))
    first, second = (
        refer("image", name, tmp_path, f"d.jsonl:{n}: picture 1")
        for n, name in enumerate(("a.png", "b.png"))
    )
    (tmp_path / "a.png").write_bytes(png(10))
    with Loader(processors) as loader:
        loader.prefetch([first])
        with pytest.raises(
            MediaError, match=r"d.jsonl:0: picture 1: .*a.png has changed since the run read it"
        ):
            loader.inputs([first])
        assert len(loader.inputs([second])) == 1  # equal, from a file that is as it was
        (tmp_path / "a.png").write_bytes(png(9))
        assert len(loader.inputs([first])) == 1


def test_a_content_whose_equal_is_broken_is_read_from_its_own_file(
    processors, tmp_path, monkeypatch
):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png(9))
    first, second = (refer("image", name, tmp_path) for name in ("a.png", "b.png"))
    (tmp_path / "a.png").write_bytes(png(10))
    waiting, decode = threading.Event(), Reference.decode

    def held(self):
        if self is first:
            waiting.wait(10)
        return decode(self)

    monkeypatch.setattr(Reference, "decode", held)
    with Loader(processors) as loader:
        loader.prefetch([first])
        threading.Timer(0.05, waiting.set).start()
        assert len(loader.inputs([second])) == 1
