"""What is particular to NCCL, and to RCCL, which is NCCL for AMD's GPUs. Run by one rank, on one H200 (docs/gpus.md);
not between GPUs.

[Note: one host] There is no transport over CUDA IPC for the ranks of a host. Between GPUs NCCL maps the memory of its
peers by itself; there is nothing to gain. Several ranks of one GPU, which NCCL refuses, are a set-up for tests, and
there threads on streams of their own (`tests/device/one_device.py`) have the real allocator, too, and make what does
not wait fail. Handles of torch's expandable segments, which the launcher sets, need `pidfd_getfd`, which containers
refuse (pytorch#165685).

[Note: aborts] Communicators that are aborted one after the other can wait for each other, since each abort waits for
kernels that wait for a peer, which is aborting another one first (pytorch#119797). Torch groups aborts, as we do, but
only for all process groups of the process at once. Torch's own error handling is switched off
(`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, as its `_abort_process_group` demands): it would end the process before the fault
is read, or end kernels, with garbage, before a fault is known. The watchdog takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.transport.process_groups import ProcessGroup, TorchGroups

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NO_HANDLING = "0"
_TEAR_DOWN = "1"  # what torchrun sets by default


def leave_errors_to_the_watch() -> None:
    """Call before the first communicator is created. A value that the user has chosen is kept."""
    if os.environ.get(ERROR_HANDLING, _TEAR_DOWN) == _TEAR_DOWN:
        os.environ[ERROR_HANDLING] = NO_HANDLING


class NcclGroups(TorchGroups):
    """Process groups whose kernels take precedence over computing ones, and whose aborts are grouped."""

    def _options(self, *, is_urgent: bool) -> Any:
        options_of: Any = dist.ProcessGroupNCCL.Options
        return options_of(is_high_priority_stream=is_urgent)

    def abort(self, groups: Iterable[ProcessGroup]) -> None:
        """See [Note: aborts]."""
        together = list(groups)
        if not together:
            return
        backend: Any = together[0]._get_backend(torch.device(self._device.type))
        backend._group_start()
        try:
            for group in together:
                group.abort()
        finally:
            backend._group_end()
