"""The full-size models against the tensors of the published checkpoints, name by name and shape by shape.

tests/published.py gives {name: shape} of the official checkpoints. For diffusers' layout they are renamed by the table
below, which is independent of vidax.models.wan.mapping: it goes from official to diffusers names, while that goes from
ours to either. Nothing is allocated.
"""

import dataclasses
import math
import re
from collections.abc import Mapping as Map
from typing import Any, NamedTuple

import pytest
from published import FLF2V, manifest

from vidax.errors import UserError
from vidax.models.cogvideox import config as cogvideox
from vidax.models.cogvideox import mapping as cogvideox_mapping
from vidax.models.cogvideox.dit import DiT as CogVideoX
from vidax.models.cogvideox.vae import VAE as CogVideoXVAE
from vidax.models.cogvideox.vae import VAEConfig as CogVideoXVAEConfig
from vidax.models.towers import t5_files
from vidax.models.towers.t5 import T5_XXL, T5Encoder
from vidax.models.wan import mapping
from vidax.models.wan.config import (
    UMT5_XXL,
    WAN21_1_3B,
    WAN21_14B,
    WAN21_FLF2V,
    WAN21_I2V,
    WAN21_VAE,
    WAN22_5B,
    WAN22_I2V,
    WAN22_VAE,
)
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.vae import VAE
from vidax.nn import named_leaves, parameter_bytes
from vidax.weights import Mapping, check_names, checkpoint_names
from vidax.weights.mapping import part_of


class Model(NamedTuple):
    spec: Any
    official: Mapping
    diffusers: Mapping
    renames: tuple[tuple[str, str], ...]  # official to diffusers: the first pattern that matches the whole name
    tensors: int
    parameters: int


ENDS = r"(weight|bias)"

DIT_RENAMES = (
    (rf"patch_embedding\.{ENDS}", r"patch_embedding.\1"),
    (rf"(text|time)_embedding\.0\.{ENDS}", r"condition_embedder.\1_embedder.linear_1.\2"),
    (rf"(text|time)_embedding\.2\.{ENDS}", r"condition_embedder.\1_embedder.linear_2.\2"),
    (rf"time_projection\.1\.{ENDS}", r"condition_embedder.time_proj.\1"),
    (r"head\.modulation", "scale_shift_table"),
    (rf"head\.head\.{ENDS}", r"proj_out.\1"),
    (r"blocks\.(\d+)\.modulation", r"blocks.\1.scale_shift_table"),
    (rf"blocks\.(\d+)\.norm3\.{ENDS}", r"blocks.\1.norm2.\2"),
    (rf"blocks\.(\d+)\.self_attn\.([qkv])\.{ENDS}", r"blocks.\1.attn1.to_\2.\3"),
    (rf"blocks\.(\d+)\.self_attn\.o\.{ENDS}", r"blocks.\1.attn1.to_out.0.\2"),
    (r"blocks\.(\d+)\.self_attn\.norm_([qk])\.weight", r"blocks.\1.attn1.norm_\2.weight"),
    (rf"blocks\.(\d+)\.cross_attn\.([qkv])\.{ENDS}", r"blocks.\1.attn2.to_\2.\3"),
    (rf"blocks\.(\d+)\.cross_attn\.o\.{ENDS}", r"blocks.\1.attn2.to_out.0.\2"),
    (r"blocks\.(\d+)\.cross_attn\.norm_([qk])\.weight", r"blocks.\1.attn2.norm_\2.weight"),
    (rf"blocks\.(\d+)\.cross_attn\.([kv])_img\.{ENDS}", r"blocks.\1.attn2.add_\2_proj.\3"),
    (r"blocks\.(\d+)\.cross_attn\.norm_k_img\.weight", r"blocks.\1.attn2.norm_added_k.weight"),
    (rf"blocks\.(\d+)\.ffn\.0\.{ENDS}", r"blocks.\1.ffn.net.0.proj.\2"),
    (rf"blocks\.(\d+)\.ffn\.2\.{ENDS}", r"blocks.\1.ffn.net.2.\2"),
    (rf"img_emb\.proj\.0\.{ENDS}", r"condition_embedder.image_embedder.norm1.\1"),
    (rf"img_emb\.proj\.1\.{ENDS}", r"condition_embedder.image_embedder.ff.net.0.proj.\1"),
    (rf"img_emb\.proj\.3\.{ENDS}", r"condition_embedder.image_embedder.ff.net.2.\1"),
    (rf"img_emb\.proj\.4\.{ENDS}", r"condition_embedder.image_embedder.norm2.\1"),
    (r"img_emb\.emb_pos", "condition_embedder.image_embedder.pos_embed"),
)

