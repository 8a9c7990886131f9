"""Refusals before anything is changed."""

from __future__ import annotations

from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.sequence import hugging_face
from shardwise.parallel.sequence.routing import refused_attention
from shardwise.plan import Plan

_MIXES = (nn.RNNBase, nn.RNNCellBase, nn.Conv1d, nn.ConvTranspose1d)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise for a model or a plan for which a rank would compute wrong results from a part of the tokens."""
    if plan.compile is not None:
        raise ConfigError(
            f"The plan compiles with {plan.compile!r} and splits sequences over sp, whose attention sends messages "
            f"that cannot be compiled. Leave out compile, or sp."
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _ATTENTION):
            raise refused_attention(f"{name or 'The model'} ({kind})")
        if isinstance(module, _MIXES) and getattr(module, "kernel_size", None) != (1,):
            raise ModelError(
                f"{name or 'The model'} is a {kind}, which reads neighbouring tokens, and over sp those are on other "
                f"ranks. Leave sp out of the mesh."
            )
    hugging_face.check(model)


def is_ring(model: nn.Module, plan: Plan, num_shares: int) -> bool:
    """Whether attention goes around a ring: if the plan says so, or if heads are known not to divide by
    `num_shares`."""
    if plan.sequence.attention != "auto":
        return plan.sequence.attention == "ring"
    return any(number % num_shares for number in hugging_face.num_heads(model))
