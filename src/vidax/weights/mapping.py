"""The vocabulary in which a family says where its parameters are in a published checkpoint: data, no code.

Names are strict in both directions: a parameter without a tensor, a tensor without a parameter, a shape that differs
and two parameters of one name are errors, found before any weight is read.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping as Map
from collections.abc import Sequence
from typing import Any, NamedTuple

from vidax.errors import UserError
from vidax.nn import Spec, is_spec, named_leaves
from vidax.weights.checkpoint import Checkpoint, Tensor, few

PART = re.compile(r"(.+)\[(\d+)/(\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapping:
    r"""How our parameters are called in one layout of a checkpoint.

    renames: (pattern, replacement) of `re.sub`, applied one after another to our dotted path, such as
             "blocks.self_attn.q.weight". The name of a stacked parameter has `{}` where its layer's number goes:
             (r"^blocks\.", "blocks.{}."). Where a tensor is several parameters of ours, each is named as one of equal
             parts along its first axis: (r"\.q\.weight$", ".qkv.weight[0/3]").
    prefix:  what stands before every name in this checkpoint, such as "model.diffusion_model.". The other fields are
             without it.
    skips:   (pattern, reason) for tensors that are left unread on purpose, by `re.search` in the checkpoint's name.
    aliases: (name, other name) of one tensor in the checkpoint, such as tied embeddings. Either may be stored; where
             both are, they must hold the same values.
    ones:    (our path, n) of parameters whose tensor has n further axes in front, each of size 1.
    held:    the checkpoint has our names, stacks and shapes (`vidax convert`): nothing is renamed or transposed.
    """

    renames: tuple[tuple[str, str], ...] = ()
    skips: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    ones: tuple[tuple[str, int], ...] = ()
    prefix: str = ""
    held: bool = False

    def rename(self, path: str) -> str:
        for pattern, replacement in self.renames:
            path = re.sub(pattern, replacement, path)
        return self.prefix + path

    def others(self, name: str) -> list[str]:
        """Further names that the tensor `name` may have."""
        return [self.prefix + other for first, other in self.aliases if name == self.prefix + first]

    def skip(self, name: str) -> str | None:
        """The reason why the tensor `name` is not read, or None."""
        if not name.startswith(self.prefix):
            return None
        bare = name.removeprefix(self.prefix)
        return next((reason for pattern, reason in self.skips if re.search(pattern, bare)), None)


class Leaf(NamedTuple):
    """A parameter and the checkpoint tensors it is made of: one per layer where it is stacked, else one."""

    path: str
    spec: Spec
    names: tuple[str, ...]

    def tensors(self, checkpoint: Checkpoint) -> list[Tensor]:
        """The tensors of these names, or the parts of tensors."""
        parts = (part_of(name) for name in self.names)
        return [
            checkpoint[whole].part(index, count) if count > 1 else checkpoint[whole] for whole, index, count in parts
        ]


class Match(NamedTuple):
    """Every tensor of a checkpoint accounted for.

    leaves:  in tree order, with the names under which this checkpoint holds them.
    skipped: name to reason.
    twins:   pairs of names of one tensor, both stored.
    """

    leaves: list[Leaf]
    skipped: dict[str, str]
    twins: list[tuple[str, str]]


def part_of(name: str) -> tuple[str, int, int]:
    """("qkv.weight", 0, 3) for "qkv.weight[0/3]", and (name, 0, 1) for the name of a whole tensor."""
    part = PART.fullmatch(name)
    return (part[1], int(part[2]), int(part[3])) if part else (name, 0, 1)


def checkpoint_names(spec_tree: Any, mapping: Mapping) -> list[Leaf]:
    """Where each parameter is to be found, in tree order. Opens nothing."""
    leaves = []
    for path, spec in named_leaves(spec_tree):
        assert is_spec(spec), f"{path} holds {spec!r} where a Spec belongs: a field without static()?"
        name = mapping.rename(path)
        if mapping.held:
            leaves.append(Leaf(path, spec.held(), (name,)))
            continue
        assert name.count("{}") == spec.stacked, (
            f"{path} ({spec.axes}) is renamed {name}: one {{}} if stacked, else none"
        )
        if ones := dict(mapping.ones).get(path):
            assert spec.transpose is None, f"{path} is transposed, and has {ones} axes in front"
            spec = dataclasses.replace(spec, stored=(1,) * ones + spec.stored_shape)
        layers = spec.shape[0] if spec.stacked else 1
        leaves.append(Leaf(path, spec, tuple(name.replace("{}", str(layer)) for layer in range(layers))))
    owners = collections.defaultdict(list)
    for leaf in leaves:
        for name in leaf.names:
            owners[name].append(leaf.path)
    if doubled := [f"{name} ({' and '.join(paths)})" for name, paths in owners.items() if len(paths) > 1]:
        raise UserError(f"{len(doubled)} tensors are named by two parameters: {few(doubled)}; correct the renames")
    parts = collections.defaultdict(list)
    for name in owners:
        whole, index, count = part_of(name)
        parts[whole].append((index, count))
    for whole, given in parts.items():
        assert sorted(given) == [(i, given[0][1]) for i in range(given[0][1])], f"not all parts of {whole}: {given}"
    return leaves


def check_names(
    spec_tree: Any,
    mapping: Mapping,
    shapes: Map[str, Sequence[int]],
    *,
    source: str = "the checkpoint",
    files: Map[str, str] | None = None,
) -> Match:
    """Match the parameters with a checkpoint's names and shapes, or say all that is wrong in one UserError.

    source: what the error calls the checkpoint. files: name to the file that holds it, where there are several.
    """
    leaves: list[Leaf] = []
    twins: list[tuple[str, str]] = []
    expected: dict[str, tuple[int, ...]] = {}
    for leaf in checkpoint_names(spec_tree, mapping):
        stored = []
        for name in leaf.names:
            first, *rest = [n for n in (name, *mapping.others(name)) if n in shapes] or [name]
            stored.append(first)
            twins += [(first, other) for other in rest]
            whole, _, count = part_of(first)
            rows = (count * size for size in leaf.spec.stored_shape[:1])
            expected |= dict.fromkeys([whole, *rest], (*rows, *leaf.spec.stored_shape[1:]))
        leaves.append(leaf._replace(names=tuple(stored)))
    skipped = {name: reason for name in shapes if (reason := mapping.skip(name)) is not None}
    assert not (both := skipped.keys() & expected.keys()), f"skipped but needed: {few(sorted(both))}"

    def at(name: str) -> str:
        return f"{name} in {files[name]}" if files and name in files else name

    faults = {
        "missing": [f"{name} {list(shape)}" for name, shape in expected.items() if name not in shapes],
        "unexpected": [
            f"{at(name)} {list(shapes[name])}" for name in shapes if name not in expected and name not in skipped
        ],
        "of another shape": [
            f"{at(name)} is {list(shapes[name])} where the model has {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and tuple(shapes[name]) != shape
        ],
    }
    if any(faults.values()):
        lines = [f"\n  {len(names)} {fault}: {few(names)}" for fault, names in faults.items() if names]
        what = "its tensors are not those of this model; check that it belongs to the model you named and is complete"
        raise UserError(f"{source}: {what}{''.join(lines)}")
    return Match(leaves, skipped, twins)
