"""Membership of an elastic job: the messages between its processes and their launcher."""

from shardwise.comm.members.channels import ChannelMemory, LauncherChannel, generation_prefix, scope_of
from shardwise.comm.members.departure import DEPARTURE
from shardwise.comm.members.member_messages import TAKEN_FOR_LOST, Announcement, MemberMessage, meshes_of_text
from shardwise.comm.members.pace import Pace

__all__ = [
    "DEPARTURE",
    "TAKEN_FOR_LOST",
    "Announcement",
    "ChannelMemory",
    "LauncherChannel",
    "MemberMessage",
    "Pace",
    "generation_prefix",
    "meshes_of_text",
    "scope_of",
]
