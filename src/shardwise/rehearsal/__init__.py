"""A forward and backward without memory and without arithmetic: what the model itself will hold."""

from shardwise.rehearsal.rehearse import Loss, rehearse
from shardwise.rehearsal.stages import StageRehearsal

__all__ = ["Loss", "StageRehearsal", "rehearse"]
