"""Names and shapes of the tensors of the published checkpoints, from tests/manifests."""

import gzip
import json
import math
from pathlib import Path

MANIFESTS = Path(__file__).parent / "manifests"
FLF2V = "wan2.1_flf2v_14b_dit"


def manifest(name: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of an official checkpoint. There is none of first and last frame to video: it is made from that of
    image to video and the one tensor more that the official code has, positions of two images' tokens.
    """
    if name == FLF2V:
        return manifest("wan2.1_i2v_14b_dit") | {"img_emb.emb_pos": (1, 2 * 257, 1280)}
    shapes = json.loads(gzip.decompress((MANIFESTS / f"{name}.json.gz").read_bytes()))
    return {tensor: tuple(shape) for tensor, shape in shapes.items()}


def hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of full size that takes no room: all of it is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
