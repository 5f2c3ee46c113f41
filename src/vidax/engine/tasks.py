"""Jobs and their files: every setting and every file is checked before a weight is loaded, so that a mistake in line 90
costs no hour; then each video is written as it is decoded.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vidax.engine.clip import Clip, as_dtype, tags
from vidax.engine.engine import Engine
from vidax.engine.jobs import Wish, each
from vidax.engine.request import IMAGES, Request
from vidax.engine.work import OF_THE_RUN, Job
from vidax.errors import UserError
from vidax.media.files import FrameWriter, free, json_text, names, record, slug, write_json
from vidax.media.image import Picture
from vidax.media.output import contact_sheet, open_writer, sheet_indices, write_png
from vidax.parallel import processes

# A video that differs in these alone need not be made again.
CIRCUMSTANCES = (*OF_THE_RUN, "mesh", "residency", "text_residency")


@dataclasses.dataclass(frozen=True)
class Task:
    """A video and its file. `writer` is None where the file is there already, made with the same settings.

    fields: what was asked for, with the seed that was drawn where that was -1.
    """

    place: str
    fields: dict[str, Any]
    request: Request
    metadata: dict[str, Any]
    path: Path
    writer: FrameWriter | None

    @property
    def job(self) -> Job:
        assert self.writer is not None, f"{self.path} is done"
        return Job(request=self.request, frames_dtype=self.writer.dtype.__name__)


def plan(engine: Engine, wishes: Sequence[Wish], output: str | None, *, overwrite: bool, resume: bool) -> list[Task]:
    """Check every setting and every file. Raises UserError with all that is wrong.

    output: the file of a single video, or the folder of many; names in it follow from prompts and seeds.
    resume: leave alone what an earlier run has finished with the same settings.
    """
    if output and len(wishes) > 1 and not is_folder(output):
        raise UserError(f"{output}: one file for {len(wishes)} videos; give a folder, and create it first")
    taken: dict[Path, str] = {}  # by record, which clip.mp4 and clip.npy would share

    def task(place: str, wish: Wish) -> Task:
        fields = dict(wish.fields)
        own = fields.pop("output", None)
        request = engine.request(**fields)
        fields["seed"] = request.seed
        metadata = engine.describe(request)
        path, named = choose_path(output, own, request)
        if named and record(path) in taken:
            other = "another seed" if taken[record(path)] == place else taken[record(path)]
            raise UserError(f"output {path} is already that of {other}; leave it out, or name each its own")

        def usable(path: Path) -> bool:
            return record(path) not in taken and (overwrite or free(path) or (resume and is_done(path, metadata)))

        path = path if named else next(filter(usable, names(path)))
        taken[record(path)] = place
        if resume and not overwrite and is_done(path, metadata):
            return Task(place, fields, request, metadata, path, None)
        writer = open_writer(
            path,
            frames=request.frames,
            height=request.height,
            width=request.width,
            fps=request.fps,
            tags=tags(metadata),
            overwrite=overwrite,
        )
        return Task(place, fields, request, metadata, path, writer)

    return each(((wish.place, wish) for wish in wishes), task)


def shared_jobs(engine: Engine, tasks: Sequence[Task] = ()) -> list[Job]:
    """The jobs of process 0's tasks, on every process. The others have no tasks, and their disks may be other ones, so
    that they are sent the images.
    """
    jobs = [task.job for task in tasks]
    told = processes.from_first(json.dumps([(portable(task), task.job.frames_dtype) for task in tasks]))
    with processes.in_step(engine.shared):
        if not processes.first():
            jobs = [Job(request=engine.request(**received(f)), frames_dtype=dtype) for f, dtype in json.loads(told)]
    return jobs


def portable(task: Task) -> dict[str, Any]:
    """A task's fields, with the images themselves."""
    if processes.count() == 1:
        return task.fields
    images = zip(IMAGES, task.request.images, strict=False)
    return task.fields | {name: picture.packed() for name, picture in images}


def received(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {name: Picture.unpacked(fields[name]) for name in IMAGES if fields.get(name) is not None}


def choose_path(output: str | None, own: str | None, request: Request) -> tuple[Path, bool]:
    """A job's file, and whether the user named it: its own `output`, in the folder of all if that is relative."""
    folder, name = (Path(output), own) if output and is_folder(output) else (Path("."), own or output)
    if name and not is_folder(os.path.join(folder, name)):
        return folder / name, True
    folder = folder / (name or "")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; create it first")
    return folder / f"{slug(request.prompt)}-{request.seed}{'.png' if request.frames == 1 else '.mp4'}", False


def is_folder(path: str) -> bool:
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


def is_done(path: Path, metadata: dict[str, Any]) -> bool:
    """Whether `path` is there with a record of the same model and settings."""
    try:
        found = json.loads(record(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = {name: value for name, value in metadata.items() if name not in CIRCUMSTANCES}
    same = isinstance(found, dict) and {name: found.get(name) for name in wanted} == json.loads(json_text(wanted))
    return same and path.is_file()


def write(task: Task, clip: Clip, *, overwrite: bool = False, sheet: bool = False) -> list[Path]:
    """Write a clip as it is decoded, its record, and perhaps a contact sheet. Returns the paths, but the record's."""
    writer = task.writer
    assert writer is not None, f"{task.path} is done"
    shown = set(sheet_indices(task.request.frames, 12)) if sheet else set()
    kept = []
    with writer:
        for frames in clip.frames:
            kept += [frame for index, frame in enumerate(frames, writer.written) if index in shown]
            writer.write(frames)
    clip.metadata["output"] = str(writer.path)
    write_json(record(writer.path), clip.metadata, overwrite=overwrite)
    if not sheet:
        return [writer.path]
    pictures = [as_dtype(frame, np.uint8) for frame in kept]
    path = writer.path.with_name(f"{writer.path.stem}-frames.png")
    return [writer.path, write_png(path, contact_sheet(pictures), overwrite=overwrite)]
