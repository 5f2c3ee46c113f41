"""Where each parameter of a CogVideoX model stands in the published checkpoints: the diffusers layout and that of the
official code (SAT). The names that transformers gives the text encoder are in towers/t5_files.py.

A rename turns our path (left, a regular expression) into the checkpoint's name; renames apply in order. `{}` is the
layer's number. Sources: diffusers' cogvideox_transformer_3d.py and autoencoder_kl_cogvideox.py; zai-org/CogVideo,
sat/dit_video_concat.py, sat/vae_modules/cp_enc_dec.py and tools/convert_weight_sat2hf.py.
"""

from vidax.models.cogvideox.dit import DiTConfig
from vidax.models.cogvideox.vae import VAEConfig
from vidax.weights.mapping import Mapping

ENDS = r"\.(weight|bias)$"

DIT_DIFFUSERS = Mapping(
    renames=(
        (r"^patch_embedding\.", "patch_embed.proj."),
        (r"^text_embedding\.", "patch_embed.text_proj."),
        (r"^positions$", "patch_embed.pos_embedding"),
        (r"^(time|ofs)_embedding\.fc", r"\1_embedding.linear_"),
        (r"^head\.norm_final\.", "norm_final."),
        (r"^head\.modulation\.", "norm_out.linear."),
        (r"^head\.norm_out\.", "norm_out.norm."),
        (r"^head\.head\.", "proj_out."),
        (r"^blocks\.", "transformer_blocks.{}."),
        (rf"\.video{ENDS}", r".linear.\1[0/2]"),
        (rf"\.text{ENDS}", r".linear.\1[1/2]"),
        (r"\.attn\.([qkv])\.", r".attn1.to_\1."),
        (r"\.attn\.o\.", ".attn1.to_out.0."),
        (r"\.attn\.", ".attn1."),
        (r"\.ffn\.fc1\.", ".ff.net.0.proj."),
        (r"\.ffn\.fc2\.", ".ff.net.2."),
    )
)

LAYER = "transformer.layers.{}."
ADALN = "mixins.adaln_layer."
MODULATIONS = ("norm1.video", "norm2.video", "norm1.text", "norm2.text")

OFFICIAL_UNUSED = (
    (r"\.freqs_(sin|cos)$", "computed from the video's size"),
    (r"^transformer\.(word_embeddings|position_embeddings)\.", "not used by this network"),
)


def dit_official(c: DiTConfig | None = None) -> Mapping:
    """The official layout behind "model.diffusion_model.". Queries, keys and values are one matrix, and so are the four
    modulations of a layer. Where positions are not learned their table may be there and is left unread.
    """
    learned = c is None or c.learned
    positions = () if learned else ((r"^mixins\.pos_embed\.pos_embedding$", "computed from the video's size"),)
    return Mapping(
        renames=(
            (r"^patch_embedding\.", "mixins.patch_embed.proj."),
            (r"^text_embedding\.", "mixins.patch_embed.text_proj."),
            (r"^positions$", "mixins.pos_embed.pos_embedding"),
            (r"^(time|ofs)_embedding\.fc1\.", r"\1_embed.0."),
            (r"^(time|ofs)_embedding\.fc2\.", r"\1_embed.2."),
            (r"^head\.norm_final\.", "transformer.final_layernorm."),
            (r"^head\.modulation\.", "mixins.final_layer.adaLN_modulation.1."),
            (r"^head\.norm_out\.", "mixins.final_layer.norm_final."),
            (r"^head\.head\.", "mixins.final_layer.linear."),
            *(
                (rf"^blocks\.{part}{ENDS}", rf"{ADALN}adaLN_modulations.{{}}.1.\1[{i}/4]")
                for i, part in enumerate(MODULATIONS)
            ),
            (r"^blocks\.norm1\.norm\.", f"{LAYER}input_layernorm."),
            (r"^blocks\.norm2\.norm\.", f"{LAYER}post_attention_layernorm."),
            (rf"^blocks\.attn\.norm_q{ENDS}", rf"{ADALN}query_layernorm_list.{{}}.\1"),
            (rf"^blocks\.attn\.norm_k{ENDS}", rf"{ADALN}key_layernorm_list.{{}}.\1"),
            *(
                (rf"^blocks\.attn\.{part}{ENDS}", rf"{LAYER}attention.query_key_value.\1[{i}/3]")
                for i, part in enumerate("qkv")
            ),
            (r"^blocks\.attn\.o\.", f"{LAYER}attention.dense."),
            (r"^blocks\.ffn\.fc1\.", f"{LAYER}mlp.dense_h_to_4h."),
            (r"^blocks\.ffn\.fc2\.", f"{LAYER}mlp.dense_4h_to_h."),
        ),
        skips=(*OFFICIAL_UNUSED, *positions),
    )


VAE_COMMON = (
    (r"\.first\.(norm|conv)\.", r".\g<1>1."),
    (r"\.second\.(norm|conv)\.", r".\g<1>2."),
    (r"\.out\.(norm|conv)\.", r".\1_out."),
    (r"\.(conv1|conv2|conv_in|conv_out|conv_y|conv_b)\.", r".\1.conv."),
)
VAE_DIFFUSERS = Mapping(renames=VAE_COMMON)


def vae_official(c: VAEConfig | None = None) -> Mapping:
    """`3d-vae.pt`. The official code counts the decoder's levels from that of the largest frames."""
    last = len((c or VAEConfig()).channels) - 1
    return Mapping(
        renames=(
            *VAE_COMMON,
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