UMT5_RENAMES = (
    (r"token_embedding\.weight", "shared.weight"),
    (r"norm\.weight", "encoder.final_layer_norm.weight"),
    (r"blocks\.(\d+)\.norm1\.weight", r"encoder.block.\1.layer.0.layer_norm.weight"),
    (r"blocks\.(\d+)\.attn\.([qkvo])\.weight", r"encoder.block.\1.layer.0.SelfAttention.\2.weight"),
    (
        r"blocks\.(\d+)\.pos_embedding\.embedding\.weight",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    (r"blocks\.(\d+)\.norm2\.weight", r"encoder.block.\1.layer.1.layer_norm.weight"),
    (r"blocks\.(\d+)\.ffn\.gate\.0\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wi_0.weight"),
    (r"blocks\.(\d+)\.ffn\.fc1\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wi_1.weight"),
    (r"blocks\.(\d+)\.ffn\.fc2\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wo.weight"),
)

# The full-size decoder's flat list `upsamples` has three residual blocks and an upsampling for each level.
UPSAMPLES = {
    **{i: f"up_blocks.{i // 4}.resnets.{i % 4}" for i in range(15) if i % 4 < 3},
    **{i: f"up_blocks.{i // 4}.upsamplers.0" for i in (3, 7, 11)},
}
MIDDLE = {0: "mid_block.resnets.0", 1: "mid_block.attentions.0", 2: "mid_block.resnets.1"}
INNER = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
    **{same: same for same in ("resample.1.", "time_conv.", "norm.", "to_qkv.", "proj.")},
}
VAE_ENDS = (
    (rf"conv1\.{ENDS}", r"quant_conv.\1"),
    (rf"conv2\.{ENDS}", r"post_quant_conv.\1"),
    (rf"(encoder|decoder)\.conv1\.{ENDS}", r"\1.conv_in.\2"),
    (r"(encoder|decoder)\.head\.0\.gamma", r"\1.norm_out.gamma"),
    (rf"(encoder|decoder)\.head\.2\.{ENDS}", r"\1.conv_out.\2"),
)
VAE_RENAMES = (
    *VAE_ENDS,
    *(
        (rf"(encoder|decoder)\.{place}\.{re.escape(inner)}(weight|bias|gamma)", rf"\1.{new_place}.{new_inner}\2")
        for inner, new_inner in INNER.items()
        for place, new_place in (
            *((rf"downsamples\.{i}", f"down_blocks.{i}") for i in range(11)),
            *((rf"middle\.{i}", new) for i, new in MIDDLE.items()),
            *((rf"upsamples\.{i}", new) for i, new in UPSAMPLES.items()),
        )
    ),
)

# In 2.2 a level is a list: in the encoder two residual blocks and a downsampling, in the decoder three and one.
LEVELS = (
    *((rf"downsamples\.(\d)\.downsamples\.{i}", rf"down_blocks.\2.resnets.{i}") for i in range(2)),
    (r"downsamples\.(\d)\.downsamples\.2", r"down_blocks.\2.downsampler"),
    *((rf"upsamples\.(\d)\.upsamples\.{i}", rf"up_blocks.\2.resnets.{i}") for i in range(3)),
    (r"upsamples\.(\d)\.upsamples\.3", r"up_blocks.\2.upsampler"),
    *((rf"middle\.({i})", new) for i, new in MIDDLE.items()),
)
VAE22_RENAMES = (
    *VAE_ENDS,
    *(
        (rf"(encoder|decoder)\.{place}\.{re.escape(inner)}(weight|bias|gamma)", rf"\1.{new_place}.{new_inner}\3")
        for inner, new_inner in INNER.items()
        for place, new_place in LEVELS
    ),
)


def transformer(config: DiTConfig, tensors: int, parameters: int) -> Model:
    return Model(DiT.spec(config), mapping.DIT_OFFICIAL, mapping.DIT_DIFFUSERS, DIT_RENAMES, tensors, parameters)


