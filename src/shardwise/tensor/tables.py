"""Ready rules for models of the transformers library that bring no tensor-parallel plan, and what its own plans mean.

Facts about classes of that library, which is not imported: models are known by `config.model_type`, modules by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.config import StyleName
from shardwise.errors import ModelError

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
"""The library's names for styles that we have too."""
EXPERTS_STYLE = "moe_tp_experts"
"""The library's name for a module of stacked experts that is cut by features."""
STACKED_STYLES = {"packed_colwise": (1, 2), "colwise": (1, 1), "packed_rowwise": (2, 2), "rowwise": (2, 1)}
"""Its names for parameters of such modules: the dimension that is cut, and how many matrices are fused along it."""


LEFT_OUT: dict[str, dict[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},  # its parameters act on what is cut
}
"""By `config.model_type`, what the plans of models in the library lack."""


@dataclass(frozen=True)
class TensorRule:
    """How a module is cut. `parts` matrices of one size are fused in it, each with so many attention `heads`."""

    style: StyleName
    parts: int = 1
    heads: int | None = None


@dataclass(frozen=True)
class Ready:
    """Rules by patterns of module names, attributes that count what is cut, and arguments of attention modules
    `[batch * heads, ...]`, of which a rank takes those of its own heads."""

    rules: Mapping[str, TensorRule]
    divide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: Mapping[str, str] = field(default_factory=dict)


COLUMN, ROW, VOCABULARY = TensorRule("column"), TensorRule("row"), TensorRule("vocabulary")

_TABLES = {
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
    "vit": Ready(
        {
            "layers.*.attention.[qkv]_proj": COLUMN,
            "layers.*.attention.o_proj": ROW,
            "layers.*.mlp.fc1": COLUMN,
            "layers.*.mlp.fc2": ROW,
        },
    ),
}
"""By `config.model_type`, where nothing else decides."""


def _bloom(config: Any) -> Ready:
    """Queries, keys and values are fused head by head, and ALiBi's biases (arXiv:2108.12409) are an argument."""
    return Ready(
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


def _falcon(config: Any) -> Ready:
    """Fused by the heads of keys and values, each with its queries; all queries of the older models share one."""
    if config.alibi or (config.multi_query and not config.new_decoder_architecture):
        what = "ALiBi" if config.alibi else "one head of keys and values, fused with all queries"
        raise ModelError(
            f"This Falcon has {what}, for which shardwise has no tensor-parallel plan. It has one for rotary positions "
            f"and the new decoder architecture (Falcon-40B, 180B). Leave tp out of the mesh."
        )
    heads = config.num_kv_heads if config.new_decoder_architecture else config.num_attention_heads
    return Ready(
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


_BY_CONFIG: dict[str, Callable[[Any], Ready]] = {"bloom": _bloom, "falcon": _falcon}
READY = sorted({*_TABLES, *_BY_CONFIG})
"""The values of `config.model_type` that there are rules for."""


def ready_for(model: nn.Module) -> Ready | None:
    """The rules that we have for a model. Raises `ModelError` for a kind of it that they do not fit."""
    config = config_of(model)
    kind = "" if config is None else str(config.model_type)
    return _BY_CONFIG[kind](config) if kind in _BY_CONFIG else _TABLES.get(kind)


LATENT = ("q_b_proj", "kv_b_proj")
"""Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what makes heads of what all heads share."""
QUERIES = (*LATENT, "q_proj", "query", "q", "c_attn", "o_proj", "out_proj", "o", "c_proj", "attention.output.dense")
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
