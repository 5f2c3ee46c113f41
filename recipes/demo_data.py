"""The world of the demo model: one coloured shape on a dark ground, 17 frames of 64 x 64, and captions that say so.

Everything is drawn, so there is nothing to download and every clip has a known answer. `Scenes` says what happens in
clips, `draw` makes their pixels, `captions` lists every training wording of a kind of clip. `held_out_captions` are
wordings for the benchmark: their words occur in training, the whole wordings never do (tests/test_demo_judge.py asserts
both).
"""

import dataclasses
import itertools
import string

import numpy as np
import tokenizers

SPACE = "\u2581"  # how sentencepiece writes a blank
SIZE, FRAMES = 64, 17  # pixels, frames: 8 x 8 and 5 in latents
TRAVEL = 32.0  # pixels that a moving shape covers in a clip
BACKGROUND = (20, 20, 24)
COLORS = {
    "red": (225, 40, 40),
    "green": (40, 190, 70),
    "blue": (50, 90, 235),
    "yellow": (240, 210, 50),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle")
MOTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1), "stays": (0, 0)}


# ---- pictures


@dataclasses.dataclass(frozen=True)
class Scenes:
    """What happens in n clips, as arrays of length n. `center` is where the shape is in the middle frame, in pixels."""

    color: np.ndarray  # index into COLORS
    shape: np.ndarray  # index into SHAPES
    motion: np.ndarray  # index into MOTIONS
    center: np.ndarray  # [n, 2], x and y
    radius: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.color)

    def __getitem__(self, index) -> "Scenes":
        return Scenes(*(getattr(self, f.name)[index] for f in dataclasses.fields(self)))

    def names(self, i: int) -> tuple[str, str, str]:
        return tuple(COLORS)[self.color[i]], SHAPES[self.shape[i]], tuple(MOTIONS)[self.motion[i]]


