"""The command line: one function per subcommand. Settings and progress go to stderr; stdout has the result alone."""

import argparse
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vidax import __version__
from vidax.errors import UserError

REQUEST_FIELDS = (
    "size",
    "frames",
    "fps",
    "steps",
    "guidance_scale",
    "flow_shift",
    "solver",
    "negative_prompt",
    "seed",
    "noise",
)

PARTS = ("transformer", "vae", "text-encoder", "tokenizer")


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest flag or command for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"vidax: {message}\n")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            if not known or not flag.startswith("-"):
                self.error(f"{flag!r} is one argument too many; put the prompt in quotes")
            near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            self.error(f"unknown flag {flag}; {hint}'{self.prog} --help' lists all")
        return found, unknown


def parser() -> Parser:
    top = Parser(
        prog="vidax", description="Generate video with open video diffusion models in JAX.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"vidax {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    make = commands.add_parser("generate", help="make a video from a prompt", allow_abbrev=False)
    make.set_defaults(run=generate)
    make.add_argument("prompt", metavar="PROMPT")
    make.add_argument("--model", metavar="NAME|DIR", help="a model's name, folder or Hugging Face repository (demo)")
    for part in PARTS:
        make.add_argument(f"--{part}", metavar="FILE|DIR", help="in the place of the model's own, in any layout")
    make.add_argument("--size", type=size, metavar="WxH", help="width x height in pixels")
    make.add_argument("--frames", type=int, metavar="N")
    make.add_argument("--fps", type=int, metavar="N", help="frames per second of the file")
    make.add_argument("--steps", type=int, metavar="N", help="denoising steps")
    make.add_argument("--guidance-scale", type=float, metavar="G", help="1 turns guidance off")
    make.add_argument("--flow-shift", type=float, metavar="S", help="above 1, more steps at high noise")
    make.add_argument("--solver", metavar="unipc|euler")
    make.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from")
    make.add_argument("--seed", type=int, metavar="N", help="42 unless given; -1 draws one")
    make.add_argument("--noise", metavar="torch|jax", help="whose random numbers the seed starts (torch)")
    make.add_argument(
        "--dtype", default="bfloat16", metavar="bfloat16|float32", help="of the matrix products (bfloat16)"
    )
    make.add_argument("--output", metavar="FILE|DIR", help=".mp4, .npy (float32 in [0, 1]) or .png (one frame)")
    make.add_argument("--overwrite", action="store_true", help="replace an existing output")
    make.add_argument(
        "--contact-sheet", action="store_true", help="also write a PNG that shows the frames side by side"
    )
    make.add_argument("--quiet", action="store_true", help="say nothing but errors")
    make.add_argument("--json", action="store_true", help="print the metadata on stdout")

    cards = commands.add_parser("models", help="list the models", allow_abbrev=False)
    cards.set_defaults(run=models)
    cards.add_argument("--json", action="store_true")
    return top


def size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write width x height, for example 832x480") from None


def generate(arguments: argparse.Namespace) -> None:
    import numpy as np

    from vidax.engine.engine import load, tags
    from vidax.media.files import write_json
    from vidax.media.output import contact_sheet, open_writer, to_uint8, write_png

    parts = {part.replace("-", "_"): getattr(arguments, part.replace("-", "_")) for part in PARTS}
    engine = load(arguments.model, **parts, dtype=arguments.dtype)
    given = {name: getattr(arguments, name) for name in REQUEST_FIELDS}
    request = engine.request(arguments.prompt, **given)
    path = output_path(arguments.output, request.prompt, request.seed, request.frames)
    metadata = engine.describe(request)
    writer = open_writer(
        path,
        frames=request.frames,
        height=request.height,
        width=request.width,
        fps=request.fps,
        tags=tags(metadata),
        overwrite=arguments.overwrite,
    )
    if not arguments.quiet:
        print_settings(metadata)
    with progress_bar(arguments.quiet) as progress, writer:
        kept: list[np.ndarray] = []
        for frames in engine.run(request, writer.dtype.__name__, metadata, progress):
            writer.write(frames)
            if arguments.contact_sheet:
                kept.extend(frames if frames.dtype == "uint8" else to_uint8(frames * 2 - 1))
    metadata["output"] = str(writer.path)
    write_json(writer.path.with_suffix(".json"), metadata, overwrite=arguments.overwrite)
    written = [writer.path]
    if arguments.contact_sheet:
        sheet = writer.path.with_name(f"{writer.path.stem}-frames.png")
        written.append(write_png(sheet, contact_sheet(kept), overwrite=arguments.overwrite))
    if arguments.json:
        print(json.dumps(metadata, indent=2, ensure_ascii=False))
    elif not arguments.quiet:
        print(*written, sep="\n")


def models(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from vidax.models.registry import CARDS

    if arguments.json:
        print(json.dumps([asdict(card) for card in CARDS.values()], indent=2, ensure_ascii=False))
        return
    for card in CARDS.values():
        width, height = card.size
        where = "ships with vidax" if card.embedded else f"weights: {card.repository}"
        print(
            f"{card.name:17} {card.title}\n{'':17} {width}x{height}, {card.frames} frames, {card.steps} steps; {where}"
        )


def output_path(output: str | None, prompt: str, seed: int, frames: int) -> Path:
    """The file to write: the one that was named, or a free name in the named or the current folder."""
    from vidax.media.files import free_name, slug

    if output and not Path(output).is_dir() and not output.endswith(("/", os.sep)):
        return Path(output)
    folder = Path(output or ".")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; create it first")
    return free_name(folder, f"{slug(prompt)}-{seed}", ".png" if frames == 1 else ".mp4")


def print_settings(metadata: dict[str, Any]) -> None:
    """Every setting and where it comes from, one line each."""
    origins = metadata["origins"]
    for name in ("model", "device", "dtype", "attention"):
        print(f"  {name:16} {metadata[name]}", file=sys.stderr)
    for name, origin in origins.items():
        value = metadata[name]
        if value is not None:
            text = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
            print(f"  {name.replace('_', ' '):16} {text or repr(text)}  ({origin})", file=sys.stderr)


@contextlib.contextmanager
def progress_bar(quiet: bool):
    """A line per phase on stderr: what is done, seconds per step, time left."""
    from vidax.engine.engine import Silent

    if quiet:
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class StepSeconds(ProgressColumn):
        def render(self, task) -> Text:
            if task.description != "denoise" or not task.completed:
                return Text("")
            speed = task.finished_speed or task.speed
            return Text(f"{task.completed:.0f}/{task.total:.0f}" + (f", {1 / speed:.2f} s/step" if speed else ""))

    class Reporter:
        def phase(self, name: str, total: int) -> None:
            self.task = bars.add_task(name, total=total)

        def advance(self, done: int) -> None:
            bars.update(self.task, completed=done)

    columns = (
        TextColumn("  {task.description:20}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        StepSeconds(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield Reporter()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 2 for what the user can put right, 130 when interrupted."""
    words = [same_flag(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        if words and not words[0].startswith("-"):
            check_command(words[0])
        arguments = parser().parse_args(words)
        arguments.run(arguments)
    except UserError as error:
        print(f"vidax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vidax: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def check_command(word: str) -> None:
    """argparse lists the commands, but does not say which is nearest."""
    commands = ("generate", "models")
    if word not in commands:
        near = difflib.get_close_matches(word, commands, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown command {word!r}; {hint}there are {' and '.join(commands)}")


def same_flag(word: str) -> str:
    """`--guidance_scale=3` as `--guidance-scale=3`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
