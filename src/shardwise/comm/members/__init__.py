"""Membership of an elastic job: the messages between its processes and their launcher."""

from shardwise.comm.members.channels import ChannelMemory, LauncherChannel, generation_prefix, scope_of
from shardwise.comm.members.departure import DEPARTURE
from shardwise.comm.members.launcher_address import LauncherAddress
from shardwise.comm.members.member_messages import TAKEN_FOR_LOST, Announcement, MemberMessage, axes_of_text
from shardwise.comm.members.pace import Pace

__all__ = [
    "DEPARTURE",
    "TAKEN_FOR_LOST",
    "Announcement",
    "ChannelMemory",
    "LauncherAddress",
    "LauncherChannel",
    "MemberMessage",
    "Pace",
    "axes_of_text",
    "generation_prefix",
    "scope_of",
]
