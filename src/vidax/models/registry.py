"""Every model that has a name, on one page: what it is, and the recipe that its authors publish."""

import dataclasses
from collections.abc import Mapping

from vidax.models.interface import Model
from vidax.models.wan import config as wan
from vidax.models.wan.dit import DiTConfig
from vidax.sampling.schedules import Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A model's name, where its weights are published, and the settings used where a request leaves them open.

    size is (width, height); `source` says where the settings come from, `sources` which source a setting follows where
    the published ones disagree; `embedded` is the folder in this package, if it ships here. `trained_sizes` and
    `trained_frames` are what its authors support; empty where nobody says.
    """

    name: str
    title: str
    family: str
    repository: str | None
    parameters: str
    dit: DiTConfig
    size: tuple[int, int]
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    flow_shift: float
    solver: str
    grid: Grid
    negative_prompt: str
    source: str
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trained_sizes: tuple[tuple[int, int], ...] = ()
    trained_frames: tuple[int, ...] = ()
    embedded: str | None = None


DEMO = Card(
    name="demo",
    title="A tiny Wan 2.1 that draws a coloured shape moving on a dark ground",
    family="wan",
    repository=None,
    parameters="2.3M",
    dit=wan.DEMO,
    size=(64, 64),
    frames=17,
    fps=8,
    steps=20,
    guidance_scale=3.0,
    flow_shift=1.0,
    solver="unipc",
    grid="diffusers",
    negative_prompt="",
    source="recipes/train_demo.py",
    trained_sizes=((64, 64),),
    trained_frames=(17,),
    embedded="assets/demo",
)

WAN21_T2V_14B = Card(
    name="wan2.1-t2v-14b",
    title="Wan 2.1 text to video, 14B",
    family="wan",
    repository="Wan-AI/Wan2.1-T2V-14B",
    parameters="14B",
    dit=wan.WAN21_14B,
    size=(1280, 720),
    frames=81,
    fps=16,
    steps=50,
    guidance_scale=5.0,
    flow_shift=5.0,
    solver="unipc",
    grid="official",
    negative_prompt=wan.NEGATIVE_PROMPT,
    source="Wan-Video/Wan2.1, generate.py and wan/configs",
    trained_sizes=((1280, 720), (720, 1280), (832, 480), (480, 832)),  # SUPPORTED_SIZES in wan/configs/__init__.py
    trained_frames=(1, 81),  # frame_num in generate.py: 1 for text to image, which takes the 14B weights
)

WAN21_T2V_1_3B = dataclasses.replace(
    WAN21_T2V_14B,
    name="wan2.1-t2v-1.3b",
    title="Wan 2.1 text to video, 1.3B",
    repository="Wan-AI/Wan2.1-T2V-1.3B",
    parameters="1.3B",
    dit=wan.WAN21_1_3B,
    size=(832, 480),
    guidance_scale=6.0,
    flow_shift=8.0,
    source="Wan-Video/Wan2.1, README.md (guidance 6 and shift 8 for 1.3B; generate.py says 5 and 5 for all models)",
    sources={
        "guidance_scale": "README.md of Wan2.1; its generate.py and diffusers take 5, FastVideo 3",
        "flow_shift": "README.md of Wan2.1, 8 to 12; its generate.py takes 5, diffusers and FastVideo 3",
    },
    trained_sizes=((832, 480), (480, 832)),  # SUPPORTED_SIZES in wan/configs/__init__.py
    trained_frames=(81,),
)

CARDS = {card.name: card for card in (DEMO, WAN21_T2V_1_3B, WAN21_T2V_14B)}


# For a folder whose network is none of these: what diffusers' WanPipeline takes where nothing is said.
UNNAMED = dataclasses.replace(
    WAN21_T2V_14B,
    name="",
    title="A Wan 2.1 text to video model of another size",
    repository=None,
    parameters="?",
    size=(832, 480),
    negative_prompt="",
    source="the defaults of diffusers' WanPipeline",
    trained_sizes=(),
    trained_frames=(),
)


def card_for(model: Model, name: str) -> Card:
    """The card of the model that has this network; for an unknown one, diffusers' defaults under the given name."""
    known = next((card for card in CARDS.values() if card.dit == model.dit), None)
    return known or dataclasses.replace(UNNAMED, name=name, dit=model.dit)
