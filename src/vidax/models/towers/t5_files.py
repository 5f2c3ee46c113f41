"""T5 encoders as a family's component: `config.json`, the names of tensors in transformers, and what shapes say.

Source: transformers' modeling_t5.py and modeling_umt5.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.weights.configs import NOTHING, merge
from vidax.weights.layouts import Kind, Layout, Shapes, ours
from vidax.weights.mapping import Mapping as Names

KEYS = {
    "vocab_size": "vocabulary",
    "d_model": "dim",
    "d_kv": "head_size",
    "num_heads": "heads",
    "d_ff": "mlp_dim",
    "num_layers": "layers",
    "relative_attention_num_buckets": "buckets",
    "relative_attention_max_distance": "max_distance",
    "layer_norm_epsilon": "eps",
}


def read_config(
    config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING, *, model_type: str, model: str
) -> T5Config:
    """The encoder of a `config.json` of the type "umt5" or "t5"; other arguments as in `weights.configs.merge`."""
    fixed = {"model_type": (model_type,), "feed_forward_proj": ("gated-gelu",)}
    stated = merge(config, KEYS, fixed, file, numbers, model)
    return T5Config(**{**stated, "shared_bias": model_type == "t5"})


def numbers(shapes: Shapes) -> dict[str, Any]:
    """Fields of `T5Config`, those that the shapes of the tensors say."""
    vocabulary, dim = shapes.shape("token_embedding.weight", 2)
    shared = "relative_attention_bias" in shapes
    table = "relative_attention_bias" if shared else "blocks.attention.relative_attention_bias"
    buckets, heads = shapes.shape(table, 2)
    return {
        "vocabulary": vocabulary,
        "dim": dim,
        "layers": shapes.layers("blocks.norm1.weight"),
        "heads": heads,
        "head_size": shapes.shape("blocks.attention.q.weight", 2)[0] // heads,
        "mlp_dim": shapes.shape("blocks.mlp.gate.weight", 2)[0],
        "buckets": buckets,
    }


# One table of position biases for all layers stands in the first (T5), or each layer has its own (UMT5).
TRANSFORMERS = Names(
    renames=(
        (r"^token_embedding", "shared"),
        (r"^norm\.", "encoder.final_layer_norm."),
        (r"^relative_attention_bias$", "encoder.block.0.attention.relative_attention_bias"),
        (r"^blocks\.", "encoder.block.{}."),
        (r"\.norm1\.", ".layer.0.layer_norm."),
        (r"\.attention\.relative_attention_bias$", ".layer.0.SelfAttention.relative_attention_bias.weight"),
        (r"\.attention\.", ".layer.0.SelfAttention."),
        (r"\.norm2\.", ".layer.1.layer_norm."),
        (r"\.mlp\.gate\.", ".layer.1.DenseReluDense.wi_0."),
        (r"\.mlp\.up\.", ".layer.1.DenseReluDense.wi_1."),
        (r"\.mlp\.down\.", ".layer.1.DenseReluDense.wo."),
    ),
    skips=((r"^spiece_model$", "the tokenizer, read by towers/tokenizer.py"),),
    aliases=(("shared.weight", "encoder.embed_tokens.weight"),),
)

FIRST, SECOND = "encoder.block.0.layer.0.", "encoder.block.1.layer.0."
TABLE = "SelfAttention.relative_attention_bias.weight"
# By which tensors transformers' files are known, and those of `vidax convert`.
MARKERS = {
    "umt5": (f"{FIRST}SelfAttention.q.weight", f"{SECOND}{TABLE}"),
    "t5": (f"{FIRST}{TABLE}", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"),
}
TABLES = {"umt5": "blocks.attention.relative_attention_bias", "t5": "relative_attention_bias"}


def kind(model_type: str, config: Callable[..., T5Config], *published: Layout) -> Kind:
    """The text encoder of a family: of the type "umt5" or "t5", its config read by `config`. published: in which other
    layouts it is published.
    """
    return Kind(
        title="text encoder",
        layouts=(
            ours("token_embedding.weight", TABLES[model_type], "blocks.mlp.gate.weight"),
            *published,
            Layout(name="diffusers", markers=MARKERS[model_type], names=lambda config: TRANSFORMERS),
        ),
        classes=(model_type,),
        numbers=numbers,
        config=config,
        spec=T5Encoder.spec,
    )
