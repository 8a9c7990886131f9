"""Numbers: what forward is fed, and the norm and clipping of gradients over any placement."""

from shardwise.precision.cast import cast_floating
from shardwise.precision.verdict import Verdict, clip

__all__ = ["Verdict", "cast_floating", "clip"]
