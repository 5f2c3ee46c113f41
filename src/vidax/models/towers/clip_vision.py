"""The image tower of CLIP (Radford et al. 2021), as image-to-video models read it, and how a picture comes to it.

Unusual about this network: what is read are the hidden states before the last layer, all of them and not normalised,
so that the last layer, the norm after it and the projection are no part of it; a norm stands before the first layer;
patches have no bias; GELU is exact. Unusual about its input: the official picture is squashed to a square, by a
bicubic filter that does not widen where it makes pictures smaller.

Source: Wan-Video/Wan2.1, wan/modules/clip.py; transformers' modeling_clip.py and image_processing_pil_clip.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from PIL import Image

from vidax.errors import UserError
from vidax.media.image import stretch_bicubic
from vidax.nn import MLP, LayerNorm, Linear, Spec, fan_in, module, stack, static
from vidax.ops.attention import attention
from vidax.parallel.rules import everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig:
    """Architecture. Full-size values of ViT-H/14: official wan/modules/clip.py, clip_xlm_roberta_vit_h_14.

    layers: those of the checkpoint, one more than are run.
    """

    dim: int = 1280
    layers: int = 32
    heads: int = 16
    mlp_dim: int = 5120
    image: int = 224  # height and width of a picture
    patch: int = 14
    eps: float = 1e-5

    @property
    def tokens(self) -> int:
        """The class token, and one for each patch."""
        return 1 + (self.image // self.patch) ** 2


@module
class SelfAttention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    heads: int = static()

    @staticmethod
    def spec(c: CLIPVisionConfig, dtype):
        heads = ("tower", c.heads)
        q, k, v = (Linear.spec(c.dim, c.dim, (None, heads), dtype) for _ in range(3))
        return SelfAttention(q, k, v, Linear.spec(c.dim, c.dim, (heads, None), dtype), c.heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B S D]; S counts patches and the class token."""
        dtype = self.q.weight.dtype
        heads = [
            rearrange(project(x), "b s (n k) -> b s n k", n=self.heads).astype(dtype)
            for project in (self.q, self.k, self.v)
        ]
        return self.o(rearrange(attention(*heads, split="heads"), "b s n k -> b s (n k)"))


@module
class Block:
    norm1: LayerNorm
    attention: SelfAttention
    norm2: LayerNorm
    mlp: MLP

    @staticmethod
    def spec(c: CLIPVisionConfig, dtype):
        norm1, norm2 = LayerNorm.spec(c.dim, c.eps), LayerNorm.spec(c.dim, c.eps)
        return Block(
            norm1,
            SelfAttention.spec(c, dtype),
            norm2,
            MLP.spec(c.dim, c.mlp_dim, c.dim, dtype, "gelu", (None, "tower")),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B S D] float32, the residual stream."""
        x = everywhere(x + self.attention(self.norm1(x)))
        return everywhere(x + self.mlp(self.norm2(x)))


@module
class CLIPVision:
    class_embedding: Any  # [D], float32
    patch_embedding: Linear
    position_embedding: Any  # [S D], float32
    pre_norm: LayerNorm
    blocks: Any  # a Block, every leaf with a leading axis for all layers but the checkpoint's last
    config: CLIPVisionConfig = static()

    @staticmethod
    def spec(c: CLIPVisionConfig, dtype=jnp.bfloat16):
        """Parameter descriptions; `dtype` is that of the matrices. Embeddings and norms are float32, as the residual
        stream is.
        """
        return CLIPVision(
            class_embedding=Spec((c.dim,), (None,), jnp.float32, fan_in(c.dim)),
            patch_embedding=Linear.spec(
                3 * c.patch**2, c.dim, (None, None), dtype, bias=False, kernel=(c.patch, c.patch)
            ),
            position_embedding=Spec((c.tokens, c.dim), (None, None), jnp.float32, fan_in(c.dim)),
            pre_norm=LayerNorm.spec(c.dim, c.eps),
            blocks=stack(Block.spec(c, dtype), c.layers - 1),
            config=c,
        )

    def embed(self, pixels: jax.Array) -> jax.Array:
        """What the layers work on, [B S D] float32, from pixels [B image image 3] of `preprocess`."""
        patch = self.config.patch
        patches = rearrange(pixels, "b (h ph) (w pw) c -> b (h w) (c ph pw)", ph=patch, pw=patch)
        x = self.patch_embedding(patches)
        first = jnp.broadcast_to(self.class_embedding, (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([first, x], 1) + self.position_embedding
        return everywhere(self.pre_norm(x))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Hidden states [B S D] float32 before the checkpoint's last layer, of the class token and then of the patches,
        row by row.
        """
        x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), self.embed(pixels), self.blocks)
        return x


# Of the pictures that CLIP was trained on, red, green and blue in [0, 1]: official wan/modules/clip.py, _clip.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def preprocess(image: np.ndarray, config: Mapping[str, Any] | None = None, *, size: int = 224) -> np.ndarray:
    """Pixels [size size 3] float32 of a picture [H W 3], uint8 or floating point in [0, 1].

    config: a diffusers folder's `image_processor/preprocessor_config.json`. With it the picture is made and cut as
        transformers does (`cropped`), without it squashed as the official code does.
    """
    assert image.ndim == 3 and image.shape[2] == 3, image.shape
    if config is not None:
        return cropped(image, config)
    # The official code resizes values in [-1, 1]. The weights of each pixel add up to 1: the result is the same.
    return normalised(stretch_bicubic(image, (size, size)), MEAN, STD)


def normalised(values: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    return (values - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)


# transformers' values for what an image processor's config leaves out, and the steps that none may leave out.
PROCESSOR_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,  # bicubic
    "rescale_factor": 1 / 255,
    "image_mean": MEAN,
    "image_std": STD,
}
PROCESSOR_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")


def cropped(image: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Pixels of a picture as transformers' CLIPImageProcessorPil makes them: resized with antialiasing until the
    shorter side fits, then cut around the centre.

    Raises UserError for a config with other steps.
    """
    c = {**PROCESSOR_DEFAULTS, **config}
    if left_out := [step for step in PROCESSOR_STEPS if not c.get(step, True)]:
        raise UserError(f"the image processor's config: {left_out[0]} is false; only true is supported")
    size = c["size"]["shortest_edge"] if c["size"].keys() == {"shortest_edge"} else None
    if c["crop_size"] != {"height": size, "width": size}:
        raise UserError(
            f"the image processor's config: size {c['size']} with crop_size {c['crop_size']}; only a shortest_edge and "
            "a square of that height and width are supported"
        )
    image = image if image.dtype == np.uint8 else np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    height, width = (size * side // min(image.shape[:2]) for side in image.shape[:2])
    picture = Image.fromarray(image).resize((width, height), Image.Resampling(c["resample"]))
    top, left = (height - size) // 2, (width - size) // 2
    values = np.asarray(picture)[top : top + size, left : left + size] * np.float32(c["rescale_factor"])
    return normalised(values, c["image_mean"], c["image_std"])
