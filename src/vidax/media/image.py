"""Pictures that a video starts from: read into 8-bit RGB, the size of the video they ask for, made to fit it.

Sizes are (width, height), as Pillow has them; arrays are [height width 3].
"""

import base64
import contextlib
import dataclasses
import hashlib
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vidax.errors import UserError

BICUBIC = -0.75  # the filter's slope at distance 1, PyTorch's choice; Pillow's is -0.5
LANCZOS = Image.Resampling.LANCZOS

# Reading


@dataclasses.dataclass(frozen=True)
class Picture:
    """What was read. Pictures of the same pixels are equal, whatever they are called."""

    pixels: np.ndarray = dataclasses.field(compare=False, repr=False)  # [H W 3] uint8
    name: str = dataclasses.field(compare=False)  # the path as given, or what else was given: "image" or "array"
    digest: str  # SHA-256 of shape and pixels, in hexadecimal
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # what was done on reading, in a few words

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[0]

    def packed(self) -> dict[str, Any]:
        """All of it as JSON has it, for another process."""
        pixels = base64.b64encode(zlib.compress(self.pixels.tobytes())).decode()
        return {"name": self.name, "notes": self.notes, "digest": self.digest, "size": self.size, "pixels": pixels}

    @staticmethod
    def unpacked(packed: Mapping[str, Any]) -> "Picture":
        width, height = packed["size"]
        pixels = np.frombuffer(zlib.decompress(base64.b64decode(packed["pixels"])), np.uint8)
        return Picture(pixels.reshape(height, width, 3), packed["name"], packed["digest"], tuple(packed["notes"]))


def open_picture(source: str | os.PathLike | Image.Image | np.ndarray | Picture) -> Picture:
    """A file, a Pillow image, an array [H W 3], [H W 4] or [H W] of uint8 or of floating point in [0, 1], or a picture
    that is open.

    Turned as its EXIF says, and what is transparent laid over white. Raises UserError for what is no such picture.
    """
    if isinstance(source, Picture):
        return source
    notes: list[str] = []
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        # By its name Pillow maps a file into memory, and garbles a TIFF that is turned.
        with readable(name), open(source, "rb") as file, Image.open(file) as image:
            pixels = rgb(image, name, notes)
    elif isinstance(source, Image.Image):
        name = "image"
        with readable(name):
            pixels = rgb(source, name, notes)
    else:
        name = "array"
        pixels = rgb(Image.fromarray(checked(np.asarray(source), notes)), name, notes)
    digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
    return Picture(pixels, name, digest, tuple(notes))


def checked(array: np.ndarray, notes: list[str]) -> np.ndarray:
    """An array that a user gave, as uint8."""
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,), (4,)) or not array.size:
        raise UserError(
            f"an array of shape {array.shape}: a picture is [height width 3], [height width 4] with alpha or "
            "[height width] in grey, with at least one pixel; give it one of these shapes"
        )
    if np.issubdtype(array.dtype, np.floating):
        notes.append("rounded to 8 bits")
        return eight_bits(array, 1, "array")
    if array.dtype != np.uint8:
        raise UserError(f"an array of {array.dtype}: a picture is uint8, or floating point in [0, 1]; convert it")
    return array


def eight_bits(values: np.ndarray, top: int, name: str) -> np.ndarray:
    """Values in [0, top] to the nearest of [0, 255]."""
    if not (values.min() >= 0 and values.max() <= top):  # so that NaN is refused too
        raise UserError(
            f"{name}: {values.dtype} values from {values.min():g} to {values.max():g}: they have to lie in [0, {top}]; "
            "scale or clip them first"
        )
    return np.rint(values.astype(np.float32) * (255 / top)).astype(np.uint8)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Whatever a decoder makes of a file that it cannot read becomes a UserError; its warnings are not for users."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file; give the path of a picture") from error
    except IsADirectoryError as error:
        raise UserError(f"{name} is a folder; name a picture in it") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name}: not a picture in a known format; save it as PNG, JPEG or WebP") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: cannot be read ({reason}); save it again, as PNG or JPEG") from error