# The rules of CogVideoX's official converter, tools/convert_weight_sat2hf.py, for its autoencoder.
COGVIDEOX_PLACES = (
    *((rf"encoder\.down\.{i}\.block", rf"encoder.down_blocks.{i}.resnets") for i in range(4)),
    *((rf"decoder\.up\.{i}\.block", rf"decoder.up_blocks.{3 - i}.resnets") for i in range(4)),
)
COGVIDEOX_VAE_RENAMES = (
    (r"((?:en|de)coder\.(?:conv|norm)_.*)", r"\1"),
    (r"(..coder)\.mid\.block_1\.(.*)", r"\1.mid_block.resnets.0.\2"),
    (r"(..coder)\.mid\.block_2\.(.*)", r"\1.mid_block.resnets.1.\2"),
    *((rf"{place}\.(\d)\.((?:norm|conv).*)", rf"{new}.\1.\2") for place, new in COGVIDEOX_PLACES),
    *((rf"{place}\.(\d)\.nin_shortcut\.{ENDS}", rf"{new}.\1.conv_shortcut.\2") for place, new in COGVIDEOX_PLACES),
    (r"encoder\.down\.(\d)\.downsample\.(.*)", r"encoder.down_blocks.\1.downsamplers.0.\2"),
    *((rf"decoder\.up\.{i}\.upsample\.(.*)", rf"decoder.up_blocks.{3 - i}.upsamplers.0.\1") for i in range(4)),
)

MODELS = {
    "wan2.1_t2v_1.3b_dit": transformer(WAN21_1_3B, 825, 1_418_996_800),
    "wan2.1_t2v_14b_dit": transformer(WAN21_14B, 1095, 14_288_491_584),
    "wan2.1_i2v_14b_dit": transformer(WAN21_I2V, 1303, 16_394_878_784),
    FLF2V: transformer(WAN21_FLF2V, 1304, 16_394_878_784 + 514 * 1280),
    "wan2.2_t2v_a14b_expert_dit": transformer(WAN21_14B, 1095, 14_288_491_584),
    "wan2.2_i2v_a14b_expert_dit": transformer(WAN22_I2V, 1095, 14_288_491_584 + 20 * 4 * 5120),
    "wan2.2_ti2v_5b_dit": transformer(WAN22_5B, 825, 4_999_787_712),
    "wan2.1_vae": Model(
        VAE.spec(WAN21_VAE), mapping.vae_official(WAN21_VAE), mapping.VAE_DIFFUSERS, VAE_RENAMES, 194, 126_892_531
    ),
    "wan2.2_vae": Model(
        VAE.spec(WAN22_VAE), mapping.vae_official(WAN22_VAE), mapping.VAE22_DIFFUSERS, VAE22_RENAMES, 196, 704_688_668
    ),
    "cogvideox_vae_sat_DERIVED": Model(
        CogVideoXVAE.spec(CogVideoXVAEConfig()),
        cogvideox_mapping.vae_official(),
        cogvideox_mapping.VAE_DIFFUSERS,
        COGVIDEOX_VAE_RENAMES,
        436,
        215_583_907,
    ),
    "wan_umt5_xxl_enc": Model(
        T5Encoder.spec(UMT5_XXL), mapping.UMT5_OFFICIAL, t5_files.TRANSFORMERS, UMT5_RENAMES, 242, 5_680_910_336
    ),
}

every_model = pytest.mark.parametrize("name", MODELS)


Shapes = Map[str, tuple[int, ...]]


def in_diffusers_layout(shapes: Shapes, renames: tuple[tuple[str, str], ...]) -> dict[str, tuple[int, ...]]:
    def rename(name: str) -> str:
        new = [match.expand(to) for pattern, to in renames if (match := re.fullmatch(pattern, name))]
        assert len(new) == 1, (name, new)
        return new[0]

    renamed = {rename(name): shape for name, shape in shapes.items()}
    assert len(renamed) == len(shapes)
    return renamed


@every_model
def test_the_official_layout(name):
    model = MODELS[name]
    match = check_names(model.spec, model.official, manifest(name))
    assert not match.skipped and not match.twins
    assert sum(len(leaf.names) for leaf in match.leaves) == model.tensors


@every_model
def test_the_layout_of_diffusers(name):
    model = MODELS[name]
    match = check_names(model.spec, model.diffusers, in_diffusers_layout(manifest(name), model.renames))
    assert not match.skipped and not match.twins
    assert sum(len(leaf.names) for leaf in match.leaves) == model.tensors


@every_model
@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_mappings_are_one_to_one(name, layout):
    """From a checkpoint's name there is one way back, to one parameter and layer."""
    model = MODELS[name]
    leaves = checkpoint_names(model.spec, getattr(model, layout))
    back = {tensor: (leaf.path, layer) for leaf in leaves for layer, tensor in enumerate(leaf.names)}
    assert len(back) == sum(len(leaf.names) for leaf in leaves) == model.tensors
    assert len(set(back.values())) == len(back)
    assert {path for path, _ in back.values()} == {path for path, _ in named_leaves(model.spec)}


