"""Every model that has a name, on one page: what it is, and the recipe that its authors publish."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vidax.models.architecture import Architecture
from vidax.models.cogvideox import config as cogvideox
from vidax.models.interface import PARTS
from vidax.models.wan import config as wan
from vidax.sampling.schedules import Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A model's name, where its weights are published, and the settings used where a request leaves them open.

    size is (width, height); a video from an image has so many pixels. `small_flow_shift` stands for sizes up to that of
    480p, where there is one; where the grid of noise levels is CogVideoX's, the shift is that of its signal-to-noise
    ratio. `dynamic_guidance`: whether the guidance scale changes from step to step (`vidax.sampling.guidance`) with the
    solver dpm. Of two experts `guidance_scale` is that of the first, for high noise; steps below
    `boundary_ratio` of the noise are the second's. `images`: how many it takes, at least and at most;
    `image_encoder`: whether it also looks at them with one. `source` says
    where the settings come from, `sources` which source a setting follows where the published ones disagree; `embedded`
    is the folder in this package, if it ships here. `trained_sizes` and `trained_frames` are what its authors support;
    empty where nobody says.
    """

    name: str
    title: str
    family: str
    repository: str | None
    parameters: str
    dit: Any
    size: tuple[int, int]
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    flow_shift: float
    solver: str
    grid: Grid
    boundary_ratio: float | None = None
    guidance_scale_2: float | None = None
    small_flow_shift: float | None = None
    images: tuple[int, int] = (0, 0)
    image_encoder: bool = False
    dynamic_guidance: bool = False
    negative_prompt: str
    source: str
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trained_sizes: tuple[tuple[int, int], ...] = ()
    trained_frames: tuple[int, ...] = ()
    embedded: str | None = None

    @property
    def experts(self) -> int:
        return 1 if self.boundary_ratio is None else 2

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of `PARTS` that the model has."""
        absent = {"transformer_2": self.experts == 1, "image_encoder": not self.image_encoder}
        return tuple(part for part in PARTS if not absent.get(part))

    def shift(self, width: int, height: int) -> float:
        """The flow shift for a size."""
        if self.small_flow_shift is None or width * height > SMALL:
            return self.flow_shift
        return self.small_flow_shift


SMALL = 832 * 480

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

DEMO_I2V = dataclasses.replace(
    DEMO,
    name="demo-i2v",
    title="The same tiny network taught to go on from a first frame, as TI2V-5B does",
    images=(0, 1),
    source="recipes/train_demo_i2v.py",
    embedded="assets/demo-i2v",
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

WAN21_I2V_14B_720P = dataclasses.replace(
    WAN21_T2V_14B,
    name="wan2.1-i2v-14b-720p",
    title="Wan 2.1 image to video, 14B, 720p",
    repository="Wan-AI/Wan2.1-I2V-14B-720P",
    dit=wan.WAN21_I2V,
    images=(1, 1),
    image_encoder=True,
    steps=40,
    small_flow_shift=3.0,  # _validate_args in generate.py: i2v at 832*480 and 480*832
    negative_prompt=wan.I2V_NEGATIVE_PROMPT,
    trained_frames=(81,),
)

WAN21_I2V_14B_480P = dataclasses.replace(
    WAN21_I2V_14B_720P,
    name="wan2.1-i2v-14b-480p",
    title="Wan 2.1 image to video, 14B, 480p",
    repository="Wan-AI/Wan2.1-I2V-14B-480P",
    size=(832, 480),
    trained_sizes=((832, 480), (480, 832)),  # README.md
)

WAN21_FLF2V_14B = dataclasses.replace(
    WAN21_I2V_14B_720P,
    name="wan2.1-flf2v-14b",
    title="Wan 2.1 first and last frame to video, 14B, 720p",
    repository="Wan-AI/Wan2.1-FLF2V-14B-720P",
    dit=wan.WAN21_FLF2V,
    images=(2, 2),
    steps=50,
    flow_shift=16.0,
    small_flow_shift=None,
    negative_prompt=wan.FLF2V_NEGATIVE_PROMPT,
    sources={"guidance_scale": "generate.py of Wan2.1; WanFLF2V.generate has 5.5 where nothing is said"},
)

WAN22_T2V_A14B = dataclasses.replace(
    WAN21_T2V_14B,
    name="wan2.2-t2v-a14b",
    title="Wan 2.2 text to video, two experts of 14B",
    repository="Wan-AI/Wan2.2-T2V-A14B",
    parameters="2 x 14B",
    steps=40,
    guidance_scale=4.0,
    guidance_scale_2=3.0,
    flow_shift=12.0,
    boundary_ratio=0.875,
    source="Wan-Video/Wan2.2, wan/configs/wan_t2v_A14B.py",
    trained_frames=(81,),
)

WAN22_I2V_A14B = dataclasses.replace(
    WAN22_T2V_A14B,
    name="wan2.2-i2v-a14b",
    title="Wan 2.2 image to video, two experts of 14B",
    repository="Wan-AI/Wan2.2-I2V-A14B",
    dit=wan.WAN22_I2V,
    images=(1, 2),
    guidance_scale=3.5,
    guidance_scale_2=3.5,
    flow_shift=5.0,
    boundary_ratio=0.9,
    source="Wan-Video/Wan2.2, wan/configs/wan_i2v_A14B.py",
)

WAN22_TI2V_5B = dataclasses.replace(
    WAN21_T2V_14B,
    name="wan2.2-ti2v-5b",
    title="Wan 2.2 text or image to video, 5B",
    repository="Wan-AI/Wan2.2-TI2V-5B",
    parameters="5B",
    dit=wan.WAN22_5B,
    images=(0, 1),
    size=(1280, 704),
    frames=121,
    fps=24,
    source="Wan-Video/Wan2.2, wan/configs/wan_ti2v_5B.py",
    trained_sizes=((1280, 704), (704, 1280)),  # SUPPORTED_SIZES in wan/configs/__init__.py
    trained_frames=(121,),
)

COGVIDEOX_2B = Card(
    name="cogvideox-2b",
    title="CogVideoX text to video, 2B",
    family="cogvideox",
    repository="THUDM/CogVideoX-2b",
    parameters="2B",
    dit=cogvideox.COGVIDEOX_2B,
    size=(720, 480),
    frames=49,
    fps=8,
    steps=50,
    guidance_scale=6.0,
    flow_shift=3.0,  # snr_shift_scale in scheduler/scheduler_config.json
    solver="ddim",
    grid="cogvideox",
    negative_prompt="",
    source="zai-org/CogVideo, inference/cli_demo.py and README.md",
    sources={
        "solver": "the comments of cli_demo.py of CogVideo recommend DDIM for 2B, whose code takes DPM for all models",
    },
    trained_sizes=((720, 480),),  # README.md: no other resolution is supported
    trained_frames=(49,),
)

COGVIDEOX_5B = dataclasses.replace(
    COGVIDEOX_2B,
    name="cogvideox-5b",
    title="CogVideoX text to video, 5B",
    repository="THUDM/CogVideoX-5b",
    parameters="5B",
    dit=cogvideox.COGVIDEOX_5B,
    flow_shift=1.0,
    solver="dpm",
    dynamic_guidance=True,
    sources={},
)

COGVIDEOX_5B_I2V = dataclasses.replace(
    COGVIDEOX_5B,
    name="cogvideox-5b-i2v",
    title="CogVideoX image to video, 5B",
    repository="THUDM/CogVideoX-5b-I2V",
    dit=cogvideox.COGVIDEOX_5B_I2V,
    images=(1, 1),
)

COGVIDEOX15_5B = dataclasses.replace(
    COGVIDEOX_5B,
    name="cogvideox1.5-5b",
    title="CogVideoX 1.5 text to video, 5B",
    repository="THUDM/CogVideoX1.5-5B",
    dit=cogvideox.COGVIDEOX15_5B,
    size=(1360, 768),
    frames=81,
    fps=16,
    trained_sizes=((1360, 768),),
    trained_frames=(81, 161),
)

COGVIDEOX15_5B_I2V = dataclasses.replace(
    COGVIDEOX15_5B,
    name="cogvideox1.5-5b-i2v",
    title="CogVideoX 1.5 image to video, 5B",
    repository="THUDM/CogVideoX1.5-5B-I2V",
    dit=cogvideox.COGVIDEOX15_5B_I2V,
    images=(1, 1),
    trained_sizes=(),  # README.md: any whose shorter side is 768 and whose longer is at most 1360
)

CARDS = {
    card.name: card
    for card in (
        DEMO,
        DEMO_I2V,
        WAN21_T2V_1_3B,
        WAN21_T2V_14B,
        WAN21_I2V_14B_480P,
        WAN21_I2V_14B_720P,
        WAN21_FLF2V_14B,
        WAN22_T2V_A14B,
        WAN22_I2V_A14B,
        WAN22_TI2V_5B,
        COGVIDEOX_2B,
        COGVIDEOX_5B,
        COGVIDEOX_5B_I2V,
        COGVIDEOX15_5B,
        COGVIDEOX15_5B_I2V,
    )
}


def unnamed(card: Card, title: str, pipeline: str, **changes: Any) -> Card:
    """A card for models like that of another, but of another size."""
    unknown: dict[str, Any] = {"name": "", "repository": None, "parameters": "?", "sources": {}}
    untrained: dict[str, Any] = {"trained_sizes": (), "trained_frames": ()}
    source = f"the defaults of diffusers' {pipeline}"
    return dataclasses.replace(card, title=title, source=source, **unknown, **untrained, **changes)


# By family, for a folder whose network is none of these: what diffusers' pipelines take where nothing is said.
UNNAMED = {
    "wan": unnamed(WAN21_T2V_14B, "A Wan model of another size", "WanPipeline", size=(832, 480), negative_prompt=""),
    "cogvideox": unnamed(
        COGVIDEOX_5B, "A CogVideoX model of another size", "CogVideoXPipeline", dynamic_guidance=False
    ),
}


def card_for(model: Architecture, name: str) -> Card:
    """The card of the model that has this network, of several the one whose repository has that name; for an unknown
    network diffusers' defaults under the given name.
    """
    seen = model.dit, model.experts, model.images
    known = [card for card in CARDS.values() if (card.dit, card.experts, card.images) == seen]
    named = [card for card in known if card.repository and Path(card.repository).name.lower() in name.lower()]
    if known:
        return (named or known)[0]
    unknown = UNNAMED[model.family]
    only: dict[str, Any] = {} if model.only is None else {"size": model.only[:2], "frames": model.only[2]}
    return dataclasses.replace(unknown, name=name, dit=model.dit, images=model.images, **only)
