"""Our rules for models of transformers without a tensor-parallel plan, and the meaning of the styles in its plans.

This file knows classes of transformers without importing it: models by `config.model_type`, modules by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.plan import StyleName

STYLES: dict[str, StyleName] = {
    "colwise": "column",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise": "row",
    "rowwise_split_input": "row_scattered",
    "rowwise_rep": "row_scattered",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "embedding_column",
    "replicated_with_grad_allreduce": "summed",
    "mla_kv_a_proj": "mla_kv_a_proj",
    "replicate": "replicated",
}
"""Transformers' names of our styles."""
EXPERTS_STYLE = "moe_tp_experts"
"""Transformers' style for a module of stacked experts that is split by features."""
STACKED_STYLES = {"packed_colwise": (1, 2), "colwise": (1, 1), "packed_rowwise": (2, 2), "rowwise": (2, 1)}
"""Transformers' styles for parameters of such modules: the split dimension, and the number of matrices fused along
it."""
LEFT_OUT: dict[str, dict[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},  # has parameters of its own
}
"""By `config.model_type`, styles that are missing in transformers' own plans."""


@dataclass(frozen=True)
class TensorRule:
    """How a module is split. It has `parts` fused matrices of equal size, each with that many attention `heads`."""

    style: StyleName
    parts: int = 1
    heads: int | None = None


@dataclass(frozen=True)
class KnownModel:
    """Rules by patterns of module names, attributes to divide, and arguments of attention modules with the shape
    `[batch * heads, ...]`, which are narrowed to a rank's heads."""

    rules: Mapping[str, TensorRule]
    divide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_head_arguments: Mapping[str, str] = field(default_factory=dict)


COLUMN, ROW, VOCABULARY = TensorRule("column"), TensorRule("row"), TensorRule("vocabulary")
_ENCODER_LAYERS = {
    "layer.*.attention.self.query": COLUMN,
    "layer.*.attention.self.key": COLUMN,
    "layer.*.attention.self.value": COLUMN,
    "layer.*.attention.output.dense": ROW,
    "layer.*.intermediate.dense": COLUMN,
    "layer.*.output.dense": ROW,
}
"""The layers of BERT and of those that have copied them."""
_BART = KnownModel(
    {
        "layers.*.*_attn.[qkv]_proj": COLUMN,
        "layers.*.*_attn.out_proj": ROW,
        "layers.*.fc1": COLUMN,
        "layers.*.fc2": ROW,
    },
    {"layers.*.self_attn": ("num_heads",), "layers.*.encoder_attn": ("num_heads",)},
)
"""BART and those that have copied it. Heads stay whole: most add a bias of the whole vocabulary to their logits."""

