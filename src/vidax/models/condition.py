"""What is known of a video's latents before it is made, in one of two ways: channels beside the noisy ones, or clean
frames in the place of the first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vidax.nn import module


@module
class Given:
    """Known latents, the same at every step."""

    channels: Any  # [1 F H W C'] beside the noisy ones, or None
    frames: Any  # [1 f H W C] in the place of the first ones, or None

    @property
    def count(self) -> int:
        """How many latent frames are clean."""
        return 0 if self.frames is None else self.frames.shape[1]

    def beside(self, latents: jax.Array) -> jax.Array:
        """What the network sees of noisy latents [1 F H W C]."""
        latents = self.first(latents)
        return latents if self.channels is None else jnp.concatenate([latents, self.channels], -1)

    def first(self, latents: Any) -> Any:
        """Latents [1 F H W C], of the device or the host, with the clean frames in their place."""
        if self.frames is None:
            return latents
        stack = np if isinstance(latents, np.ndarray) else jnp
        return stack.concatenate([self.frames, latents[:, self.count :]], 1)


NOTHING = Given(None, None)
