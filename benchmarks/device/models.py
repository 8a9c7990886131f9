"""The models that are measured: Llamas as large as a card bears, and small ones of several families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.llama import LlamaSize, transformers_config

Batch = dict[str, Tensor]


FIFTH = LlamaSize(12, 1024, 2816, 16, 8, 32_000, 1024, 4)
"""0.2 billion parameters."""
TINY = LlamaSize(2, 64, 96, 4, 2, 128, 32, 2)
ONE_BILLION = LlamaSize(20, 2048, 5632, 16, 8, 32_000, 4096, 4)
"""1.03 billion parameters."""


def llama(size: LlamaSize, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With random values, made on the device."""
    from transformers import LlamaForCausalLM

    config = transformers_config(size)
    torch.manual_seed(0)
    with device:
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


def tokens_of(size: LlamaSize, device: torch.device, rank: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1 + rank)
    drawn = torch.randint(0, size.vocab, (size.batch, size.seq), generator=generator).to(device)
    return {"input_ids": drawn, "labels": drawn.clone()}


Family = Callable[[torch.device, bool], tuple[nn.Module, Batch]]


def _llama(device: torch.device, is_small: bool) -> tuple[nn.Module, Batch]:
    size = TINY if is_small else FIFTH
    return llama(size, device), tokens_of(size, device)


def _gpt2(device: torch.device, is_small: bool) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, blocks, length = (64, 2, 32) if is_small else (1024, 12, 1024)
    config: Any = GPT2Config(n_embd=width, n_layer=blocks, n_head=width // 16, n_positions=length, use_cache=False)
    config.vocab_size = 128 if is_small else config.vocab_size
    return _made(GPT2LMHeadModel, config, device), _drawn(config.vocab_size, 4, length, device)


def _bert(device: torch.device, is_small: bool) -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    width, blocks, length = (64, 2, 32) if is_small else (1024, 16, 512)
    config: Any = BertConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=width // 16, intermediate_size=4 * width
    )
    config.vocab_size = 128 if is_small else config.vocab_size
    return _made(BertForMaskedLM, config, device), _drawn(config.vocab_size, 8, length, device)


def _vit(device: torch.device, is_small: bool) -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    width, blocks, size = (64, 2, 32) if is_small else (1024, 16, 224)
    config: Any = ViTConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 16,
        intermediate_size=4 * width,
        image_size=size,
    )
    config.num_labels = 10
    pixels = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(1)).to(device)
    return _made(ViTForImageClassification, config, device), {
        "pixel_values": pixels,
        "labels": torch.arange(16, device=device) % 10,
    }


def _mixtral(device: torch.device, is_small: bool) -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    width, blocks, length = (64, 2, 32) if is_small else (768, 8, 1024)
    config: Any = MixtralConfig(
        vocab_size=32_000 if not is_small else 128,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        num_local_experts=4,
        use_cache=False,
    )
    return _made(MixtralForCausalLM, config, device), _drawn(config.vocab_size, 4, length, device)


def _made(kind: Any, config: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model: nn.Module = kind(config)
    return model.train()


def _drawn(vocab: int, rows: int, length: int, device: torch.device) -> Batch:
    tokens = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


FAMILIES: dict[str, Family] = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "vit": _vit, "mixtral": _mixtral}
