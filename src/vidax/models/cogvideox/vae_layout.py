"""How an autoencoder of CogVideoX is published: its `config.json`, and where each parameter stands in the diffusers
layout and in that of the official code (SAT).

A rename turns our path (left, a regular expression) into the checkpoint's name; renames apply in order. Sources:
diffusers' autoencoder_kl_cogvideox.py; zai-org/CogVideo, sat/vae_modules/cp_enc_dec.py and
tools/convert_weight_sat2hf.py; vae/config.json of THUDM/CogVideoX-2b.
"""

import itertools
from collections.abc import Mapping as Map
from typing import Any

from vidax.errors import UserError
from vidax.models.cogvideox.vae import EPS, VAEConfig
from vidax.weights.configs import NOTHING, merge
from vidax.weights.layouts import Shapes
from vidax.weights.mapping import Mapping

# What a config must say, or leave out, for this code to compute what diffusers computes.
VAE_FIXED = {
    "act_fn": ("silu",),
    "in_channels": (3,),
    "out_channels": (3,),
    "norm_eps": (EPS,),
    "use_quant_conv": (False,),
    "use_post_quant_conv": (False,),
    "shift_factor": (None,),
    "latents_mean": (None,),
    "latents_std": (None,),
}

# Keys of a config.json to our fields.
VAE_KEYS = {
    "block_out_channels": "channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "blocks",
    "norm_num_groups": "groups",
    "temporal_compression_ratio": "time_factor",
    "scaling_factor": "scaling_factor",
    "invert_scale_latents": "invert_scale_latents",
    "sample_height": "sample_height",
    "sample_width": "sample_width",
}


def vae_config(config: Map[str, Any], file: str, numbers: Map[str, Any] = NOTHING) -> VAEConfig:
    """The autoencoder of a diffusers `vae/config.json`.

    file: what errors call it. numbers: fields that are known from the tensors; the file must agree with them, and
    where it is silent they stand. What neither says is that of CogVideoX-2b, its scaling factor too.
    """
    read = VAEConfig(**merge(config, VAE_KEYS, VAE_FIXED, file, numbers, "the autoencoder of CogVideoX"))
    if any(dim % read.groups for dim in read.channels):
        raise UserError(
            f"{file}: block_out_channels {list(read.channels)} in norm_num_groups {read.groups}; the groups must "
            "divide each of them"
        )
    if read.time_factor not in (most := tuple(2**level for level in range(len(read.channels)))):
        raise UserError(f"{file}: temporal_compression_ratio is {read.time_factor}; these levels take one of {most}")
    return read


def vae_numbers(shapes: Shapes) -> dict[str, Any]:
    """Of the number of groups, the frames that are one and the scale nothing can be seen."""
    levels = (f"encoder.down_blocks.{level}.resnets." for level in itertools.count())
    found = list(itertools.takewhile(lambda level: f"{level}0.first.conv.weight" in shapes, levels))
    blocks = itertools.takewhile(lambda i: f"{found[0]}{i}.first.conv.weight" in shapes, itertools.count())
    return {
        "channels": tuple(shapes.shape(f"{level}0.first.conv.weight", 5)[0] for level in found),
        "latent_channels": shapes.shape("decoder.conv_in.weight", 5)[1],
        "blocks": len(list(blocks)) if found else 0,
    }


COMMON = (
    (r"\.first\.(norm|conv)\.", r".\g<1>1."),
    (r"\.second\.(norm|conv)\.", r".\g<1>2."),
    (r"\.out\.(norm|conv)\.", r".\1_out."),
    (r"\.(conv1|conv2|conv_in|conv_out|conv_y|conv_b)\.", r".\1.conv."),
)
VAE_DIFFUSERS = Mapping(renames=COMMON)


def vae_sat(c: VAEConfig | None = None) -> Mapping:
    """`3d-vae.pt`. The official code counts the decoder's levels from that of the largest frames."""
    last = len((c or VAEConfig()).channels) - 1
    return Mapping(
        renames=(
            *COMMON,
            *((rf"^decoder\.up_blocks\.{level}\.", f"decoder.up.{last - level}.") for level in range(last + 1)),
            (r"\.down_blocks\.", ".down."),
            (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
            (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
            (r"\.resnets\.", ".block."),
            (r"\.(up|down)samplers\.0\.", r".\1sample."),
            (r"\.conv_shortcut\.", ".nin_shortcut."),
        ),
        skips=((r"^loss\.", "only for training"),),
    )


# What is left unread of an autoencoder, by the half that is not needed: the same names in every layout.
VAE_UNUSED = {
    "encoder": ((r"^encoder\.", "only decoding is needed"),),
    "decoder": ((r"^decoder\.", "only encoding is needed"),),
}
