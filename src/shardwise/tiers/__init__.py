"""The disk tier's files: aligned direct I/O by several threads, buffers on pages, a folder that one job has.

Above `devices`, beside `comm`: no ranks, no tables. Checkpoints are written through the same calls.
"""

from shardwise.tiers.align import PAGE, Region, layout
from shardwise.tiers.calls import Calls, SystemCalls
from shardwise.tiers.direct import open_direct, read_at, write_at
from shardwise.tiers.disk_file import DiskFile
from shardwise.tiers.folder import LeftBehind, TierFolder
from shardwise.tiers.holder import Holder
from shardwise.tiers.io_queue import BLOCK_BYTES, DEPTH, IoQueue
from shardwise.tiers.mounts import check_local
from shardwise.tiers.pages import BufferPool, Stage, pages
from shardwise.tiers.pending import Pending
from shardwise.tiers.walk import Step, steps, walk

__all__ = [
    "BLOCK_BYTES",
    "DEPTH",
    "PAGE",
    "BufferPool",
    "Calls",
    "DiskFile",
    "Holder",
    "IoQueue",
    "LeftBehind",
    "Pending",
    "Region",
    "Stage",
    "Step",
    "SystemCalls",
    "TierFolder",
    "check_local",
    "layout",
    "open_direct",
    "pages",
    "read_at",
    "steps",
    "walk",
    "write_at",
]
