"""How often the demo model makes what the prompt says: colour, shape and motion, judged from pixels alone.

    python benchmarks/demo_accuracy.py                    # 60 prompts in wordings that training never saw, one seed
    python benchmarks/demo_accuracy.py --model demo-i2v --first-frames --prompts 50

With `--first-frames` each clip goes on from a given frame, of a scene that training never saw, and is compared with it.

The judge is geometry, not a network: what differs from the background is the shape; its mean colour, how it fills its
bounding box and the track of its centroid are compared with the prompt. tests/test_demo_judge.py checks the judge.
"""

import argparse
import itertools
import os
import platform
import sys
import time
from pathlib import Path

import jax
import numpy as np
from scipy import ndimage

import vidax

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import demo_data

CONTRAST = 0.25  # of full scale: less than this is an empty picture
REST, MOVE, JUMP = 4.0, 12.0, 8.0  # pixels: still below REST, moving above MOVE, no step between two frames beyond JUMP


def judge(frames: np.ndarray) -> tuple[str | None, str | None, str | None]:
    """What a clip (uint8 [F H W 3]) shows: a colour, a shape, a motion; None for what cannot be told."""
    x = frames.astype(np.float32) / 255
    contrast = np.abs(x - np.median(x, (0, 1, 2))).max(-1)
    peak = np.percentile(contrast, 99)
    if peak < CONTRAST:
        return None, None, None
    shapes = [_largest(c > peak / 2) for c in contrast]
    if any(s is None for s in shapes):  # a frame where it is gone, or in pieces
        return None, None, None
    return _color(x, shapes), _shape(shapes), _motion(shapes)


def _largest(mask: np.ndarray) -> np.ndarray | None:
    """The connected piece that holds at least nine tenths of the mask; None without one, or for a speck or a flood."""
    labels, _ = ndimage.label(mask)
    sizes = np.bincount(labels.ravel())[1:]
    if not sizes.size or sizes.max() < 0.9 * sizes.sum() or not 50 < sizes.max() < mask.size / 2:
        return None
    return labels == 1 + sizes.argmax()


def _color(x: np.ndarray, shapes: list[np.ndarray]) -> str | None:
    inside = np.concatenate(
        [frame[ndimage.binary_erosion(s, iterations=2)] for frame, s in zip(x, shapes, strict=True)]
    )
    if not len(inside):
        return None
    palette = np.array(list(demo_data.COLORS.values())) / 255
    distance = np.linalg.norm(palette - inside.mean(0), axis=1)
    return tuple(demo_data.COLORS)[distance.argmin()] if distance.min() < 0.3 else None


