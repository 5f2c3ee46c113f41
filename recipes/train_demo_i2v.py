"""Train the image-to-video demo model that ships in the package: the demo model goes on from a given first frame.

    python recipes/train_demo_i2v.py --work runs/demo-i2v    # 10 minutes on two cores; stopped, it goes on

As in Wan 2.2 TI2V-5B the given frame is the first latent frame: it has no noise and timestep 0. The weights start as
those of train_demo.py's model, whose autoencoder stays as it is. The clips show the same world, but shapes lie anywhere
in it: otherwise the first frame would say what happens, and the model would not learn to read it in the prompt. One
clip in four is made without a given frame, so that a prompt alone is enough, as before.
"""

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
from train_demo import DIT_BATCH, POOL, SEED, Generator, export, flow_loss, make_latents, set_up, train_generator

from vidax.models.locate import locate
from vidax.models.wan import vae
from vidax.weights import load

STEPS, RATE = 500, 1e-3
WITHOUT_IMAGE = DIT_BATCH // 4  # clips of a batch
PIPELINE = {
    "_class_name": "WanImageToVideoPipeline",
    "expand_timesteps": True,
    "boundary_ratio": None,
    "image_encoder": [None, None],
    "image_processor": [None, None],
    "transformer_2": [None, None],
}


def demo() -> tuple[vae.VAE, Generator]:
    """The text-to-video demo, to be trained in float32."""
    _, model = locate("demo", {})
    parts = {name: load(*part) for name, (part, _, _) in model.components(jnp.float32).items()}
    return parts["vae"], Generator(parts["text_encoder"], parts["transformer"])


def loss(model: Generator, key, latents, ids, lengths):
    """The first WITHOUT_IMAGE clips from text alone, the others from their first frame too."""

    def part(clips: slice, given: int):
        return flow_loss(model, jax.random.fold_in(key, given), latents[clips], ids[clips], lengths[clips], given)[0]

    text, image = part(slice(WITHOUT_IMAGE), 0), part(slice(WITHOUT_IMAGE, None), 1)
    share = WITHOUT_IMAGE / DIT_BATCH
    return share * text + (1 - share) * image, {"text": text, "image": image}


def main() -> None:
    work, out = set_up("demo-i2v", __doc__)
    autoencoder, generator = demo()
    scenes = demo_data.sample_scenes(np.random.default_rng((SEED, 4)), POOL, anywhere=True)
    latents = make_latents(work, autoencoder, scenes)  # normalised, as the shipped autoencoder gives them
    generator = train_generator(work, latents, scenes, generator, loss, STEPS, RATE)
    export(out, PIPELINE, autoencoder, generator)


if __name__ == "__main__":
    main()
