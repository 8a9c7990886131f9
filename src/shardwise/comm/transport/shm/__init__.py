"""Memory shared by the ranks of one host: how they find each other, lend each other bytes, and read one copy.

Collectives read in place: a rank lends a block of its file, and the others copy or add from it. Fresh pages of a file
cost five times a copy into warm ones, so few blocks are in rotation, and results that stay are moved out at once. No
thread helps: a rank that waits sleeps on a futex.
"""

from shardwise.comm.transport.shm.neighbours import Neighbours
from shardwise.comm.transport.shm.shm_collectives import Shared

__all__ = ["Neighbours", "Shared"]