def _shape(shapes: list[np.ndarray]) -> str | None:
    """By how much of the bounding box is filled (square 1, circle 0.79, triangle 0.5), and how evenly."""
    fill, aspect, top = [], [], []
    for s in shapes:
        rows, columns = np.flatnonzero(s.any(1)), np.flatnonzero(s.any(0))
        box = s[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        fill.append(box.mean())
        aspect.append(box.shape[1] / box.shape[0])
        top.append(box[: len(box) // 2].sum() / box.sum())
    fill, aspect, top = np.median(fill), np.median(aspect), np.median(top)
    if not 0.8 < aspect < 1.25:
        return None
    if fill < 0.65:
        return "triangle" if fill > 0.42 and top < 0.36 else None
    if not 0.42 < top < 0.58:
        return None
    return "circle" if fill < 0.88 else "square"


def _motion(shapes: list[np.ndarray]) -> str | None:
    track = np.array([ndimage.center_of_mass(s)[::-1] for s in shapes])  # x, y
    if np.linalg.norm(np.diff(track, axis=0), axis=1).max() > JUMP:
        return None
    if np.linalg.norm(track - track.mean(0), axis=1).max() < REST / 2:
        return "stays"
    way = track[-1] - track[0]
    along = np.abs(way).argmax()
    if abs(way[along]) < MOVE or abs(way[1 - along]) > abs(way[along]) / 3:
        return None
    step = np.zeros(2, int)
    step[along] = np.sign(way[along])
    return next(name for name, s in demo_data.MOTIONS.items() if s == tuple(step))


def prompts(count: int) -> list[tuple[str, tuple[str, str, str]]]:
    """(prompt, what it asks for): the 75 kinds in turn, each time in another new wording."""
    rng = np.random.default_rng(0)
    kinds = [(c, s, m) for s in demo_data.SHAPES for c in demo_data.COLORS for m in demo_data.MOTIONS]
    colors, motions = list(demo_data.COLORS), list(demo_data.MOTIONS)
    # Leave out one diagonal at a time, so that 60 of 75 still hold each colour, shape and motion in equal numbers.
    kinds.sort(key=lambda kind: (colors.index(kind[0]) + motions.index(kind[2])) % 5)
    wordings = {kind: rng.permutation(demo_data.held_out_captions(*kind)) for kind in kinds}
    turns = zip(range(count), itertools.cycle(kinds))
    return [(str(wordings[kind][turn // len(kinds)]), kind) for turn, kind in turns]


def first_frames(count: int) -> list[tuple[str, tuple[str, str, str], np.ndarray]]:
    """(prompt, what it asks for, first frame as uint8 [H W 3]), in new wordings as well.

    Each frame is asked to move and then to stay, so a model that does not read the prompt is right half of the time.
    """
    rng = np.random.default_rng(1)
    scenes = demo_data.sample_scenes(rng, 75 * count, anywhere=True)
    scenes = scenes[scenes.motion != list(demo_data.MOTIONS).index("stays")][: -(-count // 2)]
    cases = []
    for i, clip in enumerate(demo_data.draw(scenes, (1, demo_data.SIZE))):
        color, shape, motion = scenes.names(i)
        for asked in ((color, shape, motion), (color, shape, "stays")):
            cases.append((str(rng.choice(demo_data.held_out_captions(*asked))), asked, clip[0]))
    return cases[:count]


def psnr(frame: np.ndarray, given: np.ndarray) -> float:
    """Decibels by which two uint8 pictures agree."""
    return float(10 * np.log10(255**2 / np.mean((frame.astype(np.float32) - given) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a model's name or a folder in diffusers layout")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--first-frames", action="store_true", help="for a model from image to video")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--shift", type=float)
    args = parser.parse_args()
    engine = vidax.load(args.model)
    size = (demo_data.SIZE, demo_data.SIZE)
    settings = {"size": size, "frames": demo_data.FRAMES, "negative_prompt": ""}
    settings |= {"seed": args.seed, "steps": args.steps, "guidance_scale": args.guidance, "flow_shift": args.shift}
    cases = first_frames(args.prompts) if args.first_frames else [(*case, None) for case in prompts(args.prompts)]
    right, seconds, likeness = [], [], []
    for prompt, asked, image in cases:
        given = {} if image is None else {"image": image}
        start = time.perf_counter()
        frames = engine.generate(prompt, frames_dtype="uint8", **given, **settings).frames
        seconds.append(time.perf_counter() - start)
        if image is not None:
            likeness.append(psnr(frames[0], image))
        shown = judge(frames)
        right.append([a == b for a, b in zip(asked, shown, strict=True)])
        if asked != shown:
            print(f"{prompt!r} shows {' '.join(map(str, shown))}")
    rates = np.mean(right, 0)
    print(f"{len(right)} prompts, seed {args.seed}, vidax {vidax.__version__}, jax {jax.__version__}, {machine()}")
    print(f"first clip {seconds[0]:.1f} s with compilation, then {np.mean(seconds[1:]):.1f} s a clip")
    print("  ".join(f"{name} {rate:.1%}" for name, rate in zip(("colour", "shape", "motion"), rates, strict=True)))
    print(f"all three right: {np.all(right, 1).mean():.1%}")
    if likeness:
        print(f"first frame against the given one: {np.mean(likeness):.1f} dB, at least {np.min(likeness):.1f} dB")


def machine() -> str:
    return f"{jax.devices()[0].device_kind} ({platform.machine()}, {os.cpu_count()} cores)"


if __name__ == "__main__":
    main()
