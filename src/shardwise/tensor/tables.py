"""Ready rules for models of the transformers library that bring no tensor-parallel plan, and what its own plans mean.

Facts about classes of that library, which is not imported: models are known by `config.model_type`, modules by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.config import StyleName

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
    "replicate": "replicated",
}
"""The library's names for styles that we have too."""


@dataclass(frozen=True)
class TensorRule:
    """How a module is cut. `parts` matrices of one size are fused in it, each with so many attention `heads`."""

    style: StyleName
    parts: int = 1
    heads: int | None = None


@dataclass(frozen=True)
class Ready:
    """Rules by patterns of module names, and attributes that count what is cut."""

    rules: Mapping[str, TensorRule]
    divide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


COLUMN, ROW, VOCABULARY = TensorRule("column"), TensorRule("row"), TensorRule("vocabulary")

TABLES = {
    "gpt2": Ready(
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
    "opt": Ready(
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
    "bert": Ready(
        {
            "layer.*.attention.self.query": COLUMN,
            "layer.*.attention.self.key": COLUMN,
            "layer.*.attention.self.value": COLUMN,
            "layer.*.attention.output.dense": ROW,
            "layer.*.intermediate.dense": COLUMN,
            "layer.*.output.dense": ROW,
            "embeddings.word_embeddings": VOCABULARY,
            "cls.predictions.decoder": VOCABULARY,
        },
        {"layer.*.attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "t5": Ready(
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
}
"""By `config.model_type`."""

QUERIES = ("q_proj", "query", "q", "c_attn", "o_proj", "out_proj", "o", "c_proj", "attention.output.dense")
KEYS = ("k_proj", "v_proj", "key", "value", "k", "v")


def config_of(model: nn.Module) -> Any:
    """The configuration of a model of the transformers library, that of its text part; `None` of any other module."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return None
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def heads_of(config: Any, path: str) -> tuple[int, int] | None:
    """The attention heads of the module at `path`, and of its queries; `None` if it is not known to be of attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not _is_attention(path):
        return None
    groups = getattr(config, "num_key_value_heads", None) or heads
    last = path.rpartition(".")[2]
    if last in KEYS:
        return groups, heads
    return (heads, heads) if last in QUERIES or path.endswith(QUERIES[-1]) else None


def groups_of(config: Any) -> int | None:
    """Key and value heads."""
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "num_key_value_heads", None) or heads


def _is_attention(path: str) -> bool:
    return any(word in path.lower() for word in ("attn", "attention"))
