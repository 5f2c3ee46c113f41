import errno
import json
import os
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from vidax.errors import UserError
from vidax.media import files, output, video

SIZE = {"height": 32, "width": 48}
COLOUR = ("color_range", "colorspace", "color_primaries", "color_trc")
TAGS = {"prompt": 'a "cat",\nwalking = ü 猫; #1', "seed": 42, "model": "wan2.1-t2v-1.3b", "version": "0.1.0"}


def noise(frames, height=32, width=48, dtype=np.uint8):
    rng = np.random.default_rng(0)
    if dtype == np.uint8:
        return rng.integers(0, 256, (frames, height, width, 3), np.uint8)
    return rng.random((frames, height, width, 3), np.float32)


def mp4(path, frames, **kw):
    return video.Mp4Writer(path, **{"frames": frames, "fps": 16, **SIZE, **kw})


def decode(path):
    """(frames as av.VideoFrame, what the file says about itself)."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        about = {
            "codec": stream.codec_context.name,
            "pix_fmt": stream.codec_context.pix_fmt,
            "size": (stream.height, stream.width),
            "frames": stream.frames,
            "fps": stream.average_rate,
            "seconds": stream.duration * stream.time_base,
            "colour": [getattr(stream.codec_context, key) for key in COLOUR],
            **{key: container.metadata.get(key) for key in ("title", "comment")},
        }
        return list(container.decode(stream)), about


def bt709_rgb(frame):
    """Limited-range BT.709 to RGB by the standard's formula, a chroma sample for its four pixels; without FFmpeg."""
    planes = frame.to_ndarray().astype(np.float64)
    height, width = frame.height, frame.width
    y = (planes[:height] - 16) / 219
    u, v = ((planes[height:].reshape(2, height // 2, width // 2) - 128) / 224).repeat(2, 1).repeat(2, 2)
    r, b = y + 1.5748 * v, y + 1.8556 * u
    g = (y - 0.2126 * r - 0.0722 * b) / 0.7152
    return np.stack([r, g, b], -1) * 255


# mp4


@pytest.mark.parametrize("fps", [16, 24, Fraction(24000, 1001)])
@pytest.mark.parametrize("frames", [1, 2, 5, 17, 81])
def test_mp4_has_what_was_asked_for(tmp_path, frames, fps):
    with mp4(tmp_path / "a.mp4", frames, fps=fps) as writer:
        for chunk in np.split(noise(frames), range(1, frames, 4)):
            writer.write(chunk)
    decoded, about = decode(tmp_path / "a.mp4")
    assert len(decoded) == about["frames"] == frames
    assert [frame.pts * frame.time_base for frame in decoded] == [index / Fraction(fps) for index in range(frames)]
    assert about["fps"] == fps and about["seconds"] == frames / Fraction(fps)
    assert (about["codec"], about["pix_fmt"], about["size"]) == ("h264", "yuv420p", (32, 48))
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_mp4_colours(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 30, 90)]
    frames = np.stack([np.full((32, 48, 3), colour, np.uint8) for colour in colours])
    with mp4(tmp_path / "a.mp4", len(frames)) as writer:
        writer.write(frames)
    decoded, about = decode(tmp_path / "a.mp4")
    assert about["colour"] == [1, 1, 1, 1]  # limited range, and BT.709 three times
    for frame, colour in zip(decoded, colours, strict=True):
        assert np.abs(bt709_rgb(frame) - colour).max() < 2


def test_mp4_is_close_to_its_frames(tmp_path):
    rows, columns = np.mgrid[0:32, 0:48]
    frames = np.stack([np.stack([rows * 8, columns * 5, (rows + columns) * 3 + shift], -1) for shift in range(5)])
    with mp4(tmp_path / "a.mp4", 5) as writer:
        writer.write(frames.astype(np.uint8))
    decoded, _ = decode(tmp_path / "a.mp4")
    assert np.abs(np.stack([bt709_rgb(frame) for frame in decoded]) - frames).mean() < 4


def test_mp4_index_is_at_the_front(tmp_path):
    with mp4(tmp_path / "a.mp4", 5) as writer:
        writer.write(noise(5))
    content = (tmp_path / "a.mp4").read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize("prompt", [TAGS["prompt"], "", "a\0b", "\udcff", "word " * 600])
def test_mp4_tags(tmp_path, prompt):
    with mp4(tmp_path / "a.mp4", 1, tags=TAGS | {"prompt": prompt}) as writer:
        writer.write(noise(1))
    _, about = decode(tmp_path / "a.mp4")
    assert json.loads(about["comment"]) == TAGS | {"prompt": prompt}
    expected = prompt.replace("\0", " ").replace("\udcff", "?").split()
    assert (about["title"] or "").split() == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"height": 31}, "48x31: an mp4 (H.264, yuv420p) takes an even width and height"),
        ({"width": 47}, "47x32: an mp4 (H.264, yuv420p) takes an even width and height"),
        ({"fps": 0}, "0 frames per second: it has to be above 0"),
    ],
)
def test_mp4_refuses(tmp_path, wrong, message):
    with pytest.raises(UserError) as caught:
        mp4(tmp_path / "a.mp4", 5, **wrong)
    assert str(caught.value) == message
    assert not os.listdir(tmp_path)


