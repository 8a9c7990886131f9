"""Numerics: casting of inputs, the loss scale, and the norm and clipping of gradients in any placement."""

from shardwise.optim.precision.cast import cast_floating
from shardwise.optim.precision.late_float import LateFloat, Norm
from shardwise.optim.precision.loss_scaler import LossScaler
from shardwise.optim.precision.norm import check_copies, norm_of, norms_of
from shardwise.optim.precision.verdict import Agreeing, NoNews, Verdict, clip, scale_gradients

__all__ = [
    "Agreeing",
    "LateFloat",
    "LossScaler",
    "NoNews",
    "Norm",
    "Verdict",
    "cast_floating",
    "check_copies",
    "clip",
    "norm_of",
    "norms_of",
    "scale_gradients",
]
