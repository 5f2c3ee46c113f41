"""The command line: one function per subcommand. Settings and progress go to stderr; stdout has the result alone."""

import argparse
import contextlib
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vidax import __version__
from vidax.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from jax import Device

    from vidax.engine.engine import Engine
    from vidax.engine.jobs import Wish

COMMANDS = ("generate", "plan", "models", "check", "convert", "cache")

# Flags that are fields of a request. A run's seeds make several requests, and its size has three flags.
REQUEST_FIELDS = (
    "frames",
    "fps",
    "steps",
    "guidance_scale",
    "guidance_scale_2",
    "boundary_ratio",
    "dynamic_guidance",
    "image",
    "last_image",
    "fit",
    "vae_tiling",
    "flow_shift",
    "solver",
    "negative_prompt",
    "noise",
)

PLANNED_FIELDS = ("size", "frames", "steps", "guidance_scale", "solver", "vae_tiling")

PARTS = ("transformer", "transformer-2", "vae", "text-encoder", "image-encoder", "tokenizer")


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
    make.add_argument("prompt", nargs="?", metavar="PROMPT")
    make.add_argument("--prompts", metavar="FILE", help="many jobs: a prompt or a JSON object a line; - is stdin")
    make.add_argument("--model", metavar="NAME|DIR", help="a model's name, folder or Hugging Face repository (demo)")
    for part in PARTS:
        make.add_argument(f"--{part}", metavar="FILE|DIR", help="in the place of the model's own, in any layout")
    make.add_argument("--size", type=size, metavar="WxH", help="width x height in pixels; or --width and --height")
    make.add_argument("--width", type=int, help=argparse.SUPPRESS)
    make.add_argument("--height", type=int, help=argparse.SUPPRESS)
    make.add_argument("--frames", "--num-frames", type=int, metavar="N")
    make.add_argument("--fps", type=int, metavar="N", help="frames per second of the file")
    make.add_argument("--steps", "--num-inference-steps", type=int, metavar="N", help="denoising steps")
    make.add_argument("--image", metavar="FILE", help="the first frame; without --size the video has its aspect")
    make.add_argument("--last-image", metavar="FILE", help="the last frame, of a model that takes one")
    make.add_argument("--fit", metavar="crop|pad|stretch", help="how an image comes to the size (crop)")
    make.add_argument("--guidance-scale", type=float, metavar="G", help="1 turns guidance off")
    make.add_argument("--guidance-scale-2", type=float, metavar="G", help="of the second expert, for low noise")
    make.add_argument("--boundary-ratio", type=float, metavar="R", help="of the noise, below which it takes over")
    make.add_argument(
        "--dynamic-guidance",
        action=argparse.BooleanOptionalAction,
        help="a scale that changes from step to step, of a model that knows one",
    )
    make.add_argument("--flow-shift", type=float, metavar="S", help="above 1, more steps at high noise")
    make.add_argument("--solver", metavar="unipc|euler|ddim|dpm", help="the first two or the last two, by the model")
    make.add_argument(
        "--vae-tiling",
        action=argparse.BooleanOptionalAction,
        help="decode in tiles that overlap, for one small device, of a model that can",
    )
    make.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from")
    make.add_argument(
        "--seed", type=seeds, metavar="N[,N...]", help="42 unless given; -1 draws one; 1,2,3 makes three videos"
    )
    make.add_argument("--num-videos", type=int, metavar="N", help="for each prompt and seed: seed, seed + 1, ... (1)")
    make.add_argument("--noise", metavar="torch|jax", help="whose random numbers the seed starts (torch)")
    make.add_argument(
        "--dtype", default="bfloat16", metavar="bfloat16|float32", help="of the matrix products (bfloat16)"
    )
    make.add_argument(
        "--mesh",
        default="auto",
        metavar="AXIS=N,...",
        help="sizes of data, seq and tensor; auto takes all TPUs or GPUs (auto)",
    )
    make.add_argument(
        "--residency", default="auto", metavar="auto|...", help="of the layers: resident, streamed, mixed:r/g (auto)"
    )
    make.add_argument(
        "--stream-from", default="auto", metavar="memory|disk", help="where layers that are not resident wait (auto)"
    )
    make.add_argument("--force", action="store_true", help="try what does not fit in device memory by the plan")
    make.add_argument("--memory-limit", type=float, metavar="GB", help="of each device, at most")
    make.add_argument("--cpu-devices", type=int, metavar="N", help="make the CPU N devices, to try a mesh out")
    make.add_argument("--distributed", action="store_true", help="one of the processes of a TPU slice or Slurm job")
    make.add_argument("--coordinator", metavar="HOST:PORT", help="one of several processes: where process 0 listens")
    make.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    make.add_argument("--process-id", type=int, metavar="I", help="which this one is, from 0")
    make.add_argument("--output", metavar="FILE|DIR", help=".mp4, .npy (float32 in [0, 1]) or .png (one frame)")
    make.add_argument("--overwrite", action="store_true", help="replace an existing output")
    make.add_argument(
        "--contact-sheet", action="store_true", help="also write a PNG that shows the frames side by side"
    )
    make.add_argument("--quiet", action="store_true", help="say nothing but errors")
    make.add_argument("--json", action="store_true", help="print the metadata on stdout; of many jobs, one a line")

    ahead = commands.add_parser(
        "plan",
        help="whether a video fits on a TPU slice and how long it takes, without either",
        description="Compiles the programs of a video for devices that need not be here. Exits with 0 if it fits on "
        "all of them, with 1 if not.",
        allow_abbrev=False,
    )
    ahead.set_defaults(run=plan)
    ahead.add_argument("model", metavar="MODEL", help="a model's name, of which no file is needed, or its folder")
    ahead.add_argument("--topology", nargs="+", metavar="NAME", help="slices or grids, as in v4-8, v5e:2x4")
    ahead.add_argument("--here", action="store_true", help="the devices of this machine")
    ahead.add_argument("--size", type=size, metavar="WxH")
    ahead.add_argument("--frames", "--num-frames", type=int, metavar="N")
    ahead.add_argument("--steps", "--num-inference-steps", type=int, metavar="N")
    ahead.add_argument("--images", type=int, metavar="N", help="how many it is made from (as few as the model takes)")
    ahead.add_argument("--guidance-scale", type=float, metavar="G", help="1 turns guidance off, and halves the work")
    ahead.add_argument("--solver", metavar="unipc|euler|ddim|dpm")
    ahead.add_argument("--vae-tiling", action="store_true", default=None, help="decode in tiles, of a model that can")
    ahead.add_argument("--dtype", default="bfloat16", metavar="bfloat16|float32", help="(bfloat16)")
    ahead.add_argument("--mesh", default="auto", metavar="AXIS=N,...", help="(auto: others are tried too)")
    ahead.add_argument("--residency", default="auto", metavar="auto|...", help="resident, streamed, mixed:r/g (auto)")
    ahead.add_argument("--memory-limit", type=float, metavar="GB", help="of each device, at most")
    ahead.add_argument("--cpu-devices", type=int, metavar="N", help="make the CPU N devices, with --here")
    ahead.add_argument("--full", action="store_true", help="compile the autoencoder too: minutes at full size")
    ahead.add_argument("--price-per-chip-hour", type=float, metavar="P", help="also say what a clip costs")
    ahead.add_argument("--plot", metavar="FILE", help="also draw it, as a PNG")
    ahead.add_argument("--overwrite", action="store_true", help="replace an existing picture")
    ahead.add_argument("--again", action="store_true", help="do not take a plan that was made before")
    ahead.add_argument("--json", action="store_true", help="print a list of plans")
    ahead.add_argument("--quiet", action="store_true", help="say nothing but the plan and errors")

    cards = commands.add_parser("models", help="list the models", allow_abbrev=False)
    cards.set_defaults(run=models)
    cards.add_argument("--json", action="store_true")

    look = commands.add_parser("check", help="account for every tensor of a model's files", allow_abbrev=False)
    look.set_defaults(run=check)
    look.add_argument(
        "--verify", action="store_true", help="also compare the files with the hashes that came with them"
    )
    look.add_argument("--json", action="store_true")

    ready = commands.add_parser("convert", help="write a model in the form that loads fastest", allow_abbrev=False)
    ready.set_defaults(run=convert)
    ready.add_argument("--output", required=True, metavar="DIR", help="a folder that is not there yet")
    ready.add_argument(
        "--dtype", default="bfloat16", metavar="bfloat16|float32", help="of the large matrices (bfloat16)"
    )
    for command in (look, ready):
        command.add_argument("model", metavar="MODEL", help="a model's name, folder or Hugging Face repository")
        command.add_argument("--weights", metavar="DIR", help="where the model of that name is")
        command.add_argument("--quiet", action="store_true", help="say nothing but errors")

    kept = commands.add_parser(
        "cache", help="show the compiled programs on disk, or clear them and the plans", allow_abbrev=False
    )
    kept.set_defaults(run=cache)
    kept.add_argument("--clear", action="store_true", help="remove them")
    return top


