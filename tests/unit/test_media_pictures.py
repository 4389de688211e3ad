"""Pictures from every kind of source, and refusals of broken ones, against Pillow."""

import base64
import hashlib
import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from rollout.media import picture
from rollout.media.processor import MediaError
from rollout.media.reference import refer

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a picture.png").write_bytes(PNG)
    return tmp_path


def test_sources_of_one_picture_are_equal(folder):
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    sources = [
        "a picture.png",
        folder / "a picture.png",
        f"file://{folder}/a%20picture.png",
        PNG,
        bytearray(PNG),
        uri,
        {"bytes": PNG, "path": "gone.png"},
        {"bytes": None, "path": "a picture.png"},
        {"url": uri},
        {"image": "a picture.png"},
    ]
    references = [refer("image", source, folder) for source in sources]
    assert set(references) == {references[0]}
    assert references[0].digest == hashlib.sha256(PNG).hexdigest() and references[0].size == (
        12,
        20,
    )
    for reference in references:
        np.testing.assert_array_equal(reference.decode(), PIXELS)


def test_arrays_and_pillow_images_are_pictures(tmp_path):
    array, image = (
        refer("image", PIXELS, tmp_path),
        refer("image", Image.fromarray(PIXELS), tmp_path),
    )
    assert array == image and array.size == (12, 20)
    assert array != refer("image", PIXELS[:, ::-1], tmp_path)
    # Equal bytes in another shape are another picture.
    assert array.digest != refer("image", PIXELS.reshape(20, 12, 3), tmp_path).digest
    np.testing.assert_array_equal(
        refer("image", PIXELS[..., 0], tmp_path).decode(), PIXELS[..., [0, 0, 0]]
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation):
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = orientation
    for kind in ("PNG", "TIFF"):
        content = encoded(image, kind, exif=exif)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        np.testing.assert_array_equal(picture.decode(content), expected)
        assert picture.size(content) == expected.shape[:2]


def over_white(colour, opacity):
    opacity = opacity.astype(np.float64)
    return np.round(np.asarray(colour) * opacity / 255 + 255 * (1 - opacity / 255))


def test_opacity_is_over_white():
    opacity = np.linspace(0, 255, 240).reshape(12, 20).astype(np.uint8)
    image = Image.fromarray(np.dstack([PIXELS, opacity]))
    expected = over_white(PIXELS, opacity[..., None])
    assert np.abs(picture.decode(encoded(image)) - expected).max() <= 1
    assert np.abs(picture.from_array(np.asarray(image)) - expected).max() <= 1
    grey = picture.decode(
        encoded(Image.merge("LA", [Image.fromarray(PIXELS[..., 0]), Image.fromarray(opacity)]))
    )
    assert np.abs(grey[..., 1] - over_white(PIXELS[..., 0], opacity)).max() <= 1


def test_other_modes_become_rgb():
    palette = Image.fromarray(PIXELS).quantize(8)
    np.testing.assert_array_equal(
        picture.decode(encoded(palette)), np.asarray(palette.convert("RGB"))
    )
    clear = encoded(palette, transparency=3)
    white = np.asarray(palette) == 3
    assert (picture.decode(clear)[white] == 255).all() and white.any()
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    np.testing.assert_array_equal(
        picture.decode(encoded(cmyk, "TIFF")), np.asarray(cmyk.convert("RGB"))
    )
    deep = np.array([[0, 257, 65535, 32896, 200]], np.uint16)
    np.testing.assert_array_equal(
        picture.decode(encoded(Image.fromarray(deep)))[0, :, 0], [0, 1, 255, 128, 1]
    )
    with pytest.raises(MediaError, match="32-bit grey levels have no known range"):
        picture.decode(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (picture.decode(content) == [255, 0, 0]).all()


def test_the_size_is_read_without_decoding(monkeypatch):
    def fail(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    assert picture.size(PNG) == (12, 20)
    assert picture.size(PNG[:60]) == (12, 20)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"not a picture that Pillow reads \(0 bytes, beginning with nothing\)"),
        (b"%PDF-1.7 and more", "beginning with 25 50 44 46"),
        (PNG[:20], "not a picture that Pillow reads"),
        (PNG[:-200], r"broken picture \(PNG\)"),
        (PNG[:60] + bytes(100) + PNG[160:], r"broken picture \(PNG\)"),
    ],
)
def test_broken_files_are_refused(content, message):
    with pytest.raises(MediaError, match=message):
        picture.decode(content)


COMPLETE = {
    kind: encoded(Image.fromarray(PIXELS.repeat(8, 0).repeat(8, 1)), kind)
    for kind in ("PNG", "JPEG", "GIF")
}


