"""The files of the disk tier: aligned direct I/O on several threads, page-aligned buffers, a folder that belongs to one
job.

Above `devices`, beside `comm`: this package knows neither ranks nor tables. Checkpoints are written through the same
calls.

Names are imported on first use, so a model that is sharded without tiers does not wait for these imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.tiers.align import PAGE, Region, layout
    from shardwise.tiers.buffers import BufferPool, Stage, pages, tensors_in_pages
    from shardwise.tiers.calls import Calls, SystemCalls
    from shardwise.tiers.copying import copy_range
    from shardwise.tiers.direct import open_direct, read_at, write_at
    from shardwise.tiers.disk_file import DiskFile
    from shardwise.tiers.folder import LeftBehind, TierFolder, folder_of, job_of_process
    from shardwise.tiers.holder import Holder
    from shardwise.tiers.io_queue import BLOCK_BYTES, DEPTH, IoQueue
    from shardwise.tiers.mounts import check_local
    from shardwise.tiers.pending import Pending
    from shardwise.tiers.sliced_file import SlicedFile
    from shardwise.tiers.slices import Step, steps, walk

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
    "SlicedFile",
    "Stage",
    "Step",
    "SystemCalls",
    "TierFolder",
    "check_local",
    "copy_range",
    "folder_of",
    "job_of_process",
    "layout",
    "open_direct",
    "pages",
    "read_at",
    "steps",
    "tensors_in_pages",
    "walk",
    "write_at",
]

_HOMES = {
    "BLOCK_BYTES": "shardwise.tiers.io_queue",
    "DEPTH": "shardwise.tiers.io_queue",
    "PAGE": "shardwise.tiers.align",
    "BufferPool": "shardwise.tiers.buffers",
    "Calls": "shardwise.tiers.calls",
    "DiskFile": "shardwise.tiers.disk_file",
    "Holder": "shardwise.tiers.holder",
    "IoQueue": "shardwise.tiers.io_queue",
    "LeftBehind": "shardwise.tiers.folder",
    "Pending": "shardwise.tiers.pending",
    "Region": "shardwise.tiers.align",
    "SlicedFile": "shardwise.tiers.sliced_file",
    "Stage": "shardwise.tiers.buffers",
    "Step": "shardwise.tiers.slices",
    "SystemCalls": "shardwise.tiers.calls",
    "TierFolder": "shardwise.tiers.folder",
    "check_local": "shardwise.tiers.mounts",
    "copy_range": "shardwise.tiers.copying",
    "folder_of": "shardwise.tiers.folder",
    "job_of_process": "shardwise.tiers.folder",
    "layout": "shardwise.tiers.align",
    "open_direct": "shardwise.tiers.direct",
    "pages": "shardwise.tiers.buffers",
    "read_at": "shardwise.tiers.direct",
    "steps": "shardwise.tiers.slices",
    "tensors_in_pages": "shardwise.tiers.buffers",
    "walk": "shardwise.tiers.slices",
    "write_at": "shardwise.tiers.direct",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.tiers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