def size(text: str) -> tuple[int, int]:
    from vidax.engine.request import parse_size

    try:
        return parse_size(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a seed nor several; write 7, or 1,2,3 for three videos"
        ) from None


def generate(arguments: argparse.Namespace) -> int:
    """Make one video, or many. Of many, those that fail do not stop the others, and those that are done are skipped.

    Of several processes, process 0 plans, writes and prints; the others work along and end with its code.
    """
    from vidax import terminal
    from vidax.parallel import processes

    flags = arguments.coordinator, arguments.num_processes, arguments.process_id
    processes.check_flags(arguments.distributed, *flags)
    if not arguments.distributed and arguments.coordinator is None:
        return lead(arguments, use_devices(arguments), several=False)
    processes.start(*flags)
    terminal.keep_stdout()
    try:
        with processes.in_step(True, processes.IN_COLLECTIVES_SECONDS):
            devices = use_devices(arguments)
            code = lead(arguments, devices, several=True) if processes.first() else follow(arguments, devices)
        return int(processes.from_first(str(code)))
    except UserError:
        if processes.first():
            raise
        return 2  # process 0 says why
    except (KeyboardInterrupt, processes.OutOfStep) as error:
        processes.leave(terminal.last_words(error))


def use_devices(arguments: argparse.Namespace) -> "Sequence[Device] | None":
    """The virtual devices of the CPU that are asked for. It must be known before anything looks for devices."""
    from vidax.parallel import mesh

    return None if arguments.cpu_devices is None else mesh.cpu_devices(arguments.cpu_devices)