@every_model
def test_the_number_of_parameters(name):
    model = MODELS[name]
    assert sum(math.prod(leaf.shape) for _, leaf in named_leaves(model.spec)) == model.parameters
    assert parameter_bytes(model.spec) >= 2 * model.parameters


def test_umt5_with_both_names_of_its_embedding():
    """transformers may save the embedding under either name, or both."""
    model = MODELS["wan_umt5_xxl_enc"]
    shapes = in_diffusers_layout(manifest("wan_umt5_xxl_enc"), model.renames)
    both = shapes | {"encoder.embed_tokens.weight": shapes["shared.weight"]}
    assert check_names(model.spec, model.diffusers, both).twins == [("shared.weight", "encoder.embed_tokens.weight")]
    del both["shared.weight"]
    check_names(model.spec, model.diffusers, both)


def test_what_only_training_needs_is_left_unread():
    name = "cogvideox_vae_sat_DERIVED"
    shapes = manifest(name) | {"loss.logvar": [], "loss.discriminator.0.weight": [64, 3, 4, 4]}
    assert len(check_names(MODELS[name].spec, MODELS[name].official, shapes).skipped) == 2


def test_another_size_does_not_fit():
    shapes = manifest("wan2.1_t2v_14b_dit")
    with pytest.raises(UserError, match=r"unexpected: blocks\.30\."):
        check_names(DiT.spec(WAN21_1_3B), mapping.DIT_OFFICIAL, shapes)


# CogVideoX: (config, tensors in the official layout, tensors in diffusers', values)
COGVIDEOX = {
    "2b": (cogvideox.COGVIDEOX_2B, 556, 736, 1_693_783_872),
    "5b": (cogvideox.COGVIDEOX_5B, 772, 1024, 5_570_283_072),
    "5b_i2v": (cogvideox.COGVIDEOX_5B_I2V, 773, 1025, 5_625_087_552),
    "1.5_5b": (cogvideox.COGVIDEOX15_5B, 772, 1024, 5_570_676_352),
    "1.5_5b_i2v": (cogvideox.COGVIDEOX15_5B_I2V, 776, 1028, 5_571_594_880),
}
SAT_PREFIX = "model.diffusion_model."

# The rules of the official converter, tools/convert_weight_sat2hf.py, for whole tensors.
SAT_RENAMES = (
    (rf"mixins\.patch_embed\.(proj|text_proj)\.{ENDS}", r"patch_embed.\1.\2"),
    (r"mixins\.pos_embed\.pos_embedding", "patch_embed.pos_embedding"),
    (rf"(time|ofs)_embed\.0\.{ENDS}", r"\1_embedding.linear_1.\2"),
    (rf"(time|ofs)_embed\.2\.{ENDS}", r"\1_embedding.linear_2.\2"),
    (rf"mixins\.adaln_layer\.query_layernorm_list\.(\d+)\.{ENDS}", r"transformer_blocks.\1.attn1.norm_q.\2"),
    (rf"mixins\.adaln_layer\.key_layernorm_list\.(\d+)\.{ENDS}", r"transformer_blocks.\1.attn1.norm_k.\2"),
    (rf"transformer\.layers\.(\d+)\.input_layernorm\.{ENDS}", r"transformer_blocks.\1.norm1.norm.\2"),
    (rf"transformer\.layers\.(\d+)\.post_attention_layernorm\.{ENDS}", r"transformer_blocks.\1.norm2.norm.\2"),
    (rf"transformer\.layers\.(\d+)\.attention\.dense\.{ENDS}", r"transformer_blocks.\1.attn1.to_out.0.\2"),
    (rf"transformer\.layers\.(\d+)\.mlp\.dense_h_to_4h\.{ENDS}", r"transformer_blocks.\1.ff.net.0.proj.\2"),
    (rf"transformer\.layers\.(\d+)\.mlp\.dense_4h_to_h\.{ENDS}", r"transformer_blocks.\1.ff.net.2.\2"),
    (rf"transformer\.final_layernorm\.{ENDS}", r"norm_final.\1"),
    (rf"mixins\.final_layer\.adaLN_modulation\.1\.{ENDS}", r"norm_out.linear.\1"),
    (rf"mixins\.final_layer\.norm_final\.{ENDS}", r"norm_out.norm.\1"),
    (rf"mixins\.final_layer\.linear\.{ENDS}", r"proj_out.\1"),
)
# The same for tensors that it splits: into equal parts, as far as shapes show.
SAT_PARTS = (
    (
        rf"transformer\.layers\.(\d+)\.attention\.query_key_value\.{ENDS}",
        r"transformer_blocks.\1.attn1.to_{}.\2",
        "qkv",
    ),
    (rf"mixins\.adaln_layer\.adaLN_modulations\.(\d+)\.1\.{ENDS}", r"transformer_blocks.\1.norm{}.linear.\2", "12"),
)


