"""Where each parameter of a Wan model stands in the published checkpoints: the diffusers layout and the official
one.

Repacks for single files keep one of these layouts, mostly behind a prefix (`Mapping.prefix`).

A rename turns our path (left, a regular expression) into the checkpoint's name; renames apply in order. `{}` is the
layer's number. Sources: diffusers' transformer_wan.py and autoencoder_kl_wan.py; Wan-Video/Wan2.1, wan/modules;
transformers' modeling_clip.py. The names that transformers gives the text encoder are in towers/t5_files.py.
"""

import re

from vidax.models.towers.clip_vision import CLIPVisionConfig
from vidax.models.wan.vae import VAEConfig
from vidax.weights.mapping import Mapping

DIT_DIFFUSERS = Mapping(
    renames=(
        (r"^text_embedding\.fc(\d)", r"condition_embedder.text_embedder.linear_\1"),
        (r"^time_embedding\.fc(\d)", r"condition_embedder.time_embedder.linear_\1"),
        (r"^image_embedding\.positions$", "condition_embedder.image_embedder.pos_embed"),
        (r"^image_embedding\.mlp\.fc1", "condition_embedder.image_embedder.ff.net.0.proj"),
        (r"^image_embedding\.mlp\.fc2", "condition_embedder.image_embedder.ff.net.2"),
        (r"^image_embedding\.", "condition_embedder.image_embedder."),
        (r"^time_projection", "condition_embedder.time_proj"),
        (r"^head\.modulation", "scale_shift_table"),
        (r"^head\.head", "proj_out"),
        (r"^blocks\.", "blocks.{}."),
        (r"\.modulation$", ".scale_shift_table"),
        (r"\.norm3\.", ".norm2."),  # diffusers numbers the norms by position, the official code by creation
        (r"\.self_attn\.", ".attn1."),
        (r"\.cross_attn\.", ".attn2."),
        (r"\.norm_k_img\.", ".norm_added_k."),
        (r"\.([kv])_img\.", r".add_\1_proj."),
        (r"\.([qkv])\.", r".to_\1."),
        (r"\.o\.", ".to_out.0."),
        (r"\.ffn\.fc1", ".ffn.net.0.proj"),
        (r"\.ffn\.fc2", ".ffn.net.2"),
    )
)

DIT_OFFICIAL = Mapping(
    renames=(
        (r"^time_projection", "time_projection.1"),
        (r"^image_embedding\.positions$", "img_emb.emb_pos"),
        (r"^image_embedding\.norm1", "img_emb.proj.0"),
        (r"^image_embedding\.mlp\.fc1", "img_emb.proj.1"),
        (r"^image_embedding\.mlp\.fc2", "img_emb.proj.3"),
        (r"^image_embedding\.norm2", "img_emb.proj.4"),
        (r"^blocks\.", "blocks.{}."),
        (r"\.fc1\.", ".0."),
        (r"^(text_embedding|time_embedding)\.fc1", r"\1.0"),
        (r"\.fc2\.", ".2."),
    )
)

VAE_DIFFUSERS = Mapping(
    renames=(
        (r"^encoder\.quant_conv", "quant_conv"),
        (r"^decoder\.post_quant_conv", "post_quant_conv"),
        (r"\.out\.norm\.", ".norm_out."),
        (r"\.out\.conv\.", ".conv_out."),
        (r"\.conv\.", ".resample.1."),
    )
)

VAE22_DIFFUSERS = Mapping(renames=(*VAE_DIFFUSERS.renames, (r"\.(up|down)samplers\.0\.", r".\1sampler.")))


