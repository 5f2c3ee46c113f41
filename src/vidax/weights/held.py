"""Checkpoints as this engine holds them: our names, layers stacked, shapes and dtypes as on the device.

`write` turns a component in any published layout into one such safetensors file, with its config in the header.
Loading it renames, transposes and casts nothing.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.nn import named_leaves
from vidax.weights.checkpoint import DTYPES, Checkpoint
from vidax.weights.load import read_slice
from vidax.weights.mapping import Mapping, check_names

HELD = Mapping(held=True)
CONFIG = "vidax.config"  # in the header's metadata


def held_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of the component's config; lists of the file become tuples."""
    try:
        fields = json.loads(checkpoint.metadata[CONFIG])
    except (KeyError, ValueError):
        raise UserError(f"{checkpoint.path}: its header has no {CONFIG}; convert the checkpoint again") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def write(
    spec_tree: Any,
    checkpoint: Checkpoint,
    mapping: Mapping,
    config: Any,
    path: Path,
    progress: Callable[[int], None],
) -> str:
    """Write the parameters of `spec_tree` to `path`; returns the file's SHA-256.

    Host memory stays near the largest parameter. `progress` is called with the bytes written so far.
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    match = check_names(spec_tree, mapping, shapes, source=str(checkpoint.path))
    leaves = list(zip(match.leaves, (spec for _, spec in named_leaves(spec_tree)), strict=True))
    leaves.sort(key=lambda pair: -jnp.dtype(pair[1].dtype).itemsize)  # wide dtypes first: every tensor is aligned
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "vidax", CONFIG: json.dumps(dataclasses.asdict(config))}}
    end = 0
    for leaf, spec in leaves:
        begin, end = end, end + spec.nbytes
        dtype = names[np.dtype(spec.dtype)]
        header[leaf.path] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, done = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: Any) -> None:
            file.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for leaf, spec in leaves:
            tensors = leaf.tensors(checkpoint)
            values = read_slice(leaf.spec, tensors, tuple(map(range, spec.shape)))
            put(values.view(np.uint8).reshape(-1).data)
            for tensor in tensors:
                tensor.give_back()
            done += spec.nbytes
            progress(done)
    return digest.hexdigest()