_TABLES = {
    **dict.fromkeys(("bart", "blenderbot", "m2m_100", "marian", "mbart", "pegasus", "whisper"), _BART),
    "gpt2": KnownModel(
        {
            "h.*.attn.c_attn": TensorRule("column", parts=3),
            "h.*.attn.c_proj": ROW,
            "h.*.mlp.c_fc": COLUMN,
            "h.*.mlp.c_proj": ROW,
            "wte": VOCABULARY,
            "lm_head": VOCABULARY,
        },
        {"h.*.attn": ("num_heads", "split_size")},
    ),
    "opt": KnownModel(
        {
            "layers.*.self_attn.[qkv]_proj": COLUMN,
            "layers.*.self_attn.out_proj": ROW,
            "layers.*.fc1": COLUMN,
            "layers.*.fc2": ROW,
            "embed_tokens": VOCABULARY,
            "lm_head": VOCABULARY,
        },
        {"layers.*.self_attn": ("num_heads",)},
    ),
    "bert": KnownModel(
        {
            **_ENCODER_LAYERS,
            "embeddings.word_embeddings": VOCABULARY,
            "cls.predictions.decoder": VOCABULARY,
        },
        {"layer.*.attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "roberta": KnownModel(
        {
            **_ENCODER_LAYERS,
            "embeddings.word_embeddings": VOCABULARY,
            "lm_head.decoder": VOCABULARY,
        },
        {"layer.*.attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "t5": KnownModel(
        {
            "*Attention.[qkv]": COLUMN,
            "*Attention.o": ROW,
            "*Attention.relative_attention_bias": TensorRule("embedding_heads"),
            "*DenseReluDense.wi*": COLUMN,
            "*DenseReluDense.wo": ROW,
            "shared": VOCABULARY,
            "lm_head": VOCABULARY,
        },
        {"SelfAttention": ("n_heads", "inner_dim"), "EncDecAttention": ("n_heads", "inner_dim")},
    ),
    "vit": KnownModel(
        {
            "layers.*.attention.[qkv]_proj": COLUMN,
            "layers.*.attention.o_proj": ROW,
            "layers.*.mlp.fc1": COLUMN,
            "layers.*.mlp.fc2": ROW,
        },
    ),
}
"""By `config.model_type`, for models whose rules do not depend on the rest of the config."""


def _bloom(config: Any) -> KnownModel:
    """Queries, keys and values are interleaved by head, and ALiBi's biases (arXiv:2108.12409) are an argument."""
    return KnownModel(
        {
            "h.*.self_attention.query_key_value": TensorRule("column", heads=config.n_head),
            "h.*.self_attention.dense": TensorRule("row", heads=config.n_head),
            "h.*.mlp.dense_h_to_4h": COLUMN,
            "h.*.mlp.dense_4h_to_h": ROW,
            "word_embeddings": VOCABULARY,
            "lm_head": VOCABULARY,
        },
        {"h.*.self_attention": ("num_heads",)},
        {"h.*.self_attention": "alibi"},
    )


def _falcon(config: Any) -> KnownModel:
    """Queries, keys and values are interleaved by key and value head. In older models all queries share one."""
    if config.alibi or (config.multi_query and not config.new_decoder_architecture):
        what = "ALiBi" if config.alibi else "one key and value head, fused with all queries"
        raise ModelError(
            f"This Falcon has {what}, for which shardwise has no tensor-parallel plan. It has one for Falcon with "
            f"rotary positions and the new decoder architecture (40B, 180B). Leave tp out of the mesh."
        )
    heads = config.num_kv_heads if config.new_decoder_architecture else config.num_attention_heads
    return KnownModel(
        {
            "h.*.self_attention.query_key_value": TensorRule("column", heads=heads),
            "h.*.self_attention.dense": TensorRule("row", heads=heads),
            "h.*.mlp.dense_h_to_4h": COLUMN,
            "h.*.mlp.dense_4h_to_h": ROW,
            "word_embeddings": VOCABULARY,
            "lm_head": VOCABULARY,
        },
        {"h.*.self_attention": ("num_heads", "num_kv_heads")},
    )


_BY_CONFIG: dict[str, Callable[[Any], KnownModel]] = {"bloom": _bloom, "falcon": _falcon}
KNOWN_TYPES = sorted({*_TABLES, *_BY_CONFIG})
"""The values of `config.model_type` for which there are rules."""


def known_model(model: nn.Module) -> KnownModel | None:
    """Our rules for a model; `None` if there are none. Raises `ModelError` for an unsupported variant."""
    config = config_of(model)
    kind = "" if config is None else str(config.model_type)
    return _BY_CONFIG[kind](config) if kind in _BY_CONFIG else _TABLES.get(kind)


LATENT = ("q_b_proj", "kv_b_proj")
"""Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what makes heads of what all heads share."""
QUERIES = (*LATENT, "q_proj", "query", "q", "c_attn", "o_proj", "out_proj", "o", "c_proj", "attention.output.dense")
KEYS = ("k_proj", "v_proj", "key", "value", "k", "v")


def config_of(model: nn.Module) -> Any:
    """The config of a transformers model (of its text part, if it has one); `None` for any other module."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return None
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def heads_of(config: Any, path: str) -> tuple[int, int] | None:
    """The number of heads of the attention projection at `path`, and of query heads; `None` for other modules."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not _is_attention(path):
        return None
    groups = getattr(config, "num_key_value_heads", None) or heads
    last = path.rpartition(".")[2]
    if last in KEYS:
        return groups, heads
    return (heads, heads) if last in QUERIES or path.endswith(QUERIES[-1]) else None


def groups_of(config: Any) -> int | None:
    """The number of key and value heads."""
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "num_key_value_heads", None) or heads


def _is_attention(path: str) -> bool:
    return any(word in path.lower() for word in ("attn", "attention"))