@pytest.mark.parametrize("kind", COMPLETE)
def test_files_cut_off_or_zeroed_are_refused_by_name_before_a_step(tmp_path, kind):
    complete, half = COMPLETE[kind], len(COMPLETE[kind]) // 2
    for name, content in (
        ("cut", complete[:half]),
        ("zeroed", complete[:half] + bytes(len(complete) - half)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MediaError, match=rf"/{name}: broken picture \({kind}\)"):
            refer("image", name, tmp_path)
    picture.check_complete(complete)


def test_complete_files_are_not_decoded_before_a_step(monkeypatch):
    def fail(*_):
        raise AssertionError("decoded")

    webp = encoded(Image.fromarray(PIXELS), "WEBP")
    monkeypatch.setattr(picture, "from_pillow", fail)
    for content in (COMPLETE["PNG"], COMPLETE["JPEG"], webp):
        picture.check_complete(content)
    with pytest.raises(AssertionError, match="decoded"):
        picture.check_complete(COMPLETE["JPEG"][:-2])


def test_an_error_of_a_step_names_the_file(folder, monkeypatch):
    monkeypatch.setattr(picture, "check_complete", lambda content: None)
    (folder / "late.png").write_bytes(PNG[:-200])
    reference = refer("image", "late.png", folder, "rows.jsonl:3: picture 1")
    with pytest.raises(
        MediaError, match=r"rows.jsonl:3: picture 1: .*/late.png: broken picture \(PNG\)"
    ):
        reference.decode()


def test_pictures_with_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(picture, "MAX_PIXELS", 239)
    with pytest.raises(MediaError, match="240 pixels, more than 239; scale it down"):
        picture.size(PNG)
    with pytest.raises(MediaError, match="240 pixels"):
        picture.from_array(PIXELS)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(
        MediaError, match="scale it down"
    ):  # an error of Pillow, which comes before our check
        picture.size(PNG)


@pytest.mark.parametrize(
    "value, message",
    [
        (
            "https://example.org/a.png",
            "is an address of the network; download the picture and give its path",
        ),
        ("HTTP://example.org/a.png", "is an address of the network"),
        ("gone.png", r"no such file: .*gone.png \(relative paths start from /"),
        ("iVBOR" * 9999, "no such file: .*iVBOR"),
        ("a\0.png", "no such file"),
        ("data:image/png;base64", "a data URI has the form"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ({"path": None, "bytes": None}, "a picture without content"),
        (17, "a picture must be a path, bytes or a data URI, is int"),
        (
            PIXELS.astype(np.float32),
            r"must be uint8 of shape \[height, width, 3\], is float32\[12, 20, 3\]",
        ),
        (PIXELS[..., :2], "must be uint8 of shape"),
        (PIXELS[:0], "must be uint8 of shape"),
    ],
)
def test_other_values_are_refused(tmp_path, value, message):
    with pytest.raises(MediaError, match=message):
        refer("image", value, tmp_path)


def test_errors_name_the_file_and_the_row(folder):
    (folder / "broken.png").write_bytes(b"no picture")
    with pytest.raises(MediaError, match=r"broken.png: not a picture"):
        refer("image", "broken.png", folder)
    reference = refer("image", "a picture.png", folder, "rows.jsonl:3: picture 1")
    (folder / "a picture.png").write_bytes(PNG[:-300])
    with pytest.raises(
        MediaError,
        match=r"rows.jsonl:3: picture 1: .*a picture.png has changed since the run read it",
    ):
        reference.decode()
    (folder / "a picture.png").unlink()
    with pytest.raises(MediaError, match="rows.jsonl:3: picture 1: .*cannot be read: No such file"):
        reference.decode()


def test_a_missing_package_names_its_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('PIL', 'PIL.Image', 'torch', 'jax', "
        "'soundfile')))\n"
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from rollout.media import expand, rows\n"
        "from rollout.media.reference import refer\n"
        "assert refer('image', np.zeros((4, 6, 3), np.uint8), Path()).decode().shape == (4, 6, 3)\n"
        "for kind, content in (('image', b'x'), ('audio', b'x')):\n"
        "    try: refer(kind, content, Path())\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "pictures in files need Pillow; pip install 'duet-rl[vision]'",
        "sounds other than WAV files need soundfile; pip install 'duet-rl[audio]'",
    ]


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 4 4
%%EndComments
%%EOF
"""


def test_formats_that_start_programs_are_refused():
    """Pillow hands EPS to Ghostscript."""
    with pytest.raises(MediaError, match="not a picture .* the formats are PNG, JPEG"):
        picture.size(EPS)
    with pytest.raises(MediaError, match="the formats are"):
        picture.decode(EPS)


@pytest.mark.parametrize("kind", picture.FORMATS)
def test_each_format_is_read(kind):
    content = encoded(Image.fromarray(PIXELS), kind)
    assert picture.decode(content).shape == PIXELS.shape
