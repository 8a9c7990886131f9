"""Models of the transformers library, small enough for a test. Tests that build one are skipped without it."""

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
    return library().LlamaForCausalLM(library().LlamaConfig(**sizes, **ATTENTION, **changes))


def mixtral() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return library().MixtralForCausalLM(library().MixtralConfig(**sizes, **ATTENTION, num_local_experts=2))
