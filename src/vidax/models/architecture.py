"""What a model is without its weights, whatever its family: what requests are checked with, and plans are made of.

A family says what is its own (the abstract methods); what follows from the configs of the parts is here.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from vidax.models import programs
from vidax.models.interface import Footprint, Video
from vidax.models.programs import Known
from vidax.models.towers.clip_vision import CLIPVision, CLIPVisionConfig
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.nn import abstract
from vidax.ops.flops import flops
from vidax.sampling.solvers import SolverTable


class Networks(NamedTuple):
    """The modules of a family, each with a `spec` for its config."""

    transformer: Any
    vae: Any  # with the fields `encoder` and `decoder`, either of which may be None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(abc.ABC):
    """The configs of a model's parts and what follows from them.

    dit:         the transformer's: dim, heads, head_size, layers, patch, text_dim, in_channels, out_channels.
    vae:         the autoencoder's: latent_channels, space_factor, time_factor.
    experts:     how many transformers share the steps: the first takes those of high noise.
    boundary_ratio: of the training timesteps, where the second expert takes over, if the model came with it.
    scheduler:   `scheduler_config.json`, if the model came with one.
    """

    text_dtype: ClassVar[str | None] = None  # of the text encoder's matrices, whatever is asked for

    dit: Any
    vae: Any
    text: T5Config
    image: CLIPVisionConfig | None = None
    experts: int = 1
    boundary_ratio: float | None = None
    scheduler: dict[str, Any] | None = None

    # What a family says.

    @property
    @abc.abstractmethod
    def family(self) -> str:
        """Its name in the cards."""

    @property
    @abc.abstractmethod
    def networks(self) -> Networks: ...

    @property
    @abc.abstractmethod
    def text_tokens(self) -> int:
        """What a text is cut to, and padded to."""

    @property
    @abc.abstractmethod
    def noise_order(self) -> tuple[int, ...]:
        """The axes of latents [1 F H W C] in the order in which noise is drawn for them: (0, 4, 1, 2, 3) is PyTorch's
        [1 C F H W].
        """

    @property
    @abc.abstractmethod
    def images(self) -> tuple[int, int]:
        """How many images a video is made from, at least and at most: a first frame, then a last."""

    @abc.abstractmethod
    def image_size(self, image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
        """The size of a video from an image of (width, height) where none is asked for, as the authors choose it, from
        that size and the `size` of the model's card.
        """

    @abc.abstractmethod
    def fit(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """An image [H W 3] as a frame of a video of that size, float32 about [0, 1], as the authors make it."""

    @abc.abstractmethod
    def known(self, video: Video) -> Known:
        """Shapes of what a step takes beside the latents."""

    @abc.abstractmethod
    def encoded_chunks(self, video: Video) -> list[int]:
        """Frames of each chunk that the encoder sees of a video from images."""

    @abc.abstractmethod
    def decoded_chunks(self, frames: int) -> list[int]:
        """Latent frames of each chunk that the decoder sees of a video of so many frames."""

    # What may be otherwise in a family.

    @property
    def only(self) -> tuple[int, int, int] | None:
        """The only (width, height, frames) that the model makes; None where it makes others."""
        return None

    @property
    def tiles(self) -> bool:
        """Whether its authors decode large videos in tiles, and so can this."""
        return False

    @property
    def size_multiple(self) -> int:
        """Width and height are multiples of this: what the autoencoder and the patches divide by."""
        return self.vae.space_factor * self.dit.patch[1]

    @property
    def frame_multiple(self) -> int:
        """Frames are a multiple of this, plus one: as many as a latent frame stands for, unless a family says more."""
        return self.vae.time_factor

    def latent_frames(self, frames: int) -> int:
        """Those that are decoded to so many frames."""
        return (frames - 1) // self.vae.time_factor + 1

    def latent_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int, int]:
        """(F, H, W, C) of the latents of a video, while they are denoised."""
        space = self.vae.space_factor
        return self.latent_frames(frames), height // space, width // space, self.vae.latent_channels

    def tiling(self, video: Video) -> list[tuple[int, int]]:
        """Latent height and width of the parts in which frames are decoded: one, without tiles."""
        _, h, w, _ = self.latent_shape(video.width, video.height, video.frames)
        return [(h, w)]

    # What follows.

    def attention_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """(L, N, K) of the transformer's self-attention to a video, text left out."""
        f, h, w, _ = self.latent_shape(width, height, frames)
        pt, ph, pw = self.dit.patch
        return (f // pt) * (h // ph) * (w // pw), self.dit.heads, self.dit.head_size

    def specs(self, dtype) -> dict[str, Any]:
        """What the phases load, described: text_encoder, transformer, decoder, and where images are taken encoder and
        perhaps image_encoder.
        """
        vae = self.networks.vae.spec(self.vae)
        return {
            "text_encoder": self.text_encoder_spec(dtype),
            **({"image_encoder": CLIPVision.spec(self.image, dtype)} if self.image else {}),
            **({"encoder": dataclasses.replace(vae, decoder=None)} if self.images[1] else {}),
            "transformer": self.transformer_spec(dtype),
            "decoder": dataclasses.replace(vae, encoder=None),
        }

    def text_encoder_spec(self, dtype) -> T5Encoder:
        return T5Encoder.spec(self.text, jnp.dtype(self.text_dtype or dtype))

    def transformer_spec(self, dtype) -> Any:
        return self.networks.transformer.spec(self.dit, dtype)

    def latents(self, video: Video) -> tuple[int, ...]:
        return (1, *self.latent_shape(video.width, video.height, video.frames))

    def frames_to_encode(self, video: Video) -> list[tuple[int, ...]]:
        """Shapes [1 F H W 3] of the first chunk that is encoded and, if there are others, of the last."""
        return first_and_last([(1, count, video.height, video.width, 3) for count in self.encoded_chunks(video)])

    def latents_to_decode(self, video: Video) -> list[tuple[int, ...]]:
        """Shapes [1 F H W C] of the first chunk that is decoded and, if there are others, of the last; of several tiles
        of the largest.
        """
        h, w = max(self.tiling(video), key=lambda tile: tile[0] * tile[1])
        counts = self.decoded_chunks(video.frames)
        return first_and_last([(1, count, h, w, self.vae.latent_channels) for count in counts])

    def decodings(self, video: Video) -> int:
        """How often the decoder runs for a video."""
        return len(self.decoded_chunks(video.frames)) * len(self.tiling(video))

    def flops(self, video: Video, dtype) -> dict[str, dict[str, float]]:
        """Of each program once, by the dtype of the operands: `text` for one text, `step`, `decode` for the last chunk
        of latent frames; of a video from images `encode`, and where there is an image encoder `look`.
        """
        specs = {name: abstract(spec) for name, spec in self.specs(dtype).items()}
        dit, known = specs["transformer"], self.known(video)
        seen = (*self.latents(video)[1:4], self.dit.in_channels)
        noise, times = (shaped((video.branches, *shape)) for shape in (seen, ()))
        states = known.states and shaped((1, *known.states))
        context = jax.eval_shape(lambda dit, *x: dit.prepare(*x), dit, shaped((video.branches, *known.text)), states)
        found = {
            "text": flops(
                lambda model, x, n: model.encode(x, n),
                specs["text_encoder"],
                shaped((1, self.text_tokens, self.text.dim)),
                jax.ShapeDtypeStruct((1,), int),
            ),
            "step": flops(lambda model, *x: model(*x, known.frames), dit, noise, times, context),
            "decode": chunk_flops(specs["decoder"].decoder, self.latents_to_decode(video)),
        }
        if video.images:
            found["encode"] = chunk_flops(specs["encoder"].encoder, self.frames_to_encode(video))
        if video.images and self.image:
            pictures = shaped((video.images, self.image.image, self.image.image, 3))
            found["look"] = flops(lambda tower, x: tower(x), specs["image_encoder"], pictures)
        return found

    def footprint(self, video: Video, dtype, mesh: Any, program: Compiled | None = None) -> Footprint:
        """What denoising takes; without the compiled `program` of a layer (`lower_layer`) activations are left out."""
        shape = self.latents(video), video.branches, self.known(video)
        return programs.footprint(self.transformer_spec(dtype), *shape, mesh, program)

    def text_footprint(self, dtype, mesh: Mesh, program: Compiled | None = None) -> Footprint:
        """What encoding a text takes; `program` is that of `lower_text_layer`."""
        return programs.text_footprint(self.text_encoder_spec(dtype), self.text_tokens, mesh, program)

    def lower_text(self, dtype, mesh: Mesh) -> Lowered:
        """The program that encodes a text, lowered for the devices of a mesh, which need not be here."""
        return programs.lower_text(self.text_encoder_spec(dtype), self.text_tokens, mesh)

    def lower_text_layer(self, dtype, mesh: Mesh) -> Lowered:
        """That of one of the encoder's layers, where some are streamed."""
        return programs.lower_text_layer(self.text_encoder_spec(dtype), self.text_tokens, mesh)

    def lower_step(self, video: Video, table: SolverTable, dtype, mesh: Mesh, *, streamed: bool = False) -> Lowered:
        """That of a denoising step of a solver, with all layers resident or, `streamed`, in pinned host memory."""
        shape = self.latents(video), video.branches, self.known(video)
        noisy = table.noise is not None
        spec = self.transformer_spec(dtype)
        return programs.lower_step(spec, *shape, mesh, past=table.past, noisy=noisy, streamed=streamed)

    def lower_layer(self, video: Video, dtype, mesh: Mesh) -> Lowered:
        """That of one of its layers, where some are streamed."""
        shape = self.latents(video), video.branches, self.known(video)
        return programs.lower_layer(self.transformer_spec(dtype), *shape, mesh)

    def lower_look(self, images: int, dtype, mesh: Mesh) -> Lowered:
        """That in which the image encoder looks at so many pictures."""
        return programs.lower_look(self.specs(dtype)["image_encoder"], images, mesh)

    def lower_encode(self, video: Video, mesh: Mesh) -> Lowered:
        """That which encodes the last chunk of frames."""
        return programs.lower_encode(self.networks.vae.spec(self.vae).encoder, self.frames_to_encode(video), mesh)

    def lower_decode(self, video: Video, mesh: Mesh) -> Lowered:
        """That which decodes the last chunk of latent frames."""
        return programs.lower_decode(self.networks.vae.spec(self.vae).decoder, self.latents_to_decode(video), mesh)


def first_and_last(chunks: list[Any]) -> list[Any]:
    """The first and, if there are others, the last."""
    return [chunks[0], chunks[-1]] if len(chunks) > 1 else chunks


def shaped(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chunk_flops(coder: Any, chunks: list[tuple[int, ...]]) -> dict[str, float]:
    """Of an encoder or decoder that is given the last of these chunks."""
    cache = None
    if len(chunks) > 1:
        _, cache = jax.eval_shape(lambda model, x: model(x, None), coder, shaped(chunks[0]))
    return flops(lambda model, *inputs: model(*inputs), coder, shaped(chunks[-1]), cache)
