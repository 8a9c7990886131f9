"""The world of ranks, transports between them, collectives over named axes."""

from shardwise.comm.collectives import Buffers, Collectives, Communicator
from shardwise.comm.data_group import DataGroup, ExchangeOn
from shardwise.comm.group import Exchange, Group, link_between
from shardwise.comm.line import Line, Passing, Started
from shardwise.comm.mixed_sums import add_to, put_scaled
from shardwise.comm.same_batch import BatchCheck, require_same_batch
from shardwise.comm.shared_buffers import Part, SharedBuffer, SharedBuffers
from shardwise.comm.small_messages import sum_small
from shardwise.comm.transport.threads import PostOffice, ThreadTransport
from shardwise.comm.watch.journal import Journal
from shardwise.comm.watch.startup_barrier import StartupBarrier
from shardwise.comm.watch.status_board import last_status
from shardwise.comm.work import Done, LinkError, Work
from shardwise.comm.world import Host, Watched, World

__all__ = [
    "BatchCheck",
    "Buffers",
    "Collectives",
    "Communicator",
    "DataGroup",
    "Done",
    "Exchange",
    "ExchangeOn",
    "Group",
    "Host",
    "Journal",
    "Line",
    "LinkError",
    "Part",
    "Passing",
    "PostOffice",
    "SharedBuffer",
    "SharedBuffers",
    "Started",
    "StartupBarrier",
    "ThreadTransport",
    "Watched",
    "Work",
    "World",
    "add_to",
    "last_status",
    "link_between",
    "put_scaled",
    "require_same_batch",
    "sum_small",
]
