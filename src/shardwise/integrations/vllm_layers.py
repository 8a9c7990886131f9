"""What the layers of a model in vLLM give for tokens that it has sampled, for `Engine.mismatch(layers=...)`.

It runs vLLM's own kernels: each row is a prompt, of which vLLM computes every token in one or several forwards. Blocks
of vLLM return what they add and the sum before it apart, and the sum of both is what other engines' blocks return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.observe.layer_outputs import blocks_of

Tensor = torch.Tensor
_START = "Make it with LLM(..., enforce_eager=True)."


class _Note:
    """A forward hook that keeps the hidden states `[tokens, features]` of each call."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, module: nn.Module, args: object, output: Any) -> None:
        added, before = output if isinstance(output, tuple) else (output, None)
        self.found.append((added if before is None else added + before).cpu())


def layer_outputs(llm: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
    """What each block of `llm`, a `vllm.LLM`, gives for `input_ids` `[rows, tokens]`: `[rows, tokens, features]` by its
    name in vLLM, on the host, and zero where `attention_mask` is.

    The engine's prefix cache is emptied, or it would not compute all tokens. An engine in a process of its own needs
    `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, as functions are sent to it. Raises `ConfigError` for an engine whose layers
    are compiled into one function, `ModelError` for a model whose blocks are in no list.
    """
    from vllm import SamplingParams

    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.apply_model(_watch)
    rows: list[dict[str, Tensor]] = []
    try:
        for row, is_token in zip(input_ids, mask, strict=True):
            llm.reset_prefix_cache()
            llm.generate({"prompt_token_ids": row[is_token].tolist()}, once, use_tqdm=False)
            workers = llm.apply_model(_taken)
            rows.append(_placed({name: one for own in reversed(workers) for name, one in own.items()}, is_token))
    finally:
        llm.apply_model(_forget)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _placed(found: dict[str, Tensor], is_token: Tensor) -> dict[str, Tensor]:
    """`found` of one row, `[tokens, features]`, where its tokens are."""
    placed = {}
    for name, output in found.items():
        if len(output) != int(is_token.sum()):
            raise ConfigError(f"vLLM has called {name} for {len(output)} of {int(is_token.sum())} tokens. {_START}")
        placed[name] = output.new_zeros(len(is_token), output.shape[-1])
        placed[name][is_token] = output
    return placed


# -- in vLLM's workers ------------------------------------------------------------------------------------


def _watch(model: nn.Module) -> None:
    names = blocks_of(model)
    if not names:
        raise ModelError(f"{type(model).__name__} has no list of blocks.")
    for name in names:
        model.get_submodule(name).register_forward_hook(_Note())


def _taken(model: nn.Module) -> dict[str, Tensor]:
    """What was noted since the last time."""
    taken = {}
    for name, module in model.named_modules():
        for note in _notes(module):
            taken[name] = torch.cat(note.found) if note.found else torch.empty(0, 0, device="cpu")
            note.found.clear()
    return taken


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _Note):
                del module._forward_hooks[number]


def _notes(module: nn.Module) -> Sequence[_Note]:
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, _Note)]
