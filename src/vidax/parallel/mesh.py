"""The device mesh: three axes, always present, any of them may be 1.

data    the batch; the two branches of guidance count as batch
seq     the tokens of a video; storage of the weights too, which are gathered layer by layer
tensor  heads and MLP columns
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from vidax.errors import UserError, did_you_mean

AXES = ("data", "seq", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """How many parts each axis has."""

    data: int = 1
    seq: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.seq, self.tensor

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(AXES, self.sizes, strict=True))


def parse(text: str) -> MeshShape:
    """`data=2,seq=4`, in any order; an axis that is not named is 1. Raises UserError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES:
            hint = did_you_mean(name, AXES)
            raise UserError(
                f"mesh {text!r}: {name!r} is no axis; {hint}the axes are {', '.join(AXES)}, as in seq=4 or data=2,seq=4"
            )
        if name in sizes:
            raise UserError(f"mesh {text!r}: {name} is given twice; give each axis once")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise UserError(f"mesh {text!r}: {name} is {number!r}; give a whole number of 1 or more, as in {name}=4")
        sizes[name] = int(number)
    return MeshShape(**sizes)


def choose(devices: int, heads: int, branches: int) -> MeshShape:
    """The mesh that `auto` stands for: `seq` alone if the heads of attention divide by the devices, else `data` for the
    two branches of guidance if that can be, and `seq` for the rest.

    Tokens are split first because all that a block computes is then split, and what is sent are bfloat16 activations
    and weights; `tensor` repeats the residual stream on each device and sums it in float32.
    """
    data = 2 if heads % devices and branches == 2 and devices % 2 == 0 else 1
    return MeshShape(data=data, seq=devices // data)


def make(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of this shape whose neighbours are neighbours in the hardware where it has a topology.

    devices: all of `jax.devices()` if None. Fewer than those may be used, but not by several processes, each of which
        needs a part. Raises UserError where they do not suffice.
    """
    devices = jax.devices() if devices is None else list(devices)
    if shape.devices > len(devices):
        have = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
        raise UserError(
            f"mesh {shape} has {shape.devices} devices, and there {'is' if len(devices) == 1 else 'are'} {have} "
            f"({devices[0].device_kind}); give a mesh whose sizes multiply to at most {len(devices)}"
            + ("; --cpu-devices N makes a CPU N devices for trying out" if devices[0].platform == "cpu" else "")
        )
    owners = len({device.process_index for device in devices})
    if shape.devices < len(devices) and owners > 1:
        raise UserError(
            f"mesh {shape} has {shape.devices} of {len(devices)} devices, which belong to {owners} processes; "
            f"give a mesh whose sizes multiply to {len(devices)}"
        )
    chosen = devices[: shape.devices]
    return jax.make_mesh(shape.sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=chosen)


def check(mesh: Mesh) -> Mesh:
    """A mesh that a user has made. Raises UserError unless its axes are ours, sharded by the compiler."""
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise UserError(
            f"the mesh has axes {mesh.axis_names} of types {tuple(kind.name for kind in mesh.axis_types)}; give one "
            f"with the axes {AXES}, all Auto, or a text such as 'data=2,seq=4'"
        )
    return mesh


def default_devices() -> list[jax.Device]:
    """What `auto` makes a mesh of: every accelerator, or one CPU device, since several would share the same cores."""
    devices = jax.devices()
    return devices[:1] if devices[0].platform == "cpu" and jax.process_count() == 1 else devices


def cpu_devices(count: int) -> list[jax.Device]:
    """That many virtual devices of the CPU, and as many of each other process where there are several.

    To be called before JAX has looked for devices, and after `processes.start`. Raises UserError.
    """
    if count < 1:
        raise UserError(f"{count} CPU devices: give a number of 1 or more, as in --cpu-devices 8")
    with contextlib.suppress(RuntimeError):  # JAX has its devices already; there may be enough
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices(backend="cpu")
    if len(devices) < count:
        raise UserError(
            f"{count} CPU devices: JAX has {len(devices)}, set by XLA_FLAGS or earlier in this process; "
            f"give at most {len(devices)}, or start anew without that flag"
        )
    return devices[:count] if jax.process_count() == 1 else jax.devices("cpu")


def shape_of(mesh: Mesh) -> MeshShape:
    return MeshShape(**mesh.shape)
