"""A forward and backward without memory and without arithmetic: what the model itself will hold."""

from shardwise.rehearsal.rehearse import Around, Loss, nothing_around, rehearse
from shardwise.rehearsal.stages import StageRehearsal

__all__ = ["Around", "Loss", "StageRehearsal", "nothing_around", "rehearse"]
