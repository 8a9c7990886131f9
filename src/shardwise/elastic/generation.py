"""What the engine knows of a world that changes."""

from shardwise.comm.generation import Membership, Regrouped

__all__ = ["Membership", "Regrouped"]