def sample_scenes(rng: np.random.Generator, n: int, anywhere: bool = False) -> Scenes:
    """n random scenes, all 75 combinations equally often, the whole shape always inside the frame.

    Shapes keep within 10 pixels of the middle, or of their way through it, so where one starts says how it moves. With
    `anywhere` it does not: wherever one starts to move another one stays, and in a corner it may move along both sides.
    """
    kinds = (np.arange(n) + rng.integers(75)) % 75
    rng.shuffle(kinds)
    motion = kinds // 15
    radius = rng.uniform(11.0, 13.0, n)
    step = np.abs(np.array(list(MOTIONS.values()))[motion])  # 1 along the axis of motion
    slack = SIZE / 2 - 1 - radius[:, None] - step * TRAVEL / 2  # how far the centre may lie off the middle
    beside = slack if anywhere else np.minimum(slack, 10.0)
    center = SIZE / 2 + rng.uniform(-1, 1, (n, 2)) * np.where(step == 1, slack, beside)
    return Scenes(kinds % 5, kinds // 5 % 3, motion, center, radius)


def position(scenes: Scenes, frame: np.ndarray) -> np.ndarray:
    """Where the shape's centre (x, y) is at `frame` [n, k]: [n, k, 2] pixels."""
    direction = np.array(list(MOTIONS.values()))[scenes.motion]
    return scenes.center[:, None] + TRAVEL * (frame / (FRAMES - 1) - 0.5)[..., None] * direction[:, None]


def draw(scenes: Scenes, window: tuple[int, int] = (FRAMES, SIZE), start: np.ndarray | None = None) -> np.ndarray:
    """Pixels as uint8 [n, frames, size, size, 3], edges anti-aliased by the signed distance to the outline.

    `window` is (frames, size) of the part that is drawn, `start` [n, 3] its first frame, column and row (0 if None).
    """
    frames, size = window
    start = np.zeros((len(scenes), 3), np.float32) if start is None else start.astype(np.float32)
    center = position(scenes, start[:, :1] + np.arange(frames)).astype(np.float32) - start[:, None, 1:]
    pixel = np.arange(size, dtype=np.float32) + 0.5
    x = pixel[None, None, None, :] - center[..., 0, None, None]
    y = pixel[None, None, :, None] - center[..., 1, None, None]
    r = scenes.radius.astype(np.float32)[:, None, None, None]
    half = 0.9 * r  # the square a little smaller, so that the three shapes look the same size
    slope = np.float32(5**-0.5)  # an upright triangle as wide as it is high: sides fall 2 for 1
    distance = np.choose(
        scenes.shape[:, None, None, None],
        (
            np.sqrt(x * x + y * y) - r,
            np.maximum(np.abs(x), np.abs(y)) - half,
            np.maximum(y - r, (2 * np.abs(x) - (y + r)) * slope),
        ),
    )
    alpha = np.clip(0.5 - distance, 0, 1)[..., None]
    color = np.array(list(COLORS.values()), np.float32)[scenes.color][:, None, None, None]
    ground = np.array(BACKGROUND, np.float32)
    return np.round(ground + alpha * (color - ground)).astype(np.uint8)


# ---- words

SUBJECTS = ("a {color} {shape}", "the {color} {shape}", "{color} {shape}", "one {color} {shape}")
MOVES = {"moves": "moving", "goes": "going", "slides": "sliding", "drifts": "drifting", "travels": "travelling"}
RESTS = {"stays": "staying", "stands": "standing", "remains": "remaining"}
WHERE = {
    "right": ("right", "rightwards", "to the right", "towards the right"),
    "left": ("left", "leftwards", "to the left", "towards the left"),
    "up": ("up", "upwards", "to the top", "towards the top"),
    "down": ("down", "downwards", "to the bottom", "towards the bottom"),
    "stays": ("still", "in place", "where it is"),
}
BARE_RESTS = {"stays": "staying", "does not move": "not moving"}  # say it all without a place
SENTENCES = (
    "{subject} {finite}",
    "{subject} {participle}",
    "{subject} is {participle}",
    "{subject}, {participle}",
    "a video of {subject} {participle}",
    "there is {subject} and it {finite}",
)

# Kept for the benchmark: verbs that training never joins to this form of the place (its index in WHERE), and sentences
# that it never uses.
HELD_OUT_PAIRS = {("goes", 1), ("slides", 3), ("travels", 0), ("drifts", 2), ("stands", 2), ("remains", 1)}
HELD_OUT_SENTENCES = ("there is {subject}, it is {participle}", "a video of {subject} and it {finite}")


def _predicates(motion: str, held_out: bool) -> list[tuple[str, str]]:
    """("goes to the left", "going to the left") and so on: those of training, or those kept for the benchmark."""
    rests = motion == "stays"
    verbs = (RESTS if rests else MOVES).items()
    places = enumerate(WHERE[motion])
    joined = [
        (f"{finite} {place}", f"{participle} {place}")
        for (finite, participle), (form, place) in itertools.product(verbs, places)
        if ((finite, form) in HELD_OUT_PAIRS) == held_out
    ]
    return joined + (list(BARE_RESTS.items()) if rests and not held_out else [])


def _captions(color: str, shape: str, predicates: list[tuple[str, str]], sentences: tuple[str, ...]) -> list[str]:
    subjects = [s.format(color=color, shape=shape) for s in SUBJECTS]
    return [
        sentence.format(subject=subject, finite=finite, participle=participle)
        for sentence, subject, (finite, participle) in itertools.product(sentences, subjects, predicates)
    ]


def captions(color: str, shape: str, motion: str) -> list[str]:
    """Every training caption of one kind of clip."""
    return _captions(color, shape, _predicates(motion, held_out=False), SENTENCES)


def held_out_captions(color: str, shape: str, motion: str) -> list[str]:
    """Wordings that training never sees: half of them a new verb and place in a known sentence, half a new sentence."""
    return _captions(color, shape, _predicates(motion, held_out=True), SENTENCES) + _captions(
        color, shape, _predicates(motion, held_out=False), HELD_OUT_SENTENCES
    )


# ---- tokens


def build_tokenizer() -> tokenizers.Tokenizer:
    """A UMT5-like tokenizer: unigram pieces with metaspaces, pad 0, end of sentence 1 appended, unknown 2.

    A piece for each word of the captions and for each character, so that any plain text becomes tokens. It lowers case.
    """
    kinds = itertools.product(COLORS, SHAPES, MOTIONS)
    every = {c for kind in kinds for c in captions(*kind)}
    words = sorted({word.strip(",") for caption in every for word in caption.split()})
    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), (SPACE, -2.0)]
    pieces += [(SPACE + word, -3.0) for word in words] + [(c, -8.0) for c in characters]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(piece, normalized=False) for piece in ("<pad>", "</s>", "<unk>")]
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = tokenizers.decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer
