"""Pictures as input: reading them, the size of their video, and making them fit. No PyTorch, no network.

tests/parity/test_image.py compares with PyTorch, diffusers and the official code, live.
"""

import math

import numpy as np
import pytest
from PIL import Image

from vidax.errors import UserError
from vidax.media import image
from vidax.media.image import area_size, cover, fitting_size, open_picture, pad, stretch, stretch_bicubic

ORIENTATION = 0x0112  # EXIF


def noise(height: int = 5, width: int = 7, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def read(picture, path) -> image.Picture:
    """A Pillow image by way of a file without loss; and the image itself, which has to give the same."""
    picture.save(path)
    opened = open_picture(path)
    assert opened == open_picture(picture) and opened.name == str(path)
    return opened


# Reading


@pytest.mark.parametrize("suffix", ["png", "tiff", "bmp", "webp"])
def test_a_file_array_and_image_are_one_picture(tmp_path, suffix):
    pixels, path = noise(), tmp_path / f"a.{suffix}"
    Image.fromarray(pixels).save(path, lossless=True)
    for source, name in [(path, str(path)), (str(path), str(path)), (pixels, "array"), (Image.open(path), "image")]:
        picture = open_picture(source)
        np.testing.assert_array_equal(picture.pixels, pixels)
        assert picture.pixels.dtype == np.uint8
        assert (picture.name, picture.notes) == (name, ())
        assert picture == open_picture(pixels) and hash(picture) == hash(open_picture(pixels))


def test_the_digest():
    """Known, so that it stays what records hold; and of the shape too."""
    pixels = np.arange(36, dtype=np.uint8)
    wide = open_picture(pixels.reshape(2, 6, 3))
    assert wide.digest == "42cc7fa83d76bf15c1aecd326040646167fc733049e315a75da95761051a3edc"
    assert wide != open_picture(pixels.reshape(3, 4, 3)) and wide != open_picture(pixels[::-1].reshape(2, 6, 3))


def test_the_pixels_are_not_the_users_array():
    for channels in (1, 3, 4):
        pixels = noise(channels=channels)
        picture = open_picture(pixels)
        before = picture.pixels.copy()
        pixels[:] = 0
        np.testing.assert_array_equal(picture.pixels, before)


def test_arrays_of_floating_point():
    pixels = noise(64, 64)
    for dtype in (np.float32, np.float64):
        picture = open_picture((pixels / 255).astype(dtype))
        np.testing.assert_array_equal(picture.pixels, pixels)
        assert picture.notes == ("rounded to 8 bits",)
    np.testing.assert_array_equal(open_picture(np.full((1, 1, 3), 0.5, np.float16)).pixels, 128)
    grey = open_picture(pixels[..., 0] / 255)
    np.testing.assert_array_equal(grey.pixels, np.repeat(pixels[..., :1], 3, -1))
    assert grey.notes == ("rounded to 8 bits", "grey to RGB")


TURNED = {  # how pixels lie in the file, for each EXIF orientation
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, 1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, -1),
}


@pytest.mark.parametrize("orientation", [*TURNED, 0, 9])
@pytest.mark.parametrize("suffix", ["png", "tiff", "webp"])
@pytest.mark.parametrize("channels", [3, 4])
def test_exif_orientation(tmp_path, suffix, orientation, channels):
    """Also of a TIFF with alpha, which Pillow garbles where it maps the file into memory."""
    pixels = np.dstack([noise(), np.full((5, 7, channels - 3), 255, np.uint8)])
    stored = Image.fromarray(np.ascontiguousarray(TURNED.get(orientation, TURNED[1])(pixels)))
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored.save(tmp_path / f"a.{suffix}", exif=exif, lossless=True)
    picture = open_picture(tmp_path / f"a.{suffix}")
    np.testing.assert_array_equal(picture.pixels, noise())
    assert picture.notes == (("turned by its EXIF orientation",) if orientation in range(2, 9) else ())


