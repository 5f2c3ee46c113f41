"""Which component of a model a checkpoint is and in which published layout, told from the names of its tensors.

A family describes its components as data (`Catalogue`); what is here finds, checks and opens them. A component is the
same three things whatever it came from: a config, a checkpoint, and the mapping between our names and the file's.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vidax.errors import UserError
from vidax.weights.checkpoint import Checkpoint, few, read_json
from vidax.weights.files import list_checkpoints, open_checkpoint
from vidax.weights.held import HELD, held_config
from vidax.weights.mapping import Mapping as Names
from vidax.weights.mapping import check_names

# What single-file repacks put before every name, nothing first.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "module.", "first_stage_model.", "vae.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which a component is published.

    markers: names that every such checkpoint has, and that no other component has all of.
    ours:    whether `vidax convert` wrote it, with its config in the header (`weights.held`).
    names:   the mapping for a config; for None one that is right for every parameter that `Kind.numbers` asks for.
    """

    name: str
    markers: tuple[str, ...]
    names: Callable[[Any], Names]
    ours: bool = False


def ours(*markers: str) -> Layout:
    """That of files which `vidax convert` wrote."""
    return Layout(name="vidax", markers=markers, names=lambda config: HELD, ours=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stranger:
    """A checkpoint that is known but not run, so that it can be refused by its name.

    component: what it is taken for.
    number:    (tensor, axis, what it counts, the value wanted), the difference that shows best.
    """

    what: str
    component: str
    markers: tuple[str, ...]
    absent: tuple[str, ...] = ()
    number: tuple[str, int, str, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A component of a family.

    title:   what errors call it.
    classes: what its `config.json` gives as `_class_name` or `model_type`; another file's is not its own.
    numbers: what the shapes of its tensors say: fields of its config.
    config:  the config from (its `config.json` or {}, the file to name in errors, the numbers).
    spec:    the parameters for a config.
    """

    title: str
    layouts: tuple[Layout, ...]
    classes: tuple[str, ...]
    numbers: Callable[["Shapes"], dict[str, Any]]
    config: Callable[[Mapping[str, Any], str, Mapping[str, Any]], Any]
    spec: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalogue:
    """A family's components by name, and the strangers that are taken for them. `title` is the family's.

    optional: those that only some of its models have. folders: what else sub-folders of components are called. Two
    components of one kind are told apart by their folders alone.
    """

    title: str
    kinds: Mapping[str, Kind]
    optional: tuple[str, ...] = ()
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strangers: tuple[Stranger, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """A component on disk, checked tensor by tensor; no weight is read."""

    config: Any
    path: Path
    layout: str
    names: Names

    def checkpoint(self) -> Checkpoint:
        """The files, mapped anew: a phase that lets go of them gives their pages back."""
        return open_checkpoint(self.path)


class Shapes:
    """The shapes of a checkpoint's tensors by our names of them, for reading off a config."""

    def __init__(self, checkpoint: Checkpoint, names: Names):
        self.checkpoint, self.names = checkpoint, names

    def find(self, parameter: str) -> str | None:
        """The tensor of a parameter, of its first layer where it is stacked."""
        name = self.names.rename(parameter).replace("{}", "0")
        return next((n for n in (name, *self.names.others(name)) if n in self.checkpoint), None)

    def __contains__(self, parameter: str) -> bool:
        return self.find(parameter) is not None

    def layers(self, parameter: str) -> int:
        """How many layers there are if the last that has this parameter is the last."""
        name = self.names.rename(parameter)
        return max(
            (i + 1 for i in range(len(self.checkpoint)) if name.replace("{}", str(i)) in self.checkpoint), default=0
        )

    def name(self, parameter: str) -> str:
        if (name := self.find(parameter)) is None:
            name = self.names.rename(parameter).replace("{}", "0")
            raise UserError(f"{self.checkpoint.path}: has no tensor {name}; it is not complete, download it again")
        return name

    def axes(self, parameter: str) -> int:
        """How many axes a parameter has."""
        return len(self.checkpoint[self.name(parameter)].shape)

    def size(self, parameter: str) -> int:
        """How many values a parameter has, whatever its axes."""
        return math.prod(self.checkpoint[self.name(parameter)].shape)

    def shape(self, parameter: str, axes: int) -> tuple[int, ...]:
        """The shape of a parameter, of its first layer where it is stacked."""
        name = self.name(parameter)
        shape = self.checkpoint[name].shape
        if len(shape) != axes or 0 in shape:
            raise UserError(f"{self.checkpoint.path}: {name} is {list(shape)}, where {axes} axes are due; {REDO}")
        return shape


REDO = "take the file of the model that you named"


def matches(checkpoint: Checkpoint, markers: Sequence[str], prefix: str) -> bool:
    return all(prefix + marker in checkpoint for marker in markers)


def identify(catalogue: Catalogue, checkpoint: Checkpoint) -> tuple[str, Layout, str] | None:
    """(component, layout, prefix) of a checkpoint, None if it is none of the family's."""
    for prefix, (name, kind) in itertools.product(PREFIXES, catalogue.kinds.items()):
        for layout in kind.layouts:
            if matches(checkpoint, layout.markers, prefix):
                return name, layout, prefix
    return None


def find_stranger(catalogue: Catalogue, checkpoint: Checkpoint) -> tuple[Stranger, str] | None:
    """(stranger, prefix) of a checkpoint that is known but not run. It may pass for a component of the family's too."""
    for prefix, stranger in itertools.product(PREFIXES, catalogue.strangers):
        absent = not any(prefix + name in checkpoint for name in stranger.absent)
        if absent and matches(checkpoint, stranger.markers, prefix):
            return stranger, prefix
    return None


def refuse(catalogue: Catalogue, checkpoint: Checkpoint, stranger: Stranger, prefix: str) -> UserError:
    text = f"{checkpoint.path}: {stranger.what}"
    if stranger.number is None:
        return UserError(f"{text}; {catalogue.title} does not read it")
    name, axis, label, wanted = stranger.number
    shape = checkpoint[prefix + name].shape if prefix + name in checkpoint else ()
    count = f", {label} {shape[axis]}" if axis < len(shape) else ""
    return UserError(f"{text}{count}; {catalogue.title} takes {label} {wanted}")


def components_in(catalogue: Catalogue, folder: Path, wanted: Collection[str]) -> dict[str, Path]:
    """The wanted components that a folder has: in sub-folders of their names, else among its checkpoints."""
    places = {name: [folder / own for own in own_folders(catalogue, name)] for name in wanted}
    found = {name: there for name, paths in places.items() if (there := [path for path in paths if path.is_dir()])}
    elsewhere = set(found)
    for file in list_checkpoints(folder):
        checkpoint = open_checkpoint(file)
        if known := identify(catalogue, checkpoint):
            name = known[0]
        elif stranger := find_stranger(catalogue, checkpoint):
            name = stranger[0].component
        else:
            continue
        if name in wanted and name not in elsewhere:
            found.setdefault(name, []).append(file)
    for name, files in found.items():
        if len(files) > 1:
            several = f"several of the kind {catalogue.kinds[name].title} ({few([file.name for file in files])})"
            raise UserError(f"{folder}: holds {several}; name the file with {flag(name)}")
    return {name: files[0] for name, files in found.items()}


def own_folders(catalogue: Catalogue, name: str) -> list[str]:
    """What sub-folders of a component are called."""
    return [name, *(folder for component, folder in catalogue.folders.items() if component == name)]


def find_component(catalogue: Catalogue, name: str, path: Path) -> Path:
    """The checkpoint of a component in what the user named: a file, its folder, or the folder of a whole model."""
    if not path.is_dir():
        return path
    apart = any((path / folder).is_dir() for folder in own_folders(catalogue, name))
    if not apart and len(files := list_checkpoints(path)) == 1:
        return files[0]
    if found := components_in(catalogue, path, {name}):
        return find_component(catalogue, name, found[name])
    held = few([file.name for file in list_checkpoints(path)]) or "none"
    raise UserError(f"{path}: holds no {catalogue.kinds[name].title} among its checkpoints ({held})")


def flag(component: str) -> str:
    """The flag of the command line that names a component."""
    return f"--{component.replace('_', '-')}"


def open_component(catalogue: Catalogue, name: str, path: Path) -> Component:
    """The component `name` in a file or folder; see `read_component`."""
    return read_component(catalogue, name, open_checkpoint(find_component(catalogue, name, path)))


def read_component(catalogue: Catalogue, name: str, checkpoint: Checkpoint) -> Component:
    """Read a component's config off its tensors and its `config.json`, and account for every tensor. Reads no weight.

    Raises UserError if the checkpoint is something else, not complete, or not of a kind that the family handles.
    """
    kind = catalogue.kinds[name]
    if stranger := find_stranger(catalogue, checkpoint):
        raise refuse(catalogue, checkpoint, *stranger)
    if (known := identify(catalogue, checkpoint)) is None:
        layouts = " or ".join(dict.fromkeys(layout.name for layout in kind.layouts if not layout.ours))
        raise UserError(
            f"{checkpoint.path}: no {kind.title} of {catalogue.title} in {layouts} layout: "
            f"its {len(checkpoint)} tensors are {few(sorted(checkpoint), 2)}"
        )
    found, layout, prefix = known
    if catalogue.kinds[found] is not kind:
        raise UserError(f"{checkpoint.path}: is the {catalogue.kinds[found].title}, not the {kind.title}; {REDO}")

    def names(config: Any) -> Names:
        return dataclasses.replace(layout.names(config), prefix=prefix)

    numbers = held_config(checkpoint) if layout.ours else kind.numbers(Shapes(checkpoint, names(None)))
    stated, source = own_config(catalogue, kind, checkpoint.path)
    config = kind.config(stated, source, numbers)
    shapes = {tensor: part.shape for tensor, part in checkpoint.items()}
    files = {tensor: part.file.name for tensor, part in checkpoint.items() if part.file != checkpoint.path}
    check_names(kind.spec(config), names(config), shapes, source=str(checkpoint.path), files=files)
    return Component(config=config, path=checkpoint.path, layout=layout.name, names=names(config))


def own_config(catalogue: Catalogue, kind: Kind, checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The `config.json` beside a checkpoint if it is this component's, and the file to name in errors about it.

    Where several checkpoints share a folder, as in official ones, a config.json may be another's.
    """
    file = checkpoint.parent / "config.json"
    if not file.is_file():
        return {}, str(checkpoint)
    config = read_json(file)
    name = config.get("_class_name") or config.get("model_type")
    alone = len(list_checkpoints(file.parent)) == 1
    if name in kind.classes or (name is None and alone):
        return config, str(file)
    if not alone:
        return {}, str(checkpoint)
    raise UserError(f"{file}: describes a {name}; the {kind.title} of {catalogue.title} is a {kind.classes[0]}")


def differences(config: Any, wanted: Any) -> str:
    """In which fields two configs of one class differ: "dim 5120 instead of 1536, layers 40 instead of 30"."""
    names = [field.name for field in dataclasses.fields(wanted)]
    pairs = [(name, getattr(config, name), getattr(wanted, name)) for name in names]
    return ", ".join(f"{name} {found} instead of {other}" for name, found, other in pairs if found != other)
