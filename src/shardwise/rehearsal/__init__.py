"""A forward and backward without memory and without arithmetic, to measure what activations a model will hold."""

from shardwise.rehearsal.rehearse import Around, Loss, Take, Work, nothing_around, rehearse, rehearse_work
from shardwise.rehearsal.stages import StageRehearsal
from shardwise.rehearsal.twin import Twin

__all__ = ["Around", "Loss", "StageRehearsal", "Take", "Twin", "Work", "nothing_around", "rehearse", "rehearse_work"]
