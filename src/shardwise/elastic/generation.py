"""The interface through which the engine follows changes of its world."""

from shardwise.comm.generation import Membership, Regrouped

__all__ = ["Membership", "Regrouped"]