def test_an_encoder_error_is_a_sentence(tmp_path):
    with (
        pytest.raises(UserError, match=r"a\.mp4: cannot be written"),
        mp4(tmp_path / "a.mp4", 1, width=20000) as writer,
    ):
        writer.write(np.zeros((1, 32, 20000, 3), np.uint8))
    assert not os.listdir(tmp_path)


# every writer


def writer_for(suffix, folder, frames=5):
    frames = 1 if suffix == ".png" else frames
    writer = output.open_writer(folder / f"a{suffix}", frames=frames, fps=16, tags=TAGS, **SIZE)
    return writer, noise(frames, dtype=writer.dtype)


every_suffix = pytest.mark.parametrize("suffix", output.SUFFIXES)


@every_suffix
def test_a_writer_leaves_one_readable_file(tmp_path, suffix):
    writer, frames = writer_for(suffix, tmp_path)
    assert not os.listdir(tmp_path), "opened before it was asked to"
    with writer:
        assert [name[0] for name in os.listdir(tmp_path)] == ["."]
        for frame in frames:
            writer.write(frame[None])
    assert os.listdir(tmp_path) == [f"a{suffix}"] and writer.path == tmp_path / f"a{suffix}"
    umask = os.umask(0)
    os.umask(umask)
    assert writer.path.stat().st_mode & 0o777 == 0o666 & ~umask


@every_suffix
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError(errno.ENOSPC, "not about this file")])
@pytest.mark.parametrize("written", [0, 1])
def test_an_interrupted_write_leaves_nothing(tmp_path, suffix, interrupt, written):
    writer, frames = writer_for(suffix, tmp_path)
    handles = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(interrupt if isinstance(interrupt, type) else type(interrupt)) as caught, writer:
        if written:
            writer.write(frames[:written])
        raise interrupt
    assert not isinstance(caught.value, UserError)
    assert not os.listdir(tmp_path)
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == handles


@every_suffix
def test_too_few_frames_leave_nothing(tmp_path, suffix):
    writer, frames = writer_for(suffix, tmp_path)
    with pytest.raises(AssertionError, match=f"{len(frames) - 1} frames for a file of {len(frames)}"), writer:
        for frame in frames[:-1]:
            writer.write(frame[None])
    assert not os.listdir(tmp_path)


def test_wrong_chunks_are_our_mistake(tmp_path):
    for chunk in (noise(6), noise(0), noise(1, height=16), noise(1, dtype=np.float32), noise(1)[0]):
        with pytest.raises(AssertionError), mp4(tmp_path / "a.mp4", 5) as writer:
            writer.write(chunk)


