"""Memory shared by the ranks of one host: how they find each other, lend each other bytes, and read one copy."""

from shardwise.comm.shm.collectives import Shared
from shardwise.comm.shm.neighbours import Neighbours

__all__ = ["Neighbours", "Shared"]
