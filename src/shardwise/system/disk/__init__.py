"""The files of the disk tier: aligned direct I/O on several threads, page-aligned buffers, a folder that belongs to one
job.

Above `devices`, beside `comm`: this package knows neither ranks nor tables. Checkpoints are written through the same
calls.

Names are imported on first use, so a model that is sharded without tiers does not wait for these imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.system.disk.align import PAGE, layout
    from shardwise.system.disk.calls import SystemCalls
    from shardwise.system.disk.direct import open_direct, write_at
    from shardwise.system.disk.disk_file import DiskFile
    from shardwise.system.disk.holder import Holder
    from shardwise.system.disk.io_queue import IoQueue
    from shardwise.system.disk.mounts import check_local, is_memory
    from shardwise.system.disk.page_buffers import BufferPool, Stage, pages, private_pages, tensors_in_pages
    from shardwise.system.disk.pending import Patience, Pending
    from shardwise.system.disk.removals import Removals
    from shardwise.system.disk.sliced_file import SlicedFile
    from shardwise.system.disk.slices import Step
    from shardwise.system.disk.tier_folder import (
        TierFolder,
        job_of_process,
        remove_files_beside,
    )

__all__ = [
    "PAGE",
    "BufferPool",
    "DiskFile",
    "Holder",
    "IoQueue",
    "Patience",
    "Pending",
    "Removals",
    "SlicedFile",
    "Stage",
    "Step",
    "SystemCalls",
    "TierFolder",
    "check_local",
    "is_memory",
    "job_of_process",
    "layout",
    "open_direct",
    "pages",
    "private_pages",
    "remove_files_beside",
    "tensors_in_pages",
    "write_at",
]

_HOMES = {
    "PAGE": "shardwise.system.disk.align",
    "BufferPool": "shardwise.system.disk.page_buffers",
    "DiskFile": "shardwise.system.disk.disk_file",
    "Holder": "shardwise.system.disk.holder",
    "IoQueue": "shardwise.system.disk.io_queue",
    "Patience": "shardwise.system.disk.pending",
    "Pending": "shardwise.system.disk.pending",
    "Removals": "shardwise.system.disk.removals",
    "SlicedFile": "shardwise.system.disk.sliced_file",
    "Stage": "shardwise.system.disk.page_buffers",
    "Step": "shardwise.system.disk.slices",
    "SystemCalls": "shardwise.system.disk.calls",
    "TierFolder": "shardwise.system.disk.tier_folder",
    "check_local": "shardwise.system.disk.mounts",
    "is_memory": "shardwise.system.disk.mounts",
    "job_of_process": "shardwise.system.disk.tier_folder",
    "layout": "shardwise.system.disk.align",
    "open_direct": "shardwise.system.disk.direct",
    "pages": "shardwise.system.disk.page_buffers",
    "private_pages": "shardwise.system.disk.page_buffers",
    "remove_files_beside": "shardwise.system.disk.tier_folder",
    "tensors_in_pages": "shardwise.system.disk.page_buffers",
    "write_at": "shardwise.system.disk.direct",
}

__getattr__ = imported_when_used(__name__, _HOMES)
