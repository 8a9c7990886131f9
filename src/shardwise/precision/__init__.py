"""Numbers: what forward is fed, the loss scale, and the norm and clipping of gradients over any placement."""

from shardwise.precision.cast import cast_floating
from shardwise.precision.norm import norm_of, norms_of
from shardwise.precision.scaling import LossScaler
from shardwise.precision.verdict import Verdict, clip, scale_gradients

__all__ = ["LossScaler", "Verdict", "cast_floating", "clip", "norm_of", "norms_of", "scale_gradients"]