def cogvideox_shapes(name: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Names and shapes in the official layout and in diffusers'."""
    official = manifest(f"cogvideox_{name}_sat_DERIVED")
    whole, split = {}, {}
    for tensor, shape in official.items():
        bare = tensor.removeprefix(SAT_PREFIX)
        found = [(match, to, parts) for pattern, to, parts in SAT_PARTS if (match := re.fullmatch(pattern, bare))]
        if not found:
            whole[bare] = shape
        for match, to, parts in found:
            rows = shape[0] // len(parts)
            split |= {match.expand(to).replace("{}", part): [rows, *shape[1:]] for part in parts}
    return official, in_diffusers_layout(whole, SAT_RENAMES) | split


@pytest.mark.parametrize("name", COGVIDEOX)
def test_cogvideox(name):
    config, official, diffusers, values = COGVIDEOX[name]
    spec = CogVideoX.spec(config)
    sat = dataclasses.replace(cogvideox_mapping.dit_official(config), prefix=SAT_PREFIX)
    layouts = (sat, official), (cogvideox_mapping.DIT_DIFFUSERS, diffusers)
    for (names, tensors), shapes in zip(layouts, cogvideox_shapes(name), strict=True):
        match = check_names(spec, names, shapes)
        assert not match.skipped and not match.twins
        assert len({part_of(name)[0] for leaf in match.leaves for name in leaf.names}) == tensors == len(shapes)
    assert sum(math.prod(leaf.shape) for _, leaf in named_leaves(spec)) == values


def test_cogvideox_modulations_are_where_the_converter_puts_them():
    """Of 12 chunks it takes 0 to 2 and 6 to 8 for the first norm, video first, the others for the second."""
    at = {}
    for layout, names in (("sat", cogvideox_mapping.dit_official()), ("diffusers", cogvideox_mapping.DIT_DIFFUSERS)):
        for leaf in checkpoint_names(CogVideoX.spec(cogvideox.COGVIDEOX_2B), names):
            if match := re.fullmatch(r"blocks\.(norm[12]\.(video|text))\.weight", leaf.path):
                at.setdefault(match[1], {})[layout] = part_of(leaf.names[0])
    table = "mixins.adaln_layer.adaLN_modulations.0.1.weight"
    assert {part: found["sat"] for part, found in at.items()} == {
        "norm1.video": (table, 0, 4),
        "norm2.video": (table, 1, 4),
        "norm1.text": (table, 2, 4),
        "norm2.text": (table, 3, 4),
    }
    assert {part: found["diffusers"] for part, found in at.items()} == {
        f"norm{i}.{part}": (f"transformer_blocks.0.norm{i}.linear.weight", half, 2)
        for i in (1, 2)
        for half, part in enumerate(("video", "text"))
    }


def test_a_table_of_sinusoids_is_left_unread():
    shapes = manifest("cogvideox_2b_sat_DERIVED") | {f"{SAT_PREFIX}mixins.pos_embed.pos_embedding": [1, 17776, 1920]}
    names = dataclasses.replace(cogvideox_mapping.dit_official(cogvideox.COGVIDEOX_2B), prefix=SAT_PREFIX)
    match = check_names(CogVideoX.spec(cogvideox.COGVIDEOX_2B), names, shapes)
    assert match.skipped == {f"{SAT_PREFIX}mixins.pos_embed.pos_embedding": "computed from the video's size"}


def test_t5():
    """Of UMT5's tensors T5 v1.1 has all but the position biases of the layers after the first."""
    shapes = in_diffusers_layout(manifest("wan_umt5_xxl_enc"), UMT5_RENAMES)
    later = re.compile(r"encoder\.block\.[1-9]\d*\.layer\.0\.SelfAttention\.relative_attention_bias\.weight")
    shapes = {name: shape for name, shape in shapes.items() if not later.fullmatch(name)} | {
        "shared.weight": [32128, 4096]
    }
    spec = T5Encoder.spec(T5_XXL)
    match = check_names(spec, t5_files.TRANSFORMERS, shapes | {"encoder.embed_tokens.weight": [32128, 4096]})
    assert match.twins == [("shared.weight", "encoder.embed_tokens.weight")]
    assert sum(len(leaf.names) for leaf in match.leaves) == 219
    assert sum(math.prod(leaf.shape) for _, leaf in named_leaves(spec)) == 4_762_310_656