def rgb(image: Image.Image, name: str, notes: list[str]) -> np.ndarray:
    """Pixels [H W 3] uint8 of an image of any mode: of the frame it is at, turned as its EXIF says."""
    if 0 in image.size:
        raise UserError(f"{name}: {image.width}x{image.height}: a picture has at least one pixel; give another")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        notes.append(f"frame {image.tell() + 1} of {frames}")
    if image.getexif().get(ExifTags.Base.Orientation) in range(2, 9):
        notes.append("turned by its EXIF orientation")
    image.load()  # here a TIFF turns itself
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # Pillow would clip these to [0, 255]
        notes.append("rounded to 8 bits" if image.mode == "F" else "16 bits to 8")
        image = Image.fromarray(eight_bits(np.asarray(image), 1 if image.mode == "F" else 0xFFFF, name))
    if image.mode not in ("RGB", "RGBA"):
        grey = Image.getmodebase(image.mode) == "L"
        notes.append(f"{'grey' if grey else 'palette' if image.mode[0] == 'P' else image.mode} to RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if np.asarray(image)[..., 3].min() < 255:
            notes.append("alpha laid over white")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


# The size of the video


def area_size(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """The size of about `area` pixels in a picture's shape, each side cut to a multiple of its own.

    Exact, so that 832x480 at 832 * 480 pixels gives 832x464: the root falls just below 480, officially too.
    Raises UserError where a side comes to nothing. Source: official wan/image2video.py of Wan 2.1 and 2.2.
    """
    ratio = height / width
    sides = math.sqrt(area / ratio), math.sqrt(area * ratio)
    return whole((width, height), area, multiple, sides)


def fitting_size(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """The size of at most `area` pixels that is nearer to a picture's shape: one side cut to a multiple, and the other
    as long as the area allows; or the other way round.

    Raises UserError where a side comes to nothing. Source: official wan/utils/utils.py of Wan 2.2, best_output_size.
    """
    ratio = width / height
    across = (area * ratio) ** 0.5
    wide, tall = whole((width, height), area, multiple, (across, area / across))

    def distance(size: tuple[int, int]) -> float:
        other = size[0] / size[1]
        return max(ratio / other, other / ratio)

    return min((cut(area / tall, multiple), tall), (wide, cut(area / wide, multiple)), key=distance)


def cut(side: float, multiple: int) -> int:
    return int(side // multiple * multiple)


def whole(picture: tuple[int, int], area: int, multiple: int, sides: tuple[float, float]) -> tuple[int, int]:
    width, height = (cut(side, multiple) for side in sides)
    if not (width and height):
        raise UserError(
            f"a picture of {picture[0]}x{picture[1]}: a video of its shape with {area} pixels, in multiples of "
            f"{multiple}, would be {width}x{height}; crop it, or give --size"
        )
    return width, height


# To that size: float32 [H W 3] in [0, 1]. A picture that has it keeps its values bit for bit.


def to_float32(pixels: np.ndarray) -> np.ndarray:
    """uint8 or floating point in [0, 1] to float32 in [0, 1]."""
    return pixels.astype(np.float32) / np.float32(255 if pixels.dtype == np.uint8 else 1)


def cover(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scaled until both sides fill `size`, then cut around the centre. Source: official wan/textimage2video.py."""
    image = scaled(pixels, size, max)
    left, top = (image.width - size[0]) // 2, (image.height - size[1]) // 2
    return to_float32(np.asarray(image.crop((left, top, left + size[0], top + size[1]))))


def pad(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scaled until both sides fit into `size`, in the middle of black."""
    image = scaled(pixels, size, min)
    canvas = Image.new("RGB", size)
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return to_float32(np.asarray(canvas))


def scaled(pixels: np.ndarray, size: tuple[int, int], choose: Callable[[float, float], float]) -> Image.Image:
    image = Image.fromarray(pixels)
    scale = choose(size[0] / image.width, size[1] / image.height)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), LANCZOS)


def stretch(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Either side scaled by itself, as diffusers' VaeImageProcessor does."""
    return to_float32(np.asarray(Image.fromarray(pixels).resize(size, LANCZOS)))


FITS = {"crop": cover, "pad": pad, "stretch": stretch}  # how a picture of another shape comes to a size


def stretch_bicubic(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Either side scaled by itself, as Wan 2.1 and 2.2 14B do: a filter that does not widen where it makes pictures
    smaller and, without clipping, goes beyond [0, 1] at edges. Source: official wan/image2video.py.

    pixels: uint8 or floating point in [0, 1].
    """
    return resize(resize(to_float32(pixels), 1, size[0]), 0, size[1])


def resize(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    """One axis of float32 values to another size by cubic convolution (Keys 1981) of the four nearest, the edges
    repeated: `torch.nn.functional.interpolate(mode="bicubic", align_corners=False)`. It does not clip.
    """
    length = image.shape[axis]
    # float32 as in PyTorch, rounded once: far from the origin the position between two pixels is coarse
    place = ((np.arange(size) + 0.5) * np.float64(np.float32(length / size)) - 0.5).astype(np.float32)
    start = np.floor(place)
    taps = np.arange(-1, 3)
    weights = cubic((place - start)[:, None] - taps.astype(np.float32))
    index = np.clip(start.astype(np.int64)[:, None] + taps, 0, length - 1)
    shape = [size if i == axis else 1 for i in range(image.ndim)]
    return sum(image.take(index[:, i], axis) * weights[:, i].reshape(shape) for i in range(len(taps)))


def cubic(distance: np.ndarray) -> np.ndarray:
    x, a = np.abs(distance), np.float32(BICUBIC)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, far)
