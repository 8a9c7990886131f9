"""`horovod.torch`: `import shardwise.integrations.horovod.torch as hvd`."""

from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.errors import HostsUpdatedInterrupt
from shardwise.integrations.horovod.ops import poll, synchronize
from shardwise.integrations.horovod.torch import data_movement, elastic, mpi_ops, reductions
from shardwise.integrations.horovod.torch.compression import Compression
from shardwise.integrations.horovod.torch.data_movement import *  # noqa: F403
from shardwise.integrations.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwise.integrations.horovod.torch.optimizer import DistributedOptimizer
from shardwise.integrations.horovod.torch.reductions import *  # noqa: F403
from shardwise.integrations.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "mpi_ops",
    "poll",
    "synchronize",
]
__all__ += basics.__all__
__all__ += data_movement.__all__
__all__ += reductions.__all__
