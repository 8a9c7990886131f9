"""Layers that a model skips at random in training: LayerDrop (https://arxiv.org/abs/1909.11556).

[Note: each rank drops its own] As under DDP, each rank draws for its own batch. So no recorded pass tells what the next
one calls, and where parameters are gathered no program is made of training passes: ranks agree on each gather, as with
`paths: by_rank`. Ranks that send each other something within a layer have to call the same ones.
"""

from __future__ import annotations

from torch import nn

from shardwise.errors import ModelError

_NAMES = ("layerdrop", "layer_drop", "speech_encoder_layerdrop")
"""Attributes with the share that is skipped: of models of transformers, or of their configurations; of torchaudio's."""


def dropped_layers(model: nn.Module) -> str:
    """What in `model` skips layers at random in a training forward, in words; empty if nothing does."""
    for name, module in model.named_modules():
        for owner in (module, getattr(module, "config", None)):
            for attribute in _NAMES:
                share = getattr(owner, attribute, 0)
                if type(share) in (int, float) and share > 0:
                    what = name or type(model).__name__
                    return f"{what} skips layers at random in training ({attribute} {share})"
    return ""


def refuse_dropped_layers(model: nn.Module, why: str) -> None:
    """Raise `ModelError` if a training forward of `model` skips layers at random; `why` it must not, in words."""
    what = dropped_layers(model)
    if what:
        raise ModelError(
            f"{what}, and {why}. Set it to 0: with transformers, from_pretrained(..., layerdrop=0), or "
            f"encoder_layerdrop=0 and decoder_layerdrop=0."
        )
