"""A forward and backward without memory and without arithmetic: what the model itself will hold."""

from shardwise.rehearsal.rehearse import Loss, rehearse

__all__ = ["Loss", "rehearse"]
