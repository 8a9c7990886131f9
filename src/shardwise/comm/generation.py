"""Generations of a `World`: see `regrouping.py`. And the names of what they leave in the folder of their host."""

from __future__ import annotations

from shardwise.comm import regrouping
from shardwise.comm.world import World
from shardwise.system.job_folder import BAD_BATCH, LEFT_OUT, RECORD_PATH

__all__ = ["BAD_BATCH", "LEFT_OUT", "RECORD_PATH", "Membership", "Regrouped"]

Membership = regrouping.Membership[World]
Regrouped = regrouping.Regrouped[World]
