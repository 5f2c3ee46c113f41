"""The folder layout of diffusers: `model_index.json` names the components, each has a sub-folder of its own."""

from pathlib import Path
from typing import Any

from vidax.errors import UserError
from vidax.weights.checkpoint import Checkpoint, read_json
from vidax.weights.files import open_checkpoint

CONFIGS = ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json")


class Folder:
    """A pipeline that diffusers saved. `index` is its `model_index.json`, with options such as `boundary_ratio`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder")
        if not (self.path / "model_index.json").exists():
            raise UserError(
                f"{self.path}: holds no model_index.json; give the folder of a whole pipeline, not of a component"
            )
        self.index = read_json(self.path / "model_index.json")

    @property
    def components(self) -> dict[str, str]:
        """Component to class name, without the optional ones that diffusers lists as [null, null]."""
        pairs = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        return {name: str(kind) for name, (_, kind) in pairs.items() if kind is not None}

    @property
    def pipeline(self) -> str:
        """The class name of the whole pipeline."""
        if not isinstance(name := self.index.get("_class_name"), str):
            raise UserError(f"{self.path / 'model_index.json'}: names no _class_name; download it again")
        return name

    def class_name(self, component: str) -> str:
        if component not in self.components:
            raise UserError(f"{self.path}: has no component {component}; it has {', '.join(self.components) or 'none'}")
        return self.components[component]

    def folder(self, component: str) -> Path:
        """The sub-folder of a component."""
        self.class_name(component)
        if not (folder := self.path / component).is_dir():
            raise UserError(
                f"{self.path}: model_index.json names {component}, but there is no such sub-folder; download it"
            )
        return folder

    def config(self, component: str) -> dict[str, Any]:
        folder = self.folder(component)
        for name in CONFIGS:
            if (folder / name).exists():
                return read_json(folder / name)
        raise UserError(f"{folder}: holds no configuration ({' or '.join(CONFIGS)}); download it again")

    def checkpoint(self, component: str) -> Checkpoint:
        return open_checkpoint(self.folder(component))
