"""What the diffusion transformers of all families have in common: text and latents in, layers in between, a prediction
out. A step may run them as one program, or the three parts of it by themselves.
"""

import dataclasses
from typing import Any, ClassVar, Protocol

import jax

from vidax.nn import gathered, through_layers
from vidax.parallel.rules import Axis, constrain

Context = Any  # a module of arrays [B n D]: what the text, and perhaps an image, is to the layers


class Tokens(Protocol):
    """A video between the layers: a module whose `x` [B L D] the layers change, with what each of them takes beside."""

    x: Any
    axes: ClassVar[dict[str, tuple[Axis, ...]]]  # the logical axes of each field that has arrays


class DiffusionTransformer:
    """A network of many like layers; its parts are pure functions of its weights.

    layer: the class of a layer: `layer(tokens, context)` is the residual stream [B L D] after it, and
        `layer.spec(config, dtype)` describes it, for a dtype of None too where only its axes are wanted.
    blocks: all layers, stacked; None where they are elsewhere. config: has at least dim, layers, heads, patch,
    in_channels and out_channels.
    """

    layer: ClassVar[Any]
    blocks: Any
    config: Any

    def prepare(self, text: jax.Array, image: jax.Array | None = None) -> Context:
        """Text embeddings [B S text_dim], and states of an image encoder [1 I image_dim], to what every step begins
        with: a module of arrays [B n D].
        """
        raise NotImplementedError

    def embed(self, latents: jax.Array, timesteps: jax.Array, context: Context, given: int = 0) -> Any:
        """What the layers work on (`Tokens`), from latents [B F H W in_channels] and timesteps [B], the first `given`
        frames of which are clean.
        """
        raise NotImplementedError

    def block(self, layer: Any, tokens: Any, context: Context) -> Any:
        """The tokens after one layer, whose weights lie as they are stored."""
        layer = gathered(self.layer.spec(self.config, None), layer)
        return dataclasses.replace(tokens, x=layer(tokens, context))

    def finish(self, tokens: Any, latents: jax.Array) -> jax.Array:
        """What the network predicts, [B F H W out_channels] float32 and whole on every device, from what the last layer
        gives, for latents [B F H W C].
        """
        raise NotImplementedError

    def __call__(self, latents: jax.Array, timesteps: jax.Array, context: Context, given: int = 0) -> jax.Array:
        """The prediction [B F H W out_channels] float32, as from `embed`, every `block` and `finish`. A layer that lies
        in host memory is copied to the device for its turn.
        """
        tokens = self.embed(latents, timesteps, context, given)

        def step(layer: Any, x: jax.Array) -> jax.Array:
            return self.block(layer, dataclasses.replace(tokens, x=x), context).x

        x = through_layers(step, self.layer.spec(self.config, None), self.blocks, tokens.x)
        return self.finish(dataclasses.replace(tokens, x=x), latents)


def residual(x: jax.Array) -> jax.Array:
    """Tokens [B L D] as they lie between the layers."""
    return constrain(x, "batch", "tokens", None)