def opened(arguments: argparse.Namespace, devices: "Sequence[Device] | None") -> "Engine":
    from vidax import terminal
    from vidax.engine import compilation_cache
    from vidax.engine.engine import load

    uncached = compilation_cache.use()
    if uncached and not arguments.quiet:
        terminal.warn(uncached)
    parts = {part.replace("-", "_"): getattr(arguments, part.replace("-", "_")) for part in PARTS}
    return load(
        arguments.model,
        **parts,
        dtype=arguments.dtype,
        mesh=arguments.mesh,
        devices=devices,
        residency=arguments.residency,
        memory_limit=arguments.memory_limit,
        stream_from=arguments.stream_from,
        force=arguments.force,
    )


def lead(arguments: argparse.Namespace, devices: "Sequence[Device] | None", *, several: bool) -> int:
    """What process 0 does, which may be the only one."""
    from vidax import terminal
    from vidax.engine import jobs, tasks
    from vidax.parallel import processes
    from vidax.planner.plan import require_room

    with processes.in_step(several):
        wishes = asked(arguments)
        engine = opened(arguments, devices)
        defaults = {name: getattr(arguments, name) for name in REQUEST_FIELDS}
        defaults["size"] = chosen_size(arguments, engine.card.size)
        videos = 1 if arguments.num_videos is None else arguments.num_videos
        wishes = jobs.multiply(wishes, defaults, arguments.seed or (), videos)
        many = arguments.prompts is not None or arguments.num_videos is not None or len(wishes) > 1
        planned = tasks.plan(engine, wishes, arguments.output, overwrite=arguments.overwrite, resume=many)
        if not arguments.force:
            require_room(engine, [task.request for task in planned if task.writer is not None])
    if not arguments.quiet:
        terminal.settings(planned)

    results = terminal.Results(many=many, as_json=arguments.json, quiet=arguments.quiet)
    for task in planned:
        if task.writer is None:
            results.skipped(task)
    todo = [task for task in planned if task.writer is not None]
    failure = None
    try:
        quiet = arguments.quiet or not todo
        with terminal.plain_warnings(quiet), terminal.progress(quiet) as progress:
            clips = engine.run(tasks.shared_jobs(engine, todo), progress)
            for task, clip in zip(todo, clips, strict=True):
                try:
                    files = tasks.write(task, clip, overwrite=arguments.overwrite, sheet=arguments.contact_sheet)
                except Exception as error:
                    if many:
                        results.failed(task, error)
                    else:
                        failure = error  # raised when the others, if there are any, have decoded this clip too
                else:
                    results.written(clip.metadata, files)
    except KeyboardInterrupt:
        written = results.counts["written"]
        if written < len(todo):
            if not many:
                raise
            terminal.say(
                f"vidax: interrupted; {written} of {len(todo)} videos are written, the same command makes the others"
            )
            if several:
                processes.leave(130)
            return 130
    if failure is not None:
        raise failure
    return results.close()


def follow(arguments: argparse.Namespace, devices: "Sequence[Device] | None") -> int:
    """What the other processes do: the jobs of process 0, of which they keep nothing."""
    from vidax import terminal
    from vidax.engine import tasks
    from vidax.parallel import processes

    arguments.quiet = True
    with processes.in_step(True):
        engine = opened(arguments, devices)
    with terminal.plain_warnings(True), terminal.progress(True) as progress:
        for clip in engine.run(tasks.shared_jobs(engine), progress):
            with contextlib.suppress(Exception):  # process 0 has it too, and says it
                for _ in clip.frames:
                    pass
    return 0