def vae_official(c: VAEConfig) -> Mapping:
    """The official code numbers the layers of a level in one list with its up- or downsampling, and 2.1 those of all
    levels, so the mapping depends on their number.
    """
    stride = c.blocks + 2  # residual blocks of a decoder level, and its upsampling
    flat = [
        (rf"^decoder\.up_blocks\.{level}\.resnets\.{i}\.", f"decoder.upsamples.{level * stride + i}.")
        for level in range(len(c.multipliers))
        for i in range(c.blocks + 1)
    ]
    flat += [
        (rf"^decoder\.up_blocks\.{level}\.upsamplers\.0\.", f"decoder.upsamples.{level * stride + stride - 1}.")
        for level in range(len(c.multipliers) - 1)
    ]
    nested = [
        (r"^decoder\.up_blocks\.(\d+)\.resnets\.", r"decoder.upsamples.\1.upsamples."),
        (r"^decoder\.up_blocks\.(\d+)\.upsamplers\.0\.", rf"decoder.upsamples.\1.upsamples.{c.blocks + 1}."),
        (r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.downsamples.\1.downsamples."),
        (r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", rf"encoder.downsamples.\1.downsamples.{c.blocks}."),
    ]
    return Mapping(
        renames=(
            (r"^encoder\.quant_conv", "conv1"),
            (r"^decoder\.post_quant_conv", "conv2"),
            (r"\.conv_in\.", ".conv1."),
            (r"\.mid_block\.resnets\.0\.", ".middle.0."),
            (r"\.mid_block\.attentions\.0\.", ".middle.1."),
            (r"\.mid_block\.resnets\.1\.", ".middle.2."),
            *(nested if c.residual else flat),
            (r"^encoder\.down_blocks\.", "encoder.downsamples."),
            (r"\.out\.norm\.", ".head.0."),
            (r"\.out\.conv\.", ".head.2."),
            (r"\.conv\.", ".resample.1."),
            (r"\.conv_shortcut\.", ".shortcut."),
            (r"(downsamples|upsamples|middle)\.(\d+)\.norm1\.", r"\1.\2.residual.0."),
            (r"(downsamples|upsamples|middle)\.(\d+)\.conv1\.", r"\1.\2.residual.2."),
            (r"(downsamples|upsamples|middle)\.(\d+)\.norm2\.", r"\1.\2.residual.3."),
            (r"(downsamples|upsamples|middle)\.(\d+)\.conv2\.", r"\1.\2.residual.6."),
        )
    )


UMT5_OFFICIAL = Mapping(
    renames=(
        (r"^blocks\.", "blocks.{}."),
        (r"\.attention\.relative_attention_bias$", ".pos_embedding.embedding.weight"),
        (r"\.attention\.", ".attn."),
        (r"\.mlp\.gate\.", ".ffn.gate.0."),
        (r"\.mlp\.up\.", ".ffn.fc1."),
        (r"\.mlp\.down\.", ".ffn.fc2."),
    )
)

CLIP_UNUSED = "the hidden states before the last layer are what is read"


def clip_official(c: CLIPVisionConfig) -> Mapping:
    """The image half of a CLIP whose text half is XLM-RoBERTa. Queries, keys and values are one matrix."""
    return Mapping(
        renames=(
            (r"^", "visual."),
            (r"\.class_embedding$", ".cls_embedding"),
            (r"\.position_embedding$", ".pos_embedding"),
            (r"\.blocks\.", ".transformer.{}."),
            *((rf"\.attention\.{part}\.(.+)$", rf".attn.to_qkv.\1[{i}/3]") for i, part in enumerate("qkv")),
            (r"\.attention\.o\.", ".attn.proj."),
            (r"\.mlp\.fc1\.", ".mlp.0."),
            (r"\.mlp\.fc2\.", ".mlp.2."),
        ),
        skips=(
            (rf"^visual\.(transformer\.{c.layers - 1}|post_norm)\.", CLIP_UNUSED),
            (r"^visual\.head$|^log_scale$", "only to compare pictures with texts"),
            (r"^textual\.", "the text encoder of the model is another"),
        ),
        ones=(("class_embedding", 2), ("position_embedding", 1)),
    )


def clip_diffusers(c: CLIPVisionConfig, prefix: str = "vision_model.") -> Mapping:
    """transformers' CLIPVisionModel. `prefix`: "vision_model." in published files, "" as transformers 5 saves it."""
    inside = re.escape(prefix)
    return Mapping(
        renames=(
            (r"^class_embedding$", "embeddings.class_embedding"),
            (r"^patch_embedding\.", "embeddings.patch_embedding."),
            (r"^position_embedding$", "embeddings.position_embedding.weight"),
            (r"^pre_norm\.", "pre_layrnorm."),  # the name is spelled so
            (r"^blocks\.", "encoder.layers.{}."),
            (r"\.norm([12])\.", r".layer_norm\1."),
            (r"\.attention\.([qkv])\.", r".self_attn.\1_proj."),
            (r"\.attention\.o\.", ".self_attn.out_proj."),
            (r"^", prefix),
        ),
        skips=(
            (rf"^{inside}(encoder\.layers\.{c.layers - 1}|post_layernorm)\.", CLIP_UNUSED),
            (rf"^{inside}embeddings\.position_ids$", "0, 1, 2 and so on"),
            (r"^visual_projection\.", "only to compare pictures with texts"),
        ),
    )
