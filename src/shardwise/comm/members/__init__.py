"""Which processes are ranks, from one generation to the next: what they and their launcher write to each other."""

from shardwise.comm.members.departure import DEPARTURE
from shardwise.comm.members.messages import News, Said
from shardwise.comm.members.post import Post, generation_prefix

__all__ = ["DEPARTURE", "News", "Post", "Said", "generation_prefix"]