def test_a_jpeg_of_a_camera(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.new("RGB", (32, 16), (200, 30, 90)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    picture = open_picture(tmp_path / "a.jpg")
    assert picture.pixels.shape == (32, 16, 3)
    assert np.abs(picture.pixels - np.array([200.0, 30, 90])).max() < 4


def over_white(pixels: np.ndarray) -> np.ndarray:
    """[H W 4] uint8 to [H W 3], floating point."""
    alpha = pixels[..., 3:] / 255
    return pixels[..., :3] * alpha + 255 * (1 - alpha)


def test_alpha(tmp_path):
    pixels = noise(64, 64, 4)
    pixels[:8, :, 3], pixels[8:16, :, 3] = 0, 255
    expected = over_white(pixels)
    for picture in (read(Image.fromarray(pixels), tmp_path / "a.png"), open_picture(pixels)):
        assert np.abs(picture.pixels - expected).max() < 1
        np.testing.assert_array_equal(picture.pixels[:16], expected[:16])
        assert picture.notes == ("alpha laid over white",)
    np.testing.assert_array_equal(open_picture(pixels / 255).pixels, picture.pixels)
    pixels[..., 3] = 255
    opaque = open_picture(pixels)
    np.testing.assert_array_equal(opaque.pixels, pixels[..., :3])
    assert opaque.notes == ()


def test_grey_with_alpha(tmp_path):
    two = noise(64, 64, 2)
    picture = read(Image.fromarray(two, "LA"), tmp_path / "a.png")
    assert np.abs(picture.pixels - over_white(two[..., [0, 0, 0, 1]])).max() < 1
    assert picture.notes == ("grey to RGB", "alpha laid over white")


def palette_image() -> tuple[Image.Image, np.ndarray]:
    """With colours of its own; and its pixels."""
    colours = np.random.default_rng(1).integers(0, 255, (256, 3), np.uint8)
    picture = Image.fromarray(noise(channels=1))
    picture.putpalette(colours.tobytes())
    assert picture.mode == "P"
    return picture, colours[noise(channels=1)]


def test_palettes(tmp_path):
    picture, pixels = palette_image()
    opened = read(picture, tmp_path / "a.png")
    np.testing.assert_array_equal(opened.pixels, pixels)
    assert opened.notes == ("palette to RGB",)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_transparent_palette(tmp_path, as_bytes):
    """One colour transparent, or an alpha for each."""
    picture, pixels = palette_image()
    clear = noise(channels=1)[2, 3]
    pixels[noise(channels=1) == clear] = 255
    alpha = bytes(0 if index == clear else 255 for index in range(256)) if as_bytes else int(clear)
    picture.save(tmp_path / "a.png", transparency=alpha)
    opened = open_picture(tmp_path / "a.png")
    np.testing.assert_array_equal(opened.pixels, pixels)
    assert opened.notes == ("palette to RGB", "alpha laid over white")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_one_colour_transparent(tmp_path, mode):
    pixels = noise(channels=len(mode))
    clear = pixels[2, 3]
    Image.fromarray(pixels).save(
        tmp_path / "a.png", transparency=tuple(clear.tolist()) if mode == "RGB" else int(clear)
    )
    expected = np.where(pixels == clear, 255, pixels) if mode == "L" else pixels.copy()
    if mode == "RGB":
        expected[2, 3] = 255
    opened = open_picture(tmp_path / "a.png")
    np.testing.assert_array_equal(opened.pixels, np.dstack([expected] * 3) if mode == "L" else expected)
    assert opened.notes[-1] == "alpha laid over white"


def test_grey(tmp_path):
    pixels = noise(channels=1)
    picture = read(Image.fromarray(pixels), tmp_path / "a.png")
    np.testing.assert_array_equal(picture.pixels, np.dstack([pixels] * 3))
    assert picture.notes == ("grey to RGB",) and picture == open_picture(pixels)
    bits = read(Image.fromarray(pixels > 99), tmp_path / "b.png")
    np.testing.assert_array_equal(bits.pixels, np.dstack([(pixels > 99) * np.uint8(255)] * 3))
    assert bits.notes == ("grey to RGB",)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_grey_of_16_bits(tmp_path, suffix):
    """All values, turned too; Pillow's own conversion would clip them."""
    values = np.arange(65536, dtype=np.uint16).reshape(128, 512)
    expected = np.dstack([np.round(values / 257).astype(np.uint8)] * 3)
    for dtype in (np.uint16, np.int32) if suffix == "tiff" else (np.uint16,):
        picture = read(Image.fromarray(values.astype(dtype)), tmp_path / f"a.{suffix}")
        np.testing.assert_array_equal(picture.pixels, expected)
        assert picture.notes == ("16 bits to 8", "grey to RGB")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(values).save(tmp_path / f"b.{suffix}", exif=exif)
    np.testing.assert_array_equal(open_picture(tmp_path / f"b.{suffix}").pixels, np.rot90(expected, -1))


def test_grey_of_floating_point(tmp_path):
    picture = read(Image.fromarray((noise(channels=1) / 255).astype(np.float32)), tmp_path / "a.tiff")
    np.testing.assert_array_equal(picture.pixels, np.dstack([noise(channels=1)] * 3))
    assert picture.notes == ("rounded to 8 bits", "grey to RGB")


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_other_colours(tmp_path, mode):
    pixels = np.full((4, 6, 3), (200, 30, 90), np.uint8)
    picture = read(Image.fromarray(pixels).convert(mode), tmp_path / "a.tiff")
    assert np.abs(picture.pixels - pixels.astype(int)).max() <= 2
    assert picture.notes == (f"{mode} to RGB",)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_the_first_of_several_frames(tmp_path, suffix):
    """Of a file; of an image that was opened elsewhere the one that it is at."""
    path = tmp_path / f"a.{suffix}"
    first, *others = (Image.new("RGB", (8, 4), colour) for colour in ("red", "lime", "blue"))
    first.save(path, save_all=True, append_images=others, lossless=True)
    picture = open_picture(path)
    np.testing.assert_array_equal(picture.pixels, np.full((4, 8, 3), (255, 0, 0)))
    assert picture.notes[0] == "frame 1 of 3"
    with Image.open(path) as opened:
        opened.seek(1)
        picture = open_picture(opened)
        np.testing.assert_array_equal(picture.pixels, np.full((4, 8, 3), (0, 255, 0)))
        assert picture.notes[0] == "frame 2 of 3"
        opened.seek(2)  # is still open


def test_files_that_are_no_picture(tmp_path):
    (tmp_path / "text.png").write_text("a cat")
    (tmp_path / "empty.png").touch()
    for name, sentence in [
        ("missing.png", "missing.png: no such file; give the path of a picture"),
        ("", " is a folder; name a picture in it"),
        ("text.png", "text.png: not a picture in a known format; save it as PNG, JPEG or WebP"),
        ("empty.png", "empty.png: not a picture in a known format; save it as PNG, JPEG or WebP"),
        ("text.png/a.png", "a.png: cannot be read (Not a directory); save it again, as PNG or JPEG"),
    ]:
        with pytest.raises(UserError) as caught:
            open_picture(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path)) and str(caught.value).endswith(sentence)


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "bmp", "gif", "webp"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_truncated_files(tmp_path, suffix, part):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise(64, 64)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(
        UserError, match=rf"a\.{suffix}: (cannot be read \(.+\)|not a picture in a known format); save it"
    ):
        open_picture(path)


def test_a_truncated_image_that_was_opened_elsewhere(tmp_path):
    Image.fromarray(noise(64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:5000])
    with Image.open(tmp_path / "a.png") as opened, pytest.raises(UserError, match=r"image: cannot be read \(.+\)"):
        open_picture(opened)


def test_large_pictures(tmp_path, monkeypatch):
    """Without Pillow's warning; beyond what it reads, a sentence."""
    Image.fromarray(noise(10, 10)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)
    open_picture(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(UserError, match=r"a\.png: cannot be read \(Image size \(100 pixels\) exceeds limit of 80"):
        open_picture(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (np.zeros((3, 5, 7), np.uint8), r"an array of shape \(3, 5, 7\): a picture is \[height width 3\], .*; give it"),
        (np.zeros((1, 5, 7, 3), np.uint8), r"an array of shape \(1, 5, 7, 3\): a picture is"),
        (np.zeros((5, 7, 2), np.uint8), r"an array of shape \(5, 7, 2\): a picture is"),
        (np.zeros(5, np.uint8), r"an array of shape \(5,\): a picture is"),
        (np.zeros((0, 7, 3), np.uint8), r"an array of shape \(0, 7, 3\): .* at least one pixel"),
        (np.zeros((5, 7, 3), np.int64), "an array of int64: a picture is uint8, or floating point in .*; convert it"),
        (np.zeros((5, 7, 3), np.uint16), "an array of uint16: a picture is uint8"),
        (np.zeros((5, 7), bool), "an array of bool: a picture is uint8"),
        (None, r"an array of shape \(\): a picture is"),
        (np.full((5, 7, 3), 255.0), r"array: float64 values from 255 to 255: they have to lie in \[0, 1\]; scale or"),
        (np.linspace(-0.5, 1, 4).reshape(2, 2), r"array: float64 values from -0.5 to 1: they have to"),
        (np.full((5, 7, 3), np.nan, np.float32), "array: float32 values from nan to nan: they have to"),
        (Image.new("RGB", (0, 3)), "image: 0x3: a picture has at least one pixel; give another"),
        (Image.new("I", (2, 2), 70000), r"image: int32 values from 70000 to 70000: they have to lie in \[0, 65535\]"),
        (Image.new("F", (2, 2), 70), r"image: float32 values from 70 to 70: they have to lie in \[0, 1\]"),
    ],
)
def test_what_is_no_picture(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        open_picture(wrong)


# The size of the video

P480, P720, P704 = 480 * 832, 720 * 1280, 704 * 1280

# What the official code gives; tests/parity/test_image.py runs it.
SIZES = {  # (width, height) of the picture, pixels, multiple: (area_size, fitting_size)
    (832, 480, P480, 16): ((832, 464), (832, 480)),
    (480, 832, P480, 16): ((480, 832), (480, 832)),
    (1024, 1024, P480, 16): ((624, 624), (640, 624)),
    (3024, 4032, P480, 16): ((544, 720), (544, 720)),
    (2000, 100, P480, 16): ((2816, 128), (2816, 128)),
    (100, 2000, P480, 16): ((128, 2816), (128, 2816)),
    (1000, 333, P480, 16): ((1088, 352), (1088, 352)),
    (4000, 7, P480, 16): ((15104, 16), (15104, 16)),
    (1280, 720, P720, 16): ((1280, 720), (1280, 720)),
    (720, 1280, P720, 16): ((720, 1280), (720, 1280)),
    (1024, 1024, P720, 16): ((960, 960), (960, 960)),
    (3024, 4032, P720, 16): ((816, 1104), (832, 1104)),
    (2000, 100, P720, 16): ((4288, 208), (4288, 208)),
    (100, 2000, P720, 16): ((208, 4288), (208, 4288)),
    (1000, 333, P720, 16): ((1648, 544), (1648, 544)),
    (4000, 7, P720, 16): ((22944, 32), (22944, 32)),
    (1280, 720, P704, 32): ((1248, 704), (1248, 704)),
    (720, 1280, P704, 32): ((704, 1248), (704, 1248)),
    (1024, 1024, P704, 32): ((928, 928), (960, 928)),
    (3024, 4032, P704, 32): ((800, 1088), (800, 1088)),
    (2000, 100, P704, 32): ((4224, 192), (4224, 192)),
    (100, 2000, P704, 32): ((192, 4224), (192, 4224)),
    (1000, 333, P704, 32): ((1632, 544), (1632, 544)),
    (4000, 7, P704, 32): ((22688, 32), (22688, 32)),
}

EXTREME = [(1, 4000, P480, 16), (4000, 1, P480, 16), (1, 1000, P704, 32), (1000, 1, P704, 32)]


@pytest.mark.parametrize("case", SIZES)
def test_sizes(case):
    assert (area_size(*case), fitting_size(*case)) == SIZES[case]


def test_sizes_of_any_shape():
    """Never more pixels than asked for; as multiples; portrait is landscape turned, but where rounding decides."""
    rng = np.random.default_rng(0)
    for width, height in rng.integers(100, 5000, (200, 2)).tolist():
        for area, multiple in ((P480, 16), (P720, 16), (P704, 32)):
            for rule in (area_size, fitting_size):
                across, down = rule(width, height, area, multiple)
                assert across % multiple == down % multiple == 0 < across * down <= area
            area_wide, area_tall = (rule(width, height, area, multiple) for rule in (area_size, fitting_size))
            assert math.prod(area_wide) <= math.prod(area_tall)
            assert area_size(height, width, area, multiple) == area_wide[::-1]


@pytest.mark.parametrize("rule", [area_size, fitting_size])
def test_a_side_of_nothing(rule):
    for case in EXTREME:
        with pytest.raises(UserError, match="; crop it, or give --size"):
            rule(*case)
    with pytest.raises(UserError) as caught:
        rule(1, 4000, P480, 16)
    assert str(caught.value) == (
        "a picture of 1x4000: a video of its shape with 399360 pixels, in multiples of 16, would be 0x39952; "
        "crop it, or give --size"
    )


# To that size

WAYS = [cover, pad, stretch, stretch_bicubic]
every_way = pytest.mark.parametrize("way", WAYS)


@every_way
def test_the_size_already(way):
    pixels = noise(48, 80)
    fitted = way(pixels, (80, 48))
    assert fitted.dtype == np.float32
    np.testing.assert_array_equal(fitted, pixels.astype(np.float32) / np.float32(255))


@every_way
@pytest.mark.parametrize("size", [(80, 48), (48, 80), (64, 64), (16, 160), (7, 5), (6, 5)])
def test_one_colour_stays_it(way, size):
    """From smaller and larger pictures of any shape."""
    for height, width in [(5, 7), (100, 90), (31, 200), (1, 1)]:
        fitted = way(np.full((height, width, 3), (200, 30, 90), np.uint8), size)
        assert fitted.shape == (size[1], size[0], 3) and fitted.dtype == np.float32
        colour = fitted[fitted.any(-1)] if way is pad else fitted.reshape(-1, 3)
        np.testing.assert_allclose(colour, np.broadcast_to(np.array([200, 30, 90]) / 255, colour.shape), atol=2e-6)


@pytest.mark.parametrize("shape", [(100, 300), (300, 100), (333, 77), (48, 81), (47, 80)])
def test_cover(shape):
    """By the official steps: scaled until both sides fill the size, and what is too much cut at both ends."""
    pixels = noise(*shape)
    scale = max(80 / shape[1], 48 / shape[0])
    scaled = Image.fromarray(pixels).resize(
        (round(shape[1] * scale), round(shape[0] * scale)), Image.Resampling.LANCZOS
    )
    left, top = (scaled.width - 80) // 2, (scaled.height - 48) // 2
    expected = np.asarray(scaled)[top : top + 48, left : left + 80]
    np.testing.assert_array_equal(cover(pixels, (80, 48)), expected / np.float32(255))


def test_cover_cuts_both_ends():
    columns = np.broadcast_to(np.arange(9, dtype=np.uint8)[:, None], (4, 9, 3))
    np.testing.assert_array_equal(np.rint(cover(columns, (4, 4))[0, :, 0] * 255), [2, 3, 4, 5])
    np.testing.assert_array_equal(np.rint(cover(columns.swapaxes(0, 1), (4, 4))[:, 0, 0] * 255), [2, 3, 4, 5])


def test_pad():
    """In the middle; of a narrow picture something is left."""
    fitted = pad(np.full((10, 40, 3), 255, np.uint8), (20, 20))
    assert (fitted[7:12] == 1).all() and not fitted[:7].any() and not fitted[12:].any()
    fitted = pad(np.full((40, 10, 3), 255, np.uint8), (20, 20))
    assert (fitted[:, 7:12] == 1).all() and not fitted[:, :7].any() and not fitted[:, 12:].any()
    assert pad(np.full((1, 999, 3), 255, np.uint8), (20, 20)).sum() == 20 * 3
    pixels = noise(100, 300)
    expected = np.asarray(Image.fromarray(pixels).resize((80, 27), Image.Resampling.LANCZOS)) / np.float32(255)
    np.testing.assert_array_equal(pad(pixels, (80, 48))[10:37], expected)


@pytest.mark.parametrize("shape", [(100, 300), (300, 100), (20, 30)])
def test_stretch(shape):
    pixels = noise(*shape)
    expected = np.asarray(Image.fromarray(pixels).resize((80, 48), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(stretch(pixels, (80, 48)), expected / np.float32(255))


def test_stretch_bicubic():
    """Beyond [0, 1] at an edge, and the same of floating point."""
    pixels = np.repeat(np.array([0, 255], np.uint8), 8)[None, :, None].repeat(4, 0).repeat(3, 2)
    fitted = stretch_bicubic(pixels, (64, 4))
    assert fitted.min() < -0.05 and fitted.max() > 1.05
    assert (np.diff(fitted[0, 28:36, 0]) > 0).all() and fitted[0, 0, 0] == 0 and fitted[0, -1, 0] == 1
    np.testing.assert_array_equal(stretch_bicubic(pixels / 255, (64, 4)), fitted)
    # From twice the size: only the four nearest pixels, with the filter's weights half way between two.
    dot = np.zeros((1, 8, 3), np.uint8)
    dot[0, 3] = 255
    weights = stretch_bicubic(dot, (4, 1))[0, :, 0]
    np.testing.assert_allclose(weights, [0, 0.59375, -0.09375, 0], atol=1e-6)