@every_suffix
def test_an_existing_file_is_refused_early(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text("precious")
    with pytest.raises(UserError, match=f"a{suffix} exists; choose another name, or allow overwriting"):
        writer_for(suffix, tmp_path)
    assert (tmp_path / f"a{suffix}").read_text() == "precious"


def test_overwriting_replaces_only_when_done(tmp_path):
    path = tmp_path / "a.npy"
    path.write_text("old")
    (tmp_path / "a.json").write_text("{}")
    writer = output.open_writer(path, frames=1, fps=16, overwrite=True, **SIZE)
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    writer = output.open_writer(path, frames=1, fps=16, overwrite=True, **SIZE)
    with writer:
        writer.write(noise(1, dtype=np.float32))
    assert np.load(path).shape == (1, 32, 48, 3)


def test_two_runs_with_one_name_both_keep_their_work(tmp_path):
    first, frames = writer_for(".npy", tmp_path)
    second, _ = writer_for(".npy", tmp_path)
    with first, second:
        second.write(frames)
        first.write(frames * 0)
    assert {first.path.name, second.path.name} == {"a.npy", "a-0002.npy"}
    np.testing.assert_array_equal(np.load(second.path), frames)
    assert not np.load(first.path).any()


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@every_suffix
def test_a_full_disk_is_a_sentence(tmp_path, suffix, monkeypatch):
    writer, frames = writer_for(suffix, tmp_path)
    monkeypatch.setattr(type(writer), "_put", full_disk)
    with (
        pytest.raises(UserError, match=f"a{suffix}: no space left in .*; free some, or write to another folder"),
        writer,
    ):
        writer.write(frames)
    assert not os.listdir(tmp_path)


LIMITED = """
import resource, sys
import numpy as np
from vidax.errors import UserError
from vidax.media.output import open_writer
writer = open_writer(sys.argv[1], frames=int(sys.argv[2]), height=256, width=256, fps=16)
frames = np.random.default_rng(0).random((int(sys.argv[2]), 256, 256, 3))
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
try:
    with writer:
        writer.write(frames.astype(np.float32) if writer.dtype == np.float32 else (frames * 255).astype(np.uint8))
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="no file size limit on this system")
@every_suffix
def test_a_write_that_the_system_refuses(tmp_path, suffix):
    """A file size limit stands in for a full disk: FFmpeg, numpy and Pillow meet a real failing write."""
    arguments = [str(tmp_path / f"a{suffix}"), "1" if suffix == ".png" else "3"]
    run = subprocess.run([sys.executable, "-Werror", "-c", LIMITED, *arguments], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"{arguments[0]}: cannot be written (File too large)")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("failing", ["write", "close"])
def test_an_ffmpeg_error_is_a_sentence(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise av.error.ExternalError(-542398533, "Generic error in an external library")

    monkeypatch.setattr(video.Mp4Writer, "_put" if failing == "write" else "_finish", fail)
    with (
        pytest.raises(UserError, match=r"a\.mp4: cannot be written \(Generic error"),
        mp4(tmp_path / "a.mp4", 1) as writer,
    ):
        writer.write(noise(1))
    assert not os.listdir(tmp_path)


# names


def test_folders_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(UserError, match=f"there is no folder {folder}; create it first"):
            files.claim_output(folder / "a.mp4")
    with pytest.raises(UserError, match="a is a folder; name a file in it"):
        (tmp_path / "a").mkdir()
        files.claim_output(tmp_path / "a")
    with pytest.raises(UserError, match="the name is too long; choose a shorter one"):
        files.claim_output(tmp_path / ("a" * 300 + ".mp4"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that root cannot write to either")
def test_a_read_only_folder():
    with pytest.raises(UserError, match=r"the folder /proc cannot be written to .*; choose another"):
        files.claim_output("/proc/a.mp4")


def test_the_record_of_another_output_is_not_overwritten(tmp_path):
    files.write_json(tmp_path / "a.json", {})
    with pytest.raises(UserError, match=r"a\.json exists"):
        files.claim_output(tmp_path / "a.mp4")
    assert files.free_name(tmp_path / "a.mp4").name == "a-0002.mp4"


def test_claiming_leaves_nothing(tmp_path):
    assert files.claim_output(str(tmp_path / "a.mp4")) == tmp_path / "a.mp4"
    assert not os.listdir(tmp_path)


def test_free_names(tmp_path):
    names = []
    for _ in range(3):
        path = files.free_name(tmp_path / "a-cat-42.mp4")
        path.touch()
        names.append(path.name)
    assert names == ["a-cat-42.mp4", "a-cat-42-0002.mp4", "a-cat-42-0003.mp4"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A cat, walking!", "a-cat-walking"),
        ("../../etc/passwd", "etc-passwd"),
        ("一只猫 在草地", "一只猫-在草地"),
        ("  ...  ", "video"),
        ("word " * 20, "-".join(["word"] * 9)),
        ("x" * 99, "x" * 48),
    ],
)
def test_slug(prompt, expected):
    assert files.slug(prompt) == expected


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        (
            "a.webm",
            5,
            r"a\.webm: the suffix '\.webm' is not an output format; use \.mp4 .*, \.npy .*, \.png \(one frame\)",
        ),
        ("a", 5, "a: the suffix '' is not an output format"),
        ("a.png", 5, r"a\.png: 5 frames: a \.png holds one; use \.mp4 or \.npy, or generate 1 frame"),
    ],
)
def test_suffixes_refused(tmp_path, name, frames, message):
    with pytest.raises(UserError, match=message):
        output.open_writer(tmp_path / name, frames=frames, fps=16, **SIZE)


def test_suffixes_in_capitals(tmp_path):
    assert isinstance(output.open_writer(tmp_path / "A.MP4", frames=5, fps=16, **SIZE), video.Mp4Writer)


# arrays, pictures, records


def test_npy_values_are_exact(tmp_path):
    frames = noise(9, dtype=np.float32)
    with output.NpyWriter(tmp_path / "a.npy", frames=9, **SIZE) as writer:
        for chunk in np.split(frames, [1, 5]):
            writer.write(chunk)
    read = np.load(tmp_path / "a.npy")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, frames)


def test_png_values_are_exact(tmp_path):
    writer, frames = writer_for(".png", tmp_path)
    with writer:
        writer.write(frames)
    with Image.open(writer.path) as image:
        np.testing.assert_array_equal(np.asarray(image), frames[0])
        assert json.loads(image.text["Comment"]) == TAGS


@pytest.mark.parametrize(
    ("frames", "columns", "rows", "cells"),
    [(81, 4, 3, (3, 4)), (5, 4, 3, (2, 4)), (3, 4, 3, (1, 3)), (1, 4, 3, (1, 1)), (81, 1, 2, (2, 1))],
)
def test_contact_sheet(tmp_path, frames, columns, rows, cells):
    pictures = np.broadcast_to(np.arange(frames, dtype=np.uint8)[:, None, None, None], (frames, 6, 8, 3))
    sheet = output.contact_sheet(pictures, columns=columns, rows=rows, gap=2)
    down, across = cells
    assert sheet.shape == (down * 6 + (down - 1) * 2, across * 8 + (across - 1) * 2, 3) and sheet.dtype == np.uint8
    shown = [int(sheet[row * 8, column * 10, 0]) for row in range(down) for column in range(across)]
    indices = output.sheet_indices(frames, columns * rows)
    assert shown[: len(indices)] == indices and indices[0] == 0
    assert len(indices) == 1 or indices[-1] == frames - 1
    assert np.ptp(np.diff(indices)) <= 1 if len(indices) > 1 else True, "not evenly spaced"
    path = output.write_png(tmp_path / "sheet.png", sheet)
    with Image.open(path) as image:
        assert image.size == sheet.shape[1::-1]
    assert os.listdir(tmp_path) == ["sheet.png"]


def test_json(tmp_path):
    path = files.write_json(tmp_path / "a.json", {"seed": 1, "prompt": "猫 \udcff", "fps": Fraction(16)})
    assert path.read_text(encoding="utf-8") == '{\n  "fps": "16",\n  "prompt": "猫 \\udcff",\n  "seed": 1\n}\n'
    assert files.write_json(path, {}).name == "a-0002.json"
    assert files.write_json(path, {}, overwrite=True) == path and json.loads(path.read_text()) == {}


def test_json_is_whole_or_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    monkeypatch.setattr(files.Path, "write_text", full_disk_after_half)
    with pytest.raises(UserError, match=r"a\.json: no space left"):
        files.write_json(tmp_path / "a.json", {"seed": 1})
    assert not os.listdir(tmp_path)


def full_disk_after_half(path, text, **_):
    path.write_bytes(text[: len(text) // 2].encode())
    full_disk()


def test_rounding():
    levels = np.arange(256, dtype=np.float32)
    np.testing.assert_array_equal(output.to_uint8(levels / 127.5 - 1), levels)
    np.testing.assert_array_equal(output.to_uint8(np.float32([-9, -1, 0, 1, 9])), [0, 0, 128, 255, 255])
    x = np.random.default_rng(0).uniform(-1.2, 1.2, 100_000).astype(np.float32)
    np.testing.assert_array_equal(output.to_uint8(x), np.rint(np.clip(x / 2 + np.float32(0.5), 0, 1) * 255))