def asked(arguments: argparse.Namespace) -> "list[Wish]":
    """The prompt of the command line, or the jobs of a file."""
    from vidax.engine.jobs import Wish, read_jobs

    if (arguments.prompt is None) == (arguments.prompts is None):
        raise UserError("give either a prompt, in quotes, or a file of them with --prompts")
    if arguments.prompts is None:
        return [Wish("", {"prompt": arguments.prompt})]
    source = "stdin" if arguments.prompts == "-" else arguments.prompts
    try:
        data = sys.stdin.buffer.read() if source == "stdin" else Path(source).read_bytes()
        return read_jobs(data.decode("utf-8-sig"), source)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror}); --prompts takes a text file") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error


def chosen_size(arguments: argparse.Namespace, default: tuple[int, int]) -> tuple[int, int] | None:
    """--size, or --width and --height, of which one may be left to the card."""
    width, height = arguments.width, arguments.height
    if width is None and height is None:
        return arguments.size
    if arguments.size is not None:
        raise UserError("give either --size or --width and --height")
    return default[0] if width is None else width, default[1] if height is None else height


def plan(arguments: argparse.Namespace) -> int:
    """Plans for one model on one or more slices. Nothing is run on any device."""
    from vidax import terminal
    from vidax.planner import show
    from vidax.planner.command import Wanted, plans

    if arguments.plot is not None:
        show.claim_plot(Path(arguments.plot), overwrite=arguments.overwrite)
    use_devices(arguments)
    fields = {name: getattr(arguments, name) for name in PLANNED_FIELDS}
    wanted = Wanted(
        model=arguments.model,
        fields=fields,
        images=arguments.images,
        topologies=tuple(arguments.topology or ()),
        here=arguments.here,
        dtype=arguments.dtype,
        mesh=arguments.mesh,
        residency=arguments.residency,
        memory_limit=arguments.memory_limit,
        full=arguments.full,
        again=arguments.again,
        price_per_chip_hour=arguments.price_per_chip_hour,
    )
    found = []
    for made in plans(wanted, (lambda _: None) if arguments.quiet else terminal.say):
        found.append(made)
        if not arguments.json:
            print(show.text(made), end="\n\n", flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    if arguments.plot is not None:
        picture = show.plot(found, Path(arguments.plot), overwrite=arguments.overwrite)
        if not arguments.quiet:
            terminal.say(f"vidax: {picture}")
    return 1 if any(made["fits"] is False for made in found) else 0


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


def check(arguments: argparse.Namespace) -> None:
    from vidax import terminal
    from vidax.engine import checkpoints

    model = checkpoints.open_named(arguments.model, arguments.weights)
    with terminal.progress(arguments.quiet or not arguments.verify) as progress:
        accounts = checkpoints.check(model, hashes=arguments.verify, progress=progress)
    if arguments.json:
        print(json.dumps([account._asdict() for account in accounts], indent=2))
    elif not arguments.quiet:
        print(*(line for account in accounts for line in terminal.account_lines(account)), sep="\n")


def convert(arguments: argparse.Namespace) -> None:
    from vidax import terminal
    from vidax.engine import checkpoints

    model = checkpoints.open_named(arguments.model, arguments.weights)
    with terminal.progress(arguments.quiet) as progress:
        path = checkpoints.convert(model, arguments.output, dtype=arguments.dtype, progress=progress)
    if not arguments.quiet:
        print(path)


def cache(arguments: argparse.Namespace) -> None:
    from vidax.engine import compilation_cache
    from vidax.planner import store

    if theirs := compilation_cache.theirs():
        raise UserError(f"{theirs} comes from JAX_COMPILATION_CACHE_DIR: vidax uses it, but leaves it to you")
    folder = compilation_cache.folder()
    programs, total = compilation_cache.contents(folder)
    if arguments.clear:
        compilation_cache.clear(folder)
        print(f"{folder}: removed {programs} programs, {total} bytes")
        print(f"{store.folder()}: removed {store.clear()} plans")
    else:
        print(f"{folder}: {programs} programs, {total} bytes of at most {compilation_cache.MAX_BYTES}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 1 if a job of many failed, 2 for what the user can put right, 130 if interrupted."""
    words = [same_flag(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        if words and not words[0].startswith("-"):
            check_command(words[0])
        arguments = parser().parse_args(words)
        return arguments.run(arguments) or 0
    except UserError as error:
        print(*(f"vidax: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vidax: interrupted; nothing was written", file=sys.stderr)
        return 130


def check_command(word: str) -> None:
    """argparse lists the commands, but does not say which is nearest."""
    if word not in COMMANDS:
        raise UserError(f"unknown command {word!r}; {did_you_mean(word, COMMANDS)}there are {', '.join(COMMANDS)}")


def same_flag(word: str) -> str:
    """`--guidance_scale=3` as `--guidance-scale=3`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
