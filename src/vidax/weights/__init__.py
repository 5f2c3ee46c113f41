"""Published checkpoints to trees of arrays: open files, match their names with ours, read what each device needs."""

from vidax.weights.checkpoint import Checkpoint, Tensor
from vidax.weights.diffusers_folder import Folder
from vidax.weights.files import open_checkpoint
from vidax.weights.layouts import Component
from vidax.weights.load import load
from vidax.weights.mapping import Mapping, check_names, checkpoint_names

__all__ = [
    "Checkpoint",
    "Component",
    "Folder",
    "Mapping",
    "Tensor",
    "check_names",
    "checkpoint_names",
    "load",
    "open_checkpoint",
]
