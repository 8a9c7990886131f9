"""Models of the transformers library, small enough for a test. Tests that use them are skipped without the library."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

VOCAB = 97
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}


def library() -> Any:
    return pytest.importorskip("transformers")


def gpt2(**changes: Any) -> nn.Module:
    without_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return library().GPT2LMHeadModel(library().GPT2Config(**sizes, **without_dropout, **changes))


def llama(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return library().LlamaForCausalLM(library().LlamaConfig(**{**sizes, **ATTENTION, **changes}))


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return library().ViTForImageClassification(
        library().ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0)
    )


def qwen_moe() -> nn.Module:
    """A model with more than ten experts, so that their numeric order differs from the order of their names."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return library().Qwen2MoeForCausalLM(
        library().Qwen2MoeConfig(**sizes, **ATTENTION, **experts, shared_expert_intermediate_size=8)
    )


def mixtral(num_blocks: int = 1) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": num_blocks}
    return library().MixtralForCausalLM(library().MixtralConfig(**sizes, **ATTENTION, num_local_experts=2))


def dinov2() -> nn.Module:
    """A model whose checkpoint files store gate and up projections of a block in one tensor."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    return library().Dinov2Model(library().Dinov2Config(**sizes, use_swiglu_ffn=True))
